"""Which training images fit the heads and which choose the learning rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class TrainingSplit:
    """Indices into a training set, and which of them are held out.

    Attributes:
        indices: Of the images that are used, ascending.
        held_out: Positions in `indices` that no head is fitted to.
    """

    indices: tuple[int, ...]
    held_out: frozenset[int]

    @classmethod
    def draw(
        cls, images: ImageSet, *, at_most: int | None, holdout: float, seed: int
    ) -> "TrainingSplit":
        """Draw the images that are used, and a share of them that is held out.

        Raises:
            ConfigurationError: none are to be used.
            DataError: too few images to fit heads and to choose between them.
        """
        if at_most is not None and at_most < 1:
            raise ConfigurationError(f"train_images must be 1 or more, or null, got {at_most}")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=generator).tolist()
        indices = tuple(sorted(order[:at_most]))
        held_out = max(1, round(holdout * len(indices))) if holdout else 0
        if len(indices) <= held_out:
            raise DataError(
                f"{images.name} {images.split} gives {len(indices)} training images, expected at "
                f"least {held_out + 1}: {held_out} to choose the learning rate, the others to train"
            )
        chosen = torch.randperm(len(indices), generator=generator)[:held_out]
        return cls(indices, frozenset(chosen.tolist()))

    def entries(self, views: int) -> Int64[Tensor, " entries"]:
        """All views of the images that heads are fitted to, as entries of the feature cache."""
        return torch.tensor(
            [
                position * views + view
                for position in range(len(self.indices))
                if position not in self.held_out
                for view in range(views)
            ]
        )

    def every_entry(self, views: int) -> Int64[Tensor, " entries"]:
        """All views of all images, held out or not."""
        return torch.arange(len(self.indices) * views)

    def ids(self, images: ImageSet) -> list[str]:
        return [images.ids[index] for index in self.indices]

    def ids_sha256(self, images: ImageSet) -> str:
        """Hexadecimal digest of the ids, one a line."""
        return digest(self.ids(images))


def digest(ids: Sequence[str]) -> str:
    return sha256(
        "".join(f"{image_id}\n" for image_id in ids).encode(errors="surrogateescape")
    ).hexdigest()
