"""Flags that abbreviate keys, and the configuration that is shown before a command runs."""

from pathlib import Path

import pytest
import yaml

from ssl_bench.cli.__main__ import main
from tests.support.faults import expect_error, pretraining, records

PROBE = ["probe", "--checkpoint", "encoder.safetensors", "--dataset", "folder"]
PROBE += ["--data-root", "photos"]


def configs(capsys, *words: str) -> dict[str, dict]:
    """Return the configuration that is printed for each task; nothing may be written."""
    before = {path.name for path in Path().iterdir()}
    assert main([*words, "--print-config"]) == 0
    assert {path.name for path in Path().iterdir()} == before
    out = capsys.readouterr().out
    parts = out.split("# ")[1:] or [f"\n{out}"]
    return {
        part.partition(" ")[0].strip(): yaml.safe_load(part.partition("\n")[2]) for part in parts
    }


def test_flags_of_a_probe_set_its_keys(workdir, capsys):
    flags = ["--task", "pca,tokencut", "--seed", "3", "--limit", "2"]
    found = configs(capsys, *PROBE, *flags, "probe.tau=0.3")

    assert found.keys() == {"pca", "tokencut"}
    assert {(one["seed"], one["data"]["limit"]) for one in found.values()} == {(3, 2)}
    assert found["tokencut"]["probe"]["tau"] == 0.3
    assert found["tokencut"]["dataset"]["root"] == "photos"


def test_the_batch_size_of_probes_is_that_of_the_encoder(workdir, capsys):
    words = ["probe", "--task", "knn,classification,segmentation", "--dataset"]
    words += ["class_folders,toy", "--data-root", "class_folders=x", "--batch-size", "3"]
    found = configs(capsys, *words)

    assert found["knn"]["probe"]["batch_size"] == 3
    assert found["classification"]["probe"]["encoder_batch_size"] == 3
    assert found["segmentation"]["probe"]["training"]["batch_size"] == 16
    said = expect_error(capsys, ["probe", "--task", "segmentation", "--batch-size", "3"], 2)
    assert "`probe.training.batch_size=3`" in said


@pytest.mark.slow
def test_no_pictures_are_drawn_when_none_are_wanted(workdir, capsys):
    words = ["--checkpoint", "encoder.safetensors", "--layer", "0", "dataset.num_train=10"]
    words += ["dataset.num_val=2", "--pictures", "0"]
    knn = ["probe", "--task", "knn", "--dataset", "toy_objects"]
    tokencut = ["probe", "--task", "tokencut", "--dataset", "toy", "probe.longer_side=32"]
    for task, command in (("knn", knn), ("tokencut", tokencut)):
        assert main([*command, "--out", task, *words]) == 0
        assert records(task)
        assert not [*Path(task).rglob("*.png")]
    assert "probe.panels" in expect_error(capsys, [*knn, *words[:-1], "3"], 2)

    # A task that scores its pictures draws them even if other tasks draw none.
    none = ["--checkpoint", "encoder.safetensors", "--pictures", "0"]
    for tasks in ("all", "pca,knn"):
        found = configs(capsys, "probe", "--task", tasks, "--dataset", "toy,toy_objects", *none)
        assert found["pca"]["probe"]["panels"] == 8
        assert found.get("tokencut", {"probe": {"panels": 0}})["probe"]["panels"] == 0
    expect_error(capsys, ["probe", "--task", "pca", *none], 2)


def test_flags_of_a_run_set_its_keys(workdir, capsys):
    words = ["pretrain", "--seed", "3", "--limit", "20", "--batch-size", "4", "train.epochs=2"]
    (found,) = configs(capsys, *words).values()

    told = {name: found["train"][name] for name in ("seed", "batch_size", "epochs")}
    assert told == {"seed": 3, "batch_size": 4, "epochs": 2}
    assert found["data"]["limit"] == 20


def test_a_dry_run_counts_missing_results_and_writes_nothing(workdir, capsys):
    words = [*PROBE, "--task", "pca", "--layer", "0,1", "probe.image_size=32", "probe.panels=1"]
    assert main([*words, "--dry-run"]) == 0
    assert "1 job, 2 scores: 0 finished, 2 pending" in capsys.readouterr().out
    assert not (workdir / "results").exists()

    assert main([*words, "--layer", "0"]) == 0
    assert main([*words, "--dry-run"]) == 0

    assert "1 job, 2 scores: 1 finished, 1 pending" in capsys.readouterr().out


def test_a_dry_run_of_pretraining_states_its_size_or_the_refusal(workdir, capsys):
    words = pretraining(workdir / "photos", "run", "--dry-run")
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
