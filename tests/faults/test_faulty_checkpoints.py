"""Faulty checkpoints and features: the command names the file and runs no code from it."""

import argparse
import importlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig, build_vit, load_encoder, save_encoder
from ssl_bench.system.files import file_sha256
from tests.support.faults import (
    DINO_LIKE,
    TINY,
    Fault,
    check_fault,
    class_folders,
    each,
    encoder_file,
    expect_error,
    peak_memory_mib,
    pickled_mark,
    probing,
    records,
    voc,
)

PCA = "probe --task pca --dataset folder --data-root photos --layer 1 probe.image_size=32"
TIMM = "timm:vit_tiny_patch16_224@"
Prepare = Callable[[Path], object]


def with_checkpoint(uri: str | Path) -> list[str]:
    return probing("pca", "folder", Path("photos"), checkpoint=uri)


def saved_dino(path: Path, change=lambda weights: weights) -> Path:
    torch.save(change(build_vit(DINO_LIKE, seed=0).state_dict()), path)
    return path


def evil(name: str, folder: Path, *, zipped: bool = True) -> None:
    """Write a pickle that creates the file `mark` when it is loaded."""
    (folder / name).parent.mkdir(exist_ok=True)
    pickled_mark(folder / name, folder / "mark", zipped=zipped)


def changed_dino(name: str, change) -> Prepare:
    return lambda folder: saved_dino(folder / name, change)


def cut_dino(length: Callable[[int], int]) -> Prepare:
    return lambda folder: cut(saved_dino(folder / "dino.pth"), length)


def cut_encoder(length: Callable[[int], int], folder: Path, *, is_ours: bool = True) -> None:
    path = folder / "encoder.safetensors"
    if not is_ours:
        path.with_name("encoder.safetensors.sha256").unlink()
        safetensors.torch.save_file(build_vit(DINO_LIKE, seed=0).state_dict(), path)
    cut(path, length)


def cut(path: Path, length: Callable[[int], int]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: length(len(content))])


def flip_a_bit(share: float, folder: Path) -> None:
    path = folder / "encoder.safetensors"
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)


def flip_a_bit_of_dino(folder: Path) -> None:
    path = saved_dino(folder / "dino.pth")
    path.with_name("dino.pth.sha256").write_text(f"{file_sha256(path)}  dino.pth\n")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def renamed(weights):
    return {n.replace("blocks.1.attn", "encoder.1.attn"): w for n, w in weights.items()}


def wrapped(weights):
    return {**{f"net.{n}": w for n, w in weights.items()}, "b.c": torch.zeros(1)}


def thinner(weights):
    return {n: w[:-1] if n == "blocks.1.mlp.fc1.weight" else w for n, w in weights.items()}


def with_omegaconf(weights):
    return {"teacher": weights, "cfg": OmegaConf.create({"lr": 0.1})}


def bad(name: str, prepare: Prepare, uri: str, *words: str) -> Fault:
    return Fault(name, prepare, f"{PCA} --checkpoint {uri}", 4, words)


