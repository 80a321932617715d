"""Test how commands treat damaged results."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError, MachineError
from ssl_bench.results import Record, ResultStore, to_pandas
from ssl_bench.results.record import text_with_digest
from ssl_bench.system.files import TILES
from tests.core.test_results import RECORD
from tests.support.faults import (
    Mark,
    class_folders,
    encoder_file,
    expect_error,
    limit_file_size,
    make_probe_args,
    records,
    voc,
)
from tests.support.report_cells import (
    build_record,
    files_of,
    get_figures_folder,
    printed_by,
    save,
    save_pictures,
    skipless,
)

pytestmark = pytest.mark.slow

DEEP = '{"settings": ' + '{"x":' * 5000 + "1" + "}" * 5001
NESTED = json.loads('{"x":' * 600 + "1" + "}" * 600)
# Changes of a record with the value 40.0 and the interval 35.0 to 45.5, and a part of the message.
WRONG = [
    ("{", "JSON"), ("[1]", "JSON"), ("{}", "'value'"), (DEEP, "recursion"),
    ({"settings": NESTED}, "recursion"), ({"changed": NESTED}, "recursion"),
    ({"layer": 12}, "layer is 12"), ({"layer": -1}, "layer is -1"),
    ({"layer": True}, "layer is True"), ({"layer": 3.0}, "layer is 3.0"),
    ({"seed": False}, "seed is False"), ({"num_images": "9"}, "num_images is '9'"),
    ({"git_commit": 5}, "git_commit is 5"), ({"model": None}, "model is None"),
    ({"value": "nan"}, "expected a number"), ({"value": True}, "expected a number"),
    ({"value": [1]}, "expected a number"), ({"value": 10**400}, "too large"),
    ({"ci95": [1.0]}, "expected 2 numbers"), ({"ci95": 4}, "not iterable"),
    ({"mean": [1.0, True, 1.0]}, "expected a number"), ({"settings": [1]}, "settings is [1]"),
    ({"details": None}, "details is None"), ({"facet": "a/b"}, "'a/b'"),
    ({"dataset_fingerprint": "../../../x"}, "dataset_fingerprint is"),
    ({"seed": 1}, "another result"), ({"dataset": "x"}, "another result"),
    ({"ci95": [60.0, 20.0]}, "outside of its ci95"), ({"value": 34.9}, "outside of its ci95"),
    ({"value": 45.6}, "outside of its ci95"), ({"ci95": [51.0, 52.0]}, "outside of its ci95"),
    ({"ci95": [60.0, None]}, "outside of its ci95"),
    ({"value": 250.0, "ci95": None}, "value is 250.0"),
    ({"details": {"degenerate_percent": "many"}}, "degenerate_percent is 'many'"),
    ({"details": {"baseline": 5}}, "details.baseline is 5"),
    ({"peak_memory": "much"}, "peak_memory is 'much'"), ({"peak_memory": -1}, "peak_memory is -1"),
    ({"peak_memory": 10**400}, "peak_memory is"), ({"num_images": -3}, "num_images is -3"),
    ({"seconds": math.inf}, "seconds is inf"), ({"seconds": math.nan}, "seconds is nan"),
    ({"settings": {"corrupted": {"a": 1}}}, ""), ({"settings": {"trained_on": {"a": 1}}}, ""),
]  # fmt: skip


def save_changed(store: ResultStore, record: Record, changes: dict | str) -> Path:
    path = store.save(record)
    content = json.loads(path.read_text())
    path.write_text(changes if isinstance(changes, str) else json.dumps(content | changes))
    return path


def test_an_impossible_record_is_named(tmp_path, capsys):
    store = ResultStore(tmp_path)
    store.save(build_record(layer=0))
    for changes, why in WRONG:
        path = save_changed(store, build_record(layer=1), changes)

        message = printed_by(capsys, ["table", "--out", str(store.root)]).splitlines()[-1]

        assert message.startswith(f"1 of 2 records cannot be shown: {path}: "), changes
        assert why in message
        assert len(message) < 600


def test_all_commands_name_an_invalid_record_and_show_the_others(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    store.save(build_record(layer=0))
    path = save_changed(store, build_record(layer=1), {"ci95": [51.0, 52.0]})
    before = files_of(tmp_path)

    for words in (["report"], ["table"], ["table", "--pivot", "--best-layer", "oracle"]):
        message = printed_by(capsys, [*words, "--out", str(store.root)]).splitlines()[-1]
        assert message.startswith(f"1 of 2 records cannot be shown: {path}: ")
    assert len(to_pandas(store.root)) == 1
    assert f"1 of 2 records cannot be shown: {path}: " in capsys.readouterr().err
    assert "1 record of" in (store.root / "report/index.html").read_text()
    written = {name for name in files_of(tmp_path) if not name.startswith("results/report/")}
    assert written == before
    for layer in range(7):
        save_changed(store, skipless(layer=layer), "{")
    message = printed_by(capsys, ["table", "--out", str(store.root)])
    assert message.count("\n") == 1
    assert message.startswith("8 of 9 records cannot be shown: ")
    assert "and 3 more" in message


ERRORS = [
    ("table --metric top1_k1", 3, "--metric top1_k1 "),
    ("compare skip --facet cls", 3, "--facet cls "),
    ("report --dataset x", 3, "--dataset x "),
    ("table --task knn", 3, "no records of --task knn in "),
    *((f"table {flag}", 3, "1 of 2 records")
      for flag in ("--over-epochs", "--over-severity", "--layer 1")),
    # Only this is a mistake in the command.
    ("table --metric corlo", 2, "`--metric corloc`"),
]  # fmt: skip


def test_an_error_names_the_invalid_record(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    save(store, build_record(layer=0), np.arange(4) < 2)
    other = {"task": "knn", "metric": "top1_k1", "facet": "cls", "dataset": "x", "protocol": "y"}
    path = save_changed(store, build_record(layer=1, **other), {"ci95": [1.0, 2.0]})
    for command, code, word in ERRORS:
        message = expect_error(capsys, [*shlex.split(command), "--out", str(store.root)], code)

        assert word in message
        assert str(path) in message
        assert ("use `--metric corloc`" in message) == (code == 2)


def test_a_model_name_cannot_lead_out_of_the_report(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    for model in ("../../x", "..", "x" * 1000, "\n"):
        path = store.save(build_record(model=model))
        before = files_of(tmp_path)

        assert printed_by(capsys, ["report", "--out", str(store.root)]).count("\n") == 1

        new = files_of(tmp_path) - before
        assert {Path(name).parent.as_posix() for name in new} == {"results/report"}
        assert len([name for name in new if "checkpoint-" in name]) == 1
        assert path.is_file()
        path.unlink()
        shutil.rmtree(store.root / "report")


def test_a_task_name_cannot_lead_out_of_the_results(tmp_path):
    store = ResultStore(tmp_path / "a" / "b" / "results")
    names = ["../x", "..", ".", "", "a/b", "a\0b"]

    for name in (*names, "a\\b", "\ud800"):
        for field in ("task", "facet", "metric"):
            with pytest.raises(DataError):
                store.save(replace(build_record(), **{field: name}), np.zeros(60, bool))
    assert list(tmp_path.iterdir()) == []
    for name in names:
        path = store.save(replace(build_record(), dataset=name))
        assert path.resolve().parents[2] == (store.root / "records").resolve()


def test_pickled_per_image_values_are_never_run(tmp_path, capsys):
    store, mark = ResultStore(tmp_path), tmp_path / "mark"
    save(store, build_record(), np.arange(4) < 2)
    save(store, skipless(), np.arange(4) < 2)
    path = store.per_image_path(build_record())
    np.savez(path.open("wb"), np.array([Mark(mark)] * 4, dtype=object))

    assert str(path) in printed_by(capsys, ["report", "--out", str(tmp_path)])

    assert not mark.exists()
    # The pickle does run if it is loaded.
    np.load(path, allow_pickle=True)["arr_0"]
    assert mark.exists()


def test_encoders_of_the_same_name_are_distinguished_in_tables(workdir, capsys):
    voc(workdir)
    for seed, folder in enumerate(("one", "other")):
        (workdir / folder / "run").mkdir(parents=True)
        encoder_file(workdir / folder / "run/last.safetensors", seed=seed)
        assert (
            main(make_probe_args("tokencut", "voc2012", workdir, checkpoint=f"{folder}/run")) == 0
        )
    shas = sorted({record.encoder_id for record in records()})
    assert len(shas) == 2
    capsys.readouterr()
    for command in (["table"], ["compare", "one/run", "other/run"]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert all(f"run {sha[:6]}" in out for sha in shas)
    assert main(["compare", f"run {shas[0][:6]}", f"run {shas[1][:6]}"]) == 0
    capsys.readouterr()
    for name in ("run", "", "random:run"):
        message = expect_error(capsys, ["compare", name], 3)
        assert all(f"run {sha[:8]}" in message for sha in shas)
    pictures = Path("results/pictures/tokencut/voc2012-7").iterdir()
    assert [n.name.rpartition("-")[0] for n in sorted(pictures)] == [f"run-{s[:8]}" for s in shas]


def test_an_interval_without_ends_is_not_shown(tmp_path, capsys):
    ResultStore(tmp_path).save(build_record(ci95=(float("nan"), 43.0)))

    assert main(["table", "--out", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert "40.0" in out
    assert "nan" not in out


def test_means_of_different_numbers_of_seeds_state_them(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for seed, model in ((0, skipless), (0, build_record), (1, build_record)):
        store.save(model(seed=seed, value=40.0 + seed, ci95=None))
    table = ["table", "--out", str(tmp_path)]

    for more in (["text"], ["markdown"], ["latex"], ["text", "--pivot"], ["latex", "--pivot"]):
        assert main([*table, "--format", *more]) == 0
        out = capsys.readouterr().out
        assert "40.5 (2 seeds)" in out
        assert "40.0 (1 seed)" in out
    assert main([*table, "--format", "csv"]) == 0
    rows = csv.DictReader(capsys.readouterr().out.splitlines())
    assert sorted(row["seeds"] for row in rows) == ["0", "0 1"]
    assert main([*table, "--format", "json"]) == 0
    cells = json.loads(capsys.readouterr().out)[0]["cells"]
    assert sorted(one["seeds"] for one in cells) == [[0], [0, 1]]
    assert main(["report", "--out", str(tmp_path)]) == 0
    pages = "".join(path.read_text() for path in tmp_path.glob("report/*.html"))
    assert "(2 seeds)" in pages
    assert "(1 seed)" in pages
    # If all numbers of seeds are equal, they are not stated.
    store.save(skipless(seed=1))
    assert main(table) == 0
    assert "seeds)" not in capsys.readouterr().out


def test_committed_records_agree_with_themselves():
    packed = (Path(__file__).parents[2] / "results").rglob("records.parquet")
    stores = [ResultStore(path.parent) for path in packed]

    assert sum(len(store.records()) for store in stores) > 2000
    assert not any(store.unreadable for store in stores)


def test_guesses_state_the_values_that_were_used(workdir):
    voc(workdir)
    words = make_probe_args("segmentation", "voc2012", workdir)
    words[words.index("probe.protocol=fast")] = "probe.protocol=cutting_the_skip"

    assert main([*words, "probe.crops=resized", "probe.views=2", "probe.train_images=4"]) == 0

    guesses = "\n".join(records()[0].details["guesses"])
    assert "squashed to 32 x 32, those of training as crops=resized and views=2" in guesses
    assert "at most 4, drawn" in guesses
    assert "2 epochs" in guesses
    assert "512" not in guesses


def record_path(record: Record) -> Path:
    return ResultStore(Path("results")).path(record.key())


def test_a_damaged_record_is_computed_again(workdir, capsys):
    words = make_probe_args("knn", "class_folders", class_folders(workdir / "classes"))
    assert main(words) == 0
    path = next(Path("results").rglob("*top1_k1-*.json"))
    values = {(record.metric, record.value) for record in records()}
    text = path.read_text()
    contradicting = json.dumps(json.loads(text) | {"value": -5.0})
    for content in ("", text[: len(text) // 2], text[:-3], contradicting):
        path.write_text(content)
        capsys.readouterr()
        assert main(["table"]) == 0
        count = len(values)
        assert f"1 of {count} records cannot be shown: {path}: " in capsys.readouterr().err

        assert main(words) == 0

        assert f"records again: {path}: " in capsys.readouterr().err
        assert {(record.metric, record.value) for record in records()} == values
    only = Path("only")
    only.mkdir()
    shutil.copytree("results", only, dirs_exist_ok=True)
    for one in only.rglob("records/**/*.json"):
        one.write_text("{")
    assert "only/records/" in expect_error(capsys, ["table", "--out", "only"], 3)


def test_a_full_disk_leaves_no_part_of_a_record(workdir, capsys):
    with limit_file_size(500):
        assert "results/" in expect_error(
            capsys, make_probe_args("pca", "folder", workdir / "photos"), 5
        )
    assert main(make_probe_args("pca", "folder", workdir / "photos")) == 0
    (whole,) = records()

    with limit_file_size(300), pytest.raises(MachineError, match="cannot write results/records"):
        ResultStore(Path("results")).save(replace(whole, value=0.0))

    assert records() == [whole]
    assert not list(Path("results").rglob("*.tmp"))


def test_records_of_later_versions_are_read_and_not_computed_again(workdir, capsys):
    words = make_probe_args("pca", "folder", workdir / "photos")
    assert main(words) == 0
    (before,) = records()
    path = record_path(before)
    later = json.loads(path.read_text()) | {"version": "99.0", "energy_joule": 12.5}
    del later["record_sha256"]
    path.write_text(text_with_digest(later))
    capsys.readouterr()

    assert main(words) == 0

    assert "skipping 1 of 1 results" in capsys.readouterr().err
    assert path.read_text() == text_with_digest(later)
    assert [(record.value, record.version) for record in records()] == [(before.value, "99.0")]
    copy = path.with_name(f"{path.stem} (conflicted copy).json")
    copy.write_text(path.read_text())
    assert main(["table"]) == 0
    assert f"1 of 2 records cannot be shown: {copy}: " in capsys.readouterr().err
    assert len(records()) == 1


ALL = ("--layer", "all")


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("probed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        encoder_file(folder / "encoder.safetensors")
        voc(folder)
        assert main(make_probe_args("tokencut", "voc2012", Path(), *ALL)) == 0
        assert main(make_probe_args("retrieval", "voc2012", Path(), *ALL)) == 0
    return folder


@pytest.fixture
def results(probed, tmp_path, monkeypatch) -> ResultStore:
    monkeypatch.chdir(shutil.copytree(probed, tmp_path / "copy"))
    return ResultStore(Path("results"))


def count_more_correct_than_predicted(counts):
    changed = counts.copy()
    moved = counts[0, 1, 0] - counts[0, 0, 0] + 1
    # The IoU of each class and the sums over classes stay the same.
    changed[0, 1:, :2] += np.array([[-moved, moved], [moved, -moved]])
    return changed


DAMAGES = {
    "fewer images": lambda whole: whole[:-1],
    "another shape": lambda whole: whole[:, None].repeat(3, 1),
    "nan": lambda whole: np.full(len(whole), np.nan),
    "text": lambda whole: whole.astype(str),
    "one number": lambda whole: whole[0],
    "other values": lambda whole: ~whole,
    # These are valid counts of other predictions.
    "another order": lambda whole: whole[:, [0, 2, 2]],
    "more correct than predicted": count_more_correct_than_predicted,
    # The IoU of each class stays the same.
    "other pixels": lambda whole: np.concatenate([whole[:, [0, 2, 1], :1], whole[..., 1:]], 2),
}
CUTS = {"empty": 0, "cut": -1}


@pytest.mark.parametrize("damage", [*DAMAGES, *CUTS])
def test_mismatched_per_image_values_are_reported_and_not_used(results, capsys, damage):
    of_pixels = ("another order", "more correct than predicted", "other pixels")
    metric = "miou" if damage in of_pixels else "corloc"
    path = results.per_image_path(next(r for r in records() if r.metric == metric))
    if damage in CUTS:
        path.write_bytes(path.read_bytes()[: CUTS[damage]])
    else:
        changed = DAMAGES[damage](np.load(path)["arr_0"])
        np.savez_compressed(path.open("wb"), changed)
    compare = ["compare", "encoder", "--metric", metric]

    assert main(compare) == 0

    out, err = capsys.readouterr()
    assert err.count(str(path)) == 1
    assert re.findall(r"(?m)^ *(\d+) ", out) == ["1"]
    if damage == "cut":
        assert main(make_probe_args("tokencut", "voc2012", Path(), *ALL, "--overwrite")) == 0
        capsys.readouterr()
        assert main(compare) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert re.findall(r"(?m)^ *(\d+) ", out) == ["0", "1"]


def test_tables_name_records_that_contradict_their_per_image_values(results, capsys):
    record = next(record for record in records() if record.metric == "pixel_accuracy")
    path = record_path(record)
    older = json.loads(path.read_text()) | {"value": record.value - 1, "ci95": None}
    # Older versions saved no digest.
    del older["record_sha256"]
    path.write_text(json.dumps(older))
    capsys.readouterr()

    for words in (["table"], ["table", "--pivot"]):
        assert main(words) == 0
        assert capsys.readouterr().err.count(str(path.with_suffix(".npz"))) == 1
    edited = record_path(next(record for record in records() if record.metric == "miou"))
    edited.write_text(json.dumps(json.loads(edited.read_text()) | {"model": "another name"}))
    for command in ("table", "report"):
        assert main([command]) == 0
        assert f"1 of 6 records cannot be shown: {edited}: " in capsys.readouterr().err


def with_crc(line: dict[str, Any]) -> str:
    del line["crc32"]
    return json.dumps({**line, "crc32": zlib.crc32(json.dumps(line).encode())})


LINES = {
    "half": lambda line: line[: len(line) // 2],
    "zeros": lambda line: "\0" * len(line),
    "one and a half": lambda line: line[: len(line) // 2] + line,
    "no object": lambda line: f"[{len(line)}]",
    "no cells": lambda line: json.dumps(json.loads(line) | {"cells": 7}),
    "another digit": lambda line: line.replace('"largest_box": ', '"largest_box": 1'),
    "a key of another version": lambda line: with_crc({**json.loads(line), "mood": 1}),
}


def test_damaged_lines_of_the_discovery_log_are_computed_again(results):
    def found() -> dict[int, object]:
        return {r.layer: (r.value, r.details) for r in records() if r.task == "tokencut"}

    before = found()
    shutil.rmtree("results/records")
    (log,) = Path("results").rglob("*.jsonl")
    lines = log.read_text().splitlines()
    whole = lines[-len(LINES) :]
    damaged = [damage(line) for damage, line in zip(LINES.values(), whole, strict=True)]
    log.write_text("\n".join([*lines[: -len(LINES)], *damaged]) + "\n")

    assert main(make_probe_args("tokencut", "voc2012", Path(), *ALL)) == 0

    assert found() == before
    assert log.read_text().splitlines() == [*lines[: -len(LINES)], *damaged, *whole]


# Links, pipes and files that are no images, among results of unknown origin.

PICTURES = f"pictures/tokencut/toy/{get_figures_folder(build_record())}/reference"


def report_of(root: Path) -> set[str]:
    assert main(["report", "--out", str(root)]) == 0
    names = files_of(root / "report")
    assert not [name for name in names if b"the secret" in (root / "report" / name).read_bytes()]
    return {name for name in names if name.startswith("pictures/")}


@pytest.fixture
def root(tmp_path) -> Path:
    store = ResultStore(tmp_path / "results")
    store.save(build_record())
    save_pictures(store.root, PICTURES.removeprefix("pictures/") + "/good")
    (tmp_path / "secret").write_text("the secret")
    return store.root


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(2**33)


def make_faulty_tiles(path: Path) -> None:
    tiles = PngInfo()
    tiles.add_text(TILES, "not JSON")
    Image.new("L", (8, 8)).save(path, pnginfo=tiles)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("evil.png", lambda path: path.symlink_to(path.parents[5] / "secret"), "not followed"),
        ("evil.png", lambda path: path.symlink_to(path.with_name("good.png")), "a link"),
        ("folder", lambda path: path.symlink_to(path.parents[5]), "a link"),
        ("evil.png", os.mkfifo, "a folder, pipe or device"),
        ("evil.png", lambda path: path.write_text("the secret"), "not a PNG"),
        ("evil.png", make_faulty_tiles, "not a PNG"),
        ("evil.png", make_huge, "8,589,934,592 bytes"),
        ("evil.svg", lambda path: path.write_text("<svg/>"), "SVG"),
    ],
)
def test_a_report_leaves_out_and_names_what_is_no_picture(root, capsys, name, make, why):
    path = root / PICTURES / name
    make(path)

    assert report_of(root) == {f"{PICTURES}/good.png"}

    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"1 picture cannot be shown: {path}: ")
    assert why in message
    (page,) = (root / "report").glob("checkpoint-*.html")
    assert "evil" not in page.read_text()


def test_no_folder_of_pictures_is_reached_through_a_link(root, capsys):
    # The innermost folder first, because the outermost link hides it.
    for level in (4, 0):
        path = root.joinpath(*Path(PICTURES).parts[: level + 1])
        path.rename(root.parent / f"elsewhere{level}")
        path.symlink_to(root.parent / f"elsewhere{level}")

        assert report_of(root) == set()

        assert f"picture cannot be shown: {path}: a link" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "pipe", "below a link"])
@pytest.mark.parametrize("what", ["record", "per-image values", "ids"])
def test_records_and_per_image_values_are_not_read_through_links(tmp_path, capsys, what, kind):
    store = ResultStore(tmp_path / "results")
    save(store, build_record(layer=0), np.arange(4) < 2)
    save(store, skipless(layer=1), np.arange(4) < 2)
    store.save_image_ids(RECORD.dataset_fingerprint, ("a", "b"))
    path = {
        "record": store.path(build_record(layer=0).key()),
        "per-image values": store.per_image_path(build_record(layer=0)),
        "ids": store.root / "images" / f"{RECORD.dataset_fingerprint[:16]}.json",
    }[what]
    moved = path.parent if kind == "below a link" else path
    moved.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        moved.symlink_to(tmp_path / "elsewhere")

    no_record = kind == "below a link" and what != "ids"
    assert main(["report", "--out", str(store.root)]) == (3 if no_record else 0)

    message = capsys.readouterr().err
    if what == "record" or no_record:
        assert "pipe or device" in message if kind == "pipe" else "links are not" in message
    elif what == "per-image values":
        assert str(path) in message
    assert store.image_ids(RECORD.dataset_fingerprint) == (None if what == "ids" else ("a", "b"))
