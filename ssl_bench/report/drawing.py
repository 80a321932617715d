"""Compute the coordinates of line charts, which HTML templates draw as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_RIGHT, _TOP, _BOTTOM = 10, 10, 34
_MAX_TICK_LETTERS = 5
# Width of a character and height of a line of text, in SVG units.
_LETTER_WIDTH, _LINE_HEIGHT = 5.9, 11.0
MAX_END_LABELS = 8
"""Largest number of curves with labels at the right edge. More labels would overlap."""


class Size(NamedTuple):
    """Size of a chart in SVG units.

    `left` is the width of the space for the labels of the vertical axis.
    """

    width: int
    height: int
    left: int


LARGE = Size(400, 240, 56)
SMALL = Size(222, 164, 32)
"""Size of a small chart, whose vertical axis has no label."""


class Point(NamedTuple):
    """One score of a curve.

    Attributes:
        x: Block index, step, epoch or severity.
        value: The score. NaN makes a gap in the line. Infinity is drawn at the upper edge.
        low: Lower end of the band at this x, which usually shows the 95 % interval. None without a
            band.
        high: Upper end of the band at this x. None without a band.
        tooltip: Text that is shown when the mouse pointer is on the point.
        is_degenerate: Whether more than half of the images have an arbitrary result. If so, the
            point is drawn as a cross.
    """

    x: int | float
    value: float
    low: float | None
    high: float | None
    tooltip: str
    is_degenerate: bool = False


@dataclass(frozen=True)
class Curve:
    """Scores that are drawn as one line.

    Attributes:
        name: Name of the checkpoint, block or run.
        style: CSS classes of the line, separated by spaces.
        number: Number of the checkpoint, block or run. The page uses it to hide the curve.
        points: Scores, sorted by x.
        label: Text at the right end of the line, or "".
        has_markers: Whether every point is drawn as a dot. Otherwise, only single points between
            two gaps are drawn as dots, because a line through one point is invisible.
    """

    name: str
    style: str
    number: int
    points: Sequence[Point]
    label: str = ""
    has_markers: bool = True


class Tick(NamedTuple):
    """A label on an axis, with its position in SVG units."""

    position: float
    label: str


class Marker(NamedTuple):
    """A point of a curve in SVG coordinates, which is drawn as a dot or a cross.

    Attributes:
        tooltip: Text that is shown when the mouse pointer is on the point.
        is_degenerate: Whether more than half of the images have an arbitrary result. If so, the
            point is drawn as a cross.
        is_infinite: Whether the score is infinite, so that the point is at the upper edge.
    """

    x: float
    y: float
    tooltip: str
    is_degenerate: bool = False
    is_infinite: bool = False


class DrawnCurve(NamedTuple):
    """A curve of a chart in SVG coordinates.

    Attributes:
        line: SVG path through the points.
        band: SVG path around the band, which usually shows the 95 % intervals.
        label: The y coordinate and text of the label at the right end, or None without a label.
    """

    name: str
    style: str
    number: int
    line: str
    band: str
    markers: Sequence[Marker]
    label: Tick | None


class Chart(NamedTuple):
    """A chart in SVG coordinates. The y coordinate grows downwards.

    Attributes:
        published: The y coordinates of published values, drawn as short dashes at the right edge.
        baselines: The y coordinates of image-independent baselines, drawn as dotted lines.
        baseline_labels: Names of the baselines, with y coordinates that avoid overlapping names.
        zero: The y coordinate of the value 0, or None if 0 is outside the axis.
        left: The x coordinate of the left end of the axes. `right`, `top` and `bottom` are the
            coordinates of the other ends.
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
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


