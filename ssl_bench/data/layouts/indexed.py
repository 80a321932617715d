"""Datasets that consist of sequences of items, such as Python datasets or the rows of a table.

An `Item` is an image with its annotations, and `Items` is a sequence of such items.
`IndexedDataset` is a dataset of one or more such sequences.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64, Integer, UInt8

from ssl_bench.composition.fields import MaskValue, format_value
from ssl_bench.data.files.file_sets import LabelMap, validate_boxes
from ssl_bench.data.files.fingerprints import ReadOptions, map_in_threads
from ssl_bench.data.samples import (
    IGNORE_INDEX,
    ImageSet,
    Layout,
    Sample,
    reject_published_name,
    unsupported_role_error,
)
from ssl_bench.errors import ConfigurationError, DataError, UnreadableImageError
from ssl_bench.system.output import print_message_once, show_progress

BoxFormat = Literal["xyxy", "xywh"]
"""Meaning of the four numbers of a box in pixels.

The numbers are two corners ("xyxy"), or the upper left corner with width and height ("xywh").
"""
Annotation = Literal["label", "mask", "boxes"]
_UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Item:
    """An image with its annotations, which have not been validated yet.

    Attributes:
        image: RGB image with values from 0 to 255.
        label: Class number of the whole image.
        mask: Number that the mask stores for each pixel, before numbers are mapped to classes.
        boxes: Corners (x0, y0, x1, y1) of each box in pixels. The edges x1 and y1 are exclusive.
        allows_flat_boxes: Whether boxes without height or width are valid, as in COCO.
    """

    image: UInt8[np.ndarray, "height width 3"]
    label: int | None = None
    mask: Integer[np.ndarray, "rows cols"] | None = None
    boxes: Float64[np.ndarray, "boxes 4"] | None = None
    allows_flat_boxes: bool = False


class ItemIdentity(NamedTuple):
    """Hashes of an image and its annotations, and the class label of the image.

    Attributes:
        digest: SHA-256 of the image and its annotations, in hexadecimal digits.
        image_digest: SHA-256 of the image alone, in hexadecimal digits.
        label: Class number of the whole image. None if it is unknown.
    """

    digest: str
    image_digest: str
    label: int | None


class Items:
    """A sequence of images with the same kinds of annotations.

    Attributes:
        title: Name of the sequence in messages.
        annotations: Kinds of annotations that each image has, such as "label".
        class_names: Names of the classes, or an empty tuple if they are unknown.
    """

    title: str
    annotations: frozenset[Annotation]
    class_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._identities: dict[int, ItemIdentity] = {}

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int, bits: int | None = None) -> Item:
        """Return an image with its annotations.

        Args:
            index: Index of the image in the sequence.
            bits: Number of bits that 16-bit images use, such as 12 for values up to 4095. None if
                the user has not stated it.

        Raises:
            DataError: The image is missing, or it has another kind of annotation than expected.
            UnreadableImageError: The image cannot be read.
        """
        raise NotImplementedError

    def read_identity(self, index: int) -> ItemIdentity:
        """Read an image with its annotations, and return their hashes and the class label."""
        raise NotImplementedError

    def read_mask(self, index: int) -> Integer[np.ndarray, "rows cols"]:
        """Return the numbers that the mask of an image stores. The image must have a mask."""
        mask = self.read(index).mask
        assert mask is not None
        return mask

    def describe_item(self, index: int) -> str:
        """Return a text for error messages that identifies an image, such as "image 3 of train"."""
        return f"image {index} of {self.title}"

    def identities(self, indices: Sequence[int]) -> list[ItemIdentity]:
        """Return the hashes and class labels of the images at the given indices.

        Images whose hashes are not cached in memory are read in parallel threads. Unreadable images
        get the digest "unreadable" and the label None.
        """

        def read(index: int) -> ItemIdentity:
            try:
                return self.read_identity(index)
            except UnreadableImageError:
                return ItemIdentity(_UNREADABLE, f"{_UNREADABLE} {self.describe_item(index)}", None)

        missing = [index for index in indices if index not in self._identities]
        shown = show_progress(missing, f"sha256 of {self.title}", len(missing))
        for index, identity in map_in_threads(read, shown):
            self._identities[index] = identity
        return [self._identities[index] for index in indices]


def digest_of_parts(*parts: bytes) -> str:
    """Return one SHA-256 of all byte strings and of their lengths, in hexadecimal digits."""
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class IndexedImages:
    """An image set that consists of selected images of a sequence, such as a table.

    Attributes:
        items: The sequence.
        indices: Indices of the selected images in `items`.
        class_names: Names of the classes. If it is empty, the images are returned without labels
            and masks.
        label_map: Class of each number that masks store, or None for images without masks.
        is_255_unclear: Whether 255 in masks may mean either the second class or ignored pixels. If
            so, a mask that stores only 0 and 255 raises an error.
        options: Options for reading the images. Only `bits` (of 16-bit images) has an effect.
    """

    name: str
    split: str
    items: Items
    indices: tuple[int, ...]
    class_names: tuple[str, ...] = ()
    label_map: LabelMap | None = None
    is_255_unclear: bool = False
    options: ReadOptions = field(default_factory=ReadOptions)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        # With leading zeros, ids in alphabetical order have the order of the items.
        return tuple(f"{index:07}" for index in self.indices)

    @property
    def labels(self) -> tuple[int, ...] | None:
        """Return the class of each image, or None for images without classes."""
        if not self._has_labels:
            return None
        labels = []
        for index, identity in zip(self.indices, self.items.identities(self.indices), strict=True):
            # If an image was unreadable, its label is unknown. Reading it again raises the error.
            label = self.items.read(index).label if identity.label is None else identity.label
            labels.append(self._require_class(index, label))
        return tuple(labels)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        """Read an image with its label, mask or boxes.

        Raises:
            DataError: An annotation is invalid, or mask and image differ in size.
            UnreadableImageError: The image cannot be read.
        """
        number = self.indices[index]
        item, place = self.items.read(number, self.options.bits), self.items.describe_item(number)
        size = item.image.shape[:2]
        mask = boxes = None
        if item.mask is not None and self.label_map is not None:
            if item.mask.shape != size:
                raise DataError(
                    f"the mask of {place} has {item.mask.shape[1]} x {item.mask.shape[0]} pixels, "
                    f"expected {size[1]} x {size[0]} as in its image"
                )
            if self.is_255_unclear and {*np.unique(item.mask)} == {0, IGNORE_INDEX}:
                raise DataError(
                    f"the mask of {place} stores 0 and 255, so the meaning of 255 is unclear. "
                    "Choose whether 255 means the second class or ignored pixels",
                    hint=("dataset.numbers=[0,255]", "or", "dataset.ignored=[255]"),
                )
            mask = self.label_map.apply(item.mask, place)
        if item.boxes is not None:
            numbers, flat = range(len(item.boxes)), item.allows_flat_boxes
            boxes = validate_boxes(item.boxes, place, numbers, size, allow_flat=flat)
        label = self._require_class(number, item.label) if self._has_labels else None
        return Sample(self.ids[index], item.image, mask, boxes, label)

    @property
    def _has_labels(self) -> bool:
        return bool(self.class_names) and "label" in self.items.annotations

    def _require_class(self, index: int, label: int | None) -> int:
        if label is not None and 0 <= label < len(self.class_names):
            return label
        raise DataError(
            f"{self.items.describe_item(index)} has label {label}, expected 0 to "
            f"{len(self.class_names) - 1} for {len(self.class_names)} classes"
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 of all images, their ids and annotations, and the class names.

        The hash also depends on the mapping from the numbers in masks to classes.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        classes = sorted(self.label_map.classes.items()) if self.label_map else None
        rows = ([i, digest] for i, digest in zip(self.ids, self.sample_hashes(), strict=True))
        return self.options.compute_fingerprint([["items", self.class_names, classes], *rows])

    def sample_hashes(self) -> list[str]:
        """Return a hash of each image with its annotations."""
        return [identity.digest for identity in self.items.identities(self.indices)]

    def image_digests(self) -> list[str]:
        """Return a hash of each image without its annotations."""
        return [identity.image_digest for identity in self.items.identities(self.indices)]

    def with_read_options(self, options: ReadOptions) -> "IndexedImages":
        """Return a copy of this image set that reads its images with the given options.

        The option data.fingerprint=stat has no effect, because the images are always identified by
        their content.
        """
        return replace(self, options=replace(options, fingerprint="content"))

    def select(self, name: str, positions: Sequence[int]) -> "IndexedImages":
        """Return a subset of the images, with a new name.

        Args:
            name: Name of the subset.
            positions: Positions of the subset's images in this image set.
        """
        return replace(
            self, name=name, indices=tuple(self.indices[position] for position in positions)
        )


class SelectedItems(NamedTuple):
    """Images that were selected from a sequence.

    Attributes:
        items: The sequence.
        split: Name of the split, such as "train" or "train:0-75%".
        indices: Indices of the selected images in the sequence.
    """

    items: Items
    split: str
    indices: Sequence[int]


@dataclass(frozen=True)
class IndexedDataset(Layout):
    """Base class of datasets that consist of sequences of images, such as the rows of a table.

    Attributes:
        name: Name of the dataset in stored results and tables (default: the name of the data and
            its number of images, such as CIFAR10-60000).
        class_names: Names of the classes (default: the names that the data contain).
        numbers: Numbers that masks store, one for each class (default: 0, 1, 2 and so on).
        ignored: Numbers of mask pixels that are not scored (default: 255, unless it is in
            `numbers`).
        one_object: Whether masks show one object (class 1) on a background (class 0).
        box_format: Meaning of the four numbers of a box in pixels. With xyxy they are the corners
            (x0, y0, x1, y1). With xywh they are the upper left corner, the width and the height, as
            in COCO. The default for Python datasets is xyxy. Tables of Hugging Face have no
            default.
        image_column: Column with the images, in a table of Hugging Face.
        label_column: Column with class labels, in a table of Hugging Face.
        mask_column: Column with masks, in a table of Hugging Face.
        box_column: Column with boxes, such as objects.bbox, in a table of Hugging Face.
    """

    name: str = ""
    class_names: Sequence[str] = ()
    numbers: Sequence[MaskValue] | None = None
    ignored: Sequence[MaskValue] | None = None
    one_object: bool = False
    box_format: BoxFormat | None = None
    image_column: str | None = None
    label_column: str | None = None
    mask_column: str | None = None
    box_column: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_published_name(self.name)
        if self.one_object and self.class_names and len(self.class_names) != 2:
            raise ConfigurationError(
                "dataset.one_object=true expects two class names, background and object, got "
                f"{len(self.class_names)}",
                hint=("dataset.class_names=[background,object]",),
            )

    def select_items(self, usage: str) -> SelectedItems | None:
        """Return the images for one use, such as training.

        Args:
            usage: The use: "train" (for training), "val" (for scoring) or "images" (without
                annotations).

        Returns:
            The images, or None if the dataset has no images for this use.

        Raises:
            DataError: The dataset cannot be used in this way.
        """
        raise NotImplementedError

    def list_sequences(self) -> Mapping[str, Items]:
        """Return all image sequences of the dataset, by the name of the split, such as "train"."""
        raise NotImplementedError

    def missing_images_error(self, usage: str) -> DataError:
        """Return the error for a dataset without images for a use, such as "train" or "val"."""
        raise NotImplementedError

    def result_name(self) -> str:
        """Return the name of the dataset in stored results."""
        raise NotImplementedError

    @property
    def supports(self) -> frozenset[str]:
        """Return the evaluations that the annotations allow, such as "classification".

        Images without annotations also allow "discovery", but the discovered objects are not
        scored.
        """
        roles = set[str]()
        for usage, items in self.list_sequences().items():
            roles.add("images")
            if "label" in items.annotations:
                roles.add("classification")
            if "mask" in items.annotations:
                roles.add("saliency" if self.one_object else "segmentation")
            if "boxes" in items.annotations:
                roles |= {"discovery", "boxes"}
            if usage == "images" or not items.annotations:
                roles.add("discovery")
        return frozenset(roles)

    def train(self) -> ImageSet:
        """Return the training images, with labels or masks."""
        return self._open_annotated("train")

    def val(self) -> ImageSet:
        """Return the images that are scored, with labels or masks."""
        return self._open_annotated("val")

    def discovery(self) -> ImageSet:
        """Return the images for object discovery.

        Images with boxes are preferred, then images without any annotation. If the dataset has no
        such images, the result is `select_items("images")` without the annotations.
        """
        parts = [part for usage in ("images", "val", "train") if (part := self.select_items(usage))]
        with_boxes = [part for part in parts if "boxes" in part.items.annotations]
        without = [part for part in parts if not {"label", "mask"} & part.items.annotations]
        if not (found := [*with_boxes, *without, *filter(None, [self.select_items("images")])]):
            raise unsupported_role_error(self.name, "discovery")
        return self._open(found[0], with_classes=False)

    def images(self) -> ImageSet:
        """Return images without their annotations."""
        parts = (self.select_items(usage) for usage in ("images", "train", "val"))
        return self._open(next(part for part in parts if part), with_classes=False)

    def _open_annotated(self, usage: str) -> ImageSet:
        part = self.select_items(usage)
        if part is None:
            raise self.missing_images_error(usage)
        if not {"label", "mask"} & part.items.annotations:
            raise unsupported_role_error(self.result_name(), "classification")
        return self._open(part)

    def _open(self, part: SelectedItems, *, with_classes: bool = True) -> IndexedImages:
        if not part.indices:
            raise DataError(
                f"{part.items.title} has no images in {part.split}. Select a larger part"
            )
        annotations = part.items.annotations
        names = self._class_names if with_classes else ()
        images = IndexedImages(
            name=self.result_name(),
            split=part.split,
            items=part.items,
            indices=tuple(part.indices),
            class_names=names,
            label_map=self._map_numbers(len(names)) if "mask" in annotations and names else None,
            is_255_unclear=self.numbers is None and self.ignored is None and len(names) <= 2,
        )
        # Read the first image. If annotations are interpreted wrongly, this usually raises an
        # error.
        with suppress(UnreadableImageError):
            _ = images[0]
        return images

    def _map_numbers(self, num_classes: int) -> LabelMap:
        numbers = list(range(num_classes) if self.numbers is None else self.numbers)
        ignored = {*self._ignored}
        if len({*numbers}) != num_classes or ignored & {*numbers}:
            raise ConfigurationError(
                f"dataset.numbers must contain {num_classes} different numbers, one for each "
                "class, and no number of dataset.ignored, got "
                f"dataset.numbers={format_value(numbers)} and "
                f"dataset.ignored={format_value(sorted(ignored))}"
            )
        classes: dict[int, int] = {number: index for index, number in enumerate(numbers)}
        hint = "Set dataset.class_names, dataset.numbers or dataset.ignored"
        return LabelMap({**classes, **dict.fromkeys(ignored, IGNORE_INDEX)}, hint)

    @property
    def _ignored(self) -> tuple[int, ...]:
        if self.ignored is not None:
            return tuple(self.ignored)
        return () if IGNORE_INDEX in (self.numbers or ()) else (IGNORE_INDEX,)

    @cached_property
    def _class_names(self) -> tuple[str, ...]:
        """Return the class names, which must be the same for all image sequences of the dataset."""
        if self.class_names:
            return tuple(self.class_names)
        if self.one_object:
            return ("background", "object")
        sets = [
            items
            for items in self.list_sequences().values()
            if {"label", "mask"} & items.annotations
        ]
        title = " and ".join(items.title for items in sets)
        names = list(dict.fromkeys(items.class_names for items in sets if items.class_names))
        if len(names) > 1:
            raise DataError(
                f"{title} have different class names. Set one list of classes for both",
                hint=("dataset.class_names=[a,b]",),
            )
        if names:
            return names[0]
        if self.numbers is None:
            count = 1 + max(map(self._largest_class, sets))
        else:
            count = len(self.numbers)
        print_message_once(
            f"{title}: {count} classes. Set their names with dataset.class_names=[a,b]"
        )
        return tuple(map(str, range(count)))

    def _largest_class(self, items: Items) -> int:
        indices = range(len(items))
        if "label" in items.annotations:
            return max((identity.label or 0 for identity in items.identities(indices)), default=0)

        def largest(index: int) -> int:
            with suppress(UnreadableImageError):
                mask = items.read_mask(index)
                counted = mask[~np.isin(mask, self._ignored)]
                return int(counted.max()) if counted.size else -1
            return -1

        shown = show_progress(indices, f"classes of {items.title}", len(items))
        return max((number for _, number in map_in_threads(largest, shown)), default=-1)


def to_corners(boxes: Any, box_format: BoxFormat) -> Float64[np.ndarray, "boxes 4"]:
    """Convert boxes to corners (x0, y0, x1, y1).

    Args:
        boxes: Array or list of n x 4 numbers, or an empty list.
        box_format: "xyxy" for boxes that are already corners, or "xywh" for a corner with width and
            height.

    Raises:
        ValueError: The boxes are not an array of n x 4 numbers.
    """
    corners = np.array(boxes, np.float64)
    if corners.size == 0:
        return np.zeros((0, 4))
    if corners.ndim != 2 or corners.shape[1] != 4:
        raise ValueError(f"expected boxes of 4 numbers, got an array of shape {corners.shape}")
    if box_format == "xywh":
        corners[:, 2:] += corners[:, :2]
    return corners
