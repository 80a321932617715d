"""Datasets in the WebDataset format: images in tar files, with or without class numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ssl_bench.data.files.tar_shards import (
    INVALID_LABEL,
    NO_LABEL,
    SHARD_SUFFIXES,
    TarImages,
    find_shards,
)
from ssl_bench.data.layouts.class_folders import ClassificationSplits, LabelledImages
from ssl_bench.data.layouts.folder import find_image_paths
from ssl_bench.errors import DataError
from ssl_bench.system.files import expand_path, list_files

_CHOOSE_SPLITS = ("dataset.train_split={folder}", "dataset.val_split={folder}")
_TRAIN_NAMES, _VAL_NAMES = ("train",), ("val", "test")


def is_webdataset(root: str | Path) -> bool:
    """Return whether a path stands for tar files.

    Such a path is a tar file, a folder with tar files but no images, or a pattern such as
    "shards/{000..099}.tar".
    """
    path = expand_path(root)
    if not path.is_dir():
        return not set("*?[{").isdisjoint(str(path)) or path.name.lower().endswith(SHARD_SUFFIXES)
    if next(find_image_paths(path), None) is not None:
        return False
    return any(name.lower().endswith(SHARD_SUFFIXES) for name in list_files(path))


@dataclass(frozen=True)
class WebDataset(ClassificationSplits):
    """Images such as `KEY.jpg` in tar files, with class numbers in `KEY.cls`.

    Attributes:
        root: Tar file, folder of tar files, or pattern such as `shards/{000..099}.tar`. If a task
            needs training and validation images, the root must be a folder.
        train_split: Folder or pattern of the training images below `root`. By default, it is the
            folder `train`, or all tar files with a word in their names that begins with `train`.
        val_split: Folder or pattern of the scored images below `root`. By default, it is the folder
            `val`, or all tar files with a word in their names that begins with `val`. If there are
            none, `test` is used instead of `val`.
    """

    name: str = "webdataset"

    def images(self) -> TarImages:
        """Return all images in the tar files, with or without class numbers."""
        return self._open(find_shards(self._root), "all")

    def train(self) -> LabelledImages:
        """Return the training images.

        Raises:
            DataError: A tar file is missing or damaged, or an image has no class number.
        """
        return self._train

    def val(self) -> LabelledImages:
        """Return the images that are scored. Labels are indices into the training classes.

        Raises:
            DataError: A tar file is missing or damaged, both splits contain the same tar file, an
                image has no class number, or its class has no training image.
        """
        shards = self._shards(self.val_split, _VAL_NAMES)
        if shared := sorted({*shards}.intersection(self._train_shards)):
            raise DataError(
                f"the tar file {shared[0]} is in both the training split and the scored split",
                hint=_CHOOSE_SPLITS,
            )
        images = self._open(shards, self.val_split or _VAL_NAMES[0])
        numbers = _read_class_numbers(images)
        known = {int(name): label for label, name in enumerate(self._train.class_names)}
        if self.known_only:
            kept = [index for index, number in enumerate(numbers) if number in known]
            if not kept:
                raise DataError(
                    f"no image in {images.folder} has a class of the training images. Use splits "
                    "with the same classes"
                )
            images = images.select(images.name, kept)
            numbers = [numbers[index] for index in kept]
        if unknown := sorted(set(numbers).difference(known)):
            raise DataError(
                f"{images.folder} has images of class {unknown[0]}, but no training image has this "
                "class. Remove such images or leave them out",
                hint=("dataset.known_only=true",),
            )
        labels = tuple(known[number] for number in numbers)
        return LabelledImages(images, self._train.class_names, labels)

    def pretraining_images(self) -> LabelledImages:
        """Return the images for supervised pretraining, with class labels.

        If `root` is a folder with a training split, only the training images are returned.
        Otherwise, all images are returned.

        Raises:
            DataError: A tar file is missing or damaged, or an image has no class number.
        """
        if self._root.is_dir() and (self.train_split or self._find(_TRAIN_NAMES)):
            return self._train
        return _label_images(self.images())

    @property
    def _root(self) -> Path:
        if self.root is None:
            raise DataError(
                "no folder or pattern of tar files was given", hint=("--data-root", "{folder}")
            )
        return expand_path(self.root)

    @cached_property
    def _train(self) -> LabelledImages:
        return _label_images(self._open(self._train_shards, self.train_split or _TRAIN_NAMES[0]))

    @cached_property
    def _train_shards(self) -> list[Path]:
        return self._shards(self.train_split, _TRAIN_NAMES)

    def _shards(self, split: str | None, names: Sequence[str]) -> list[Path]:
        """Return the tar files of a split.

        Args:
            split: Folder or pattern below the root, or None to search for `names`.
            names: Usual names of the split, such as ["val", "test"], in the order in which they are
                tried. A name matches a folder, or tar files such as imagenet-val-00.tar. It does
                not match interval-0.tar, because a lower-case letter precedes it.
        """
        if not self._root.is_dir():
            raise DataError(
                f"{self._root} is not a folder, expected a folder with train/*.tar and val/*.tar",
                hint=("--data-root", "{folder}"),
            )
        if split is not None:
            return find_shards(self._root / split)
        if shards := self._find(names):
            return shards
        raise DataError(
            f"{self._root} has no folder {names[0]}, and no tar file with a name such as "
            f"{names[0]}-000.tar",
            hint=_CHOOSE_SPLITS,
        )

    def _find(self, names: Sequence[str]) -> list[Path]:
        for name in names:
            if (self._root / name).is_dir():
                return find_shards(self._root / name)
            # "val" matches "imagenet1k-validation-00.tar", but not "interval-0.tar".
            word = re.compile(f"(?<![a-z]){name}")
            if shards := [p for p in sorted(self._root.glob("*.tar")) if word.search(p.name)]:
                return shards
        return []

    def _open(self, shards: Sequence[Path], split: str) -> TarImages:
        return TarImages.open(shards, name=self.name, split=split)


def _label_images(images: TarImages) -> LabelledImages:
    """Return images with class labels, which are 0, 1, 2, ... in the order of the class numbers.

    For example, the class numbers 3 and 7 in the tar files become the labels 0 and 1.
    """
    numbers = _read_class_numbers(images)
    classes = sorted(set(numbers))
    if len(classes) < 2:
        raise DataError(f"{images.folder} has the single class {classes[0]}, expected at least two")
    labels = {number: label for label, number in enumerate(classes)}
    return LabelledImages(
        images, tuple(map(str, classes)), tuple(labels[number] for number in numbers)
    )


def _read_class_numbers(images: TarImages) -> list[int]:
    numbers: list[int] = images.members[:, -1].tolist()
    for value, problem in (
        (NO_LABEL, "no member KEY.cls with a class number"),
        (INVALID_LABEL, "a member KEY.cls that is not a class number such as 7"),
    ):
        if value in numbers:
            first = images.folder / images.ids[numbers.index(value)]
            raise DataError(f"{numbers.count(value)} images have {problem}, such as {first}")
    return numbers
