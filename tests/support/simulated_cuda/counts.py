"""What one unit of work costs: more units beside fewer, so that what comes once does not count."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.simulated_cuda.ledger import LEDGER, Ledger


@dataclass(frozen=True)
class Counts:
    """Of one unit.

    Attributes:
        waits: For what the host reads back.
        uploads: From memory that is not pinned.
        places: Files and lines, with how often each waits or uploads.
    """

    waits: float
    uploads: float
    places: dict[str, float]


def counts_of(work: Callable[[int], object], few: int, many: int) -> Counts:
    """What `many` units cost more than `few`, by unit."""
    # Moves the encoder, for one.
    work(few)
    found = [_counted(work, number) for number in (few, many)]
    share = 1 / (many - few)
    waits, uploads = (
        (getattr(found[1], kind).total() - getattr(found[0], kind).total()) * share
        for kind in ("waits", "uploads")
    )
    places: dict[str, float] = {}
    for kind in ("waits", "uploads"):
        after, before = (getattr(ledger, kind) for ledger in reversed(found))
        for event in after.keys() | before.keys():
            name = f"{event.where} {event.what}"
            places[name] = places.get(name, 0) + (after[event] - before[event]) * share
    return Counts(waits, uploads, {name: n for name, n in sorted(places.items()) if n})


def _counted(work: Callable[[int], object], number: int) -> Ledger:
    with LEDGER.counting() as found:
        work(number)
    return found
