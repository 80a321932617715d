"""Test the estimates of how long a command will run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.estimates import extrapolate
from ssl_bench.results import ResultStore
from tests.support.faults import class_folders, encoder_file, photo_folder

DATA = ["--dataset", "class_folders", "--data-root", "photos", "--checkpoint", "tiny.safetensors"]
KNN = ["--task", "knn", *DATA]
# Number of training images and validation images together.
ALL = 20


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    encoder_file(Path("tiny.safetensors"))
    class_folders(Path("photos"), count=ALL // 4)


def run_knn(limit: int, *words: str, seconds: float, device: str = "cpu: one") -> None:
    store = ResultStore(Path("results"))
    known = [record.digest for record in store.records()] if store.root.exists() else []
    assert main(["probe", *KNN, "--limit", str(limit), *words]) == 0
    for record in store.records():
        if record.digest not in known:
            created = f"2026-01-0{limit}T12:00:00+00:00"
            changed = replace(record, seconds=float(seconds), device=device, created=created)
            store.save(changed, store.load_per_image(record))


def plan(capsys, *words: str) -> tuple[list[float | None], list[str]]:
    capsys.readouterr()
    assert main(["sweep", *words, "--dry-run", "--json"]) == 0
    seconds = [job["estimated_seconds"] for job in json.loads(capsys.readouterr().out)["jobs"]]
    assert main(["probe", *words, "--dry-run"]) == 0
    return seconds, capsys.readouterr().out.splitlines()


def test_time_grows_linearly_with_scored_and_training_images(capsys):
    assert plan(capsys, *KNN)[0] == [None]
    run_knn(2, seconds=100 + 4 * 10)
    # With a single measurement, the time is proportional to the number of images.
    assert plan(capsys, *KNN)[0] == [pytest.approx(140 / 4 * ALL)]
    run_knn(5, seconds=100 + 10 * 10)

    seconds, lines = plan(capsys, *KNN)

    assert seconds == [pytest.approx(100 + ALL * 10)]
    assert lines[0].split()[-1] == "time"
    assert lines[1].endswith(" 5 min")
    assert lines[2].endswith("pending, about 5 min")


@pytest.mark.parametrize(
    ("earlier", "planned"),
    [
        (["probe.image_size=24"], []),
        (["--layer", "0"], []),
        (["dtype=bfloat16"], []),
        # The earlier images are not among those of the plan.
        ([], ["data.first=1"]),
    ],
)
def test_results_of_other_settings_blocks_or_images_are_not_used(capsys, earlier, planned):
    run_knn(3, *earlier, seconds=60)

    seconds, lines = plan(capsys, *KNN, *planned)

    assert seconds == [None]
    assert lines[0].split()[-1] == "pending"


def test_only_the_device_of_the_last_run_counts(capsys):
    run_knn(2, seconds=6000, device="cpu: slow")
    run_knn(5, seconds=10, device="cuda: fast")

    assert plan(capsys, *KNN)[0] == [pytest.approx(ALL)]
    store = ResultStore(Path("results"))
    for record in store.records():
        if record.device == "cpu: slow":
            store.save(replace(record, created="2027"), store.load_per_image(record))
    assert plan(capsys, *KNN)[0] == [pytest.approx(6000 / 4 * ALL)]


def test_finished_jobs_take_no_time_and_unknown_times_are_named(capsys):
    run_knn(5, seconds=300)
    tasks = ["--task", "knn,clustering", *DATA]

    (knn, clustering), lines = plan(capsys, *tasks)

    assert (knn, clustering) == (pytest.approx(600), None)
    assert [line.split()[-1] for line in lines[1:3]] == ["min", "unknown"]
    assert "about 10 min without the jobs of unknown time" in lines[-1]
    assert main(["probe", *KNN]) == 0
    assert plan(capsys, *tasks)[0] == [0.0, None]


def test_images_whose_results_are_copied_take_no_time(capsys):
    photo_folder(Path("images"), 8)
    words = ["--task", "tokencut", "--dataset", "folder", "--data-root", "images", *DATA[4:]]
    store, known = ResultStore(Path("results")), set[str]()
    for limit, seconds in ((2, 10.0), (5, 30.0)):
        assert main(["probe", *words, "--limit", str(limit)]) == 0
        for record in store.records():
            if record.digest not in known:
                created = f"2026-01-0{limit}T12:00:00+00:00"
                store.save(replace(record, seconds=seconds, created=created))
                known.add(record.digest)

    # The second run searched three new images in 30 s, so the remaining three take 30 s as well.
    assert plan(capsys, *words)[0] == [pytest.approx(30)]


def test_times_that_shrink_or_are_negative_are_not_extrapolated():
    assert extrapolate({8: 30.0, 16: 29.0}, 100) == 29.0
    assert extrapolate({10: 20.0, 20: 30.0, 30: 40.0}, 100) == pytest.approx(110.0)
    assert extrapolate({2: 10.0, 3: 30.0}, 0) == 0.0
