"""What was found in each image, one line of JSON an image, so that a run can be taken up again."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from probes.tokencut.cuts import Discovery
from probes.tokencut.options import PatchGrid
from ssl_bench.data.samples import Sample
from ssl_bench.errors import MachineError
from ssl_bench.scores import is_hit

Cell = dict[str, Any]
# Raised when lines of older files no longer say everything, or say what a method finds no more.
_FORMAT = 4


@dataclass(frozen=True)
class ImageResult:
    """One image.

    Attributes:
        num_boxes: Ground-truth boxes; None where nobody drew any.
        largest_box: Percent of the image that the largest of them covers; 0 without boxes.
        grid: Rows and columns of patches, of cells that `grids` does not name.
        cells: By "LAYER/FACET": box, mask (see `unpack_mask`), hit (None without ground truth),
            degenerate; eigenvalue and gap with a spectrum, tied_cutoff without; further_boxes and
            further_masks where several objects were found; object with a true mask, see
            `ssl_bench.scores.ObjectCounts`.
        true_boxes: Ground truth in pixels; None where nobody drew any, and of lines that are
            older than this field.
        size: Height and width in pixels; None of lines that are older than this field.
        pixels: CRC-32 of what was searched; None of lines that are older than this field.
        centre: What `object` of the centre box is; None without a true mask.
    """

    num_boxes: int | None
    largest_box: float
    grid: tuple[int, int]
    cells: dict[str, Cell]
    true_boxes: list[list[float]] | None = None
    size: tuple[int, int] | None = None
    grids: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pixels: int | None = None
    centre: list[int] | None = None

    @property
    def has_truth(self) -> bool:
        """Whether somebody drew boxes, perhaps none, or a mask."""
        return self.num_boxes is not None or self.centre is not None

    @property
    def is_scored(self) -> bool:
        """Whether there is something to hit."""
        return bool(self.num_boxes) or self.centre is not None

    def is_of(self, sample: Sample) -> bool:
        """Whether this is what was found in these pixels, as far as it says which they were."""
        if self.size not in (None, sample.image.shape[:2]):
            return False
        return self.pixels in (None, zlib.crc32(sample.image.tobytes()))

    def grid_of(self, cell: str) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.grids.get(cell, self.grid)


def pack_mask(mask: Bool[np.ndarray, "rows cols"]) -> str:
    """A mask of patches as a short word of letters."""
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes())).decode()


def unpack_mask(packed: str, grid: tuple[int, int]) -> Bool[np.ndarray, "rows cols"]:
    """What `pack_mask` was given."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
    return np.unpackbits(bits, count=grid[0] * grid[1]).reshape(grid).astype(bool)


def image_result(sample: Sample, found: dict[str, list[Discovery]], grid: PatchGrid) -> ImageResult:
    """What is kept of an image."""
    true = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    areas = (true[:, 2:] - true[:, :2]).prod(-1)
    return ImageResult(
        num_boxes=None if sample.boxes is None else len(true),
        largest_box=100 * float(areas.max(initial=0)) / (grid.height * grid.width),
        grid=grid.shape,
        cells={name: _cell(objects, sample.boxes) for name, objects in found.items()},
        true_boxes=None if sample.boxes is None else sample.boxes.tolist(),
        size=(grid.height, grid.width),
        pixels=zlib.crc32(sample.image.tobytes()),
    )


