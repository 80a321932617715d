"""COCO-Stuff 164k: things and stuff in one mask, 171 classes or 27 groups of them."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import Files, LabelMap, Masks
from ssl_bench.data.layouts.image_mask_folders import IndexMasks, PairedFolders, split_folder
from ssl_bench.data.samples import IGNORED, find_root, first_folder
from ssl_bench.data.splits import Split

REMAPPED = "_labelTrainIds.png"
"""End of the names of masks that another suite has already turned into 0..170."""

# 12 groups of things, then 15 of stuff, in the order that papers with 27 classes use.
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
        root: The folder with images/ (or train2017/ itself) and stuffthingmaps/ or annotations/.
        train_split: Folder of images and of masks, or a share of it, as `val_split`.
        classes: 171, or 27 for the groups of COCO's hierarchy.
    """

    name = "coco_stuff"
    supports = frozenset({"segmentation", "images"})

    root: OptionalPath = None
    train_split: str = "train2017"
    val_split: str = "val2017"
    classes: Literal[171, 27] = 171

    def _images(self, split: str) -> Files:
        root, name = self._root(), Split.parse(split).name
        return Files(first_folder([root / "images" / name, root / name]), ".jpg")

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        root, classes = self._root(), read_classes()
        maps = first_folder(
            [root / "stuffthingmaps", root / "annotations/stuffthingmaps", root / "annotations"]
        )
        folder, numbers = split_folder(maps, split), list(classes)
        files = Files(folder, ".png", excluded_suffix=REMAPPED)
        # mmsegmentation writes remapped masks beside the published ones; some keep only those.
        if not files.ids() and Files(folder, REMAPPED).ids():
            files, numbers = Files(folder, REMAPPED), list(range(len(classes)))
        if self.classes == 171:
            meanings, names = list(range(len(classes))), tuple(name for name, _ in classes.values())
        else:
            meanings = [COARSE_NAMES.index(group) for _, group in classes.values()]
            names = COARSE_NAMES
        labels = LabelMap(
            {**dict(zip(numbers, meanings, strict=True)), 255: IGNORED},
            hint=f"published masks are named ID.png, remapped ones must be named ID{REMAPPED}",
        )
        return IndexMasks(files, labels), names

    def _counted(self) -> dict[str, Files]:
        root, names = self._root(), {"train": "train2017", "val": "val2017"}
        return {
            role: Files(parent / name, ".jpg")
            for role, name in names.items()
            for parent in (root, root / "images")
            if (parent / name).is_dir()
        }

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            inside=("COCO", "coco"),
            landmarks=(
                "stuffthingmaps",
                "annotations/stuffthingmaps",
                "annotations/train2017",
                "annotations/val2017",
            ),
            tree="images/{train2017,val2017}/*.jpg and stuffthingmaps/{train2017,val2017}/*.png",
        )


def read_classes() -> dict[int, tuple[str, str]]:
    """Raw id to (name, group) for the 171 ids that occur, in order.

    Source: https://github.com/nightrome/cocostuff, labels.txt less one (0 there is "unlabeled"),
    and the supercategories of COCO.
    """
    with Path(__file__).with_name("coco_stuff_classes.csv").open(encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {int(row["raw_id"]): (row["name"], row["supercategory"]) for row in rows}
