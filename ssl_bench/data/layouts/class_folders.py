"""Labelled pictures: a folder for each split, and in it a folder for each class."""

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
from ssl_bench.data.layouts.folder import ImageFolder, pictures_below
from ssl_bench.data.samples import ImageView, Layout, Sample, given_folder, require_own_name
from ssl_bench.data.splits import Split, absent_split, read_lines, require_disjoint
from ssl_bench.errors import DataError, escape_braces
from ssl_bench.system.files import is_output
from ssl_bench.system.output import say_once

_ANNOTATIONS = "val_annotations.txt"
# An odd number of 64 bits, so that classes change many of a mark's.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_VALIDATION_NAMES = ("val", "test")
_TRAIN = "train"
# Of classes directly below the root: the split of all, and what is taken where nobody says it.
_ALL, _ALL_TRAIN, _ALL_VAL = "all", "all:0-80%", "all:80-100%"


@dataclass(frozen=True)
class LabelledImages(ImageView):
    """Any image set, with the class of each of its images.

    Attributes:
        labels: Index into `class_names`, image by image.
    """

    class_names: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> Sample:
        return replace(self.images[index], label=self.labels[index])

    @cached_property
    def _fingerprint(self) -> str:
        return extend_fingerprint(self.images.fingerprint(), self.class_names, self.labels)

    def with_read_options(self, options: ReadOptions) -> "LabelledImages":
        """The same images, their files read in another way."""
        return replace(self, images=with_read_options(self.images, options))

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Of each image a number, another one where its file or its class is another."""
        return file_hashes(self.images) + np.array(self.labels, np.uint64) * _SPREAD

    def select(self, name: str, kept: Sequence[int]) -> "LabelledImages":
        """The images of these indices, under another name."""
        labels = tuple(self.labels[index] for index in kept)
        return replace(self, images=select_images(self.images, name, kept), labels=labels)


@dataclass(frozen=True)
class ClassFolders(Layout):
    """ROOT/SPLIT/CLASS/.../PICTURE; a class is the first folder below that of the split.

    Or ROOT/CLASS/PICTURE, as torchvision's ImageFolder has it: the split of all is called `all`
    then, and without a choice the first 80 % of each class, in the order of names, are `train`.

    Attributes:
        root: The folder that holds those of the splits.
        train_split: Folder of the training images, or a share such as `train:0-75%`; without it
            `train`.
        val_split: Folder of the scored images, or a share of it; without it `val`, else `test`.
        known_only: Leave out validation images of classes that the training split lacks, where
            they are an error otherwise.
        name: By which records and tables call it.
    """

    supports = frozenset({"classification", "images"})

    root: OptionalPath = None
    train_split: str | None = None
    val_split: str | None = None
    known_only: bool = False
    name: str = "class_folders"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_own_name(self.name)

    def train(self) -> LabelledImages:
        """The training images; a picture outside the folders, which are classes, is an error."""
        images = self._labelled(self._splits[0], {i: _first_folder(i) for i in self._train_ids})
        known = set(images.labels)
        for number, name in enumerate(images.class_names):
            if number not in known:
                raise DataError(
                    f"{self._root} has too few images of the class {name} for one in "
                    f"{images.split}; take a larger share, or the class out"
                )
        return images

    def val(self) -> LabelledImages:
        """The validation images, in the training split's numbering of the classes.

        Raises:
            DataError: as `train`, and for a class that the training split does not have.
            ConfigurationError: the two splits have images in common.
        """
        train, split = self._splits
        require_disjoint(train, split)
        folder = self._folder(split)
        classes = _listed_classes(folder, ImageFolder(folder).images().ids)
        if self.known_only:
            known = set(self._class_names)
            classes = {i: name for i, name in classes.items() if name in known}
        return self._labelled(split, classes)

    def images(self) -> LabelledImages:
        """The training images."""
        return self.train()

    def to_learn_from(self) -> LabelledImages:
        """What supervised training takes: `train`, or all where classes lie below the root."""
        if self._is_flat:
            return self._labelled(_ALL, {i: _first_folder(i) for i in self._train_ids})
        if not (self._root / _TRAIN).is_dir():
            names = sorted(one.name for one in self._root.iterdir() if one.is_dir())
            first = next((name for name in names if name.lower().startswith(_TRAIN)), names[0])
            folder = self._root / first
            raise DataError(
                f"{self._root} holds neither {_TRAIN}/CLASS/PICTURE nor CLASS/PICTURE, but "
                f"{', '.join(names[:5])}; name the folder above the classes",
                hint=(f"data.root={escape_braces(str(folder))}",),
            )
        return self.train()

    @property
    def _root(self) -> Path:
        if self.root is None:
            raise DataError(
                "expected a folder with train/CLASS/PICTURE in it", hint=("--data-root", "{folder}")
            )
        root = given_folder(self.root)
        if next(root.glob("*/*"), None) is None:
            raise DataError(
                f"{root} holds no class folders: expected train/CLASS/PICTURE and "
                "val/CLASS/PICTURE, or CLASS/PICTURE; see docs/data.md"
            )
        return root

    @cached_property
    def _is_flat(self) -> bool:
        """Whether pictures lie directly in the folders below the root, which are classes then."""
        firsts = {
            folder.name: next(pictures_below(folder), None)
            for folder in self._root.iterdir()
            if folder.is_dir() and folder.name[0] != "." and not is_output(folder)
        }
        # A class may be called train; one alone is a split.
        if firsts.keys() == {_TRAIN} or not firsts.keys().isdisjoint(_VALIDATION_NAMES):
            return False
        # Those of a folder come before those of the folders in it.
        found = [picture for picture in firsts.values() if picture is not None]
        return bool(found) and not any("/" in picture for picture in found)

    @cached_property
    def _splits(self) -> tuple[str, str]:
        """Names or shares of the training and the validation split."""
        train, val = self.train_split, self.val_split
        if train is None and val is None and self._is_flat:
            say_once(
                f"{self._root} has no folder {_TRAIN}: the folders in it are the classes, "
                f"{_ALL_TRAIN} of each to train on and {_ALL_VAL} to score"
            )
            return _ALL_TRAIN, _ALL_VAL
        present = (name for name in _VALIDATION_NAMES if (self._root / name).is_dir())
        return train or _TRAIN, val or next(present, _VALIDATION_NAMES[0])

    def _folder(self, split: str) -> Path:
        name = Split.parse(split).name
        if self._is_flat:
            if name != _ALL:
                raise DataError(
                    f"{self._root} has no split {name}: its folders are classes, and {_ALL} is the "
                    "split of them",
                    hint=(f"dataset.train_split={_ALL_TRAIN}", f"dataset.val_split={_ALL_VAL}"),
                )
            return self._root
        folder = self._root / name
        if folder.is_dir():
            return folder
        present = [one for one in self._root.iterdir() if one.is_dir()]
        if whole := [one.name for one in present if len(list(one.glob("*/"))) > 1]:
            raise absent_split(name, [one.name for one in present], self._root, whole)
        raise DataError(
            f"{self._root} has no split {name}, and none of its folders holds two classes; "
            "expected SPLIT/CLASS/PICTURE or CLASS/PICTURE; see docs/data.md"
        )

    @cached_property
    def _train_ids(self) -> tuple[str, ...]:
        return ImageFolder(self._folder(self._splits[0])).images().ids

    @cached_property
    def _class_names(self) -> tuple[str, ...]:
        return tuple(sorted({_first_folder(image_id) for image_id in self._train_ids}))

    def _labelled(self, split: str, classes: dict[str, str]) -> LabelledImages:
        """The share of a split, with `classes` naming the class of every image of the whole."""
        known, folder = self._class_names, self._folder(split)
        if len(known) < 2:
            raise DataError(
                f"{self._root} has the single class {', '.join(known)}; expected "
                "SPLIT/CLASS/PICTURE with two classes or more"
            )
        if unknown := sorted(set(classes.values()).difference(known)):
            raise DataError(
                f"{folder} has the class {join_names(unknown)}, which the {len(known)} training "
                "classes lack; leave such images out",
                hint=("dataset.known_only=true",),
            )
        # Of the sorted ids as a whole, a share would be some classes whole and others not at all.
        by_class: dict[str, list[str]] = {}
        for image_id, name in classes.items():
            by_class.setdefault(name, []).append(image_id)
        share = Split.parse(split)
        ids = tuple(sorted(i for names in by_class.values() for i in share.cut(names)))
        files = FileImageSet(
            name=self.name,
            split=split,
            source=folder,
            ids=ids,
            images=Files(folder, ""),
            upright=True,
        ).validate()
        numbers = {name: number for number, name in enumerate(known)}
        return LabelledImages(files, known, tuple(numbers[classes[i]] for i in ids))


def _first_folder(image_id: str) -> str:
    parts = PurePosixPath(image_id).parts
    if len(parts) < 2:
        raise DataError(f"{image_id} lies in no class folder; move it into one, or elsewhere")
    return parts[0]


def _listed_classes(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """Class of each image, by Tiny-ImageNet's list of file names where there is one."""
    listing = folder / _ANNOTATIONS
    if not listing.is_file():
        return {image_id: _first_folder(image_id) for image_id in ids}
    rows = (line.split() for line in read_lines(listing))
    named = {row[0]: row[1] for row in rows if len(row) > 1}
    classes = {}
    for image_id in ids:
        name = PurePosixPath(image_id).name
        if name not in named:
            raise DataError(f"{listing} names no class for {image_id}; take both as published")
        classes[image_id] = named[name]
    return classes
