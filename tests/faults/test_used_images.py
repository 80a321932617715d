"""Images that a command uses: none that ssl-bench wrote, and none both to train and score."""

import os
import shlex
import shutil
from functools import partial
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
    Fault,
    check_fault,
    class_folders,
    each,
    expect_error,
    paired_folders,
    picture,
    pretraining,
    probing,
    records,
    supervised,
    voc,
)
from tests.support.runs import log_rows

ONE_STEP = "train.max_minutes=0.0"
ALLOW = "data.allow_overlap=true"


def probe(task: str, dataset: str, *more: str) -> str:
    return shlex.join(probing(task, dataset, Path("data"), *more))


def flat_class_folders(root: Path) -> Path:
    """Create two classes directly below the root. One of them is called train."""
    for name, seed in (("cat", 0), ("train", 50)):
        (root / name).mkdir(parents=True)
        for number in range(5):
            picture(seed + number).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("out", ["photos/results", "photos"])
def test_written_pictures_are_no_input_of_the_next_command(workdir, capsys, out):
    assert main(probing("pca", "folder", workdir / "photos", "--out", out)) == 0

    assert list((workdir / out).rglob("*.jpg.png"))
    assert main(probing("correspondence", "folder", workdir / "photos", "--out", out)) == 0
    assert {record.num_images for record in records(out)} == {4}
    assert "because ssl-bench wrote" in capsys.readouterr().err


def test_written_files_are_recognised_in_any_folder(workdir):
    photos = workdir / "photos"
    assert main(probing("pca", "folder", photos)) == 0
    for moved in ("old", "old/kept/deep"):
        shutil.copytree("results/pictures/pca", photos / moved / "any_name")
    shutil.copytree("results", photos / "before", ignore=shutil.ignore_patterns(".ssl-bench-*"))
    (photos / "link").symlink_to(workdir / "results")
    (photos / "loop").symlink_to(photos)
    assert main(["report", "--out", "results", "--into", "photos/page"]) == 0
    Toy(1, 1, cache=photos / "cache").images()

    assert list((photos / "page").rglob("*.png"))
    assert len(ImageFolder(photos).images()) == 4
    # The name of a folder alone does not matter.
    for name in ("results/pictures", "records", "pictures", "runs/images"):
        (photos / name).mkdir(parents=True)
        picture(9).save(photos / name / "own.png")
    assert len(ImageFolder(photos).images()) == 8

    classes = class_folders(workdir / "classes")
    pairs = paired_folders(workdir / "pairs", {"train/city": "a"})
    for folder in (classes / "train/cat", pairs / "masks/train", pairs / "images/train/city"):
        shutil.copytree("results", folder / "results")
    named = ImageMaskFolders(pairs, class_names=[str(n) for n in range(9)])
    assert len(ClassFolders(classes).train()) == 6
    assert named.train().ids == ("city/a",)
    assert len(DataOptions(str(classes)).open()) == 12


def test_all_tasks_of_a_command_use_the_same_list_of_images(workdir, monkeypatch):
    photos = workdir / "photos"
    list_images, calls = ImageFolder.images, []

    def images(self):
        calls.append(self.root)
        picture(40 + len(calls)).save(photos / f"new{len(calls)}.jpg")
        return list_images(self)

    monkeypatch.setattr(ImageFolder, "images", images)

    assert main(probing("pca", "folder", photos, "--task", "pca,correspondence")) == 0

    assert len(calls) == 1
    assert {record.num_images for record in records()} == {5}


def repeat_an_image(dataset: str, how: str, folder: Path) -> None:
    """Create a dataset in `data` and replace a scored image by a training image."""
    if dataset == "voc2012":
        base, names = voc(folder / "data"), ("JPEGImages/t1.jpg", "JPEGImages/v2.jpg")
    else:
        base, names = class_folders(folder / "data"), ("train/cat/1.jpg", "val/dog/0.jpg")
    train, val = (base / name for name in names)
    val.unlink()
    make = {"copy": shutil.copy, "link": lambda one, other: other.symlink_to(one), "hard": os.link}
    make[how](train, val)


def repeat_all_images(folder: Path) -> None:
    data = class_folders(folder / "data")
    shutil.rmtree(data / "val")
    shutil.copytree(data / "train", data / "val")


def monitor_training_images(folder: Path) -> None:
    """Create training images and a monitored dataset that scores the same images."""
    data = class_folders(folder / "data")
    shutil.copytree(data / "train", folder / "monitored/val")
    shutil.copytree(data / "val", folder / "monitored/train")


def repeated(task: str, dataset: str, how: str, *more: str, remedy: str = "") -> Fault:
    prepare = partial(repeat_an_image, dataset, how)
    words = ("t1.jpg", "v2.jpg") if dataset == "voc2012" else ("train/cat/1.jpg", "val/dog/0.jpg")
    name = " ".join(["a repeated image:", task, how, *more])
    return Fault(name, prepare, probe(task, dataset, *more), 3, words, ALLOW, remedy)


