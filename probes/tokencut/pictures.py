"""Draw figures of TokenCut: a figure for each image, a contact sheet for each block, and masks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import matplotlib
import numpy as np
import scipy.ndimage
from jaxtyping import Bool, Float64, UInt8
from PIL import Image, ImageDraw

from probes.pictures import draw_heading, draw_tile, save_png, save_sheet, tile_size
from probes.tokencut.cuts import Discovery, PatchGrid
from probes.tokencut.log import ImageResult
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.data.splits import sample_ids
from ssl_bench.errors import DataError
from ssl_bench.system.files import figure_file_name

FOUND_COLOUR = (255, 0, 255)
FURTHER_COLOUR = (255, 160, 0)
GROUND_TRUTH_COLOUR = (64, 224, 64)
LEGEND = "magenta: found box, orange: further boxes, green: ground truth, dark: no object"
_TILES_PER_ROW = 8
# Colours of the background and of the objects in a saved mask.
_PALETTE = [0, 0, 0, 255, 255, 255, 230, 80, 60, 70, 130, 230, 250, 200, 60]


def sheet_path(folder: Path, cell: str) -> Path:
    """Return the path of the contact sheet (figure of many images) for one block and facet.

    `cell` names the block and the facet (kind of feature), as in "11/key".
    """
    return folder / f"{_block_name(cell)}.png"


def panel_path(folder: Path, cell: str, image_id: str) -> Path:
    return folder / _block_name(cell) / figure_file_name(image_id)


def mask_path(folder: Path, cell: str, image_id: str) -> Path:
    """Return the path of the PNG file with the masks of the objects that were found in an image.

    `cell` names the block and the facet (kind of feature), as in "11/key". Masks are saved as PNG
    files only for images without ground truth.
    """
    *folders, last = PurePosixPath(image_id).parts
    return folder.joinpath("masks", _block_name(cell), *folders, figure_file_name(last))


def _block_name(cell: str) -> str:
    layer, facet = cell.split("/")
    return f"block{int(layer):02d}_{facet}"


def draw_sheets(
    cells: Iterable[str],
    title: tuple[str, str],
    folder: Path,
    images: ImageSet,
    results: Mapping[str, ImageResult],
    *,
    patch_size: int,
    per_group: int,
    prepare: Callable[[Sample], Sample],
) -> None:
    """For each block and facet, draw a contact sheet of images with the objects found in them.

    Images are grouped by outcome: hits, misses, not scored, and degenerate (the object is
    arbitrary).

    Args:
        cells: Names of a block and a facet (kind of feature), such as "11/key".
        title: Texts of the heading. The first one is before the block and the facet, and the second
            one is after them.
        folder: Folder of the figures.
        images: The images.
        results: Objects found in each image, by image id.
        patch_size: Side of a patch in pixels.
        per_group: Maximum number of images of each group to draw.
        prepare: Function that resizes an image to the size that the encoder received.

    Raises:
        DataError: An image has changed since its objects were found.
    """

    @cache
    def thumbnail(
        image_id: str,
    ) -> tuple[UInt8[np.ndarray, "height width 3"], UInt8[np.ndarray, "height width"] | None]:
        """Return an image and its true mask at the size that they have in the contact sheet."""
        sample = prepare(images[images.ids.index(image_id)])
        if not results[image_id].belongs_to(sample):
            raise DataError(
                f"image {image_id} of {images.name} changed after its objects were found. Run the "
                "same command again when no other program writes to the dataset"
            )
        small = Image.fromarray(sample.image).resize(tile_size(sample.image.shape))
        if sample.mask is None:
            return np.asarray(small), None
        truth = Image.fromarray(sample.mask).resize(small.size, Image.Resampling.NEAREST)
        return np.asarray(small), np.asarray(truth)

    def tile(image_id: str, name: str) -> Image.Image:
        result, (image, truth) = results[image_id], thumbnail(image_id)
        cell, patches = result.cells[name], np.any([*result.patch_masks(name)], axis=0)
        mask = PatchGrid(*result.size, patch_size).to_pixels(patches)
        sides = zip(image.shape[:2], result.size, strict=True)
        mask = mask[np.ix_(*(np.arange(small) * large // small for small, large in sides))]
        scale = np.tile(np.divide(image.shape[1::-1], result.size[::-1]), 2)
        true, further = (
            scale * np.array(boxes or [], np.float64).reshape(-1, 4)
            for boxes in (result.true_boxes, cell.get("further_boxes"))
        )
        pixels = outline_object(highlight(image, mask), truth)
        pixels = draw_boxes(pixels, true, scale * np.array(cell["box"]), further)
        notes = ["hit"] if cell["degenerate"] and cell["hit"] else []
        if "gap" in cell:
            notes += [f"lambda {cell['eigenvalue']:.3g}", f"gap {cell['gap']:.2g}"]
        return draw_tile(pixels, image_id, ", ".join(notes))

    for name in cells:
        layer, facet = name.split("/", 1)
        line = f"{title[0]}, block {layer}, {facet}, {title[1]}   ({LEGEND})"
        rows: list[list[Image.Image]] = [[draw_heading(line)]]
        for group, ids in group_by_outcome(results, name).items():
            tiles = [tile(image_id, name) for image_id in sample_ids(ids, per_group)]
            excerpt = f", {len(tiles)} drawn (probe.panels={len(ids)} draws all)"
            shown = excerpt if len(tiles) < len(ids) else ""
            rule = " (IoU of 1/2 or more)" if group == "hits" else ""
            rows.append(
                [draw_heading(f"{group}{rule}: {len(ids)} of {len(results)} images{shown}")]
            )
            rows += [tiles[i : i + _TILES_PER_ROW] for i in range(0, len(tiles), _TILES_PER_ROW)]
        save_sheet(rows, sheet_path(folder, name))


def group_by_outcome(results: Mapping[str, ImageResult], cell: str) -> dict[str, Sequence[str]]:
    """Group the ids of images by outcome: hits, misses, not scored, or degenerate.

    If the object found in an image is arbitrary, the image is in the group "degenerate", even if
    its box is a hit. Empty groups are left out. `cell` names the block and the facet (kind of
    feature), as in "11/key".
    """
    groups: dict[str, list[str]] = {"hits": [], "misses": [], "not scored": [], "degenerate": []}
    for image_id, result in results.items():
        hit = result.cells[cell]["hit"] if result.is_scored else None
        group = {True: "hits", False: "misses", None: "not scored"}[hit]
        groups["degenerate" if result.cells[cell]["degenerate"] else group].append(image_id)
    return {group: ids for group, ids in groups.items() if ids}


def draw_panel(
    sample: Sample, objects: Sequence[Discovery], title: str, grid: PatchGrid
) -> list[Image.Image]:
    """Draw the objects that were found in one image with one block, and return a list of drawings.

    The drawings show the image with boxes, the masks of the found objects, and the eigenvector, if
    there is one.
    """
    scored, *others = objects
    further = np.array([other.box for other in others]).reshape(-1, 4)
    boxes = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    mask = grid.to_pixels(np.any([found.mask for found in objects], axis=0))
    image = outline_object(sample.image, sample.mask)
    note = ", degenerate" if scored.degenerate else ""
    tiles = [
        draw_tile(draw_boxes(image, boxes, scored.box, further), sample.image_id),
        draw_tile(highlight(sample.image, mask), title + note),
    ]
    if scored.eigenvector is not None:
        # If there is an eigenvector, there are also an eigenvalue and a gap.
        # pyrefly: ignore[invalid-format-spec]
        numbers = f"lambda {scored.eigenvalue:.3g}, gap {scored.gap:.2g}"
        tiles.append(draw_tile(_colour_values(scored.eigenvector), numbers))
    return tiles


def save_masks(objects: Sequence[Discovery], grid: PatchGrid, path: Path) -> None:
    """Save the masks of all objects of an image as one PNG.

    The pixel values are 0 for the background, 1 for the first object, 2 for the second, and so on.
    """
    numbers = np.zeros((grid.height, grid.width), np.uint8)
    for number, found in enumerate(objects, start=1):
        numbers[grid.to_pixels(found.mask)] = number
    picture = Image.fromarray(numbers)
    picture.putpalette(_PALETTE)
    save_png(picture, path)


def draw_boxes(
    image: UInt8[np.ndarray, "height width 3"],
    true: Float64[np.ndarray, "boxes 4"],
    found: Float64[np.ndarray, " 4"],
    further: Float64[np.ndarray, "others 4"],
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw the outlines of boxes on a copy of an image.

    Args:
        image: RGB image.
        true: Ground-truth boxes.
        found: The found box that is scored. It is drawn last.
        further: Further found boxes.
    """
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    width = _line_width(image)
    below = [
        *((box, GROUND_TRUTH_COLOUR) for box in true),
        *((box, FURTHER_COLOUR) for box in further),
    ]
    for box, colour in [*below, (found, FOUND_COLOUR)]:
        x0, y0, x1, y1 = (int(edge) for edge in box)
        if x1 > x0 and y1 > y0:
            pen.rectangle((x0, y0, x1 - 1, y1 - 1), outline=colour, width=width)
    return np.asarray(picture)


