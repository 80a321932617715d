"""Row 68 of the catalogue of faults: fields that no run leaves, in results of somebody else."""

import io
import json
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError
from ssl_bench.results import CellKey, ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.series import model_names
from tests.support.faults import Mark, fails, peak_memory_mib
from tests.support.hostile import CHECKS
from tests.support.report_cells import (
    cell,
    files_of,
    printed_by,
    save,
    skipless,
)


def stranger(store: ResultStore, changes: dict) -> Path:
    """A record with fields that no run leaves, as far as possible in the place they give it."""
    fields_read = cell().as_json() | changes
    try:
        if changes == DEEPEST:
            raise RecursionError("more levels than can be written")
        # Without the checks of types, which would leave only the other place.
        key = object.__new__(CellKey)
        vars(key).update({item.name: fields_read[item.name] for item in fields(CellKey)})
        path = store.root / "records" / key.task / key.dataset / key.filename()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields_read))
    except (OSError, ValueError, TypeError, RecursionError):
        path = store.root / "records/tokencut/toy/layer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Levels beyond what can be written, too.
        text = json.dumps(fields_read | {"settings": "DEEP"} if changes == DEEPEST else fields_read)
        path.write_text(text.replace('"DEEP"', '{"x":' * 5000 + "1" + "}" * 5000))
    return path


def nested(levels: int) -> dict:
    found: dict = {}
    for _ in range(levels):
        found = {"x": found}
    return found


DEEPEST = {"settings": nested(900)}
STRANGE = [
    *[{n: text} for n in ("model", "split", "device") for text in ("a\0b", "\ud800", "x" * 2000)],
    *[{name: "../../../x"} for name in ("checkpoint_sha256", "dataset_fingerprint")],
    {"checkpoint_sha256": ""}, {"checkpoint_sha256": "A" * 64}, {"git_commit": 5},
    {"git_commit": {"a": 1}}, {"unit": "\n"}, {"facet": "a\\b"},
    *[{"dataset": name, "facet": "a/b"} for name in ("", ".")], {"dataset": "toy/."},
    {"layer": 12}, {"layer": -1}, {"layer": True}, {"layer": 10**400}, {"layer": 3.0},
    {"depth": 10**9}, {"depth": 0}, {"depth": 10**400},
    {"seed": 10**400}, {"seed": False}, {"num_images": 0}, {"num_images": -3},
    {"num_images": 10**400}, {"num_images": True}, {"seconds": -1.0}, {"seconds": 10**400},
    {"value": 101.0}, {"value": -1.0}, {"value": 1e308}, {"value": 1e308, "unit": ""},
    {"value": -1e308, "unit": ""}, {"value": 5e-324, "unit": ""}, {"value": 10**400},
    {"value": True}, {"value": "nan"}, {"value": [1]}, {"value": float("nan")},
    {"ci95": [0.0, "inf"]}, {"ci95": [1.0]}, {"ci95": 4}, {"ci95": [1.0, 2.0, 3.0]},
    {"ci95": [True, 2.0]}, {"ci95": [-1e308, 1e308], "unit": ""},
    {"settings": nested(30)}, DEEPEST, {"settings": {"x": 10**400}}, {"settings": [1]},
    {"details": nested(30)}, {"details": {"iou_by_class": {"dog": 10**400}}},
    {"details": {"degenerate_percent": "many"}}, {"details": {"degenerate_percent": 1e9}},
    {"details": {"degenerate_percent": None}}, {"details": None},
]  # fmt: skip


# Of which no name of a file can be made.
WITHOUT_PLACE = (DEEPEST, {"layer": 3.0}, {"layer": 10**400})


def named(change: dict) -> str:
    return (
        ", ".join(f"{k}={v!r}"[:30] for k, v in change.items()).encode("ascii", "replace").decode()
    )


@pytest.mark.parametrize("changes", STRANGE, ids=named)
def test_fault_68_a_record_that_no_run_can_leave_is_named_and_the_others_are_shown(
    tmp_path, capsys, changes
):
    store = ResultStore(tmp_path / "results")
    store.save(cell(layer=0))
    path = stranger(store, changes)
    before = files_of(tmp_path)

    said = printed_by(capsys, ["report", "--out", str(store.root)]).splitlines()
    printed = [
        printed_by(capsys, ["table", "--out", str(store.root), "--format", s]) for s in CHECKS
    ]

    assert said[-1].startswith(f"1 of 2 records cannot be shown: {path}: ")
    assert len(said[-1]) < 600
    assert (path.name == "layer.json") == (changes in WITHOUT_PLACE)
    elsewhere = path.name == "layer.json" or "/" in changes.get("dataset", "")
    assert elsewhere or "of another cell" not in said[-1]
    assert all(line.splitlines() == [said[-1]] for line in printed)
    written = {name for name in files_of(tmp_path) if not name.startswith("results/report/")}
    assert written == before


