"""Images, datasets and their roles, whatever the layout on disk."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, UInt8

from ssl_bench.composition.choices import config_names
from ssl_bench.composition.fields import check_fields
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import expand_path

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
        """Its roles, keys of `ssl_bench.data.samples.OFFERED`; train and val serve several."""
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


OFFERED = {
    "segmentation": "masks",
    "classification": "class labels",
    "correspondence": "pairs with points",
    # A folder of pictures has the first as well: objects can be looked for and shown.
    "discovery": "boxes",
    "boxes": "boxes",
    "saliency": "masks of one object",
    "images": "images",
}
"""What a dataset holds that has a role."""

SPLITS_OF_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "segmentation": ("train", "val"),
        "classification": ("train", "val"),
        "correspondence": ("val",),
        "saliency": ("val",),
        "discovery": ("discovery",),
        "images": ("images",),
    }
)
"""Methods of `Dataset` that return the images of a role."""

PUBLISHED: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "voc2012": {"train": 1464, "val": 1449, "discovery": 11540},
        "voc2007": {"train": 209, "val": 213, "discovery": 5011},
        "ade20k": {"train": 20210, "val": 2000},
        "coco_stuff": {"train": 118287, "val": 5000},
        "coco20k": {"discovery": 19817},
        "cityscapes": {"train": 2975, "val": 500},
        "camvid": {"train": 367, "val": 101},
        "ecssd": {"val": 1000},
        # Pairs of its split test, and all pictures.
        "spair71k": {"val": 12234, "images": 1800},
    }
)
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")


class Layout:
    """A dataset on disk: asked for a role that it does not have it says who has it.

    Of a dataclass every field is held to its type.
    """

    # A text, of some a property.
    name: Any

    def __post_init__(self) -> None:
        if is_dataclass(self):
            check_fields(self, "dataset")

    def train(self) -> ImageSet:
        raise lacking(self.name, "segmentation")

    def val(self) -> ImageSet:
        raise lacking(self.name, "segmentation")

    def discovery(self) -> ImageSet:
        raise lacking(self.name, "discovery")


def lacking(dataset: str, role: str) -> DataError:
    """The error for a role that a dataset does not have."""
    return DataError(
        f"{dataset} has no {OFFERED[role]}; datasets for {role}: {', '.join(datasets_with(role))}"
    )


def datasets_with(role: str) -> list[str]:
    """Names of the datasets of `configs/dataset` that have a role."""
    # Here, because Hydra takes longer than all that `data list` says.
    from ssl_bench.composition.compose import build, compose_config

    found = []
    for name in config_names("dataset"):
        # One that cannot be built is no answer.
        with suppress(Exception):
            # What it offers may hang on what its file says.
            dataset = build(compose_config("data", [f"dataset={name}"]), "dataset")
            found += [name] if role in dataset.supports else []
    return sorted(found)


def name_of_images(name: str, found: Mapping[str, Collection[str]]) -> str:
    """The name of a dataset of which these ids are there: NAME itself, or NAME-N for N images.

    Other images in a dataset's layout are another benchmark, and must not pass for it. N counts
    all of them, whatever share of them is trained on or scored, as the split says.

    Args:
        name: As it is published.
        found: By role, before any share is cut; a role that is not there is no difference.
    """
    published = PUBLISHED.get(name, {})
    if all(len(ids) == published.get(role, len(ids)) for role, ids in found.items()):
        return name
    return f"{name}-{len(set().union(*found.values()))}"


def require_own_name(name: str) -> None:
    """Refuse a name that stands for published images, of images that nobody can count."""
    if name in PUBLISHED:
        raise ConfigurationError(
            f"dataset.name expects a name of your own for your images, got {name!r}, which stands "
            "for a published set; take another"
        )


def find_root(
    root: str | Path | None,
    *,
    name: str,
    inside: Sequence[str],
    landmarks: Sequence[str],
    tree: str,
) -> Path:
    """The folder of a dataset: the given one, or one of those that may be `inside` it.

    The first is taken that holds at least one of the `landmarks`; `tree` tells the user, on one
    line, what should be there.

    Raises:
        DataError: nothing was given, or no candidate holds a landmark.
    """
    expected = f"expected {tree}; docs/data.md says where to get it"
    if root is None:
        raise DataError(
            f"{name} lies in a folder that you name: {expected}", hint=("--data-root", "{folder}")
        )
    given = given_folder(root)
    for folder in (given, *(given / part for part in inside)):
        if any((folder / landmark).is_dir() for landmark in landmarks):
            return folder
    problem = "does not hold" if given.is_dir() else "is not a folder with"
    raise DataError(f"{given} {problem} {name}: {expected}")


def given_folder(root: str | Path) -> Path:
    """The path of a dataset as it was typed, unless it is that of an archive."""
    path = expand_path(root)
    if path.name.lower().endswith(_ARCHIVES) and not path.is_dir():
        command = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
        raise DataError(f"expected a folder, got the archive {path}; unpack it: {command} {path}")
    return path


def first_folder(candidates: Sequence[Path]) -> Path:
    """The first of several usual places that exists; one has to."""
    for folder in candidates:
        if folder.is_dir():
            return folder
    names = " or ".join(str(folder) for folder in candidates)
    raise DataError(f"expected the folder {names}; docs/data.md shows the layout")