MONITORED = supervised(Path("data"), "run", "monitor.root=monitored", "monitor.accuracy_epochs=1")
NEIGHBOURS = pretraining(Path("data"), "run", "monitor.knn_epochs=1", "monitor.neighbours=1")
ALL = "6 of 6 scored images"
OVERLAPS = [
    repeated("knn", "class_folders", "copy", remedy=ALLOW),
    repeated("classification", "class_folders", "copy"),
    repeated("clustering", "voc2012", "copy", "probe.protocol=patches"),
    repeated("segmentation", "voc2012", "copy"),
    repeated("retrieval", "voc2012", "copy", remedy=ALLOW),
    repeated("knn", "class_folders", "link", "data.fingerprint=content"),
    repeated("knn", "class_folders", "link", "data.fingerprint=stat"),
    repeated("knn", "class_folders", "hard", "data.fingerprint=stat"),
    Fault("unreadable images are skipped", repeat_all_images,
          probe("knn", "class_folders", "--on-bad-image", "skip"), 3, ALL, ALLOW),
    Fault("a limited number", repeat_all_images,
          probe("knn", "class_folders", "--limit", "6"), 3, ALL, ALLOW),
    Fault("corrupted images", repeat_all_images,
          probe("knn", "class_folders", "corrupt=snow:1"), 3, ALL, ALLOW),
    Fault("a monitor that scores training images", monitor_training_images,
          shlex.join(MONITORED), 3, ALL, ALLOW, remedy=f"{ALLOW} {ONE_STEP}"),
    Fault("a monitor whose neighbours are scored", repeat_all_images,
          shlex.join(NEIGHBOURS), 3, ALL, ALLOW, remedy=f"{ALLOW} {ONE_STEP}"),
]  # fmt: skip


@each(OVERLAPS)
def test_an_image_is_not_fitted_to_and_scored(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)

    if fault.remedy == ALLOW:
        assert {record.settings["fitted_and_scored"] for record in records()} == {1}


def test_permission_to_overlap_changes_nothing_without_overlap(workdir, capsys):
    words = probing("knn", "class_folders", class_folders(workdir / "data"))
    assert main(words) == 0

    assert main([*words, ALLOW]) == 0

    assert "that already exist" in capsys.readouterr().err


def test_classes_below_the_root_are_split_80_to_20(workdir, capsys):
    root = flat_class_folders(workdir / "data")

    assert main(probing("knn", "class_folders", root)) == 0

    (record,) = {(r.split, r.settings["trained_on"]["split"], r.num_images) for r in records()}
    assert record == ("all:80-100%", "all:0-80%", 2)
    assert "each folder is a class" in capsys.readouterr().err
    halves = ["dataset.train_split=all:0-50%", "dataset.val_split=all:50-100%", "--out", "half"]
    assert main(probing("knn", "class_folders", root, *halves)) == 0
    assert {r.num_images for r in records("half")} == {6}
    assert main(probing("pca", "folder", root, "--out", "data/results")) == 0
    assert ClassFolders(root).train().class_names == ("cat", "train")
    for split in ("val", "test"):
        (root / split).mkdir()
        picture(0).save(root / split / "1.png")
        with pytest.raises(DataError, match="is in no class folder"):
            ClassFolders(root).train()
        shutil.rmtree(root / split)
    for number in range(4):
        (root / "cat" / f"{number}.png").unlink()
    assert "class cat" in expect_error(capsys, probing("knn", "class_folders", root), 3)


def test_pretraining_uses_all_classes_below_the_root(workdir, capsys):
    root = flat_class_folders(workdir / "data")
    assert len(DataOptions(str(root), labels=True).open()) == 10
    # The monitor would score images of the same folder.
    scored = supervised(root, "run", "monitor.accuracy_epochs=1")
    assert "2 of 2 scored images" in expect_error(capsys, scored, 3)
    more = ["monitor.knn_epochs=1", f"monitor.root={root}", "monitor.neighbours=1"]

    words = pretraining(workdir / "photos", "run", *more, "train.max_steps=2")
    assert main(words) == 0

    assert "knn_top1" in log_rows("run")[-1]


def test_recommended_splits_use_keys_of_the_command(workdir, capsys):
    data = class_folders(workdir / "data")
    (data / "train").rename(data / "training")

    message = expect_error(capsys, supervised(data, "run"), 3)

    assert f"data.root={data / 'training'}" in message
    assert "dataset." not in message
    words = [word for word in supervised(data, "run") if word not in ("--data-root", str(data))]
    assert main([*words, f"data.root={data / 'training'}", ONE_STEP]) == 0
    watched = ["monitor.knn_epochs=1", f"monitor.root={data}"]
    message = expect_error(capsys, pretraining(data / "training", "other", *watched), 3)
    assert "monitor.train_split=training:0-75%" in message
    assert "dataset." not in message
