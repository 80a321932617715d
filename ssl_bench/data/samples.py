"""Interfaces of datasets and image sets, independent of how a dataset is stored.

A dataset supports one or several roles, such as "segmentation" or "discovery". Its methods `train`,
`val`, `discovery` and `images` return an `ImageSet`, which decodes one `Sample` at a time.
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

IGNORED: Final = 255
"""Class number of mask pixels that losses and scores ignore."""


@dataclass(frozen=True)
class Pair:
    """A second image for a sample, with corresponding points in both images.

    A point is (x, y) in pixels. The centre of the upper left pixel is (0.5, 0.5).

    Attributes:
        image_ids: Ids of the sample's image and of the second image. An image has the same id in
            all pairs.
        image: The second image, RGB with values from 0 to 255.
        source: Points in the sample's image.
        target: The corresponding points in the second image.
        extent: Length in pixels of the longer side of the object's box in the second image. If the
            dataset has no boxes, it is the box around the points.
        category: Class of the object that both images show.
    """

    image_ids: tuple[str, str]
    image: UInt8[np.ndarray, "height width 3"]
    source: Float64[np.ndarray, "points 2"]
    target: Float64[np.ndarray, "points 2"]
    extent: float
    category: str


@dataclass(frozen=True)
class Search:
    """Expected results of a search for images that show the same object or place as a query image.

    Attributes:
        matches: Ids of the images that show the same object or place.
        hard_matches: Ids of images that show it, but are difficult to find. They are not in
            `matches`.
        ignored: Ids of images that count as neither right nor wrong. They are removed from the
            ranking.
        bystanders: Ids of images that no search ranks, such as the other queries. Several searches
            can share this set.
    """

    matches: frozenset[str]
    hard_matches: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    bystanders: frozenset[str] = frozenset()


# A check of the type `Sequence[Sample]` at run time would decode a frame.
@dataclass(frozen=True)
class Frames(Sequence[Any]):
    """Sequence of the frames of a video. A frame is decoded each time it is accessed.

    Attributes:
        num_frames: Number of frames.
        read: Function that decodes the frame with a given number, counted from 0.
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
    """An image with its annotations. An annotation is None if the dataset does not have it.

    Attributes:
        image_id: Id of the image, unique within the dataset.
        image: RGB image with values from 0 to 255.
        mask: Class of each pixel, or `IGNORED`.
        boxes: Ground-truth boxes as (x0, y0, x1, y1) in pixels. The far edges are exclusive.
        label: Class of the whole image.
        pair: Second image with corresponding points.
        depth: Distance of each pixel from the camera in metres, or 0 if it is unknown.
        search: Expected results of a search with this image. None if this image is not a query.
        frames: All frames of the video, if this sample is the first frame of a video. An object has
            the same number in the masks of all frames. A frame without annotation has no mask.
    """

    image_id: str
    image: UInt8[np.ndarray, "height width 3"]
    mask: UInt8[np.ndarray, "height width"] | None = None
    boxes: Float64[np.ndarray, "boxes 4"] | None = None
    label: int | None = None
    pair: Pair | None = None
    depth: Float32[np.ndarray, "height width"] | None = None
    search: Search | None = None
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
        """Return a hexadecimal digest of all images, annotations and class names.

        The digest has the prefix "stat-" if files were identified by size and modification time.
        """
        ...


@runtime_checkable
class Dataset(Protocol):
    """A dataset, whose methods return its image sets.

    Its roles, such as "segmentation", are the evaluations that its annotations allow. A method
    raises `DataError` if no role needs its images. For example, a dataset for "discovery" alone has
    no training images.
    """

    @property
    def name(self) -> str: ...

    @property
    def supports(self) -> frozenset[str]:
        """Return the evaluations that the annotations allow, such as "segmentation" or "depth".

        They are keys of `ROLE_ANNOTATIONS`.
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
    """A view of a dataset that transforms each of its image sets.

    Args:
        dataset: The original dataset.
        transform: Function that returns the transformed image set. Its arguments are the name of a
            method of `Dataset`, such as "train", and the image set that this method returns.
        name: Name of the view. By default, the name of the dataset.
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
        """Return the fingerprint of this set, which differs from that of the wrapped image set."""
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
"""Annotations that each role of a dataset needs."""

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
"""Names of the methods of `Dataset` that return the images of each role."""

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
        # The first number counts pairs (of the test split), the second the images of all splits.
        "spair71k": {"val": 12234, "images": 1800},
        "pf_willow": {"val": 900, "images": 100},
        "holidays": {"val": 1491},
        # Queries and database together.
        "roxford5k": {"val": 5063},
        "rparis6k": {"val": 6392},
        # The strong copies and the originals.
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
    """Base class of datasets on disk. Methods that a subclass does not override raise `DataError`.

    Subclasses are dataclasses. When an instance is created, the types of its values are checked.
    """

    # A subclass defines a string or a property.
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
    """Return the error for a dataset without the annotations for a role, such as "segmentation".

    The message lists the datasets that have them.
    """
    others = ", ".join(datasets_with(role))
    return DataError(f"{dataset} has no {ROLE_ANNOTATIONS[role]}. Datasets for {role}: {others}")


