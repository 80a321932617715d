"""One encoder, all questions: the places of its blocks, and where they are drawn."""

import math
import re
from dataclasses import replace
from html import unescape

import numpy as np

from ssl_bench.cli.__main__ import main
from ssl_bench.report.drawing import Curve, Spot, draw_ranks, places
from ssl_bench.report.model import group_into_panels, list_checkpoints
from ssl_bench.report.overview import profiles_of
from ssl_bench.results import Baseline, ResultStore
from tests.report.test_report_overview import written
from tests.support.report_cells import Elements, cell, plain, save, skipless


def known(*values: float | tuple[float, float, float]) -> list[Spot]:
    triples = [(v, v, v) if isinstance(v, (int, float)) else v for v in values]
    return [
        Spot(layer, float(v), float(low), float(high), f"{v}")
        for layer, (low, v, high) in enumerate(triples)
    ]


def test_places_go_from_the_lowest_to_the_highest_and_equal_ones_share_theirs():
    assert [place for place, _, _ in places(known(10, 40, 20, 30, 50))] == [0, 0.75, 0.25, 0.5, 1]
    assert [place for place, _, _ in places(known(5, 9, 9))] == [0, 0.75, 0.75]
    assert [place for place, _, _ in places(known(7))] == [0.5]


def test_a_band_is_the_places_that_the_intervals_allow():
    # The first two overlap, the last is above both.
    found = places(known((1, 2, 4), (3, 5, 6), (7, 8, 9)))
    assert [ends for _, *ends in found] == [[0, 0.5], [0, 0.5], [1, 1]]
    # An interval that ends where another begins does not set them apart.
    assert [ends for _, *ends in places(known((1, 2, 3), (3, 4, 5)))] == [[0, 1], [0, 1]]


def test_rows_lie_below_each_other_over_the_same_blocks():
    first, second = known(1, 3, 2), known(3, 2, math.nan)
    chart = draw_ranks([Curve("a", "c0", 0, first), Curve("b", "c0", 0, second)])
    one, other = chart.rows
    assert one.bottom < other.top < other.bottom < chart.height
    assert [mark.x for mark in one.marks][:2] == [mark.x for mark in other.marks]
    assert [(mark.y, mark.is_best) for mark in one.marks] == [
        (one.bottom, False), (one.top, True), ((one.top + one.bottom) / 2, False),
    ]  # fmt: skip
    assert chart.said == "a highest at 3; b highest at 3"


def test_a_profile_has_a_row_a_headline_and_says_where_more_is_not_better(tmp_path):
    values = {0: 20.0, 1: 30.0}
    records = [
        *(cell(layer=layer, value=v) for layer, v in values.items()),
        *(cell(layer=layer, value=v, task="segmentation", metric=metric)
          for layer, v in values.items() for metric in ("miou_holdout", "miou_oracle")),
        *(cell(layer=layer, value=v, task="conditioning", metric="condition_number", unit="")
          for layer, v in values.items()),
        skipless(layer=1),
    ]  # fmt: skip
    checkpoints = list_checkpoints(records)

    panels, store = group_into_panels(records, checkpoints), ResultStore(tmp_path)
    profile, other = profiles_of(store, panels, checkpoints)

    assert other.chart is None
    assert profile.chart is not None
    assert [row.name for row in profile.chart.rows] == ["segmentation", "tokencut", "conditioning"]
    assert [row.style for row in profile.chart.rows] == [*2 * [profile.checkpoint.style], "c7 d0"]
    assert profile.has_unranked


def answers(root, *records) -> list[str]:
    """The sentences on the first page."""
    for record, per_image in records:
        if per_image is None:
            ResultStore(root).save(record)
        else:
            save(ResultStore(root), record, per_image)
    assert main(["report", "--out", str(root)]) == 0
    page = unescape((root / "report/index.html").read_text())
    lists = re.findall(r'<ul class="answers">(.*?)</ul>', page)
    return [said for found in lists for said in re.findall("<li>(.*?)</li>", found)]


SENTENCES = {
    (0, 13, 20, 14): "best at block 2, CorLoc 100.0; all others are lower on the same 20 images.",
    (1, 17, 20, 18): "best at block 2, CorLoc 100.0; two of the other three blocks cannot be told "
    "from it on 20 images.",
    (9, 10): "no block stands out; CorLoc is highest at block 1, 50.0, but not even the other one "
    "can be told from it on 20 images.",
    (10, 10, 9, 8): "no block stands out; CorLoc is highest at blocks 0 and 1, 50.0, but none of "
    "the other two can be told from them on 20 images.",
    (10, 10): "all two blocks are alike, CorLoc 50.0.",
    (10,): "CorLoc 50.0 at block 0, the only one with a value.",
}


