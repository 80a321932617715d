"""Arrange images with titles in rows of a figure, and save the figure as PNG or SVG."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from ssl_bench.system.files import TILES, write_atomically, write_text_atomically

TILE_HEIGHT = 144
TITLE_HEIGHT = 18
MARGIN = 4
_FONT = ImageFont.load_default(12)
# Fonts that are about as wide as Pillow's font. An SVG viewer uses the first font that is
# available.
_SVG_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_SVG_JPEG_QUALITY = 90


@dataclass(frozen=True)
class Picture:
    """An image with titles above it, as one part of a figure.

    In the figure, the image is resized to the height `height`. Very wide images are resized to a
    width of three times `height` instead. Smaller images, such as maps of patches, are enlarged
    without blurring.

    Attributes:
        image: RGB image with values from 0 to 255.
        titles: Lines of text. Lines that are wider than three times `height` are shortened.
        shape: Height and width that define the aspect ratio in the figure. None for the aspect
            ratio of `image`. For an image that was resized to a square, set it to the original
            height and width.
        height: Height of the image in the figure, in pixels.
    """

    image: UInt8[np.ndarray, "height width 3"]
    titles: tuple[str, ...]
    shape: tuple[int, int] | None = None
    height: int = TILE_HEIGHT

    @property
    def is_map(self) -> bool:
        """Return whether the image is a map of patches, which is enlarged without blurring."""
        return self.image.shape[0] < self.height

    @property
    def lines(self) -> list[str]:
        """Return the titles, shortened so that none is wider than three times `height`."""
        return [shorten(title, 3 * self.height - 2) for title in self.titles]

    @property
    def size(self) -> tuple[int, int]:
        """Return the width and height of the image in the figure, in pixels."""
        return tile_size(self.shape or self.image.shape, self.height)

    @property
    def width(self) -> int:
        """Return the width in pixels of the image with its titles."""
        return max([self.size[0], *(2 + round(_text_width(line)) for line in self.lines)])

    def tile(self) -> Image.Image:
        """Draw the image with its titles above it."""
        resampling = Image.Resampling.NEAREST if self.is_map else Image.Resampling.LANCZOS
        top = TITLE_HEIGHT * len(self.titles)
        tile = Image.new("RGB", (self.width, top + self.height), "white")
        for number, line in enumerate(self.lines):
            _write(tile, line, 2 + number * TITLE_HEIGHT)
        tile.paste(Image.fromarray(self.image).resize(self.size, resampling), (0, top))
        tile.info["image"] = (0, top, *self.size)
        return tile


def draw_tile(image: UInt8[np.ndarray, "height width 3"], *titles: str) -> Image.Image:
    """Draw an image with titles above it. `save_sheet` can place the result in a figure."""
    return Picture(image, titles).tile()


def draw_heading(text: str) -> Image.Image:
    """Draw a line of text as an image. `save_sheet` can place the result in a figure."""
    tile = Image.new("RGB", (2 + round(_text_width(text)), TITLE_HEIGHT), "white")
    _write(tile, text, 2)
    return tile


def tile_size(shape: Sequence[int], tile_height: int = TILE_HEIGHT) -> tuple[int, int]:
    """Return the width and height that an image has in a figure, in pixels.

    Args:
        shape: Height and width of the image.
        tile_height: Height of the images in the figure. The width is limited to three times this
            value.
    """
    height, width = shape[:2]
    longest = 3 * tile_height
    if width > 3 * height:
        return longest, max(1, round(height * longest / width))
    return max(1, round(width * tile_height / height)), tile_height


def shorten(text: str, width: int) -> str:
    """Replace the middle of a text with an ellipsis if the text is wider than `width` pixels."""
    length = len(text)
    short = text
    while _text_width(short) > width and length > 2:
        length -= 1
        short = f"{text[: length // 2]}…{text[len(text) - (length - length // 2) :]}"
    return short


def save_sheet(rows: Sequence[Sequence[Image.Image]], path: Path) -> None:
    """Arrange tiles (images with titles) in rows on a white background, and save them as one PNG.

    A text field of the PNG contains the left edge, top edge, width and height of each image without
    its titles. Reports use these positions and sizes to show a single image of the PNG.
    """
    width = max(sum(tile.width + MARGIN for tile in row) for row in rows) + MARGIN
    height = sum(max(tile.height for tile in row) + MARGIN for row in rows) + MARGIN
    canvas = Image.new("RGB", (width, height), "white")
    top, images = MARGIN, []
    for row in rows:
        left = MARGIN
        for tile in row:
            canvas.paste(tile, (left, top))
            if place := tile.info.get("image"):
                images.append((left + place[0], top + place[1], *place[2:]))
            left += tile.width + MARGIN
        top += max(tile.height for tile in row) + MARGIN
    text = PngInfo()
    text.add_text(TILES, json.dumps(images))
    save_png(canvas, path, text)


def save_svg_sheet(rows: Sequence[Sequence[Picture]], path: Path, heading_line: str) -> None:
    """Arrange images and their titles in rows below a heading, and save them as one SVG.

    The text in the SVG can be selected and copied. Small maps are enlarged so that viewers do not
    blur their patches. Photographs are stored at twice their displayed resolution.
    """
    parts = [_svg_text(heading_line, MARGIN, MARGIN + 13)]
    top, right = 2 * MARGIN + TITLE_HEIGHT, 2 * MARGIN + 2 + round(_text_width(heading_line))
    for row in rows:
        left, bottom = MARGIN, top
        for picture in row:
            for number, line in enumerate(picture.lines):
                parts.append(_svg_text(line, left, top + number * TITLE_HEIGHT + 13))
            image_top = top + TITLE_HEIGHT * len(picture.titles)
            parts.append(_svg_image(picture, left, image_top))
            left += picture.width + MARGIN
            bottom = max(bottom, image_top + picture.size[1])
        top, right = bottom + MARGIN, max(right, left)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{top}" '
        f'viewBox="0 0 {right} {top}" font-family="{_SVG_FONT}" font-size="12">\n'
        f'<rect width="{right}" height="{top}" fill="white"/>\n'
    )
    write_text_atomically(path, head + "\n".join(parts) + "\n</svg>\n")


def _svg_text(line: str, left: int, baseline: int) -> str:
    # The width is fixed, because text in a wider font could overlap the next image.
    width = max(1, round(_text_width(line)))
    place = f'x="{left + 1}" y="{baseline}" textLength="{width}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place}>{escape(line)}</text>"


def _svg_image(picture: Picture, left: int, top: int) -> str:
    image, (width, height) = Image.fromarray(picture.image), picture.size
    buffer = io.BytesIO()
    if picture.is_map:
        factor = -(-2 * height // image.height)
        size = (image.width * factor, image.height * factor)
        image.resize(size, Image.Resampling.NEAREST).save(buffer, format="PNG")
        kind = "png"
    else:
        image.resize((2 * width, 2 * height), Image.Resampling.LANCZOS).save(
            buffer, format="JPEG", quality=_SVG_JPEG_QUALITY
        )
        kind = "jpeg"
    data = base64.b64encode(buffer.getvalue()).decode()
    place = f'x="{left}" y="{top}" width="{width}" height="{height}" preserveAspectRatio="none"'
    return f'<image {place} href="data:image/{kind};base64,{data}"/>'


def blocks_name(layers: Sequence[int]) -> str:
    """Return a short name for several blocks, such as "blocks-0-2_5" for blocks 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    ends = (sorted({run[0], run[-1]}) for run in runs)
    return "blocks-" + "_".join("-".join(map(str, end)) for end in ends)


def save_png(image: Image.Image, path: Path, text: PngInfo | None = None) -> None:
    """Save an image as PNG, with optional text fields.

    The file is written atomically, so a killed process never leaves an incomplete file.
    """
    buffer = io.BytesIO()
    # Level 2 takes 40 % of the time of Pillow's default 6, and the file is 8 % larger.
    image.save(buffer, format="PNG", compress_level=2, pnginfo=text)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _text_width(text: str) -> float:
    return _font(text).getlength(text)


def _font(text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's default font for ASCII text, and DejaVu Sans for all other text."""
    return _FONT if text.replace("…", "").isascii() else _unicode_font()


@cache
def _unicode_font() -> ImageFont.FreeTypeFont:
    # matplotlib is imported here, because it is slow to import and few texts need this font.
    from matplotlib import get_data_path

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 12)


def _write(tile: Image.Image, text: str, top: int) -> None:
    ImageDraw.Draw(tile).text((1, top), text, fill="black", font=_font(text))
