"""COCO20k: the images of train2014 on which object discovery is compared."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import Boxes, FileImageSet, Files, parse_numbers, validate_boxes
from ssl_bench.data.files.fingerprints import cached_sha256
from ssl_bench.data.layouts.lists import find_image_ids, read_list
from ssl_bench.data.samples import Layout, find_root, first_folder, name_of_images
from ssl_bench.data.splits import Split
from ssl_bench.errors import DataError, MachineError
from ssl_bench.network import PublishedFile, download
from ssl_bench.scores import index_coco
from ssl_bench.system.files import cache_folder, expand_path, read_regular, write_atomically
from ssl_bench.system.process import reraise_out_of_memory

# The digest is that of the file in commit fcedbec.
LIST = PublishedFile(
    "https://raw.githubusercontent.com/valeoai/LOST/master/datasets/coco_20k_filenames.txt",
    "133cea5ffcea93dccbaeb62c38b24e7c",
    "md5",
    size=832_314,
)
_STORED = ("known", "sizes", "owners", "objects", "corners")
LIST_NAMES = ("coco_20k_filenames.txt", "coco_20k_filenames_subset.txt")


@dataclass(frozen=True, eq=False)
class CocoBoxes(Boxes):
    """Boxes of COCO's instances, one row a box, with the image of each row beside it.

    Those without height or width stay, as in LOST: COCO has some, and rounding makes more.

    Attributes:
        file: That they are from.
        known: Sorted ids of all annotated images, also of those without a box.
        sizes: Height and width of these; zeros where the file does not say it.
        owners: Sorted, the image of each box.
        objects: Id of the annotation of each box.
        corners: (x0, y0, x1, y1).
    """

    file: Path
    known: Int64[np.ndarray, " images"]
    sizes: Int64[np.ndarray, "images 2"]
    owners: Int64[np.ndarray, " boxes"]
    objects: Int64[np.ndarray, " boxes"]
    corners: Int64[np.ndarray, "boxes 4"]

    files = None

    def read(
        self, image_id: str, size: tuple[int, int] | None = None
    ) -> Float64[np.ndarray, "some_boxes 4"]:
        """Boxes of one image.

        Raises:
            DataError: one is none, or the image has another size than the file says.
        """
        owner = _number(image_id)
        own = slice(*np.searchsorted(self.owners, [owner, owner + 1]))
        ((rows, columns),) = self.sizes[self.known == owner].tolist() or [(0, 0)]
        return validate_boxes(
            self.corners[own],
            self.file,
            [f"{n} of {image_id}" for n in self.objects[own]],
            size,
            stated=(float(rows), float(columns)) if rows and columns else None,
            may_be_flat=True,
        )

    def missing(self, ids: Sequence[str]) -> list[str]:
        known = set(self.known.tolist())
        return [image_id for image_id in ids if _number(image_id) not in known]

    def meaning(self, image_id: str) -> str:
        """The boxes: of a file for all images most changes are of no concern to these."""
        return str(self.read(image_id).tolist())


@dataclass(frozen=True)
class Coco20k(Layout):
    """COCO20k, https://github.com/valeoai/LOST: boxes of 2014, crowds left out.

    Attributes:
        root: The folder with annotations/instances_train2014.json and images/train2014.
        list_file: The published list; by default looked for in `root` and beside it, else fetched.
        discovery_split: `train2014` or a share of the listed images.
        cache: Folder for the list and the parsed boxes (the annotations are 450 MB of JSON).
    """

    name = "coco20k"
    supports = frozenset({"discovery", "boxes", "images"})

    root: OptionalPath = None
    list_file: OptionalPath = None
    discovery_split: str = "train2014"
    cache: OptionalPath = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Split.parse(self.discovery_split)

    def discovery(self) -> FileImageSet:
        annotations = self._root() / "annotations/instances_train2014.json"
        return self._set(read_boxes(annotations, cache_folder(self.cache))).validate()

    def images(self) -> FileImageSet:
        """The listed pictures."""
        return self._set(None).validate()

    def _set(self, boxes: CocoBoxes | None) -> FileImageSet:
        root, split = self._root(), Split.parse(self.discovery_split)
        source = self._list(root)
        images = Files(first_folder([root / "images" / split.name, root / split.name]), ".jpg")
        listed = find_image_ids(read_list(source), images)
        # A shorter list is another benchmark and must not pass for COCO20k.
        name = name_of_images(self.name, {"discovery": listed})
        if name == self.name and (md5 := LIST.hexdigest(source)) != LIST.digest:
            raise DataError(f"{source} has md5 {md5}, published was {LIST.digest}; fetch it again")
        return FileImageSet(
            name=name,
            split=self.discovery_split,
            source=source,
            ids=split.cut(listed),
            images=images,
            boxes=boxes,
        )

    def _list(self, root: Path) -> Path:
        if self.list_file is not None:
            given = expand_path(self.list_file)
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
    digits = image_id.rpartition("_")[2]
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise DataError(f"{image_id} is no image of COCO; expected COCO_train2014_000000000009")
    return int(digits)


def read_boxes(annotations: Path, cache: Path) -> CocoBoxes:
    """Read COCO's instances, the second time from a small file in the cache.

    Raises:
        DataError: the annotations are missing or damaged.
    """
    if not annotations.is_file():
        raise DataError(f"{annotations} does not exist; docs/data.md says where to get it")
    digest = cached_sha256(annotations)
    index = cache / f"coco-boxes-2-{digest[:16]}.npz"
    # If the index is missing or damaged in any way, it is made again.
    with suppress(Exception), np.load(index, allow_pickle=False) as stored:
        return CocoBoxes(annotations, *(stored[name] for name in _STORED))
    boxes = parse_boxes(annotations)
    if cached_sha256(annotations) != digest:
        raise DataError(f"{annotations} changes while it is read; wait until it is complete")
    arrays = {name: getattr(boxes, name) for name in _STORED}
    with suppress(MachineError):
        write_atomically(index, lambda file: np.savez(file, **arrays))
    return boxes


def parse_boxes(annotations: Path) -> CocoBoxes:
    """Crowds dropped, corners rounded to integers, as the published evaluation does.

    Source: https://github.com/valeoai/LOST/blob/c0ff67ba/datasets.py

    Raises:
        DataError: the file is not COCO's JSON, or a box of it is none.
    """
    try:
        content = json.loads(read_regular(annotations))
        # Without categories, which no box needs.
        index = index_coco({name: content[name] for name in ("images", "annotations")})
    # Whatever pycocotools makes of a file that is something else.
    except Exception as error:
        reraise_out_of_memory(error)
        raise DataError(f"{annotations} is not COCO's instances ({error!r})") from error
    try:
        images = {
            _whole(number, "the id of an image"): [
                _whole(one.get(side, 0), side) for side in ("height", "width")
            ]
            for number, one in index.imgs.items()
        }
        all_images, all_objects = (index.dataset[name] for name in ("images", "annotations"))
        if len(index.anns) < len(all_objects) or len(images) < len(all_images):
            raise ValueError("two annotations have the same id, or two images")
        objects = index.anns.items()
        single = [found for name, one in objects if (found := _object(name, one)) is not None]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{annotations} is not COCO's instances ({error!r})") from error
    names, owners, corners = zip(*single, strict=True) if single else ((), (), ())
    # Before they are rounded: nothing turns into a box by it.
    exact = validate_boxes(corners, annotations, names, may_be_flat=True)
    order = np.argsort(owners, kind="stable")
    known = sorted(images)
    return CocoBoxes(
        annotations,
        np.array(known, np.int64),
        np.array([images[one] for one in known], np.int64).reshape(-1, 2),
        np.array(owners, np.int64)[order],
        np.array(names, np.int64)[order],
        np.rint(exact).astype(np.int64)[order],
    )


def _whole(value: object, what: str) -> int:
    """An integer of JSON, which `1.0`, `true` and `"1"` are not."""
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"expected a whole number as {what}, got {value!r}")
    return value


def _object(name: object, annotation: Mapping[str, Any]) -> tuple[int, int, list[float]] | None:
    """Ids of the annotation and its image, and the corners of the box; None of a crowd."""
    number = _whole(name, "the id of an annotation")
    try:
        is_crowd, owner = annotation["iscrowd"], _whole(annotation["image_id"], "image_id")
        if type(is_crowd) is not int or is_crowd not in (0, 1):
            raise ValueError(f"expected 0 or 1 as iscrowd, got {is_crowd!r}")
        if is_crowd:
            return None
        x, y, width, height = parse_numbers(annotation["bbox"], 4)
    except KeyError as error:
        raise ValueError(f"object {name} has no {error}") from error
    except ValueError as error:
        raise ValueError(f"object {name}: {error}") from error
    return number, owner, [x, y, x + width, y + height]