def outline_object(
    image: UInt8[np.ndarray, "height width 3"], truth: UInt8[np.ndarray, "height width"] | None
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw the outline of the true object on an image. Without a true mask, change nothing.

    The object consists of the pixels of `truth` with the value 1.
    """
    if truth is None:
        return image
    inside, width = truth == 1, _line_width(image)
    core = np.empty_like(inside)
    scipy.ndimage.binary_erosion(inside, iterations=width, output=core)
    rim = (inside & ~core)[..., None]
    return np.where(rim, np.array(GROUND_TRUTH_COLOUR, np.uint8), image)


def _line_width(image: UInt8[np.ndarray, "height width 3"]) -> int:
    return max(1, round(max(image.shape[:2]) / 90))


def highlight(
    image: UInt8[np.ndarray, "height width 3"], mask: Bool[np.ndarray, "height width"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Return the image with all pixels outside the mask darkened."""
    return np.where(mask[..., None], image, image // 4).astype(np.uint8)


def _colour_values(vector: Float64[np.ndarray, "rows cols"]) -> UInt8[np.ndarray, "rows cols 3"]:
    """Convert values to colours: negative ones to blue, zero to white and positive ones to red."""
    share = 0.5 + 0.5 * vector / max(abs(vector).max(), 1e-300)
    return (255 * matplotlib.colormaps["RdBu_r"](share)[..., :3]).round().astype(np.uint8)
