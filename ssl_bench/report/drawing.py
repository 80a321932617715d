"""Layout of line charts: from values to coordinates that a template writes as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDTH, HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 34
_MAX_TICK_LETTERS = 5
_MIN_TICK_DISTANCE = 27
# Width of a letter and height of a line of text, in units of the drawing.
_LETTER_WIDTH, _LINE_HEIGHT = 5.9, 11.0

MAX_END_LABELS = 8
"""Curves that may have their names at the right edge. More names would overlap."""


class Point(NamedTuple):
    """One value of a curve.

    Attributes:
        x: Block, epoch or severity.
        value: NaN interrupts the line, infinity lies at the upper edge.
        low: Lower end of the 95 % interval, or None.
        high: Upper end of the 95 % interval, or None.
        tooltip: Text that appears when the pointer is on the point.
        is_degenerate: Whether the point is drawn as a cross.
    """

    x: int | float
    value: float
    low: float | None
    high: float | None
    tooltip: str
    is_degenerate: bool = False


@dataclass(frozen=True)
class Curve:
    """Values to draw as one line.

    Attributes:
        name: Name of the checkpoint or block.
        style: Classes in the style sheet.
        number: Number of the checkpoint or block. A page hides curves by this number.
        points: Values in the order of x.
        label: Text at the right end, or an empty string.
    """

    name: str
    style: str
    number: int
    points: Sequence[Point]
    label: str = ""


class Tick(NamedTuple):
    """A position along one axis and the text beside it."""

    position: float
    label: str


class Mark(NamedTuple):
    """A point in coordinates of the drawing."""

    x: float
    y: float
    tooltip: str
    is_degenerate: bool = False
    is_infinite: bool = False


class DrawnCurve(NamedTuple):
    """A curve in coordinates of the drawing.

    Attributes:
        name: Name of the checkpoint or block.
        style: Classes in the style sheet.
        number: Number of the checkpoint or block.
        line: SVG path through the points.
        band: SVG path around the 95 % intervals.
        marks: The points.
        label: Height and text of the label at the right end, or None.
    """

    name: str
    style: str
    number: int
    line: str
    band: str
    marks: Sequence[Mark]
    label: Tick | None


class Chart(NamedTuple):
    """A drawing, in which y grows downwards.

    Attributes:
        x_ticks: Labelled positions on the horizontal axis.
        y_ticks: Labelled positions on the vertical axis.
        curves: One per checkpoint or block.
        published: Heights of published values, drawn as dashes at the right edge.
        baselines: Heights of image-independent baselines, drawn as dotted lines.
        baseline_labels: Names of the baselines, at heights where they do not overlap.
        zero: Height of the value 0 if it lies between the ticks, else None.
        y_label: Metric and unit.
        x_label: Quantity on the horizontal axis.
        right: Right end of the axes.
    """

    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    curves: Sequence[DrawnCurve]
    published: Sequence[Tick]
    baselines: Sequence[Tick]
    baseline_labels: Sequence[Tick]
    zero: float | None
    y_label: str
    x_label: str
    right: int
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


def draw_chart(
    curves: Sequence[Curve],
    published: Sequence[tuple[str, float]] = (),
    unit: str = "%",
    *,
    y_label: str = "",
    x_label: str = "block",
    same_axes: Sequence[Curve] = (),
    baselines: Sequence[tuple[str, float]] = (),
) -> Chart:
    """Lay out curves on axes that hold all values, intervals and baselines.

    Positive values without a unit that span more than a factor of 100 get a logarithmic axis.

    Args:
        curves: Curves to draw.
        published: Names and values from papers. Values outside the axes are omitted.
        unit: "%", or an empty string for plain numbers.
        y_label: Label of the vertical axis. The default is the unit.
        x_label: Label of the horizontal axis.
        same_axes: Curves of other charts whose values the axes must hold too.
        baselines: Names and values of image-independent baselines.
    """
    points = [point for curve in (*curves, *same_axes) for point in curve.points]
    xs = sorted({point.x for point in points}) or [0]
    values = [v for point in points for v in (point.value, point.low, point.high) if v is not None]
    finite = [v for v in (*values, *(value for _, value in baselines)) if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    is_log = not unit and 0 < 100 * low < high
    ticks = choose_log_ticks(low, high) if is_log else choose_ticks(low, high)
    labels = [curve.label for curve in curves] if len(curves) <= MAX_END_LABELS else []
    right = WIDTH - _RIGHT - round(_LETTER_WIDTH * max(map(len, labels), default=0))
    step = (right - _LEFT - 20) / ((xs[-1] - xs[0]) or 1)
    bottom = float(HEIGHT - _BOTTOM)

    def to_x(position: int | float) -> float:
        return round(_LEFT + 10 + step * (position - xs[0]), 1)

    def to_y(value: float) -> float:
        if value == math.inf:
            return float(_TOP)
        first, value, last = (math.log10(v) if is_log else v for v in (ticks[0], value, ticks[-1]))
        share = (value - first) / (last - first)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def draw_curve(curve: Curve, label: Tick | None) -> DrawnCurve:
        # A missing value splits the line into several pieces.
        pieces: list[list[Point]] = [[]]
        for point in curve.points:
            if not math.isnan(point.value):
                pieces[-1].append(point)
            elif pieces[-1]:
                pieces.append([])
        return DrawnCurve(
            name=curve.name,
            style=curve.style,
            number=curve.number,
            line="".join(
                _make_path([(to_x(p.x), to_y(p.value)) for p in piece]) for piece in pieces if piece
            ),
            band="".join(map(draw_band, pieces)),
            marks=[
                Mark(to_x(p.x), to_y(p.value), p.tooltip, p.is_degenerate, p.value == math.inf)
                for piece in pieces
                for p in piece
            ],
            label=label,
        )

    def draw_band(piece: Sequence[Point]) -> str:
        """Return a path along the upper ends of the intervals and back along the lower ends."""
        ends = [(p.x, p.low, p.high) for p in piece if p.low is not None and p.high is not None]
        ends = [(x, lower, upper) for x, lower, upper in ends if not math.isnan(lower + upper)]
        there = [(to_x(x), to_y(upper)) for x, _, upper in ends]
        back = [(to_x(x), to_y(lower)) for x, lower, _ in reversed(ends)]
        return _make_path([*there, *back]) + "Z" if ends else ""

    last_heights = {
        number: to_y(known[-1])
        for number, curve in enumerate(curves)
        if labels
        and curve.label
        and (known := [p.value for p in curve.points if not math.isnan(p.value)])
    }
    label_heights = spread(list(last_heights.values()), _LINE_HEIGHT, float(_TOP), bottom)
    end_labels = {
        number: Tick(height, curves[number].label)
        for number, height in zip(last_heights, label_heights, strict=True)
    }
    baseline_ticks = [Tick(to_y(value), name) for name, value in baselines]
    # Names stand below their lines if there is room above the axis.
    wanted = [
        tick.position + _LINE_HEIGHT if tick.position + _LINE_HEIGHT < bottom else tick.position - 4
        for tick in baseline_ticks
    ]
    name_heights = spread(wanted, _LINE_HEIGHT, float(_TOP) + _LINE_HEIGHT, bottom - 3)
    return Chart(
        x_ticks=_omit_crowded([Tick(to_x(x), f"{x:g}") for x in xs]),
        y_ticks=[Tick(to_y(value), _format_tick(value)) for value in ticks],
        curves=[draw_curve(curve, end_labels.get(number)) for number, curve in enumerate(curves)],
        published=[
            Tick(to_y(value), name) for name, value in published if ticks[0] <= value <= ticks[-1]
        ],
        baselines=baseline_ticks,
        baseline_labels=[
            Tick(height, tick.label)
            for height, tick in zip(name_heights, baseline_ticks, strict=True)
        ],
        zero=to_y(0.0) if ticks[0] < 0 < ticks[-1] else None,
        y_label=y_label or unit,
        x_label=x_label,
        right=right,
    )


def choose_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Return at most `most` round values that enclose both ends.

    The steps are 1, 2 or 5 times a power of ten.
    """
    # Values that are equal except for rounding leave no step between them.
    if high - low <= 1e-6 * max(1.0, abs(high)):
        margin = max(0.5, 1e-3 * abs(high))
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < most:
            break
    return tuple(round(number * step, 10) for number in range(first, last + 1))


