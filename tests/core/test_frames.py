"""Test the export of results to pandas and Parquet."""

import io
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore, to_pandas
from ssl_bench.results import store as writing
from ssl_bench.tables.sheets import as_parquet
from tests.core.test_results import RECORD

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    shutil.copy(REPOSITORY / "results/osa_mnist/records.parquet", tmp_path / "results")
    return tmp_path / "results"


def test_pandas_has_a_row_of_plain_values_for_each_record(results):
    records = ResultStore(results).records()

    frame = to_pandas("results")

    assert frame.equals(to_pandas(records))
    assert math.isclose(frame["value"].to_numpy().sum(), sum(record.value for record in records))
    row, record = frame.iloc[0], records[0]
    assert (row["low_95"], row["high_95"]) == record.ci95
    assert (row["mean_r"], row["std_b"]) == (record.mean[0], record.std[2])
    assert json.loads(row["settings"]) == record.settings
    assert row["encoder_id"] == record.encoder_id


def test_settings_of_a_frame_contain_valid_json():
    record = replace(RECORD, settings={"b": math.inf, "a": math.nan, "c": [1, -math.inf]})

    frame = to_pandas([record, replace(record, ci95=None)])

    assert frame["settings"][0] == '{"a": null, "b": "inf", "c": [1, null]}'
    assert frame["high_95"].isna().tolist() == [False, True]
    channels = [f"{name}_{channel}" for name in ("mean", "std") for channel in "rgb"]
    assert frame[channels].iloc[0].tolist() == [0.5, 0.4, 0.3, 0.2, 0.2, 0.2]
    assert not frame.columns.intersection(["ci95", "mean", "std"]).size


def test_parquet_has_the_rows_of_csv_and_is_not_printed(results, capsysbinary, monkeypatch):
    ResultStore(results).save(replace(RECORD, ci95=None))

    assert main(["table", "--format", "parquet"]) == 0
    table = pyarrow.parquet.read_table(io.BytesIO(capsysbinary.readouterr().out))
    assert main(["table", "--format", "csv"]) == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()

    assert table.column_names == lines[0].split(",")
    assert table.num_rows == len(lines) - 1
    assert table["low_95"].null_count == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["table", "--format", "parquet"]) == 2
    (results / "records.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert main(["table"]) == 3


def test_columns_of_parquet_have_one_type():
    rows = [{"mixed": 1, "number": ""}, {"mixed": "x", "number": 2.5}, {"mixed": "", "number": 3}]
    table: Any = SimpleNamespace(csv_rows=lambda: rows)

    read = pyarrow.parquet.read_table(io.BytesIO(as_parquet([table])))

    assert read.to_pydict() == {"mixed": ["1", "x", None], "number": [None, 2.5, 3.0]}


def test_packed_records_are_read_like_files(tmp_path, capsys):
    store, out = ResultStore(tmp_path), ["--out", str(tmp_path)]
    details = {"iou_by_class": {"dog": 1.5, "cat": math.nan, "cow": math.inf}}
    for layer, change in enumerate(({"ci95": None}, {"details": details}, {"unit": ""})):
        hits = np.arange(5) < 2
        given = {"num_images": 5, "ci95": (math.nan, 50.0), "layer": layer} | change
        store.save(replace(RECORD, **given), hits)
    store.save(replace(RECORD, metric="rankme", unit="", value=math.inf, ci95=(2.0, math.inf)))
    store.save_image_ids(RECORD.dataset_fingerprint, "abcde")
    whole = [record.as_json() for record in store.records()]
    key = replace(RECORD, layer=1).key()

    def print_tables():
        assert main(["compare", "skip", *out, "--format", "json"]) == 0
        assert main(["table", "--pivot", *out, "--format", "json"]) == 0
        return capsys.readouterr().out

    before = print_tables()
    assert main(["table", "--pack", *out]) == 0
    assert f"{len(whole)} records" in capsys.readouterr().err

    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["records.parquet"]
    packed = ResultStore(tmp_path)
    assert [record.as_json() for record in packed.records()] == whole
    assert print_tables() == before
    assert packed.load(key) is not None
    assert packed.has_per_image(key)
    assert packed.unreadable == {}
    assert packed.image_ids(RECORD.dataset_fingerprint) == tuple("abcde")
    # Later files replace packed ones, and are packed next time.
    packed.save_image_ids(RECORD.dataset_fingerprint, "fghij")
    assert packed.image_ids(RECORD.dataset_fingerprint) == tuple("fghij")
    packed.save(replace(RECORD, layer=1, value=60.0, ci95=None, num_images=5), np.arange(5) < 3)
    assert main(["table", "--pack", *out]) == 0
    assert [record.value for record in ResultStore(tmp_path).records()][:3] == [40.0, 60.0, 40.0]
    assert ResultStore(tmp_path).image_ids(RECORD.dataset_fingerprint) == tuple("fghij")
    assert not list((tmp_path / "records").rglob("*.*"))


def test_records_that_are_saved_during_packing_are_kept(tmp_path, monkeypatch):
    hits = np.arange(5) < 2
    first = replace(RECORD, layer=0, num_images=5, ci95=None)
    ResultStore(tmp_path).save(first, hits)
    stale = ResultStore(tmp_path)
    assert len(stale.records()) == 1
    # Another process packs, and saves again.
    ResultStore(tmp_path).save(replace(first, layer=1), hits)
    assert ResultStore(tmp_path).pack() == 2
    stale.save(replace(first, layer=2), hits)
    assert [record.layer for record in stale.records()] == [0, 1, 2]
    whole = writing.write_atomically

    def save_and_write(*arguments):
        ResultStore(tmp_path).save(replace(first, layer=2, value=60.0), np.arange(5) < 3)
        whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_atomically", lambda *a: (patch.undo(), save_and_write(*a)))
        assert stale.pack() == 3

    found = ResultStore(tmp_path)
    assert [record.value for record in found.records()] == [40.0, 40.0, 60.0]
    assert found.unreadable == {}
    assert ResultStore(tmp_path).pack() == 3
    assert [record.value for record in ResultStore(tmp_path).records()] == [40.0, 40.0, 60.0]


def test_a_newer_file_replaces_the_packed_per_image_values(tmp_path):
    hits = np.arange(5) < 2
    first = replace(RECORD, num_images=5, ci95=None, seed=2**64 - 1, model="a\udc80")
    ResultStore(tmp_path).save(first, hits)
    assert ResultStore(tmp_path).pack() == 1
    again = ResultStore(tmp_path)
    assert [record.as_json() for record in again.records()] == [first.as_json()]

    again.save(replace(first, value=60.0))

    assert again.load_per_image(again.records()[0]) is None
    assert not again.has_per_image(first.key())
    assert again.pack() == 1
    assert [record.value for record in again.records()] == [60.0]
    assert again.unreadable == {}


def test_records_that_cannot_be_read_are_not_packed(tmp_path):
    first = replace(RECORD, layer=0, num_images=5, ci95=None)
    ResultStore(tmp_path).save(first)
    path = ResultStore(tmp_path).save(replace(first, layer=1))
    path.write_text("{")
    names = tmp_path / "images" / "0123456789abcdef.json"
    names.parent.mkdir()
    for own in (names, names.with_suffix(".npz"), names.with_name("cat.json")):
        own.write_text('["a", "b"')

    assert ResultStore(tmp_path).pack() == 1

    left = ResultStore(tmp_path)
    assert len(left.records()) == 1
    assert list(left.unreadable) == [path]
    assert len(list(names.parent.iterdir())) == 3
