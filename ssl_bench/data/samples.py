"""Interfaces of datasets and image sets, independent of how a dataset is stored.

A dataset has one or more roles. A role is an evaluation that the dataset's annotations allow, such
as "segmentation". The methods `train`, `val`, `discovery` and `images` of a dataset return an
`ImageSet` (the images of one split). An image set decodes one `Sample` (an image with its
annotations) at a time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from ssl_bench.composition.choices import config_names
from ssl_bench.composition.fields import check_fields
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import expand_path

IGNORE_INDEX: Final = 255
"""Class number of mask pixels that losses and scores ignore."""


@dataclass(frozen=True)
class Pair:
    """The second image of an image pair, with corresponding points in both images.

    The first image is the attribute `image` of the `Sample` that contains this pair. Points are in
    pixels, as (x, y). The centre of the upper left pixel is (0.5, 0.5).

    Attributes:
        image_ids: Ids of the first and the second image. An image has the same id in all pairs.
        image: The second image, RGB with values from 0 to 255.
        source: Points in the first image.
        target: The corresponding points in the second image, in the same order.
        extent: Length in pixels of the longer side of the object's bounding box in the second
            image. If the dataset has no boxes, the bounding box of the points is used. The
            threshold of PCK is a fraction of this length.
        category: Class of the object that both images show.
    """

    image_ids: tuple[str, str]
    image: UInt8[np.ndarray, "height width 3"]
    source: Float64[np.ndarray, "points 2"]
    target: Float64[np.ndarray, "points 2"]
    extent: float
    category: str


@dataclass(frozen=True)
class RetrievalTarget:
    """Ground truth of a search for images of the same object or place as a query image.

    Attributes:
        matches: Ids of the images that show the same object or place.
        hard_matches: Ids of further images that show the same object or place, but are difficult to
            find. No image is both here and in `matches`.
        ignored: Ids of images that count as neither right nor wrong. They are removed from the
            ranking of this search.
        excluded_ids: Ids of images that are removed from the rankings of all searches, such as the
            queries. Several searches can share this set.
    """

    matches: frozenset[str]
    hard_matches: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    excluded_ids: frozenset[str] = frozenset()


# The base class is `Sequence[Any]`, because a run-time check of the type `Sequence[Sample]` would
# decode a frame.
@dataclass(frozen=True)
class Frames(Sequence[Any]):
    """Sequence of the frames of a video, each of which is a `Sample` (an image with annotations).

    A frame is decoded each time it is accessed.

    Attributes:
        num_frames: Number of frames.
        read: Function that decodes and returns the frame with a given number, counted from 0.
    """

    num_frames: int
    read: Callable[[int], "Sample"]

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.read(number) for number in range(self.num_frames)[index]]
        return self.read(range(self.num_frames)[index])


@dataclass(frozen=True)
class Sample:
    """An image with its annotations. Annotations that the dataset lacks are None.

    Attributes:
        image_id: Id of the image, unique within the dataset.
        image: RGB image with values from 0 to 255.
        mask: Class number of each pixel, or 255 (`IGNORE_INDEX`) for a pixel that is not scored.
        boxes: Ground-truth boxes as (x0, y0, x1, y1) in pixels. The edges x1 and y1 are exclusive.
        label: Class number of the whole image.
        pair: Second image with corresponding points.
        depth: Depth of each pixel in metres, or 0 where it is unknown.
        retrieval_target: Ground truth of an image search in which this image is the query. None if
            it is not a query.
        frames: All frames of a video whose first frame is this image. An object has the same number
            in the masks of all frames. The mask of a frame without annotation is None.
    """

    image_id: str
    image: UInt8[np.ndarray, "height width 3"]
    mask: UInt8[np.ndarray, "height width"] | None = None
    boxes: Float64[np.ndarray, "boxes 4"] | None = None
    label: int | None = None
    pair: Pair | None = None
    depth: Float32[np.ndarray, "height width"] | None = None
    retrieval_target: RetrievalTarget | None = None
    frames: Frames | None = None


@runtime_checkable
class ImageSet(Protocol):
    """The images of a split, decoded one at a time."""

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
        """Return a hexadecimal hash of all images, annotations and class names.

        The hash has the prefix "stat-" if file sizes and modification times are hashed instead of
        file contents.
        """
        ...


@runtime_checkable
class Dataset(Protocol):
    """A dataset with methods that return its image sets.

    If the dataset has no images for a method, the method raises `DataError`. For example, a dataset
    that only supports "discovery" has no training images.
    """

    @property
    def name(self) -> str: ...

    @property
    def supports(self) -> frozenset[str]:
        """Return the evaluations that the annotations allow, such as "segmentation" or "depth".

        The possible values are the keys of `ROLE_ANNOTATIONS`.
        """
        ...

    def train(self) -> ImageSet:
        """Return the images for training probe heads, with masks, class labels or depth maps."""
        ...

    def val(self) -> ImageSet:
        """Return the images or videos on which scores are computed, with annotations."""
        ...

    def discovery(self) -> ImageSet:
        """Return the images for object discovery, usually with boxes."""
        ...

    def images(self) -> ImageSet:
        """Return images without annotations."""
        ...


class DatasetView:
    """A dataset that applies a function to each image set of another dataset.

    For example, the function can select the first 100 images.

    Args:
        dataset: The original dataset.
        transform: The function. Its arguments are the name of a method of `Dataset`, such as
            "train", and the image set that this method returns. It returns the new image set.
        name: Name of the new dataset. By default, the name of the original dataset.
    """

    def __init__(
        self,
        dataset: Dataset,
        transform: Callable[[str, ImageSet], ImageSet],
        name: str | None = None,
    ) -> None:
        self.dataset, self._transform = dataset, transform
        self.name = name or dataset.name

    @property
    def supports(self) -> frozenset[str]:
        return self.dataset.supports

    def train(self) -> ImageSet:
        return self._open_images("train")

    def val(self) -> ImageSet:
        return self._open_images("val")

    def discovery(self) -> ImageSet:
        return self._open_images("discovery")

    def images(self) -> ImageSet:
        return self._open_images("images")

    def _open_images(self, method: str) -> ImageSet:
        return self._transform(method, getattr(self.dataset, method)())


@dataclass(frozen=True)
class ImageView:
    """Base class of image sets that wrap another image set and change some of its attributes."""

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
        """Return the fingerprint of this image set, which is a hash of its content.

        The wrapped image set has another fingerprint.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        raise NotImplementedError


