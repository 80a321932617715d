"""Cells of corrupted images: identity, features on disk, plans, tables and what is refused."""

import json
import sys
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import Record
from tests.support.faults import class_folders, fails, probing, records, voc

pytest.importorskip("imagecorruptions")


@pytest.fixture(autouse=True)
def classes(place: Path) -> None:
    class_folders(place / "classes")


def corruption(record: Record) -> str:
    told = record.settings.get("corrupted")
    return "clean" if told is None else f"{told['name']}:{told['severity']}"


def test_each_corruption_is_a_cell_of_its_own_fitted_to_clean_images(place, capsys):
    words = probing("knn", "class_folders", place / "classes", "corrupt=clean,snow:1,snow:5,fog:1")
    assert main(words) == 0
    assert main(words) == 0

    found = records()
    assert capsys.readouterr().err.count("skipping 4 of 4 results") == 4
    assert len({record.digest for record in found}) == len(found) == 16
    assert {corruption(record) for record in found} == {"clean", "snow:1", "snow:5", "fog:1"}
    assert len({record.dataset_fingerprint for record in found}) == 4
    assert len({record.trained_on for record in found}) == 1
    assert {r.dataset for r in found if corruption(r) == "fog:1"} == {"class_folders+fog-1"}
    (clean,) = {r.dataset_fingerprint for r in found if corruption(r) == "clean"}
    told = [r.settings["corrupted"] for r in found if corruption(r) != "clean"]
    assert {one["fingerprint"] for one in told} == {clean}
    assert {one["dataset"] for one in told} == {"class_folders"}


def test_features_on_disk_of_training_images_serve_every_corruption(place, capsys):
    voc(place / "voc")
    words = probing("segmentation", "voc2012", place / "voc", "probe.cache=kept", "probe.panels=0")
    words += ["probe.tier=disk"]
    assert main(words) == 0
    kept = {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*") if path.is_file()}

    assert main([*words, "corrupt=gaussian_noise:5"]) == 0

    assert kept
    assert kept == {p: p.stat().st_mtime_ns for p in Path("kept").rglob("*") if p.is_file()}
    assert {corruption(record) for record in records()} == {"clean", "gaussian_noise:5"}
    by_metric = [{r.value for r in records() if r.metric == m} for m in ("miou", "pixel_accuracy")]
    assert any(len(values) == 2 for values in by_metric)


def test_a_sweep_has_a_job_for_each_corruption_with_its_own_command(place, capsys):
    words = probing("knn", "class_folders", place / "classes", "corrupt=clean,all:3")[1:]
    assert main(["sweep", *words, "--dry-run", "--json"]) == 0

    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert len(jobs) == 15
    assert "corrupt" not in jobs[0]["command"]
    assert jobs[8]["command"].endswith("corrupt=snow:3")
    assert jobs[8]["dataset"] == "class_folders+snow-3"


def test_tables_say_what_was_corrupted_and_what_was_not(place, capsys):
    assert main(probing("knn", "class_folders", place / "classes", "corrupt=snow:2")) == 0
    capsys.readouterr()
    assert main(["table"]) == 0

    said = capsys.readouterr().out
    assert ", corrupted by snow 2, trained on clean images; " in said


def test_images_that_cannot_be_read_are_left_out_of_both(place, capsys):
    (place / "classes/val/cat/0.jpg").write_bytes(b"no picture")
    words = probing("knn", "class_folders", place / "classes", "--on-bad-image", "skip")
    assert main([*words, "corrupt=clean,snow:1"]) == 0

    by_name = {corruption(record): record for record in records()}
    told = by_name["snow:1"].settings["corrupted"]
    assert {record.num_images for record in by_name.values()} == {5}
    assert told["fingerprint"] == by_name["clean"].dataset_fingerprint


@pytest.mark.parametrize(
    ("value", "why"),
    [("gausian_noise:3", "`corrupt=gaussian_noise:3`"), ("snow:0", "in 1 to 5, got 0")],
)
def test_what_is_no_corruption_is_one_line(place, capsys, value, why):
    words = probing("knn", "class_folders", place / "classes", f"corrupt={value}")

    assert why in fails(capsys, words, 2)
    assert not Path("results").exists()


def test_without_the_package_it_is_said_before_anything_is_loaded(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    Path("encoder.safetensors").unlink()

    words = probing("knn", "class_folders", place / "classes", "corrupt=snow:1")

    assert "pip install 'ssl-bench[corruptions]'" in fails(capsys, words, 5)
