"""Samples prepared for the encoder, decoded a few ahead of it, and its features of a batch.

And the state of such work, kept now and then.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.features import FeatureExtractor
from ssl_bench.system.device import to_host
from ssl_bench.system.files import open_trusted, write_atomically
from ssl_bench.system.process import reraise_out_of_memory

K = TypeVar("K")
T = TypeVar("T")
_CPU_PIXELS = 2**19


def map_ahead(make: Callable[[K], T], keys: Iterable[K], *, workers: int, most: int) -> Iterator[T]:
    """What `make` gives for each key, in their order, made by threads at most so many ahead."""
    pool = ThreadPoolExecutor(workers)
    try:
        waiting: deque[Future[T]] = deque()
        for key in keys:
            waiting.append(pool.submit(make, key))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_ahead(
    images: ImageSet, indices: Sequence[int], prepare: Callable[[Sample], T], *, workers: int
) -> Iterator[T]:
    """Prepared samples in the order of `indices`, decoded by threads."""
    return map_ahead(lambda i: prepare(images[i]), indices, workers=workers, most=4 * workers)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last one may be shorter, and none is left out."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


def images_per_pass(batch_size: int, image_size: int, device: torch.device) -> int:
    """How many squares of that side pass together: on a CPU so many that progress is seen.

    More than half a million pixels at once are no faster there, and take seconds each.
    """
    fitting = max(1, _CPU_PIXELS // image_size**2)
    return min(batch_size, fitting) if device.type == "cpu" else batch_size


def fetch_finite(
    extractor: FeatureExtractor,
    sums: Float[Tensor, "features batch"],
    ids: Sequence[str],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """What was made of the features of a batch, in host memory; the host waits once, also for sums.

    Raises:
        CheckpointError: the features are not finite.
    """
    sums, *found = to_host([sums, *tensors])
    extractor.require_finite(sums, ids)
    return found


def extract(
    extractor: FeatureExtractor, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str]
) -> tuple[dict[int, Float[Tensor, "batch rows cols dim"]], Float[Tensor, "layers batch"]]:
    """Features of a batch by layer, of an extractor of one facet, and what `check` of it wants.

    Raises:
        CheckpointError: they are not finite, where the host need not wait to know.
    """
    features, sums = extractor.extract_unchecked(images)
    if not sums.is_cuda:
        extractor.require_finite(sums, ids)
    (facet,) = extractor.facets
    return {layer: facets[facet] for layer, facets in features.items()}, sums


@dataclass
class KeptState:
    """State of work that may be killed, written now and then.

    Attributes:
        path: Named after everything that the work depends on; safe to delete at any time.
        minutes: Between two writings.
        say: Gets a line where work goes on or its file is damaged.
    """

    path: Path
    minutes: float
    say: Callable[[str], None]
    _written: float = field(default_factory=time.monotonic, init=False, repr=False)

    @cached_property
    def found(self) -> Mapping[str, Any]:
        """What an earlier process wrote last, on the CPU; nothing if there is no such file."""
        try:
            with open_trusted(self.path) as file:
                state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self.say(f"{self.path} is not used ({error.strerror}); starting from the beginning")
            return {}
        # Whatever the bytes are, torch or zipfile says so with an error of its own.
        except Exception as error:
            reraise_out_of_memory(error)
            self.say(f"{self.path} is damaged; starting from the beginning")
            return {}
        self.say(f"going on from {self.path}")
        return state

    def is_due(self) -> bool:
        return time.monotonic() - self._written >= 60 * self.minutes

    def write(self, state: Mapping[str, Any]) -> None:
        """Keep a state of tensors and plain values.

        Raises:
            MachineError: the folder cannot be written or the disk is full.
        """
        write_atomically(self.path, lambda file: torch.save(dict(state), file))
        self._written = time.monotonic()
