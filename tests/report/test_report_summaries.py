"""Test the summary sentences in the HTML report."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from ssl_bench.report.overview import summarize_checkpoints
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import Baseline, Record, ResultStore
from tests.report.test_report import write_report
from tests.support.report_cells import build_record, plain, save, skipless


def hits(number: int) -> np.ndarray:
    return np.arange(20) < number


def summarize(store: ResultStore, *records: Record) -> list[list[str]]:
    for record in records:
        store.save(record)
    stored = store.records()
    checkpoints = list_checkpoints(stored)
    panels = group_into_panels(stored, checkpoints)
    return list(summarize_checkpoints(store, panels, checkpoints).values())


@pytest.fixture
def store(tmp_path) -> ResultStore:
    return ResultStore(tmp_path)


def extract_numbers(text: str) -> str:
    return " ".join(re.findall(r"\d+(?:\.\d+)?", text))


# The expected numbers are the best blocks, their score and a count of the other blocks.
@pytest.mark.parametrize(
    ("counts", "expected", "is_significant"),
    [
        ((0, 13, 20, 14), "2 100.0 3", True),
        ((1, 17, 20, 18), "2 100.0 1 3", True),
        ((9, 10), "1 50.0", False),
        ((0, 10), "1 50.0", True),
        ((10, 10, 9, 8), "0 1 50.0", False),
        ((20, 20, 0, 1), "0 1 100.0 2", True),
        ((10, 10), "50.0 2", None),
        ((10,), "50.0 0", None),
    ],
)
def test_blocks_are_compared_with_the_best_on_equal_images(store, counts, expected, is_significant):
    for layer, number in enumerate(counts):
        save(store, build_record(layer=layer), hits(number))

    ((text,),) = summarize(store)

    assert extract_numbers(text) == expected
    assert ("significantly" in text) == (is_significant is not None)
    assert ("not significantly" in text) == (is_significant is False)


def test_intervals_are_compared_if_there_are_no_per_image_values(store):
    ends = ((1.0, 2.0, 4.0), (3.0, 5.0, 6.5), (6.0, 7.0, 9.0))
    records = [build_record(layer=n, value=v, ci95=(a, b)) for n, (a, v, b) in enumerate(ends)]
    lowest = build_record(layer=3, value=0.5, ci95=(0.0, 1.0))
    records.append(replace(lowest, details={"degenerate_percent": 60.0}))

    ((text,),) = summarize(store, *records)

    # Block 3 is degenerate, so it is not counted.
    assert extract_numbers(text) == "2 7.0 1 2 3"
    # Blocks are not counted if the interval of one of them is unknown.
    ((text,),) = summarize(store, replace(records[1], ci95=None))
    assert extract_numbers(text) == "2 7.0 3"


def test_better_blocks_for_the_compared_seed_are_not_called_lower(store):
    # Block 1 has the best mean over both seeds. Only seed 0 is compared, where block 0 is better.
    for seed, counts in enumerate(((16, 5), (1, 20))):
        for layer, number in enumerate(counts):
            save(store, build_record(layer=layer, seed=seed), hits(number))

    ((text,),) = summarize(store)

    assert extract_numbers(text) == "1 62.5"
    assert "not significantly" in text


def test_degenerate_blocks_are_excluded(store):
    records = [
        replace(record, details={"degenerate_percent": percent})
        for record, percent in (
            (build_record(layer=0, value=9.0), 50.0),
            (build_record(layer=1, value=8.0), 50.5),
            (skipless(), 50.5),
        )
    ]

    (first,), (second,) = summarize(store, *records)

    assert extract_numbers(first) == "9.0 0 1"
    assert extract_numbers(second) == "3"
    assert all("degenerate" in text for text in (first, second))


def test_unbeaten_baselines_and_ranges_of_unitless_values_are_reported(store):
    details = Baseline("centre box", 55.0).as_details()
    unitless = [plain(layer=layer, value=value) for layer, value in enumerate((7.0, 3.0, 5.0))]

    ((low, spread),) = summarize(
        store, replace(build_record(value=50.0), details=details), *unitless
    )

    assert "not significantly above centre box 55.0" in low
    assert extract_numbers(spread) == "3 1 7 0"
    ((_, equal),) = summarize(store, *(replace(record, value=3.0) for record in unitless))
    assert extract_numbers(equal) == "3 0 2"


def test_every_protocol_has_a_sentence(store):
    for protocol, counts in {"reference": (5, 2, 1), "adaptive": (1, 2, 15)}.items():
        for layer, number in enumerate(counts):
            save(store, build_record(layer=layer, protocol=protocol), hits(number))
    save(store, skipless(), hits(9))
    # The only protocol of a task is not named.
    save(store, build_record(task="knn", metric="top1_k20"), hits(9))

    protocols = [re.findall(r"protocol (\w+)", " ".join(texts)) for texts in summarize(store)]

    assert protocols == [["reference", "adaptive"], ["reference"]]


def test_the_overview_has_three_sentences_and_the_page_has_all(tmp_path):
    details = {"left_out": {"all": {"count": 3, "first": ["a.jpg", "b.jpg"]}}}
    records = [replace(build_record(dataset=name), details=details) for name in "abcde"]
    records.append(replace(records[0], facet="token"))

    report = write_report(tmp_path, *records)

    (own,) = report.glob("checkpoint-*.html")
    index, page = (unescape(path.read_text()) for path in (report / "index.html", own))

    assert re.findall("<li>TokenCut on (.) .*?</li>", index) == ["a", "b", "c"]
    assert '#summary">2 more sentences</a>' in index
    assert len(re.findall("<li>TokenCut.*?</li>", page)) == 5
    for text in (index, page):
        left_out = "3 images of a cannot be read and are left out: a.jpg, b.jpg and 1 more."
        assert text.count(left_out) == 1


def test_the_first_sentences_are_about_different_tasks(store):
    for dataset in "ab":
        save(store, build_record(dataset=dataset), hits(9))
    save(store, build_record(task="knn", metric="top1_k20", dataset="c"), hits(9))

    (texts,) = summarize(store)

    assert [re.findall(r" on (.) ", text) for text in texts] == [["a"], ["c"], ["b"]]
