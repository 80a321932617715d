"""Commands of a beginner's first hour, and their output."""

import io
import sys
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore

OWN = str(Path(__file__).parents[1] / "support/own_module.py")
PCA = "probe --task pca --checkpoint encoder.safetensors --dataset folder --data-root photos"
QUICK = {
    "knn": "--dataset toy_objects probe.neighbours=[4] dataset.num_train=8 dataset.num_val=2",
    "retrieval": "--dataset toy probe.memory_patches=60 dataset.num_train=2 dataset.num_val=1",
}


def said(capsys, words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(words.split()) == code
    return capsys.readouterr()


@pytest.mark.parametrize("layers", ["0-1", "-2..-1"])
def test_layers_may_be_a_range(workdir, capsys, layers):
    said(capsys, f"{PCA} --layer {layers} probe.image_size=32 probe.panels=1")

    assert sorted(record.layer for record in ResultStore(workdir / "results").records()) == [0, 1]
    assert "explained_variance" in said(capsys, "table --layer 0-1")[0]


def test_wrong_layers_are_refused_before_images_are_searched(workdir, capsys):
    words = "--checkpoint encoder.safetensors --dataset folder --data-root nowhere --layer 7"
    for layers in ("1-0", "0-7", "a-b", "-1..0"):
        assert "layers must " in said(capsys, f"probe --task pca {words[:-1]}{layers}", 2)[1]
    for command in ("probe --task all", "sweep", "features --out features"):
        assert "layers must " in said(capsys, f"{command} {words}", 2)[1]


def test_missing_files_of_encoders_get_their_hint(workdir, capsys):
    probed = "probe --task pca --checkpoint"
    assert ".onnx" in said(capsys, f"{probed} x.onnx", 4)[1]
    (workdir / "my_net.py").write_text("import torch\nfrom torch import nn\nclass MyNet:\n  pass\n")
    assert "`--checkpoint my_net.py:MyNet`" in said(capsys, f"{probed} my_net:MyNet", 4)[1]
    assert said(capsys, f"{probed} my_net.py:Nope", 4)[1].endswith("has no Nope, only MyNet\n")


@pytest.mark.parametrize("task", QUICK)
def test_the_only_image_size_of_an_encoder_is_no_new_setting(workdir, capsys, task):
    words = f"probe --task {task} --checkpoint {OWN}:own --layer -1 {QUICK[task]}"
    said(capsys, f"{words} probe.image_size=32")
    first = ResultStore(workdir / "results").records()

    assert "use `--overwrite`" in said(capsys, words)[1]
    assert ResultStore(workdir / "results").records() == first
    assert all("image_size" not in record.changed for record in first)
    said(capsys, f"{words} --out other")
    new = ResultStore(workdir / "other")
    assert [r.settings for r in new.records()] == [r.settings for r in first]


def test_a_message_names_the_tasks_that_ignore_a_key(workdir, capsys):
    err = said(capsys, PCA.replace("pca", "all") + " probe.image_size=32 --dry-run")[1]
    # Only tasks that run are named.
    assert err.count("probe.image_size=32 is ignored by tokencut\n") == 1
    assert "left out: folder has no boxes for discovery" in err
    words = PCA.replace("pca", "pca,conditioning") + " --dry-run --pictures 2"
    err = said(capsys, f"{words} probe.facet=key")[1]
    assert "probe.facet=key is ignored by conditioning" in err
    assert "panels" not in err
    for task in ("knn", "classification", "clustering"):
        words = f"probe --task {task} --dataset toy_objects --print-config"
        assert "is ignored" not in said(capsys, f"{words} probe.facet=attn_out")[1]


def test_keys_are_as_wide_as_the_terminal(workdir, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["keys", "probe.knn"]) == 0

    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("data.root=null  a path or null: ")
    assert any(line.startswith("    ") for line in lines)
