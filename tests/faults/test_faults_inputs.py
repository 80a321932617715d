"""Rows 83 to 85 of the catalogue of faults: what is taken for data, and what is scored on it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pretrain.options import DataOptions
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.toy import Toy
from ssl_bench.errors import DataError
from tests.support.faults import (
    class_folders,
    fails,
    paired_folders,
    picture,
    pretraining,
    probing,
    records,
    supervised,
    voc,
)

NO_TIME = "train.max_minutes=0.0"


def flat(root: Path, count: int = 5) -> Path:
    """Classes directly below the root, one of them called train."""
    for kind, seed in (("cat", 0), ("train", 50)):
        (root / kind).mkdir(parents=True)
        for number in range(count):
            picture(seed + number).save(root / kind / f"{number}.png")
    return root


def test_fault_83_pictures_of_one_task_are_no_photographs_of_the_next(place, capsys):
    photos = place / "photos"
    for out in ("photos/results", "photos/a/b", "photos"):
        assert main(probing("pca", "folder", photos, "--out", out)) == 0
        assert main(probing("correspondence", "folder", photos, "--out", out)) == 0

        assert list((place / out).rglob("*.png"))
        assert {record.num_images for record in records(out)} == {4}
        assert len(ImageFolder(photos).images()) == 4
    assert "because ssl-bench wrote" in capsys.readouterr().err


def test_fault_83_what_was_written_is_known_wherever_it_lies(place):
    photos = place / "photos"
    assert main(probing("pca", "folder", photos)) == 0
    for moved in ("old", "old/kept/deep"):
        shutil.copytree("results/pictures/pca", photos / moved / "as_one_likes")
    shutil.copytree("results", photos / "before", ignore=shutil.ignore_patterns(".ssl-bench-*"))
    (photos / "link").symlink_to(place / "results")
    assert main(["report", "--out", "results", "--into", "photos/page"]) == 0
    Toy(1, 1, cache=photos / "cache").images()

    assert list((photos / "page").rglob("*.png"))
    assert len(ImageFolder(photos).images()) == 4
    # None by its name.
    for name in ("results/pictures", "records", "pictures", "runs/images"):
        (photos / name).mkdir(parents=True)
        picture(9).save(photos / name / "own.png")
    assert len(ImageFolder(photos).images()) == 8


def test_fault_83_every_layout_passes_over_what_was_written(place):
    classes = class_folders(place / "classes")
    parts = paired_folders(place / "parts", {"train/city": "a"})
    photos = place / "photos"
    assert main(probing("pca", "folder", photos)) == 0
    for folder in (classes / "train/cat", parts / "masks/train", parts / "images/train/city"):
        shutil.copytree("results", folder / "results")

    named = ImageMaskFolders(parts, class_names=[str(n) for n in range(9)])

    assert len(ClassFolders(classes).train()) == 6
    assert named.train().ids == ("city/a",)
    assert len(DataOptions(str(classes)).open()) == 12


def test_fault_83_tasks_of_a_command_see_one_list(place, monkeypatch):
    photos = place / "photos"
    once = ImageFolder.images
    listed = []

    def images(self):
        listed.append(self.root)
        picture(40 + len(listed)).save(photos / f"new{len(listed)}.jpg")
        return once(self)

    monkeypatch.setattr(ImageFolder, "images", images)

    assert main(probing("pca", "folder", photos, "--task", "pca,correspondence")) == 0

    assert len(listed) == 1
    assert {record.num_images for record in records()} == {5}


TASKS = ("knn", "classification", "clustering", "segmentation", "retrieval")


def fitted_to(place: Path, task: str, how: str) -> tuple[str, Path, Path]:
    """A dataset one of whose scored images is a training image; its root, and both images."""
    if task in ("segmentation", "retrieval", "clustering"):
        base = voc(place / "data")
        train, val = base / "JPEGImages/t1.jpg", base / "JPEGImages/v2.jpg"
        name = "voc2012"
    else:
        base = class_folders(place / "data")
        train, val = base / "train/cat/1.jpg", base / "val/dog/0.jpg"
        name = "class_folders"
    val.unlink()
    if how == "copy":
        shutil.copy(train, val)
    elif how == "link":
        val.symlink_to(train)
    else:
        os.link(train, val)
    return name, train, val


@pytest.mark.parametrize("task", TASKS)
def test_fault_84_an_image_is_not_scored_that_was_fitted_to(place, capsys, task):
    dataset, train, val = fitted_to(place, task, "copy")
    more = ["probe.protocol=patches"] if task == "clustering" else []
    words = probing(task, dataset, place / "data", *more)

    said = fails(capsys, words, 3)

    assert f"training image {train} is identical to the scored image {val}" in said
    assert "1 of " in said
    assert not list(Path("results/records").rglob("*.json"))
    assert main([*words, "data.allow_overlap=true"]) == 0
    assert {record.settings["fitted_and_scored"] for record in records()} == {1}


@pytest.mark.parametrize("how", ["link", "hard link"])
@pytest.mark.parametrize("kind", ["content", "stat"])
def test_fault_84_links_are_seen_whatever_files_are_known_by(place, capsys, how, kind):
    dataset, _, _ = fitted_to(place, "knn", how)

    said = fails(capsys, probing("knn", dataset, place / "data", f"data.fingerprint={kind}"), 3)

    assert "data.allow_overlap=true" in said


@pytest.mark.parametrize("view", [["--on-bad-image", "skip"], ["--limit", "6"], ["corrupt=snow:1"]])
def test_fault_84_views_of_a_dataset_hide_nothing(place, capsys, view):
    data = class_folders(place / "data")
    shutil.rmtree(data / "val")
    (data / "val").symlink_to("train")

    said = fails(capsys, probing("knn", "class_folders", data, *view), 3)

    assert "6 of 6 scored images" in said


def test_fault_84_without_shared_files_permission_changes_no_cell(place, capsys):
    words = probing("knn", "class_folders", class_folders(place / "data"))
    assert main(words) == 0

    assert main([*words, "data.allow_overlap=true"]) == 0

    assert "that already exist" in capsys.readouterr().err


@pytest.mark.parametrize("seen", ["val is train", "head"])
def test_fault_84_the_monitor_scores_nothing_that_was_fitted_to(place, capsys, seen):
    data = class_folders(place / "data")
    if seen == "head":
        # The same pictures elsewhere, of which others are apart.
        shutil.copytree(data, place / "monitored")
        shutil.rmtree(place / "monitored/val")
        (place / "monitored/train").rename(place / "monitored/val")
        shutil.copytree(data / "val", place / "monitored/train")
        words = supervised(data, "run", "monitor.root=monitored", "monitor.accuracy_epochs=1")
    else:
        shutil.rmtree(data / "val")
        shutil.copytree(data / "train", data / "val")
        words = pretraining(data, "run", "monitor.knn_epochs=1", "monitor.neighbours=1")

    said = fails(capsys, words, 3)

    assert "6 of 6 scored images" in said
    assert main([*words, "data.allow_overlap=true", NO_TIME]) == 0


def test_fault_85_classes_below_the_root_are_taken_apart(place, capsys):
    root = flat(place / "set")

    assert main(probing("knn", "class_folders", root)) == 0

    (record,) = {(r.split, r.settings["trained_on"]["split"], r.num_images) for r in records()}
    assert record == ("all:80-100%", "all:0-80%", 2)
    assert "each folder is a class" in capsys.readouterr().err
    halves = ["dataset.train_split=all:0-50%", "dataset.val_split=all:50-100%", "--out", "half"]
    assert main(probing("knn", "class_folders", root, *halves)) == 0
    assert {r.num_images for r in records("half")} == {6}


def test_fault_85_supervised_runs_learn_from_all_classes_below_the_root(place, capsys):
    root = flat(place / "set")
    words = supervised(root, "run", NO_TIME)

    assert main(words) == 0

    assert len(DataOptions(str(root), labels=True).open()) == 10
    # Those that its monitor would score.
    scored = [*words, "--overwrite", "monitor.accuracy_epochs=1"]
    assert "2 of 2 scored images" in fails(capsys, scored, 3)


def test_fault_85_the_monitor_takes_classes_below_its_root(place):
    root = flat(place / "set")
    more = ["monitor.knn_epochs=1", f"monitor.root={root}", "monitor.neighbours=1"]
    more += ["train.max_steps=2"]

    assert main(pretraining(place / "photos", "run", *more)) == 0

    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert "knn_top1" in rows[-1]


def test_fault_85_results_and_splits_are_no_classes(place):
    root = flat(place / "set")
    assert main(probing("pca", "folder", root, "--out", "set/results")) == 0
    assert ClassFolders(root).train().class_names == ("cat", "train")
    for split in ("val", "test"):
        (root / split).mkdir()
        picture(0).save(root / split / "1.png")
        with pytest.raises(DataError, match="is in no class folder"):
            ClassFolders(root).train()
        shutil.rmtree(root / split)


def test_fault_85_hints_name_keys_that_a_command_has(place, capsys):
    data = class_folders(place / "data")
    (data / "train").rename(data / "training")

    said = fails(capsys, supervised(data, "run"), 3)

    assert f"data.root={data / 'training'}" in said
    assert "dataset." not in said
    words = [word for word in supervised(data, "run") if word not in ("--data-root", str(data))]
    assert main([*words, f"data.root={data / 'training'}", NO_TIME]) == 0
    watched = ["monitor.knn_epochs=1", f"monitor.root={data}"]
    said = fails(capsys, pretraining(data / "training", "other", *watched), 3)
    assert "monitor.train_split=training:0-75%" in said
    assert "dataset." not in said


def test_fault_85_a_class_too_small_for_two_splits_is_named(place, capsys):
    root = flat(place / "set")
    for number in range(4):
        (root / "cat" / f"{number}.png").unlink()

    said = fails(capsys, probing("knn", "class_folders", root), 3)

    assert "too few images of the class cat" in said
