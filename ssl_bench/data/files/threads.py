"""Work on many files at once."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Event
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 8
_AHEAD = 1024


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], *, together: int = 1
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with what `work` makes of it, in order; items are taken as they are needed.

    Closing it waits for what is in work and begins nothing more.

    A thread takes some `together` in one go, for work that is shorter than handing it over.
    """
    stopped = Event()

    def work_on_all(chunk: list[Item]) -> list[tuple[Item, Result]]:
        return [(item, work(item)) for item in chunk if not stopped.is_set()]

    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, together)), [])
    pool = ThreadPoolExecutor(_THREADS)
    try:
        # Piece by piece, because the pool would queue a million at once.
        while piece := list(islice(chunks, _AHEAD)):
            for pairs in pool.map(work_on_all, piece):
                yield from pairs
    finally:
        # Whoever is interrupted does not wait for what nobody wants any more.
        stopped.set()
        pool.shutdown(cancel_futures=True)
