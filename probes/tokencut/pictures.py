"""Pictures of what was found: panels of an image, contact sheets of a block, masks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import matplotlib
import numpy as np
import scipy.ndimage
from jaxtyping import Bool, Float64, UInt8
from PIL import Image, ImageDraw

from probes.pictures import heading, save_png, sheet, tile_size, titled
from probes.tokencut.cuts import Discovery, PatchGrid
from probes.tokencut.log import ImageResult, unpack_mask
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.data.splits import sampled
from ssl_bench.errors import DataError
from ssl_bench.system.paths import figure_file_name

FOUND = (255, 0, 255)
FURTHER = (255, 160, 0)
GROUND_TRUTH = (64, 224, 64)
LEGEND = "magenta: found, orange: further ones, green: true; dark: no object"
_TILES_PER_ROW = 8
# Background and objects of a saved mask: black, white, then colours.
_PALETTE = [0, 0, 0, 255, 255, 255, 230, 80, 60, 70, 130, 230, 250, 200, 60]


def sheet_path(folder: Path, cell: str) -> Path:
    """All images of a cell, which is named as "LAYER/FACET"."""
    return folder / f"{_block_name(cell)}.png"


def panel_path(folder: Path, cell: str, image_id: str) -> Path:
    return folder / _block_name(cell) / figure_file_name(image_id)


def mask_path(folder: Path, cell: str, image_id: str) -> Path:
    """Of an image without ground truth."""
    *below, last = PurePosixPath(image_id).parts
    return folder.joinpath("masks", _block_name(cell), *below, figure_file_name(last))


def _block_name(cell: str) -> str:
    layer, facet = cell.split("/")
    return f"block{int(layer):02d}_{facet}"


def draw_sheets(
    names: Iterable[str],
    title: tuple[str, str],
    folder: Path,
    images: ImageSet,
    results: Mapping[str, ImageResult],
    *,
    patch_size: int,
    per_kind: int,
    seen: Callable[[Sample], Sample],
) -> None:
    """A contact sheet a cell, from what was kept of each image; nothing is computed again.

    On it the title, of which a part stands before and one after layer and facet, then the kinds
    that occur, each with its number of images, of which `per_kind` from all over the set are shown
    as they were `seen` when they were searched.
    """

    @cache
    def thumbnail(
        image_id: str,
    ) -> tuple[UInt8[np.ndarray, "height width 3"], UInt8[np.ndarray, "height width"] | None]:
        """A photograph and the mask of its true object at the size of a tile."""
        sample = seen(images[images.ids.index(image_id)])
        if not results[image_id].is_of(sample):
            raise DataError(
                f"{image_id} of {images.name} was replaced after its objects were "
                "searched; run the same command again when nobody writes there"
            )
        small = Image.fromarray(sample.image).resize(tile_size(sample.image.shape))
        if sample.mask is None:
            return np.asarray(small), None
        truth = Image.fromarray(sample.mask).resize(small.size, Image.Resampling.NEAREST)
        return np.asarray(small), np.asarray(truth)

    def tile(image_id: str, name: str) -> Image.Image:
        result, (image, truth) = results[image_id], thumbnail(image_id)
        cell, grid = result.cells[name], result.grids.get(name, result.grid)
        packed = [cell["mask"], *cell.get("further_masks", [])]
        patches = np.any([unpack_mask(word, grid) for word in packed], axis=0)
        mask = PatchGrid(*result.size, patch_size).pixels(patches)
        sides = zip(image.shape[:2], result.size, strict=True)
        mask = mask[np.ix_(*(np.arange(small) * large // small for small, large in sides))]
        scale = np.tile(np.divide(image.shape[1::-1], result.size[::-1]), 2)
        true, further = (
            scale * np.array(boxes or [], np.float64).reshape(-1, 4)
            for boxes in (result.true_boxes, cell.get("further_boxes"))
        )
        pixels = outlined(highlight(image, mask), truth)
        pixels = draw_boxes(pixels, true, scale * np.array(cell["box"]), further)
        words = ["hit"] if cell["degenerate"] and cell["hit"] else []
        if "gap" in cell:
            words += [f"lambda {cell['eigenvalue']:.3g}", f"gap {cell['gap']:.2g}"]
        return titled(pixels, image_id, ", ".join(words))

    for name in names:
        layer, facet = name.split("/", 1)
        line = f"{title[0]}, block {layer}, {facet}, {title[1]}   ({LEGEND})"
        rows: list[list[Image.Image]] = [[heading(line)]]
        for kind, ids in kinds_of(results, name).items():
            tiles = [tile(image_id, name) for image_id in sampled(ids, per_kind)]
            left = f", {len(tiles)} drawn (probe.panels={len(ids)} draws all)"
            first = left if len(tiles) < len(ids) else ""
            rule = " (IoU of 1/2 or more)" if kind == "hits" else ""
            rows.append([heading(f"{kind}{rule}: {len(ids)} of {len(results)} images{first}")])
            rows += [tiles[i : i + _TILES_PER_ROW] for i in range(0, len(tiles), _TILES_PER_ROW)]
        sheet(rows, sheet_path(folder, name))


def kinds_of(results: Mapping[str, ImageResult], name: str) -> dict[str, Sequence[str]]:
    """Image ids by what became of them, in order; only kinds that occur.

    Degenerate images are a kind of their own, whether they hit or not.
    """
    kinds: dict[str, list[str]] = {"hits": [], "misses": [], "not scored": [], "degenerate": []}
    for image_id, result in results.items():
        cell = result.cells[name]
        hit = cell["hit"] if result.is_scored else None
        kind = {True: "hits", False: "misses", None: "not scored"}[hit]
        kinds["degenerate" if cell["degenerate"] else kind].append(image_id)
    return {kind: ids for kind, ids in kinds.items() if ids}


def panel(
    sample: Sample, objects: Sequence[Discovery], title: str, grid: PatchGrid
) -> list[Image.Image]:
    """Photograph with found boxes (magenta, orange) and true ones (green), mask, eigenvector."""
    found, *others = objects
    further = np.array([other.box for other in others]).reshape(-1, 4)
    boxes = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    mask = grid.pixels(np.any([one.mask for one in objects], axis=0))
    image = outlined(sample.image, sample.mask)
    tiles = [
        titled(draw_boxes(image, boxes, found.box, further), sample.image_id),
        titled(highlight(sample.image, mask), title + (", degenerate" if found.degenerate else "")),
    ]
    if found.eigenvector is not None:
        # These three go together.
        # pyrefly: ignore[invalid-format-spec]
        numbers = f"lambda {found.eigenvalue:.3g}, gap {found.gap:.2g}"
        tiles.append(titled(_colours(found.eigenvector), numbers))
    return tiles


def save_masks(objects: list[Discovery], grid: PatchGrid, path: Path) -> None:
    """Write a PNG of the image's size that holds 1 at the first object, 2 at the next, else 0."""
    numbers = np.zeros((grid.height, grid.width), np.uint8)
    for number, found in enumerate(objects, start=1):
        numbers[grid.pixels(found.mask)] = number
    picture = Image.fromarray(numbers)
    picture.putpalette(_PALETTE)
    save_png(picture, path)


