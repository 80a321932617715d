"""Tiles with titles, laid out in rows and saved as PNG or SVG."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from ssl_bench.system.files import write_atomically, write_text_atomically

TILE_HEIGHT = 144
LONGEST_TILE = 3 * TILE_HEIGHT
TITLE_HEIGHT = 18
MARGIN = 4
_FONT = ImageFont.load_default(12)
# Text of an SVG is real text, in whatever font the reader has: about as wide as ours.
_SVG_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_SVG_JPEG_QUALITY = 90


@dataclass(frozen=True)
class Picture:
    """An image and the titles above it, before either is drawn.

    Attributes:
        shape: Height and width, in any unit, of what a squashed image is of.
    """

    image: UInt8[np.ndarray, "height width 3"]
    titles: tuple[str, ...]
    shape: tuple[int, int] | None = None

    def tile(self) -> Image.Image:
        return titled(self.image, *self.titles, shape=self.shape)


def titled(
    image: UInt8[np.ndarray, "height width 3"], *titles: str, shape: tuple[int, int] | None = None
) -> Image.Image:
    """A tile of fixed height with its titles above, one a line.

    Small maps keep their sharp patches. A tile is as wide as its titles need; titles that would
    be wider than `LONGEST_TILE` are shortened, and so are the sides of very wide images.
    """
    is_small = image.shape[0] < TILE_HEIGHT
    resampling = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
    picture = Image.fromarray(image).resize(tile_size(shape or image.shape), resampling)
    lines = [shortened(title, LONGEST_TILE - 2) for title in titles]
    width = _title_width(titles, picture.width)
    tile = Image.new("RGB", (width, TILE_HEIGHT + TITLE_HEIGHT * len(lines)), "white")
    for number, line in enumerate(lines):
        _write(tile, line, 2 + number * TITLE_HEIGHT)
    tile.paste(picture, (0, TITLE_HEIGHT * len(lines)))
    return tile


def heading(text: str) -> Image.Image:
    """A line of text as a tile of its own."""
    tile = Image.new("RGB", (2 + round(_length(text)), TITLE_HEIGHT), "white")
    _write(tile, text, 2)
    return tile


def tile_size(shape: Sequence[int]) -> tuple[int, int]:
    """Width and height on its tile of an image of some height and width."""
    height, width = shape[:2]
    if width * TILE_HEIGHT > height * LONGEST_TILE:
        return LONGEST_TILE, max(1, round(height * LONGEST_TILE / width))
    return max(1, round(width * TILE_HEIGHT / height)), TILE_HEIGHT


def shortened(text: str, width: int) -> str:
    """Text that is at most `width` pixels wide, without its middle if need be."""
    kept = len(text)
    short = text
    while _length(short) > width and kept > 2:
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


def svg_sheet(rows: Sequence[Sequence[Picture]], path: Path, heading_line: str) -> None:
    """Lay pictures out as `sheet` does and save them as one SVG with real text.

    Small maps are enlarged patch by patch, so that no viewer blurs them; photographs are at twice
    the size at which they stand.
    """
    parts = [_svg_text(heading_line, MARGIN, MARGIN + 13)]
    top, right = (
        2 * MARGIN + TITLE_HEIGHT,
        2 * MARGIN + 2 + round(_length(heading_line)),
    )
    for row in rows:
        left, bottom = MARGIN, top
        for picture in row:
            title_height = TITLE_HEIGHT * len(picture.titles)
            width, height = tile_size(picture.shape or picture.image.shape)
            for number, title in enumerate(picture.titles):
                line = shortened(title, LONGEST_TILE - 2)
                parts.append(_svg_text(line, left, top + number * TITLE_HEIGHT + 13))
            parts.append(_svg_image(picture.image, left, top + title_height, width, height))
            left += _title_width(picture.titles, width) + MARGIN
            bottom = max(bottom, top + title_height + height)
        top, right = bottom + MARGIN, max(right, left)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{top}" '
        f'viewBox="0 0 {right} {top}" font-family="{_SVG_FONT}" font-size="12">\n'
        f'<rect width="{right}" height="{top}" fill="white"/>\n'
    )
    write_text_atomically(path, head + "\n".join(parts) + "\n</svg>\n")


def _svg_text(line: str, left: int, baseline: int) -> str:
    # As wide as it is in our font: in another one it would run into its neighbour.
    width = max(1, round(_length(line)))
    place = f'x="{left + 1}" y="{baseline}" textLength="{width}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place}>{escape(line)}</text>"


def _svg_image(
    image: UInt8[np.ndarray, "height width 3"], left: int, top: int, width: int, height: int
) -> str:
    picture = Image.fromarray(image)
    buffer = io.BytesIO()
    if image.shape[0] < TILE_HEIGHT:
        times = -(-2 * height // image.shape[0])
        size = (picture.width * times, picture.height * times)
        picture.resize(size, Image.Resampling.NEAREST).save(buffer, format="PNG")
        kind = "png"
    else:
        picture.resize((2 * width, 2 * height), Image.Resampling.LANCZOS).save(
            buffer, format="JPEG", quality=_SVG_JPEG_QUALITY
        )
        kind = "jpeg"
    data = base64.b64encode(buffer.getvalue()).decode()
    place = f'x="{left}" y="{top}" width="{width}" height="{height}" preserveAspectRatio="none"'
    return f'<image {place} href="data:image/{kind};base64,{data}"/>'


def _title_width(titles: Sequence[str], width: int) -> int:
    lines = [shortened(title, LONGEST_TILE - 2) for title in titles]
    return max([width, *(2 + round(_length(line)) for line in lines)])


def blocks_name(layers: Sequence[int]) -> str:
    """Of a picture of several blocks: "blocks-0-11", or "blocks-0-2_5" where they have gaps."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    ends = (sorted({run[0], run[-1]}) for run in runs)
    return "blocks-" + "_".join("-".join(map(str, end)) for end in ends)


def save_png(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all."""
    buffer = io.BytesIO()
    # Half the time of Pillow's 6, with 3 % more bytes.
    picture.save(buffer, format="PNG", compress_level=4)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _length(text: str) -> float:
    return _font(text).getlength(text)


def _font(text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own, which has no letters but those of ASCII; for others one that has most."""
    return _FONT if text.replace("…", "").isascii() else _font_of_many_letters()


@cache
def _font_of_many_letters() -> ImageFont.FreeTypeFont:
    # Here, because few names need it and matplotlib takes a while.
    from matplotlib import get_data_path

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 12)


def _write(tile: Image.Image, text: str, top: int) -> None:
    ImageDraw.Draw(tile).text((1, top), text, fill="black", font=_font(text))
