"""How high each block stands among the others, question by question, as lengths in a drawing."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 380
_LEFT, _RIGHT, _ROW, _GAP, _TOP, _BOTTOM = 142, 12, 34, 10, 6, 34
_TICK_GAP = 20
# Letters beside a row, and the height of a line of them.
_LETTERS, _LINE = 21, 13


@dataclass(frozen=True)
class Known:
    """The score of one block; `low` and `high` are its value where no interval is known."""

    layer: int
    value: int | float
    low: int | float
    high: int | float
    hint: str


@dataclass(frozen=True)
class Place:
    """Where a block stands among those of its encoder, from 0, the lowest, to 1, the highest.

    Attributes:
        low: Its lowest and its highest place that the intervals allow.
    """

    share: float
    low: int | float
    high: int | float


@dataclass(frozen=True)
class Question:
    """One question and what its answers over the blocks are; two of them at least.

    Attributes:
        about: What is measured, and on what, a line each or more.
        style: Classes of the style sheet.
    """

    name: str
    about: tuple[str, ...]
    style: str
    known: tuple[Known, ...]


@dataclass(frozen=True)
class RankMark:
    """A block in the drawing."""

    x: float
    y: float
    hint: str
    is_best: bool


@dataclass(frozen=True)
class RankRow:
    """A question in the drawing; `line` and `band` are SVG paths.

    Attributes:
        texts: Its name and what it is about with their heights, line by line.
        top: Of its part of the drawing, which ends at `bottom`.
    """

    name: str
    texts: tuple[tuple[int, str], ...]
    style: str
    top: int
    bottom: int
    line: str
    band: str
    marks: tuple[RankMark, ...]


@dataclass(frozen=True)
class RankChart:
    """A drawing, one row a question; `ticks` are places and names of blocks."""

    rows: tuple[RankRow, ...]
    ticks: tuple[tuple[float, int], ...]
    height: int
    width: int = WIDTH
    left: int = _LEFT
    right: int = WIDTH - _RIGHT

    @property
    def said(self) -> str:
        """The drawing in words."""
        bests = (
            (row.name, [mark.hint for mark in row.marks if mark.is_best][:1]) for row in self.rows
        )
        return "; ".join(f"{name} highest at {hint}" for name, (hint,) in bests)


def places(known: Sequence[Known]) -> tuple[Place, ...]:
    """Where each block stands, equal ones in the middle of their places.

    A block may stand above another where the intervals of the two overlap. They are taken for each
    block alone: of the same images, pairs of blocks may be known apart all the same.
    """
    others = len(known) - 1

    def share(count: int | float) -> float:
        return count / others if others else 0.5

    return tuple(
        Place(
            share(_below(one.value, known) + (_equal(one.value, known) - 1) / 2),
            share(sum(other.high < one.low for other in known)),
            share(others - sum(other.low > one.high for other in known)),
        )
        for one in known
    )


def draw_ranks(questions: Sequence[Question]) -> RankChart:
    """Lay the questions out below each other, over the same blocks."""
    layers = sorted({one.layer for question in questions for one in question.known})
    step = (WIDTH - _RIGHT - _LEFT - 20) / ((layers[-1] - layers[0]) or 1)
    x = {layer: round(_LEFT + 10 + step * (layer - layers[0]), 1) for layer in layers}
    lines = [
        [part for words in (one.name, *one.about) for part in textwrap.wrap(words, _LETTERS)]
        for one in questions
    ]
    heights = [max(_ROW, _LINE * len(texts)) + _GAP for texts in lines]
    tops = [_TOP + sum(heights[:number]) for number in range(len(questions))]
    ticks = [(x[layers[0]], layers[0])]
    for layer in layers[1:]:
        if x[layer] - ticks[-1][0] >= _TICK_GAP:
            ticks.append((x[layer], layer))
    return RankChart(
        tuple(_row(*row, x) for row in zip(questions, lines, tops, strict=True)),
        tuple(ticks),
        _TOP + sum(heights) + _BOTTOM - _GAP,
    )


def _row(question: Question, texts: Sequence[str], top: int, x: dict[int, float]) -> RankRow:
    known = [one for one in question.known if not math.isnan(one.value)]
    found = places(known)

    def y(share: float) -> float:
        return round(top + _ROW * (1 - share), 1)

    xs = [x[one.layer] for one in known]
    best = max((place.share for place in found), default=0.0)
    upper = [(at, y(place.high)) for at, place in zip(xs, found, strict=True)]
    lower = [(at, y(place.low)) for at, place in zip(xs, found, strict=True)]
    return RankRow(
        name=question.name,
        texts=tuple((top + _LINE * (number + 1), text) for number, text in enumerate(texts)),
        style=question.style,
        top=top,
        bottom=top + _ROW,
        line=_path([(at, y(place.share)) for at, place in zip(xs, found, strict=True)]),
        band=_path([*upper, *reversed(lower)]) + "Z",
        marks=tuple(
            RankMark(at, y(place.share), one.hint, place.share == best)
            for at, place, one in zip(xs, found, known, strict=True)
        ),
    )


def _below(value: int | float, known: Sequence[Known]) -> int:
    return sum(other.value < value for other in known)


def _equal(value: int | float, known: Sequence[Known]) -> int:
    return sum(other.value == value for other in known)


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in corners)
