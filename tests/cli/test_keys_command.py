"""Test the command `ssl-bench keys`."""

import re
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices, config_folder
from ssl_bench.composition.compose import compose_config, list_keys


def listed(capsys, *words: str) -> dict[str, str]:
    assert main(["keys", *words]) == 0
    return {line.partition("=")[0]: line for line in capsys.readouterr().out.splitlines()}


def test_every_key_of_a_run_is_listed_with_its_values(workdir, capsys):
    found = listed(capsys, "pretrain", "objective=supervised", "train.max_grad_norm=2")

    assert set(found) == set(list_keys(compose_config("pretraining", ["objective=supervised"])))
    line = r"train\.max_grad_norm=2 +a number in \(0, 1000000000\] or null: .+"
    assert re.fullmatch(line, found["train.max_grad_norm"])
    assert "a number in [0, 1)" in found["objective.label_smoothing"]
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "first", "others"),
    [
        ("train", "train.epochs", {"train"}),
        ("train.epochs", "train.epochs", {"train"}),
        ("model.conv_mixer", "model.dim", {"model"}),
        ("optimizer.soap", "optimizer.lr", {"optimizer"}),
        ("dataset.voc2012", "dataset.year", {"dataset", "data"}),
        ("experiment.dino_photographs", "train.max_steps", {"model", "objective", "data"}),
        ("dataset.voc2012.year", "dataset.year", {"dataset"}),
        ("data", "data.root", {"data"}),
        ("probe.knn", "probe.neighbours", {"probe", "data", "seed", "corrupt", "dtype"}),
        ("probe.segmentation.training probe.training=lbfgs", "probe.training.refit", {"probe"}),
    ],
)
def test_a_part_of_a_configuration_can_be_listed(capsys, words, first, others):
    found = listed(capsys, *words.split())

    assert first in found
    groups = {key.partition(".")[0] for key in found}
    assert others <= groups if words.startswith("experiment") else others == groups


def test_the_chosen_file_of_a_part_is_shown(capsys):
    # Another file has the same class, with other values.
    found = listed(capsys, "probe.segmentation", "probe.training=sgd", "probe.loss=upsample4")

    assert "probe.training=sgd " in found["probe.training"]
    assert "probe.loss=upsample4 " in found["probe.loss"]


def test_a_key_with_an_empty_mapping_is_listed():
    assert list_keys({"probe": {"tau": 0.2, "classes": {}}}) == ["probe.tau", "probe.classes"]


def test_a_protocol_changes_the_shown_values(capsys):
    found = listed(capsys, "probe.segmentation", "probe.protocol=neco")

    assert "probe.training.epochs=25 " in found["probe.training.epochs"]


def test_without_a_name_all_names_are_listed(capsys):
    assert main(["keys"]) == 0

    out = capsys.readouterr().out
    assert all(name in out for group in ("probe", "dataset", "model") for name in choices(group))
    assert "convmixer_ablation" not in out
    assert main(["keys", "experiment"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in choices("experiment"))
    assert max(map(len, out.splitlines())) < 120


@pytest.mark.parametrize("group", ["pretrain", "probe", "dataset", "objective", "optimizer"])
def test_every_key_has_a_meaning(capsys, group):
    targets = [group] if group == "pretrain" else [f"{group}.{name}" for name in choices(group)]
    for target in targets:
        found = listed(capsys, target)
        assert [one for one in found.values() if not re.search(r" +\S[^:]*: \S", one)] == []
        assert "255 bytes" not in "".join(found.values())
        if "data.root" in found:
            assert " a path or null: " in found["data.root"]
        if group == "probe":
            # The keys of this probe and the keys that all probes have, but no keys of a dataset.
            composed = set(list_keys(compose_config("probing", [target.replace(".", "=", 1)])))
            files = [*(config_folder() / "probe").glob(f"{target.removeprefix('probe.')}/*")]
            keys = composed | {f"probe.{part.name}" for part in files}
            assert set(found) == {one for one in keys if not one.startswith("dataset.")}
            assert not [key for key in found if "own" in key]
            for part in files:
                # The value is the name of a file, and all names are listed.
                value, names = re.split(
                    " +", found[f"probe.{part.name}"].partition(": ")[0], maxsplit=1
                )
                assert value.partition("=")[2] in names.split(" or ")
                assert set(names.split(" or ")) == {file.stem for file in part.glob("*.yaml")}
            assert " a whole number in [0, 4294967295]: " in found["seed"]
            assert " or null: " in found["data.limit"]
