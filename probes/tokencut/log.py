"""What was found in each image, one line of JSON an image, so that a run can be taken up again."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from ssl_bench.data.samples import Sample
from ssl_bench.errors import MachineError
from ssl_bench.system.files import format_checked_line, parse_checked_lines

Cell = dict[str, Any]
# Raised when lines of older files no longer say everything, or say what a method finds no more.
_FORMAT = 5


def cell_name(layer: int, facet: str) -> str:
    return f"{layer}/{facet}"


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
        size: Height and width in pixels.
        true_boxes: Ground truth in pixels; None where nobody drew any.
        pixels: CRC-32 of what was searched.
        centre: What `object` of the centre box is; None without a true mask.
    """

    num_boxes: int | None
    largest_box: float
    grid: tuple[int, int]
    cells: dict[str, Cell]
    size: tuple[int, int]
    true_boxes: list[list[float]] | None = None
    pixels: int = 0
    centre: list[int] | None = None
    grids: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def has_truth(self) -> bool:
        """Whether somebody drew boxes, perhaps none, or a mask."""
        return self.num_boxes is not None or self.centre is not None

    @property
    def is_scored(self) -> bool:
        """Whether there is something to hit."""
        return bool(self.num_boxes) or self.centre is not None

    def is_of(self, sample: Sample) -> bool:
        """Whether this is what was found in these pixels."""
        is_as_large = self.size == sample.image.shape[:2]
        return is_as_large and self.pixels == zlib.crc32(sample.image.tobytes())


# Keys of a line; one with others is of a version that says something else.
_ALWAYS = {"image", "entry", "num_boxes", "largest_box", "grid", "cells", "size"}
_KNOWN = {"image", "entry", *(one.name for one in fields(ImageResult) if one.name != "grids")}


def pack_mask(mask: Bool[np.ndarray, "rows cols"]) -> str:
    """A mask of patches as a short word of letters."""
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes())).decode()


def unpack_mask(packed: str, grid: tuple[int, int]) -> Bool[np.ndarray, "rows cols"]:
    """What `pack_mask` was given."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
    return np.unpackbits(bits, count=grid[0] * grid[1]).reshape(grid).astype(bool)


class DiscoveryLog:
    """Results by image id, kept in a file that grows by a line an image.

    The first line holds the key, whose digest is in the file's name: whatever changes a result
    must be in the key. A line that was cut short or damaged is left out, and its image is searched
    again.

    Args:
        folder: Where the file is.
        key: Everything that the results depend on, but for the images.
        entries: What each image is known by, see `entries_of`; lines of other images are passed
            over.
        forget: Begin anew, unless the file is among those `kept`, which it is from then on.
    """

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, Any],
        entries: Mapping[str, str],
        *,
        forget: bool = False,
        kept: set[Path] | None = None,
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
            if forget and self.path not in (kept or ()):
                self.path.unlink(missing_ok=True)
            if kept is not None:
                kept.add(self.path)
            content = self.path.read_bytes() if self.path.exists() else b""
            if not content.endswith(b"\n"):
                with self.path.open("ab") as file:
                    file.truncate(content.rfind(b"\n") + 1)
                self._append()
            lines = self._lines(self.path)
        except OSError as error:
            raise self._cannot_write(error) from error
        for line in lines:
            if entries.get(line["image"]) == line["entry"]:
                self._merge(line)

    def take_up(self, path: Path) -> list[tuple[str, str, list[str]]]:
        """Have what the log of another set says of images that this one holds too.

        Returns:
            For each image its id there, its id here, and the cells that were not known here.
        """
        taken = []
        for line in self._lines(path):
            for image_id in self._ids.get(line["entry"], ()):
                if not self.has(image_id, list(line["cells"])):
                    self._keep({**line, "image": image_id})
                    taken.append((line["image"], image_id, list(line["cells"])))
        return taken

    def has(self, image_id: str, cells: Sequence[str]) -> bool:
        """Whether all cells of an image are known."""
        known = self.images.get(image_id)
        return known is not None and all(cell in known.cells for cell in cells)

    def add(self, image_id: str, result: ImageResult) -> None:
        """Keep a result; it is in the file when this returns."""
        kept = {name: value for name, value in vars(result).items() if name != "grids"}
        if result.centre is None:
            del kept["centre"]
        self._keep({"image": image_id, "entry": self._entries[image_id], **kept})

    def _keep(self, line: dict[str, Any]) -> None:
        try:
            self._append(format_checked_line(line))
        except OSError as error:
            raise self._cannot_write(error) from error
        self._merge(line)

    def _merge(self, line: dict[str, Any]) -> None:
        known = self.images.get(line["image"])
        cells, grids = (known.cells, known.grids) if known else ({}, {})
        kept = {name: value for name, value in line.items() if name not in ("image", "entry")}
        grid: tuple[int, int] = tuple(line["grid"])
        kept |= {"grid": grid, "size": tuple(line["size"]), "cells": {**cells, **line["cells"]}}
        grids = {**grids, **dict.fromkeys(line["cells"], grid)}
        self.images[line["image"]] = ImageResult(**kept, grids=grids)

    @staticmethod
    def _lines(path: Path) -> list[dict[str, Any]]:
        """Return the lines that are whole and of this version."""
        _, lines = parse_checked_lines(path.read_bytes(), path)
        return [line for line in lines if _ALWAYS <= line.keys() <= _KNOWN]

    def _append(self, *lines: str) -> None:
        with self.path.open("a") as file:
            # Of a new file, or of one that somebody took away.
            header = () if file.tell() else (self._header,)
            file.writelines(f"{line}\n" for line in (*header, *lines))

    def _cannot_write(self, error: OSError) -> MachineError:
        why = error.strerror or error
        return MachineError(f"cannot write {self.path}: {why}; free space or choose another folder")
