"""PF-WILLOW: pairs of images of one category, with ten corresponding points."""

import io
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.file_sets import FileImageSet, Files, FileSet
from ssl_bench.data.files.fingerprints import FilePart
from ssl_bench.data.files.images import read_data_file, read_image
from ssl_bench.data.samples import Layout, Pair, Sample, find_root, resolve_dataset_name
from ssl_bench.errors import DataError
from ssl_bench.system.process import reraise_out_of_memory

CATEGORIES = (
    *("car(G)", "car(M)", "car(S)", "duck(S)", "motorbike(G)", "motorbike(M)", "motorbike(S)"),
    *("winebottle(M)", "winebottle(wC)", "winebottle(woC)"),
)


@dataclass(frozen=True)
class WillowPairs(FileSet):
    """Pairs of a source image and a target image, with corresponding points.

    The image of a sample is the source image. The attribute `pair` of the sample contains the
    target image and the points of both images.

    Attributes:
        ids: Ids of the pairs, in the form NUMBER-SOURCE-TARGET:CATEGORY.
        points: MATLAB files with points, one file for each image.
    """

    class_names: tuple[str, ...] = CATEGORIES
    points: Files = field(kw_only=True)

    def __getitem__(self, index: int) -> Sample:
        """Decode both images of a pair and read their points.

        Raises:
            DataError: A file is unreadable, or the images have different numbers of points.
        """
        image_ids = _parse_pair_id(self.ids[index])
        images = [read_image(self.images.path(i), self.options.bits) for i in image_ids]
        files = [self.points.path(i) for i in image_ids]
        source, target = (
            read_points(file, image.shape[1::-1]) for file, image in zip(files, images, strict=True)
        )
        if len(source) != len(target):
            raise DataError(
                f"{files[0]} has {len(source)} points and {files[1]} has {len(target)}, expected "
                "equal numbers. Unpack the dataset again"
            )
        pair = Pair(
            image_ids=image_ids,
            image=images[1],
            source=source,
            target=target,
            extent=float(np.ptp(target, axis=0).max()),
            category=self.ids[index].rpartition(":")[2],
        )
        return Sample(self.ids[index], images[0], pair=pair)

    def fingerprint(self) -> str:
        """Return a SHA-256 of the ids, images and points of all pairs."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        image_ids = sorted(
            {image_id for pair_id in self.ids for image_id in _parse_pair_id(pair_id)}
        )
        paths = [files.path(i) for files in (self.points, self.images) for i in image_ids]
        with self.identify_parts(map(FilePart, paths), len(paths)) as found:
            parts = [*found]
        return self.options.compute_fingerprint([self.ids, image_ids, parts])


@dataclass(frozen=True)
class PfWillow(Layout):
    """PF-WILLOW with its ten subclasses, https://www.di.ens.fr/willow/research/proposalflow.

    A subclass is a part of an object category, such as `car(G)`.

    Attributes:
        root: The folder that contains the folders of the subclasses, or its parent folder.
    """

    name = "pf_willow"
    supports = frozenset({"correspondence", "images"})
    class_names = CATEGORIES

    root: OptionalPath = None

    def val(self) -> WillowPairs:
        """Return all ordered pairs of two images of the same subclass.

        Raises:
            DataError: A file is missing, or the name of an image contains a dash. Pair ids separate
                image names by dashes.
        """
        images = self.images()
        by_category: dict[str, list[str]] = {}
        for image_id in images.ids:
            category, _, name = image_id.partition("/")
            if "-" in name:
                raise DataError(
                    f"{images.folder} has the image {image_id}.png, expected names without a dash, "
                    "such as Cars_006a.png. Use the published files"
                )
            by_category.setdefault(category, []).append(name)
        pairs = [
            (*pair, category)
            for category, names in by_category.items()
            for pair in permutations(names, 2)
        ]
        ids = [
            f"{number:06d}-{source}-{target}:{category}"
            for number, (source, target, category) in enumerate(pairs)
        ]
        found = WillowPairs(
            name=resolve_dataset_name(self.name, {"val": ids}),
            split="all",
            source=images.folder,
            ids=tuple(ids),
            images=images.images,
            points=Files(images.folder, ".mat"),
        )
        found.require_ids("pair")
        found.require_files(found.points, images.ids, "files with points")
        return found

    def images(self) -> FileImageSet:
        """Return the images of all subclasses."""
        folder = find_root(
            self.root,
            name=self.name,
            subfolders=("PF-dataset-WILLOW",),
            marker_folders=CATEGORIES,
            tree="CLASS/*.png and CLASS/*.mat, such as car(G)/Cars_006a.png",
        )
        ids = [
            f"{category}/{name}"
            for category in CATEGORIES
            if (folder / category).is_dir()
            for name in Files(folder / category, ".png").ids()
        ]
        return FileImageSet(
            name=resolve_dataset_name(self.name, {"images": ids}),
            split="all",
            source=folder,
            ids=tuple(ids),
            images=Files(folder, ".png"),
        ).validate()


def read_points(file: Path, size: tuple[int, ...]) -> Float64[np.ndarray, "points 2"]:
    """Read the points of an image, and convert them from MATLAB's pixel coordinates.

    MATLAB counts pixels from 1. In the result, points are (x, y), and the centre of the upper left
    pixel is (0.5, 0.5).

    Args:
        file: A MATLAB file with the array `pts_coord`, whose two rows are x and y.
        size: Width and height of the image in pixels.

    Raises:
        DataError: The file is missing or has no such array, or a point is outside of the image.
    """
    # Imported here, because the import takes a second.
    from scipy.io import loadmat

    data = read_data_file(file)
    try:
        points: Any = np.asarray(loadmat(io.BytesIO(data))["pts_coord"], np.float64).T - 0.5
        if points.ndim != 2 or points.shape[1] != 2 or not len(points):
            raise ValueError(
                f"pts_coord has the shape {points.shape[::-1]}, expected two rows of coordinates"
            )
        # A point may lie on the edge of the image, which is half a pixel outside the centres of the
        # outermost pixels.
        if not ((points >= 0) & (points <= np.array(size))).all():
            raise ValueError(f"pts_coord has points outside the {size[0]} x {size[1]} image")
    except Exception as error:
        reraise_out_of_memory(error)
        raise DataError(
            f"{file} has no points of PF-WILLOW ({error}). Unpack the dataset again"
        ) from error
    return points


def _parse_pair_id(pair_id: str) -> tuple[str, str]:
    """Return the ids of the source image and the target image of a pair."""
    names, _, category = pair_id.rpartition(":")
    _, source, target = names.split("-")
    return f"{category}/{source}", f"{category}/{target}"
