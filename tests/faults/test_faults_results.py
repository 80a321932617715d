"""Rows 43 to 45 and 50 of the catalogue of faults: folders of results; the page of promises."""

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.record import text_with_digest
from tests.support.faults import encoder_file, fails, probing, records, voc

ALL = ("--layer", "all")


def npz_of(record: Record) -> Path:
    return ResultStore(Path("results")).path(record.key()).with_suffix(".npz")


def more_right_than_predicted(counts):
    """Of the first class in the first image; its IoU stays, and so do the sums over classes."""
    changed = counts.copy()
    moved = counts[0, 1, 0] - counts[0, 0, 0] + 1
    changed[0, 1:, :2] += np.array([[-moved, moved], [moved, -moved]])
    return changed


DAMAGES = {
    "fewer images": lambda whole: whole[:-1],
    "another shape": lambda whole: whole[:, None].repeat(3, 1),
    "nan": lambda whole: np.full(len(whole), np.nan),
    "text": lambda whole: whole.astype(str),
    "one number": lambda whole: whole[0],
    "other values": lambda whole: ~whole,
    # As right, predicted, true they would be sound counts of something else.
    "another order": lambda whole: whole[:, [0, 2, 2]],
    # Predicted and true pixels of one class, which leaves its IoU.
    "more right than predicted": more_right_than_predicted,
    "other pixels": lambda whole: np.concatenate([whole[:, [0, 2, 1], :1], whole[..., 1:]], 2),
}
CUTS = {"empty": 0, "cut": -1}


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Path:
    """A folder with an encoder, images and what two tasks found of them."""
    folder = tmp_path_factory.mktemp("probed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        encoder_file(folder / "encoder.safetensors")
        voc(folder)
        assert main(probing("tokencut", "voc2012", Path(), *ALL)) == 0
        assert main(probing("retrieval", "voc2012", Path(), *ALL)) == 0
    return folder


@pytest.fixture
def again(probed, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, in which the test works."""
    monkeypatch.chdir(shutil.copytree(probed, tmp_path / "again"))
    return Path()


@pytest.mark.parametrize("damage", [*DAMAGES, *CUTS])
def test_fault_43_per_image_values_that_do_not_match_are_reported_and_unused(again, capsys, damage):
    of_pixels = ("another order", "more right than predicted", "other pixels")
    metric = "miou" if damage in of_pixels else "corloc"
    path = npz_of(next(record for record in records() if record.metric == metric))
    if damage in CUTS:
        path.write_bytes(path.read_bytes()[: CUTS[damage]])
    else:
        changed = DAMAGES[damage](np.load(path)["arr_0"])
        np.savez_compressed(path.open("wb"), changed)
    compare = ["compare", "encoder", "--metric", metric]

    assert main(compare) == 0

    came = capsys.readouterr()
    assert came.err.count(str(path)) == 1
    assert re.findall(r"(?m)^ *(\d+) ", came.out) == ["1"]
    if damage == "cut":
        assert main(probing("tokencut", "voc2012", again, *ALL, "--overwrite")) == 0
        capsys.readouterr()
        assert main(compare) == 0
        came = capsys.readouterr()
        assert came.err == ""
        assert re.findall(r"(?m)^ *(\d+) ", came.out) == ["0", "1"]


def test_fault_44_a_record_of_a_later_version_is_read_and_not_computed_again(place, capsys):
    arguments = probing("pca", "folder", place / "photos")
    assert main(arguments) == 0
    (before,) = records()
    path = ResultStore(Path("results")).path(before.key())
    later = json.loads(path.read_text()) | {"version": "99.0", "energy_joule": 12.5}
    del later["record_sha256"]
    path.write_text(text_with_digest(later))
    capsys.readouterr()

    assert main(arguments) == 0

    assert "skipping 1 of 1 results" in capsys.readouterr().err
    assert path.read_text() == text_with_digest(later)
    assert [(record.value, record.version) for record in records()] == [(before.value, "99.0")]


@pytest.mark.parametrize("change", [{}, {"seed": 1}, {"value": 99.0}])
def test_fault_44_a_copy_of_a_record_is_ignored(place, capsys, change):
    assert main(probing("pca", "folder", place / "photos")) == 0
    before = records()
    path = ResultStore(Path("results")).path(before[0].key())
    copy = path.with_name(f"{path.stem} (conflicted copy).json")
    copy.write_text(json.dumps(json.loads(path.read_text()) | change))
    capsys.readouterr()

    assert main(["table"]) == 0

    assert f"1 of 2 records cannot be shown: {copy}: " in capsys.readouterr().err
    assert records() == before


def test_fault_44_the_error_names_one_of_the_invalid_records(place, capsys):
    assert main(probing("pca", "folder", place / "photos")) == 0
    path = ResultStore(Path("results")).path(records()[0].key())
    path.write_text("{")

    said = fails(capsys, ["table"], 3)

    assert str(path) in said


def test_fault_45_two_encoders_of_one_name_have_two_columns(place, capsys):
    voc(place)
    for seed, folder in enumerate(("one", "other")):
        (place / folder / "run").mkdir(parents=True)
        encoder_file(place / folder / "run/last.safetensors", seed=seed)
        assert main(probing("tokencut", "voc2012", place, checkpoint=f"{folder}/run")) == 0
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
        assert all(f"run {sha[:8]}" in fails(capsys, ["compare", name], 3) for sha in shas)
    pictures = Path("results/pictures/tokencut/voc2012-7").iterdir()
    assert [n.name.rpartition("-")[0] for n in sorted(pictures)] == [f"run-{s[:8]}" for s in shas]


LINES = {
    "half": lambda line: line[: len(line) // 2],
    "zeros": lambda line: "\0" * len(line),
    "one and a half": lambda line: line[: len(line) // 2] + line,
    "no object": lambda line: f"[{len(line)}]",
    "no cells": lambda line: json.dumps(json.loads(line) | {"cells": 7}),
    "another digit": lambda line: line.replace('"largest_box": ', '"largest_box": 1'),
    "a key of another version": lambda line: signed({**json.loads(line), "mood": 1}),
}


def signed(line: dict[str, Any]) -> str:
    """A line with the CRC-32 of its content."""
    del line["crc32"]
    return json.dumps({**line, "crc32": zlib.crc32(json.dumps(line).encode())})


def test_fault_50_damaged_lines_of_the_log_are_computed_again(again):
    def found() -> dict[int, object]:
        return {r.layer: (r.value, r.details) for r in records() if r.task == "tokencut"}

    before = found()
    shutil.rmtree("results/records")
    (log,) = Path("results").rglob("*.jsonl")
    lines = log.read_text().splitlines()
    whole = lines[-len(LINES) :]
    spoilt = [damaged(line) for damaged, line in zip(LINES.values(), whole, strict=True)]
    log.write_text("\n".join([*lines[: -len(LINES)], *spoilt]) + "\n")

    assert main(probing("tokencut", "voc2012", again, *ALL)) == 0

    assert found() == before
    assert log.read_text().splitlines() == [*lines[: -len(LINES)], *spoilt, *whole]


@pytest.mark.parametrize("words", [[], ["--metric", "pixel_accuracy"], ["--pivot"]])
def test_a_table_names_an_older_record_that_does_not_match_its_images(again, capsys, words):
    record = next(record for record in records() if record.metric == "pixel_accuracy")
    path = ResultStore(Path("results")).path(record.key())
    older = json.loads(path.read_text()) | {"value": record.value - 1, "ci95": None}
    del older["record_sha256"]
    path.write_text(json.dumps(older))
    capsys.readouterr()

    assert main(["table", *words]) == 0

    assert capsys.readouterr().err.count(str(path.with_suffix(".npz"))) == 1


@pytest.mark.parametrize("command", ["table", "compare", "report"])
def test_an_edited_record_is_named_and_not_shown(again, capsys, command):
    record = next(record for record in records() if record.metric == "miou")
    path = ResultStore(Path("results")).path(record.key())
    edited = json.loads(path.read_text()) | {"model": "another name"}
    path.write_text(json.dumps(edited))
    capsys.readouterr()

    assert main([command, *(["encoder"] if command == "compare" else [])]) == 0

    assert f"1 of 6 records cannot be shown: {path}: " in capsys.readouterr().err
