"""Select the training images of a probe, their views, and the layers that each head receives.

`TrainingSplit` holds out some training images to select a hyperparameter. `Shots` draws a few
training images of each class at random. Both selections depend only on the images, the settings and
the seed.

A view is an image that is resized or cropped to a square, with the mask of the same area. Random
crops depend only on the seed and the image. All epochs therefore use the same views, even if
features are not stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.composition.fields import Count, require_nonempty
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.features import central_square
from ssl_bench.layers import INNER_FACETS, Facet, FacetSpec, parse_facets
from ssl_bench.scores import IGNORE_INDEX

LayerGroup = tuple[int, ...]
"""Layers whose concatenated features are the input of one head."""
ShotCounts = Count | Sequence[Count] | None
"""Number of training images of each class, or several such numbers. None means all images."""
_PATCH_FACETS: tuple[Facet, ...] = ("token", "key", "query", "value", *INNER_FACETS)


@dataclass(frozen=True)
class TrainingSplit:
    """The training images that a probe uses. Some of them are held out to select hyperparameters.

    Features are stored for each view (crop) of each image. The index of a view is called an entry.
    View v of the image at position n of `indices` has the entry n * views + v.

    Attributes:
        indices: Indices of the used images within the training set, in ascending order.
        held_out: Positions of the held-out images in `indices`.
    """

    indices: tuple[int, ...]
    held_out: frozenset[int]

    @classmethod
    def draw(
        cls, images: ImageSet, *, max_images: int | None, holdout: float, seed: int
    ) -> "TrainingSplit":
        """Draw the training images to use at random, and choose some of them to be held out.

        Args:
            images: The training set.
            max_images: Maximum number of images to use. None for all images.
            holdout: Fraction of the used images to hold out. At least one image is held out, unless
                the fraction is 0.
            seed: Seed of the random choice of images.

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
                f"at least {num_held_out + 1}, because {num_held_out} must be held out. Add images"
            )
        held_out = torch.randperm(len(indices), generator=generator)[:num_held_out]
        return cls(indices, frozenset(held_out.tolist()))

    def train_view_indices(self, views: int) -> Int64[Tensor, " entries"]:
        """Return the indices (entries) of all views of the images that are not held out.

        A view is a crop of an image. `views` is the number of views of each image.
        """
        training = [n for n in range(len(self.indices)) if n not in self.held_out]
        return (torch.tensor(training)[:, None] * views + torch.arange(views)).flatten()

    def all_view_indices(self, views: int) -> Int64[Tensor, " entries"]:
        """Return the indices (entries) of all views of all used images.

        A view is a crop of an image. `views` is the number of views of each image.
        """
        return torch.arange(len(self.indices) * views)

    def ids(self, images: ImageSet) -> list[str]:
        return [images.ids[index] for index in self.indices]