@pytest.mark.parametrize("model", ["../../x", "/tmp/x", "..", ".", "a/../../b", "x" * 1000, "\n"])
def test_fault_68_the_name_of_a_model_leads_nowhere(tmp_path, capsys, model):
    store = ResultStore(tmp_path / "results")
    path = store.save(cell(model=model))
    before = files_of(tmp_path)

    assert printed_by(capsys, ["report", "--out", str(store.root)]).count("\n") == 1

    new = files_of(tmp_path) - before
    assert {Path(name).parent.as_posix() for name in new} == {"results/report"}
    assert len([name for name in new if "checkpoint-" in name]) == 1
    assert path.is_file()


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "a\\b", "a\0b", "\ud800", "/x"])
@pytest.mark.parametrize("field", ["task", "facet", "metric"])
def test_fault_68_no_record_is_written_elsewhere(tmp_path, field, name):
    store = ResultStore(tmp_path / "a" / "b" / "results")

    with pytest.raises(DataError, match="expected a name that a file can have"):
        store.save(replace(cell(), **{field: name}), np.zeros(60, bool))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "a\0b", "/x"])
def test_fault_68_the_name_of_a_dataset_leads_nowhere(tmp_path, name):
    store = ResultStore(tmp_path / "results")

    path = store.save(replace(cell(), dataset=name))

    assert path.resolve().parents[2] == (tmp_path / "results/records").resolve()


def test_fault_68_where_nothing_is_left_to_show_the_reason_is_said(tmp_path, capsys):
    store = ResultStore(tmp_path)
    store.save(cell())
    path = store.save(cell(task="knn", metric="top1_k20"))
    path.write_text("{")

    said = fails(capsys, ["table", "--out", str(store.root), "--task", "knn"], 3)

    assert (
        f"no records of --task knn in {store.root}; 1 of 2 records cannot be shown: {path}" in said
    )


def test_fault_68_many_records_that_cannot_be_shown_are_one_line(tmp_path, capsys):
    store = ResultStore(tmp_path)
    store.save(cell())
    for layer in range(7):
        store.save(skipless(layer=layer)).write_text("{")

    said = printed_by(capsys, ["table", "--out", str(store.root)])

    assert said.count("\n") == 1
    assert said.startswith("7 of 8 records cannot be shown: ")
    assert "; and 2 more; " in said


def test_fault_68_values_of_images_that_are_pickled_never_run(tmp_path, capsys):
    store, mark = ResultStore(tmp_path), tmp_path / "mark"
    save(store, cell(), np.arange(4) < 2)
    save(store, skipless(), np.arange(4) < 2)
    path = store.per_image_path(cell())
    evil = np.array([Mark(mark)] * 4, dtype=object)
    np.savez(path.open("wb"), evil)

    said = printed_by(capsys, ["report", "--out", str(tmp_path)])

    assert f"ignored {path}: " in said
    assert not mark.exists()
    # The pickle does leave its mark where it is let.
    np.load(path, allow_pickle=True)["arr_0"]
    assert mark.exists()


def test_fault_68_values_of_images_that_unpack_to_more_than_memory_are_not_unpacked(
    tmp_path, capsys, monkeypatch
):
    store = ResultStore(tmp_path)
    save(store, cell(), np.arange(4) < 2)
    save(store, skipless(), np.arange(4) < 2)
    path = store.per_image_path(cell())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|b1", "fortran_order": False, "shape": (4, 65 * 2**18)}
    )
    deflated = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    with deflated as file, file.open("arr_0.npy", "w") as member:
        member.write(header.getvalue())
        for _ in range(65):
            member.write(bytes(2**20))
    monkeypatch.setattr("ssl_bench.results.contributions.MOST_NPZ", 2**26)

    with peak_memory_mib() as grown:
        said = printed_by(capsys, ["report", "--out", str(tmp_path)])

    assert f"ignored {path}: " in said
    assert grown() < 60


def test_fault_68_a_name_that_another_checkpoint_is_given_is_no_ones_twice():
    records = [
        cell(model="run"),
        cell(model="run", checkpoint_sha256="b" * 64),
        cell(model="run aaaaaa", checkpoint_sha256="c" * 64),
        cell(model="run", checkpoint_sha256="aaaaaa" + "d" * 58),
    ]

    names = model_names(records)

    assert len(set(names.values())) == len(names) == 4
    (table,) = depth_tables(records)
    assert all(len(entry.records) == 1 for entry in table.entries.values())


def test_fault_68_an_interval_without_ends_is_none(tmp_path, capsys):
    store = ResultStore(tmp_path)
    store.save(cell(ci95=(float("nan"), 3.0)))

    assert main(["table", "--out", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert "40.0" in out
    assert "nan" not in out
