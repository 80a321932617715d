"""PASCAL VOC: masks with a palette, boxes in XML, lists of ids."""

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
from ssl_bench.data.layouts.lists import find_image_ids, read_list
from ssl_bench.data.samples import IGNORED, Layout, find_root, name_of_images
from ssl_bench.data.splits import Split, require_disjoint
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
        exclude_difficult: Leave out objects marked difficult or truncated.
    """

    files: Files
    exclude_difficult: bool = False

    def read(
        self, image_id: str, size: tuple[int, int] | None = None
    ) -> Float64[np.ndarray, "boxes 4"]:
        """Boxes of one image, shifted from VOC's 1-based inclusive corners.

        Raises:
            DataError: the file is not VOC's XML, or an object of it has no box in the image.
        """
        path = self.files.path(image_id)
        try:
            root = _parse_xml(read_regular(path))
            if root.tag != "annotation":
                raise ValueError(f"it is about {root.tag}")
            objects = {
                count: one
                for count, one in enumerate(root.findall("object"), 1)
                if not (self.exclude_difficult and _is_hard(one))
            }
            corners = [_corners(one, count) for count, one in objects.items()]
            told = [root.findtext(f"size/{key}") for key in ("height", "width")]
            height, width = (0.0 if text is None else _number(text) for text in told)
        except Exception as error:
            reraise_out_of_memory(error)
            raise DataError(f"{path} is not an annotation of VOC ({error})") from error
        # A file need not say the size, or says 0.
        stated = (height, width) if height and width else None
        return validate_boxes(corners, path, list(objects), size, stated=stated)

    def meaning(self, image_id: str) -> str:
        del image_id
        return f"exclude_difficult={self.exclude_difficult}"


def _parse_xml(data: bytes) -> ElementTree.Element:
    """Parse XML in any encoding that Python knows. Undecodable characters are replaced."""
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError):
        # The parser does not support Chinese and Japanese encodings, which some tools write, even
        # into files that declare UTF-8.
        encoding = _XML_ENCODING.match(data)
        text = data.decode(encoding[1].decode() if encoding else "utf-8", errors="replace")
        return ElementTree.fromstring(text)


def _corners(one: ElementTree.Element, count: int) -> list[float]:
    # `find`, not `iter`: a person's head, hands and feet have boxes of their own below `part`.
    box = one.find("bndbox")
    try:
        if box is None:
            raise ValueError("it has no bndbox")
        sides = ("xmin", "ymin", "xmax", "ymax")
        x0, y0, x1, y1 = (_number(box.findtext(side, "")) for side in sides)
    except ValueError as error:
        raise ValueError(f"object {count}: {error}") from error
    return [x0 - 1, y0 - 1, x1, y1]


def _number(text: str) -> float:
    """The decimal number that a text is; `nan` and `1_7` are none."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"expected a number of pixels, got {text!r}")
    return float(text)


def _is_hard(one: ElementTree.Element) -> bool:
    told = [one.findtext(key, "0").strip() for key in ("difficult", "truncated")]
    if not set(told) <= {"0", "1"}:
        raise ValueError(f"difficult and truncated expect 0 or 1, got {' and '.join(told)}")
    return "1" in told


@dataclass(frozen=True)
class VocFolder:
    """A folder in VOC's layout: JPEGImages, SegmentationClass, Annotations, ImageSets."""

    path: Path
    name: str
    class_names: tuple[str, ...]

    def segmentation(self, split: str) -> FileImageSet:
        """Images with masks; `trainaug` takes those of SegmentationClassAug."""
        share = Split.parse(split)
        folder = "SegmentationClassAug" if share.name == "trainaug" else "SegmentationClass"
        numbers = range(len(self.class_names))
        labels = LabelMap(
            {**{number: number for number in numbers}, 255: IGNORED},
            hint="take the masks as published: class numbers with a palette, 255 at the rims",
        )
        masks = Masks(Files(self.path / folder, ".png"), labels, has_voc_palette=True)
        return self._set("Segmentation", split, masks=masks).validate()

    def discovery(self, split: str, *, exclude_difficult: bool) -> FileImageSet:
        """Images with boxes; `exclude_difficult` also leaves out images with hard objects only."""
        boxes = VocBoxes(Files(self.path / "Annotations", ".xml"), exclude_difficult)
        images = self._set("Main", split, boxes=boxes).validate()
        if not exclude_difficult:
            return images
        easy = tuple(image_id for image_id in images.ids if len(boxes.read(image_id)))
        return replace(images, ids=easy).validate()

    def pictures(self, split: str) -> FileImageSet:
        """Images alone."""
        return self._set("Main", split).validate()

    def _set(
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
    """Read a list of images. Lists of a class, such as person_val.txt, mark other images by -1."""
    lines = read_list(source)
    if all(_CLASS_FLAG.search(line) for line in lines):
        lines = [line for line in lines if not line.endswith("-1")]
    return find_image_ids(lines, Files(folder / "JPEGImages", ".jpg"))


@dataclass(frozen=True)
class Voc(Layout):
    """PASCAL VOC 2007 or 2012, http://host.robots.ox.ac.uk/pascal/VOC.

    Attributes:
        root: The folder that holds VOCdevkit, VOCdevkit itself, or VOC2012.
        train_split: Of ImageSets/Segmentation; `trainaug` adds the masks of SBD.
        val_split: Of ImageSets/Segmentation; always scored against the original masks.
        discovery_split: Of ImageSets/Main.
        exclude_difficult: Leave out boxes marked difficult or truncated; by default all count.
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
        """The pictures of `discovery_split`."""
        return self._folder().pictures(self.discovery_split)

    def _folder(self) -> VocFolder:
        year = f"VOC{self.year}"
        path = find_root(
            self.root,
            name=self.name,
            inside=(f"VOCdevkit/{year}", year),
            landmarks=("JPEGImages",),
            tree=f"VOCdevkit/{year}/{{JPEGImages,SegmentationClass,Annotations,ImageSets}}",
        )
        if re.fullmatch(r"VOC\d{4}", path.name) and path.name != year:
            raise DataError(f"{path} is not {self.name}", hint=("--dataset", path.name.lower()))
        lists = {role: path / "ImageSets" / file for role, file in _LISTS.items()}
        found = {role: set(_read_ids(file, path)) for role, file in lists.items() if file.is_file()}
        return VocFolder(path, name_of_images(self.name, found), CLASS_NAMES)
