"""Sentences on the best block of each checkpoint, counted by hand from hits of single images."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.report.overview import summarize_checkpoints
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import Baseline, Record, ResultStore
from tests.support.report_cells import cell, plain, save, skipless


def hits(number: int, total: int = 20) -> np.ndarray:
    return np.arange(total) < number


def summarize(store: ResultStore, *records: Record) -> list[list[str]]:
    """Save records and return the sentences of each checkpoint."""
    for record in records:
        store.save(record)
    stored = store.records()
    checkpoints = list_checkpoints(stored)
    panels = group_into_panels(stored, checkpoints)
    return list(summarize_checkpoints(store, panels, checkpoints).values())


@pytest.fixture
def store(tmp_path) -> ResultStore:
    return ResultStore(tmp_path)


@pytest.mark.parametrize(
    ("counts", "best", "lower"),
    [
        ((0, 13, 20, 14), "highest at block 2 (100.0)", "All 3 other blocks are"),
        ((1, 17, 20, 18), "highest at block 2 (100.0)", "1 of the 3 other blocks is"),
        ((9, 10), "highest at block 1 (50.0)", "The other block is not"),
        ((0, 10), "highest at block 1 (50.0)", "The other block is"),
        ((10, 10, 9, 8), "highest at blocks 0 and 1 (50.0)", "None of the 2 other blocks is"),
        ((10, 10), "50.0 at all 2 blocks", ""),
        ((10,), "50.0 at block 0", ""),
    ],
)
def test_other_blocks_are_compared_with_the_best_on_the_same_images(store, counts, best, lower):
    for layer, number in enumerate(counts):
        save(store, cell(layer=layer), hits(number))

    ((text,),) = summarize(store)

    sentences = [f"tokencut, toy: On 20 images, corloc is {best}."]
    sentences += [f"{lower} significantly lower."] if lower else []
    assert text == " ".join(sentences)


def test_without_values_of_images_intervals_are_compared(store):
    ends = ((1.0, 2.0, 4.0), (3.0, 5.0, 6.5), (6.0, 7.0, 9.0))
    records = [cell(layer=n, value=v, ci95=(a, b)) for n, (a, v, b) in enumerate(ends)]

    ((text,),) = summarize(store, *records)

    assert text.endswith("at block 2 (7.0). 1 of the 2 other blocks is significantly lower.")


def test_a_block_that_is_higher_at_the_compared_seed_is_not_called_lower(store):
    # Block 1 is the best over both seeds, but at the lowest seed, which is compared, block 0 is.
    for seed, counts in enumerate(((16, 5), (1, 20))):
        for layer, number in enumerate(counts):
            save(store, cell(layer=layer, seed=seed), hits(number))

    ((text,),) = summarize(store)

    assert text.endswith("highest at block 1 (62.5). The other block is not significantly lower.")


def test_degenerate_blocks_are_excluded(store):
    shares = [(cell(layer=n, value=9.0 - n), s) for n, s in enumerate((50.0, 50.5))]
    records = [
        replace(record, details={"degenerate_percent": share})
        for record, share in [*shares, (skipless(), 50.5)]
    ]

    (some,), (none,) = summarize(store, *records)

    assert some.endswith("is 9.0 at block 0. Block 1 is degenerate and excluded.")
    assert none.endswith("No block is best because block 3 is degenerate.")


def test_unbeaten_baselines_and_ranges_of_plain_numbers_are_reported(store):
    details = Baseline("centre box", 55.0).as_details()
    numbers = [plain(layer=layer, value=value) for layer, value in enumerate((7.0, 3.0, 5.0))]

    ((low, plain_numbers),) = summarize(store, replace(cell(value=50.0), details=details), *numbers)

    assert low.endswith("This is not above centre box 55.0 (image-independent baseline).")
    assert "condition_number of key ranges from 3 (block 1) to 7 (block 0)." in plain_numbers


def test_every_protocol_has_a_sentence(store):
    for protocol, counts in {"reference": (5, 2, 1), "adaptive": (1, 2, 15)}.items():
        for layer, number in enumerate(counts):
            save(store, cell(layer=layer, protocol=protocol), hits(number))
    save(store, skipless(), hits(9))

    found = [[text.partition(":")[0] for text in texts] for texts in summarize(store)]

    reference, adaptive = (f"tokencut, protocol {name}, toy" for name in ("reference", "adaptive"))
    assert found == [[reference, adaptive], [reference]]


def write(root: Path, *records: Record) -> tuple[str, str]:
    """Return the overview and the page of the only checkpoint."""
    for record in records:
        ResultStore(root).save(record)
    assert main(["report", "--out", str(root)]) == 0
    (page,) = (root / "report").glob("checkpoint-*.html")
    return unescape((root / "report" / "index.html").read_text()), unescape(page.read_text())


def test_the_overview_has_three_sentences_and_the_page_has_all(tmp_path):
    details = {"left_out": {"all": {"count": 3, "first": ["a.jpg", "b.jpg"]}}}
    records = [replace(cell(dataset=name), details=details) for name in "abcde"]

    index, page = write(tmp_path, *records)

    assert [text[:11] for text in re.findall("<li>(tokencut.*?)</li>", index)] == [
        f"tokencut, {name}" for name in "abc"
    ]
    assert '#summary">2 more sentences</a>' in index
    assert len(re.findall("<li>tokencut.*?</li>", page)) == 5
    for text in (index, page):
        assert "3 images of a cannot be read and are left out: a.jpg, b.jpg and 1 more." in text
