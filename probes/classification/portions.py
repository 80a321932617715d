"""Which training images heads are fitted to, and which choose between them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from probes.classification.probe import LinearClassification
from probes.features.shots import Shots, shots_of
from probes.features.split import TrainingSplit, digest
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError


@dataclass(frozen=True)
class Portion:
    """Positions among the images whose features are there.

    Attributes:
        fitted: What the heads that are scored are fitted to.
        before: What those are fitted to that choose; the same where these are scored themselves.
        choosing: What they are asked about; None where nothing chooses.
    """

    fitted: Int64[Tensor, " fitted"]
    before: Int64[Tensor, " before"]
    choosing: Int64[Tensor, " choosing"] | None

    @property
    def fits_twice(self) -> bool:
        return self.choosing is not None and self.before is not self.fitted


@dataclass(frozen=True)
class Portions:
    """All training images that some head needs, and how they are divided.

    Attributes:
        indices: Of the images, ascending.
        by_shots: The portion of each draw, by the images of a class that it has; by 0 the only one
            where none are drawn.
    """

    images: ImageSet
    indices: tuple[int, ...]
    by_shots: Mapping[int, Sequence[Portion]]

    @classmethod
    def of(cls, probe: LinearClassification, images: ImageSet, *, seed: int) -> "Portions":
        """As `probe` describes.

        Raises:
            DataError: the training images, or those of a class, are too few.
        """
        counts = shots_of(probe.shots)
        if not counts:
            return cls._of_all(probe, images, seed=seed)
        most = max(count + probe.choosing(count) for count in counts)
        shots = Shots.draw(images, most=most, draws=probe.draws, seed=seed)
        by_shots = {
            count: [_drawn(probe, shots, draw, count) for draw in range(probe.draws)]
            for count in counts
        }
        return cls(images, shots.indices, by_shots)

    @classmethod
    def _of_all(cls, probe: LinearClassification, images: ImageSet, *, seed: int) -> "Portions":
        split = TrainingSplit.draw(
            images, at_most=probe.train_images, holdout=probe.holdout, seed=seed
        )
        held_out = torch.tensor(sorted(split.held_out)) if split.held_out else None
        portion = Portion(split.every_entry(1), split.entries(1), held_out)
        return cls(images, split.indices, {0: [portion]})

    def ids_sha256(self, fitted: Int64[Tensor, " fitted"]) -> str:
        """Hexadecimal digest of the ids of what heads are fitted to, one a line."""
        return digest([self.images.ids[self.indices[n]] for n in fitted.tolist()])

    def require_two_classes(self, labels: Int64[Tensor, " images"]) -> None:
        """Refuse images to fit to that are of one class.

        Args:
            labels: Of all `indices`.

        Raises:
            DataError: they are.
        """
        for portion in itertools.chain(*self.by_shots.values()):
            found, images = labels[portion.before].unique().tolist(), self.images
            if len(found) < 2:
                raise DataError(
                    f"the {len(portion.before)} training images of {images.name} {images.split} "
                    f"that heads are fitted to are all of the class "
                    f"{images.class_names[found[0]]}, expected at least two classes; take more "
                    "with probe.train_images"
                )


def _drawn(probe: LinearClassification, shots: Shots, draw: int, count: int) -> Portion:
    fitted, choosing = shots.of(draw, count), probe.choosing(count)
    further = shots.of(draw, choosing, after=count) if choosing else None
    return Portion(fitted, fitted, further)
