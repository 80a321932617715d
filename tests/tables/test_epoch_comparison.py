"""Two runs over their epochs: by hand, and against the comparison of two encoders."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import compare_encoders, compare_runs
from ssl_bench.tables.depth import epoch_tables
from tests.support.report_cells import cell, save

# Images that are right, of ten: by run, epoch and block.
HITS = {
    ("skip", 100): {0: 2, 11: 4},
    ("skip", 200): {0: 3, 11: 5},
    ("skip", 300): {0: 3, 11: 5},
    ("skipless", 100): {0: 2, 11: 1},
    ("skipless", 250): {0: 9, 11: 9},
    ("skipless", 300): {0: 5, 2: 7, 11: 10},
}
RUNS = ("skip", "skipless")


def encoder(run: str, epoch: int, **changes):
    """The last one is of epoch 300."""
    digit = f"{list(HITS).index((run, epoch)):x}"
    model = run if epoch == 300 else f"{run}@{epoch}"
    record = cell(model=model, checkpoint_sha256=digit * 64, **changes)
    return replace(record, details={"epoch": float(epoch)})


@pytest.fixture
def store(tmp_path) -> ResultStore:
    store = ResultStore(tmp_path)
    for (run, epoch), hits in HITS.items():
        for layer, number in hits.items():
            save(store, encoder(run, epoch, layer=layer), np.arange(10) < number)
    return store


def printed(capsys, store: ResultStore, *words: str) -> str:
    assert main(["compare", "--over-epochs", "--out", str(store.root), *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("epoch", [100, 300])
def test_an_epoch_is_compared_as_its_two_encoders_are(store, epoch):
    records = store.records()
    pair = [encoder(run, epoch).encoder_id for run in RUNS]

    (table,), _ = compare_encoders(store, records, dict(zip(pair, RUNS, strict=True)))
    (found,) = compare_runs(store, records, RUNS)

    assert list(found.by_epoch[epoch].rows) == [
        row for row in table.rows if row.name in ("0", "11")
    ]
    assert [record.encoder_id for record in found.by_epoch[epoch].encoders] == pair


def test_holm_counts_only_the_printed_blocks(tmp_path):
    """Last blocks with different indices are a row of `compare`, but not of epochs."""
    store = ResultStore(tmp_path)
    for run, hits in {"skip": {0: 3, 5: 4}, "skipless": {0: 8, 11: 9}}.items():
        for layer, number in hits.items():
            save(store, encoder(run, 100, layer=layer), np.arange(10) < number)

    (table,) = compare_runs(store, store.records(), RUNS)

    (row,) = table.by_epoch[100.0].rows
    assert row.name == "0"
    assert 0 < row.p < 0.5
    assert row.p_holm == row.p


def test_other_settings_images_and_seeds_are_never_paired(store):
    for changes in ({"settings": {"tau": 0.3}}, {"seed": 1}, {"dataset_fingerprint": "e" * 64}):
        save(store, encoder("skip", 100, layer=5, **changes), np.arange(10) < 5)
    save(store, encoder("skipless", 100, layer=5, seed=1), np.arange(10) < 6)

    one, other = compare_runs(store, store.records(), RUNS)

    by_seed = {next(iter(c.by_epoch.values())).record.seed: c for c in (one, other)}
    assert set(by_seed) == {0, 1}
    (row,) = by_seed[1].by_epoch[100.0].rows
    assert (row.name, row.first, row.second) == ("5", 50, 60)
    assert {row.name for c in by_seed[0].by_epoch.values() for row in c.rows} == {"0", "11"}


def test_the_command_prints_epochs_below_one_another(store, capsys):
    lines = printed(capsys, store, *RUNS, "--format", "markdown").strip().splitlines()

    assert lines[2] == "| block | epoch | skip | skipless | first - second [95 %] |"
    rows = [[word.strip() for word in line.strip("|").split("|")] for line in lines[4:8]]
    assert [row[:4] for row in rows] == [
        ["0", "100", "20.0", "20.0"],
        ["0", "300", "30.0", "50.0"],
        ["11", "100", "40.0", "10.0"],
        ["11", "300", "50.0", "100.0"],
    ]
    assert rows[0][4].startswith("+0.0 [-")
    assert rows[3][4].startswith("**-50.0 [-")
    assert "paired over 10 images" in lines[-1]
    rows = list(csv.DictReader(io.StringIO(printed(capsys, store, *RUNS, "--format", "csv"))))
    (table,) = json.loads(printed(capsys, store, *RUNS, "--format", "json"))

    shown = [(row["epoch"], row["block"], float(row["difference"])) for row in rows]
    assert shown == [
        ("100.0", "0", 0),
        ("100.0", "11", pytest.approx(30)),
        ("300.0", "0", pytest.approx(-20)),
        ("300.0", "11", -50),
    ]
    assert table["kind"] == "comparison_over_epochs"
    assert [(one["epoch"], one["names"]) for one in table["epochs"]] == [
        (100.0, ["skip", "skipless"]),
        (300.0, ["skip", "skipless"]),
    ]
    assert table["epochs"][1]["checkpoint_sha256"] == ["2" * 64, "5" * 64]


@pytest.mark.parametrize("names", [("skip@100", "skipless@250"), ("2222", "skipless")])
def test_a_run_is_named_by_any_of_its_encoders(store, capsys, names):
    table = printed(capsys, store, *names, "--format", "csv")

    assert table == printed(capsys, store, *RUNS, "--format", "csv")


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (["skip"], 2, "expected two runs with --over-epochs, got skip"),
        (["skip", "skip@100"], 2, "expected two runs with --over-epochs, got skip and skip"),
        (["skip", "other"], 3, "'other'"),
        ([*RUNS, "--facet", "token"], 2, "`--facet key`"),
        (["skip", "unknown"], 3, "got unknown"),
        (["skip", "late"], 3, r"skip 100, 200, 300 and late 400"),
    ],
)
def test_what_cannot_be_compared_over_epochs_is_said(store, capsys, names, code, said):
    other = cell(model="unknown", checkpoint_sha256="f" * 64)
    store.save(other)
    late = cell(model="late", checkpoint_sha256="e" * 64)
    store.save(replace(late, details={"epoch": 400.0}))

    assert main(["compare", "--over-epochs", "--out", str(store.root), *names]) == code
    assert said in capsys.readouterr().err


def test_two_runs_of_the_same_name_are_refused(store):
    twin = replace(encoder("skip", 100, layer=0), checkpoint_sha256="f" * 64)
    save(store, twin, np.arange(10) < 1)
    records = store.records()

    with pytest.raises(DataError, match="epoch 100 of run skip"):
        compare_runs(store, records, RUNS)
    with pytest.raises(DataError, match="epoch 100 of run skip"):
        epoch_tables(records)
