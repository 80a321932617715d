"""Datasets with a folder of images and a folder of masks for each split."""

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ssl_bench.data.files.file_sets import FileImageSet, Files, Masks
from ssl_bench.data.published import name_of_images
from ssl_bench.data.roles import Layout
from ssl_bench.data.splits import Split, absent_split, require_disjoint


class PairedFolders(Layout):
    """What all such datasets have in common; each says where its files are and what masks mean."""

    supports: Any
    train_split: str
    val_split: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if "segmentation" in self.supports:
            require_disjoint(self.train_split, self.val_split)

    def train(self) -> FileImageSet:
        """Images with masks to fit to.

        Raises:
            DataError: an image has no mask, a mask has no image, or there is none at all.
        """
        return self._segmentation(self.train_split)

    def val(self) -> FileImageSet:
        """Images with masks to score with; errors are those of `train`."""
        return self._segmentation(self.val_split)

    def images(self) -> FileImageSet:
        """The pictures of `train_split`, of which there have to be some."""
        return self._set(self.train_split, None, ()).checked()

    def _segmentation(self, split: str) -> FileImageSet:
        return self._set(split, *self._masks(split)).checked()

    def _set(self, split: str, masks: Masks | None, class_names: tuple[str, ...]) -> FileImageSet:
        images = self._images(split)
        source, ids = self._listed(split, images, masks)
        return FileImageSet(
            name=self._images_name,
            split=split,
            source=source,
            ids=Split.parse(split).cut(ids),
            images=images,
            class_names=class_names,
            masks=masks,
        )

    def _listed(
        self, split: str, images: Files, masks: Masks | None
    ) -> tuple[Path, Collection[str]]:
        """Where the ids of a whole split come from, and they."""
        del split
        # Of both: an image that got lost must not shrink the split in silence.
        return images.folder, {*images.ids(), *(masks.files.ids() if masks else ())}

    @cached_property
    def _images_name(self) -> str:
        files = self._counted()
        present = {role: one.ids() for role, one in files.items() if one.folder.is_dir()}
        return name_of_images(self.name, present)

    def _images(self, split: str) -> Files:
        raise NotImplementedError

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        """Those of a split, and the names of their classes."""
        raise NotImplementedError

    def _counted(self) -> Mapping[str, Files]:
        """The whole splits by role, as published numbers count them."""
        raise NotImplementedError


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
