"""Datasets of instance retrieval: queries, and images that show the same object or place.

The datasets are Holidays, the revisited Oxford and Paris buildings, and Copydays.
"""

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt64

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import FileImageSet, Files, join_names
from ssl_bench.data.files.fingerprints import (
    ReadOptions,
    extend_fingerprint,
    file_hashes,
    with_read_options,
)
from ssl_bench.data.files.images import read_data_file
from ssl_bench.data.files.readable import select_images
from ssl_bench.data.samples import (
    ImageView,
    Layout,
    RetrievalTarget,
    Sample,
    find_existing_folder,
    find_root,
    resolve_dataset_name,
)
from ssl_bench.errors import DataError

# Module and name of each function that unpickling an array of numbers calls. None of these
# functions can run other code.
_PICKLED = {
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"), ("__builtin__", "bytes")),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
_JPEG_FOLDERS = tuple(f"jpegqual/{quality}" for quality in (3, 5, 8, 10, 15, 20, 30, 50, 75))
_CROP_FOLDERS = tuple(f"crops/{share}" for share in (10, 15, 20, 30, 40, 50, 60, 70, 80))
_COPY_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "strong": ("strong",),
    "jpegqual": _JPEG_FOLDERS,
    "crops": _CROP_FOLDERS,
    "all": ("strong", *_JPEG_FOLDERS, *_CROP_FOLDERS),
}


@dataclass(frozen=True)
class RetrievalImages(ImageView):
    """An image set of instance retrieval, in which some images are queries.

    Attributes:
        retrieval_targets: Ground truth for each query, by the image id of the query.
    """

    retrieval_targets: Mapping[str, RetrievalTarget] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Sample:
        sample = self.images[index]
        return replace(sample, retrieval_target=self.retrieval_targets.get(sample.image_id))

    @cached_property
    def _fingerprint(self) -> str:
        rows = [
            (query, *map(sorted, (one.matches, one.hard_matches, one.ignored)))
            for query, one in sorted(self.retrieval_targets.items())
        ]
        targets = self.retrieval_targets.values()
        distinct = {id(one.excluded_ids): one.excluded_ids for one in targets}
        excluded_ids = sorted(frozenset().union(*distinct.values()))
        return extend_fingerprint(self.images.fingerprint(), *rows, ("bystanders", *excluded_ids))

    def with_read_options(self, options: ReadOptions) -> "RetrievalImages":
        """Return a copy of this image set that reads its files with the given options."""
        return replace(self, images=with_read_options(self.images, options))

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Return the hash of each image's file."""
        return file_hashes(self.images)

    def select(self, name: str, indices: Sequence[int]) -> "RetrievalImages":
        """Return a subset of the images, with a new name.

        Args:
            name: Name of the subset.
            indices: Indices of the subset's images in this image set.
        """
        return replace(self, images=select_images(self.images, name, indices))


@dataclass(frozen=True)
class Holidays(Layout):
    """INRIA Holidays with the published file names, https://lear.inrialpes.fr/~jegou/data.php.

    Images whose names have the same first four digits show the same object or place. The query is
    the image whose number ends in 00.

    Attributes:
        root: The folder that contains the folder jpg, or its parent folder.
    """

    name = "holidays"
    supports = frozenset({"instances", "images"})

    root: OptionalPath = None

    def val(self) -> RetrievalImages:
        images = self.images()
        groups: dict[str, set[str]] = {}
        for image_id in images.ids:
            groups.setdefault(image_id[:4], set()).add(image_id)
        targets = {
            f"{group}00": RetrievalTarget(matches=frozenset(ids - {f"{group}00"}))
            for group, ids in groups.items()
            if f"{group}00" in ids
        }
        return RetrievalImages(images, targets)

    def images(self) -> FileImageSet:
        """Return all images, including the queries.

        Raises:
            DataError: A file name does not consist of six digits, or there are no files.
        """
        folder = self._root() / "jpg"
        ids = Files(folder, ".jpg").ids()
        if unknown := [image_id for image_id in ids if not re.fullmatch(r"\d{6}", image_id)]:
            raise DataError(
                f"{folder} has {join_names(unknown)}.jpg, expected names of six digits such as "
                "100000.jpg. Remove other files"
            )
        return _make_image_set(resolve_dataset_name(self.name, {"val": ids}), "all", folder, ids)

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=(self.name,),
            marker_folders=("jpg",),
            tree="jpg/100000.jpg",
        )


@dataclass(frozen=True)
class Landmarks(Layout):
    """The revisited Oxford or Paris buildings, http://cmp.felk.cvut.cz/revisitop.

    Attributes:
        root: The folder that contains jpg and the ground truth, or its parent folder.
        name: `roxford5k` or `rparis6k`, as in the name of the ground truth gnd_NAME.pkl.
    """

    supports = frozenset({"instances", "images"})

    root: OptionalPath = None
    name: Literal["roxford5k", "rparis6k"] = "roxford5k"

    def val(self) -> RetrievalImages:
        """Return the query images, followed by the database images that are searched.

        Raises:
            DataError: An image is missing, or the file of the ground truth is invalid.
        """
        images, truth = self._open()
        database, queries = truth["imlist"], truth["qimlist"]
        excluded_ids = frozenset(queries)
        targets = {}
        for query, found in zip(queries, truth["gnd"], strict=True):
            easy, hard, junk = (
                frozenset(database[i] for i in found[key]) for key in ("easy", "hard", "junk")
            )
            targets[query] = RetrievalTarget(easy, hard, ignored=junk, excluded_ids=excluded_ids)
        return RetrievalImages(images, targets)

    def images(self) -> FileImageSet:
        return self._open()[0]

    def _open(self) -> tuple[FileImageSet, dict[str, Any]]:
        root = find_root(
            self.root,
            name=self.name,
            subfolders=(self.name,),
            marker_folders=("jpg",),
            tree=f"jpg/*.jpg and gnd_{self.name}.pkl",
        )
        file = root / f"gnd_{self.name}.pkl"
        truth = read_ground_truth(file)
        ids = [*truth["qimlist"], *truth["imlist"]]
        name = resolve_dataset_name(self.name, {"val": ids})
        return _make_image_set(name, "all", root / "jpg", ids, source=file), truth


