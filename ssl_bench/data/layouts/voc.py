"""PASCAL VOC: masks with a palette, boxes in XML files, and lists of images."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Float64

from ssl_bench.composition.fields import Bounds, OptionalPath
from ssl_bench.data.files.file_sets import (
    Boxes,
    FileImageSet,
    Files,
    LabelMap,
    Masks,
    validate_boxes,
)
from ssl_bench.data.samples import IGNORE_INDEX, Layout, find_root, resolve_dataset_name
from ssl_bench.data.splits import Split, find_image_ids, read_list, require_disjoint
from ssl_bench.errors import DataError
from ssl_bench.system.files import read_regular
from ssl_bench.system.process import reraise_out_of_memory

# fmt: off
CLASS_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)
# fmt: on
_DECIMAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_XML_ENCODING = re.compile(rb"""\s*<\?xml[^>]*\sencoding\s*=\s*["']([\w.:-]+)""", re.ASCII)
_CLASS_FLAG = re.compile(r"\s(-1|0|1)$", re.ASCII)
_LISTS = {
    "train": "Segmentation/train.txt",
    "val": "Segmentation/val.txt",
    "discovery": "Main/trainval.txt",
}


@dataclass(frozen=True)
class VocBoxes(Boxes):
    """Boxes from VOC's XML files.

    Attributes:
        files: One XML file for each image.
        exclude_difficult: Whether to leave out objects that are marked as difficult or truncated.
    """

    files: Files
    exclude_difficult: bool = False

    def read(
        self, image_id: str, size: tuple[int, int] | None = None
    ) -> Float64[np.ndarray, "boxes 4"]:
        """Return the boxes of an image as (x0, y0, x1, y1) in pixels, counted from 0.

        The edges x1 and y1 are exclusive. In the XML files, pixels are counted from 1 and all edges
        are inclusive.

        Args:
            image_id: Id of the image.
            size: Height and width of the decoded image, or None to skip the comparison with it.

        Raises:
            DataError: The file is not a VOC annotation, or an object has no valid box in the image.
        """
        path = self.files.path(image_id)
        try:
            root = _parse_xml(read_regular(path))
            if root.tag != "annotation":
                raise ValueError(f"its root element is {root.tag}, expected annotation")
            objects = {
                number: element
                for number, element in enumerate(root.findall("object"), 1)
                if not (self.exclude_difficult and _is_difficult(element))
            }
            corners = [_parse_corners(element, number) for number, element in objects.items()]
            texts = [root.findtext(f"size/{key}") for key in ("height", "width")]
            height, width = (0.0 if text is None else _parse_number(text) for text in texts)
        except Exception as error:
            reraise_out_of_memory(error)
            raise DataError(f"{path} is not an annotation of VOC ({error})") from error
        # Some files do not state the size, or state 0.
        stated_size = (height, width) if height and width else None
        return validate_boxes(corners, path, list(objects), size, stated_size=stated_size)

    def fingerprint_key(self, image_id: str) -> str:
        del image_id
        return f"exclude_difficult={self.exclude_difficult}"


def _parse_xml(data: bytes) -> ElementTree.Element:
    """Parse XML in any encoding that Python supports. Undecodable characters are replaced."""
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError):
        # The parser does not support Chinese and Japanese encodings. Some tools use such an
        # encoding even in files that declare UTF-8.
        encoding = _XML_ENCODING.match(data)
        text = data.decode(encoding[1].decode() if encoding else "utf-8", errors="replace")
        return ElementTree.fromstring(text)


def _parse_corners(element: ElementTree.Element, number: int) -> list[float]:
    # `find` only searches direct children. Thus, it ignores `part` elements, which contain the
    # boxes of heads, hands and feet.
    box = element.find("bndbox")
    try:
        if box is None:
            raise ValueError("it has no bndbox")
        sides = ("xmin", "ymin", "xmax", "ymax")
        x0, y0, x1, y1 = (_parse_number(box.findtext(side, "")) for side in sides)
    except ValueError as error:
        raise ValueError(f"object {number}: {error}") from error
    return [x0 - 1, y0 - 1, x1, y1]


