"""Select the training images of a probe, and the layers that each head receives.

`TrainingSplit` holds some training images out, to choose a hyperparameter. `Shots` draws a few
training images of each class. Both depend only on the images, the settings and the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_bench.composition.fields import Count, require_nonempty
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.layers import INNER_FACETS, Facet, FacetSpec, parse_facets

LayerGroup = tuple[int, ...]
"""Layers whose concatenated features are the input of one head."""
ShotCounts = Count | Sequence[Count] | None
"""Number of training images of each class, or several numbers. None for all images."""
_PATCH_FACETS: tuple[Facet, ...] = ("token", "key", "query", "value", *INNER_FACETS)


@dataclass(frozen=True)
class TrainingSplit:
    """Training images that a probe uses, some of which are held out.

    A view of an image is an entry of the feature cache. View v of the image at position n of
    `indices` is entry n * views + v.

    Attributes:
        indices: Ascending indices into the training set.
        held_out: Positions in `indices` of the images that no head is trained on.
    """

    indices: tuple[int, ...]
    held_out: frozenset[int]

    @classmethod
    def draw(
        cls, images: ImageSet, *, max_images: int | None, holdout: float, seed: int
    ) -> "TrainingSplit":
        """Draw the images to use, and hold some of them out.

        Args:
            images: The training set.
            max_images: Maximum number of images to use. None for all images.
            holdout: Fraction of the used images that is held out. At least one image is held out,
                unless the fraction is 0.
            seed: Seed of the draw.

        Raises:
            DataError: No image is left to train on.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=generator).tolist()
        indices = tuple(sorted(order[:max_images]))
        num_held_out = max(1, round(holdout * len(indices))) if holdout else 0
        if len(indices) <= num_held_out:
            raise DataError(
                f"{images.name} {images.split} has {len(indices)} training images to use, expected "
                f"at least {num_held_out + 1}, because {num_held_out} of them are held out"
            )
        held_out = torch.randperm(len(indices), generator=generator)[:num_held_out]
        return cls(indices, frozenset(held_out.tolist()))

    def training_entries(self, views: int) -> Int64[Tensor, " entries"]:
        """Return the entries of all views of the images that are not held out."""
        training = [n for n in range(len(self.indices)) if n not in self.held_out]
        return (torch.tensor(training)[:, None] * views + torch.arange(views)).flatten()

    def all_entries(self, views: int) -> Int64[Tensor, " entries"]:
        """Return the entries of all views of all images."""
        return torch.arange(len(self.indices) * views)

    def ids(self, images: ImageSet) -> list[str]:
        return [images.ids[index] for index in self.indices]


