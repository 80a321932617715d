"""Pictures of segmentations: photograph, ground truth and what each layer says."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from probes.pictures import sheet, titled
from ssl_bench.data.labels import voc_colours
from ssl_bench.scores import IGNORED

_COLOURS = voc_colours()
_TILES_PER_ROW = 5
_LEGEND_LINES = 24
_LINE_HEIGHT = 16


def draw_panel(
    image: UInt8[np.ndarray, "height width 3"],
    masks: Mapping[str, UInt8[np.ndarray, "height width"]],
    class_names: Sequence[str],
    path: Path,
) -> None:
    """Save the photograph, each titled mask laid over it, and a legend of the classes that occur.

    A mask holds the class of every pixel; where it holds 255 the photograph is left as it is.
    """
    tiles = [titled(image, "photograph")]
    tiles += [titled(overlaid(image, mask), title) for title, mask in masks.items()]
    tiles.append(_legend(masks.values(), class_names))
    rows = [tiles[i : i + _TILES_PER_ROW] for i in range(0, len(tiles), _TILES_PER_ROW)]
    sheet(rows, path)


def overlaid(
    image: UInt8[np.ndarray, "height width 3"], mask: UInt8[np.ndarray, "height width"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Blend the colours of the classes into a photograph."""
    blended = (0.4 * image + 0.6 * _COLOURS[mask]).astype(np.uint8)
    return np.where((mask == IGNORED)[..., None], image, blended)


def _legend(
    masks: Iterable[UInt8[np.ndarray, "height width"]], class_names: Sequence[str]
) -> Image.Image:
    """Names of the most frequent classes beside their colours."""
    pixels = sum(np.bincount(mask.ravel(), minlength=256) for mask in masks)
    order = np.argsort(-np.asarray(pixels)[: len(class_names)], kind="stable")
    shown = [int(c) for c in order if np.asarray(pixels)[c] > 0][:_LEGEND_LINES]
    font = ImageFont.load_default(12)
    width = 24 + max((int(font.getlength(class_names[c])) for c in shown), default=0)
    legend = Image.new("RGB", (width, _LINE_HEIGHT * max(1, len(shown))), "white")
    draw = ImageDraw.Draw(legend)
    for line, number in enumerate(shown):
        top = line * _LINE_HEIGHT
        draw.rectangle((2, top + 2, 16, top + 13), fill=tuple(_COLOURS[number].tolist()))
        draw.text((20, top), class_names[number], fill="black", font=font)
    return legend
