"""Rows 16 to 26 and 48 of the catalogue of faults: checkpoints, configurations, features."""

import argparse
import importlib
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig, build_vit, save_encoder
from ssl_bench.system.files import file_sha256
from tests.support.faults import (
    DINO_LIKE,
    TINY,
    class_folders,
    encoder_file,
    fails,
    peak_memory_mib,
    pickled_mark,
    pretraining,
    probing,
    records,
    voc,
)


def with_checkpoint(uri: str | Path, *more: str) -> list[str]:
    return probing("pca", "folder", Path("photos"), *more, checkpoint=uri)


def saved_dino(path: Path, change=lambda weights: weights) -> Path:
    torch.save(change(build_vit(DINO_LIKE, seed=0).state_dict()), path)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "uri",
    ["evil.pth", "evil.safetensors", "run/last.safetensors", "timm:vit_tiny_patch16_224@evil.pth"],
)
def test_fault_16_a_malicious_pickle_is_refused_and_never_runs(place, capsys, uri, zipped):
    path = place / uri.rpartition("@")[2]
    path.parent.mkdir(exist_ok=True)
    pickled_mark(path, place / "mark", zipped=zipped)

    said = fails(capsys, with_checkpoint(uri), 4)

    assert not (place / "mark").exists()
    assert path.name in said
    # The payload is a real one: read without care it does leave its mark.
    with path.open("rb") as file:
        torch.load(file, weights_only=False)
    assert (place / "mark").exists()


def test_fault_16_a_malicious_training_state_never_runs(place, capsys, begun):
    state = place / "run/state.pt"
    pickled_mark(state, place / "mark", zipped=True)
    state.with_name("state.pt.sha256").write_text(f"{file_sha256(state)}  state.pt\n")

    said = fails(capsys, [*begun, "--resume"], 4)

    assert "state.pt cannot be loaded" in said
    assert not (place / "mark").exists()


def test_fault_17_plain_data_beside_the_weights_of_official_dino_is_no_obstacle(place, capsys):
    extras = {"args": argparse.Namespace(lr=np.float64(0.1)), "epoch": np.int64(3)}
    saved_dino(place / "dino.pth", lambda weights: {"teacher": weights, **extras})

    assert main(with_checkpoint("dino.pth")) == 0

    assert "30 of 30 tensors of the file loaded" in capsys.readouterr().err


def test_fault_17_other_objects_are_refused_with_a_way_to_convert(place, capsys):
    extras = {"cfg": OmegaConf.create({"lr": 0.1})}
    saved_dino(place / "other.pth", lambda weights: {"teacher": weights, **extras})

    said = fails(capsys, with_checkpoint("other.pth"), 4)

    assert "omegaconf" in said
    assert "save only its tensors with safetensors.torch.save_file" in said


DATASETS = {
    **dict.fromkeys(("pca", "geometry", "correspondence"), "folder"),
    **dict.fromkeys(("knn", "classification", "clustering"), "class_folders"),
}


def data_of(task: str, place: Path) -> tuple[str, Path]:
    """A dataset that it can be asked about, and where it lies."""
    dataset = DATASETS.get(task, "voc2012")
    if dataset == "folder":
        return dataset, place / "photos"
    (class_folders if dataset == "class_folders" else voc)(place)
    return dataset, place


CUTS = {"nothing left": 0.0, "10 bytes": 10, "half": 0.5, "last byte lost": -1}


def cut(path: Path, where: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * where) if isinstance(where, float) else where])