def ids_sha256(ids: Sequence[str]) -> str:
    """Return the SHA-256 of a list of image ids, as hexadecimal digits.

    The hash is computed from a text with one id in each line.
    """
    lines = "".join(f"{image_id}\n" for image_id in ids)
    return sha256(lines.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Shots:
    """Several random draws (samples) of a few training images of each class.

    In each draw, the images of each class are in a random order. For n shots, the first n images of
    each class are used. The images for a smaller number of shots are therefore always among those
    for a larger number.

    Attributes:
        indices: Indices of all drawn images within the training set, in ascending order.
        positions: Position of each drawn image in `indices`. The images of a class (last axis) are
            in random order.
    """

    indices: tuple[int, ...]
    positions: Int64[Tensor, "draws classes per_class"]

    @classmethod
    def draw(cls, images: ImageSet, *, per_class: int, draws: int, seed: int) -> "Shots":
        """Draw training images of each class at random, without reading the image files.

        Args:
            images: The training set.
            per_class: Number of images of each class.
            draws: Number of draws (random samples).
            seed: Seed of the random orders, which do not depend on `per_class`.

        Raises:
            DataError: A class has too few images, or the dataset has no list of labels.
        """
        labels = np.array(require_labels(images), np.int64)
        counts = np.bincount(labels, minlength=len(images.class_names))
        rarest = int(counts.argmin())
        if counts[rarest] < per_class:
            raise DataError(
                f"class {images.class_names[rarest]} of {images.name} {images.split} has "
                f"{counts[rarest]} images, expected at least {per_class} for probe.shots",
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
        """Return `count` images of each class from one random draw of training images.

        The result contains the positions of the images in `self.indices`, in ascending order.
        `draw` is the number of the draw. The first `skip` images of each class are left out.
        """
        return self.positions[draw, :, skip : skip + count].flatten().sort().values


def require_labels(images: ImageSet) -> Sequence[int]:
    """Return the class of each image without reading the image files.

    Raises:
        DataError: The dataset has no list of labels.
    """
    labels: Sequence[int] | None = getattr(images, "labels", None)
    if labels is None:
        raise DataError(
            f"{images.name} {images.split} has no list of labels, but probe.shots and probe.pool "
            "need the labels before any image is read. Leave out probe.shots and probe.pool"
        )
    return labels


def shot_counts(shots: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the distinct values of the setting `probe.shots` in ascending order.

    Each value is a number of training images of each class. If `shots` is None, all training images
    are used, and an empty tuple is returned.

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
    """Raise a ConfigurationError if both `probe.shots` and `probe.train_images` are set."""
    if shot_counts(shots) and train_images is not None:
        raise ConfigurationError(
            f"probe.train_images must be null if probe.shots is set, got {train_images}. Leave "
            "out probe.shots or probe.train_images"
        )


def group_layers(layers: Sequence[int], layers_mode: str) -> list[LayerGroup]:
    """Return the groups of layers whose concatenated features the heads receive.

    Args:
        layers: Requested layers.
        layers_mode: "single" returns each requested layer as a group. "multi" and "last4" return
            one group, which ends with the last requested layer. With "multi", it consists of four
            evenly spaced layers. With "last4", it also contains the three layers before the last
            requested one.
    """
    last = max(layers)
    if layers_mode == "multi":
        return [tuple(sorted({max(0, (last + 1) * q // 4 - 1) for q in (1, 2, 3, 4)}))]
    if layers_mode == "last4":
        return [tuple(range(max(0, last - 3), last + 1))]
    return [(layer,) for layer in sorted(layers)]


def reject_single_block(spec: FacetSpec | None, layers_mode: str) -> None:
    """Raise a ConfigurationError if heads need several blocks, but the facet names a single block.

    A facet (kind of feature) can be a submodule of a single block, such as "blocks.7.mlp". Heads
    need several blocks if `layers_mode` is not "single".
    """
    if spec and spec.block is not None and layers_mode != "single":
        raise ConfigurationError(
            f"probe.layers_mode={layers_mode} needs features of several blocks, but probe.facet "
            f"names only block {spec.block}. Replace the block number with *, for example "
            "blocks.*.mlp"
        )


def parse_patch_facet(facet: str, norm: str) -> FacetSpec:
    """Return the kind of patch features that the settings `facet` and `norm` of a probe select.

    Args:
        facet: Kind of feature that the user has set, such as "token" or "key".
        norm: With "final", the facet "token" becomes "token_normed", the tokens after the encoder's
            final norm. Other values have no effect.

    Raises:
        ConfigurationError: The facet is unknown, or `norm` is "final" and the facet is not "token".
    """
    spec = parse_facets(facet, _PATCH_FACETS)
    if norm != "final":
        return spec
    if spec.names != ("token",):
        raise ConfigurationError(
            "probe.norm=final applies the encoder's final norm to the output of a block, so "
            f"probe.facet must be token, got {facet}",
            hint=("probe.facet=token",),
        )
    return FacetSpec(("token_normed",), None)


# Views.

View = tuple[Float[Tensor, "3 size size"], UInt8[Tensor, "height width"]]
"""A square part of an image: RGB values in [0, 1], and the mask of the same area.

The mask may have another resolution.
"""

_TRIES = 10
# The longer side of a scaled image is at most this number times its intended shorter side.
_MAX_ASPECT = 4


class ViewTransform:
    """The base class of methods that make views of a training image, such as random crops.

    A view is a square with the mask of the same area. Subclasses are frozen dataclasses.

    Attributes:
        count: Number of views of each image.
    """

    count: int

    def make_view(self, sample: Sample, number: int, size: int) -> View:
        """Return a view (a square with its mask) of an image. Repeated calls return the same view.

        Args:
            sample: Image and mask.
            number: Number of the view, from 0 to `count` - 1.
            size: Height and width of the view in pixels.

        Raises:
            DataError: The sample has no mask.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class WholeImage(ViewTransform):
    """Views of whole images, resized to squares. The second view is a mirror image of the first."""

    count: int = 1

    def make_view(self, sample: Sample, number: int, size: int) -> View:
        image, mask = image_and_mask(sample)
        view = resize_bilinear(image, size, size), mask
        return _mirror(*view) if number else view


@dataclass(frozen=True)
class CentralSquare(ViewTransform):
    """Views of the central squares of images that have a class but no mask.

    Every view must have a mask, so these views get a meaningless mask of one pixel with the label
    0.

    Attributes:
        share: Ratio of the square's side to the shorter side of the image.
        count: Number of views of each image.
    """

    share: float
    count: int = 1

    def make_view(self, sample: Sample, number: int, size: int) -> View:
        del number
        pixels = central_square(sample.image, size, crop_share=self.share)
        return pixels.float() / 255, torch.zeros(1, 1, dtype=torch.uint8)


@dataclass(frozen=True)
class ResizedCrops(ViewTransform):
    """Views that are crops of random area and aspect ratio, resized to squares.

    Each crop is mirrored with probability 0.5.

    Attributes:
        count: Number of crops of each image.
        seed: Seed of the crops.
        area: Smallest and largest area of a crop, relative to the area of the image.
        aspect: Smallest and largest ratio of a crop's width to its height.
    """

    count: int
    seed: int
    area: tuple[float, float] = (0.8, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def make_view(self, sample: Sample, number: int, size: int) -> View:
        random = _view_generator(self.seed, sample.image_id, number)
        image, mask = image_and_mask(sample)
        rows, cols = self._draw_window(random, *mask.shape)
        view = resize_bilinear(image[:, rows, cols], size, size), mask[rows, cols]
        return _mirror(*view) if random.random() < 0.5 else view

    def _draw_window(
        self, random: np.random.Generator, height: int, width: int
    ) -> tuple[slice, slice]:
        for _ in range(_TRIES):
            area = height * width * random.uniform(*self.area)
            aspect = np.exp(random.uniform(*np.log(self.aspect)))
            rows, cols = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
            if 0 < rows <= height and 0 < cols <= width:
                return _random_slice(random, height, rows), _random_slice(random, width, cols)
        # No random window fits into the image. Use the largest central window with an allowed
        # aspect ratio.
        least, most = self.aspect
        rows, cols = min(height, round(width / least)), min(width, round(height * most))
        top, left = (height - rows) // 2, (width - cols) // 2
        return slice(top, top + rows), slice(left, left + cols)


@dataclass(frozen=True)
class ScaledCrops(ViewTransform):
    """Views that are square crops of randomly resized images.

    Each crop is mirrored with probability 0.5.

    The image is resized so that its shorter side is a random factor times the side of the crop. The
    longer side is limited to four times the length that is drawn for the shorter side. If the
    resized image is smaller than the crop, the rest of the crop is filled with the mean colour and
    ignored in the mask.

    Attributes:
        count: Number of crops of each image.
        seed: Seed of the crops.
        mean: Mean colour, RGB in [0, 1].
        factor: Smallest and largest random factor.
        dominance: A crop is drawn again if one class has at least this share of the labelled
            pixels, or if no pixel is labelled. At most ten crops are drawn.

    Source: Resize, RandomCrop, RandomFlip and Pad of https://github.com/open-mmlab/mmsegmentation,
    with the settings for linear heads of https://github.com/facebookresearch/dinov2.
    """

    count: int
    seed: int
    mean: tuple[float, float, float]
    factor: tuple[float, float] = (0.5, 2.0)
    dominance: float = 0.75

    def make_view(self, sample: Sample, number: int, size: int) -> View:
        random = _view_generator(self.seed, sample.image_id, number)
        image, mask = image_and_mask(sample)
        short_side = random.uniform(*self.factor) * size
        scale = min(short_side / min(mask.shape), _MAX_ASPECT * short_side / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        image, mask = resize_bilinear(image, height, width), resize_mask(mask, height, width)

        rows, cols = self._draw_window(random, mask, size)
        image, mask = image[:, rows, cols], mask[rows, cols]
        padding = (0, size - mask.shape[1], 0, size - mask.shape[0])
        mean = torch.tensor(self.mean).view(3, 1, 1)
        image = F.pad(image - mean, padding) + mean
        view = image, F.pad(mask, padding, value=IGNORE_INDEX)
        return _mirror(*view) if random.random() < 0.5 else view

    def _draw_window(
        self, random: np.random.Generator, mask: UInt8[Tensor, "height width"], size: int
    ) -> tuple[slice, slice]:
        window = slice(None), slice(None)
        for _ in range(_TRIES):
            height, width = mask.shape
            window = (
                _random_slice(random, height, min(height, size)),
                _random_slice(random, width, min(width, size)),
            )
            counts = torch.bincount(mask[window].flatten(), minlength=256)[:IGNORE_INDEX]
            if 0 < counts.max() < self.dominance * counts.sum():
                break
        return window


def make_views(
    crops: str, count: int, seed: int, mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> ViewTransform:
    """Return the method that makes views (square parts) of training images.

    Args:
        crops: Kind of views. "whole" stands for whole images (`WholeImage`), "resized" for random
            crops (`ResizedCrops`), and "scaled" for crops of resized images (`ScaledCrops`).
        count: Number of views of each image.
        seed: Seed of random crops.
        mean: RGB colour outside the image in "scaled" crops.
    """
    if crops == "resized":
        return ResizedCrops(count, seed)
    if crops == "scaled":
        return ScaledCrops(count, seed, mean)
    return WholeImage(count)


def reject_identical_views(crops: str, count: int) -> None:
    """Raise a ConfigurationError if more than two views of each whole image are requested.

    The first view is the image and the second is its mirror image, so a third view would be the
    same as one of them. `crops` is the kind of views, and `count` is their number.
    """
    if crops == "whole" and count > 2:
        raise ConfigurationError(
            "probe.views must be 1 or 2 if probe.crops is whole, because the only views of a whole "
            f"image are the image and its mirror image, got {count}",
            hint=("probe.views=1", "or", "probe.views=2"),
        )


def image_and_mask(
    sample: Sample,
) -> tuple[Float[Tensor, "3 height width"], UInt8[Tensor, "height width"]]:
    """Return the image of a sample as a tensor with values in [0, 1], and its mask as a tensor.

    Raises:
        DataError: The sample has no mask.
    """
    if sample.mask is None:
        raise DataError(
            f"{sample.image_id} has no mask, expected a mask for every image. Add the mask"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(sample.image.transpose(2, 0, 1)))
    return pixels.float().div_(255), torch.from_numpy(sample.mask)


def resize_bilinear(
    image: Float[Tensor, "3 height width"], rows: int, cols: int
) -> Float[Tensor, "3 rows cols"]:
    """Resize an image to `rows` x `cols` pixels by antialiased bilinear interpolation."""
    size = (rows, cols)
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0].clamp_(0, 1)


def resize_bicubic(
    image: UInt8[np.ndarray, "height width 3"], rows: int, cols: int
) -> Float[Tensor, "3 {rows} {cols}"]:
    """Resize an RGB image by antialiased bicubic interpolation, and scale its values to [0, 1].

    `rows` and `cols` are the new height and width in pixels.
    """
    pixels = Image.fromarray(image).resize((cols, rows), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1).float() / 255


def resize_mask(
    mask: UInt8[Tensor, "height width"], rows: int, cols: int
) -> UInt8[Tensor, "rows cols"]:
    """Resize a mask to `rows` x `cols` pixels. Each new pixel gets the label at its center."""
    # The mode "nearest" takes the label at the corner of a new pixel, which shifts the mask.
    return F.interpolate(mask[None, None], size=(rows, cols), mode="nearest-exact")[0, 0]


def _mirror(image: Float[Tensor, "3 size size"], mask: UInt8[Tensor, "height width"]) -> View:
    return image.flip(-1), mask.flip(-1)


def _view_generator(seed: int, image_id: str, number: int) -> np.random.Generator:
    """Return a random number generator that depends only on a seed, an image and a view number."""
    digest = sha256(image_id.encode(errors="surrogateescape")).digest()
    return np.random.default_rng([seed, number, int.from_bytes(digest[:8], "little")])


def _random_slice(random: np.random.Generator, length: int, part: int) -> slice:
    start = int(random.integers(length - part + 1))
    return slice(start, start + part)
