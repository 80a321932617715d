"""Test the last lines that a command prints."""

import re

import pytest

from ssl_bench.cli.__main__ import main
from tests.support.faults import class_folders, encoder_file, expect_error, photo_folder

PHOTOS = ["--dataset", "folder", "--data-root", "photos", "--layer", "0", "probe.image_size=32"]


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "other")):
        encoder_file(tmp_path / f"{name}.safetensors", seed=seed)
    photo_folder(tmp_path / "photos", 4)
    class_folders(tmp_path / "classes")
    return tmp_path


def probe(task: str, *more: str) -> int:
    both = ["--checkpoint", "one.safetensors", "--checkpoint", "other.safetensors"]
    return main(["probe", "--task", task, *both, *more])


@pytest.mark.parametrize("task", ["pca", "attention"])
def test_the_number_of_images_without_a_figure_is_printed(capsys, task):
    assert probe(task, *PHOTOS, "probe.panels=3") == 0
    assert re.search(r"only 3 of 4 images are .*; use `--pictures 4`", capsys.readouterr().err)
    assert probe(task, *PHOTOS, "--pictures", "4", "--overwrite") == 0
    assert "of 4 images" not in capsys.readouterr().err


def test_compare_names_the_tasks_that_cannot_be_compared(capsys):
    assert probe("pca", *PHOTOS, "probe.panels=1") == 0
    expect_error(capsys, ["compare", "one", "one"], 2)
    line = expect_error(capsys, ["compare", "one", "other"], 3)
    assert "pca" in line
    assert "--overwrite" not in line

    classes = ["--dataset", "class_folders", "--data-root", "classes"]
    assert probe("knn", "probe.neighbours=[1]", *classes) == 0
    printed = capsys.readouterr().out
    assert "top1_k1" in printed
    # With two classes, top-5 accuracy is always 100 %.
    assert "top5_k1" not in printed

    assert main(["compare", "one", "other"]) == 0
    out, err = capsys.readouterr()
    assert "knn: top1_k1" in out
    assert "pca: " in err
    assert "ignored" not in err


def test_tables_without_options_show_the_main_metric_of_a_task(capsys):
    assert probe("geometry", *PHOTOS, "probe.views=2") == 0
    capsys.readouterr()

    assert main(["table"]) == 0

    printed = capsys.readouterr()
    assert printed.out.count("geometry: ") == 2
    assert printed.out.count("exceed 4, because") == 2
    assert "more tables of geometry: ssl-bench table --task geometry" in printed.err
    assert main(["table", "--task", "geometry"]) == 0
    assert capsys.readouterr().out.count("geometry: ") > 4
