"""Labelled images in folders: each split is a folder, which contains a folder for each class."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import UInt64

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import FileImageSet, Files, join_names
from ssl_bench.data.files.fingerprints import (
    ReadOptions,
    extend_fingerprint,
    file_hashes,
    with_read_options,
)
from ssl_bench.data.files.readable import select_images
from ssl_bench.data.layouts.folder import ImageFolder, find_image_paths
from ssl_bench.data.samples import ImageView, Layout, Sample, reject_published_name, resolve_folder
from ssl_bench.data.splits import Split, missing_split_error, read_lines, require_disjoint
from ssl_bench.errors import DataError, escape_braces
from ssl_bench.system.files import is_output
from ssl_bench.system.output import print_message_once

_TINY_IMAGENET_LABELS = "val_annotations.txt"
# The class number times this odd 64-bit constant is added to the hash of a file. Thus, another
# class changes many bits of the hash.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_VALIDATION_NAMES = ("val", "test")
_TRAIN = "train"
# If the folders below the root are classes instead of splits, all images form the split `all`.
_ALL, _ALL_TRAIN, _ALL_VAL = "all", "all:0-80%", "all:80-100%"


@dataclass(frozen=True)
class LabelledImages(ImageView):
    """An image set in which each image has a class label.

    Attributes:
        class_names: Names of the classes.
        labels: Class of each image, as an index into `class_names`.
    """

    class_names: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> Sample:
        return replace(self.images[index], label=self.labels[index])

    @cached_property
    def _fingerprint(self) -> str:
        return extend_fingerprint(self.images.fingerprint(), self.class_names, self.labels)

    def with_read_options(self, options: ReadOptions) -> "LabelledImages":
        """Return a copy of this image set that reads its files with the given options."""
        return replace(self, images=with_read_options(self.images, options))

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Return one hash for each image, which depends on its file and its class."""
        return file_hashes(self.images) + np.array(self.labels, np.uint64) * _SPREAD

    def select(self, name: str, indices: Sequence[int]) -> "LabelledImages":
        """Return a subset of the images, with a new name.

        Args:
            name: Name of the subset.
            indices: Indices of the subset's images in this image set.
        """
        labels = tuple(self.labels[index] for index in indices)
        return replace(self, images=select_images(self.images, name, indices), labels=labels)


@dataclass(frozen=True)
class ClassificationSplits(Layout):
    """Base class of datasets with a class label for each image.

    Attributes:
        known_only: Whether to leave out scored images whose class has no training image. Otherwise,
            such an image is an error.
        name: Name of the dataset in stored results and tables.
    """

    supports = frozenset({"classification", "images"})

    root: OptionalPath = None
    train_split: str | None = None
    val_split: str | None = None
    known_only: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_published_name(self.name)


