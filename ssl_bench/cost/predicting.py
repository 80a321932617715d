"""What all units of a work take on devices that need not be here, and on one that is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ssl_bench.cost.counting import Count
from ssl_bench.cost.devices import Device
from ssl_bench.cost.places import RealPlace
from ssl_bench.cost.roofline import seconds
from ssl_bench.cost.this_machine import best_seconds
from ssl_bench.cost.work import Unit, Work, count

_MEASURED_ROUNDS = 3


@dataclass(frozen=True)
class UnitCost:
    """A unit on a device.

    Attributes:
        times: How often it comes.
        seconds: Predicted, each time.
        peak_bytes: Predicted, with all that it holds.
        measured: Seconds, where the device is here.
        measured_bytes: Most that torch's allocator held.
    """

    name: str
    times: int | float
    flops: float
    num_bytes: float
    launches: float
    waits: int | float
    seconds: float
    peak_bytes: float
    measured: float | None = None
    measured_bytes: float | None = None


@dataclass(frozen=True)
class WorkCost:
    """All of a work on a device; of pretraining, one epoch."""

    images: float
    units: Sequence[UnitCost]

    @property
    def seconds(self) -> float:
        return 1.0 * sum(unit.times * unit.seconds for unit in self.units)

    @property
    def measured(self) -> float | None:
        """None where a unit was not measured."""
        found = [(unit.times, unit.measured) for unit in self.units]
        known = [times * each for times, each in found if each is not None]
        return 1.0 * sum(known) if len(known) == len(found) else None

    @property
    def peak_bytes(self) -> float:
        return max(unit.peak_bytes for unit in self.units)

    def as_json(self) -> dict[str, Any]:
        return {"images": self.images, "units": [asdict(unit) for unit in self.units]}


def work_cost(content: Mapping[str, Any]) -> WorkCost:
    """From what `as_json` gave."""
    return WorkCost(content["images"], [UnitCost(**unit) for unit in content["units"]])


@dataclass
class Predictor:
    """Counts every unit once, whatever the number of devices.

    Attributes:
        counting: How a unit is counted.
        counts: Those that are known, by the name of the work and of the unit.
    """

    counting: Callable[[Unit], Count] = count
    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def predicted(self, name: str, work: Work, device: Device) -> WorkCost:
        """A work of this name on a device."""
        units = [self._unit(name, unit, device) for unit in work.units(device.memory)]
        return WorkCost(work.images, units)

    def measured(self, name: str, work: Work, device: Device, here: torch.device) -> WorkCost:
        """The same, each unit also done on the device that is here."""
        units = []
        for unit in work.units(device.memory):
            each, peak = _measured(unit, here)
            known = self._unit(name, unit, device)
            units.append(replace(known, measured=each, measured_bytes=peak))
        return WorkCost(work.images, units)

    def _unit(self, name: str, unit: Unit, device: Device) -> UnitCost:
        key = (name, unit.name)
        if key not in self.counts:
            self.counts[key] = self.counting(unit)
        asked = self.counts[key]
        return UnitCost(
            name=unit.name,
            times=unit.times,
            flops=asked.flops,
            num_bytes=asked.num_bytes,
            launches=asked.launches,
            waits=unit.waits,
            seconds=seconds(asked, device, unit.waits),
            peak_bytes=asked.peak_bytes,
        )


def _measured(unit: Unit, here: torch.device) -> tuple[float, float]:
    """Seconds and bytes; of work in parts, from steps of one and of two."""
    torch.cuda.reset_peak_memory_stats(here)
    step = unit.make(RealPlace(here), 1)
    first = best_seconds(step, here, _MEASURED_ROUNDS)
    if unit.parts > 1:
        del step
        step = unit.make(RealPlace(here), 2)
        another = best_seconds(step, here, _MEASURED_ROUNDS) - first
        first += another * (unit.parts - 1)
    peak = float(torch.cuda.max_memory_allocated(here))
    del step
    torch.cuda.empty_cache()
    return first, peak