ROLE_ANNOTATIONS = {
    "segmentation": "masks",
    "classification": "class labels",
    "correspondence": "pairs with points",
    # A folder of images also supports discovery, but its discovered objects are not scored.
    "discovery": "boxes",
    "boxes": "boxes",
    "saliency": "masks of one object",
    "depth": "depth maps",
    "tracking": "videos with masks",
    "instances": "queries with matching images",
    "images": "images",
}
"""Annotations that each role needs. A role is an evaluation that a dataset supports."""

SPLITS_OF_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "segmentation": ("train", "val"),
        "classification": ("train", "val"),
        "correspondence": ("val",),
        "discovery": ("discovery",),
        "saliency": ("val",),
        "depth": ("train", "val"),
        "tracking": ("val",),
        "instances": ("val",),
        "images": ("images",),
    }
)
"""For each role of a dataset, the methods of `Dataset` that return its images."""

PUBLISHED_COUNTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "voc2012": {"train": 1464, "val": 1449, "discovery": 11540},
        "voc2007": {"train": 209, "val": 213, "discovery": 5011},
        "ade20k": {"train": 20210, "val": 2000},
        "coco_stuff": {"train": 118287, "val": 5000},
        "coco20k": {"discovery": 19817},
        "cityscapes": {"train": 2975, "val": 500},
        "camvid": {"train": 367, "val": 101},
        "ecssd": {"val": 1000},
        # "val" is the number of pairs in the test split, "images" the number of images in all
        # splits.
        "spair71k": {"val": 12234, "images": 1800},
        "pf_willow": {"val": 900, "images": 100},
        "holidays": {"val": 1491},
        # Queries and database images together.
        "roxford5k": {"val": 5063},
        "rparis6k": {"val": 6392},
        # "val" contains the strongly edited copies and the originals, "images" only the originals.
        "copydays": {"val": 386, "images": 157},
        "davis2016": {"val": 20},
        "davis2017": {"val": 30},
        "nyu": {"train": 795, "val": 654},
        "nyu40": {"train": 795, "val": 654},
    }
)
"""Number of images, pairs or videos in each split of the published datasets."""

_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")


