"""Test that loading a checkpoint runs no code."""

import argparse
import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig, build_vit, load_encoder, save_encoder
from tests.faults.test_fault_table import save_dino, write_malicious_pickle
from tests.support.faults import (
    DINO_LIKE,
    TINY,
    class_folders,
    encoder_file,
    expect_error,
    make_probe_args,
    peak_memory_mib,
    records,
    voc,
)


def probe_checkpoint(uri: str | Path) -> list[str]:
    return make_probe_args("pca", "folder", Path("photos"), checkpoint=uri)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_malicious_pickles_of_these_tests_would_run(tmp_path, zipped):
    write_malicious_pickle("evil.pth", tmp_path, zipped=zipped)

    with (tmp_path / "evil.pth").open("rb") as file:
        torch.load(file, weights_only=False)

    assert (tmp_path / "mark").exists()


def test_plain_objects_beside_the_weights_are_accepted(workdir, capsys):
    extras = {"args": argparse.Namespace(lr=np.float64(0.1)), "epoch": np.int64(3)}
    save_dino(workdir, lambda weights: {"teacher": weights, **extras})

    assert main(probe_checkpoint("dino.pth")) == 0

    assert "30 of 30 tensors of the file loaded" in capsys.readouterr().err


def test_the_configuration_of_a_run_names_no_code_to_run(workdir, begun):
    config = workdir / "run/config.yaml"
    config.write_text(f"_target_: pathlib.Path.touch\nself: {workdir}/left\n{config.read_text()}")

    assert main([*begun, "--resume"]) == 0
    assert load_encoder("run").depth
    assert not (workdir / "left").exists()


def test_a_huge_header_is_refused_in_little_memory(workdir, capsys):
    path = workdir / "huge.safetensors"
    for claimed in (2**27, 2**63):
        path.write_bytes(claimed.to_bytes(8, "little") + b"{" + b" " * 4096)

        with peak_memory_mib() as peak:
            message = expect_error(capsys, probe_checkpoint(path), 4)

        assert "huge.safetensors" in message
        assert peak() < 40


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("encoder.safetensors", "ssl_bench.models.loading.checkpoint.read_weights"),
        ("dino.pth", "ssl_bench.models.loading.foreign.read_weights"),
        ("dino.safetensors", "ssl_bench.models.loading.foreign.find_backbone"),
    ],
)
def test_weights_that_are_replaced_during_reading_give_no_result(
    workdir, capsys, monkeypatch, name, reader
):
    save_dino(workdir)
    module, _, function = reader.rpartition(".")
    read = getattr(importlib.import_module(module), function)
    old, new = (build_vit(DINO_LIKE, seed=seed).state_dict() for seed in (0, 9))
    safetensors.torch.save_file(old, workdir / "dino.safetensors")

    def replace_and_read(*arguments):
        # A running pretraining saves at this moment.
        path = arguments[-1]
        if name == "dino.safetensors":
            # The file is memory-mapped, and its content changes in place.
            with path.open("r+b") as file:
                file.write(safetensors.torch.save(new))
        elif name == "dino.pth":
            torch.save(new, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        else:
            encoder_file(path, seed=9)
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(reader, replace_and_read)
        message = expect_error(capsys, probe_checkpoint(name), 4)

    assert name in message
    assert "replaced" in message
    assert main(probe_checkpoint(name)) == 0


# For each task: the detail that reports constant features, and its value.
CONSTANT = {
    "pca": ("num_constant", 4),
    "correspondence": ("degenerate_percent", 100.0),
    "tokencut": ("degenerate_percent", 100.0),
    "discovery": ("degenerate_percent", 100.0),
    "segmentation": ("constant_channels_percent", 100.0),
    **dict.fromkeys(
        ("knn", "classification", "clustering", "retrieval"), ("constant_features", True)
    ),
}


def create_data_for(task: str, workdir: Path) -> tuple[str, Path]:
    if task in ("pca", "geometry", "correspondence"):
        return "folder", workdir / "photos"
    if task in ("knn", "classification", "clustering"):
        return "class_folders", class_folders(workdir / "classes")
    voc(workdir)
    return "voc2012", workdir


@pytest.mark.parametrize("task", [*CONSTANT, "geometry"])
def test_features_that_are_not_finite_stop_with_layer_and_image(workdir, capsys, task):
    model = build_vit(TINY, seed=0)
    with torch.no_grad():
        number = math.inf if task == "pca" else math.nan
        model.get_parameter("blocks.1.attn.qkv.bias")[:] = number
    save_encoder(workdir / "encoder.safetensors", model, {})
    dataset, root = create_data_for(task, workdir)

    message = expect_error(capsys, make_probe_args(task, dataset, root), 4)

    assert "block 1 of encoder" in message
    first = {"folder": "0.jpg", "class_folders": "cat/0.jpg", "voc2012": "t"}[dataset]
    # The first image of `geometry` is chosen at random.
    first = {"tokencut": "t0", "discovery": "t0", "geometry": ".jpg"}.get(task, first)
    assert first in message
    if task == "pca":
        # The block before it is fine.
        assert main(make_probe_args(task, dataset, root, "--layer", "0")) == 0


@pytest.mark.parametrize("task", CONSTANT)
def test_constant_features_are_flagged_and_the_metric_is_finite(workdir, task):
    model = build_vit(ViTConfig(**{**TINY.to_dict(), "skip_mlp": False}), seed=0)
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            parameter.fill_(1.0 if name.endswith("fc2.bias") else 0.0)
    save_encoder(workdir / "encoder.safetensors", model, {})
    dataset, root = create_data_for(task, workdir)
    facet = ["probe.facet=token"] if task in ("tokencut", "discovery") else []

    assert main(make_probe_args(task, dataset, root, *facet)) == 0

    detail, value = CONSTANT[task]
    for record in records():
        assert record.details[detail] == value, record.details
        assert record.metric.startswith("top5") or 0 <= record.value <= 100
