"""What every dataset gives, whatever its layout on disk."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, UInt8

IGNORED: Final = 255
"""The class of a pixel that no loss and no score counts."""


@dataclass(frozen=True)
class Pair:
    """Another image, and points that it has in common with the image of a sample.

    A point is (x, y) in pixels; the middle of the first pixel is (0.5, 0.5).

    Attributes:
        image_ids: Of the sample's image and of the other one, wherever they come again.
        image: The other one, RGB, 0 to 255.
        source: Points of the sample's image.
        target: The same points in the other one.
        extent: Longer side of the object's box in the other one, in pixels.
        category: What both show.
    """

    image_ids: tuple[str, str]
    image: UInt8[np.ndarray, "height width 3"]
    source: Float64[np.ndarray, "points 2"]
    target: Float64[np.ndarray, "points 2"]
    extent: float
    category: str


@dataclass(frozen=True)
class Sample:
    """One image with what is known about it.

    Attributes:
        image_id: Unique within the dataset.
        image: RGB, 0 to 255.
        mask: Class of each pixel, `IGNORED` where it does not count.
        boxes: Ground truth as (x0, y0, x1, y1) in pixels, far edges exclusive.
        label: Class of the whole image.
        pair: Another image, and where points of this one are in it.
    """

    image_id: str
    image: UInt8[np.ndarray, "height width 3"]
    mask: UInt8[np.ndarray, "height width"] | None = None
    boxes: Float64[np.ndarray, "boxes 4"] | None = None
    label: int | None = None
    pair: Pair | None = None


@runtime_checkable
class ImageSet(Protocol):
    """The images of one split, decoded one at a time."""

    @property
    def name(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def ids(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def fingerprint(self) -> str:
        """Another one where an image, a label or what a label means is another.

        Hexadecimal; with a mark before it where files were known by size and time.
        """
        ...


@runtime_checkable
class Dataset(Protocol):
    """One layout on disk. A role it does not have raises `DataError`."""

    @property
    def name(self) -> str: ...

    @property
    def supports(self) -> frozenset[str]:
        """Its roles, keys of `ssl_bench.data.roles.OFFERED`; train and val serve several."""
        ...

    def train(self) -> ImageSet:
        """Images with masks or labels to fit a head on."""
        ...

    def val(self) -> ImageSet:
        """Images with masks or labels to score with, or pairs of images with points."""
        ...

    def discovery(self) -> ImageSet:
        """Images with boxes."""
        ...

    def images(self) -> ImageSet:
        """Images without anything."""
        ...


class DatasetView:
    """A dataset whose sets are given in another form.

    Args:
        dataset: Any.
        given: Makes of a role, the name of a method of `Dataset`, and its set the one to give.
        name: Where it is not that of the dataset.
    """

    def __init__(
        self, dataset: Dataset, given: Callable[[str, ImageSet], ImageSet], name: str | None = None
    ) -> None:
        self.dataset, self._given = dataset, given
        self.name = name or dataset.name

    @property
    def supports(self) -> frozenset[str]:
        return self.dataset.supports

    def train(self) -> ImageSet:
        return self._set("train")

    def val(self) -> ImageSet:
        return self._set("val")

    def discovery(self) -> ImageSet:
        return self._set("discovery")

    def images(self) -> ImageSet:
        return self._set("images")

    def _set(self, role: str) -> ImageSet:
        return self._given(role, getattr(self.dataset, role)())


@dataclass(frozen=True)
class ImageView:
    """An `ImageSet` that is made from another one, and is all that it was but for what it says."""

    images: ImageSet

    @property
    def name(self) -> str:
        return self.images.name

    @property
    def split(self) -> str:
        return self.images.split

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.images.class_names

    @property
    def ids(self) -> tuple[str, ...]:
        return self.images.ids

    def __len__(self) -> int:
        return len(self.ids)

    def fingerprint(self) -> str:
        """Another one than that of the images that it is made from."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        raise NotImplementedError