def _parse_number(text: str) -> float:
    """Parse a decimal number. Unlike `float`, reject texts such as `nan` and `1_7`."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"expected a number of pixels, got {text!r}")
    return float(text)


def _is_difficult(element: ElementTree.Element) -> bool:
    flags = [element.findtext(key, "0").strip() for key in ("difficult", "truncated")]
    if not set(flags) <= {"0", "1"}:
        raise ValueError(f"expected 0 or 1 for difficult and truncated, got {' and '.join(flags)}")
    return "1" in flags


@dataclass(frozen=True)
class VocFolder:
    """A dataset in PASCAL VOC's folders JPEGImages, SegmentationClass, Annotations and ImageSets.

    Attributes:
        path: The folder that contains JPEGImages.
        name: Name of the dataset in stored results.
        class_names: Names of the classes, in the order of the numbers in masks.
    """

    path: Path
    name: str
    class_names: tuple[str, ...]

    def segmentation(self, split: str) -> FileImageSet:
        """Return a split such as `train`, or a part such as `train:0-75%`, with segmentation masks.

        The masks of the split `trainaug` are read from the folder SegmentationClassAug.
        """
        share = Split.parse(split)
        folder = "SegmentationClassAug" if share.name == "trainaug" else "SegmentationClass"
        numbers = range(len(self.class_names))
        labels = LabelMap(
            {**{number: number for number in numbers}, 255: IGNORE_INDEX},
            hint="Use the published masks, which store class numbers, and 255 at object borders",
        )
        masks = Masks(Files(self.path / folder, ".png"), labels, has_voc_palette=True)
        return self._image_set("Segmentation", split, masks=masks).validate()

    def discovery(self, split: str, *, exclude_difficult: bool) -> FileImageSet:
        """Return the images of a split with boxes, for object discovery.

        Args:
            split: Name of the split, or a part of it such as `trainval:0-75%`.
            exclude_difficult: Whether to leave out boxes that are marked as difficult or truncated,
                and images that have no other boxes.
        """
        boxes = VocBoxes(Files(self.path / "Annotations", ".xml"), exclude_difficult)
        images = self._image_set("Main", split, boxes=boxes).validate()
        if not exclude_difficult:
            return images
        easy = tuple(image_id for image_id in images.ids if len(boxes.read(image_id)))
        return replace(images, ids=easy).validate()

    def images(self, split: str) -> FileImageSet:
        """Return the images of a split, or of a part such as `train:0-75%`, without annotations."""
        return self._image_set("Main", split).validate()

    def _image_set(
        self, lists: str, split: str, *, masks: Masks | None = None, boxes: VocBoxes | None = None
    ) -> FileImageSet:
        share = Split.parse(split)
        source = self.path / "ImageSets" / lists / f"{share.name}.txt"
        return FileImageSet(
            name=self.name,
            split=split,
            source=source,
            ids=share.cut(_read_ids(source, self.path)),
            images=Files(self.path / "JPEGImages", ".jpg"),
            class_names=self.class_names,
            masks=masks,
            boxes=boxes,
        )


def _read_ids(source: Path, folder: Path) -> list[str]:
    """Read the image ids in a list of images, such as val.txt or person_val.txt.

    Images that are marked by -1 in the list of a class, such as person_val.txt, do not show the
    class and are left out.

    Args:
        source: The list.
        folder: The folder that contains JPEGImages.
    """
    lines = read_list(source)
    if all(_CLASS_FLAG.search(line) for line in lines):
        lines = [line for line in lines if not line.endswith("-1")]
    return find_image_ids(lines, Files(folder / "JPEGImages", ".jpg"))


@dataclass(frozen=True)
class Voc(Layout):
    """PASCAL VOC 2007 or 2012, http://host.robots.ox.ac.uk/pascal/VOC.

    Attributes:
        root: The folder VOC2012 or VOCdevkit, or the parent folder of VOCdevkit.
        year: Year of the dataset, 2012 or 2007.
        train_split: Name of a list of images in ImageSets/Segmentation, or a part of it such as
            `train:0-75%`. `trainaug` also contains the images and masks of SBD.
        val_split: Name of a list of images in ImageSets/Segmentation, or a part of it such as
            `val:0-50%`.
        discovery_split: Name of a list of images in ImageSets/Main, or a part of it such as
            `trainval:0-50%`.
        exclude_difficult: Whether to leave out boxes that are marked as difficult or truncated.
    """

    supports = frozenset({"segmentation", "discovery", "boxes", "images"})

    root: OptionalPath = None
    year: Annotated[int, Bounds(2005, 2012)] = 2012
    train_split: str = "train"
    val_split: str = "val"
    discovery_split: str = "trainval"
    exclude_difficult: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_disjoint(self.train_split, self.val_split)

    @property
    def name(self) -> str:
        return f"voc{self.year}"

    def train(self) -> FileImageSet:
        return self._folder().segmentation(self.train_split)

    def val(self) -> FileImageSet:
        return self._folder().segmentation(self.val_split)

    def discovery(self) -> FileImageSet:
        return self._folder().discovery(
            self.discovery_split, exclude_difficult=self.exclude_difficult
        )

    def images(self) -> FileImageSet:
        """Return the images of `discovery_split` without annotations."""
        return self._folder().images(self.discovery_split)

    def _folder(self) -> VocFolder:
        year = f"VOC{self.year}"
        path = find_root(
            self.root,
            name=self.name,
            subfolders=(f"VOCdevkit/{year}", year),
            marker_folders=("JPEGImages",),
            tree=f"VOCdevkit/{year}/{{JPEGImages,SegmentationClass,Annotations,ImageSets}}",
        )
        if re.fullmatch(r"VOC\d{4}", path.name) and path.name != year:
            raise DataError(
                f"{path} does not contain {self.name}", hint=("--dataset", path.name.lower())
            )
        lists = {split: path / "ImageSets" / file for split, file in _LISTS.items()}
        ids = {split: set(_read_ids(file, path)) for split, file in lists.items() if file.is_file()}
        return VocFolder(path, resolve_dataset_name(self.name, ids), CLASS_NAMES)
