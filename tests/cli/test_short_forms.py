"""Flags that are short for keys, and what is shown before anything is computed."""

from pathlib import Path

import pytest
import yaml

from ssl_bench.cli.__main__ import main
from tests.support.faults import fails, pretraining, records

PROBE = ["probe", "--checkpoint", "encoder.safetensors", "--dataset", "folder"]
PROBE += ["--data-root", "photos"]


def configs(capsys, *words: str) -> dict[str, dict]:
    """What is printed for each task, and nothing is written."""
    before = {path.name for path in Path().iterdir()}
    assert main([*words, "--print-config"]) == 0
    assert {path.name for path in Path().iterdir()} == before
    out = capsys.readouterr().out
    parts = out.split("# ")[1:] or [f"\n{out}"]
    return {
        part.partition(" ")[0].strip(): yaml.safe_load(part.partition("\n")[2]) for part in parts
    }


def test_flags_are_short_for_keys_of_probes(place, capsys):
    flags = ["--task", "pca,tokencut", "--seed", "3", "--limit", "2"]
    found = configs(capsys, *PROBE, *flags, "probe.tau=0.3")

    assert found.keys() == {"pca", "tokencut"}
    assert {(one["seed"], one["data"]["limit"]) for one in found.values()} == {(3, 2)}
    assert found["tokencut"]["probe"]["tau"] == 0.3
    assert found["tokencut"]["dataset"]["root"] == "photos"


def test_a_batch_of_probes_is_what_the_encoder_takes_at_once(place, capsys):
    words = ["probe", "--task", "knn,classification,segmentation", "--dataset"]
    words += ["class_folders,toy", "--data-root", "class_folders=x", "--batch-size", "3"]
    found = configs(capsys, *words)

    assert found["knn"]["probe"]["batch_size"] == 3
    assert found["classification"]["probe"]["encoder_batch_size"] == 3
    assert found["segmentation"]["probe"]["training"]["batch_size"] == 16
    said = fails(capsys, ["probe", "--task", "segmentation", "--batch-size", "3"], 2)
    assert "probe.training.batch_size=3" in said


def test_no_pictures_are_drawn_when_none_are_wanted(place, capsys):
    words = ["--checkpoint", "encoder.safetensors", "--layer", "0", "dataset.num_train=10"]
    words += ["dataset.num_val=2", "--pictures", "0"]
    knn = ["probe", "--task", "knn", "--dataset", "toy_objects"]
    tokencut = ["probe", "--task", "tokencut", "--dataset", "toy", "probe.longer_side=32"]
    for task, command in (("knn", knn), ("tokencut", tokencut)):
        assert main([*command, "--out", task, *words]) == 0
        assert records(Path(task))
        assert not [*Path(task).rglob("*.png")]
    said = fails(capsys, [*knn, *words[:-1], "3"], 2)
    assert "probe.panels" in said


def test_what_scores_its_pictures_draws_them_beside_tasks_that_draw_none(place, capsys):
    none = ("--checkpoint", "encoder.safetensors", "--pictures", "0")
    for tasks in ("all", "pca,tokencut", "pca,knn"):
        found = configs(capsys, "probe", "--task", tasks, "--dataset", "toy,toy_objects", *none)
        assert found["pca"]["probe"]["panels"] == 8
        assert found.get("tokencut", {"probe": {"panels": 0}})["probe"]["panels"] == 0
    assert main(["probe", "--task", "all", "--dataset", "toy", *none, "--dry-run"]) == 0
    assert "probe.panels=0 is ignored by pca\n" in capsys.readouterr().err
    assert "panels expects" in fails(capsys, ["probe", "--task", "pca", *none], 2)


def test_a_batch_of_pretraining_is_that_of_an_optimisation_step(capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "--help"])
    assert "train.batch_size=N" in " ".join(capsys.readouterr().out.split())


def test_flags_are_short_for_keys_of_runs(place, capsys):
    words = ["pretrain", "--seed", "3", "--limit", "20", "--batch-size", "4", "train.epochs=2"]
    (found,) = configs(capsys, *words).values()

    told = {name: found["train"][name] for name in ("seed", "batch_size", "epochs")}
    assert told == {"seed": 3, "batch_size": 4, "epochs": 2}
    assert found["data"]["limit"] == 20


def test_a_dry_run_shows_pending_cells_and_writes_nothing(place, capsys):
    words = [*PROBE, "--task", "pca", "--layer", "0,1", "probe.image_size=32", "probe.panels=1"]
    assert main([*words, "--dry-run"]) == 0
    assert "1 job, 2 scores: 0 finished, 2 pending" in capsys.readouterr().out
    assert not (place / "results").exists()

    assert main([*words, "--layer", "0"]) == 0
    assert main([*words, "--dry-run"]) == 0

    assert "1 job, 2 scores: 1 finished, 1 pending" in capsys.readouterr().out


def test_a_dry_run_of_pretraining_says_how_long_and_of_what(place, capsys):
    words = pretraining(place / "photos", "run", "--dry-run")
    assert main(words) == 0

    out = capsys.readouterr().out
    assert "4 of folder all" in out
    assert "2 blocks of width 24, patches of 8 pixels, images of 16 x 16" in out
    # Two steps an epoch, six at most.
    assert "6 of 2 images, 3 epochs" in out
    assert not (place / "run").exists()


def test_a_dry_run_refuses_what_the_run_would_refuse(place, capsys):
    (place / "run").mkdir()
    (place / "run" / "log.jsonl").touch()

    words = pretraining(place / "photos", "run", "--dry-run")

    assert "run already contains a run" in fails(capsys, words, 2)
    assert main([*words, "--overwrite"]) == 0
    assert (place / "run" / "log.jsonl").exists()
