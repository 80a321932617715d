"""ADE20K in the layout of the scene parsing challenge: 150 classes."""

from dataclasses import dataclass
from pathlib import Path

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import Files, LabelMap, Masks
from ssl_bench.data.layouts.image_mask_folders import IndexMasks, PairedFolders, split_folder
from ssl_bench.data.samples import IGNORED, find_root
from ssl_bench.data.splits import read_lines

NUM_CLASSES = 150

# The published masks hold 0 for "other" and the classes from 1 on. The shift is a table, not a
# subtraction: in uint8 0 - 1 is 255 only by luck, and a second shift would go unseen.
LABELS = LabelMap(
    {0: IGNORED, **{number: number - 1 for number in range(1, NUM_CLASSES + 1)}},
    hint="take the masks as published, 255 means that they were shifted already",
)


@dataclass(frozen=True)
class Ade20k(PairedFolders):
    """ADE20K, http://sceneparsing.csail.mit.edu.

    Attributes:
        root: ADEChallengeData2016 or the folder that holds it.
        train_split: Folder below images/ and annotations/, or a share of it, as `val_split`.
    """

    name = "ade20k"
    supports = frozenset({"segmentation", "images"})

    root: OptionalPath = None
    train_split: str = "training"
    val_split: str = "validation"

    def _images(self, split: str) -> Files:
        return Files(split_folder(self._root() / "images", split), ".jpg")

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        root = self._root()
        files = Files(split_folder(root / "annotations", split), ".png")
        return IndexMasks(files, LABELS), class_names(root)

    def _counted(self) -> dict[str, Files]:
        folders = {"train": "images/training", "val": "images/validation"}
        return {role: Files(self._root() / name, ".jpg") for role, name in folders.items()}

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            inside=("ADEChallengeData2016",),
            landmarks=("images/training", "images/validation"),
            tree="ADEChallengeData2016/{images,annotations}/{training,validation}",
        )


def class_names(root: Path) -> tuple[str, ...]:
    """The first synonym of each class from objectInfo150.txt, where the download has it."""
    table = root / "objectInfo150.txt"
    if not table.is_file():
        return tuple(f"class_{number}" for number in range(NUM_CLASSES))
    rows = [line.split("\t") for line in read_lines(table)[1:]]
    return tuple(row[-1].split(",")[0].strip() for row in rows)
