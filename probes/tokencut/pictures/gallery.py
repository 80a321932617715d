"""Contact sheets of a dataset: hits, misses and degenerate images of a block and facet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64, UInt8
from PIL import Image

from probes.pictures import heading, sheet, tile_size, titled
from probes.tokencut.log import Cell, ImageResult, unpack_mask
from probes.tokencut.options import at_pixels
from probes.tokencut.pictures.panels import LEGEND, draw_boxes, highlight, outlined
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import DataError

_TILES_PER_ROW = 8


@dataclass(frozen=True)
class Thumbnail:
    """A photograph at the size of a tile.

    Attributes:
        boxes: Ground truth in pixels of the photograph.
        size: Height and width of the photograph.
        truth: Mask of the true object, at the size of a tile.
    """

    image: UInt8[np.ndarray, "height width 3"]
    boxes: Float64[np.ndarray, "boxes 4"]
    size: tuple[int, int]
    truth: UInt8[np.ndarray, "height width"] | None = None


@dataclass(frozen=True)
class Gallery:
    """Contact sheets drawn from what was kept of each image; nothing is computed again.

    Attributes:
        results: By image id.
        per_kind: How many images of each kind, from all over the set, are shown.
        seen: An image as it was searched, with its boxes.
    """

    images: ImageSet
    results: Mapping[str, ImageResult]
    patch_size: int
    per_kind: int
    seen: Callable[[Sample], Sample]
    _thumbnails: dict[str, Thumbnail] = field(default_factory=dict, repr=False)

    def draw(self, name: str, title: str, path: Path) -> None:
        """One sheet: the title, then the kinds that occur, each with its number of images."""
        rows: list[list[Image.Image]] = [[heading(f"{title}   ({LEGEND})")]]
        for kind, ids in kinds_of(self.results, name).items():
            shown = [self._tile(image_id, name) for image_id in sampled(ids, self.per_kind)]
            left = f", {len(shown)} drawn (--pictures {len(ids)} draws all)"
            first = left if len(shown) < len(ids) else ""
            rows.append([heading(f"{kind}: {len(ids)} of {len(self.results)} images{first}")])
            rows += [shown[i : i + _TILES_PER_ROW] for i in range(0, len(shown), _TILES_PER_ROW)]
        sheet(rows, path)

    def _tile(self, image_id: str, name: str) -> Image.Image:
        result, thumbnail = self.results[image_id], self._thumbnail(image_id)
        cell = result.cells[name]
        scale = np.tile(np.divide(thumbnail.image.shape[1::-1], thumbnail.size[::-1]), 2)
        further = np.array(cell.get("further_boxes", []), np.float64).reshape(-1, 4)
        pixels = draw_boxes(
            outlined(
                highlight(thumbnail.image, self._mask(result, name, thumbnail)), thumbnail.truth
            ),
            scale * thumbnail.boxes,
            scale * np.array(cell["box"]),
            scale * further,
        )
        return titled(pixels, image_id, _caption(cell))

    def _mask(
        self, result: ImageResult, name: str, thumbnail: Thumbnail
    ) -> Bool[np.ndarray, "height width"]:
        """All objects at the size of the thumbnail."""
        cell, grid = result.cells[name], result.grid_of(name)
        packed = [cell["mask"], *cell.get("further_masks", [])]
        patches = np.any([unpack_mask(word, grid) for word in packed], axis=0)
        mask = at_pixels(patches, thumbnail.size, self.patch_size)
        small, large = thumbnail.image.shape[:2], thumbnail.size
        return mask[np.ix_(*(np.arange(n) * old // n for n, old in zip(small, large, strict=True)))]

    def _thumbnail(self, image_id: str) -> Thumbnail:
        if image_id not in self._thumbnails:
            sample = self.seen(self.images[self.images.ids.index(image_id)])
            if not self.results[image_id].is_of(sample):
                raise DataError(
                    f"{image_id} of {self.images.name} was replaced after its objects were "
                    "searched; run the same command again when nobody writes there"
                )
            small = Image.fromarray(sample.image).resize(tile_size(sample.image.shape))
            boxes = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
            size = (sample.image.shape[0], sample.image.shape[1])
            truth = None
            if sample.mask is not None:
                mask = Image.fromarray(sample.mask).resize(small.size, Image.Resampling.NEAREST)
                truth = np.asarray(mask)
            self._thumbnails[image_id] = Thumbnail(np.asarray(small), boxes, size, truth)
        return self._thumbnails[image_id]


def kinds_of(results: Mapping[str, ImageResult], name: str) -> dict[str, Sequence[str]]:
    """Image ids by what became of them, in order; only kinds that occur.

    Degenerate images are a kind of their own, whether they hit or not.
    """
    kinds: dict[str, list[str]] = {"hits": [], "misses": [], "not scored": [], "degenerate": []}
    for image_id, result in results.items():
        cell = result.cells[name]
        kind = {True: "hits", False: "misses", None: "not scored"}[scored_hit(result, cell)]
        kinds["degenerate" if cell["degenerate"] else kind].append(image_id)
    return {kind: ids for kind, ids in kinds.items() if ids}


def scored_hit(result: ImageResult, cell: Cell) -> bool | None:
    """Whether the box hits; None for an image without ground truth."""
    return cell["hit"] if result.is_scored else None


def _caption(cell: Cell) -> str:
    words = ["hit"] if cell["degenerate"] and cell["hit"] else []
    if "gap" in cell:
        words += [f"lambda {cell['eigenvalue']:.3g}", f"gap {cell['gap']:.2g}"]
    return ", ".join(words)
