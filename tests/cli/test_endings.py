"""What a probe says at its end, and what it advises: true, and of use when followed."""

import pytest

from ssl_bench.cli.__main__ import main
from tests.support.faults import class_folders, encoder_file, fails, photo_folder

PHOTOS = ["--dataset", "folder", "--data-root", "photos"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "other")):
        encoder_file(tmp_path / f"{name}.safetensors", seed=seed)
    photo_folder(tmp_path / "photos", 4)
    class_folders(tmp_path / "classes")
    return tmp_path


def probed(task: str, *more: str, data: list[str] = PHOTOS) -> list[str]:
    both = ["--checkpoint", "one.safetensors", "--checkpoint", "other.safetensors"]
    return ["probe", "--task", task, *both, *data, *more]


def test_images_that_are_left_out_are_counted(capsys):
    words = probed("pca", "--layer", "0", "probe.image_size=32")
    assert main([*words, "probe.panels=3"]) == 0
    assert "3 of 4 images are projected; use `--pictures 4`" in capsys.readouterr().err
    assert main([*words, "probe.panels=4", "--overwrite"]) == 0
    assert "of 4 images" not in capsys.readouterr().err


def test_what_cannot_be_compared_is_named_beside_what_can(capsys):
    assert main(probed("pca", "--layer", "0", "probe.image_size=32", "probe.panels=1")) == 0
    fails(capsys, ["compare", "one", "one"], 2)
    line = fails(capsys, ["compare", "one", "other"], 3)
    assert "pca: no per-image values are stored" in line
    assert "--overwrite" not in line

    classes = ["--dataset", "class_folders", "--data-root", "classes"]
    assert main(probed("knn", "probe.neighbours=[1]", data=classes)) == 0
    printed = capsys.readouterr().out
    assert "top1_k1" in printed
    # Of two classes every guess of five is right.
    assert "top5_k1" not in printed

    assert main(["compare", "one", "other"]) == 0
    out, err = capsys.readouterr()
    assert "knn: top1_k1" in out
    assert "left out: pca: no per-image values are stored" in err
    assert "ignored" not in err


def test_a_table_without_options_is_that_which_stands_for_its_task(capsys):
    words = ["--layer", "0", "probe.image_size=32", "probe.views=2"]
    assert main(probed("geometry", *words)) == 0
    capsys.readouterr()

    assert main(["table"]) == 0

    few = capsys.readouterr()
    assert few.out.count("geometry: ") == 2
    assert few.out.count("values cannot exceed 4, because there are so few images") == 2
    assert "more tables of geometry: ssl-bench table --task geometry" in few.err
    assert main(["table", "--task", "geometry"]) == 0
    assert capsys.readouterr().out.count("geometry: ") > 4
