"""Lines between points of one view and where they were found in another."""

from pathlib import Path

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageDraw

from probes.correspondence.pairs import View, ViewPair
from probes.correspondence.warps import Points
from probes.pictures import heading, sheet

RIGHT, WRONG = (40, 220, 60), (255, 70, 60)
EDGE = (0, 0, 0)
SIDE, GAP = 320, 12
MOST_LINES = 32
# Drawn larger and reduced, so that lines have no steps.
_TIMES = 2
LEGEND = "green: right, red: wrong, ring: the true place of a wrong one"


def draw(
    pair: ViewPair, places: Points, right: Bool[np.ndarray, " _points"], title: str, path: Path
) -> None:
    """Save both views side by side with lines between the first points of a pair.

    Args:
        pair: The views and the true places.
        places: Where the points were found, relative to the second view.
        right: Whether that is near enough.
        title: Stands above.
        path: A PNG.
    """
    width = 2 * SIDE + GAP
    canvas = Image.new("RGB", (_TIMES * width, _TIMES * SIDE), "white")
    for left, view in zip((0, SIDE + GAP), pair.views, strict=True):
        canvas.paste(_picture(view), (_TIMES * left, 0))
    pen = ImageDraw.Draw(canvas)
    starts = pair.source[:MOST_LINES] * SIDE
    ends, true = (some[:MOST_LINES] * SIDE + [SIDE + GAP, 0] for some in (places, pair.truth))
    # Right ones above wrong ones, of which there may be many; all edged, to be seen on any view.
    for number in sorted(range(len(starts)), key=lambda n: bool(right[n])):
        colour = RIGHT if right[number] else WRONG
        line = _flat(starts[number], ends[number])
        pen.line(line, fill=EDGE, width=3 * _TIMES)
        pen.line(line, fill=colour, width=3 * _TIMES // 2)
        for place in (starts[number], ends[number]):
            pen.ellipse(_around(place, 4.5), fill=colour, outline=EDGE, width=_TIMES)
        if not right[number]:
            pen.ellipse(_around(true[number], 7.5), outline=EDGE, width=4 * _TIMES)
            pen.ellipse(_around(true[number], 6.5), outline=RIGHT, width=2 * _TIMES)
    small = canvas.resize((width, SIDE), Image.Resampling.LANCZOS)
    sheet([[heading(title)], [heading(f"{pair.pair_id}; {LEGEND}")], [small]], path)


def _picture(view: View) -> Image.Image:
    pixels = Image.fromarray(np.ascontiguousarray(view.permute(1, 2, 0).numpy()))
    return pixels.resize((_TIMES * SIDE, _TIMES * SIDE), Image.Resampling.BICUBIC)


def _flat(*points: np.ndarray) -> list[float]:
    return [_TIMES * float(value) for point in points for value in point]


def _around(point: np.ndarray, radius: float) -> list[float]:
    return _flat(point - radius, point + radius)