@dataclass(frozen=True)
class Copydays(Layout):
    """Copydays with the published file names, https://lear.inrialpes.fr/~jegou/data.php.

    The queries are edited copies of photographs. The database contains the original photographs.

    Attributes:
        root: The folder that contains original, strong, jpegqual and crops, or its parent folder.
        copies: Folder whose copies are used as queries: `strong`, `jpegqual` or `crops`. `all`
            selects the copies in all three folders.
    """

    name = "copydays"
    supports = frozenset({"instances", "images"})

    root: OptionalPath = None
    copies: Literal["strong", "jpegqual", "crops", "all"] = "strong"

    def val(self) -> RetrievalImages:
        """Return the copies, which are the queries, followed by the original images.

        Raises:
            DataError: A folder is missing, or a copy has no original.
        """
        root, originals = self._root(), self.images().ids
        copies = [
            f"{folder}/{image_id}"
            for folder in _COPY_FOLDERS[self.copies]
            for image_id in Files(find_existing_folder([root / folder]), ".jpg").ids()
        ]
        by_group: dict[str, set[str]] = {}
        for image_id in originals:
            by_group.setdefault(PurePath(image_id).name[:4], set()).add(image_id)
        excluded_ids = frozenset(copies)
        targets = {
            image_id: RetrievalTarget(
                frozenset(by_group.get(PurePath(image_id).name[:4], ())), excluded_ids=excluded_ids
            )
            for image_id in copies
        }
        if unknown := [image_id for image_id, one in targets.items() if not one.matches]:
            raise DataError(
                f"{root / 'original'} lacks the original images of {join_names(unknown)}, expected "
                "files whose names begin with the same four characters. Unpack all archives again"
            )
        counted = {"val": [*copies, *originals]} if self.copies == "strong" else {}
        name = resolve_dataset_name(self.name, counted)
        return RetrievalImages(
            _make_image_set(name, self.copies, root, [*copies, *originals]), targets
        )

    def images(self) -> FileImageSet:
        """Return the original images without their copies."""
        root = self._root()
        ids = [f"original/{name}" for name in Files(root / "original", ".jpg").ids()]
        name = resolve_dataset_name(self.name, {"images": ids})
        return _make_image_set(name, "original", root, ids)

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=(self.name,),
            marker_folders=("original",),
            tree="original/*.jpg, strong/*.jpg, jpegqual/Q/*.jpg and crops/P/*.jpg",
        )


def read_ground_truth(file: Path) -> dict[str, Any]:
    """Read the ground truth of revisited Oxford or Paris from a pickle, without running its code.

    Returns:
        Dictionary with three lists. `imlist` contains the ids of the database images, and `qimlist`
        the ids of the queries. `gnd` contains a dictionary for each query, with the indices of its
        "easy", "hard" and "junk" images in `imlist`.

    Raises:
        DataError: The file is missing, contains anything but plain Python values and arrays of
            numbers, or does not have these three lists.
    """
    data = read_data_file(file)
    try:
        content = _Unpickler(io.BytesIO(data)).load()
        database, queries = (_parse_names(content[key]) for key in ("imlist", "qimlist"))
        if len({*database, *queries}) < len(database) + len(queries):
            raise ValueError("an image occurs twice in imlist and qimlist")
        if len(content["gnd"]) != len(queries):
            raise ValueError(
                f"the list gnd has {len(content['gnd'])} entries for {len(queries)} queries"
            )
        truth = [
            {key: _parse_indices(one[key], len(database)) for key in ("easy", "hard", "junk")}
            for one in content["gnd"]
        ]
    # For a damaged pickle, the parser may raise any exception, including MemoryError.
    except Exception as error:
        raise DataError(
            f"{file} is not the ground truth of a revisited dataset ({error}). Download it again"
        ) from error
    return {"imlist": database, "qimlist": queries, "gnd": truth}


class _Unpickler(pickle.Unpickler):
    """Unpickler that runs no code and accepts only plain Python values and arrays of numbers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which could run code")
        return super().find_class(module, name)


def _parse_names(value: Any) -> list[str]:
    is_valid = isinstance(value, (list, tuple, np.ndarray)) and len(value) > 0
    if not is_valid or not all(
        isinstance(name, str) and PurePath(name).name == name for name in value
    ):
        raise ValueError("expected a list of image names")
    return [str(name) for name in value]


def _parse_indices(value: Any, count: int) -> list[int]:
    indices = np.asarray(value).ravel()
    if not len(indices):
        return []
    if indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= count:
        raise ValueError(f"expected indices from 0 to {count - 1}")
    return indices.tolist()


def _make_image_set(
    name: str, split: str, folder: Path, ids: Sequence[str], source: Path | None = None
) -> FileImageSet:
    return FileImageSet(
        name=name,
        split=split,
        source=source or folder,
        ids=tuple(ids),
        images=Files(folder, ".jpg"),
    ).validate()
