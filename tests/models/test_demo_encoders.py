"""Demonstration encoders: how they are made, and `demo:NAME`, which loads them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from ssl_bench.errors import CheckpointError
from ssl_bench.models import ViTConfig, build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.models.loading import addresses as loading
from ssl_bench.models.loading.addresses import NAMES
from tests.benchmarks.evidence import demo
from tests.benchmarks.evidence.page import LEDGER
from tests.benchmarks.evidence.rows import ROWS, demo_of, probes_of
from tests.benchmarks.ledger import Ledger

TINY = ViTConfig(image_size=16, patch_size=8, dim=64, depth=2, num_heads=1)
START = "no_gain"
"""That is trained whole in these tests."""
LOSSES = {
    "dino-skip_adamw-seed0": 5.0,
    "dino-skip_soap-seed0": 4.0,
    "dino-skipless_soap-seed0": 3.0,
    f"apart-{START}-seed0": 6.0,
}
CHOSEN = {"skip": "dino-skip_soap-seed0", "skipless": f"apart-{START}-seed0"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """Where demonstration encoders are looked for in this test."""
    monkeypatch.setattr(loading, "PACKAGE", tmp_path / "package")
    return tmp_path / "results" / "demo"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch):
    """Finished runs in tmp_path/runs, and their ledger."""
    monkeypatch.setitem(ROWS, "apart", replace(ROWS["apart"], whole=(START,)))
    found = {}
    for number, (name, loss) in enumerate(LOSSES.items()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        metadata = {"step": "9", "epoch": "2", "mean": "[0.5, 0.5, 0.5]", "std": "[0.2, 0.2, 0.2]"}
        save_encoder(folder / "last.safetensors", build_vit(TINY, seed=number), metadata)
        config = {"data": {"root": "/home/somebody/images"}, "monitor": {"root": "/home/x"}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config | {"model": {"dim": 64}}))
        rows = [{"step": n, "loss": 9.0 - n / 100} for n in range(50)]
        rows[31]["knn_top1"] = 12.0
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = {"loss": [9.0, loss], "hours": 1.5, "provenance": "a machine, a commit"}
        cell = {"task": "knn", "metric": "top1_k20", "dataset": "cifar10", "images": 7}
        cells = [
            {**cell, "encoder": encoder, "layer": layer, "value": 20.0 + layer, "ci95": None}
            for encoder in ("trained", "random", "epoch 1")
            for layer in range(2)
        ]
        found[probes_of(name)] = {"cells": cells, "above_random": [], "hours": 0.1}
    return found


def exported(name, runs, tmp_path, place) -> list[Path]:
    return demo.export(name, runs, tmp_path / "runs", place)


@pytest.mark.parametrize("ask", [load_encoder, identify_encoder])
@pytest.mark.parametrize("name", ["skip", "skipless"])
def test_an_encoder_that_is_not_there_is_refused_in_one_line(place, ask, name):
    with pytest.raises(CheckpointError, match=f"^demo:{name} does not come with") as raised:
        ask(f"demo:{name}")
    assert "\n" not in str(raised.value)


def test_other_names_are_refused_with_those_there_are(place):
    with pytest.raises(CheckpointError, match=r"expected demo:skip or demo:skipless, got 'demo:x'"):
        load_encoder("demo:x")


@pytest.mark.parametrize("name", ["skip", "skipless"])
def test_what_is_exported_loads_as_the_weights_of_the_chosen_run(name, runs, tmp_path, place):
    exported(name, runs, tmp_path, place)
    encoder = load_encoder(f"demo:{name}")
    trained = build_vit(TINY, seed=list(LOSSES).index(CHOSEN[name])).state_dict()
    for key, value in encoder.module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, trained[key].bfloat16().float()), key
    assert encoder.name == f"demo_{name}"
    assert encoder.mean == (0.5, 0.5, 0.5)
    assert identify_encoder(f"demo:{name}").identity() == encoder.identity()
    assert load_encoder(f"random:demo:{name}").sha256 != encoder.sha256


def test_card_configuration_and_log_lie_beside_and_name_no_place(runs, tmp_path, place):
    files = exported("skip", runs, tmp_path, place)
    ends = ("safetensors", "safetensors.sha256", "md", "yaml", "jsonl")
    assert [path.name for path in files] == [f"demo_skip.{end}" for end in ends]
    card, config, log = (path.read_text() for path in files[2:])
    assert identify_encoder("demo:skip").sha256 in card
    assert "dino-skip_adamw-seed0 5.000; dino-skip_soap-seed0 4.000" in " ".join(card.split())
    assert "| knn, top1_k20, cifar10, 7 images | random | 20.0 | 21.0 |" in card
    assert "epoch 1" not in card
    assert yaml.safe_load(config) == {"data": {"root": "tiny_imagenet"}, "model": {"dim": 64}}
    assert [json.loads(line)["step"] for line in log.splitlines()] == [0, 20, 31, 40, 49]


def test_those_that_come_with_this_suite_are_those_of_the_ledger():
    """What lies in results/demo is what the queue wrote last."""
    known = {name: run for name in NAMES if (run := Ledger(LEDGER).runs.get(demo_of(name)))}
    files = {path.name for path in loading.demo_folder().glob("*.safetensors")}
    assert files == {loading.file_name(name) for name in known}
    for name, run in known.items():
        assert identify_encoder(f"demo:{name}").sha256 == run["sha256"]
