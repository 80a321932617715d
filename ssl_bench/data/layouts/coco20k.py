"""COCO20k: 19,817 images of COCO train2014 for object discovery."""

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
from ssl_bench.data.samples import Layout, find_existing_folder, find_root, resolve_dataset_name
from ssl_bench.data.splits import Split, find_image_ids, read_list
from ssl_bench.errors import DataError, MachineError
from ssl_bench.network import PublishedFile, download
from ssl_bench.scores import index_coco
from ssl_bench.system.files import cache_folder, expand_path, read_regular, write_atomically
from ssl_bench.system.process import reraise_out_of_memory

# The digest is that of the file in commit fcedbec of the repository.
IMAGE_LIST = PublishedFile(
    "https://raw.githubusercontent.com/valeoai/LOST/master/datasets/coco_20k_filenames.txt",
    "133cea5ffcea93dccbaeb62c38b24e7c",
    "md5",
    size=832_314,
)
_STORED = ("known", "sizes", "owners", "objects", "corners")
LIST_NAMES = ("coco_20k_filenames.txt", "coco_20k_filenames_subset.txt")


@dataclass(frozen=True, eq=False)
class CocoBoxes(Boxes):
    """Boxes from COCO's JSON file of object instances.

    Boxes without height or width are kept, to match the code of LOST. The JSON file contains a few
    such boxes, and rounding the coordinates creates more.

    Attributes:
        file: The JSON file.
        known: Sorted ids of all images in the file, including images without boxes.
        sizes: Height and width of each image in `known`, or zeros if the file does not state them.
        owners: Image id of each box. The boxes are sorted by their image ids.
        objects: Annotation id of each box.
        corners: Boxes as (x0, y0, x1, y1) in pixels.
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
        """Return the boxes of an image as (x0, y0, x1, y1) in pixels.

        Args:
            image_id: Id of the image, such as "COCO_train2014_000000000009".
            size: Height and width of the decoded image, or None to skip the comparison with it.

        Raises:
            DataError: A box is invalid, or the image has another size than the JSON file states.
        """
        owner = _parse_image_number(image_id)
        own = slice(*np.searchsorted(self.owners, [owner, owner + 1]))
        ((rows, columns),) = self.sizes[self.known == owner].tolist() or [(0, 0)]
        return validate_boxes(
            self.corners[own],
            self.file,
            [f"{n} of {image_id}" for n in self.objects[own]],
            size,
            stated_size=(float(rows), float(columns)) if rows and columns else None,
            allow_flat=True,
        )

    def list_missing(self, ids: Sequence[str]) -> list[str]:
        known = set(self.known.tolist())
        return [image_id for image_id in ids if _parse_image_number(image_id) not in known]

    def fingerprint_key(self, image_id: str) -> str:
        """Return the boxes of an image as text.

        The hash of the image set is computed from this text, so other images in the same JSON file
        do not affect the hash.
        """
        return str(self.read(image_id).tolist())


@dataclass(frozen=True)
class Coco20k(Layout):
    """COCO20k for object discovery, https://github.com/valeoai/LOST.

    All boxes are used except boxes of crowds, which enclose several objects.

    Attributes:
        root: The folder that contains annotations/instances_train2014.json and images/train2014.
        list_file: File with the names of the images. By default, it is a published list in `root`
            or in its parent folder. If there is none, the list is downloaded.
        discovery_split: `train2014`, or a part of the listed images such as `train2014:0-50%`.
        cache: Folder for the downloaded list and the parsed boxes.
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
        return self._image_set(read_boxes(annotations, cache_folder(self.cache))).validate()

    def images(self) -> FileImageSet:
        """Return all listed images without their boxes."""
        return self._image_set(None).validate()

    def _image_set(self, boxes: CocoBoxes | None) -> FileImageSet:
        root, split = self._root(), Split.parse(self.discovery_split)
        source = self._find_list(root)
        images = Files(
            find_existing_folder([root / "images" / split.name, root / split.name]), ".jpg"
        )
        ids = find_image_ids(read_list(source), images)
        name = resolve_dataset_name(self.name, {"discovery": ids})
        if name == self.name and (md5 := IMAGE_LIST.hexdigest(source)) != IMAGE_LIST.digest:
            raise DataError(
                f"{source} has MD5 {md5}, expected {IMAGE_LIST.digest}. Download it again"
            )
        return FileImageSet(
            name=name,
            split=self.discovery_split,
            source=source,
            ids=split.cut(ids),
            images=images,
            boxes=boxes,
        )

    def _find_list(self, root: Path) -> Path:
        if self.list_file is not None:
            path = expand_path(self.list_file)
            if not path.is_file():
                raise DataError(f"dataset.list_file={path} does not exist")
            return path
        for path in (folder / name for name in LIST_NAMES for folder in (root, root.parent)):
            if path.is_file():
                return path
        return download(IMAGE_LIST, cache_folder(self.cache) / LIST_NAMES[0])

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=("COCO", "coco"),
            marker_folders=("annotations", "images", "train2014"),
            tree="annotations/instances_train2014.json, images/train2014/*.jpg and the list of ids",
        )