CUTS: dict[str, Callable[[int], int]] = {
    "nothing left": lambda _: 0,
    "10 bytes": lambda _: 10,
    "half": lambda size: size // 2,
    "the last byte lost": lambda size: size - 1,
}
OURS = "encoder.safetensors"
FAULTS = [
    bad("a malicious .pth", partial(evil, "evil.pth"), "evil.pth", "evil.pth"),
    bad("a malicious pickle without a zip", partial(evil, "evil.pth", zipped=False), "evil.pth",
        "evil.pth"),
    bad("a malicious pickle named safetensors", partial(evil, "evil.safetensors"),
        "evil.safetensors", "evil.safetensors"),
    bad("a malicious encoder of a run", partial(evil, "run/last.safetensors"),
        "run/last.safetensors", "last.safetensors"),
    bad("a malicious .pth for timm", partial(evil, "evil.pth"), f"{TIMM}evil.pth", "evil.pth"),
    bad("a malicious pickle without a zip for timm", partial(evil, "evil.pth", zipped=False),
        f"{TIMM}evil.pth", "evil.pth"),
    bad("other objects beside the weights", changed_dino("other.pth", with_omegaconf),
        "other.pth", "omegaconf", "safetensors.torch.save_file"),
    *(bad(f"a cut .pth: {name}", cut_dino(length), "dino.pth", "dino.pth", "again")
      for name, length in CUTS.items()),
    bad("a cut .pth for timm", cut_dino(CUTS["half"]), f"{TIMM}dino.pth", "dino.pth", "again"),
    *(bad(f"cut safetensors: {name}", partial(cut_encoder, length, is_ours=False), OURS, "again")
      for name, length in CUTS.items()),
    bad("our checkpoint is empty", partial(cut_encoder, CUTS["nothing left"]), OURS, "again"),
    bad("our checkpoint is cut", partial(cut_encoder, CUTS["half"]), OURS, "again"),
    bad("a flipped bit of the header", partial(flip_a_bit, 0.02), OURS, OURS, "again"),
    bad("a flipped bit of the weights", partial(flip_a_bit, 0.5), OURS, "has sha256", "again"),
    bad("a flipped bit at the end", partial(flip_a_bit, 0.999), OURS, "has sha256", "again"),
    bad("a flipped bit of a .pth", flip_a_bit_of_dino, "dino.pth", "has sha256", "again"),
    bad("renamed tensors", changed_dino("dino.pth", renamed), "dino.pth", "26/30 keys fit"),
    bad("wrapped tensors", changed_dino("dino.pth", wrapped), "dino.pth", "dino.pth"),
    bad("tensors that timm does not know", changed_dino("dino.pth", renamed), f"{TIMM}dino.pth",
        "does not fit"),
    bad("a tensor of another shape", changed_dino("dino.pth", thinner), "dino.pth",
        "blocks.1.mlp.fc1.weight", "255 x 64, expected 256 x 64"),
]  # fmt: skip


@each(FAULTS)
def test_a_faulty_checkpoint_is_named_and_runs_no_code(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)

    assert not (workdir / "mark").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_the_malicious_pickles_of_these_tests_would_run(workdir, zipped):
    evil("evil.pth", workdir, zipped=zipped)

    with (workdir / "evil.pth").open("rb") as file:
        torch.load(file, weights_only=False)

    assert (workdir / "mark").exists()


def test_plain_objects_beside_the_weights_are_accepted(workdir, capsys):
    extras = {"args": argparse.Namespace(lr=np.float64(0.1)), "epoch": np.int64(3)}
    saved_dino(workdir / "dino.pth", lambda weights: {"teacher": weights, **extras})

    assert main(with_checkpoint("dino.pth")) == 0

    assert "30 of 30 tensors of the file loaded" in capsys.readouterr().err


def test_a_malicious_training_state_never_runs(workdir, capsys, begun):
    state = workdir / "run/state.pt"
    pickled_mark(state, workdir / "mark", zipped=True)
    state.with_name("state.pt.sha256").write_text(f"{file_sha256(state)}  state.pt\n")

    assert "state.pt" in expect_error(capsys, [*begun, "--resume"], 4)

    assert not (workdir / "mark").exists()


def test_the_configuration_of_a_run_names_no_code_to_run(workdir, begun):
    config = workdir / "run/config.yaml"
    config.write_text(f"_target_: pathlib.Path.touch\nself: {workdir}/left\n{config.read_text()}")

    assert main([*begun, "--resume"]) == 0
    assert load_encoder("run").depth
    assert not (workdir / "left").exists()


