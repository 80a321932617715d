"""Records and tables for programs of others: pandas and Parquet."""

import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import MachineError
from ssl_bench.results import ResultStore, to_pandas
from ssl_bench.results.frames import frame_row
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.printing.parquet import parquet_columns
from tests.support.faults import fails

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Some records of this repository, and one interval that is not known."""
    monkeypatch.chdir(tmp_path)
    task = REPOSITORY / "results/dino_photographs/records/pca"
    shutil.copytree(task, tmp_path / "results/records/pca")
    return tmp_path / "results"


def test_a_row_is_a_record_in_plain_values(results):
    record = ResultStore(results).records()[0]

    row = frame_row(record)

    assert (row["value"], row["layer"], row["task"]) == (record.value, record.layer, "pca")
    assert (row["low_95"], row["high_95"]) == (record.ci95 or (None, None))
    assert (row["mean_r"], row["std_b"]) == (record.mean[0], record.std[2])
    assert json.loads(row["settings"]) == record.settings
    assert row["encoder_id"] == record.encoder_id
    assert all(isinstance(value, int | float | str | None) for value in row.values())


def test_a_column_has_one_type_and_null_where_csv_has_nothing(results):
    columns = parquet_columns(depth_tables(ResultStore(results).records()))

    assert len({len(column) for column in columns.values()}) == 1
    for column in columns.values():
        assert len({type(value) for value in column if value is not None}) <= 1
        assert "" not in column


def test_pandas_has_a_row_for_each_record(results):
    pytest.importorskip("pandas")
    records = ResultStore(results).records()

    frame = to_pandas("results")

    assert len(frame) == len(records)
    assert frame.equals(to_pandas(records))
    assert math.isclose(frame["value"].to_numpy().sum(), sum(record.value for record in records))


def test_parquet_is_the_rows_of_csv(results):
    parquet = pytest.importorskip("pyarrow.parquet")
    words = [sys.executable, "-m", "ssl_bench", "table", "--format"]

    written = subprocess.run([*words, "parquet"], capture_output=True, check=True).stdout
    text = subprocess.run([*words, "csv"], capture_output=True, check=True, text=True).stdout

    table = parquet.read_table(io.BytesIO(written))
    lines = text.splitlines()
    assert table.column_names == lines[0].split(",")
    assert table.num_rows == len(lines) - 1


@pytest.mark.parametrize("package", ["pandas", "pyarrow"])
def test_a_missing_package_is_named_with_the_remedy(results, monkeypatch, capsys, package):
    # None makes the import fail, as it does where the package is not installed.
    monkeypatch.setitem(sys.modules, package, None)

    if package == "pandas":
        with pytest.raises(MachineError, match=r"pip install 'ssl-bench\[frames\]'"):
            to_pandas(results)
    else:
        said = fails(capsys, ["table", "--format", "parquet"], 5)
        assert "pip install 'ssl-bench[frames]', or take csv" in said


def test_no_terminal_is_filled_with_parquet(results, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert main(["table", "--format", "parquet"]) == 2

    assert "put it into a file: > results.parquet" in capsys.readouterr().err
