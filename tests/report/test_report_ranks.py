"""One encoder, all questions: the places of its blocks, and where they are drawn."""

import math
import random

import pytest

from ssl_bench.report.checkpoints import checkpoints_of
from ssl_bench.report.drawing.ranks import Known, Question, draw_ranks, places
from ssl_bench.report.model import panels_of
from ssl_bench.report.overview.profiles import profiles_of
from tests.report.test_report_overview import written
from tests.support.report_cells import Elements, cell, skipless


def known(*values: float | tuple[float, float, float]) -> list[Known]:
    triples = [(v, v, v) if isinstance(v, (int, float)) else v for v in values]
    return [Known(layer, v, low, high, f"{v}") for layer, (low, v, high) in enumerate(triples)]


def test_places_go_from_the_lowest_to_the_highest_and_equal_ones_share_theirs():
    assert [place.share for place in places(known(10, 40, 20, 30, 50))] == [0, 0.75, 0.25, 0.5, 1]
    assert [place.share for place in places(known(5, 9, 9))] == [0, 0.75, 0.75]
    assert [place.share for place in places(known(7))] == [0.5]


def test_a_band_is_the_places_that_the_intervals_allow():
    # The first two overlap, the last is above both.
    found = places(known((1, 2, 4), (3, 5, 6), (7, 8, 9)))
    assert [(place.low, place.high) for place in found] == [(0, 0.5), (0, 0.5), (1, 1)]
    # An interval that ends where another begins does not set them apart.
    assert [(p.low, p.high) for p in places(known((1, 2, 3), (3, 4, 5)))] == [(0, 1), (0, 1)]


def test_places_know_nothing_of_the_scale():
    values = [random.Random(0).gauss(0, 1) for _ in range(12)]
    ends = [(v - 0.2, v, v + 0.2) for v in values]
    cubed = [(low**3, v**3, high**3) for low, v, high in ends]
    assert places(known(*ends)) == places(known(*cubed))


def test_rows_lie_below_each_other_over_the_same_blocks():
    first, second = known(1, 3, 2), known(3, 2, math.nan)
    chart = draw_ranks(
        [Question("a", "", "c0", tuple(first)), Question("b", "", "c0", tuple(second))]
    )
    one, other = chart.rows
    assert one.bottom < other.top < other.bottom < chart.height
    assert [mark.x for mark in one.marks][:2] == [mark.x for mark in other.marks]
    assert [(mark.y, mark.is_best) for mark in one.marks] == [
        (one.bottom, False), (one.top, True), ((one.top + one.bottom) / 2, False),
    ]  # fmt: skip
    assert chart.said == "a highest at 3; b highest at 3"


def test_a_profile_has_a_row_a_headline_and_says_where_more_is_not_better():
    values = {0: 20.0, 1: 30.0}
    records = [
        *(cell(layer=layer, value=v) for layer, v in values.items()),
        *(cell(layer=layer, value=v, task="segmentation", metric=metric)
          for layer, v in values.items() for metric in ("miou_holdout", "miou_oracle")),
        *(cell(layer=layer, value=v, task="conditioning", metric="condition_number", unit="")
          for layer, v in values.items()),
        skipless(layer=1),
    ]  # fmt: skip
    checkpoints = checkpoints_of(records)

    (profile,) = profiles_of(panels_of(records, checkpoints), checkpoints)

    assert [row.name for row in profile.chart.rows] == ["segmentation", "tokencut", "conditioning"]
    assert [row.style for row in profile.chart.rows] == [*2 * [profile.checkpoint.style], "c7 d0"]
    assert profile.has_unranked


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (((1, 2, 4), (3, 5, 6), (7, 8, 9)), "block 2 highest, 1 of 3 may be it"),
        (((1, 2, 4), (3, 5, 8), (7, 8, 9)), "block 2 highest, 2 of 3 may be it"),
        ((3, 5, 5), "blocks 1, 2 highest"),
        ((4, 4), "all 2 blocks are alike"),
    ],
)
def test_a_row_says_which_block_is_highest_and_how_many_may_be(values, said):
    chart = draw_ranks([Question("a", "", "c0", tuple(known(*values)))])
    assert chart.rows[0].verdict == said


@pytest.mark.parametrize(("page", "count"), [("index.html", 2), ("checkpoint-*.html", 1)])
def test_the_picture_leads_the_pages(tmp_path, page, count):
    records = [
        make(layer=layer, value=20.0 + layer) for make in (cell, skipless) for layer in (0, 1)
    ]

    text = written(tmp_path, *records, page=page)

    drawings = [given for name, given in Elements(text).elements if name == "svg"]
    labels = [
        given.get("aria-label") or "" for given in drawings if "ranks" in (given.get("class") or "")
    ]
    assert len(labels) == count
    assert all("tokencut highest at block 1: 21.0" in label for label in labels)
    sections = (given.get("id") for name, given in Elements(text).elements if name == "section")
    assert next(sections) == "blocks"