class Layout:
    """Base class of datasets. Methods that a subclass does not override raise `DataError`.

    Subclasses are dataclasses. When an instance is created, the types of its fields are checked.
    """

    # In a subclass, the name is a string or a property.
    name: Any

    def __post_init__(self) -> None:
        check_fields(self, "dataset")

    def train(self) -> ImageSet:
        raise unsupported_role_error(self.name, "segmentation")

    def val(self) -> ImageSet:
        raise unsupported_role_error(self.name, "segmentation")

    def discovery(self) -> ImageSet:
        raise unsupported_role_error(self.name, "discovery")

    def images(self) -> ImageSet:
        raise unsupported_role_error(self.name, "images")


def unsupported_role_error(dataset: str, role: str) -> DataError:
    """Return the error for a dataset without the annotations that an evaluation needs.

    The message lists the built-in datasets that have such annotations.

    Args:
        dataset: Name of the dataset.
        role: The evaluation, such as "segmentation".
    """
    others = ", ".join(find_datasets(role))
    return DataError(f"{dataset} has no {ROLE_ANNOTATIONS[role]}. Datasets for {role}: {others}")


def find_datasets(role: str) -> list[str]:
    """Return the names of the built-in datasets that support an evaluation.

    Args:
        role: The evaluation, such as "segmentation".
    """
    # Imported only here, because importing Hydra takes longer than running `data list`.
    from ssl_bench.composition.compose import build, compose_config

    names = []
    for name in config_names("dataset"):
        # Skip a dataset that cannot be built.
        with suppress(Exception):
            dataset = build(compose_config("data", [f"dataset={name}"]), "dataset")
            names += [name] if role in dataset.supports else []
    return sorted(names)


def resolve_dataset_name(name: str, ids: Mapping[str, Collection[str]]) -> str:
    """Return the name under which results on a published dataset are stored.

    The stored name is `name` if all splits have their published numbers of images. Otherwise, the
    number of different image ids is appended, as in "voc2012-62". Thus, tables never mix results on
    a part of the dataset with results on the whole dataset.

    Args:
        name: Name of the published dataset.
        ids: Ids of all images, pairs or videos in each split that exists on disk. If the user
            selects a part such as `train:0-50%`, the ids of the whole split are still needed.
    """
    published = PUBLISHED_COUNTS.get(name, {})
    if all(len(images) == published.get(split, len(images)) for split, images in ids.items()):
        return name
    return f"{name}-{len(set().union(*ids.values()))}"


def reject_published_name(name: str) -> None:
    """Raise `ConfigurationError` if the name of a user's dataset is that of a published dataset."""
    if name in PUBLISHED_COUNTS:
        raise ConfigurationError(
            f"dataset.name={name} is the name of a published dataset. Choose another name",
            hint=("dataset.name=my_images",),
        )


def find_root(
    root: str | Path | None,
    *,
    name: str,
    subfolders: Sequence[str],
    marker_folders: Sequence[str],
    tree: str,
) -> Path:
    """Find the folder of a dataset, which is `root` or one of its `subfolders`.

    The first of these folders that contains at least one of the `marker_folders` is returned.

    Args:
        root: The folder that the user entered.
        name: Name of the dataset, for error messages.
        subfolders: Paths relative to `root` where the dataset may be, such as "VOCdevkit/VOC2012".
        marker_folders: Subfolders by which the dataset is recognised, such as "JPEGImages".
        tree: Description of the expected files, for error messages.

    Raises:
        DataError: `root` is None, or none of the folders contains a marker folder.
    """
    expected = f"expected {tree}. docs/data.md explains where to get it"
    if root is None:
        raise DataError(
            f"{name} needs the folder of its files: {expected}", hint=("--data-root", "{folder}")
        )
    typed = resolve_folder(root)
    for folder in (typed, *(typed / part for part in subfolders)):
        if any((folder / marker).is_dir() for marker in marker_folders):
            return folder
    problem = "does not contain" if typed.is_dir() else "is not a folder with"
    raise DataError(f"{typed} {problem} {name}: {expected}")


def resolve_folder(root: str | Path) -> Path:
    """Return the path of a folder that the user entered, with `~` expanded.

    Raises:
        DataError: The path is an archive, such as a zip file.
    """
    path = expand_path(root)
    if path.name.lower().endswith(_ARCHIVES) and not path.is_dir():
        command = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
        raise DataError(f"expected a folder, got the archive {path}. Unpack it: {command} {path}")
    return path


def find_existing_folder(candidates: Sequence[Path]) -> Path:
    """Return the first path that is an existing folder, or raise `DataError`."""
    for folder in candidates:
        if folder.is_dir():
            return folder
    names = " or ".join(str(folder) for folder in candidates)
    raise DataError(f"there is no folder {names}. docs/data.md shows the expected folders")