@pytest.mark.parametrize("claimed", [2**27, 2**63])
def test_a_huge_header_is_refused_in_little_memory(workdir, capsys, claimed):
    path = workdir / "huge.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + b"{" + b" " * 4096)

    with peak_memory_mib() as peak:
        message = expect_error(capsys, with_checkpoint(path), 4)

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
def test_weights_that_are_replaced_while_they_are_read_give_no_result(
    workdir, capsys, monkeypatch, name, reader
):
    saved_dino(workdir / "dino.pth")
    module, _, function = reader.rpartition(".")
    read = getattr(importlib.import_module(module), function)
    old, new = (build_vit(DINO_LIKE, seed=seed).state_dict() for seed in (0, 9))
    safetensors.torch.save_file(old, workdir / "dino.safetensors")

    def replace_and_read(*arguments):
        # A running pretraining saves at this moment.
        path = arguments[-1]
        if name == "dino.safetensors":
            # The file is mapped, and changes in place.
            with path.open("r+b") as file:
                file.write(safetensors.torch.save(new))
        elif name == "dino.pth":
            torch.save(new, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        else:
            encoder_file(path, seed=9)
        return read(*arguments)

    monkeypatch.setattr(reader, replace_and_read)

    message = expect_error(capsys, with_checkpoint(name), 4)

    assert name in message
    assert "replaced" in message
    monkeypatch.undo()
    monkeypatch.chdir(workdir)
    assert main(with_checkpoint(name)) == 0


DATASETS = {
    **dict.fromkeys(("pca", "geometry", "correspondence"), "folder"),
    **dict.fromkeys(("knn", "classification", "clustering"), "class_folders"),
}


def create_data_for(task: str, workdir: Path) -> tuple[str, Path]:
    """Create a dataset that a task supports. Return its name and its root."""
    dataset = DATASETS.get(task, "voc2012")
    if dataset == "folder":
        return dataset, workdir / "photos"
    (class_folders if dataset == "class_folders" else voc)(workdir)
    return dataset, workdir


@pytest.mark.parametrize(
    ("task", "number"),
    [
        ("pca", math.inf),
        *((task, math.nan) for task in ("geometry", "correspondence", "tokencut", "discovery")),
        *((task, math.nan) for task in ("segmentation", "retrieval", "knn")),
        *((task, math.nan) for task in ("classification", "clustering")),
    ],
)
def test_features_that_are_not_finite_stop_with_layer_and_image(workdir, capsys, task, number):
    model = build_vit(TINY, seed=0)
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.qkv.bias")[:] = number
    save_encoder(workdir / "encoder.safetensors", model, {})
    dataset, root = create_data_for(task, workdir)

    message = expect_error(capsys, probing(task, dataset, root), 4)

    assert "block 1 of encoder" in message
    first = {"folder": "0.jpg", "class_folders": "cat/0.jpg", "voc2012": "t"}[dataset]
    # The first image of `geometry` is drawn at random.
    first = {"tokencut": "t0", "discovery": "t0", "geometry": ".jpg"}.get(task, first)
    assert first in message
    if number == math.inf:
        # The block before it is fine.
        assert main(probing(task, dataset, root, "--layer", "0")) == 0


@pytest.mark.parametrize(
    ("task", "flag", "expected"),
    [
        ("tokencut", "degenerate_percent", 100.0),
        ("discovery", "degenerate_percent", 100.0),
        ("pca", "num_constant", 4),
        ("correspondence", "degenerate_percent", 100.0),
        ("knn", "constant_features", True),
        ("classification", "constant_features", True),
        ("clustering", "constant_features", True),
        ("segmentation", "constant_channels_percent", 100.0),
        ("retrieval", "constant_features", True),
    ],
)
def test_constant_features_are_flagged_and_the_metric_is_finite(workdir, task, flag, expected):
    model = build_vit(ViTConfig(**{**TINY.to_dict(), "skip_mlp": False}), seed=0)
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            parameter.fill_(1.0 if name.endswith("fc2.bias") else 0.0)
    save_encoder(workdir / "encoder.safetensors", model, {})
    dataset, root = create_data_for(task, workdir)
    facet = ["probe.facet=token"] if task in ("tokencut", "discovery") else []

    assert main(probing(task, dataset, root, *facet)) == 0

    for record in records():
        assert record.details[flag] == expected, record.details
        assert record.metric.startswith("top5") or 0 <= record.value <= 100
