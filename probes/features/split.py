"""What heads see and are fitted to: blocks, and all training images but a share, or n a class.

And the scores of classes: how often the true one is among the first n, over images and draws.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ssl_bench.composition.fields import Count, require_nonempty
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Share, mean_estimate
from ssl_bench.layers import INNER_FACETS, Facet, FacetSpec, parse_facets
from ssl_bench.results import Baseline

# The layers whose features, concatenated, one head sees.
LayerGroup = tuple[int, ...]
_PATCHES: tuple[Facet, ...] = ("token", "key", "query", "value", *INNER_FACETS)
TOPS = (1, 5)
"""How many classes may be named."""
AskedShots = Count | Sequence[Count] | None
"""Images of each class, one number or several; None takes all there are."""


def sources_of(layers: Sequence[int], layers_mode: str) -> list[LayerGroup]:
    """What each head sees: every layer alone ("single"), or several up to the last asked one.

    "multi" are the layers at 1/4, 1/2, 3/4 and all of the depth up to it, "last4" the last four.
    """
    last = max(layers)
    if layers_mode == "multi":
        return [tuple(sorted({max(0, (last + 1) * q // 4 - 1) for q in (1, 2, 3, 4)}))]
    if layers_mode == "last4":
        return [tuple(range(max(0, last - 3), last + 1))]
    return [(layer,) for layer in sorted(layers)]


def asked_patches(facet: str, norm: str) -> FacetSpec:
    """What a head or a memory sees of patches, where a block's output may pass the final norm.

    Raises:
        ConfigurationError: not known, or not what a block gives although it is to be normed.
    """
    asked = parse_facets(facet, _PATCHES)
    if norm != "final":
        return asked
    if asked.names != ("token",):
        raise ConfigurationError(
            "probe.norm=final applies the encoder's last norm to what blocks give, got the facet "
            f"{facet}",
            hint=("probe.facet=token",),
        )
    return FacetSpec(("token_normed",), None)


def require_one_block_a_head(asked: FacetSpec | None, layers_mode: str) -> None:
    """Refuse a block by name where heads see several, by a ConfigurationError."""
    if asked and asked.block is not None and layers_mode != "single":
        raise ConfigurationError(
            f"probe.facet must name every block with * for probe.layers_mode={layers_mode}, got "
            f"block {asked.block}"
        )


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
            DataError: too few images to fit heads and to choose between them.
        """
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
        fitted = [n for n in range(len(self.indices)) if n not in self.held_out]
        return (torch.tensor(fitted)[:, None] * views + torch.arange(views)).flatten()

    def every_entry(self, views: int) -> Int64[Tensor, " entries"]:
        """All views of all images, held out or not."""
        return torch.arange(len(self.indices) * views)

    def ids(self, images: ImageSet) -> list[str]:
        return [images.ids[index] for index in self.indices]


def digest(ids: Sequence[str]) -> str:
    """Hexadecimal sha256 of ids, one a line."""
    lines = "".join(f"{image_id}\n" for image_id in ids)
    return sha256(lines.encode(errors="surrogateescape")).hexdigest()


def shots_of(asked: int | Sequence[int] | None) -> tuple[int, ...]:
    """Ascending, none of them twice; nothing where all images are taken.

    Raises:
        ConfigurationError: the list is empty.
    """
    if asked is None:
        return ()
    if isinstance(asked, int):
        return (asked,)
    require_nonempty("probe.shots", asked)
    return tuple(sorted(set(asked)))


def require_one_way_to_draw(asked: int | Sequence[int] | None, train_images: int | None) -> None:
    """Refuse shots of each class beside a number of images of all, by a ConfigurationError."""
    if shots_of(asked) and train_images is not None:
        raise ConfigurationError(
            f"probe.train_images must be null where probe.shots draws images of each class, got "
            f"{train_images}; leave one of them out"
        )


def shot_metric(metric: str, count: int) -> str:
    """Such as "top1_k1_5shot"."""
    return f"{metric}_{count}shot"


def class_labels(images: ImageSet) -> Sequence[int]:
    """The class of each image, of which none is read.

    Raises:
        DataError: the images say it one by one.
    """
    labels: Sequence[int] | None = getattr(images, "labels", None)
    if labels is None:
        raise DataError(
            f"{images.name} {images.split} tells classes only image by image, expected a list of "
            "labels beside them; leave probe.shots and probe.pool out"
        )
    return labels


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
        counts = np.bincount(labels, minlength=len(images.class_names))
        least = int(counts.argmin())
        if counts[least] < most:
            raise DataError(
                f"probe.shots takes {most} images of each class of {images.name} {images.split}, "
                f"the class {images.class_names[least]} has {counts[least]}; take fewer with "
                "probe.shots"
            )
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


def top_score(
    cell: tuple[int, str],
    metric: str,
    hits: Bool[Tensor, " images"],
    labels: Int64[Tensor, " images"],
    *,
    top: int,
    num_classes: int,
    details: Mapping[str, Any],
) -> Score:
    """Percent of the images whose class is among the first `top`; NaN of fewer classes than these.

    Args:
        cell: Layer and facet.
        metric: Its name.
        hits: Whether it is.
        labels: Classes of the same images, of which the most frequent ones are the baseline.
        top: How many classes are named.
        num_classes: How many there are.
        details: What else the record says.
    """
    share, value, ci95 = Share(hits.numpy()), math.nan, None
    more: dict[str, Any] = {"undefined": f"fewer than {top} classes"}
    if num_classes >= top:
        value, ci95 = share.value, share.ci95()
        more = Baseline.most_frequent(labels.bincount().tolist(), top).as_details()
    return Score(
        *cell, metric, value, ci95, len(share.hits), {**details, **more}, per_image=share.hits
    )


def over_draws(draws: Sequence[Sequence[Score]], count: int) -> Iterator[Score]:
    """The mean of each score over the draws, and Student's interval of it over them.

    Args:
        draws: The scores of each draw, of the same cells in the same order.
        count: Images of a class that each draw has.
    """
    for scores in zip(*draws, strict=True):
        first, by_draw = scores[0], [score.value for score in scores]
        hits = np.stack([np.asarray(score.per_image) for score in scores], 1)  # images draws
        has_meaning = not math.isnan(first.value)
        over_images = mean_estimate(100 * hits.mean(1)).ci95() if has_meaning else None
        details = {"shots": count, "value_by_draw": by_draw, "ci95_over_images": over_images}
        # What all draws say once, what they say differently by draw, warnings and time of all.
        for name, value in first.details.items():
            said = [score.details[name] for score in scores]
            if name == "warnings":
                details[name] = list(dict.fromkeys(line for lines in said for line in lines))
            elif name == "train_seconds":
                details[name] = round(sum(said), 3)
            elif all(other == value for other in said):
                details[name] = value
            else:
                details[f"{name}_by_draw"] = said
        yield replace(
            first,
            metric=shot_metric(first.metric, count),
            value=float(np.mean(by_draw)),
            ci95=mean_estimate(np.array(by_draw)).ci95() if has_meaning else None,
            details=details,
            per_image=hits,
            per_image_kind="hits_of_draws",
        )
