"""NYU Depth v2: indoor scenes with depth maps, or with masks of 40 classes.

The files have the folders and names of the BTS repository (monocular depth estimation).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import FileImageSet, Files, LabelMap
from ssl_bench.data.layouts.depth_folders import DepthImageSet, DepthMaps
from ssl_bench.data.layouts.image_mask_folders import IndexMasks, split_folder
from ssl_bench.data.samples import IGNORE_INDEX, Layout, find_root, resolve_dataset_name
from ssl_bench.data.splits import Split, read_list, require_disjoint
from ssl_bench.errors import DataError

# fmt: off
CLASS_NAMES = (
    "wall", "floor", "cabinet", "bed", "chair", "sofa", "table", "door", "window", "bookshelf",
    "picture", "counter", "blinds", "desk", "shelves", "curtain", "dresser", "pillow", "mirror",
    "floor mat", "clothes", "ceiling", "books", "refrigerator", "television", "paper", "towel",
    "shower curtain", "box", "whiteboard", "person", "night stand", "toilet", "sink", "lamp",
    "bathtub", "bag", "other structure", "other furniture", "other prop",
)
# fmt: on
_METRES_PER_UNIT = 0.001
_SHAPE = (480, 640)
_ROWS, _COLS = slice(45, 471), slice(41, 601)
_SPLIT = "{split}"


@dataclass(frozen=True)
class SceneFiles(Files):
    """Files in one folder for each scene. The id "kitchen/00045" stands for kitchen/rgb_00045.jpg.

    Attributes:
        prefix: Beginning of each file name, such as "rgb_".
    """

    prefix: str = ""

    def path(self, image_id: str) -> Path:
        scene, _, number = image_id.rpartition("/")
        return self.folder / scene / f"{self.prefix}{number}{self.suffix}"

    def ids(self) -> list[str]:
        """Return the sorted ids of the files in the folders of all scenes."""
        found = self.folder.glob(f"*/{self.prefix}*{self.suffix}")
        return sorted(self.parse(f"{path.parent.name}/{path.name}") for path in found)

    def parse(self, name: str) -> str:
        """Return the image id for a path relative to the folder, such as "kitchen/rgb_00045.jpg".

        Raises:
            ValueError: The path does not have this form.
        """
        scene, _, file = name.strip("/").rpartition("/")
        number = file.removeprefix(self.prefix).removesuffix(self.suffix)
        if not scene or file != f"{self.prefix}{number}{self.suffix}":
            raise ValueError
        return f"{scene}/{number}"

    def list_missing(self, ids: Sequence[str]) -> list[str]:
        paths = map(self.path, ids)
        return [f"{path.parent.name}/{path.name}" for path in paths if not path.is_file()]


@dataclass(frozen=True)
class EigenCrop(DepthMaps):
    """Depth maps of 640 x 480 pixels, in which the depth outside the Eigen crop is unknown.

    The crop consists of rows 45 to 470 and columns 41 to 600, counted from 0.

    Source: Eigen et al., "Depth Map Prediction from a Single Image using a Multi-Scale Deep
    Network", https://arxiv.org/abs/1406.2283.
    """

    def read(self, image_id: str) -> Float32[np.ndarray, "height width"]:
        metres = super().read(image_id)
        if metres.shape != _SHAPE:
            raise DataError(
                f"{self.files.path(image_id)} has {metres.shape[1]} x {metres.shape[0]} pixels, "
                f"expected {_SHAPE[1]} x {_SHAPE[0]} for the Eigen crop",
                hint=("dataset.eigen_crop=false",),
            )
        cropped = np.zeros_like(metres)
        cropped[_ROWS, _COLS] = metres[_ROWS, _COLS]
        return cropped

    def fingerprint_key(self) -> Sequence[object]:
        return [*super().fingerprint_key(), "Eigen crop"]


@dataclass(frozen=True)
class Nyu(Layout):
    """NYU Depth v2, https://cs.nyu.edu/~fergus/datasets/nyu_depth_v2.html.

    The files have the folders and names of https://github.com/cleinc/bts.

    Attributes:
        root: The folder that contains official_splits, or its parent folder nyu_depth_v2.
        train_split: Name of the training folder in official_splits/, or a part of it such as
            `train:0-75%`. If the folders do not contain the published 795 and 654 images, the
            number of images is appended to the dataset's name in stored results.
        val_split: Name of the scored folder in official_splits/, or a part such as `test:0-50%`.
        annotation: "depth" reads sync_depth_*.png, in millimetres. "classes" reads label40_*.png.
        reduce_zero: Whether label40_*.png store 1 to 40 for the classes and 0 for unlabelled
            pixels, as published. If False, the files store 0 to 39 for the classes and 255 for
            unlabelled pixels.
        eigen_crop: Whether depth outside rows 45:471 and columns 41:601 counts as unknown. The crop
            leaves out the white border of the images.
        lists: Path below the root of a file that lists the images of a split. `{split}` stands for
            the name of the split. Each line begins with the path of an image below the folder of
            the split. By default, a split consists of all files in its folder.
    """

    root: OptionalPath = None
    train_split: str = "train"
    val_split: str = "test"
    annotation: Literal["depth", "classes"] = "depth"
    reduce_zero: bool = True
    eigen_crop: bool = True
    lists: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_disjoint(self.train_split, self.val_split)

    @property
    def name(self) -> str:
        return "nyu" if self.annotation == "depth" else "nyu40"

    @property
    def supports(self) -> frozenset[str]:
        return frozenset({"depth" if self.annotation == "depth" else "segmentation", "images"})

    @property
    def class_names(self) -> tuple[str, ...]:
        return () if self.annotation == "depth" else CLASS_NAMES

    def train(self) -> FileImageSet:
        """Return the training images with depth maps or masks.

        Raises:
            DataError: The depth map or the mask of an image is missing.
        """
        return self._open_annotated(self.train_split)

    def val(self) -> FileImageSet:
        """Return the images that are scored, with depth maps or masks.

        Raises:
            DataError: The depth map or the mask of an image is missing.
        """
        return self._open_annotated(self.val_split)

    def images(self) -> FileImageSet:
        """Return the training images without their depth maps and masks."""
        return FileImageSet(**self._shared_fields(self.train_split)).validate()

    def _open_annotated(self, split: str) -> FileImageSet:
        shared = self._shared_fields(split)
        folder = shared["images"].folder
        if self.annotation == "classes":
            first, ignored = (1, 0) if self.reduce_zero else (0, IGNORE_INDEX)
            classes = {first + number: number for number in range(len(CLASS_NAMES))}
            hint = f"Use dataset.reduce_zero={str(not self.reduce_zero).lower()} for other numbers"
            labels = LabelMap({**classes, ignored: IGNORE_INDEX}, hint)
            masks = IndexMasks(SceneFiles(folder, ".png", prefix="label40_"), labels)
            return FileImageSet(**shared, class_names=CLASS_NAMES, masks=masks).validate()
        kind = EigenCrop if self.eigen_crop else DepthMaps
        depths = kind(SceneFiles(folder, ".png", prefix="sync_depth_"), _METRES_PER_UNIT)
        return DepthImageSet(**shared, depths=depths).validate()

    def _shared_fields(self, split: str) -> dict[str, Any]:
        """Return the arguments of `FileImageSet` for a split, except depth maps and masks."""
        source, ids = self._list_ids(Split.parse(split).name)
        return {
            "name": self._full_name,
            "split": split,
            "source": source,
            "ids": Split.parse(split).cut(ids),
            "images": self._images(split),
        }

    @cached_property
    def _full_name(self) -> str:
        ids: dict[str, Sequence[str]] = {}
        for key, split in (("train", self.train_split), ("val", self.val_split)):
            # A missing split does not change the name.
            with suppress(DataError):
                ids[key] = self._list_ids(Split.parse(split).name)[1]
        return resolve_dataset_name(self.name, ids)

    def _list_ids(self, split: str) -> tuple[Path, Sequence[str]]:
        """Return the folder or list file of a split, and the image ids that it contains."""
        images = self._images(split)
        if self.lists is None:
            return images.folder, images.ids()
        source = self._root() / self.lists.replace(_SPLIT, split)
        ids = []
        for line in read_list(source):
            try:
                ids.append(images.parse(line.split()[0]))
            except ValueError as error:
                raise DataError(
                    f"{source} has the line {line!r}, expected a line that begins with "
                    "SCENE/rgb_NUMBER.jpg, as in the lists of https://github.com/cleinc/bts"
                ) from error
        return source, ids

    def _images(self, split: str) -> SceneFiles:
        folder = split_folder(self._root() / "official_splits", split)
        return SceneFiles(folder, ".jpg", prefix="rgb_")

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=("nyu_depth_v2",),
            marker_folders=("official_splits",),
            tree="official_splits/{train,test}/SCENE/rgb_*.jpg with sync_depth_*.png",
        )
