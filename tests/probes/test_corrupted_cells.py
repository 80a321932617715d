"""Test the evaluation of encoders on corrupted images."""

import json
import sys
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import Record
from tests.support.faults import class_folders, expect_error, make_probe_args, records, voc

pytest.importorskip("imagecorruptions")


def knn_command(place: Path, *more: str) -> list[str]:
    if not (place / "classes").exists():
        class_folders(place / "classes")
    return make_probe_args("knn", "class_folders", place / "classes", *more)


def corruption_of(record: Record) -> str:
    corruption = record.settings.get("corrupted")
    return "clean" if corruption is None else f"{corruption['name']}:{corruption['severity']}"


def test_each_corruption_has_its_own_results_with_clean_training_images(workdir, capsys):
    words = knn_command(workdir, "corrupt=clean,snow:1,snow:5,fog:1")
    assert main(words) == 0
    assert main(words) == 0

    found = records()
    assert capsys.readouterr().err.count("skipping 4 of 4 results") == 4
    assert len({record.digest for record in found}) == len(found) == 16
    assert {corruption_of(record) for record in found} == {"clean", "snow:1", "snow:5", "fog:1"}
    assert len({record.dataset_fingerprint for record in found}) == 4
    assert len({record.trained_on for record in found}) == 1
    assert {r.dataset for r in found if corruption_of(r) == "fog:1"} == {"class_folders+fog-1"}
    (clean,) = {r.dataset_fingerprint for r in found if corruption_of(r) == "clean"}
    corrupted = [r.settings["corrupted"] for r in found if corruption_of(r) != "clean"]
    assert {(c["fingerprint"], c["dataset"]) for c in corrupted} == {(clean, "class_folders")}
    assert main(["table"]) == 0
    assert ", corrupted by snow 1, trained on clean images; " in capsys.readouterr().out


def test_stored_training_features_are_reused_for_every_corruption(workdir):
    words = make_probe_args("segmentation", "voc2012", voc(workdir / "voc"), "probe.panels=0")
    words += ["probe.tier=disk", "probe.cache=kept"]
    assert main(words) == 0
    times = {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*") if path.is_file()}

    assert main([*words, "corrupt=gaussian_noise:5"]) == 0

    assert times
    assert times == {p: p.stat().st_mtime_ns for p in Path("kept").rglob("*") if p.is_file()}
    assert {corruption_of(record) for record in records()} == {"clean", "gaussian_noise:5"}
    by_metric = [{r.value for r in records() if r.metric == m} for m in ("miou", "pixel_accuracy")]
    assert any(len(values) == 2 for values in by_metric)


def test_sweeps_have_one_job_with_its_command_per_corruption(workdir, capsys):
    words = knn_command(workdir, "corrupt=clean,all:3")[1:]
    assert main(["sweep", *words, "--dry-run", "--json"]) == 0

    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert len(jobs) == 15
    assert "corrupt" not in jobs[0]["command"]
    assert jobs[8]["command"].endswith("corrupt=snow:3")
    assert jobs[8]["dataset"] == "class_folders+snow-3"


def test_unreadable_images_are_left_out_of_clean_and_corrupted_scores(workdir):
    words = knn_command(workdir, "--on-bad-image", "skip", "corrupt=clean,snow:1")
    (workdir / "classes/val/cat/0.jpg").write_bytes(b"no picture")
    assert main(words) == 0

    by_name = {corruption_of(record): record for record in records()}
    assert {record.num_images for record in by_name.values()} == {5}
    corrupted = by_name["snow:1"].settings["corrupted"]
    assert corrupted["fingerprint"] == by_name["clean"].dataset_fingerprint


def test_corruptions_that_cannot_be_applied_are_refused(workdir, capsys, monkeypatch):
    unknown, known = (knn_command(workdir, f"corrupt={x}") for x in ("gausian_noise:3", "snow:1"))
    assert "`corrupt=gaussian_noise:3`" in expect_error(capsys, unknown, 2)
    # The missing package is noticed before the encoder is loaded.
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    Path("encoder.safetensors").unlink()
    assert "'ssl-bench[corruptions]'" in expect_error(capsys, known, 5)
    assert not Path("results").exists()
