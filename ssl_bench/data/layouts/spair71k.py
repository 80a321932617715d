"""SPair-71k: pairs of images of one category, with corresponding points."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import (
    FileImageSet,
    Files,
    FileSet,
    parse_numbers,
    validate_boxes,
)
from ssl_bench.data.files.fingerprints import FilePart
from ssl_bench.data.files.images import read_image
from ssl_bench.data.samples import Layout, Pair, Sample, find_root, resolve_dataset_name
from ssl_bench.data.splits import Split, read_list
from ssl_bench.errors import DataError
from ssl_bench.system.files import read_regular
from ssl_bench.system.process import reraise_out_of_memory

CATEGORIES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "train", "tvmonitor"),
)


@dataclass(frozen=True)
class SpairPairs(FileSet):
    """Pairs of a source image and a target image, with corresponding points.

    The image of a sample is the source image. The attribute `pair` of the sample contains the
    target image and the points of both images.

    Attributes:
        ids: Ids of the pairs: the lines NUMBER-SOURCE-TARGET:CATEGORY of the published list.
        annotations: JSON files, one for each pair.
    """

    class_names: tuple[str, ...] = CATEGORIES
    annotations: Files = field(kw_only=True)

    def __getitem__(self, index: int) -> Sample:
        """Decode both images of a pair and read their corresponding points.

        Raises:
            DataError: A file is unreadable, or is not an annotation of SPair-71k.
        """
        pair_id = self.ids[index]
        *image_ids, category = _parse_line(pair_id, self.source)
        images = [read_image(self.images.path(i), self.options.bits) for i in image_ids]
        file = self.annotations.path(pair_id)
        try:
            annotation = json.loads(read_regular(file))
        except Exception as error:
            reraise_out_of_memory(error)
            raise _annotation_error(file, str(error)) from error
        if not isinstance(annotation, dict) or annotation.get("category") != category:
            raise _annotation_error(file, f"it is not of the category {category}")
        source = _parse_points(annotation, "src_kps", images[0].shape[1::-1], file)
        target = _parse_points(annotation, "trg_kps", images[1].shape[1::-1], file)
        if len(source) != len(target):
            raise _annotation_error(file, f"it has {len(source)} src_kps and {len(target)} trg_kps")
        ((left, top, right, bottom),) = validate_boxes(
            [annotation.get("trg_bndbox")], file, ["trg_bndbox"], images[1].shape[:2]
        )
        pair = Pair(
            image_ids=(image_ids[0], image_ids[1]),
            image=images[1],
            source=source,
            target=target,
            extent=max(right - left, bottom - top),
            category=category,
        )
        return Sample(pair_id, images[0], pair=pair)

    def fingerprint(self) -> str:
        """Return a SHA-256 of the ids, annotations and images of all pairs."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        paths = [self.annotations.path(pair_id) for pair_id in self.ids]
        paths += [self.images.path(image_id) for image_id in self._image_ids]
        with self.identify_parts(map(FilePart, paths), len(paths)) as found:
            rows = zip((*self.ids, *self._image_ids), found, strict=True)
            return self.options.compute_fingerprint(rows)

    @property
    def _image_ids(self) -> tuple[str, ...]:
        lines = (_parse_line(pair_id, self.source) for pair_id in self.ids)
        return tuple(sorted({image_id for *pair, _ in lines for image_id in pair}))

    def validate(self) -> "SpairPairs":
        """Check that all images and annotations exist, and return the set itself.

        Raises:
            DataError: There are no pairs, a pair occurs twice, or files are missing.
        """
        self.require_ids("pair")
        self.require_files(self.images, self._image_ids, "images")
        self.require_files(self.annotations, self.ids, "pairs")
        return self


@dataclass(frozen=True)
class Spair71k(Layout):
    """SPair-71k with the pairs in Layout/large, http://cvlab.postech.ac.kr/research/SPair-71k.

    Attributes:
        root: The folder that contains JPEGImages, PairAnnotation and Layout, or its parent folder.
        val_split: `test`, `val`, `trn`, or a part of one of them such as `test:0-10%`. If the list
            of the split does not have the published 12,234 pairs, its number of pairs is appended
            to the dataset's name in stored results.
    """

    name = "spair71k"
    supports = frozenset({"correspondence", "images"})
    class_names = CATEGORIES

    root: OptionalPath = None
    val_split: str = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        Split.parse(self.val_split)

    def val(self) -> SpairPairs:
        """Return the pairs of images of `val_split`.

        Raises:
            DataError: A file is missing, or a line of the list is invalid.
        """
        root, split = self._root(), Split.parse(self.val_split)
        source = root / "Layout/large" / f"{split.name}.txt"
        lines = read_list(source)
        return SpairPairs(
            name=resolve_dataset_name(self.name, {"val": lines}),
            split=self.val_split,
            source=source,
            ids=split.cut(lines),
            images=Files(root / "JPEGImages", ".jpg"),
            annotations=Files(root / "PairAnnotation" / split.name, ".json"),
        ).validate()

    def images(self) -> FileImageSet:
        """Return the images of all splits."""
        folder = self._root() / "JPEGImages"
        ids = sorted(
            f"{file.parent.name}/{file.stem}"
            for file in folder.glob("*/*.jpg")
            if file.name[0] != "."
        )
        return FileImageSet(
            name=resolve_dataset_name(self.name, {"images": ids}),
            split="all",
            source=folder,
            ids=tuple(ids),
            images=Files(folder, ".jpg"),
        ).validate()

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=("SPair-71k",),
            marker_folders=("PairAnnotation", "JPEGImages"),
            tree="JPEGImages/CLASS/*.jpg, PairAnnotation/SPLIT/*.json and Layout/large/SPLIT.txt",
        )


def _parse_line(line: str, file: Path) -> tuple[str, str, str]:
    """Parse a line NUMBER-SOURCE-TARGET:CATEGORY. Return the two image ids and the category.

    `file` is the list with the line, for the error message.
    """
    names, _, category = line.partition(":")
    parts = names.split("-")
    if len(parts) != 3 or category not in CATEGORIES:
        raise DataError(
            f"{file} has the line {line!r}, expected NUMBER-SOURCE-TARGET:CATEGORY. Use the "
            "published lists"
        )
    return f"{category}/{parts[1]}", f"{category}/{parts[2]}", category


def _parse_points(
    annotation: dict[str, Any], key: str, sides: Sequence[int], file: Path
) -> Float64[np.ndarray, "points 2"]:
    """Return the annotated points of an image as (x, y) in pixels.

    The annotations store pixel indices, so 0.5 is added to get the centres of the pixels.

    Args:
        annotation: Parsed annotation of a pair.
        key: "src_kps" for the points of the source image, "trg_kps" for those of the target image.
        sides: Width and height of the image in pixels.
        file: File of the annotation, for error messages.
    """
    points = annotation.get(key)
    try:
        if not isinstance(points, list) or not points:
            raise ValueError(f"got {points!r}")
        indices = np.array([parse_numbers(point, 2) for point in points])
    except ValueError as error:
        raise _annotation_error(file, f"{key} is not a list of points: {error}") from error
    # Some published points are on the far edge, one pixel beyond the last index.
    if not ((indices >= 0) & (indices <= np.array(sides))).all():
        raise _annotation_error(file, f"{key} has points outside the {sides[0]} x {sides[1]} image")
    return indices + 0.5


def _annotation_error(file: Path, reason: str) -> DataError:
    return DataError(f"{file} is not an annotation of SPair-71k ({reason}). Unpack it again")