class DiscoveryLog:
    """Results by image id, kept in a file that grows by a line an image.

    The first line holds the key, whose digest is in the file's name: whatever changes a result
    must be in the key. Each line has a CRC-32 of its content: one that was cut short or damaged is
    dropped, its image computed again.

    Args:
        folder: Where the file is.
        key: Everything that the results depend on, but for the images.
        entries: What each image is known by, see `entries_of`; lines of other images are passed
            over.
        forget: Begin anew.
    """

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, Any],
        entries: Mapping[str, str],
        *,
        forget: bool = False,
    ) -> None:
        self._header = json.dumps({"key": dict(key), "format": _FORMAT}, sort_keys=True)
        digest = hashlib.sha256(self._header.encode(errors="surrogateescape")).hexdigest()
        self.path = folder / f"images_{digest[:12]}.jsonl"
        self.images: dict[str, ImageResult] = {}
        self._entries = entries
        self._ids: dict[str, list[str]] = {}
        for image_id, entry in entries.items():
            self._ids.setdefault(entry, []).append(image_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if forget:
                self.path.unlink(missing_ok=True)
            self._drop_half_line()
            self._begin()
            lines = self.path.read_text(errors="replace").splitlines()[1:]
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        for line in lines:
            # Bytes that a failing disk or another writer left say nothing of any image.
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                content = _whole(json.loads(line))
                if self._entries.get(content["image"]) == content["entry"]:
                    self._merge(content)

    def _begin(self) -> None:
        if not self.path.exists() or not self.path.stat().st_size:
            self._append(self._header)

    def take_up(self, path: Path) -> list[tuple[str, str, list[str]]]:
        """Have what the log of another set says of images that this one holds too.

        Returns:
            For each image its id there, its id here, and the cells that were not known here.
        """
        taken = []
        for line in path.read_text(errors="replace").splitlines()[1:]:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                content = _whole(json.loads(line))
                for image_id in self._ids.get(content["entry"], ()):
                    if not self.has(image_id, list(content["cells"])):
                        self._keep({**content, "image": image_id})
                        taken.append((content["image"], image_id, list(content["cells"])))
        return taken

    def has(self, image_id: str, cells: Sequence[str]) -> bool:
        """Whether all cells of an image are known."""
        known = self.images.get(image_id)
        return known is not None and all(cell in known.cells for cell in cells)

    def add(self, image_id: str, result: ImageResult) -> None:
        """Keep a result; it is in the file when this returns."""
        line = {
            "image": image_id,
            "entry": self._entries[image_id],
            "num_boxes": result.num_boxes,
            "largest_box": result.largest_box,
            "grid": list(result.grid),
            "cells": result.cells,
            "true_boxes": result.true_boxes,
            "size": result.size,
            "pixels": result.pixels,
            **({} if result.centre is None else {"centre": result.centre}),
        }
        self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        try:
            self._begin()
            self._append(json.dumps({**line, "crc32": _checksum(line)}))
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._merge(line)

    def _merge(self, line: dict[str, Any]) -> None:
        known = self.images.get(line["image"])
        cells = {**known.cells, **line["cells"]} if known else {**line["cells"]}
        rows, cols = line["grid"]
        grids = {**known.grids} if known else {}
        self.images[line["image"]] = ImageResult(
            num_boxes=line["num_boxes"],
            largest_box=line["largest_box"],
            grid=(rows, cols),
            cells=cells,
            true_boxes=line.get("true_boxes"),
            size=None if line.get("size") is None else tuple(line["size"]),
            grids=grids | dict.fromkeys(line["cells"], (rows, cols)),
            pixels=line.get("pixels"),
            centre=line.get("centre"),
        )

    def _append(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")

    def _drop_half_line(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))


def _whole(line: dict[str, Any]) -> dict[str, Any]:
    """What a line says, without its checksum.

    Raises:
        ValueError: it is not what was written.
    """
    content = {name: value for name, value in line.items() if name != "crc32"}
    if _checksum(content) != line["crc32"]:
        raise ValueError("another content than was written")
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _cannot_write(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
    )


def _cell(objects: list[Discovery], true: Float64[np.ndarray, "boxes 4"] | None) -> Cell:
    first, *others = objects
    cell: Cell = {
        "box": _pixels(first.box),
        "mask": pack_mask(first.mask),
        "hit": None if true is None else is_hit(first.box, true),
        "degenerate": first.degenerate,
    }
    if first.eigenvalue is None:
        cell["tied_cutoff"] = first.tied_cutoff
    else:
        cell |= {"eigenvalue": first.eigenvalue, "gap": first.gap}
    if others:
        cell["further_boxes"] = [_pixels(other.box) for other in others]
        cell["further_masks"] = [pack_mask(other.mask) for other in others]
    return cell


def _pixels(box: Float64[np.ndarray, " 4"]) -> list[int]:
    return box.astype(int).tolist()