@pytest.mark.parametrize("where", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("uri", ["dino.pth", "timm:vit_tiny_patch16_224@dino.pth"])
def test_fault_18_a_cut_pth_is_refused(place, capsys, uri, where):
    cut(saved_dino(place / "dino.pth"), where)

    said = fails(capsys, with_checkpoint(uri), 4)

    assert "dino.pth is" in said
    assert "again" in said


def test_fault_18_a_run_whose_state_was_cut_goes_on_from_the_one_before(place):
    step = ["train.max_steps=3", "train.max_minutes=0.0"]
    run = pretraining(place / "photos", "run", *step)
    assert main(run) == main([*run, "--resume"]) == 0
    assert main(pretraining(place / "photos", "whole", *step[:1])) == 0
    whole = file_sha256(place / "whole/last.safetensors")
    assert (place / "run/state.previous.pt").is_file()

    for name, where in CUTS.items():
        shutil.copytree(place / "run", place / name)
        cut(place / name / "state.pt", where)
        assert main([*pretraining(place / "photos", name, *step[:1]), "--resume"]) == 0
        assert file_sha256(place / name / "last.safetensors") == whole, name


@pytest.mark.parametrize("where", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("is_ours", [True, False])
def test_fault_19_cut_safetensors_are_refused(place, capsys, is_ours, where):
    path = place / "encoder.safetensors"
    if not is_ours:
        path.with_name("encoder.safetensors.sha256").unlink()
        safetensors.torch.save_file(build_vit(DINO_LIKE, seed=0).state_dict(), path)
    cut(path, where)

    assert "again" in fails(capsys, with_checkpoint(path), 4)


@pytest.mark.parametrize("claimed", [2**27, 2**40, 2**63])
def test_fault_19_a_huge_header_is_refused_in_little_memory(place, capsys, claimed):
    path = place / "huge.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + b"{" + b" " * 4096)

    with peak_memory_mib() as peak:
        said = fails(capsys, with_checkpoint(path), 4)

    assert "huge.safetensors is truncated or not a safetensors file" in said
    assert peak() < 40


@pytest.mark.parametrize(
    ("name", "share"),
    [*(("encoder.safetensors", share) for share in (0.02, 0.5, 0.999)), ("dino.pth", 0.5)],
)
def test_fault_20_a_flipped_bit_of_the_weights_is_found(place, capsys, name, share):
    path = place / name
    if name == "dino.pth":
        saved_dino(path)
        path.with_name("dino.pth.sha256").write_text(f"{file_sha256(path)}  dino.pth\n")
    assert main(with_checkpoint(path)) == 0
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)

    said = fails(capsys, with_checkpoint(path), 4)

    # A header may be damaged beyond reading before its digest is compared.
    assert "has sha256" in said or "not a safetensors file" in said
    assert re.search("[Cc]opy or download (both|it) again", said)


def test_fault_21_weights_that_are_missing_or_unknown_are_never_left_random(place, capsys):
    def renamed(weights):
        return {n.replace("blocks.1.attn", "encoder.1.attn"): w for n, w in weights.items()}

    saved_dino(place / "renamed.pth", renamed)
    saved_dino(place / "wrapped.pth", lambda weights: {f"net.{n}": w for n, w in weights.items()})
    torch.save({**torch.load(place / "wrapped.pth"), "b.c": torch.zeros(1)}, "wrapped.pth")

    assert "26/30 keys fit" in fails(capsys, with_checkpoint("renamed.pth"), 4)
    assert "wrapped.pth" in fails(capsys, with_checkpoint("wrapped.pth"), 4)
    timm = "timm:vit_tiny_patch16_224@renamed.pth"
    assert "does not fit" in fails(capsys, with_checkpoint(timm), 4)


def test_fault_22_wrong_shapes_are_refused(place, capsys):
    def thinner(weights):
        return {n: w[:-1] if n == "blocks.1.mlp.fc1.weight" else w for n, w in weights.items()}

    saved_dino(place / "thin.pth", thinner)

    said = fails(capsys, with_checkpoint("thin.pth"), 4)

    assert "blocks.1.mlp.fc1.weight (255 x 64, expected 256 x 64) of another shape" in said


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--task", "tokencutt"], "`--task tokencut`"),
        (["--task", "pca,segmentaton"], "`--task segmentation`"),
        (["--task", "pca", "--dataset", "vocc2012"], "`--dataset voc2012`"),
        (["--task", "pca", "--on-bad-image", "skp"], "`--on-bad-image skip`"),
        (["--task", "pca", "--chekpoint", "x"], "use `--checkpoint`"),
        (["--task", "pca", "prob.panels=1"], "`probe.panels=VALUE`"),
        (["--task", "pca", "probe.panels=1,2"], "probe.panels"),
        (["--task", "pca", "probe.panels=[1,2]"], "expects a whole number"),
        (["--task", "pca", "probe.panels=two"], "expects a whole number"),
        (["--task", "pca", "probe.panels="], "probe.panels"),
        (["--task", "pca", "probe.panels=${oc.env:HOME}"], "probe.panels"),
        (["--task", "pca", "++probe.new=1"], "new"),
        (["--task", "pca", "~probe.panels"], "~probe.panels"),
        (["--task", "pca", "probe=tokencut=1"], "probe"),
        (["--task", "pca", "dataset=nowhere"], "dataset"),
        (["--task", "segmentation", "probe.protocol=fastt"], "`probe.protocol=fast`"),
        (["--task", "pca", "probe.protocol=bacth"], "unknown protocol 'bacth'"),
    ],
)
def test_fault_23_what_is_typed_wrong_is_named_with_the_nearest(place, capsys, words, hint):
    data = [] if "--dataset" in words else ["--dataset", "folder", "--data-root", "photos"]
    if "segmentation" in words:
        data = ["--dataset", "toy"]

    assert hint in fails(capsys, ["probe", *words, *data], 2)


