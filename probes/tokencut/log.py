"""Log the objects that are found in each image, so that a killed run can continue."""

import base64
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from probes.features.journal import Journal
from ssl_bench.data.samples import Sample

FoundObjects = dict[str, Any]
"""The objects that were found in one image with one block and one facet (kind of feature)."""


@dataclass(frozen=True)
class ImageResult:
    """The objects that were found in one image, and the ground truth of the image.

    Attributes:
        num_boxes: Number of ground-truth boxes. None if the image has no annotation of boxes.
        largest_box: Percentage of the image that the largest ground-truth box covers. It is 0 for
            an image without boxes.
        grid: Numbers of rows and columns of patches, for blocks and facets that are not in `grids`.
        cells: Objects by block and facet (kind of feature), with keys such as "11/key". Each value
            is a dictionary that describes the first object by "box", "mask" (compressed), "hit"
            (None without ground truth) and "degenerate" (whether the object is arbitrary). TokenCut
            and MaskCut add "eigenvalue" (the second smallest) and "gap" (its distance from the
            third). LOST adds "tied_cutoff" (whether the object may depend on the order of patches).
            If there are several objects, "further_boxes" and "further_masks" describe the others.
            If the image has a true mask, "object" contains the pixel counts of
            `ssl_bench.scores.ObjectCounts`.
        size: Height and width of the image in pixels.
        true_boxes: Ground-truth boxes in pixels. None if the image has no annotation of boxes.
        pixels: CRC-32 of the image at the size that the encoder received.
        centre: Pixel counts (`ObjectCounts`) of a box in the centre. None without a true mask.
        grids: Numbers of rows and columns of patches by block and facet, with the keys of `cells`.
            They differ if blocks have different strides.
    """

    num_boxes: int | None
    largest_box: float
    grid: tuple[int, int]
    cells: dict[str, FoundObjects]
    size: tuple[int, int]
    true_boxes: list[list[float]] | None = None
    pixels: int = 0
    centre: list[int] | None = None
    grids: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def has_truth(self) -> bool:
        """Return whether the image has an annotation, which may be an empty list of boxes."""
        return self.num_boxes is not None or self.centre is not None

    @property
    def is_scored(self) -> bool:
        """Return whether the image has a ground-truth box or mask to compare with."""
        return bool(self.num_boxes) or self.centre is not None

    def belongs_to(self, sample: Sample) -> bool:
        """Return whether the objects were found in an image with the same pixels as `sample`."""
        same_size = self.size == sample.image.shape[:2]
        return same_size and self.pixels == zlib.crc32(sample.image.tobytes())

    def patch_masks(self, cell: str) -> Iterator[Bool[np.ndarray, "rows cols"]]:
        """Yield the patch masks of the objects that were found with one block and facet.

        `cell` names the block and the facet (kind of feature), as in "11/key". The mask of the
        scored object comes first.
        """
        for mask in [self.cells[cell]["mask"], *self.cells[cell].get("further_masks", [])]:
            yield unpack_mask(mask, self.grids.get(cell, self.grid))


def layer_facet_name(layer: int, facet: str) -> str:
    """Return the name of a layer and facet (kind of feature) in `ImageResult`, such as "11/key"."""
    return f"{layer}/{facet}"


def pack_mask(mask: Bool[np.ndarray, "rows cols"]) -> str:
    """Return a mask of patches as compressed text, for a JSON file."""
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes())).decode()


def unpack_mask(packed: str, grid: tuple[int, int]) -> Bool[np.ndarray, "rows cols"]:
    """Return the mask that `pack_mask` compressed to a text.

    `grid` contains the numbers of rows and columns of the mask.
    """
    bits = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
    return np.unpackbits(bits, count=grid[0] * grid[1]).reshape(grid).astype(bool)


_REQUIRED = {"image", "entry", "num_boxes", "largest_box", "grid", "cells", "size"}
_ALLOWED = {"image", "entry", *(item.name for item in fields(ImageResult) if item.name != "grids")}


class DiscoveryLog:
    """A log of the objects that have been found in all images, stored in a `Journal`.

    Args:
        journal: File that lets a killed run continue. Each entry contains the objects of one image
            for some blocks and facets.
        identities: Hash of each image file by image id, from `sample_hashes`. Entries with other
            hashes are ignored, because the image has changed.

    Attributes:
        path: File of the journal.
        results: Objects found in each image, by image id, merged from all entries of the image.
    """

    def __init__(self, journal: Journal, identities: Mapping[str, str]) -> None:
        self.path = journal.path
        self.results: dict[str, ImageResult] = {}
        self._journal = journal
        self._identities = identities
        if self.path.is_file():
            for entry in self._read(self.path):
                if identities.get(entry["image"]) == entry["entry"]:
                    self._merge(entry)

    def has_cells(self, image_id: str, cells: Collection[str]) -> bool:
        result = self.results.get(image_id)
        return result is not None and result.cells.keys() >= set(cells)

    def add(self, image_id: str, result: ImageResult) -> None:
        """Store the objects that were found in an image, and write them to the file immediately.

        Raises:
            MachineError: The file cannot be written.
        """
        values = {name: value for name, value in vars(result).items() if name != "grids"}
        if result.centre is None:
            del values["centre"]
        self._store({"image": image_id, "entry": self._identities[image_id], **values})

    def copy_from(self, path: Path) -> list[tuple[str, str, list[str]]]:
        """Copy the results of identical image files from the log of another image set.

        Returns:
            For each copied result: the image id in the other log, the image id in this log, and the
            copied blocks and facets (kinds of features), such as "11/key".
        """
        image_ids: dict[str, list[str]] = {}
        for image_id, identity in self._identities.items():
            image_ids.setdefault(identity, []).append(image_id)
        copied = []
        for entry in self._read(path):
            for image_id in image_ids.get(entry["entry"], []):
                if not self.has_cells(image_id, entry["cells"]):
                    self._store({**entry, "image": image_id})
                    copied.append((entry["image"], image_id, list(entry["cells"])))
        return copied

    def _read(self, path: Path) -> list[dict[str, Any]]:
        """Return the entries of a log file.

        Entries with missing or unknown fields are skipped, because they are from another version of
        ssl-bench.
        """
        entries = self._journal.read(path)
        return [entry for entry in entries if _REQUIRED <= entry.keys() <= _ALLOWED]

    def _store(self, entry: dict[str, Any]) -> None:
        self._journal.append(entry)
        self._merge(entry)

    def _merge(self, entry: dict[str, Any]) -> None:
        values = {name: entry[name] for name in entry.keys() - {"image", "entry"}}
        earlier = self.results.get(entry["image"])
        cells, grids = (earlier.cells, earlier.grids) if earlier else ({}, {})
        grid = values["grid"] = tuple(entry["grid"])
        values["size"] = tuple(entry["size"])
        values["cells"] = {**cells, **entry["cells"]}
        values["grids"] = {**grids, **dict.fromkeys(entry["cells"], grid)}
        self.results[entry["image"]] = ImageResult(**values)
