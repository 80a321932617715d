"""Data whose sizes and times are trusted, and what says so."""

import os
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import ReadOptions, dataset_read_as, read_as
from ssl_bench.data.files.readable import RemainingImages
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.voc import Voc
from tests.support.faults import (
    class_folders,
    fails,
    photo_folder,
    pretraining,
    probing,
    records,
    voc,
)
from tests.support.repainting import repaint

BY_STAT = ReadOptions("stat")
pytestmark = pytest.mark.usefixtures("cache")


def test_sizes_and_times_are_trusted_where_that_is_asked_for(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos")

    def found() -> str:
        return read_as(ImageFolder(root).images(), BY_STAT).fingerprint()

    first = found()
    repaint(root / "1.jpg")
    assert found() == first
    os.utime(root / "1.jpg")
    assert found() != first
    assert not files_read


def test_every_kind_of_image_set_says_that_it_trusts_times(tmp_path):
    sets: list[Any] = [
        read_as(ImageFolder(photo_folder(tmp_path / "photos")).images(), BY_STAT),
        dataset_read_as(Voc(voc(tmp_path).parents[1]), BY_STAT).discovery(),
        dataset_read_as(ClassFolders(class_folders(tmp_path / "classes")), BY_STAT).val(),
    ]
    sets += [RemainingImages(images, (1, 2)) for images in sets]

    found = [images.fingerprint() for images in sets]
    assert all(fingerprint.startswith("stat-") for fingerprint in found)
    assert len({fingerprint[5:11] for fingerprint in found}) == 6


def test_numbers_that_trust_times_say_so_and_never_meet_others(place, capsys):
    words = probing("pca", "folder", place / "photos")
    assert main([*words, "data.fingerprint=stat"]) == 0
    trusting = capsys.readouterr()
    assert main(words) == 0
    reading = capsys.readouterr()

    note = "4 images, their files known by size and time alone; "
    assert note in trusting.out
    assert note not in reading.out
    assert "finished before" not in reading.err
    kinds = [record.dataset_fingerprint.startswith("stat-") for record in records()]
    assert sorted(kinds) == [False, True]
    assert main(["table"]) == 0
    assert "data stat-" in capsys.readouterr().out
    assert "expects content or stat" in fails(capsys, [*words, "data.fingerprint=times"], 2)


def test_a_run_may_trust_times_and_says_when_it_no_longer_does(place, capsys):
    run = pretraining(place / "photos", "run", "train.max_minutes=0.0")
    assert main([*run, "data.fingerprint=stat"]) == 0

    assert main([*run, "data.fingerprint=stat", "--resume"]) == 0
    said = fails(capsys, [*run, "--resume"], 2)

    assert "data.fingerprint: stat -> content" in said
    assert "image_files: stat-" in said
