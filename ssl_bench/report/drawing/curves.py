"""Curves over blocks or epochs as lengths in a drawing; a template turns them into SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from ssl_bench.report.drawing.labels import spread

WIDTH, HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 34
_LONGEST_LABEL = 5
_LABEL_GAP = 27
MOST_LABELLED = 8
"""With more curves than that their names at the right edge would cover each other."""

# Of a letter of a name at the right edge, and of its line.
_LETTER, _LINE = 5.9, 11.0


@dataclass(frozen=True)
class Spot:
    """One value of a curve; NaN breaks the line, infinity lies at the upper edge.

    Attributes:
        x: Block, or epoch.
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
    spots: tuple[Spot, ...]
    label: str = ""


@dataclass(frozen=True)
class Reference:
    """A value without a place along the axis, drawn as a dash at the right edge."""

    name: str
    value: float


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis."""

    place: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A spot in the drawing."""

    x: float
    y: float
    hint: str
    doubtful: bool
    is_infinite: bool


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in the drawing; `line` and `band` are SVG paths.

    Attributes:
        label: Its text and height at the right edge, if it has one.
    """

    name: str
    style: str
    number: int
    line: str
    band: str
    marks: tuple[Mark, ...]
    label: Tick | None


@dataclass(frozen=True)
class Chart:
    """A drawing of `WIDTH` x `HEIGHT`.

    Attributes:
        along: What the curves run over.
        measured: What the heights are, with their unit.
        zero: Height of the line at zero where values of both signs are shown, else None.
        levels: Values of references and what they stand for.
        floors: The same of answers that look at no image, drawn from side to side.
        floor_texts: Their labels, which neither touch each other nor leave the axes.
    """

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[DrawnCurve, ...]
    levels: tuple[Tick, ...]
    floors: tuple[Tick, ...]
    floor_texts: tuple[Tick, ...]
    zero: float | None
    measured: str
    along: str
    right: int
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Frame:
    """Where curves lie in a drawing, their values by the logarithm if `is_log`."""

    first: int | float
    last: int | float
    low: float
    high: float
    right: int
    is_log: bool = False

    def x(self, value: int | float) -> float:
        step = (self.right - _LEFT - 20) / ((self.last - self.first) or 1)
        return round(_LEFT + 10 + step * (value - self.first), 1)

    def y(self, value: float) -> float:
        if value == math.inf:
            return float(_TOP)
        low, value, high = (
            math.log10(v) if self.is_log else v for v in (self.low, value, self.high)
        )
        share = (value - low) / (high - low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)


def draw(
    curves: Sequence[Curve],
    references: Sequence[Reference] = (),
    unit: str = "%",
    *,
    measured: str = "",
    along: str = "block",
    beside: Sequence[Curve] = (),
    floors: Sequence[Reference] = (),
) -> Chart:
    """Lay curves out over blocks or epochs; the axes hold every value and interval of `beside` too.

    And every floor, below which a curve shows nothing.

    References stay away where they would widen the axes. Plain numbers, without a unit, that are
    positive and span more than a factor of 100 lie on powers of ten.
    """
    spots = [spot for curve in (*curves, *beside) for spot in curve.spots]
    places = sorted({spot.x for spot in spots}) or [0]
    heights = _finite([v for s in spots for v in (s.value, s.low, s.high)])
    heights += _finite([floor.value for floor in floors])
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    is_log = not unit and 0 < 100 * low < high
    ticks = powers_of_ten(low, high) if is_log else nice_ticks(low, high)
    labels = [curve.label for curve in curves] if len(curves) <= MOST_LABELLED else []
    right = WIDTH - _RIGHT - round(_LETTER * max(map(len, labels), default=0))
    frame = Frame(places[0], places[-1], ticks[0], ticks[-1], right, is_log)
    lines = [Tick(frame.y(floor.value), floor.name) for floor in floors]
    # Baselines of text, below the lines where there is room above the ticks.
    low_end = float(HEIGHT - _BOTTOM)
    beneath = [one.place + _LINE if one.place + _LINE < low_end else one.place - 4 for one in lines]
    heights_of_text = spread(beneath, _LINE, float(_TOP) + _LINE, low_end - 3)
    return Chart(
        x_ticks=_apart([Tick(frame.x(place), f"{place:g}") for place in places]),
        y_ticks=tuple(Tick(frame.y(value), _label(value)) for value in ticks),
        curves=tuple(map(_drawn, curves, repeat(frame), _labels(curves, frame))),
        levels=tuple(
            Tick(frame.y(level.value), level.name)
            for level in references
            if frame.low <= level.value <= frame.high
        ),
        floors=tuple(lines),
        floor_texts=tuple(
            Tick(place, one.label) for place, one in zip(heights_of_text, lines, strict=True)
        ),
        zero=frame.y(0.0) if frame.low < 0 < frame.high else None,
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


def _labels(curves: Sequence[Curve], frame: Frame) -> list[Tick | None]:
    """Names beside the last value of each curve; none of many curves, or without a value."""
    ends = {
        number: frame.y(values[-1])
        for number, curve in enumerate(curves)
        if (values := [s.value for s in curve.spots if not math.isnan(s.value)]) and curve.label
    }
    if len(curves) > MOST_LABELLED:
        return [None] * len(curves)
    heights = spread(list(ends.values()), _LINE, float(_TOP), float(HEIGHT - _BOTTOM))
    labels = {n: Tick(height, curves[n].label) for n, height in zip(ends, heights, strict=True)}
    return [labels.get(number) for number in range(len(curves))]


def _drawn(curve: Curve, frame: Frame, label: Tick | None) -> DrawnCurve:
    runs: list[list[Spot]] = [[]]
    for spot in curve.spots:
        if not math.isnan(spot.value):
            runs[-1].append(spot)
        elif runs[-1]:
            runs.append([])
    runs = [run for run in runs if run]
    return DrawnCurve(
        name=curve.name,
        style=curve.style,
        number=curve.number,
        line="".join(_path([(frame.x(s.x), frame.y(s.value)) for s in run]) for run in runs),
        band="".join(_band(run, frame) for run in runs),
        marks=tuple(
            Mark(frame.x(s.x), frame.y(s.value), s.hint, s.doubtful, s.value == math.inf)
            for run in runs
            for s in run
        ),
        label=label,
    )


def _band(run: Sequence[Spot], frame: Frame) -> str:
    """Up the upper ends of the intervals and back along the lower ones."""
    sure = [(s.x, s.low, s.high) for s in run if s.low is not None and s.high is not None]
    sure = [(x, low, high) for x, low, high in sure if not math.isnan(low + high)]
    if not sure:
        return ""
    upper = [(frame.x(x), frame.y(high)) for x, _, high in sure]
    lower = [(frame.x(x), frame.y(low)) for x, low, _ in reversed(sure)]
    return _path([*upper, *lower]) + "Z"


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)


def _label(value: float) -> str:
    """Short enough for the room beside the axis, such as "2.5e5"."""
    text = f"{value:g}"
    if len(text) <= _LONGEST_LABEL:
        return text
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _apart(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """Those whose labels have room beside the one before."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick.place - kept[-1].place >= _LABEL_GAP:
            kept.append(tick)
    return tuple(kept)
