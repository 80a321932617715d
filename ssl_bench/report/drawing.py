"""Curves and ranks of blocks as lengths in a drawing; a template turns them into SVG."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDTH, HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 34
_LONGEST_TICK = 5
_TICK_GAP = 27
MOST_LABELLED = 8
"""With more curves than that their names at the right edge would cover each other."""

# Of a letter of a name at the right edge, and of its line.
_LETTER, _LINE = 5.9, 11.0

RANKS_WIDTH = 380
_RANKS_LEFT, _RANKS_RIGHT, _RANKS_TOP, _RANKS_BOTTOM = 142, 12, 6, 34
_ROW, _ROW_GAP, _RANKS_TICK_GAP = 34, 10, 20
# Letters beside a row, and the height of a line of them.
_LETTERS, _RANKS_LINE = 21, 13


class Spot(NamedTuple):
    """One value of a curve; NaN breaks the line, infinity lies at the upper edge.

    Attributes:
        x: Block, epoch or severity.
        hint: Shown when it is pointed at.
        doubtful: Drawn as a cross.
    """

    x: int | float
    value: float
    low: float | None
    high: float | None
    hint: str
    doubtful: bool = False


@dataclass(frozen=True)
class Curve:
    """What is to be drawn.

    Attributes:
        style: Classes of the style sheet.
        number: Of the checkpoint or block, so that readers can hide it.
        label: Stands at the right end where there are few curves; empty for none.
    """

    name: str
    style: str
    number: int
    spots: Sequence[Spot]
    label: str = ""


class Tick(NamedTuple):
    """A labelled place on an axis."""

    place: float
    label: str


class Mark(NamedTuple):
    """A spot in the drawing; of ranks `is_best` says that no block stands higher."""

    x: float
    y: float
    hint: str
    doubtful: bool = False
    is_infinite: bool = False
    is_best: bool = False


class DrawnCurve(NamedTuple):
    """A curve in the drawing; `line` and `band` are SVG paths, `label` a text and its height."""

    name: str
    style: str
    number: int
    line: str
    band: str
    marks: Sequence[Mark]
    label: Tick | None


class Chart(NamedTuple):
    """A drawing; y grows downwards.

    Attributes:
        levels: Values without a place along the axis, dashes at the right edge.
        floors: Scores of answers that look at no image, lines across.
        floor_texts: Their names at heights at which they do not touch.
        zero: Height of the value 0 inside of the drawing.
        measured: What the vertical axis shows, with its unit.
        along: What the horizontal axis shows.
        right: Where the axes end.
    """

    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    curves: Sequence[DrawnCurve]
    levels: Sequence[Tick]
    floors: Sequence[Tick]
    floor_texts: Sequence[Tick]
    zero: float | None
    measured: str
    along: str
    right: int
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


def draw(
    curves: Sequence[Curve],
    levels: Sequence[tuple[str, float]] = (),
    unit: str = "%",
    *,
    measured: str = "",
    along: str = "block",
    beside: Sequence[Curve] = (),
    floors: Sequence[tuple[str, float]] = (),
) -> Chart:
    """Lay curves out; the axes hold all values and intervals, those of `beside` too.

    And every floor, a name and a value below which a curve shows nothing. Levels, which are alike,
    stay away where they would widen the axes. Plain numbers, without a unit, that are positive and
    span more than a factor of 100 lie on powers of ten.
    """
    spots = [spot for curve in (*curves, *beside) for spot in curve.spots]
    places = sorted({spot.x for spot in spots}) or [0]
    values = [v for spot in spots for v in (spot.value, spot.low, spot.high) if v is not None]
    heights = [v for v in (*values, *(value for _, value in floors)) if math.isfinite(v)]
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    is_log = not unit and 0 < 100 * low < high
    ticks = powers_of_ten(low, high) if is_log else nice_ticks(low, high)
    labels = [curve.label for curve in curves] if len(curves) <= MOST_LABELLED else []
    right = WIDTH - _RIGHT - round(_LETTER * max(map(len, labels), default=0))
    step = (right - _LEFT - 20) / ((places[-1] - places[0]) or 1)
    bottom = float(HEIGHT - _BOTTOM)

    def x(place: int | float) -> float:
        return round(_LEFT + 10 + step * (place - places[0]), 1)

    def y(value: float) -> float:
        if value == math.inf:
            return float(_TOP)
        least, value, most = (math.log10(v) if is_log else v for v in (ticks[0], value, ticks[-1]))
        share = (value - least) / (most - least)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def drawn(curve: Curve, label: Tick | None) -> DrawnCurve:
        runs: list[list[Spot]] = [[]]
        for spot in curve.spots:
            if not math.isnan(spot.value):
                runs[-1].append(spot)
            elif runs[-1]:
                runs.append([])
        return DrawnCurve(
            name=curve.name,
            style=curve.style,
            number=curve.number,
            line="".join(_path([(x(s.x), y(s.value)) for s in run]) for run in runs if run),
            band="".join(map(band, runs)),
            marks=[
                Mark(x(s.x), y(s.value), s.hint, s.doubtful, s.value == math.inf)
                for run in runs
                for s in run
            ],
            label=label,
        )

    def band(run: Sequence[Spot]) -> str:
        """Up the upper ends of the intervals and back along the lower ones."""
        sure = [(s.x, s.low, s.high) for s in run if s.low is not None and s.high is not None]
        sure = [one for one in sure if not math.isnan(one[1] + one[2])]
        upper = [(x(place), y(high)) for place, _, high in sure]
        lower = [(x(place), y(low)) for place, low, _ in reversed(sure)]
        return _path([*upper, *lower]) + "Z" if sure else ""

    ends = {
        number: y(known[-1])
        for number, curve in enumerate(curves)
        if (known := [s.value for s in curve.spots if not math.isnan(s.value)]) and curve.label
    }
    ends = ends if labels else {}
    beside_ends = spread(list(ends.values()), _LINE, float(_TOP), bottom)
    named = {n: Tick(at, curves[n].label) for n, at in zip(ends, beside_ends, strict=True)}
    lines = [Tick(y(value), name) for name, value in floors]
    # Baselines of text, below the lines where there is room above the ticks.
    beneath = [one.place + _LINE if one.place + _LINE < bottom else one.place - 4 for one in lines]
    of_texts = spread(beneath, _LINE, float(_TOP) + _LINE, bottom - 3)
    return Chart(
        x_ticks=_apart([Tick(x(place), f"{place:g}") for place in places]),
        y_ticks=[Tick(y(value), _tick_label(value)) for value in ticks],
        curves=[drawn(curve, named.get(number)) for number, curve in enumerate(curves)],
        levels=[Tick(y(v), name) for name, v in levels if ticks[0] <= v <= ticks[-1]],
        floors=lines,
        floor_texts=[Tick(at, one.label) for at, one in zip(of_texts, lines, strict=True)],
        zero=y(0.0) if ticks[0] < 0 < ticks[-1] else None,
        measured=measured or unit,
        along=along,
        right=right,
    )


def nice_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Round values from at or below `low` to at or above `high`, at most `most` of them.

    The steps are 1, 2 or 5 times a power of ten.
    """
    # Values that are equal but for rounding leave no step between them.
    if high - low <= 1e-6 * max(1.0, abs(high)):
        margin = max(0.5, 1e-3 * abs(high))
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < most:
            break
    return tuple(round(number * step, 10) for number in range(first, last + 1))