@dataclass(frozen=True)
class ClassFolders(ClassificationSplits):
    """Images in ROOT/SPLIT/CLASS/, or in ROOT/CLASS/ (the layout of torchvision's ImageFolder).

    A class folder may contain subfolders. The folders below the root are classes instead of splits
    if they contain images directly and none of them is called `val` or `test`. Without split
    folders, all images form one split named `all`. A part of a split such as `train:0-75%` contains
    the first 75 % of the images of each class, sorted by file name.

    Attributes:
        root: The folder that contains a folder for each split or for each class.
        train_split: Folder of the training images, or a part such as `train:0-75%` (default:
            `train`, or `all:0-80%` if there are no split folders).
        val_split: Folder of the scored images, or a part such as `val:0-50%` (default: `val`,
            `test` if there is no `val`, or `all:80-100%` if there are no split folders).
    """

    name: str = "class_folders"

    def train(self) -> LabelledImages:
        """Return the training images.

        Raises:
            DataError: An image is in no class folder, or a class has no image in the selected part
                of the split.
        """
        images = self._label_images(self._splits[0], self._train_classes)
        missing = sorted(set(range(len(images.class_names))).difference(images.labels))
        if missing:
            raise DataError(
                f"{self._root} has too few images of the class {images.class_names[missing[0]]} "
                f"for the split {images.split}. Select a larger part, or remove the class"
            )
        return images

    def val(self) -> LabelledImages:
        """Return the images that are scored. Labels are indices into the training classes.

        Raises:
            DataError: An image is in no class folder, or no training image has its class.
            ConfigurationError: The training split and the scored split overlap.
        """
        train, val = self._splits
        require_disjoint(train, val)
        folder = self._folder(val)
        classes = _read_classes(folder, ImageFolder(folder).images().ids)
        if self.known_only:
            known = set(self._class_names)
            classes = {i: name for i, name in classes.items() if name in known}
        return self._label_images(val, classes)

    def images(self) -> LabelledImages:
        """Return the training images."""
        return self.train()

    def pretraining_images(self) -> LabelledImages:
        """Return the images for supervised pretraining, with class labels.

        If there are split folders, only the training images are returned.
        """
        if self._is_flat:
            return self._label_images(_ALL, self._train_classes)
        if not (self._root / _TRAIN).is_dir():
            names = sorted(folder.name for folder in self._root.iterdir() if folder.is_dir())
            first = next((name for name in names if name.lower().startswith(_TRAIN)), names[0])
            raise DataError(
                f"{self._root} contains neither {_TRAIN}/CLASS/IMAGE nor CLASS/IMAGE, but "
                f"{', '.join(names[:5])}. Pass the folder that contains the class folders",
                hint=(f"data.root={escape_braces(str(self._root / first))}",),
            )
        return self.train()

    @property
    def _root(self) -> Path:
        if self.root is None:
            raise DataError(
                "the dataset class_folders needs a folder with images such as train/CLASS/IMAGE",
                hint=("--data-root", "{folder}"),
            )
        root = resolve_folder(self.root)
        if next(root.glob("*/*"), None) is None:
            raise DataError(
                f"{root} has no class folders, expected train/CLASS/IMAGE and val/CLASS/IMAGE, or "
                "CLASS/IMAGE. See docs/data.md"
            )
        return root

    @cached_property
    def _is_flat(self) -> bool:
        """Return whether the folders below the root are classes instead of splits."""
        first_images = {
            folder.name: next(find_image_paths(folder), None)
            for folder in self._root.iterdir()
            if folder.is_dir() and folder.name[0] != "." and not is_output(folder)
        }
        # A folder "val" or "test" is a split, and so is "train" if it is the only folder. Next to
        # other folders, "train" may be a class.
        names = first_images.keys()
        if names == {_TRAIN} or not names.isdisjoint(_VALIDATION_NAMES):
            return False
        # `find_image_paths` yields the images directly in a folder before those in its subfolders.
        images = [image for image in first_images.values() if image is not None]
        return bool(images) and not any("/" in image for image in images)

    @cached_property
    def _splits(self) -> tuple[str, str]:
        """Return the training split and the scored split, such as "train" or "all:0-80%"."""
        train, val = self.train_split, self.val_split
        if train is None and val is None and self._is_flat:
            print_message_once(
                f"the folders in {self._root} contain images directly, so each folder is a class. "
                f"The splits are {_ALL_TRAIN} for training and {_ALL_VAL} for scoring."
            )
            return _ALL_TRAIN, _ALL_VAL
        existing = (name for name in _VALIDATION_NAMES if (self._root / name).is_dir())
        return train or _TRAIN, val or next(existing, _VALIDATION_NAMES[0])

    def _folder(self, split: str) -> Path:
        name = Split.parse(split).name
        if self._is_flat:
            if name != _ALL:
                raise DataError(
                    f"{self._root} has no split {name}. Its folders are classes instead of splits, "
                    f"so all images form the split {_ALL}",
                    hint=(f"dataset.train_split={_ALL_TRAIN}", f"dataset.val_split={_ALL_VAL}"),
                )
            return self._root
        folder = self._root / name
        if folder.is_dir():
            return folder
        folders = [path for path in self._root.iterdir() if path.is_dir()]
        if divisible := [path.name for path in folders if len(list(path.glob("*/"))) > 1]:
            raise missing_split_error(name, [path.name for path in folders], self._root, divisible)
        raise DataError(
            f"{self._root} has no split {name}, expected SPLIT/CLASS/IMAGE or CLASS/IMAGE "
            "with at least two classes. See docs/data.md"
        )

    @cached_property
    def _train_classes(self) -> dict[str, str]:
        """Return the class name of each image in the training folder, by image id."""
        ids = ImageFolder(self._folder(self._splits[0])).images().ids
        return {image_id: _parse_class(image_id) for image_id in ids}

    @cached_property
    def _class_names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._train_classes.values())))

    def _label_images(self, split: str, classes: dict[str, str]) -> LabelledImages:
        """Return a split such as "train", or a part such as "train:0-75%", with class labels.

        Args:
            split: The split or the part.
            classes: Class name of each image of the whole split, by image id.
        """
        names, folder = self._class_names, self._folder(split)
        if len(names) < 2:
            raise DataError(
                f"{self._root} has the single class {', '.join(names)}, expected SPLIT/CLASS/IMAGE "
                "with at least two classes"
            )
        if unknown := sorted(set(classes.values()).difference(names)):
            raise DataError(
                f"{folder} has images of the class {join_names(unknown)}, which is none of the "
                f"{len(names)} training classes. Remove such images or leave them out",
                hint=("dataset.known_only=true",),
            )
        # Take the same fraction of each class. A fraction of all sorted ids would lack some
        # classes.
        by_class: dict[str, list[str]] = {}
        for image_id, name in classes.items():
            by_class.setdefault(name, []).append(image_id)
        share = Split.parse(split)
        ids = tuple(sorted(i for images in by_class.values() for i in share.cut(images)))
        files = FileImageSet(
            name=self.name,
            split=split,
            source=folder,
            ids=ids,
            images=Files(folder, ""),
            apply_exif_orientation=True,
        ).validate()
        labels = {name: label for label, name in enumerate(names)}
        return LabelledImages(files, names, tuple(labels[classes[i]] for i in ids))


def _parse_class(image_id: str) -> str:
    parts = PurePosixPath(image_id).parts
    if len(parts) < 2:
        raise DataError(f"{image_id} is in no class folder. Move it into one, or remove it")
    return parts[0]


def _read_classes(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """Return the class name of each image, by image id.

    In a folder with Tiny-ImageNet's file val_annotations.txt, the names are read from this file.
    Otherwise, the class of an image such as "cat/07.jpg" is the first folder in its id.

    Args:
        folder: Folder of the images.
        ids: Ids of the images, which are paths below the folder.
    """
    path = folder / _TINY_IMAGENET_LABELS
    if not path.is_file():
        return {image_id: _parse_class(image_id) for image_id in ids}
    rows = (line.split() for line in read_lines(path))
    listed = {row[0]: row[1] for row in rows if len(row) > 1}
    classes = {}
    for image_id in ids:
        name = PurePosixPath(image_id).name
        if name not in listed:
            raise DataError(f"{path} has no class for {image_id}. Use the published files")
        classes[image_id] = listed[name]
    return classes
