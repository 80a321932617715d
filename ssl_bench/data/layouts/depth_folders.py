"""Images with depth maps, in two folders with the same file names."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from ssl_bench.composition.fields import OptionalPath, Positive
from ssl_bench.data.files.file_sets import FileImageSet, Files
from ssl_bench.data.files.fingerprints import ImageSetHashes, extend_fingerprint
from ssl_bench.data.files.images import read_integer_image
from ssl_bench.data.layouts.image_mask_folders import NestedFiles
from ssl_bench.data.samples import Layout, Sample, find_root, reject_published_name
from ssl_bench.data.splits import Split, require_disjoint
from ssl_bench.errors import DataError

_SPLIT = "{split}"


@dataclass(frozen=True)
class DepthMaps:
    """Files that store the depth of each pixel as a whole number, or 0 if the depth is unknown.

    Attributes:
        files: The depth files.
        metres_per_unit: Depth in metres for the stored number 1.
        max_metres: Largest valid depth in metres, or None for no limit. Larger depths count as
            unknown.
    """

    files: Files
    metres_per_unit: float
    max_metres: float | None = None

    def read(self, image_id: str) -> Float32[np.ndarray, "height width"]:
        """Return the depth of each pixel of an image in metres, or 0 if it is unknown.

        Raises:
            DataError: The file cannot be read, was saved with a lossy compression, or stores
                colours.
        """
        numbers = read_integer_image(self.files.path(image_id), content="one depth per pixel")
        metres = numbers * self.metres_per_unit
        if self.max_metres is not None:
            metres[metres > self.max_metres] = 0
        return metres.astype(np.float32)

    def fingerprint_key(self) -> Sequence[object]:
        """Return the settings that convert stored numbers to depths.

        The fingerprint (hash) of the image set depends on these settings.
        """
        return ["depth", self.metres_per_unit, self.max_metres]


@dataclass(frozen=True)
class DepthImageSet(FileImageSet):
    """Images with depth maps.

    Attributes:
        depths: The depth maps.
    """

    depths: DepthMaps = field(kw_only=True)

    def __getitem__(self, index: int) -> Sample:
        """Decode one image and its depth map.

        Raises:
            DataError: A file is unreadable, or the depth map and the image differ in size.
        """
        sample = super().__getitem__(index)
        depth = self.depths.read(sample.image_id)
        if depth.shape != sample.image.shape[:2]:
            raise DataError(
                f"{self.depths.files.path(sample.image_id)} has {depth.shape[1]} x "
                f"{depth.shape[0]} pixels, but its image has {sample.image.shape[1]} x "
                f"{sample.image.shape[0]}. Resize the depth map without interpolation"
            )
        return replace(sample, depth=depth)

    def files(self, index: int) -> tuple[Path, ...]:
        return (*super().files(index), self.depths.files.path(self.ids[index]))

    @cached_property
    def _hashes(self) -> ImageSetHashes:
        hashes = super()._hashes
        fingerprint = extend_fingerprint(hashes.fingerprint, self.depths.fingerprint_key())
        return hashes._replace(fingerprint=fingerprint)

    def validate(self) -> "DepthImageSet":
        super().validate()
        self.require_files(self.depths.files, self.ids, "depth maps")
        return self


@dataclass(frozen=True)
class DepthFolders(Layout):
    """A folder of images and a folder of depth maps. An image and its map have the same name.

    Attributes:
        root: The folder that contains the folders of the images and of the depth maps.
        name: Name of the dataset in stored results and tables.
        train_split: Name of the training split, or a part of it such as `train:0-75%`.
        val_split: Name of the scored split, or a part of it such as `val:0-50%`.
        image_folder: Folder of the images below the root. `{split}` stands for the name of the
            split. Images and depth maps may be in subfolders with the same names.
        depth_folder: Folder of the depth maps below the root. `{split}` stands for the name of the
            split.
        image_suffix: End of the file names of the images. An image and its depth map have the same
            name before this suffix.
        depth_suffix: End of the file names of the depth maps.
        metres_per_unit: Depth in metres of the stored number 1. By default, depth maps store
            millimetres. The number 0 always means that the depth is unknown.
        max_metres: Largest valid depth in metres, or None for no limit. Larger depths count as
            unknown.
    """

    supports = frozenset({"depth", "images"})

    root: OptionalPath = None
    name: str = "depth_folders"
    train_split: str = "train"
    val_split: str = "val"
    image_folder: str = f"images/{_SPLIT}"
    depth_folder: str = f"depth/{_SPLIT}"
    image_suffix: str = ".jpg"
    depth_suffix: str = ".png"
    metres_per_unit: Positive = 0.001
    max_metres: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_published_name(self.name)
        require_disjoint(self.train_split, self.val_split)

    def train(self) -> DepthImageSet:
        """Return the training images with depth maps.

        Raises:
            DataError: An image or its depth map is missing.
        """
        return self._open_depth(self.train_split)

    def val(self) -> DepthImageSet:
        """Return the images that are scored, with depth maps.

        Raises:
            DataError: An image or its depth map is missing.
        """
        return self._open_depth(self.val_split)

    def images(self) -> FileImageSet:
        """Return the training images without their depth maps."""
        files = self._files(self.image_folder, self.image_suffix, self.train_split)
        return FileImageSet(
            name=self.name,
            split=self.train_split,
            source=files.folder,
            ids=Split.parse(self.train_split).cut(files.ids()),
            images=files,
        ).validate()

    def _open_depth(self, split: str) -> DepthImageSet:
        images = self._files(self.image_folder, self.image_suffix, split)
        depths = self._files(self.depth_folder, self.depth_suffix, split)
        return DepthImageSet(
            name=self.name,
            split=split,
            source=images.folder,
            # Depth maps without an image are included, so that the missing image is reported.
            ids=Split.parse(split).cut({*images.ids(), *depths.ids()}),
            images=images,
            depths=DepthMaps(depths, self.metres_per_unit, self.max_metres),
        ).validate()

    def _files(self, pattern: str, suffix: str, split: str) -> NestedFiles:
        names = {Split.parse(each).name for each in (self.train_split, self.val_split)}
        tree = f"{self.image_folder}/*{self.image_suffix}, {self.depth_folder}/*{self.depth_suffix}"
        root = find_root(
            self.root,
            name=self.name,
            subfolders=(),
            marker_folders=[self.image_folder.replace(_SPLIT, name) for name in sorted(names)],
            tree=tree,
        )
        folder = root / pattern.replace(_SPLIT, Split.parse(split).name)
        if not folder.is_dir():
            raise DataError(f"{folder} does not exist, expected {tree} below {root}")
        return NestedFiles(folder, suffix)