def draw_chart(
    curves: Sequence[Curve],
    published: Sequence[tuple[str, float]] = (),
    unit: str = "%",
    *,
    y_label: str = "",
    x_label: str = "block",
    axis_curves: Sequence[Curve] = (),
    has_round_ticks: bool = False,
    baselines: Sequence[tuple[str, float]] = (),
    size: Size = LARGE,
) -> Chart:
    """Compute the layout of a line chart in SVG coordinates.

    The vertical axis covers all scores, intervals and baselines. This axis is logarithmic if `unit`
    is "", all values are positive, and the largest value is more than 100 times the smallest.

    Args:
        curves: The curves to draw.
        published: Names and values of published results. Values outside the vertical axis are not
            drawn.
        unit: Unit of the scores: "%", or "" for scores without a unit.
        y_label: Label of the vertical axis. The default is the unit.
        x_label: Label of the horizontal axis.
        axis_curves: Curves of other charts. The axes cover them too, so that all these charts have
            the same axes.
        has_round_ticks: Whether the ticks of the horizontal axis are round numbers from 0.
            Otherwise, they are the whole numbers among the x coordinates of all points.
        baselines: Names and values of image-independent baselines.
        size: Size of the chart.
    """
    points = [point for curve in (*curves, *axis_curves) for point in curve.points]
    xs = sorted({point.x for point in points}) or [0]
    # Only draw ticks at whole steps and epochs.
    x_values = choose_ticks(0, xs[-1]) if has_round_ticks else xs
    x_values = [x for x in x_values if x <= xs[-1] and x == int(x)]
    xs = sorted({*xs, *x_values})
    values = [v for point in points for v in (point.value, point.low, point.high) if v is not None]
    finite = [v for v in (*values, *(value for _, value in baselines)) if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    is_log = not unit and 0 < 100 * low < high
    ticks = choose_log_ticks(low, high) if is_log else choose_ticks(low, high)
    labels = [curve.label for curve in curves] if len(curves) <= MAX_END_LABELS else []
    left, bottom = size.left, size.height - _BOTTOM
    right = size.width - _RIGHT - round(_LETTER_WIDTH * max(map(len, labels), default=0))
    step = (right - left - 20) / ((xs[-1] - xs[0]) or 1)
    name_tick = _format_tick if has_round_ticks else "{:g}".format

    def to_x(position: int | float) -> float:
        return round(left + 10 + step * (position - xs[0]), 1)

    def to_y(value: float) -> float:
        if value == math.inf:
            return float(_TOP)
        first, value, last = (math.log10(v) if is_log else v for v in (ticks[0], value, ticks[-1]))
        share = (value - first) / (last - first)
        return round(bottom - share * (bottom - _TOP), 1)

    def draw_curve(curve: Curve, label: Tick | None) -> DrawnCurve:
        # Each NaN splits the line.
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
            markers=[
                Marker(to_x(p.x), to_y(p.value), p.tooltip, p.is_degenerate, p.value == math.inf)
                for piece in pieces
                for p in piece
                if curve.has_markers or len(piece) == 1
            ],
            label=label,
        )

    def draw_band(piece: Sequence[Point]) -> str:
        ends = [(p.x, p.low, p.high) for p in piece if p.low is not None and p.high is not None]
        ends = [(x, lower, upper) for x, lower, upper in ends if not math.isnan(lower + upper)]
        there = [(to_x(x), to_y(upper)) for x, _, upper in ends]
        back = [(to_x(x), to_y(lower)) for x, lower, _ in reversed(ends)]
        return _make_path([*there, *back]) + "Z" if ends else ""

    last_heights = {}
    for number, curve in enumerate(curves):
        known = [p.value for p in curve.points if not math.isnan(p.value)]
        if labels and curve.label and known:
            last_heights[number] = to_y(known[-1])
    label_heights = spread_labels(list(last_heights.values()), _LINE_HEIGHT, float(_TOP), bottom)
    end_labels = {
        number: Tick(height, curves[number].label)
        for number, height in zip(last_heights, label_heights, strict=True)
    }
    baseline_ticks = [Tick(to_y(value), name) for name, value in baselines]
    # Put the name of a baseline below its dotted line, or above the line if there is no room below.
    wanted = [
        tick.position + _LINE_HEIGHT if tick.position + _LINE_HEIGHT < bottom else tick.position - 4
        for tick in baseline_ticks
    ]
    name_heights = spread_labels(wanted, _LINE_HEIGHT, float(_TOP) + _LINE_HEIGHT, bottom - 3)
    return Chart(
        x_ticks=_omit_crowded([Tick(to_x(x), name_tick(x)) for x in x_values]),
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
        y_label="" if size == SMALL else y_label or unit,
        x_label=x_label,
        width=size.width,
        height=size.height,
        left=left,
        right=right,
        top=_TOP,
        bottom=bottom,
    )


def choose_ticks(low: float, high: float, max_count: int = 6) -> tuple[float, ...]:
    """Return at most `max_count` ticks of a linear axis that covers the range `low` to `high`.

    The distance between ticks is 1, 2 or 5 times a power of ten.
    """
    # If both ends are equal up to rounding errors, widen the range so that it is not empty.
    size = abs(high) if 0 < abs(high) < 0.01 else 1.0
    if high - low <= 1e-6 * max(size, abs(high)):
        margin = max(0.5 * size, 1e-3 * abs(high))
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10((high - low) / max_count))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < max_count:
            break
    return tuple(round(number * step, 10) for number in range(first, last + 1))


def choose_log_ticks(low: float, high: float, max_count: int = 6) -> tuple[float, ...]:
    """Return at most `max_count` ticks of a logarithmic axis that covers the range `low` to `high`.

    The ticks are powers of ten, and the ratio between neighbouring ticks is constant.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = -(-(last - first) // (max_count - 1))
    return tuple(10.0 ** (first + step * i) for i in range(-(-(last - first) // step) + 1))


def spread_labels(
    heights: Sequence[float], gap: float, low: float, high: float
) -> tuple[float, ...]:
    """Move labels apart so that they do not overlap, and return their y coordinates.

    If there is no room for all labels, some of them overlap at `low`.

    Args:
        heights: The y coordinates of the labels before the move. Labels keep their order.
        gap: Smallest distance between two labels.
        low: Smallest y coordinate.
        high: Largest y coordinate.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    free = low
    for i in order:
        moved[i] = free = max(moved[i], free)
        free += gap
    # Move labels that are now below the lower end `high` back up. The y coordinate grows downwards.
    free = high
    for i in reversed(order):
        moved[i] = max(low, min(moved[i], free))
        free = moved[i] - gap
    return tuple(round(height, 1) for height in moved)


def _format_tick(value: float) -> str:
    """Return the label of an axis tick as a short number, such as "2.5e5"."""
    text = f"{value:g}"
    if len(text) <= _MAX_TICK_LETTERS:
        return text
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _omit_crowded(ticks: Sequence[Tick]) -> list[Tick]:
    """Leave out each tick whose label would overlap the label of the tick before it."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick.position - kept[-1].position >= _LETTER_WIDTH * len(tick.label) + 4:
            kept.append(tick)
    return kept


def _make_path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in corners)
