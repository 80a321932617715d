"""Test the comparison of two training runs at each epoch."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from ssl_bench.errors import DataError
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import compare_encoders, compare_runs
from ssl_bench.tables.depth import epoch_tables
from tests.support.report_cells import build_record, save

# The number of correct images out of ten, for each block of each run and epoch.
HITS = {
    ("skip", 100): {0: 2, 11: 4},
    ("skip", 200): {0: 3, 11: 5},
    ("skip", 300): {0: 3, 11: 5},
    ("skipless", 100): {0: 2, 11: 1},
    ("skipless", 250): {0: 9, 11: 9},
    ("skipless", 300): {0: 5, 2: 7, 11: 10},
}
RUNS = ("skip", "skipless")
OVER_EPOCHS = ("compare", "--over-epochs")


def make_record(run: str, epoch: int, **changes):
    digit = f"{list(HITS).index((run, epoch)):x}"
    model = run if epoch == 300 else f"{run}@{epoch}"
    record = build_record(model=model, checkpoint_sha256=digit * 64, **changes)
    return replace(record, details={"epoch": float(epoch)})


@pytest.fixture
def store(tmp_path) -> ResultStore:
    store = ResultStore(tmp_path)
    for (run, epoch), hits in HITS.items():
        for layer, number in hits.items():
            save(store, make_record(run, epoch, layer=layer), np.arange(10) < number)
    return store


def test_an_epoch_is_compared_like_its_two_encoders(store):
    records = store.records()
    (runs,) = compare_runs(store, records, RUNS)

    for epoch in (100, 300):
        pair = [make_record(run, epoch).encoder_id for run in RUNS]
        (table,), _ = compare_encoders(store, records, dict(zip(pair, RUNS, strict=True)))
        rows = [row for row in table.rows if row.name in ("0", "11")]
        assert list(runs.by_epoch[epoch].rows) == rows
        assert [record.encoder_id for record in runs.by_epoch[epoch].encoders] == pair


def test_holm_counts_only_the_printed_blocks(tmp_path):
    # Only block 0 is in both runs. `compare` would also compare the last block of each run.
    store = ResultStore(tmp_path)
    for run, hits in {"skip": {0: 3, 5: 4}, "skipless": {0: 8, 11: 9}}.items():
        for layer, number in hits.items():
            save(store, make_record(run, 100, layer=layer), np.arange(10) < number)

    (table,) = compare_runs(store, store.records(), RUNS)

    (row,) = table.by_epoch[100.0].rows
    assert row.name == "0"
    assert 0 < row.p_holm == row.p < 0.5


def test_an_epoch_without_per_image_values_is_left_out(store):
    for run in RUNS:
        # After the first epochs, the values of only one run are known.
        record = make_record(run, 100, layer=0, seed=3)
        save(store, record, np.arange(10) < 5) if run == "skip" else store.save(record)
        save(store, make_record(run, 300, layer=0, seed=3), np.arange(10) < 5)

    tables = compare_runs(store, store.records(), RUNS)

    assert [(table.record.seed, list(table.by_epoch)) for table in tables] == [
        *((0, [100.0, 300.0]), (3, [300.0])),
    ]


def test_results_with_other_settings_images_or_seeds_are_never_paired(store):
    for changes in ({"settings": {"tau": 0.3}}, {"seed": 1}, {"dataset_fingerprint": "e" * 64}):
        save(store, make_record("skip", 100, layer=5, **changes), np.arange(10) < 5)
    save(store, make_record("skipless", 100, layer=5, seed=1), np.arange(10) < 6)

    one, other = compare_runs(store, store.records(), RUNS)

    by_seed = {next(iter(c.by_epoch.values())).record.seed: c for c in (one, other)}
    assert set(by_seed) == {0, 1}
    (row,) = by_seed[1].by_epoch[100.0].rows
    assert (row.name, row.first, row.second) == ("5", 50, 60)
    assert {row.name for c in by_seed[0].by_epoch.values() for row in c.rows} == {"0", "11"}


def test_the_epochs_of_each_block_are_in_consecutive_rows(cli, cli_json):
    lines = cli(*OVER_EPOCHS, *RUNS, "--format", "markdown").out.strip().splitlines()

    assert lines[2] == "| block | epoch | skip | skipless | first - second [95 %] |"
    rows = [[word.strip() for word in line.strip("|").split("|")] for line in lines[4:8]]
    assert [" ".join(row[:4]) for row in rows] == [
        *("0 100 20.0 20.0", "0 300 30.0 50.0", "11 100 40.0 10.0", "11 300 50.0 100.0"),
    ]
    assert rows[0][4].startswith("+0.0 [-")
    assert rows[3][4].startswith("**-50.0 [-")
    text = cli(*OVER_EPOCHS, *RUNS, "--format", "csv").out
    differences = [
        (r["epoch"], r["block"], round(float(r["difference"]), 9))
        for r in csv.DictReader(io.StringIO(text))
    ]
    assert differences == [
        *(("100.0", "0", 0), ("100.0", "11", 30), ("300.0", "0", -20), ("300.0", "11", -50)),
    ]
    (table,) = cli_json(*OVER_EPOCHS, *RUNS)
    epochs = [(one["epoch"], one["names"]) for one in table["epochs"]]
    assert epochs == [(100.0, list(RUNS)), (300.0, list(RUNS))]
    assert table["epochs"][1]["checkpoint_sha256"] == ["2" * 64, "5" * 64]
    # A run can be named by any of its encoders.
    for names in (("skip@100", "skipless@250"), ("2222", "skipless")):
        assert text == cli(*OVER_EPOCHS, *names, "--format", "csv").out


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        (["skip", "skip@100"], 2, "got skip and skip"),
        (["skip", "other"], 3, "'other'"),
        ([*RUNS, "--facet", "token"], 2, "`--facet key`"),
        (["skip", "unknown"], 3, "got unknown"),
        (["skip", "late"], 3, "skip 100, 200, 300 and late 400"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(store, cli, names, code, words):
    store.save(build_record(model="unknown", checkpoint_sha256="f" * 64))
    late = build_record(model="late", checkpoint_sha256="e" * 64)
    store.save(replace(late, details={"epoch": 400.0}))

    assert words in cli(*OVER_EPOCHS, *names, code=code).err


def test_two_runs_of_the_same_name_are_refused(store):
    twin = replace(make_record("skip", 100, layer=0), checkpoint_sha256="f" * 64)
    save(store, twin, np.arange(10) < 1)

    for refuse in (lambda records: compare_runs(store, records, RUNS), epoch_tables):
        with pytest.raises(DataError, match="epoch 100 of run skip"):
            refuse(store.records())
