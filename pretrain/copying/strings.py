"""Random strings to copy, drawn and never stored.

A row of n letters is x_1 ... x_n | x_1 ... x_n . as tokens 0 to letters - 1, then `|`, then `.`:
2n + 2 of them. Of what is read, all but the stop, only what follows `|` has a target: n letters and
the stop.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from pretrain.crops.groups import taken
from ssl_bench.data.samples import Sample
from ssl_bench.models.encoder import IMAGENET_COLOURS, Colours

# Beside the letters: `|` and `.`.
NUM_MARKS = 2
# The length of an epoch; each has strings of its own, so that none comes twice.
STRINGS_AN_EPOCH = 32_000
# Keeps the tested strings apart from the streams of pretrain/runtime.
_TESTED = 4

Letters = Int64[Tensor, "batch length"]
Rows = Int64[Tensor, "batch row"]


def rows_of(strings: Letters, letters: int) -> Rows:
    """The rows in which these strings, of so many different letters, are copied."""
    delimiter = strings.new_full((len(strings), 1), letters)
    return torch.cat([strings, delimiter, strings, delimiter + 1], 1)


def fixed_strings(length: int, letters: int, count: int) -> Letters:
    """The same in every run, whatever its seed."""
    generator = np.random.default_rng((_TESTED, length, letters))
    return torch.from_numpy(generator.integers(letters, size=(count, length)))


@dataclass(frozen=True)
class StringMaker:
    """Draws a string for every sample, in the place of a crop of its image.

    Attributes:
        length: Letters of a string.
        letters: Different ones, equally likely.
    """

    length: int
    letters: int

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """None: there are no images."""
        del image_size, patch_size
        return ()

    def cut(
        self,
        samples: Iterable[Sample],
        generators: Iterable[np.random.Generator],
        sizes: Sequence[int],
    ) -> Letters:
        del samples, sizes
        drawn = [generator.integers(self.letters, size=self.length) for generator in generators]
        return torch.from_numpy(np.stack(drawn))

    def join(self, pieces: Iterable[Int64[Tensor, "_ length"]], device: torch.device) -> Letters:
        """All strings in one piece, on the device."""
        return torch.cat([taken(strings, device) for strings in pieces])

    def finish(
        self, groups: Letters, device: torch.device, colours: Colours = IMAGENET_COLOURS
    ) -> tuple[Rows]:
        """The rows of tokens."""
        del colours
        return (rows_of(groups.to(device, non_blocking=True), self.letters),)


@dataclass(frozen=True)
class GeneratedStrings:
    """An epoch of strings, as far as a run asks its data who they are: places to be filled."""

    name = "copying"
    split = "train"
    class_names = ()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"string{number:05d}" for number in range(STRINGS_AN_EPOCH))

    def __len__(self) -> int:
        return STRINGS_AN_EPOCH

    def __getitem__(self, index: int) -> Sample:
        return Sample(f"string{index:05d}", np.zeros((1, 1, 3), np.uint8))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.name} {len(self)}".encode()).hexdigest()
