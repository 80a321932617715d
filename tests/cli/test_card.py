"""Test cards: the score, time and memory of each evaluation of an encoder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
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
        assert row["seconds"] == max(record.seconds for record in records)
        assert row["peak_memory"] == max(record.peak_memory for record in records)
        assert row["peak_memory"] > 20 * 2**20
        assert row["images_per_second"] == pytest.approx(row["images"] / row["seconds"])
    (knn,) = (row for row in shown["evaluations"] if row["task"] == "knn")
    assert knn["images"] == 12
    words = ["--task", "knn", "--metric", knn["metric"], "--facet", knn["facet"]]
    assert main(["table", "--pivot", "--format", "json", *words]) == 0
    (pivot,) = json.loads(capsys.readouterr().out)
    assert pivot["cells"][0]["value"] == knn["value"]


def test_a_dry_run_prints_the_evaluations_and_stops(card):
    plan = card("--dry-run").out

    assert "knn" in plan
    assert "pending" in plan
    assert not Path("results").exists()


def test_costs_are_those_of_the_score_that_was_finished_last(tmp_path):
    store = ResultStore(tmp_path)
    store.save_image_ids(RECORD.dataset_fingerprint, [f"{n}" for n in range(60)])
    cut = {"task": "tokencut", "metric": "corloc"}
    rank = {"task": "geometry", "metric": "rankme", "unit": "", "ci95": None, "facet": "cls"}
    records = [
        replace(RECORD, **cut, layer=0, seconds=2.0, peak_memory=1 * GIB),
        replace(RECORD, **cut, layer=1, seconds=90.0, peak_memory=3 * GIB),
        replace(RECORD, **rank, layer=0, value=7.0, seconds=120.0, peak_memory=2 * GIB),
        replace(RECORD, **rank, layer=11, value=9.0, seconds=60.0),
    ]

    (card,) = build_cards(store, records)
    lines = render_tables([card], "markdown").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in rows if len(row) > 4 and not row[0].startswith("-")]

    first, second, total = rows[1:]
    assert first[4:] == ["60", "2 min", "0.5", "2 GiB"]
    # A higher effective rank is not better, so the last block is shown.
    assert first[3] == "9 @11"
    assert second[4:] == ["60", "2 min", "0.667", "3 GiB"]
    assert total[5:] == ["4 min", "", "3 GiB"]
    assert any("rankme: no block was chosen" in line for line in lines)


def test_records_without_memory_or_image_ids_have_a_card(tmp_path):
    (card,) = build_cards(ResultStore(tmp_path), [RECORD])

    assert card.evaluations[0].cost_texts() == ("", "2 s", "", "")
    assert card.csv_rows()[0]["peak_memory"] == ""
    assert card.csv_rows()[0]["value"] == 40.0
