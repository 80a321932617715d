"""A few training images of each class, drawn several times: n shots, and what is scored by them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from probes.features.labels import class_labels
from probes.features.shots import shot_metric
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Score
from ssl_bench.intervals import mean_estimate


@dataclass(frozen=True)
class Shots:
    """Training images of each class in the order in which each draw takes them.

    The first n are its n shots, so that few shots are among many. Which they are depends on the
    training images, the seed and the number of the draw: neither on an encoder nor on what else is
    asked.

    Attributes:
        indices: Of the images that some draw takes, ascending.
        positions: In `indices`.
    """

    indices: tuple[int, ...]
    positions: Int64[Tensor, "draws classes most"]

    @classmethod
    def draw(cls, images: ImageSet, *, most: int, draws: int, seed: int) -> "Shots":
        """Take so many images of each class, without reading them.

        Raises:
            DataError: a class has fewer, or nobody knows the classes of the images.
        """
        labels = np.array(class_labels(images), np.int64)
        _require_enough(images, labels, most)
        orders = [np.random.default_rng([seed, n]).permutation(len(labels)) for n in range(draws)]
        classes = range(len(images.class_names))
        taken = np.array(
            [[order[labels[order] == one][:most] for one in classes] for order in orders]
        )
        indices, positions = np.unique(taken, return_inverse=True)
        return cls(tuple(indices.tolist()), torch.from_numpy(positions.reshape(taken.shape)))

    def of(self, draw: int, count: int, *, after: int = 0) -> Int64[Tensor, " images"]:
        """Positions of so many images of each class, ascending, behind the first `after`."""
        return self.positions[draw, :, after : after + count].flatten().sort().values


def over_draws(draws: Sequence[Sequence[Score]], count: int) -> Iterator[Score]:
    """The mean of each score over the draws, and Student's interval of it over them.

    Args:
        draws: The scores of each draw, of the same cells in the same order.
        count: Images of a class that each draw has.
    """
    for scores in zip(*draws, strict=True):
        yield _mean(scores, count)


def _mean(scores: Sequence[Score], count: int) -> Score:
    first, by_draw = scores[0], [score.value for score in scores]
    hits = np.stack([np.asarray(score.per_image) for score in scores], 1)
    has_meaning = not math.isnan(first.value)
    return Score(
        layer=first.layer,
        facet=first.facet,
        metric=shot_metric(first.metric, count),
        value=float(np.mean(by_draw)),
        ci95=mean_estimate(np.array(by_draw)).ci95() if has_meaning else None,
        num_images=first.num_images,
        details={
            "shots": count,
            "value_by_draw": by_draw,
            "ci95_over_images": _over_images(hits) if has_meaning else None,
            **_details(scores),
        },
        per_image=hits,
    )


def _over_images(hits: Bool[np.ndarray, "images draws"]) -> tuple[float, float] | None:
    return mean_estimate(100 * hits.mean(1)).ci95()


def _details(scores: Sequence[Score]) -> dict[str, Any]:
    """What all draws say once, what they say differently by draw, warnings and time of all."""
    found: dict[str, Any] = {}
    for name, value in scores[0].details.items():
        by_draw = [score.details[name] for score in scores]
        if name == "warnings":
            found[name] = list(dict.fromkeys(line for lines in by_draw for line in lines))
        elif name == "train_seconds":
            found[name] = round(sum(by_draw), 3)
        elif all(other == value for other in by_draw):
            found[name] = value
        else:
            found[f"{name}_by_draw"] = by_draw
    return found


def _require_enough(images: ImageSet, labels: Int64[np.ndarray, " images"], most: int) -> None:
    counts = np.bincount(labels, minlength=len(images.class_names))
    least = int(counts.argmin())
    if counts[least] < most:
        raise DataError(
            f"probe.shots takes {most} images of each class of {images.name} {images.split}, the "
            f"class {images.class_names[least]} has {counts[least]}; take fewer with probe.shots"
        )
