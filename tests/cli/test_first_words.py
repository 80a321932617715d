"""Test basic flags such as `--layers` and `--dry-run`."""

import io
import re
import sys
from pathlib import Path

import pytest
import yaml

from ssl_bench.cli.__main__ import main
from ssl_bench.planning import plan_request
from ssl_bench.request import ProbeRequest
from tests.support.faults import expect_error, make_pretrain_args, records

OWN = str(Path(__file__).parents[1] / "support/own_module.py")
PCA = "probe --task pca --checkpoint encoder.safetensors --dataset folder --data-root photos"
QUICK = {
    "knn": "--dataset toy_objects probe.neighbours=[4] dataset.num_train=8 dataset.num_val=2",
    "retrieval": "--dataset toy probe.memory_patches=60 dataset.num_train=2 dataset.num_val=1",
}


def run_words(capsys, words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(words.split()) == code
    return capsys.readouterr()


@pytest.mark.parametrize("layers", ["0-1", "-2..-1"])
def test_layers_may_be_a_range(workdir, capsys, layers):
    run_words(capsys, f"{PCA} --layer {layers} probe.image_size=32 probe.panels=1")

    assert sorted(record.layer for record in records()) == [0, 1]
    assert "explained_variance" in run_words(capsys, "table --layer 0-1")[0]


def test_wrong_layers_are_refused_before_images_are_searched(workdir, capsys):
    words = "--checkpoint encoder.safetensors --dataset folder --data-root nowhere --layer 7"
    for layers in ("1-0", "0-7", "a-b", "-1..0"):
        assert "layers must " in run_words(capsys, f"probe --task pca {words[:-1]}{layers}", 2)[1]
    for command in ("probe --task all", "sweep", "features --out features"):
        assert "layers must " in run_words(capsys, f"{command} {words}", 2)[1]


def test_missing_files_of_encoders_get_their_hint(workdir, capsys):
    probed = "probe --task pca --checkpoint"
    assert ".onnx" in run_words(capsys, f"{probed} x.onnx", 4)[1]
    (workdir / "my_net.py").write_text("import torch\nfrom torch import nn\nclass MyNet:\n  pass\n")
    assert "`--checkpoint my_net.py:MyNet`" in run_words(capsys, f"{probed} my_net:MyNet", 4)[1]
    assert run_words(capsys, f"{probed} my_net.py:Nope", 4)[1].endswith("has no Nope, only MyNet\n")


@pytest.mark.parametrize("task", QUICK)
def test_the_only_possible_image_size_is_no_changed_setting(workdir, capsys, task):
    words = f"probe --task {task} --checkpoint {OWN}:own --layer -1 {QUICK[task]}"
    run_words(capsys, f"{words} probe.image_size=32")
    first = records()

    assert "use `--overwrite`" in run_words(capsys, words)[1]
    assert records() == first
    assert all("image_size" not in record.changed for record in first)
    run_words(capsys, f"{words} --out other")
    assert [r.settings for r in records("other")] == [r.settings for r in first]


@pytest.mark.slow
def test_a_message_names_the_tasks_that_ignore_a_key(workdir, capsys):
    err = run_words(capsys, PCA.replace("pca", "all") + " probe.image_size=32 --dry-run")[1]
    # Only tasks that run are named.
    assert err.count("probe.image_size=32 is ignored by tokencut\n") == 1
    assert "left out: folder has no boxes for discovery" in err
    words = PCA.replace("pca", "pca,conditioning") + " --dry-run --pictures 2"
    err = run_words(capsys, f"{words} probe.facet=key")[1]
    assert "probe.facet=key is ignored by conditioning" in err
    assert "panels" not in err
    for task in ("knn", "classification", "clustering"):
        words = f"probe --task {task} --dataset toy_objects --print-config"
        assert "is ignored" not in run_words(capsys, f"{words} probe.facet=attn_out")[1]


def test_slow_tasks_come_last_and_second_protocols_do_not_change_settings_of_the_user():
    for overrides, tasks in (
        ([], ["tokencut", "tokencut", "pca", "geometry"]),
        (["probe.tau=0.3"], ["tokencut", "pca", "geometry"]),
    ):
        request = ProbeRequest(["geometry", "pca", "tokencut"], ["toy"], overrides, all_tasks=True)
        assert [planned.probe.task for planned in plan_request(request)] == tasks


def test_a_run_without_a_folder_is_named_after_its_model_or_experiment(workdir, capsys):
    for words, name in (
        ("", "vit_small_skip-adamw"),
        ("optimizer=soap model=vit_tiny_skipless", "vit_tiny_skipless-soap"),
        ("experiment=dino_photographs_skipless_soap", "dino_photographs_skipless_soap"),
    ):
        out, _ = run_words(capsys, f"pretrain --data-root photos --dry-run --batch-size 2 {words}")
        assert re.match(rf"run folder +runs/{name}-\d{{8}}-\d{{6}}\n", out)


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


PROBE = ["probe", "--checkpoint", "encoder.safetensors", "--dataset", "folder"]
PROBE += ["--data-root", "photos"]


def configs(capsys, *words: str) -> dict[str, dict]:
    before = {path.name for path in Path().iterdir()}
    assert main([*words, "--print-config"]) == 0
    assert {path.name for path in Path().iterdir()} == before
    out = capsys.readouterr().out
    parts = out.split("# ")[1:] or [f"\n{out}"]
    return {
        part.partition(" ")[0].strip(): yaml.safe_load(part.partition("\n")[2]) for part in parts
    }


def test_the_batch_size_flag_sets_the_encoder_batch_size(workdir, capsys):
    words = ["probe", "--task", "knn,classification,segmentation", "--dataset"]
    words += ["class_folders,toy", "--data-root", "class_folders=x", "--batch-size", "3"]
    found = configs(capsys, *words)

    assert found["knn"]["probe"]["batch_size"] == 3
    assert found["classification"]["probe"]["encoder_batch_size"] == 3
    assert found["segmentation"]["probe"]["training"]["batch_size"] == 16
    said = expect_error(capsys, ["probe", "--task", "segmentation", "--batch-size", "3"], 2)
    assert "`probe.training.batch_size=3`" in said


@pytest.mark.slow
def test_no_figures_are_drawn_with_pictures_0(workdir, capsys):
    words = ["--checkpoint", "encoder.safetensors", "--layer", "0", "dataset.num_train=10"]
    words += ["dataset.num_val=2", "--pictures", "0"]
    knn = ["probe", "--task", "knn", "--dataset", "toy_objects"]
    tokencut = ["probe", "--task", "tokencut", "--dataset", "toy", "probe.longer_side=32"]
    for task, command in (("knn", knn), ("tokencut", tokencut)):
        assert main([*command, "--out", task, *words]) == 0
        assert records(task)
        assert not [*Path(task).rglob("*.png")]
    assert "probe.panels" in expect_error(capsys, [*knn, *words[:-1], "3"], 2)

    # pca scores the images that it draws, so it draws them even if other tasks draw none.
    none = ["--checkpoint", "encoder.safetensors", "--pictures", "0"]
    for tasks in ("all", "pca,knn"):
        found = configs(capsys, "probe", "--task", tasks, "--dataset", "toy,toy_objects", *none)
        assert found["pca"]["probe"]["panels"] == 8
        assert found.get("tokencut", {"probe": {"panels": 0}})["probe"]["panels"] == 0
    expect_error(capsys, ["probe", "--task", "pca", *none], 2)


def test_a_dry_run_counts_missing_results_and_writes_nothing(workdir, capsys):
    words = [*PROBE, "--task", "pca", "--layer", "0,1", "probe.image_size=32", "probe.panels=1"]
    assert main([*words, "--dry-run"]) == 0
    assert "1 job, 2 scores: 0 finished, 2 pending" in capsys.readouterr().out
    assert not (workdir / "results").exists()

    assert main([*words, "--layer", "0"]) == 0
    assert main([*words, "--dry-run"]) == 0

    assert "1 job, 2 scores: 1 finished, 1 pending" in capsys.readouterr().out


def test_dry_runs_of_pretraining_state_the_size_or_the_error(workdir, capsys):
    words = make_pretrain_args(workdir / "photos", "run", "--dry-run")
    assert main(words) == 0

    out = capsys.readouterr().out
    assert "4 of folder all" in out
    assert "2 blocks of width 24, patches of 8 pixels, images of 16 x 16" in out
    # Two steps an epoch, six at most.
    assert "6 of 2 images, 3 epochs" in out
    assert not (workdir / "run").exists()
    (workdir / "run").mkdir()
    (workdir / "run" / "log.jsonl").touch()
    expect_error(capsys, words, 2)
    assert main([*words, "--overwrite"]) == 0
    assert (workdir / "run" / "log.jsonl").exists()
