"""Test tables of scores on corrupted images."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.depth import ScoreTable
from ssl_bench.tables.severities import severity_tables
from ssl_bench.tables.sheets import NO_VALUE
from tests.core.test_results import RECORD

CLEAN = replace(RECORD, task="knn", dataset="photos", metric="top1", ci95=None, details={})
OVER_SEVERITY = ("table", "--over-severity")


def corrupted(record: Record, name: str, severity: int, **changes: Any) -> Record:
    corruption = {"name": name, "severity": severity, "dataset": record.dataset}
    corruption["fingerprint"] = record.dataset_fingerprint
    return replace(
        record,
        dataset=f"{record.dataset}+{name}-{severity}",
        dataset_fingerprint=f"{severity}c" * 32,
        settings={**record.settings, "corrupted": corruption},
        **changes,
    )


def corrupted_blocks(*values: tuple[float, ...]) -> list[Record]:
    records = []
    for layer, (clean, *others) in enumerate(values):
        first = replace(CLEAN, layer=layer, value=clean)
        snow = [corrupted(first, "snow", n, value=value) for n, value in enumerate(others, 1)]
        records += [first, *snow]
    return records


def test_the_drop_is_the_lost_share_of_the_clean_score():
    (table,) = severity_tables(corrupted_blocks((80.0, 60.0, 20.0), (50.0, 50.0, 40.0)))

    # The means are 40 and 45, so half of 80 and a tenth of 50 are lost.
    assert [table.compute_drop(layer) for layer in (0, 1)] == pytest.approx([50.0, 10.0])
    printed = table.to_printed_table()
    assert printed.header == ("block", "clean", "1", "2", "drop (%)")
    assert [[cell.text for cell in row] for row in printed.rows] == [
        ["0", "80.0", "60.0", "20.0", "50.0"],
        ["1", "50.0", "50.0", "40.0", "10.0"],
    ]
    marked = [[cell.is_best for cell in row] for row in printed.rows]
    assert marked == [[False, True, True, False, False], [False, False, False, True, True]]


def test_blocks_are_ranked_over_the_severities_that_they_share(store, cli):
    # Block 0 loses half of its score over both severities, but only a tenth with severity 1.
    records = corrupted_blocks((80.0, 72.0, 8.0), (50.0, 40.0), (60.0,))
    for record in records:
        store.save(record)

    (table,) = severity_tables(records)

    assert (table.common_severities, table.most_robust_layers) == ((1,), {0})
    assert [table.compute_drop(layer) for layer in (0, 1)] == pytest.approx([10.0, 20.0])
    assert table.compute_drop(2) is None
    assert [[cell.text for cell in row][2:] for row in table.to_printed_table().rows] == [
        ["72.0", "8.0", "10.0"], ["40.0", "‡", "20.0"], ["‡", "‡", NO_VALUE],
    ]  # fmt: skip
    out = cli(*OVER_SEVERITY, "--format", "latex").out
    (note,) = (line for line in out.splitlines() if line.startswith(r"\par{"))
    assert "block 1, 2." in note
    assert "share: 1" in note
    assert cli(*OVER_SEVERITY, "--format", "csv").out.count(",1\n") == len(records)
    cli("report")
    page = (store.root / "report/severities.html").read_text()
    assert "Not probed at every severity: block 1, 2." in page
    assert "Smallest drop: block 0, 10.0 %" in page


def test_blocks_without_a_common_severity_have_no_drop():
    first, snow, second, _ = corrupted_blocks((80.0, 60.0), (50.0, 40.0))
    (table,) = severity_tables([first, snow, second, corrupted(second, "snow", 2, value=30.0)])

    assert table.common_severities == ()
    assert [table.compute_drop(layer) for layer in table.rows] == [None, None]
    assert table.to_printed_table().symbol_notes[0].endswith("share: none")


def test_every_corruption_and_encoder_has_a_table():
    first, snow = corrupted_blocks((80.0, 60.0))
    fog = corrupted(first, "fog", 3, value=20.0, torch="7.8")
    other = [
        replace(record, checkpoint_sha256="d" * 64, model="other", value=value, torch="7.9")
        for record, value in ((first, 60.0), (fog, 30.0))
    ]

    tables = severity_tables([first, snow, fog, *other])

    drops = [
        (table.title.split(", ")[-2:], table.columns, table.compute_drop(0)) for table in tables
    ]
    notes = {tuple(table.title.split(", ")[-2:]): " ".join(table.notes) for table in tables}
    assert [names for names, note in notes.items() if ", 7.8;" in note] == [("fog", "skip")]
    assert sorted(drops, key=str) == [
        (["fog", "other"], (0, 3), pytest.approx(50.0)),
        (["fog", "skip"], (0, 3), pytest.approx(75.0)),
        (["snow", "skip"], (0, 1), pytest.approx(25.0)),
    ]


@pytest.mark.parametrize(
    "change", [{"dataset_fingerprint": "d" * 64}, {"settings": {"tau": 0.3}}, {"facet": "query"}]
)
def test_clean_scores_on_other_data_or_settings_are_not_used(change):
    clean, snow = corrupted_blocks((80.0, 60.0))

    (table,) = severity_tables([replace(clean, **change), snow])

    assert table.columns == (1,)
    assert table.compute_drop(0) is None


def test_a_score_below_the_baseline_has_no_drop():
    baseline = {"baseline": {"answer": "most frequent class", "value": 50.0}}
    seed0 = [replace(r, details=baseline) for r in corrupted_blocks((80.0, 60.0), (50.0, 10.0))]
    seed1 = [replace(record, seed=1, value=0.9 * record.value) for record in seed0]

    (table,) = severity_tables([*seed0, *seed1])

    assert [entry.value for entry in table.entries.values()] == [76.0, 57.0, 47.5, 9.5]
    assert table.compute_drop(0) == pytest.approx(25.0)
    assert table.compute_drop(1) is None
    assert table.to_printed_table().rows[1][-1].text == NO_VALUE


def test_undefined_scores_have_no_drop():
    (table,) = severity_tables(
        corrupted_blocks((80.0, math.nan, 60.0), (math.nan, 60.0, 60.0), (50.0, 40.0, 30.0))
    )

    assert [table.compute_drop(layer) for layer in table.rows] == [None, None, pytest.approx(30.0)]
    assert table.most_robust_layers == {2}
    assert [row["drop"] for row in table.csv_rows()[::3]] == ["", "", pytest.approx(30.0)]


def test_there_is_no_drop_when_higher_is_not_better():
    records = corrupted_blocks((8.0, 6.0), (5.0, 5.0))
    (table,) = severity_tables([replace(one, unit="", metric="rankme") for one in records])

    assert table.compute_drop(0) is None
    assert not any(cell.is_best for row in table.to_printed_table().rows for cell in row)


def test_severities_are_drawn_and_written_as_json_and_csv(store, cli, cli_json, monkeypatch):
    drawn: list[ScoreTable] = []
    monkeypatch.setattr("ssl_bench.cli.table.draw_curves", lambda tables, _: drawn.extend(tables))
    store.save(CLEAN)
    assert "`ssl-bench probe --task all corrupt=" in cli(*OVER_SEVERITY, code=3).err
    for record in corrupted_blocks((80.0, 60.0, 20.0), (50.0, 50.0, 40.0)):
        ResultStore(store.root).save(record)

    cli(*OVER_SEVERITY, "--task", "knn", "--layer", "0,1", "--figure", "curves.svg")
    (table,) = drawn
    assert (table.row_name, table.rows, table.columns) == (
        "severity", (0, 1, 2), ("block 0", "block 1"),
    )  # fmt: skip
    assert table.entries[2, "block 1"].value == 40.0
    (content,) = cli_json(*OVER_SEVERITY, "--layer", "0,1")
    drops = [{"layer": 0, "drop": 50.0}, {"layer": 1, "drop": pytest.approx(10.0)}]
    assert content["drops"] == drops
    cells = [(cell["layer"], cell["severity"], cell["value"]) for cell in content["cells"]]
    assert cells[:2] == [(0, 0, 80.0), (0, 1, 60.0)]
    head, first, *_ = cli(*OVER_SEVERITY, "--format", "csv").out.splitlines()
    assert head.split(",")[:6] == ["title", "block", "severity", "model", "drop", "value"]
    assert '",0,0,skip,50.0,80.0,' in first
    cli(*OVER_SEVERITY, "--pivot", code=2)
