"""COCO-Stuff 164k: masks of things and stuff, with 171 classes or 27 groups of classes."""

import csv
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import Files, LabelMap, Masks
from ssl_bench.data.layouts.image_mask_folders import IndexMasks, PairedFolders, split_folder
from ssl_bench.data.samples import IGNORE_INDEX, find_existing_folder, find_root
from ssl_bench.data.splits import Split

CONVERTED = "_labelTrainIds.png"
"""Suffix of masks that mmsegmentation has converted to the classes 0 to 170."""

# 12 groups of things and 15 groups of stuff, in the order that papers with 27 classes use.
# fmt: off
COARSE_NAMES = (
    "electronic", "appliance", "food", "furniture", "indoor", "kitchen", "accessory", "animal",
    "outdoor", "person", "sports", "vehicle", "ceiling", "floor", "food-stuff", "furniture-stuff",
    "raw-material", "textile", "wall", "window", "building", "ground", "plant", "sky", "solid",
    "structural", "water",
)
# fmt: on


@dataclass(frozen=True)
class CocoStuff(PairedFolders):
    """COCO-Stuff 164k, https://github.com/nightrome/cocostuff.

    Attributes:
        root: The folder that contains the images in images/train2017/ or train2017/, and the masks
            in stuffthingmaps/ or annotations/.
        train_split: Name of the folders of training images and masks, or a part such as
            `train2017:0-75%`.
        val_split: Name of the folders of scored images and masks, or a part such as
            `val2017:0-50%`.
        classes: Number of classes: 171, or 27 for the groups of classes in COCO's hierarchy.
    """

    name = "coco_stuff"
    supports = frozenset({"segmentation", "images"})
    published_splits = MappingProxyType({"train": "train2017", "val": "val2017"})

    root: OptionalPath = None
    train_split: str = "train2017"
    val_split: str = "val2017"
    classes: Literal[171, 27] = 171

    def _images(self, split: str) -> Files:
        root, name = self._root(), Split.parse(split).name
        return Files(find_existing_folder([root / "images" / name, root / name]), ".jpg")

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        root, classes = self._root(), read_classes()
        maps = find_existing_folder(
            [root / "stuffthingmaps", root / "annotations/stuffthingmaps", root / "annotations"]
        )
        folder, numbers = split_folder(maps, split), list(classes)
        files = Files(folder, ".png", excluded_suffix=CONVERTED)
        # If the folder has both published and converted masks, the published masks are used.
        if not files.ids() and Files(folder, CONVERTED).ids():
            files, numbers = Files(folder, CONVERTED), list(range(len(classes)))
        if self.classes == 171:
            meanings, names = list(range(len(classes))), tuple(name for name, _ in classes.values())
        else:
            meanings = [COARSE_NAMES.index(group) for _, group in classes.values()]
            names = COARSE_NAMES
        labels = LabelMap(
            {**dict(zip(numbers, meanings, strict=True)), 255: IGNORE_INDEX},
            hint=f"Published masks are named ID.png. Converted masks must be named ID{CONVERTED}",
        )
        return IndexMasks(files, labels), names

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=("COCO", "coco"),
            marker_folders=(
                "stuffthingmaps",
                "annotations/stuffthingmaps",
                "annotations/train2017",
                "annotations/val2017",
            ),
            tree="images/{train2017,val2017}/*.jpg and stuffthingmaps/{train2017,val2017}/*.png",
        )


def read_classes() -> dict[int, tuple[str, str]]:
    """Return the name and the group of each class. Keys are the class numbers in published masks.

    Source: the groups are COCO's supercategories. Each class number is 1 less than in labels.txt of
    https://github.com/nightrome/cocostuff, because labels.txt begins with "unlabeled".
    """
    with Path(__file__).with_name("coco_stuff_classes.csv").open(encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {int(row["raw_id"]): (row["name"], row["supercategory"]) for row in rows}