def _parse_image_number(image_id: str) -> int:
    digits = image_id.rpartition("_")[2]
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise DataError(f"{image_id} is not a COCO id such as COCO_train2014_000000000009")
    return int(digits)


def read_boxes(annotations: Path, cache: Path) -> CocoBoxes:
    """Read the boxes from COCO's instances file, or from the cache if the file has not changed.

    Args:
        annotations: The instances file, such as instances_train2014.json.
        cache: Folder in which parsed boxes are cached.

    Raises:
        DataError: The instances file is missing or damaged.
    """
    if not annotations.is_file():
        raise DataError(f"{annotations} does not exist. docs/data.md explains where to get it")
    digest = cached_sha256(annotations)
    index = cache / f"coco-boxes-2-{digest[:16]}.npz"
    # If the cached file is missing or damaged in any way, it is written again.
    with suppress(Exception), np.load(index, allow_pickle=False) as stored:
        return CocoBoxes(annotations, *(stored[name] for name in _STORED))
    boxes = parse_boxes(annotations)
    if cached_sha256(annotations) != digest:
        raise DataError(f"{annotations} has changed while it was read. Wait until it is complete")
    arrays = {name: getattr(boxes, name) for name in _STORED}
    with suppress(MachineError):
        write_atomically(index, lambda file: np.savez(file, **arrays))
    return boxes


def parse_boxes(annotations: Path) -> CocoBoxes:
    """Parse COCO's instances file, such as instances_train2014.json.

    As in the code of LOST, annotations of crowds are left out and box corners are rounded.

    Source: https://github.com/valeoai/LOST/blob/c0ff67ba/datasets.py

    Raises:
        DataError: The file has another format, or a box is invalid.
    """
    try:
        content = json.loads(read_regular(annotations))
        # Index only the images and annotations, because boxes do not need the categories.
        index = index_coco({name: content[name] for name in ("images", "annotations")})
        images = {
            _require_integer(number, "the id of an image"): [
                _require_integer(image.get(side, 0), side) for side in ("height", "width")
            ]
            for number, image in index.imgs.items()
        }
        all_images, all_objects = (index.dataset[name] for name in ("images", "annotations"))
        if len(index.anns) < len(all_objects) or len(images) < len(all_images):
            raise ValueError("two annotations or two images have the same id")
        parsed = [_parse_object(number, row) for number, row in index.anns.items()]
        objects = [row for row in parsed if row is not None]
    # For a file in another format, pycocotools may raise any exception.
    except Exception as error:
        reraise_out_of_memory(error)
        raise DataError(
            f"{annotations} is not a COCO instances file ({error!r}). Download it again"
        ) from error
    names, owners, corners = zip(*objects, strict=True) if objects else ((), (), ())
    # Boxes are validated before rounding, which could make an invalid box valid.
    exact = validate_boxes(corners, annotations, names, allow_flat=True)
    order = np.argsort(owners, kind="stable")
    known = sorted(images)
    return CocoBoxes(
        annotations,
        np.array(known, np.int64),
        np.array([images[number] for number in known], np.int64).reshape(-1, 2),
        np.array(owners, np.int64)[order],
        np.array(names, np.int64)[order],
        np.rint(exact).astype(np.int64)[order],
    )


def _require_integer(value: object, name: str) -> int:
    """Check that a JSON value is an integer, and return it.

    Values such as `1.0`, `true` and `"1"` are errors. `name` describes the value in the error
    message.

    Raises:
        ValueError: The value is no integer, or its absolute value is 2^63 or more.
    """
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"expected an integer as {name}, got {value!r}")
    return value


def _parse_object(
    name: object, annotation: Mapping[str, Any]
) -> tuple[int, int, list[float]] | None:
    """Parse an annotation. Return the annotation's id, the image id, and the corners of the box.

    Return None if the annotation marks a crowd instead of one object.

    Args:
        name: Id of the annotation.
        annotation: The annotation, as in COCO's JSON file.
    """
    number = _require_integer(name, "the id of an annotation")
    try:
        is_crowd = annotation["iscrowd"]
        owner = _require_integer(annotation["image_id"], "image_id")
        if type(is_crowd) is not int or is_crowd not in (0, 1):
            raise ValueError(f"expected iscrowd to be 0 or 1, got {is_crowd!r}")
        if is_crowd:
            return None
        x, y, width, height = parse_numbers(annotation["bbox"], 4)
    except KeyError as error:
        raise ValueError(f"object {name} has no {error}") from error
    except ValueError as error:
        raise ValueError(f"object {name}: {error}") from error
    return number, owner, [x, y, x + width, y + height]