def draw_boxes(
    image: UInt8[np.ndarray, "height width 3"],
    true: Float64[np.ndarray, "boxes 4"],
    found: Float64[np.ndarray, " 4"],
    further: Float64[np.ndarray, "others 4"],
) -> UInt8[np.ndarray, "height width 3"]:
    """Outline boxes inside their edges, the found one above the others."""
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    width = _line_width(image)
    below = [*((box, GROUND_TRUTH) for box in true), *((box, FURTHER) for box in further)]
    for box, colour in [*below, (found, FOUND)]:
        x0, y0, x1, y1 = (int(edge) for edge in box)
        if x1 > x0 and y1 > y0:
            pen.rectangle((x0, y0, x1 - 1, y1 - 1), outline=colour, width=width)
    return np.asarray(picture)


def outlined(
    image: UInt8[np.ndarray, "height width 3"], truth: UInt8[np.ndarray, "height width"] | None
) -> UInt8[np.ndarray, "height width 3"]:
    """The rim of a true object, class 1 of its mask; the image itself without one."""
    if truth is None:
        return image
    inside, width = truth == 1, _line_width(image)
    core = np.empty_like(inside)
    scipy.ndimage.binary_erosion(inside, iterations=width, output=core)
    rim = (inside & ~core)[..., None]
    return np.where(rim, np.array(GROUND_TRUTH, np.uint8), image)


def _line_width(image: UInt8[np.ndarray, "height width 3"]) -> int:
    return max(1, round(max(image.shape[:2]) / 90))


def highlight(
    image: UInt8[np.ndarray, "height width 3"], mask: Bool[np.ndarray, "height width"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Darken what lies outside of a mask."""
    return np.where(mask[..., None], image, image // 4).astype(np.uint8)


def _colours(vector: Float64[np.ndarray, "rows cols"]) -> UInt8[np.ndarray, "rows cols 3"]:
    """Blue below zero, red above, white at zero."""
    share = 0.5 + 0.5 * vector / max(abs(vector).max(), 1e-300)
    return (255 * matplotlib.colormaps["RdBu_r"](share)[..., :3]).round().astype(np.uint8)
