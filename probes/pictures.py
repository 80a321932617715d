"""Tiles with titles, laid out in rows and saved as PNG."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from ssl_bench.files import write_atomically

TILE_HEIGHT = 144
TITLE_HEIGHT = 18
MARGIN = 4


def titled(image: UInt8[np.ndarray, "height width 3"], title: str) -> Image.Image:
    """A tile of fixed height with its title above; small maps keep their sharp patches."""
    height, width = image.shape[:2]
    shape = (max(1, round(width * TILE_HEIGHT / height)), TILE_HEIGHT)
    kind = Image.Resampling.NEAREST if height < TILE_HEIGHT else Image.Resampling.LANCZOS
    tile = Image.new("RGB", (shape[0], TILE_HEIGHT + TITLE_HEIGHT), "white")
    tile.paste(Image.fromarray(image).resize(shape, kind), (0, TITLE_HEIGHT))
    font = ImageFont.load_default(12)
    ImageDraw.Draw(tile).text((1, 2), title, fill="black", font=font)
    return tile


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
    buffer = io.BytesIO()
    canvas.save(buffer, format="PNG")
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
