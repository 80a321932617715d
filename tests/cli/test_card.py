"""Test cards: the score, time and memory of each evaluation of an encoder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.card import build_cards
from ssl_bench.tables.sheets import render_tables
from tests.core.test_results import RECORD
from tests.support.faults import class_folders, encoder_file

GIB = 2**30


@pytest.fixture
def card(workdir, capsys) -> Callable[..., Any]:
    encoder_file(Path("tiny.safetensors"))
    class_folders(Path("photos"))
    data = ["--dataset", "class_folders", "--data-root", "photos"]

    def run(*words: str) -> Any:
        assert main(["card", "--checkpoint", "tiny.safetensors", *data, *words]) == 0
        return capsys.readouterr()

    return run


def test_a_card_has_the_score_and_the_cost_of_every_evaluation(card, capsys):
    (shown,) = json.loads(card("--format", "json").out)
    again = card("--format", "json")
    by_task: dict[str, list] = {}
    for record in ResultStore(Path("results")).records():
        by_task.setdefault(record.task, []).append(record)

    assert [json.loads(again.out)] == [[shown]]
    assert "already exist" in again.err
    assert {"knn", "classification", "pca"} <= by_task.keys()
    assert len(shown["evaluations"]) == len(by_task)
    for row in shown["evaluations"]:
        records = by_task[row["task"]]
        assert row["seconds"] == pytest.approx(max(r.seconds for r in records), abs=0.5)
        assert row["peak_memory"] == max(record.peak_memory for record in records)
        assert row["peak_memory"] > 20 * 2**20
    (knn,) = (row for row in shown["evaluations"] if row["task"] == "knn")
    assert knn["num_images_with_training"] == 12
    words = ["--task", "knn", "--metric", knn["metric"], "--facet", knn["facet"]]
    assert main(["table", "--pivot", "--format", "json", *words]) == 0
    (pivot,) = json.loads(capsys.readouterr().out)
    assert pivot["cells"][0]["value"] == knn["value"]


def test_a_dry_run_prints_the_evaluations_and_stops(card):
    plan = card("--dry-run").out

    assert "knn" in plan
    assert "pending" in plan
    assert "# knn on class_folders" in card("--print-config").out
    assert not Path("results").exists()


def test_an_evaluation_in_two_runs_has_one_row_and_the_time_of_both(card):
    card("--task", "classification", "--layer", "0")
    (mixed,) = json.loads(card("--format", "json").out)
    (stored,) = json.loads(card("--format", "json").out)
    records = ResultStore(Path("results")).records()

    # Settings of new records and of stored records may have another order.
    assert mixed == stored
    (row,) = (row for row in stored["evaluations"] if row["task"] == "classification")
    own = [record for record in records if record.task == "classification"]
    slowest = [max(r.seconds for r in own if r.layer == layer) for layer in (0, 1)]
    assert row["seconds"] == pytest.approx(sum(slowest), rel=0.2)


def test_a_probe_of_some_images_counts_only_these(card):
    (shown,) = json.loads(card("--task", "pca", "--pictures", "2", "--format", "json").out)

    assert [row["num_images_with_training"] for row in shown["evaluations"]] == [2]


def save(store, created: str = "2026-01-02T03:04:05+00:00", **changes: Any) -> Record:
    record = replace(RECORD, created=created, **changes)
    store.save(record, None)
    return record


def test_costs_are_sums_over_runs_and_maxima_over_blocks(tmp_path):
    store = ResultStore(tmp_path)
    cut = {"task": "tokencut", "metric": "corloc"}
    rank = {"task": "geometry", "metric": "rankme", "unit": "", "ci95": None, "facet": "cls"}
    records = [
        save(store, "2026-01-02T03:00:02+00:00", **cut, layer=0, seconds=2.0, peak_memory=GIB),
        save(store, "2026-01-02T03:01:30+00:00", **cut, layer=1, seconds=90.0, peak_memory=3 * GIB),
        # The second run starts one minute later, and the third run at the same time.
        save(store, "2026-01-02T03:02:40+00:00", **cut, layer=2, seconds=10.0, peak_memory=GIB),
        save(store, "2026-01-02T03:02:38+00:00", **cut, layer=3, seconds=8.0, peak_memory=GIB),
        save(store, **rank, layer=0, value=7.0, seconds=120.0, peak_memory=2 * GIB),
        save(store, **rank, layer=11, value=9.0, seconds=120.0, peak_memory=GIB),
        # Another seed was faster and needed more memory.
        save(store, **rank, layer=11, value=9.0, seconds=60.0, peak_memory=8 * GIB, seed=1),
    ]

    def read_rows() -> list[list[str]]:
        (card,) = build_cards(store, records)
        lines = render_tables([card], "markdown").splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return [row for row in rows if len(row) > 4 and not row[0].startswith("-")][1:]

    first, second, total = read_rows()
    # A higher effective rank is not better, so the last block is shown.
    assert first[3:] == ["", "9 @11 ‡", "60", "2 min", "0.5", "2 GiB"]
    assert second[5:] == ["60", "2 min", "0.6", "3 GiB"]
    assert total[6:] == ["4 min", "", "3 GiB"]
    records.append(save(store, task="pca", metric="explained_variance"))
    _, pca, _, total = read_rows()
    assert pca[8:] == total[8:] == [""]


def test_records_with_unknown_times_have_a_card(tmp_path):
    (card,) = build_cards(ResultStore(tmp_path), [replace(RECORD, created="yesterday")])

    assert card.evaluations[0].cost_texts() == ("60", "2 s", "40", "")
    assert card.csv_rows()[0]["peak_memory"] == ""
    assert card.csv_rows()[0]["value"] == 40.0
