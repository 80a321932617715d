"""Datasets with a folder of images and a folder of masks for each split."""

from collections.abc import Mapping
from pathlib import Path

from ssl_bench.data.files.file_sets import FileImageSet, Files, Masks
from ssl_bench.data.roles import Layout
from ssl_bench.data.splits import Split, absent_split


class PairedFolders(Layout):
    """What all such datasets have in common; each says what the masks of a split mean."""

    train_split: str
    val_split: str

    def train(self) -> FileImageSet:
        return self._segmentation(self.train_split)

    def val(self) -> FileImageSet:
        return self._segmentation(self.val_split)

    def _segmentation(self, split: str) -> FileImageSet:
        raise NotImplementedError


def paired_set(
    name: str, split: str, *, images: Files, masks: Masks, class_names: tuple[str, ...]
) -> FileImageSet:
    """The images of two folders that must hold the same ids.

    Raises:
        DataError: an image has no mask, a mask has no image, or there is none at all.
    """
    return FileImageSet(
        name=name,
        split=split,
        source=images.folder,
        # Of both: an image that got lost must not shrink the split in silence.
        ids=Split.parse(split).cut({*images.ids(), *masks.files.ids()}),
        images=images,
        class_names=class_names,
        masks=masks,
    ).checked()


def ids_of_folders(files: Mapping[str, Files]) -> dict[str, list[str]]:
    """What lies in the folders that are there."""
    return {role: some.ids() for role, some in files.items() if some.folder.is_dir()}


def picture_set(name: str, split: str, images: Files) -> FileImageSet:
    """The images of one folder.

    Raises:
        DataError: there is none.
    """
    ids = Split.parse(split).cut(images.ids())
    return FileImageSet(
        name=name, split=split, source=images.folder, ids=ids, images=images
    ).checked()


def split_folder(parent: Path, split: str) -> Path:
    """The folder of a split.

    Raises:
        DataError: there is none; those that are there are named, and what to type.
    """
    name = Split.parse(split).name
    if not (parent / name).is_dir():
        present = [folder.name for folder in parent.glob("*") if folder.is_dir()]
        raise absent_split(name, present, parent)
    return parent / name
