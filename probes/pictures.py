"""Tiles with titles, laid out in rows and saved as PNG."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from ssl_bench.files import write_atomically

TILE_HEIGHT = 144
LONGEST_TILE = 3 * TILE_HEIGHT
TITLE_HEIGHT = 18
MARGIN = 4
_FONT = ImageFont.load_default(12)


def titled(image: UInt8[np.ndarray, "height width 3"], *titles: str) -> Image.Image:
    """A tile of fixed height with its titles above, one a line.

    Small maps keep their sharp patches. A tile is as wide as its titles need; titles that would
    be wider than `LONGEST_TILE` are shortened, and so are the sides of very wide images.
    """
    picture = Image.fromarray(image).resize(tile_size(image), _resampling(image))
    lines = [shortened(title, LONGEST_TILE - 2) for title in titles]
    width = max([picture.width, *(2 + round(_FONT.getlength(line)) for line in lines)])
    tile = Image.new("RGB", (width, TILE_HEIGHT + TITLE_HEIGHT * len(lines)), "white")
    for number, line in enumerate(lines):
        _write(tile, line, 2 + number * TITLE_HEIGHT)
    tile.paste(picture, (0, TITLE_HEIGHT * len(lines)))
    return tile


def heading(text: str) -> Image.Image:
    """A line of text as a tile of its own."""
    tile = Image.new("RGB", (2 + round(_FONT.getlength(text)), TITLE_HEIGHT), "white")
    _write(tile, text, 2)
    return tile


def tile_size(image: UInt8[np.ndarray, "height width 3"]) -> tuple[int, int]:
    """Width and height of an image on its tile."""
    height, width = image.shape[:2]
    if width * TILE_HEIGHT > height * LONGEST_TILE:
        return LONGEST_TILE, max(1, round(height * LONGEST_TILE / width))
    return max(1, round(width * TILE_HEIGHT / height)), TILE_HEIGHT


def shortened(text: str, width: int) -> str:
    """Text that is at most `width` pixels wide, without its middle if need be."""
    kept = len(text)
    short = text
    while _FONT.getlength(short) > width and kept > 2:
        kept -= 1
        short = f"{text[: kept // 2]}…{text[len(text) - (kept - kept // 2) :]}"
    return short


def sheet(rows: Sequence[Sequence[Image.Image]], path: Path) -> None:
    """Lay tiles out row by row on white and save them as one PNG."""
    width = max(sum(tile.width + MARGIN for tile in row) for row in rows) + MARGIN
    height = sum(max(tile.height for tile in row) + MARGIN for row in rows) + MARGIN
    canvas = Image.new("RGB", (width, height), "white")
    top = MARGIN
    for row in rows:
        left = MARGIN
        for tile in row:
            canvas.paste(tile, (left, top))
            left += tile.width + MARGIN
        top += max(tile.height for tile in row) + MARGIN
    save_png(canvas, path)


def save_png(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _resampling(image: UInt8[np.ndarray, "height width 3"]) -> Image.Resampling:
    small = image.shape[0] < TILE_HEIGHT
    return Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS


def _write(tile: Image.Image, text: str, top: int) -> None:
    ImageDraw.Draw(tile).text((1, top), text, fill="black", font=_FONT)
