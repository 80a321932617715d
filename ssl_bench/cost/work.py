"""Work that has a price: what is done again and again, and how often."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ssl_bench.cost.counting import Count, Ledger
from ssl_bench.cost.places import HollowPlace, Place, hollow

Step = Callable[[], object]


@dataclass(frozen=True)
class Unit:
    """Something that is done again and again.

    Attributes:
        times: How often, in all of the work.
        make: Makes, on a place, what does it once, in so many parts.
        parts: How many parts it has.
        waits: How often the host waits for the device each time.
        differentiates: Gradients are asked of autograd.
    """

    name: str
    times: int | float
    make: Callable[[Place, int], Step]
    parts: int = 1
    waits: int | float = 0
    differentiates: bool = False


@runtime_checkable
class Work(Protocol):
    """What is priced."""

    @property
    def images(self) -> float:
        """How many images it takes, whatever is done with each."""
        ...

    def units(self, memory: float) -> Sequence[Unit]:
        """All that is done, on a device of so many bytes."""
        ...


def count(unit: Unit) -> Count:
    """What a unit asks of a GPU, without doing it; the peak includes all that it holds.

    The first time, which makes what stays, is left out.
    """
    place = HollowPlace(torch.device("cpu") if unit.differentiates else torch.device("cuda", 0))
    with hollow():
        first = count_on(place, unit, 1)
        if unit.parts == 1:
            return first
        second = count_on(place, unit, 2)
    another = second.plus(first.scaled(-1.0))
    return first.plus(another.scaled(unit.parts - 1.0))


def count_on(place: Place, unit: Unit, parts: int = 1) -> Count:
    """What a unit asks of a place, in so many parts."""
    with Ledger(place.device.type) as ledger:
        step = unit.make(place, parts)
        step()
        ledger.forget()
        step()
        return ledger.count()
