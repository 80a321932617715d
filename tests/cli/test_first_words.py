"""What a beginner types in the first hour, and what is said of it."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.faults import class_folders

OWN = str(Path(__file__).parents[1] / "support/own_module.py")
PCA = "probe --task pca --checkpoint encoder.safetensors --dataset folder --data-root photos"
TOY = "--dataset toy --layer -1 dataset.num_train=8 dataset.num_val=2"


def said(capsys, words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(words.split()) == code
    return capsys.readouterr()


@pytest.mark.parametrize(
    ("layers", "expected"), [("0-1", [0, 1]), ("0..1", [0, 1]), ("0..-1", [0, 1]), ("-2..-2", [0])]
)
def test_layers_may_be_a_range(place, capsys, layers, expected):
    said(capsys, f"{PCA} --layer {layers}")
    assert sorted(record.layer for record in ResultStore(place / "results").records()) == expected

    assert "explained_variance" in said(capsys, "table --layer 0-1")[0]
    assert "0-3" in said_in_help(capsys, "probe")


@pytest.mark.parametrize("layers", ["1-0", "7", "0-7", "a-b", "-1..0"])
@pytest.mark.parametrize(
    "door", ["probe --task pca", "probe --task all", "sweep", "features --out features"]
)
def test_wrong_layers_are_refused_before_images_are_looked_for(place, capsys, door, layers):
    words = f"{door} --checkpoint encoder.safetensors --data-root nowhere --dataset folder"
    words += f" --layer {layers}"
    assert "layers must " in said(capsys, words, 2)[1]


def test_a_block_out_of_range_leaves_no_record_of_others(place, capsys):
    words = PCA.replace("pca", "all") + " --layer 0,9"
    assert "layers must lie in 0..1" in said(capsys, words, 2)[1]
    assert not (place / "results/records").exists()


def test_keys_are_as_wide_as_the_terminal(place, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["keys", "probe.knn"]) == 0

    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("data.root=null  a path or null: ")
    assert any(line.startswith("    ") for line in lines)


def test_files_of_encoders_that_are_not_there_get_their_hint(place, capsys):
    probed = "probe --task pca --checkpoint"
    assert ".onnx" in said(capsys, f"{probed} x.onnx", 4)[1]
    (place / "my_net.py").write_text("import torch\nfrom torch import nn\nclass MyNet:\n  pass\n")
    assert "did you mean my_net.py:MyNet?" in said(capsys, f"{probed} my_net:MyNet", 4)[1]
    line = said(capsys, f"{probed} my_net.py:Nope", 4)[1]
    assert line.endswith("my_net.py has no Nope; it has MyNet\n")


def test_checked_folders_of_classes_are_named(place, capsys):
    class_folders(place / "classes")
    out = said(capsys, "data check class_folders --data-root classes")[0]
    names = sorted(one.name for one in (place / "classes/train").iterdir())
    assert f"classes    {len(names)}: {', '.join(names)[:20]}" in out

    line = said(capsys, "data check folder photos", 2)[1]
    assert "a folder is given as --data-root photos" in line


def said_in_help(capsys, command: str) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("task", ["knn", "geometry", "retrieval", "pca"])
def test_the_only_size_of_an_encoder_is_no_other_question(place, capsys, task):
    quick = {"knn": " probe.neighbours=[4]", "retrieval": " probe.memory_patches=60"}.get(task, "")
    words = f"probe --task {task} --checkpoint {OWN}:own {TOY}{quick}"
    words = words.replace("toy", "toy_objects") if task == "knn" else words
    said(capsys, f"{words} probe.image_size=32")
    first = ResultStore(place / "results").records()

    assert "skipped" in said(capsys, words)[1]
    assert ResultStore(place / "results").records() == first
    assert all("image_size" not in record.changed for record in first)
    said(capsys, f"{words} --out other")
    settings = [r.settings for r in ResultStore(place / "other").records()]
    assert settings == [r.settings for r in first]


def test_records_that_tell_the_only_size_from_none_are_still_found(place, capsys):
    words = f"probe --task knn --checkpoint {OWN}:own {TOY} probe.neighbours=[4] --out new"
    words = words.replace("toy", "toy_objects")
    said(capsys, words)
    new, old = ResultStore(place / "new"), ResultStore(place / "old")
    for record in new.records():
        changed = {**record.changed, "image_size": 32}
        settings = {**record.settings, "image_size": 32}
        old.save(replace(record, settings=settings, changed=changed), new.per_image(record))

    for more in ("", " probe.image_size=32"):
        err = said(capsys, words.replace("new", "old") + more)[1]
        assert "2 of 2 scores finished before, skipped" in err
    assert len(old.records()) == 2


def test_a_key_says_which_tasks_it_does_not_concern(place, capsys):
    words = PCA.replace("pca", "pca,tokencut,correspondence") + " probe.image_size=32 --dry-run"
    err = said(capsys, words)[1]
    assert err.count("probe.image_size=32 does not concern tokencut\n") == 1
    assert "does not concern" not in said(capsys, f"{PCA} probe.image_size=32 --dry-run")[1]
    words = PCA.replace("pca", "pca,conditioning") + " --dry-run"
    assert (
        "probe.facet=key does not concern conditioning"
        in said(capsys, f"{words} probe.facet=key --pictures 2")[1]
    )
    assert "panels" not in said(capsys, f"{words} --pictures 2")[1]


def test_a_task_that_is_not_run_is_not_said_to_be_unconcerned(place, capsys):
    words = PCA.replace("pca", "all")
    err = said(capsys, f"{words} probe.image_size=32 --dry-run")[1]
    assert "probe.image_size=32 does not concern tokencut\n" in err
    assert "left out: folder has no boxes for discovery" in err


def test_one_facet_suits_all_tasks_that_have_one(place, capsys):
    tasks = "pca,correspondence,tokencut,discovery,geometry"
    words = f"probe --task {tasks} --checkpoint encoder.safetensors --dry-run"
    assert "does not concern" not in said(capsys, f"{words} probe.facet=attn_out")[1]
    for task in ("knn", "classification", "clustering"):
        words = f"probe --task {task} --dataset toy_objects --print-config"
        said(capsys, f"{words} probe.facet=attn_out")
