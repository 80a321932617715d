"""Curves over blocks as lengths in a drawing; a template turns them into SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 10, 10, 34


@dataclass(frozen=True)
class Spot:
    """One value of a curve; NaN breaks the line.

    Attributes:
        hint: Shown when it is pointed at.
        doubtful: Drawn as a cross.
    """

    layer: int
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
        number: Of the checkpoint, so that readers can hide it.
    """

    name: str
    style: str
    number: int
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Reference:
    """A value without a block, drawn as a dash at the right edge."""

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


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in the drawing; `line` and `band` are SVG paths."""

    name: str
    style: str
    number: int
    line: str
    band: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Chart:
    """A drawing of `WIDTH` x `HEIGHT`.

    Attributes:
        zero: Height of the line at zero where values of both signs are shown, else None.
        levels: Values without a block and what they stand for.
    """

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[DrawnCurve, ...]
    levels: tuple[Tick, ...]
    zero: float | None
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Frame:
    """Where blocks and values lie in a drawing."""

    first_layer: int
    last_layer: int
    low: float
    high: float

    def x(self, layer: int) -> float:
        step = (WIDTH - _LEFT - _RIGHT - 20) / max(1, self.last_layer - self.first_layer)
        return round(_LEFT + 10 + step * (layer - self.first_layer), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)


def draw(curves: Sequence[Curve], references: Sequence[Reference] = ()) -> Chart:
    """Lay curves out over their blocks; the axes hold every value and interval.

    References stay away where they would widen the axes.
    """
    spots = [spot for curve in curves for spot in curve.spots]
    layers = sorted({spot.layer for spot in spots}) or [0]
    heights = _finite([v for s in spots for v in (s.value, s.low, s.high)])
    ticks = nice_ticks(min(heights, default=0.0), max(heights, default=1.0))
    frame = Frame(layers[0], layers[-1], ticks[0], ticks[-1])
    return Chart(
        x_ticks=tuple(Tick(frame.x(layer), str(layer)) for layer in _thinned(layers)),
        y_ticks=tuple(Tick(frame.y(value), f"{value:g}") for value in ticks),
        curves=tuple(_drawn(curve, frame) for curve in curves),
        levels=tuple(
            Tick(frame.y(level.value), level.name)
            for level in references
            if frame.low <= level.value <= frame.high
        ),
        zero=frame.y(0.0) if frame.low < 0 < frame.high else None,
    )


def nice_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Round values from at or below `low` to at or above `high`, at most `most` of them.

    The steps are 1, 2 or 5 times a power of ten.
    """
    if not high > low:
        low, high = low - 0.5, high + 0.5
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < most:
            break
    return tuple(round(number * step, 10) for number in range(first, last + 1))


def _drawn(curve: Curve, frame: Frame) -> DrawnCurve:
    runs: list[list[Spot]] = [[]]
    for spot in curve.spots:
        if math.isfinite(spot.value):
            runs[-1].append(spot)
        elif runs[-1]:
            runs.append([])
    runs = [run for run in runs if run]
    return DrawnCurve(
        name=curve.name,
        style=curve.style,
        number=curve.number,
        line="".join(_path([(frame.x(s.layer), frame.y(s.value)) for s in run]) for run in runs),
        band="".join(_band(run, frame) for run in runs),
        marks=tuple(
            Mark(frame.x(s.layer), frame.y(s.value), s.hint, s.doubtful)
            for run in runs
            for s in run
        ),
    )


def _band(run: Sequence[Spot], frame: Frame) -> str:
    """Up the upper ends of the intervals and back along the lower ones."""
    sure = [(s.layer, s.low, s.high) for s in run if s.low is not None and s.high is not None]
    sure = [(layer, low, high) for layer, low, high in sure if math.isfinite(low + high)]
    if not sure:
        return ""
    upper = [(frame.x(layer), frame.y(high)) for layer, _, high in sure]
    lower = [(frame.x(layer), frame.y(low)) for layer, low, _ in reversed(sure)]
    return _path([*upper, *lower]) + "Z"


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _thinned(layers: Sequence[int]) -> Sequence[int]:
    return layers[:: -(-len(layers) // 13)] if layers else layers