def powers_of_ten(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Powers of ten in even steps from at or below `low` to at or above `high`, at most `most`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = -(-(last - first) // (most - 1))
    return tuple(10.0 ** (first + step * i) for i in range(-(-(last - first) // step) + 1))


def _tick_label(value: float) -> str:
    """Short enough for the room beside the axis, such as "2.5e5"."""
    text = f"{value:g}"
    if len(text) <= _LONGEST_TICK:
        return text
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _apart(ticks: Sequence[Tick], gap: int = _TICK_GAP) -> list[Tick]:
    """Those whose labels have room beside the one before."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick.place - kept[-1].place >= gap:
            kept.append(tick)
    return kept


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in corners)


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> tuple[float, ...]:
    """Heights that are at least `gap` apart, in the same order, as near as one pass finds.

    Args:
        heights: Where the labels belong, downwards.
        gap: Height of a label.
        low: Least height; too many labels go below `high`.
        high: Largest height.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    reach = low
    for i in order:
        placed[i] = reach = max(placed[i], reach)
        reach += gap
    # What went too far down pushes the others back up.
    reach = high
    for i in reversed(order):
        placed[i] = max(low, min(placed[i], reach))
        reach = placed[i] - gap
    return tuple(round(height, 1) for height in placed)


class RankRow(NamedTuple):
    """A question in the drawing, from `top` to `bottom`; `line` and `band` are SVG paths.

    Attributes:
        texts: Its name and what it is about with their heights, line by line.
    """

    name: str
    texts: Sequence[tuple[int, str]]
    style: str
    top: int
    bottom: int
    line: str
    band: str
    marks: Sequence[Mark]


class RankChart(NamedTuple):
    """A drawing, one row a question; `ticks` are places and names of blocks."""

    rows: Sequence[RankRow]
    ticks: Sequence[Tick]
    height: int
    width: int = RANKS_WIDTH
    left: int = _RANKS_LEFT
    right: int = RANKS_WIDTH - _RANKS_RIGHT

    @property
    def said(self) -> str:
        """The drawing in words."""
        bests = (
            (row.name, next(mark.hint for mark in row.marks if mark.is_best)) for row in self.rows
        )
        return "; ".join(f"{name} highest at {hint}" for name, hint in bests)


def places(known: Sequence[Spot]) -> list[tuple[float, float, float]]:
    """Where each block stands, from 0, the lowest, to 1; equal ones in the middle of their places.

    A block may stand above another where the intervals of the two overlap. They are taken for each
    block alone: of the same images, pairs of blocks may be known apart all the same.

    Returns:
        Of each block its place, and the lowest and the highest one that the intervals allow.
    """
    others = len(known) - 1
    # Where no interval is known its ends are the value.
    lows = [one.value if one.low is None else one.low for one in known]
    highs = [one.value if one.high is None else one.high for one in known]
    found = []
    for one, low, high in zip(known, lows, highs, strict=True):
        below = sum(other.value < one.value for other in known)
        equal = sum(other.value == one.value for other in known)
        lowest = sum(other < low for other in highs)
        highest = others - sum(other > high for other in lows)
        counts = (below + (equal - 1) / 2, lowest, highest)
        place, least, most = (count / others if others else 0.5 for count in counts)
        found.append((place, least, most))
    return found


def draw_ranks(questions: Sequence[Curve]) -> RankChart:
    """Lay questions out below each other, over the same blocks.

    Args:
        questions: With two values at least each; a label says what is measured, and on what.
    """
    layers = sorted({one.x for question in questions for one in question.spots})
    step = (RANKS_WIDTH - _RANKS_RIGHT - _RANKS_LEFT - 20) / ((layers[-1] - layers[0]) or 1)
    x = {layer: round(_RANKS_LEFT + 10 + step * (layer - layers[0]), 1) for layer in layers}
    rows, top = [], _RANKS_TOP

    def y(share: float) -> float:
        return round(top + _ROW * (1 - share), 1)

    for question in questions:
        lines = (question.name, *question.label.splitlines())
        texts = [text for words in lines for text in textwrap.wrap(words, _LETTERS)]
        known = [one for one in question.spots if not math.isnan(one.value)]
        found = places(known)
        xs = [x[one.x] for one in known]
        best = max((place for place, _, _ in found), default=0.0)
        upper = [(at, y(high)) for at, (_, _, high) in zip(xs, found, strict=True)]
        lower = [(at, y(low)) for at, (_, low, _) in zip(xs, found, strict=True)]
        rows.append(
            RankRow(
                name=question.name,
                texts=[(top + _RANKS_LINE * (n + 1), text) for n, text in enumerate(texts)],
                style=question.style,
                top=top,
                bottom=top + _ROW,
                line=_path([(at, y(place)) for at, (place, _, _) in zip(xs, found, strict=True)]),
                band=_path([*upper, *reversed(lower)]) + "Z",
                marks=[
                    Mark(at, y(place), one.hint, is_best=place == best)
                    for at, (place, _, _), one in zip(xs, found, known, strict=True)
                ],
            )
        )
        top += max(_ROW, _RANKS_LINE * len(texts)) + _ROW_GAP
    ticks = _apart([Tick(x[layer], f"{layer:g}") for layer in layers], _RANKS_TICK_GAP)
    return RankChart(rows, ticks, top + _RANKS_BOTTOM - _ROW_GAP)
