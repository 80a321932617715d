"""What discovery found in an image, as a row of tiles."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import scipy.ndimage
from jaxtyping import Bool, Float64, UInt8
from PIL import Image, ImageDraw

from probes.pictures import save_png, titled
from probes.tokencut.cuts import Discovery
from probes.tokencut.options import PatchGrid, at_pixels
from ssl_bench.data.samples import Sample

FOUND = (255, 0, 255)
FURTHER = (255, 160, 0)
GROUND_TRUTH = (64, 224, 64)
LEGEND = "magenta: found, orange: further ones, green: true; dark: no object"
_NO_BOXES = np.zeros((0, 4))
# Background and objects of a saved mask: black, white, then colours.
_PALETTE = [0, 0, 0, 255, 255, 255, 230, 80, 60, 70, 130, 230, 250, 200, 60]


def panel(
    sample: Sample, objects: Sequence[Discovery], title: str, patch_size: int
) -> list[Image.Image]:
    """Photograph with found boxes (magenta, orange) and true ones (green), mask, eigenvector."""
    found, *others = objects
    further = np.array([other.box for other in others]).reshape(-1, 4)
    boxes = _NO_BOXES if sample.boxes is None else sample.boxes
    patches = np.any([one.mask for one in objects], axis=0)
    mask = at_pixels(patches, sample.image.shape[:2], patch_size)
    image = outlined(sample.image, sample.mask)
    tiles = [
        titled(draw_boxes(image, boxes, found.box, further), sample.image_id),
        titled(highlight(sample.image, mask), title + (", degenerate" if found.degenerate else "")),
    ]
    if found.eigenvector is not None:
        numbers = f"lambda {found.eigenvalue:.3g}, gap {found.gap:.2g}"
        tiles.append(titled(_colours(found.eigenvector), numbers))
    return tiles


def save_masks(objects: list[Discovery], grid: PatchGrid, path: Path) -> None:
    """Write a PNG of the image's size that holds 1 at the first object, 2 at the next, else 0."""
    numbers = np.zeros((grid.height, grid.width), np.uint8)
    for number, found in enumerate(objects, start=1):
        numbers[at_pixels(found.mask, numbers.shape, grid.patch_size)] = number
    picture = Image.fromarray(numbers)
    picture.putpalette(_PALETTE)
    save_png(picture, path)


def draw_boxes(
    image: UInt8[np.ndarray, "height width 3"],
    true: Float64[np.ndarray, "boxes 4"],
    found: Float64[np.ndarray, " 4"],
    further: Float64[np.ndarray, "others 4"] = _NO_BOXES,
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
