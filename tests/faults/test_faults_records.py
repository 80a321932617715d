"""Rows 68 and 86 of the catalogue of faults.

Fields that no run leaves, in results of somebody else; records that contradict themselves.
"""

import csv
import io
import json
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError
from ssl_bench.results import CellKey, ResultStore, to_pandas
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.series import model_names
from tests.support.faults import (
    Mark,
    class_folders,
    fails,
    peak_memory_mib,
    probing,
    records,
    voc,
)
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
    store.save(cell(ci95=(float("nan"), 43.0)))

    assert main(["table", "--out", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert "40.0" in out
    assert "nan" not in out


CONTRADICTIONS = {
    "turned round": {"ci95": [60.0, 40.0]},
    "below the interval": {"value": 34.9},
    "above the interval": {"value": 65.1},
    "interval elsewhere": {"ci95": [51.0, 52.0]},
    "below the one end": {"ci95": [60.0, None]},
    "no mean of its images": {"value": 50.5},
    "fewer images": {"num_images": 3},
    "more images": {"num_images": 40},
    "text": {"value": "50.0"},
}


def contradicting(place: Path, changes: dict | str) -> tuple[ResultStore, Path]:
    """Two records of one metric and one of another; a later hand changed one of the former."""
    store = ResultStore(place / "results")
    for layer in (0, 1):
        save(store, cell(layer=layer, metric="top1_k1", task="knn"), np.arange(4) < 2)
    save(store, cell(layer=0, metric="top5_k1", task="knn"), np.arange(4) < 2)
    path = store.path(cell(layer=1, metric="top1_k1", task="knn").key())
    if isinstance(changes, str):
        path.write_text(changes + path.read_text().lstrip("{"))
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return store, path


@pytest.mark.parametrize("which", [*CONTRADICTIONS, '{"value": 50.0,', '{"metric": "top1_k1",'])
def test_fault_86_a_record_that_contradicts_itself_is_named_and_not_shown(tmp_path, capsys, which):
    store, path = contradicting(tmp_path, CONTRADICTIONS.get(which, which))
    out = ["--out", str(store.root)]
    printed = []
    for words in (["table"], ["table", "--pivot", "--best-layer", "oracle"], ["report"]):
        assert main([*words, *out]) == 0
        shown, said = capsys.readouterr()
        printed.append(shown)
        assert said.splitlines()[-1].startswith(f"1 of 3 records cannot be shown: {path}: ")
    assert main(["table", *out, "--format", "json"]) == 0
    cells = json.loads(capsys.readouterr().out)[0]["cells"]
    assert [one["layer"] for one in cells] == [0]
    assert "1 record" not in (store.root / "report/index.html").read_text().split("2 records")[0]


def test_fault_86_records_in_a_frame_are_those_that_can_be_read(tmp_path, capsys):
    store, path = contradicting(tmp_path, {"num_images": 3})

    assert len(to_pandas(store.root)) == 2
    assert f"1 of 3 records cannot be shown: {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["table", "compare skip", "report"])
@pytest.mark.parametrize("name", ["--metric top1_k1", "--facet cls", "--dataset x", "--protocol y"])
def test_fault_86_what_cannot_be_read_is_no_typing_error(tmp_path, capsys, command, name):
    flag, word = name.split()
    store = ResultStore(tmp_path / "results")
    save(store, cell(), np.arange(4) < 2)
    path = store.save(cell(**{flag[2:]: word}, value=50.0, ci95=(1.0, 2.0)))

    said = fails(capsys, [*command.split(), "--out", str(store.root), flag, word], 3)

    assert f"no record of {flag} {word} can be shown; 1 of 2 records cannot be shown: " in said
    assert str(path) in said
    assert "did you mean" not in said


def test_fault_86_a_typing_error_is_still_one_beside_what_cannot_be_read(tmp_path, capsys):
    store, path = contradicting(tmp_path, {"num_images": 3})

    said = fails(capsys, ["table", "--out", str(store.root), "--metric", "top5"], 2)

    assert "did you mean top5_k1" in said
    assert str(path) in said


@pytest.mark.parametrize("flags", ["--over-epochs", "--over-severity", "--layer 1"])
def test_fault_86_what_cannot_be_read_is_named_where_nothing_is_left(tmp_path, capsys, flags):
    store, path = contradicting(tmp_path, {"num_images": 3})

    said = fails(capsys, ["table", "--out", str(store.root), *flags.split()], 3)

    assert f"1 of 3 records cannot be shown: {path}: num_images is 3" in said


def test_fault_86_a_contradicting_record_is_computed_again_and_said(place, capsys):
    words = probing("knn", "class_folders", class_folders(place / "classes"))
    assert main(words) == 0
    path = next(Path("results").rglob("*top1_k1-*.json"))
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"num_images": 99}))
    capsys.readouterr()

    assert main(words) == 0

    assert f"computed again, because of {path}: num_images is 99" in capsys.readouterr().err
    again = json.loads(path.read_text())
    assert (again["num_images"], again["value"]) == (whole["num_images"], whole["value"])


@pytest.mark.slow
def test_fault_86_committed_records_agree_with_themselves():
    packed = (Path(__file__).parents[2] / "results").rglob("records.parquet")
    stores = [ResultStore(path.parent) for path in packed]

    assert sum(len(store.records()) for store in stores) > 2000
    assert not any(store.unreadable for store in stores)


@pytest.mark.slow
def test_fault_86_guesses_say_the_values_that_were_used(place):
    voc(place)
    words = probing("segmentation", "voc2012", place)
    words[words.index("probe.protocol=fast")] = "probe.protocol=cutting_the_skip"

    assert main([*words, "probe.crops=resized", "probe.views=2", "probe.train_images=4"]) == 0

    guesses = "\n".join(records()[0].details["guesses"])
    assert "squashed to 32 x 32, those of training as crops=resized and views=2" in guesses
    assert "at most 4, drawn" in guesses
    assert "2 epochs" in guesses
    assert "512" not in guesses


def test_fault_86_means_of_other_numbers_of_seeds_say_so_in_each_cell(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for seed, model in ((0, skipless), (0, cell), (1, cell)):
        store.save(model(seed=seed, value=40.0 + seed, ci95=None))
    out = ["--out", str(tmp_path)]

    for style in ("text", "markdown", "latex"):
        for more in ([], ["--pivot"]):
            assert main(["table", *out, "--format", style, *more]) == 0
            shown = capsys.readouterr().out
            assert "40.5 (2 seeds)" in shown
            assert "40.0 (1 seed)" in shown
    assert main(["table", *out, "--format", "csv"]) == 0
    assert sorted(r["seeds"] for r in csv.DictReader(capsys.readouterr().out.splitlines())) == [
        *("0", "0 1")
    ]
    assert main(["table", *out, "--format", "json"]) == 0
    cells = json.loads(capsys.readouterr().out)[0]["cells"]
    assert sorted(one["seeds"] for one in cells) == [[0], [0, 1]]
    assert main(["report", *out]) == 0
    pages = "".join(path.read_text() for path in tmp_path.glob("report/*.html"))
    assert "(2 seeds)" in pages
    assert "(1 seed)" in pages


def test_fault_86_means_of_as_many_seeds_say_nothing(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for seed in (0, 1):
        store.save(cell(seed=seed))
        store.save(skipless(seed=seed))

    assert main(["table", "--out", str(tmp_path)]) == 0

    assert "seeds)" not in capsys.readouterr().out