def test_the_overview_answers_in_a_sentence_by_pairs_of_images(tmp_path):
    made = [
        (cell(layer=layer, dataset=f"d{number}"), np.arange(20) < count)
        for number, hits in enumerate(SENTENCES)
        for layer, count in enumerate(hits)
    ]

    found = answers(tmp_path, *made)

    assert found == [f"tokencut on d{n}: {said}" for n, said in enumerate(SENTENCES.values())]


def test_blocks_whose_cuts_rounding_decides_are_named(tmp_path):
    shares = {"degenerate_percent": 50.0}, {"degenerate_percent": 50.5}
    (said,) = answers(
        tmp_path,
        *(
            (replace(cell(layer=n, value=9.0 - n), details=one), None)
            for n, one in enumerate(shares)
        ),
    )
    assert said.endswith(
        "best at block 0, CorLoc 9.0; left out: block 1, where rounding, not the "
        "image, decides most answers (degenerate)."
    )


def test_without_values_of_images_intervals_and_ends_are_said(tmp_path):
    told = Baseline("centre box", 55.0).as_details()
    made = [(replace(cell(layer=0, value=50.0), details=told), None)]
    made += [(plain(layer=layer, value=v), None) for layer, v in enumerate((7.0, 3.0, 5.0))]
    ends = ((1.0, 2.0, 4.0), (3.0, 5.0, 6.5), (6.0, 7.0, 9.0))
    made += [
        (cell(layer=layer, value=v, ci95=(low, high), dataset="voc"), None)
        for layer, (low, v, high) in enumerate(ends)
    ]

    first, third, second = answers(tmp_path, *made)

    assert "block 2, CorLoc 7.0; one of the other two blocks cannot be told from it" in third
    assert first.endswith("the only one with a value; that is not above centre box 55.0.")
    assert second == (
        "conditioning on toy: condition number of key from 3 at block 1 to 7 at block 0 on 60 "
        "images, where more is not better."
    )


def test_what_could_not_be_read_is_named_where_the_answers_are(tmp_path):
    gone = {"left_out": {"all": {"count": 3, "first": ["a.jpg", "b.jpg"]}}}
    made = [(replace(plain(layer=layer), details=gone), None) for layer in (0, 1)]

    _, said = answers(tmp_path, *made)

    assert said == "left out of toy, as they cannot be read: a.jpg, b.jpg, ...."


def test_no_name_beside_a_drawing_is_cut_short(tmp_path):
    name = "a_folder_of_photographs_with_a_long_name-limit1000"
    made = [(cell(layer=layer, value=v, dataset=name), None) for layer, v in ((0, 1.0), (1, 2.0))]
    answers(tmp_path, *made)

    page = (tmp_path / "report/index.html").read_text()

    drawing = page[page.index('class="chart ranks"') :]
    drawing = drawing[: drawing.index("</svg>")]
    words = re.findall(r"<text[^>]*>(.*?)</text>", drawing)
    assert "…" not in drawing
    assert name in "".join(words)


def test_the_picture_leads_the_pages(tmp_path):
    written(tmp_path, *(make(layer=n, value=20.0 + n) for make in (cell, skipless) for n in (0, 1)))

    for name, count in (("index.html", 2), ("checkpoint-*.html", 1)):
        elements = Elements(next((tmp_path / "report").glob(name)).read_text()).elements
        charts = [given for tag, given in elements if tag == "svg"]
        labels = [one["aria-label"] or "" for one in charts if "ranks" in (one["class"] or "")]
        assert len(labels) == count
        assert all("tokencut highest at block 1: 21.0" in label for label in labels)
        assert next(given.get("id") for tag, given in elements if tag == "section") == "blocks"


def test_the_summary_names_every_protocol_that_was_run(tmp_path):
    order = np.arange(20)
    of = {"reference": (5, 2, 1), "adaptive": (1, 2, 15)}
    made = [
        (cell(layer=layer, protocol=protocol), order < right)
        for protocol, hits in of.items()
        for layer, right in enumerate(hits)
    ]
    # An encoder that has one of them.
    made += [(skipless(layer=layer, protocol="reference"), order < 9) for layer in (0, 1)]

    found = answers(tmp_path, *made)

    said = [re.match(r"tokencut, (\w+), on toy: (.*)", one) for one in found]
    assert [one and one[1] for one in said] == ["reference", "adaptive", "reference"]
    texts = [one[2] for one in said if one]
    assert "CorLoc is highest at block 0, 25.0" in texts[0]
    assert texts[1].startswith("best at block 2, CorLoc 75.0; all others are lower")
    page = (tmp_path / "report/index.html").read_text()
    (label, *_) = re.findall(r'aria-label="skip, the place of each block[^"]*"', page)
    assert label.count("highest at") == 2
