"""Which images a step sees, in crops. A pure function of the step: no worker holds any state."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64
from torch.utils.data import Dataset

from ssl_bench.data.files.readable import with_a_way_out
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError, UnreadableImage

# Keeps the streams of one seed apart.
_ORDER, _SAMPLE, _STEP = range(3)


@runtime_checkable
class Samples(Protocol):
    """Images with their labels, decoded when they are asked for, such as an `ImageSet`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True)
class Substituted:
    """Images of which each that cannot be read has in its place the next one that can."""

    images: Samples

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> Sample:
        for further in range(len(self)):
            with suppress(UnreadableImage):
                return self.images[(index + further) % len(self)]
        raise DataError(f"none of the {len(self)} images can be read; fetch them again")


class Remaining(NamedTuple):
    """A piece in which others stand for images that were left out, given by their indices."""

    crops: Any
    left_out: tuple[int, ...]


def in_memory(samples: Samples) -> list[Sample]:
    """Decode everything once. Worker processes share the memory."""
    decoded = (samples[index] for index in range(len(samples)))
    try:
        return [replace(sample, mask=None, boxes=None) for sample in decoded]
    except UnreadableImage as error:
        raise with_a_way_out(error) from error


@dataclass(frozen=True)
class Share:
    """The part of every batch that one process takes in one go.

    Attributes:
        batch_size: Images in an optimizer step, over all processes and accumulations.
        num_parts: Accumulated parts a step.
    """

    batch_size: int
    num_parts: int = 1
    rank: int = 0
    num_ranks: int = 1

    @property
    def size(self) -> int:
        return self.batch_size // (self.num_parts * self.num_ranks)


@dataclass(frozen=True)
class Batches(Dataset[Any]):
    """Piece number -> the crops of that piece of a part of a batch.

    Step s has the parts s * num_parts onwards, part p the pieces p * pieces onwards. The views of
    an image are the same in pieces of any size.

    An image that cannot be read comes back as the `DataError` itself, since an exception would
    lose its one line on the way out of a worker process. Where `images` are `Substituted`, a piece
    that lacks one comes as `Remaining`.

    Attributes:
        ids: Of the images, where some may be substituted.
        pieces: That each part is cut in, equally many images each, give or take one.
        repeats: Times that each image of an epoch comes, one after the other, each time with
            randomness of its own. An epoch is as long as without, and so has as many times fewer
            images, drawn anew.

    Source: repeated augmentation, https://arxiv.org/abs/1901.09335, as `RASampler` of
    https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/samplers.py
    has it; there the repeats of an image go to different processes, here to the same one.
    """

    images: Samples
    cut: Callable[[list[Sample], list[np.random.Generator]], Any]
    share: Share
    seed: int
    repeats: int = 1
    pieces: int = 1
    ids: Sequence[str] = ()

    def __getitem__(self, piece: int) -> Any:
        part, place = divmod(piece, self.pieces)
        first, end = (self.share.size * edge // self.pieces for edge in (place, place + 1))
        keys = self.keys(part)[first:end]
        try:
            opened = {index: self.images[index] for index in sorted({key[1] for key in keys})}
        except UnreadableImage as error:
            return with_a_way_out(error)
        except DataError as error:
            return error
        samples = [opened[index] for _, index, _ in keys]
        crops = self.cut(samples, [sample_generator(self.seed, *key) for key in keys])
        left_out = tuple(i for i in opened if self.ids and opened[i].image_id != self.ids[i])
        return Remaining(crops, left_out) if left_out else crops

    def seen(self, steps: int) -> Bool[np.ndarray, " images"]:
        """Which images so many steps have, over all processes."""
        seen, in_epoch = np.zeros(len(self.images), bool), len(self.images) // self.share.batch_size
        for epoch in range(-(-steps // in_epoch)):
            taken = min(steps - epoch * in_epoch, in_epoch) * self.share.batch_size
            seen[epoch_order(len(self.images), self.seed, epoch)[: -(-taken // self.repeats)]] = (
                True
            )
            if seen.all():
                break
        return seen

    def keys(self, part: int) -> list[tuple[int, int, int]]:
        """(epoch, index, repeat) of every image of a part."""
        share = self.share
        step, place = divmod(part, share.num_parts)
        epoch, batch = divmod(step, len(self.images) // share.batch_size)
        start = batch * share.batch_size + (place * share.num_ranks + share.rank) * share.size
        order = epoch_order(len(self.images), self.seed, epoch)
        numbers = (divmod(number, self.repeats) for number in range(start, start + share.size))
        return [(epoch, int(order[image]), repeat) for image, repeat in numbers]


@lru_cache(maxsize=2)
def epoch_order(num_images: int, seed: int, epoch: int) -> Int64[np.ndarray, " images"]:
    """Every image once, shuffled anew each epoch; what fills no whole batch waits for the next."""
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_images)


def sample_generator(seed: int, epoch: int, index: int, repeat: int = 0) -> np.random.Generator:
    """Randomness of one image in one epoch, whatever batch or process it lands in."""
    key = (_SAMPLE, seed, epoch, index)
    # The first one's is what it would be without repeats.
    return np.random.default_rng((*key, repeat) if repeat else key)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of PyTorch's own generators for one step of one process."""
    (state,) = np.random.SeedSequence((_STEP, seed, step, rank)).generate_state(1, np.uint64)
    return int(state)
