"""`ssl-bench keys`: what can be said as KEY=VALUE."""

import re
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices, config_folder
from ssl_bench.composition.compose import compose_config, list_keys


def listed(capsys, *words: str) -> dict[str, str]:
    """Each key with its line."""
    assert main(["keys", *words]) == 0
    return {line.partition("=")[0]: line for line in capsys.readouterr().out.splitlines()}


def test_every_key_of_a_run_is_listed_with_what_it_takes(place, capsys):
    found = listed(capsys, "pretrain", "objective=supervised", "train.max_grad_norm=2")

    assert set(found) == set(list_keys(compose_config("pretraining", ["objective=supervised"])))
    line = r"train\.max_grad_norm=2 +a number in \(0, 1000000000\] or null: .+"
    assert re.fullmatch(line, found["train.max_grad_norm"])
    assert "a number in [0, 1)" in found["objective.label_smoothing"]
    assert not Path("runs").exists()


def test_what_is_found_out_about_an_encoder_is_no_key(capsys):
    assert not [key for key in listed(capsys, "probe.pca") if "own" in key]


def test_a_choice_by_name_decides_which_keys_there_are(capsys):
    assert (
        "probe.training.epochs=25 "
        in listed(capsys, "probe.segmentation", "probe.protocol=neco")["probe.training.epochs"]
    )
    below = listed(capsys, "probe.segmentation.training", "probe.training=lbfgs")
    assert "probe.training.refit" in below
    assert all(one.startswith("probe.training") for one in below)


@pytest.mark.parametrize(
    ("target", "first", "others"),
    [
        ("train", "train.epochs", {"train"}),
        ("train.epochs", "train.epochs", {"train"}),
        ("model.conv_mixer", "model.dim", {"model"}),
        ("optimizer.soap", "optimizer.lr", {"optimizer"}),
        ("dataset.voc2012", "dataset.year", {"dataset", "data"}),
        ("experiment.dino_photographs", "train.max_steps", {"model", "objective", "data"}),
    ],
)
def test_a_part_of_a_configuration_can_be_named(capsys, target, first, others):
    found = listed(capsys, target)

    assert first in found
    assert others <= {one.partition(".")[0] for one in found}


def test_without_a_name_all_names_are_listed(capsys):
    assert main(["keys"]) == 0

    out = capsys.readouterr().out
    assert all(name in out for group in ("probe", "dataset", "model") for name in choices(group))
    assert "convmixer_ablation" not in out

    assert main(["keys", "experiment"]) == 0

    out = capsys.readouterr().out
    assert all(name in out for name in choices("experiment"))
    assert max(map(len, out.splitlines())) < 120


@pytest.mark.parametrize(
    "target",
    [
        "pretrain",
        *(f"{g}.{n}" for g in ("probe", "dataset", "objective", "optimizer") for n in choices(g)),
    ],
)
def test_every_key_says_what_it_means_in_a_sentence(capsys, target):
    found = listed(capsys, target)

    without = [line for line in found.values() if not re.search(r" +\S[^:]*: \S", line)]
    assert without == []
    assert "255 bytes" not in "".join(found.values())
    if "data.root" in found:
        assert " a path or null: " in found["data.root"]
    if target.startswith("probe."):
        # Those of the probe and those of all.
        composed = set(list_keys(compose_config("probing", [target.replace(".", "=", 1)])))
        files = (config_folder() / "probe").glob(f"{target.removeprefix('probe.')}/*")
        named = {f"probe.{part.name}" for part in files}
        assert set(found) == {one for one in composed | named if not one.startswith("dataset.")}
        assert found["seed"].split(None, 1)[1].startswith("a whole number in [0, 4294967295]: ")
        assert " or null: " in found["data.limit"]
