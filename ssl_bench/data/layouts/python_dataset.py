"""Datasets from Python objects of torchvision, of Hugging Face, or of the user's own class.

A dataset is a sequence (`__len__` and `__getitem__`) of images or of pairs (image, target). All
targets must be of the same kind as the first target. The kinds are:

- An integer is a class label.
- A PIL image, an array or a tensor of the image's height and width is a mask of class numbers.
- An array or list of n x 4 numbers contains boxes in the format `box_format` (default: xyxy).
- The targets of torchvision's VOCDetection, CocoDetection and detection models are boxes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.data.layouts.indexed import (
    Annotation,
    BoxFormat,
    IndexedDataset,
    Item,
    ItemIdentity,
    Items,
    SelectedItems,
    digest_of_parts,
    to_corners,
)
from ssl_bench.errors import ConfigurationError, DataError, SslBenchError, UnreadableImageError
from ssl_bench.system.output import print_message_once
from ssl_bench.system.process import reraise_out_of_memory

_PIL_COLOURS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
_PIL_NUMBERS = ("1", "L", "P", "I", "I;16")
_COCO_BOXES = "COCO's x, y, width, height"


class Target(NamedTuple):
    """The annotation that a Python dataset returns with an image, in a common form.

    Attributes:
        kind: "label", "mask" or "boxes". None if the image has no annotation.
        value: The class label, the class number of each pixel, or the corners (x0, y0, x1, y1) of
            boxes.
        format: Format in which boxes were given, such as "xywh", for messages. It is "" for other
            annotations and for an empty list.
    """

    kind: Annotation | None
    value: Any = None
    format: str = ""


class PythonItems(Items):
    """Images and annotations from a sequence such as `torchvision.datasets.CIFAR10`.

    Only one thread at a time reads images, because many datasets do not support several threads.

    Args:
        dataset: The sequence.
        argument: Argument of `ssl_bench.probe` to which the user passed the dataset, such as
            "train". It is used in messages.
        box_format: Format of boxes in arrays and lists: "xyxy" (default) or "xywh".
    """

    def __init__(self, dataset: Any, argument: str, box_format: BoxFormat | None) -> None:
        super().__init__()
        self._dataset, self._lock = dataset, RLock()
        self._box_format: BoxFormat = box_format or "xyxy"
        base = base_dataset(dataset)
        self.title = f"{argument} ({type(base).__name__})"
        names = getattr(base, "classes", None)
        # In some datasets, `classes` is not a list of names, but a mapping or a number.
        is_list = isinstance(names, (list, tuple)) and bool(names)
        self.class_names = tuple(map(str, names)) if is_list else ()
        self._length = len(dataset)
        if not self._length:
            raise DataError(f"{self.title} has no images")
        first = self._read_raw(0)[1]
        kind = self._kind = first.kind
        self.annotations = frozenset([kind] if kind else [])
        described = {
            None: "images without annotations",
            "label": "images with class labels",
            "mask": "images with masks of class numbers",
            "boxes": "images with boxes" + (f" ({first.format})" if first.format else ""),
        }
        print_message_once(f"{self.title}: {self._length} {described[kind]}")

    def __len__(self) -> int:
        return self._length

    def read(self, index: int, bits: int | None = None) -> Item:
        """Read the image at the given index with its annotations.

        `bits` has no effect, because the dataset decodes its images itself.

        Raises:
            DataError: The content has changed since the image was first read, or the annotation has
                an unsupported form.
            UnreadableImageError: The dataset raises an exception for this image.
        """
        del bits
        item, identity = self._read_item(index)
        if self._identities.setdefault(index, identity).digest != identity.digest:
            raise DataError(
                f"{self.describe_item(index)} has changed since it was first read. Remove random "
                "transforms from the dataset, because a hash of its content identifies stored "
                "results"
            )
        return item

    def read_identity(self, index: int) -> ItemIdentity:
        return self._read_item(index)[1]

    def _read_item(self, index: int) -> tuple[Item, ItemIdentity]:
        image, target = self._read_raw(index)
        if target.kind != self._kind:
            expected = self._kind or "no target"
            raise DataError(
                f"the target of {self.describe_item(index)} is not of the same kind as the first "
                f"target, expected {expected}. Return one kind of target for all images"
            )
        item = Item(
            image,
            **({target.kind: target.value} if target.kind else {}),
            allows_flat_boxes=target.format == _COCO_BOXES,
        )
        arrays = [item.image, *(array for array in (item.mask, item.boxes) if array is not None)]
        described = [str((array.shape, array.dtype.str, item.label)).encode() for array in arrays]
        contents = [np.ascontiguousarray(array).tobytes() for array in arrays]
        image_digest = digest_of_parts(str(image.shape).encode(), contents[0])
        digest = digest_of_parts(image_digest.encode(), *described, *contents[1:])
        return item, ItemIdentity(digest, image_digest, item.label)

    def _read_raw(self, index: int) -> tuple[UInt8[np.ndarray, "height width 3"], Target]:
        try:
            with self._lock:
                content = self._dataset[index]
                image, target = _split_pair(content)
                pixels = to_pixels(image)
                return pixels, parse_target(target, pixels.shape[:2], self._box_format)
        except SslBenchError:
            raise
        except _UnsupportedContent as error:
            raise DataError(f"{self.describe_item(index)}: {error}") from error
        # The dataset of a user can raise any exception.
        except Exception as error:
            reraise_out_of_memory(error)
            raise UnreadableImageError(
                f"{self.describe_item(index)} cannot be read ({type(error).__name__}: {error})"
            ) from error


class _UnsupportedContent(Exception):
    pass


def base_dataset(dataset: Any) -> Any:
    """Return the dataset inside wrappers such as `torch.utils.data.Subset`.

    A wrapper is an object with the attribute `dataset` but without the attribute `classes`.
    """
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def _split_pair(content: Any) -> tuple[Any, Any]:
    if isinstance(content, (tuple, list)):
        if len(content) != 2:
            raise _UnsupportedContent(
                f"expected an image or a pair (image, target), got {len(content)} values"
            )
        return content[0], content[1]
    return content, None


def to_pixels(image: Any) -> UInt8[np.ndarray, "height width 3"]:
    """Convert a PIL image, array or tensor to an RGB array with values from 0 to 255."""
    if isinstance(image, Image.Image):
        if image.mode not in _PIL_COLOURS:
            raise _UnsupportedContent(
                f"expected an image of 8 bits per channel, got the mode {image.mode}"
            )
        # Converting a transparent palette directly to RGB prints a warning.
        image = image.convert("RGBA") if image.mode == "P" else image
        return np.array(image.convert("RGB"))
    if isinstance(image, Tensor):
        return _tensor_to_pixels(image.detach().cpu())
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        if image.ndim == 2 or image.shape[2:] == (1,):
            return np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)
        if image.ndim == 3 and image.shape[2] == 3:
            return np.array(image)
    shape = " x ".join(map(str, getattr(image, "shape", ())))
    described = f"{shape} of {image.dtype}" if shape else type(image).__name__
    raise _UnsupportedContent(
        "expected a PIL image, a numpy.uint8 array of height x width x 3, or a tensor of 3 x "
        f"height x width, got {described}"
    )


def _tensor_to_pixels(image: Tensor) -> UInt8[np.ndarray, "height width 3"]:
    if image.ndim == 2:
        image = image[None]
    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel():
        shape = " x ".join(map(str, image.shape))
        raise _UnsupportedContent(f"expected a tensor of 3 x height x width, got {shape}")
    if image.is_floating_point():
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 1):
            raise _UnsupportedContent(
                f"expected values in [0, 1], got {low:.3g} to {high:.3g}. Remove the "
                "normalisation from the transform, because each encoder normalises its images"
            )
        image = (image.double() * 255).round().to(torch.uint8)
    elif image.dtype != torch.uint8:
        raise _UnsupportedContent(f"expected a tensor of uint8 or floats, got {image.dtype}")
    return image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()


def parse_target(target: Any, size: tuple[int, ...], box_format: BoxFormat) -> Target:
    """Determine whether the target of an image is a class label, a mask or boxes, and convert it.

    Args:
        target: The annotation that a Python dataset returns with an image, or None.
        size: Height and width of the image in pixels. An integer array of this size is a mask.
        box_format: Format of boxes in arrays and lists: "xyxy" (two corners) or "xywh" (corner,
            width and height).
    """
    if target is None:
        return Target(None)
    if isinstance(target, Image.Image):
        if target.mode not in _PIL_NUMBERS:
            raise _UnsupportedContent(
                f"expected a mask of class numbers, got an image of the mode {target.mode}"
            )
        return Target("mask", np.array(target).astype(np.int64))
    if isinstance(target, Mapping):
        return _parse_mapping(target)
    if isinstance(target, list) and not target:
        # CocoDetection returns an empty list for an image without objects.
        return Target("boxes", to_corners(target, box_format))
    if isinstance(target, list) and all(isinstance(one, Mapping) for one in target):
        # Leave out crowds, because the box of a crowd encloses many objects instead of one.
        boxes = [one["bbox"] for one in target if not one.get("iscrowd")]
        return Target("boxes", to_corners(boxes, "xywh"), _COCO_BOXES)
    own_format = getattr(getattr(target, "format", None), "name", None)
    array = target.detach().cpu().numpy() if isinstance(target, Tensor) else np.asarray(target)
    if array.ndim == 0 and np.issubdtype(array.dtype, np.integer):
        return Target("label", int(array))
    is_integer = array.dtype.kind in "iub"
    if is_integer and array.shape in (size, (1, *size)):
        return Target("mask", array.reshape(size).astype(np.int64))
    if array.dtype.kind in "iuf" and (array.size == 0 or array.shape[1:] == (4,)):
        formats: dict[str | None, BoxFormat] = {None: box_format, "XYXY": "xyxy", "XYWH": "xywh"}
        if own_format not in formats:
            raise _UnsupportedContent(f"expected boxes as XYXY or XYWH, got {own_format}")
        used = formats[own_format]
        return Target("boxes", to_corners(array, used), used)
    shape = " x ".join(map(str, array.shape))
    described = f"an array of {shape} of {array.dtype}" if shape else type(target).__name__
    raise _UnsupportedContent(
        "expected a class label (int), a mask of the image's size, or n x 4 boxes as target, got "
        f"{described}"
    )


def _parse_mapping(target: Mapping[str, Any]) -> Target:
    """Parse the boxes in the target of an image, which has one of two formats of torchvision.

    A target of VOCDetection has the key "annotation". A target for detection models has the key
    "boxes".
    """
    if "annotation" in target:
        corners = []
        for one in target["annotation"].get("object", []):
            x0, y0, x1, y1 = (float(one["bndbox"][key]) for key in ("xmin", "ymin", "xmax", "ymax"))
            # VOC counts pixels from 1, and its far edges are inclusive.
            corners.append([x0 - 1, y0 - 1, x1, y1])
        return Target("boxes", to_corners(corners, "xyxy"), "VOC's corners")
    if "boxes" in target:
        return parse_target(target["boxes"], (), "xyxy")
    raise _UnsupportedContent(
        f"expected a target with the key boxes or annotation, got {', '.join(map(str, target))}"
    )


@dataclass(frozen=True)
class PythonDataset(IndexedDataset):
    """Dataset of objects that a user passes to `ssl_bench.probe` as `train`, `val` or `images`."""

    name: str = "python"

    def with_sets(self, sets: Mapping[str, Any]) -> "PythonDataset":
        """Return a copy of this dataset that contains the user's Python objects.

        Args:
            sets: The user's objects, by argument name: "train", "val" or "images".

        Raises:
            DataError: An object has no images, its first target is not supported, or the targets
                for "train" and "val" are of different kinds.
            ConfigurationError: An object is not a sequence.
        """
        items = {usage: self._make_items(usage, one) for usage, one in sets.items()}
        kinds = {items[usage].annotations for usage in ("train", "val") if usage in sets}
        if len(kinds) > 1:
            raise DataError("train and val must have the same kind of target, got two kinds")
        title = dataset_title(next(iter(sets.values())))
        name = f"{title}-{sum(map(len, items.values()))}" if self.name == "python" else self.name
        copy = replace(self, name=name)
        object.__setattr__(copy, "_sets", items)
        return copy

    def _make_items(self, usage: str, dataset: Any) -> Items:
        if isinstance(dataset, Mapping):
            raise ConfigurationError(
                f"{usage} expects one split, got {type(dataset).__name__} with "
                f"{', '.join(dataset)}. Pass one of these splits"
            )
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigurationError(
                f"{usage} expects a dataset with __len__ and __getitem__, got "
                f"{type(dataset).__name__}. Instead of a DataLoader, pass its attribute dataset"
            )
        if hasattr(dataset, "features") and hasattr(dataset, "cast_column"):
            from ssl_bench.data.layouts.hugging_face import TableItems

            return TableItems(dataset, usage, self)
        return PythonItems(dataset, usage, self.box_format)

    def list_sequences(self) -> Mapping[str, Items]:
        return getattr(self, "_sets", {})

    def select_items(self, usage: str) -> SelectedItems | None:
        if not self.list_sequences():
            raise DataError(
                "the dataset python can only be used in Python. Call ssl_bench.probe(encoder, "
                "task=TASK, train=DATASET, val=DATASET), or pass a folder",
                hint=("--dataset", "class_folders", "--data-root", "{folder}"),
            )
        items = self.list_sequences().get(usage)
        return SelectedItems(items, usage, range(len(items))) if items else None

    def missing_images_error(self, usage: str) -> DataError:
        return DataError(f"{self.name} has no {usage} images. Pass them as {usage}=DATASET")

    def result_name(self) -> str:
        return self.name


def dataset_title(dataset: Any) -> str:
    """Return the name of a Hugging Face dataset, or the class name of any other Python dataset."""
    base = base_dataset(dataset)
    return getattr(getattr(base, "info", None), "dataset_name", None) or type(base).__name__
