"""Cityscapes: street scenes. Masks store the published class ids, or the 19 training ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from ssl_bench.composition.fields import MaskValue
from ssl_bench.data.files.file_sets import Masks
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders, IndexMasks
from ssl_bench.data.samples import IGNORE_INDEX
from ssl_bench.errors import DataError

_TRAIN_IDS = "labelTrainIds.png"
# fmt: off
_CLASS_NAMES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign",
    "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus", "train",
    "motorcycle", "bicycle",
)
# fmt: on
_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
# Published masks never store 255. It is still listed, because the fingerprints of stored results
# depend on this list.
_IGNORED_IDS = (0, 1, 2, 3, 4, 5, 6, 9, 10, 14, 15, 16, 18, 29, 30, IGNORE_INDEX)


@dataclass(frozen=True)
class PublishedIds(IndexMasks):
    """Masks of Cityscapes that store the published class ids, 0 to 33."""

    checks_first_mask = True

    def require_convention(self, numbers: Integer[np.ndarray, "height width"], path: Path) -> None:
        """Raise `DataError` if a mask stores 255, which occurs only in masks of training ids."""
        if (numbers == IGNORE_INDEX).any():
            raise DataError(
                f"{path} stores 255, which occurs only in masks of training ids. Such masks are "
                "usually named *_labelTrainIds.png. Remove this mask, or declare that all masks "
                "store training ids",
                hint=("dataset.numbers=null", "dataset.ignored=[255]"),
            )


@dataclass(frozen=True)
class Cityscapes(ImageMaskFolders):
    """Cityscapes, https://www.cityscapes-dataset.com, in the folders leftImg8bit and gtFine.

    By default, masks store the published class ids. If `mask_suffix` is
    `_gtFine_labelTrainIds.png`, masks store training ids, and the settings `numbers` and `ignored`
    (the ids of classes and of ignored pixels) have no effect.
    """

    name: str = "cityscapes"
    image_folder: str = "leftImg8bit/{split}"
    mask_folder: str = "gtFine/{split}"
    image_suffix: str = "_leftImg8bit.png"
    mask_suffix: str = "_gtFine_labelIds.png"
    class_names: Sequence[str] = _CLASS_NAMES
    numbers: Sequence[MaskValue] | None = _IDS
    ignored: Sequence[MaskValue] | None = _IGNORED_IDS

    def __post_init__(self) -> None:
        if self.mask_suffix.endswith(_TRAIN_IDS):
            object.__setattr__(self, "numbers", None)
            object.__setattr__(self, "ignored", None)
        super().__post_init__()

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        masks, names = super()._masks(split)
        if self.numbers is not None:
            masks = PublishedIds(masks.files, masks.labels)
        return masks, names