def spoilt_encoder(path: Path, number: float, block: int = 1) -> None:
    model = build_vit(TINY, seed=0)
    with torch.no_grad():
        model.get_parameter(f"blocks.{block}.attn.qkv.bias")[:] = number
    save_encoder(path, model, {})


@pytest.mark.parametrize(
    ("task", "number"),
    [
        ("pca", math.inf),
        ("segmentation", math.inf),
        *((task, math.nan) for task in ("pca", "geometry", "correspondence", "tokencut")),
        *((task, math.nan) for task in ("discovery", "segmentation", "retrieval", "knn")),
        *((task, math.nan) for task in ("classification", "clustering")),
    ],
)
def test_fault_24_features_that_are_not_finite_stop_with_layer_and_image(
    place, capsys, task, number
):
    spoilt_encoder(place / "encoder.safetensors", number)
    dataset, root = data_of(task, place)

    said = fails(capsys, probing(task, dataset, root), 4)

    assert "block 1 of encoder has NaN or infinite features" in said
    first = {"folder": "0.jpg", "class_folders": "cat/0.jpg", "voc2012": "t"}[dataset]
    # Which image passes first is drawn for geometry.
    first = {"tokencut": "t0", "discovery": "t0", "geometry": ".jpg"}.get(task, first)
    assert first in said
    if number == math.inf:
        # The block before it is sound.
        assert main(probing(task, dataset, root, "--layer", "0")) == 0


def constant_encoder(path: Path) -> None:
    model = build_vit(ViTConfig(**{**TINY.to_dict(), "skip_mlp": False}), seed=0)
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            parameter.fill_(1.0 if name.endswith("fc2.bias") else 0.0)
    save_encoder(path, model, {})


@pytest.mark.parametrize(
    ("task", "flag", "counted"),
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
def test_fault_25_constant_features_are_flagged_and_the_metric_is_finite(
    place, task, flag, counted
):
    constant_encoder(place / "encoder.safetensors")
    dataset, root = data_of(task, place)
    facet = ["probe.facet=token"] if task in ("tokencut", "discovery") else []

    assert main(probing(task, dataset, root, *facet)) == 0

    for record in records():
        assert record.details[flag] == counted, record.details
        assert record.metric.startswith("top5") or 0 <= record.value <= 100


def test_fault_26_more_neighbours_than_there_are_are_refused(place, capsys):
    class_folders(place)
    voc(place)

    said = fails(capsys, probing("knn", "class_folders", place, "probe.neighbours=[7]"), 2)
    assert "at most 6" in said
    said = fails(capsys, probing("retrieval", "voc2012", place, "probe.neighbours=9999"), 2)
    assert "at most 64" in said


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("encoder.safetensors", "ssl_bench.models.loading.checkpoint.read_weights"),
        ("dino.pth", "ssl_bench.models.loading.foreign.read_weights"),
        ("dino.safetensors", "ssl_bench.models.loading.foreign.find_backbone"),
    ],
)
def test_fault_48_weights_that_are_replaced_while_they_are_read_give_no_number(
    place, capsys, monkeypatch, name, reader
):
    saved_dino(place / "dino.pth")
    module, _, function = reader.rpartition(".")
    read = getattr(importlib.import_module(module), function)
    old, new = (build_vit(DINO_LIKE, seed=seed).state_dict() for seed in (0, 9))
    safetensors.torch.save_file(old, place / "dino.safetensors")

    def replaced_then_read(*given):
        # A pretraining that goes on saves at this moment.
        path = given[-1]
        if name == "dino.safetensors":
            # In place, while the file is mapped.
            with path.open("r+b") as file:
                file.write(safetensors.torch.save(new))
        elif name == "dino.pth":
            torch.save(build_vit(DINO_LIKE, seed=9).state_dict(), path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        else:
            encoder_file(path, seed=9)
        return read(*given)

    monkeypatch.setattr(reader, replaced_then_read)

    said = fails(capsys, with_checkpoint(name), 4)

    assert f"{name} was replaced while it was read" in said
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main(with_checkpoint(name)) == 0