def choose_log_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Return at most `most` powers of ten in even steps that enclose both ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = -(-(last - first) // (most - 1))
    return tuple(10.0 ** (first + step * i) for i in range(-(-(last - first) // step) + 1))


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> tuple[float, ...]:
    """Move labels apart and keep their order.

    Args:
        heights: Wanted heights of the labels, downwards.
        gap: Least distance between two labels.
        low: Least height, where labels overlap if there is no room for all of them.
        high: Largest height.

    Returns:
        The new heights, in the order of `heights`.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    free = low
    for i in order:
        moved[i] = free = max(moved[i], free)
        free += gap
    # Push labels that went too far down back up.
    free = high
    for i in reversed(order):
        moved[i] = max(low, min(moved[i], free))
        free = moved[i] - gap
    return tuple(round(height, 1) for height in moved)


def _format_tick(value: float) -> str:
    """Return a text that fits beside the axis, such as "2.5e5"."""
    text = f"{value:g}"
    if len(text) <= _MAX_TICK_LETTERS:
        return text
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _omit_crowded(ticks: Sequence[Tick]) -> list[Tick]:
    """Return the ticks whose labels do not overlap with the label before."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick.position - kept[-1].position >= _MIN_TICK_DISTANCE:
            kept.append(tick)
    return kept


def _make_path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in corners)
