"""ADE20K with the 150 classes of the scene parsing challenge."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import Files, LabelMap, Masks
from ssl_bench.data.layouts.image_mask_folders import IndexMasks, PairedFolders, split_folder
from ssl_bench.data.samples import IGNORE_INDEX, find_root
from ssl_bench.data.splits import read_lines

NUM_CLASSES = 150

# Published masks store 0 for "other" and 1 to 150 for the classes. Some tools convert them to 0 to
# 149, and 255 for "other". Such a mask is an error, because 255 is not in this map. If 1 was
# subtracted instead, the mask would be accepted with wrong classes.
LABELS = LabelMap(
    {0: IGNORE_INDEX, **{number: number - 1 for number in range(1, NUM_CLASSES + 1)}},
    hint="Use the published masks, which store 0 to 150",
)


@dataclass(frozen=True)
class Ade20k(PairedFolders):
    """ADE20K for semantic segmentation, http://sceneparsing.csail.mit.edu.

    Attributes:
        root: The folder ADEChallengeData2016, or its parent folder.
        train_split: Name of the training folder in images/ and in annotations/, or a part such as
            `training:0-75%`.
        val_split: Name of the scored folder in images/ and in annotations/, or a part such as
            `validation:0-50%`.
    """

    name = "ade20k"
    supports = frozenset({"segmentation", "images"})
    published_splits = MappingProxyType({"train": "training", "val": "validation"})

    root: OptionalPath = None
    train_split: str = "training"
    val_split: str = "validation"

    def _images(self, split: str) -> Files:
        return Files(split_folder(self._root() / "images", split), ".jpg")

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        root = self._root()
        files = Files(split_folder(root / "annotations", split), ".png")
        return IndexMasks(files, LABELS), class_names(root)

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=("ADEChallengeData2016",),
            marker_folders=("images/training", "images/validation"),
            tree="ADEChallengeData2016/{images,annotations}/{training,validation}",
        )


def class_names(root: Path) -> tuple[str, ...]:
    """Return the names of the 150 classes of ADE20K.

    The names are read from the file objectInfo150.txt in the folder `root`. If a class has several
    names, its first name is used. If this file is missing, the names are class_0 to class_149.
    """
    table = root / "objectInfo150.txt"
    if not table.is_file():
        return tuple(f"class_{number}" for number in range(NUM_CLASSES))
    rows = [line.split("\t") for line in read_lines(table)[1:]]
    return tuple(row[-1].split(",")[0].strip() for row in rows)
