"""COCO20k: the images of train2014 on which object discovery is compared."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float64, Int64
from pycocotools.coco import COCO

from ssl_bench.composition.fields import Place, check_fields
from ssl_bench.data.files.digests import digest_of
from ssl_bench.data.files.file_sets import FileImageSet, Files
from ssl_bench.data.locations import cache_folder, find_root, first_folder
from ssl_bench.data.published import name_of_images
from ssl_bench.data.roles import lacking
from ssl_bench.data.splits import Split, read_list
from ssl_bench.errors import DataError, MachineError
from ssl_bench.network.downloads import Published, download
from ssl_bench.system.files import read_regular, write_atomically
from ssl_bench.system.paths import expanded

# The digest is that of the file in commit fcedbec.
LIST = Published(
    "https://raw.githubusercontent.com/valeoai/LOST/master/datasets/coco_20k_filenames.txt",
    "133cea5ffcea93dccbaeb62c38b24e7c",
    "md5",
    size=832_314,
)
LIST_NAMES = ("coco_20k_filenames.txt", "coco_20k_filenames_subset.txt")


@dataclass(frozen=True, eq=False)
class CocoBoxes:
    """Boxes of COCO's instances, one row a box, with the image of each row beside it.

    Attributes:
        known: Sorted ids of all annotated images, also of those without a box.
        owners: Sorted, the image of each box.
        corners: (x0, y0, x1, y1).
    """

    known: Int64[np.ndarray, " images"]
    owners: Int64[np.ndarray, " boxes"]
    corners: Int64[np.ndarray, "boxes 4"]

    files = None

    def read(self, image_id: str) -> Float64[np.ndarray, "some_boxes 4"]:
        number = _number(image_id)
        first, last = np.searchsorted(self.owners, [number, number + 1])
        return self.corners[first:last].astype(np.float64)

    def missing(self, ids: Sequence[str]) -> list[str]:
        known = set(self.known.tolist())
        return [image_id for image_id in ids if _number(image_id) not in known]

    def meaning(self, image_id: str) -> str:
        """The boxes: of a file for all images most changes are of no concern to these."""
        return str(self.read(image_id).tolist())


@dataclass(frozen=True)
class Coco20k:
    """COCO20k, https://github.com/valeoai/LOST: boxes of 2014, crowds left out.

    Attributes:
        root: The folder with annotations/instances_train2014.json and images/train2014.
        list_file: The published list; by default looked for in `root` and beside it, else fetched.
        discovery_split: `train2014` or a share of the listed images.
        cache: Folder for the list and the parsed boxes (the annotations are 450 MB of JSON).
    """

    name = "coco20k"
    supports = frozenset({"discovery", "boxes", "images"})

    root: Place = None
    list_file: Place = None
    discovery_split: str = "train2014"
    cache: Place = None

    def __post_init__(self) -> None:
        check_fields(self, "dataset")
        Split.parse(self.discovery_split)

    def train(self) -> FileImageSet:
        raise lacking(self.name, "segmentation")

    def val(self) -> FileImageSet:
        raise lacking(self.name, "segmentation")

    def discovery(self) -> FileImageSet:
        annotations = self._root() / "annotations/instances_train2014.json"
        return self._set(read_boxes(annotations, cache_folder(self.cache))).checked()

    def images(self) -> FileImageSet:
        """The listed pictures."""
        return self._set(None).checked()

    def _set(self, boxes: CocoBoxes | None) -> FileImageSet:
        root, split = self._root(), Split.parse(self.discovery_split)
        source = self._list(root)
        listed = read_list(source)
        return FileImageSet(
            name=_require_published(source, listed),
            split=self.discovery_split,
            source=source,
            ids=split.cut(listed),
            images=Files(first_folder([root / "images" / split.name, root / split.name]), ".jpg"),
            boxes=boxes,
        )

    def _list(self, root: Path) -> Path:
        if self.list_file is not None:
            given = expanded(self.list_file)
            if not given.is_file():
                raise DataError(f"dataset.list_file={given} does not exist")
            return given
        for place in (folder / name for name in LIST_NAMES for folder in (root, root.parent)):
            if place.is_file():
                return place
        return download(LIST, cache_folder(self.cache) / LIST_NAMES[0])

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            inside=("COCO", "coco"),
            landmarks=("annotations", "images", "train2014"),
            tree="annotations/instances_train2014.json, images/train2014/*.jpg and the list of ids",
        )


def _number(image_id: str) -> int:
    return int(image_id.rpartition("_")[2])


def _require_published(source: Path, listed: Sequence[str]) -> str:
    """The name of the set: a shorter list is another benchmark and must not pass for COCO20k."""
    name = name_of_images(Coco20k.name, {"discovery": listed})
    if name != Coco20k.name:
        return name
    md5 = LIST.hexdigest(source)
    if md5 != LIST.digest:
        raise DataError(f"{source} has md5 {md5}, published was {LIST.digest}; fetch it again")
    return name


def read_boxes(annotations: Path, cache: Path) -> CocoBoxes:
    """Read COCO's instances, the second time from a small file in the cache.

    Raises:
        DataError: the annotations are missing or damaged.
    """
    if not annotations.is_file():
        raise DataError(f"{annotations} does not exist; docs/data.md says where to get it")
    digest = digest_of(annotations)
    index = cache / f"coco-boxes-1-{digest[:16]}.npz"
    # A damaged index is made again; where none can be written the JSON is parsed each time.
    damage = (OSError, ValueError, KeyError, EOFError, BadZipFile)
    with suppress(*damage), np.load(index, allow_pickle=False) as stored:
        return CocoBoxes(stored["known"], stored["owners"], stored["corners"])
    boxes = parse_boxes(annotations)
    if digest_of(annotations) != digest:
        raise DataError(f"{annotations} changes while it is read; wait until it is complete")
    with suppress(MachineError):
        write_atomically(index, partial(_write, boxes))
    return boxes


def parse_boxes(annotations: Path) -> CocoBoxes:
    """Crowds dropped, corners rounded to integers, as the published evaluation does.

    Source: https://github.com/valeoai/LOST/blob/c0ff67ba/datasets.py

    Raises:
        DataError: the file is not COCO's JSON.
    """
    try:
        coco = _indexed(json.loads(read_regular(annotations)))
        known = np.array(sorted(coco.getImgIds()), np.int64)
        single = coco.loadAnns(coco.getAnnIds(iscrowd=False))
        owners = np.array([one["image_id"] for one in single], np.int64)
        boxes = np.array([one["bbox"] for one in single], np.float64).reshape(-1, 4)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{annotations} is not COCO's instances ({error!r})") from error
    corners = np.rint(np.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])).astype(np.int64)
    order = np.argsort(owners, kind="stable")
    return CocoBoxes(known, owners[order], corners[order])


def _indexed(content: dict[str, Any]) -> Any:
    """COCO's own reader of its instances, without what it prints."""
    coco: Any = COCO()
    coco.dataset = content
    with redirect_stdout(StringIO()):
        coco.createIndex()
    if len(coco.anns) != len(content["annotations"]):
        raise ValueError("two annotations have the same id")
    return coco


def _write(boxes: CocoBoxes, file: BinaryIO) -> None:
    np.savez(file, known=boxes.known, owners=boxes.owners, corners=boxes.corners)