def datasets_with(role: str) -> list[str]:
    """Return the datasets in `configs/dataset` that support a role, such as "segmentation"."""
    # Imported only here, because importing Hydra takes longer than running `data list`.
    from ssl_bench.composition.compose import build, compose_config

    names = []
    for name in config_names("dataset"):
        # A dataset that cannot be built supports no role.
        with suppress(Exception):
            dataset = build(compose_config("data", [f"dataset={name}"]), "dataset")
            names += [name] if role in dataset.supports else []
    return sorted(names)


def benchmark_name(name: str, ids: Mapping[str, Collection[str]]) -> str:
    """Return the name of a published dataset, or a name such as "voc2012-62" for a part of it.

    If a split does not have the published number of images, the number of different ids in all
    splits is appended. Thus, results on a part of the dataset are not mixed with those on the whole
    dataset.

    Args:
        name: Name of the published dataset.
        ids: All ids in each existing split, before a part such as `train:0-50%` is selected.
    """
    published = PUBLISHED_COUNTS.get(name, {})
    if all(len(images) == published.get(split, len(images)) for split, images in ids.items()):
        return name
    return f"{name}-{len(set().union(*ids.values()))}"


def require_own_name(name: str) -> None:
    """Raise `ConfigurationError` if a user's own dataset has the name of a published dataset."""
    if name in PUBLISHED_COUNTS:
        raise ConfigurationError(
            f"dataset.name={name} is the name of a published dataset. Choose another name",
            hint=("dataset.name=my_images",),
        )


def find_root(
    root: str | Path | None,
    *,
    name: str,
    inside: Sequence[str],
    landmarks: Sequence[str],
    tree: str,
) -> Path:
    """Return the folder of a dataset, which is the given root or a folder inside it.

    Args:
        root: The folder that the user entered.
        name: Name of the dataset.
        inside: Relative paths below `root` at which the dataset may be.
        landmarks: Relative paths of folders that a dataset contains. The result is the first
            candidate folder with at least one of them.
        tree: Expected files, for the error message.

    Raises:
        DataError: `root` is None, or no candidate has a landmark.
    """
    expected = f"expected {tree}. docs/data.md explains where to get it"
    if root is None:
        raise DataError(
            f"{name} needs the folder of its files: {expected}", hint=("--data-root", "{folder}")
        )
    typed = resolve_folder(root)
    for folder in (typed, *(typed / part for part in inside)):
        if any((folder / landmark).is_dir() for landmark in landmarks):
            return folder
    problem = "does not contain" if typed.is_dir() else "is not a folder with"
    raise DataError(f"{typed} {problem} {name}: {expected}")


def resolve_folder(root: str | Path) -> Path:
    """Return the path of a folder that the user entered. Raise `DataError` for an archive."""
    path = expand_path(root)
    if path.name.lower().endswith(_ARCHIVES) and not path.is_dir():
        command = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
        raise DataError(f"expected a folder, got the archive {path}. Unpack it: {command} {path}")
    return path


def find_existing_folder(candidates: Sequence[Path]) -> Path:
    """Return the first of the candidates that is a folder. If there is none, raise `DataError`."""
    for folder in candidates:
        if folder.is_dir():
            return folder
    names = " or ".join(str(folder) for folder in candidates)
    raise DataError(f"expected the folder {names}. docs/data.md shows the layout")