def ids_sha256(ids: Sequence[str]) -> str:
    """Return the SHA-256 of a text file with one id per line, in hexadecimal digits."""
    lines = "".join(f"{image_id}\n" for image_id in ids)
    return sha256(lines.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Shots:
    """Training images of each class, drawn several times.

    In each draw, the images of a class have a random order. The first n of them are the n shots, so
    the shots of a small number are among the shots of a larger number.

    Attributes:
        indices: Ascending indices into the training set of all drawn images.
        positions: Positions in `indices` of the images of each draw and class, in their order.
    """

    indices: tuple[int, ...]
    positions: Int64[Tensor, "draws classes per_class"]

    @classmethod
    def draw(cls, images: ImageSet, *, per_class: int, draws: int, seed: int) -> "Shots":
        """Draw images of each class without reading the image files.

        Args:
            images: The training set.
            per_class: Number of images of each class.
            draws: Number of draws.
            seed: Seed. It gives each draw its own random order, whatever `per_class` is.

        Raises:
            DataError: A class has too few images, or the dataset has no list of labels.
        """
        labels = np.array(require_labels(images), np.int64)
        counts = np.bincount(labels, minlength=len(images.class_names))
        rarest = int(counts.argmin())
        if counts[rarest] < per_class:
            raise DataError(
                f"class {images.class_names[rarest]} of {images.name} {images.split} has "
                f"{counts[rarest]} images, expected at least {per_class} for the requested shots",
                hint=("probe.shots={smaller}",),
            )
        orders = [np.random.default_rng([seed, n]).permutation(len(labels)) for n in range(draws)]
        classes = range(len(images.class_names))
        drawn = np.array(
            [[order[labels[order] == label][:per_class] for label in classes] for order in orders]
        )
        indices, positions = np.unique(drawn, return_inverse=True)
        return cls(tuple(indices.tolist()), torch.from_numpy(positions.reshape(drawn.shape)))

    def select(self, draw: int, count: int, *, skip: int = 0) -> Int64[Tensor, " images"]:
        """Return ascending positions of `count` images of each class, after the first `skip`."""
        return self.positions[draw, :, skip : skip + count].flatten().sort().values


def require_labels(images: ImageSet) -> Sequence[int]:
    """Return the class of each image without reading the image files.

    Raises:
        DataError: The dataset has no list of labels.
    """
    labels: Sequence[int] | None = getattr(images, "labels", None)
    if labels is None:
        raise DataError(
            f"{images.name} {images.split} has no list of labels, so its classes are unknown until "
            "the images are read. Leave out probe.shots and probe.pool"
        )
    return labels


def shot_counts(shots: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the distinct numbers of shots in ascending order. Empty if all images are used.

    Raises:
        ConfigurationError: The list is empty.
    """
    if shots is None:
        return ()
    if isinstance(shots, int):
        return (shots,)
    require_nonempty("probe.shots", shots)
    return tuple(sorted(set(shots)))


def reject_train_images_with_shots(
    shots: int | Sequence[int] | None, train_images: int | None
) -> None:
    """Raise a ConfigurationError if images would be drawn both per class and from all images."""
    if shot_counts(shots) and train_images is not None:
        raise ConfigurationError(
            f"probe.train_images must be null if probe.shots is set, got {train_images}. Leave one "
            "of them out"
        )


def group_layers(layers: Sequence[int], layers_mode: str) -> list[LayerGroup]:
    """Return the layers that each head receives.

    Args:
        layers: Requested layers.
        layers_mode: "single" is one head for each layer. "multi" and "last4" are one head that
            depends only on the last requested layer. "multi" is the layers at 1/4, 1/2, 3/4 and all
            of the depth up to it, and "last4" is the last four layers up to it.
    """
    last = max(layers)
    if layers_mode == "multi":
        return [tuple(sorted({max(0, (last + 1) * q // 4 - 1) for q in (1, 2, 3, 4)}))]
    if layers_mode == "last4":
        return [tuple(range(max(0, last - 3), last + 1))]
    return [(layer,) for layer in sorted(layers)]


def reject_single_block(spec: FacetSpec | None, layers_mode: str) -> None:
    """Raise a ConfigurationError if a facet names one block, but a head receives several."""
    if spec and spec.block is not None and layers_mode != "single":
        raise ConfigurationError(
            f"probe.facet must name every block (*) for probe.layers_mode={layers_mode}, got block "
            f"{spec.block}"
        )


def parse_patch_facet(facet: str, norm: str) -> FacetSpec:
    """Parse the facet of a probe of patches.

    Args:
        facet: Name from the user.
        norm: "final" selects tokens after the encoder's final norm. Other values are ignored.

    Raises:
        ConfigurationError: The facet is unknown, or `norm` is "final" and it is not "token".
    """
    spec = parse_facets(facet, _PATCH_FACETS)
    if norm != "final":
        return spec
    if spec.names != ("token",):
        raise ConfigurationError(
            "probe.norm=final applies the encoder's final norm, which needs the facet token, got "
            f"the facet {facet}",
            hint=("probe.facet=token",),
        )
    return FacetSpec(("token_normed",), None)
