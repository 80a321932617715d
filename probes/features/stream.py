"""Samples prepared for the encoder, decoded a few ahead of it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from ssl_bench.data.samples import ImageSet, Sample

T = TypeVar("T")


def read_ahead(
    images: ImageSet, indices: Sequence[int], prepare: Callable[[Sample], T], *, workers: int
) -> Iterator[T]:
    """Prepared samples in the order of `indices`, decoded by threads."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[T]] = deque()
        for index in indices:
            waiting.append(pool.submit(lambda i: prepare(images[i]), index))
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last one may be shorter, and none is left out."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
