"""What discovery found in an image, as a row of tiles."""

import matplotlib
import numpy as np
from jaxtyping import Bool, Float64, UInt8
from PIL import Image, ImageDraw

from probes.discovery import Discovery
from probes.pictures import titled
from ssl_bench.data.samples import Sample

FOUND = (255, 0, 255)
GROUND_TRUTH = (64, 224, 64)


def panel(sample: Sample, found: Discovery, title: str, patch_size: int) -> list[Image.Image]:
    """Photograph with the found box (magenta) and the true ones (green), mask, eigenvector."""
    boxes = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    mask = _at_pixels(found.mask, sample.image, patch_size)
    tiles = [
        titled(draw_boxes(sample.image, boxes, found.box), sample.image_id),
        titled(highlight(sample.image, mask), title + (", degenerate" if found.degenerate else "")),
    ]
    if found.eigenvector is not None:
        tiles.append(titled(_colours(found.eigenvector), f"lambda {found.eigenvalue:.3g}"))
    return tiles


def draw_boxes(
    image: UInt8[np.ndarray, "height width 3"],
    true: Float64[np.ndarray, "boxes 4"],
    found: Float64[np.ndarray, " 4"],
) -> UInt8[np.ndarray, "height width 3"]:
    """Outline boxes inside their edges."""
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    width = max(1, round(min(image.shape[:2]) / 80))
    for box, colour in [*((box, GROUND_TRUTH) for box in true), (found, FOUND)]:
        x0, y0, x1, y1 = (int(edge) for edge in box)
        if x1 > x0 and y1 > y0:
            pen.rectangle((x0, y0, x1 - 1, y1 - 1), outline=colour, width=width)
    return np.asarray(picture)


def highlight(
    image: UInt8[np.ndarray, "height width 3"], mask: Bool[np.ndarray, "height width"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Darken what lies outside of a mask."""
    return np.where(mask[..., None], image, image // 4).astype(np.uint8)


def _at_pixels(
    mask: Bool[np.ndarray, "rows cols"],
    image: UInt8[np.ndarray, "height width 3"],
    patch_size: int,
) -> Bool[np.ndarray, "height width"]:
    large = mask.repeat(patch_size, 0).repeat(patch_size, 1)
    return large[: image.shape[0], : image.shape[1]]


def _colours(vector: Float64[np.ndarray, "rows cols"]) -> UInt8[np.ndarray, "rows cols 3"]:
    """Blue below zero, red above, white at zero."""
    share = 0.5 + 0.5 * vector / max(abs(vector).max(), 1e-300)
    return (255 * matplotlib.colormaps["RdBu_r"](share)[..., :3]).round().astype(np.uint8)
