"""Test the function `load_encoder`."""

import math
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.distributed.checkpoint

from ssl_bench import models
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models import (
    VisionTransformer,
    ViTConfig,
    build_vit,
    identify_encoder,
    load_encoder,
    save_encoder,
)
from ssl_bench.models.loading.checkpoint import is_number, read_metadata
from ssl_bench.models.loading.load import newest_checkpoint, require_layers
from ssl_bench.system.files import file_sha256
from tests.support.faults import DINO_LIKE, LFS_POINTER
from tests.support.foreign_weights import assert_same_weights, get_load_error, timm_model

TINY = ViTConfig(
    image_size=32, patch_size=8, dim=64, depth=2, num_heads=1, init="skipless",
    skip_attention=False, skip_mlp=False,
)  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "last.safetensors"
    save_encoder(path, build_vit(TINY, seed=0), {"step": "7", "epoch": "1"})
    return path


def test_a_checkpoint_is_loaded_as_it_was_saved(saved, tmp_path):
    encoder = load_encoder(str(saved.parent))
    assert_same_weights(encoder.module, build_vit(TINY, seed=0).state_dict())
    assert isinstance(encoder.module, VisionTransformer)
    assert encoder.module.config == TINY
    assert (encoder.name, encoder.sha256) == ("run", file_sha256(saved))
    assert (encoder.depth, encoder.dim, encoder.num_heads, encoder.patch_size) == (2, 64, 1, 8)
    assert (encoder.native_size, encoder.num_prefix_tokens) == ((32, 32), 1)
    assert (encoder.loaded_keys, encoder.total_keys) == (30, 30)
    assert encoder.weights_info.epoch == 1
    assert not any(p.requires_grad for p in encoder.module.parameters())
    assert not encoder.module.training
    metadata = read_metadata(saved)
    assert (metadata["format"], metadata["version"]) == ("ssl-bench", "1")
    assert (metadata["step"], metadata["epoch"]) == ("7", "1")
    assert "kind" not in metadata
    sidecar = saved.with_name("last.safetensors.sha256")
    assert sidecar.read_text() == f"{file_sha256(saved)}  last.safetensors\n"
    # Equal content gives equal bytes.
    again = tmp_path / "again.safetensors"
    save_encoder(again, build_vit(TINY, seed=0), {"epoch": "1", "step": "7"})
    assert again.read_bytes() == saved.read_bytes()
    sidecar.unlink()
    assert "sha256sum last.safetensors > last.safetensors.sha256" in get_load_error(saved)


@pytest.mark.parametrize(
    ("epoch", "expected"), [("12.5", 12.5), ("0", 0.0), ("1e3", None), ("", None), (None, None)]
)
def test_the_epoch_of_a_checkpoint_is_a_number_or_unknown(tmp_path, epoch, expected):
    path = tmp_path / "mine.safetensors"
    save_encoder(path, build_vit(TINY, seed=0), {} if epoch is None else {"epoch": epoch})

    assert load_encoder(str(path)).weights_info.epoch == expected


@pytest.mark.parametrize(
    ("owner", "attribute", "value"),
    [
        ("ssl_bench.models.loading.checkpoint", "_VERSION", "2"),
        ("ssl_bench.models.ViTConfig", "kind", "mamba"),
    ],
)
def test_a_checkpoint_of_a_newer_version_is_refused(saved, monkeypatch, owner, attribute, value):
    with monkeypatch.context() as later:
        later.setattr(f"{owner}.{attribute}", value)
        save_encoder(saved, build_vit(TINY, seed=0), {})
    assert "version" in get_load_error(saved)


@pytest.mark.parametrize(
    "strides", ["x", "5", "[0]", "[1.5]", pytest.param("[" * 10**5, id="deep")]
)
def test_invalid_strides_in_a_checkpoint_are_refused(saved, strides):
    save_encoder(saved, build_vit(TINY, seed=0), {"strides": strides})
    with pytest.raises(CheckpointError, match="strides"):
        identify_encoder(str(saved))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("mean", "null"), ("mean", "[0.5, 0.5]"), ("mean", '["red", "green", "blue"]'),
        ("mean", "{"), ("mean", "[NaN, 0, 0]"), ("mean", "[1e300, 0, 0]"),
        ("std", "[0.1, 0.1, 0]"), pytest.param("mean", "[" * 10**5, id="deep"),
        pytest.param("mean", f"[{'9' * 5000}, 0, 0]", id="long"),
    ],
)  # fmt: skip
def test_invalid_colours_in_a_checkpoint_are_refused(saved, key, text):
    save_encoder(saved, build_vit(TINY, seed=0), {key: text})
    with pytest.raises(CheckpointError, match=key) as caught:
        load_encoder(str(saved))
    assert len(str(caught.value)) < 500


def test_numbers_of_a_config_are_finite_and_below_a_billion():
    numbers = (0, -1.5, 999_999_999, -999_999_999.5)
    others = (1e9, -(10**9), math.inf, math.nan, True, None, "1", [1])
    assert [is_number(value) for value in numbers + others] == [True] * 4 + [False] * 8


def test_a_sha256_may_have_capital_letters_and_a_mark_for_binary_files(saved):
    sidecar = saved.with_name(f"{saved.name}.sha256")
    digest, name = sidecar.read_text().split()
    sidecar.write_text(f"{digest.upper()} *{name}\n")
    assert load_encoder(str(saved)).sha256 == digest


def test_errors_for_misspelt_files_name_the_similar_file(saved):
    saved.with_name("mine.pth").touch()
    for name, meant in ((f"a{saved.name}", saved.name), ("mime.pth", "mine.pth")):
        with pytest.raises(CheckpointError) as caught:
            load_encoder(str(saved.with_name(name)))
        assert caught.value.hint == ("--checkpoint", str(saved.with_name(meant)))
    own = saved.with_name("own.py")
    own.touch()
    with pytest.raises(CheckpointError) as caught:
        load_encoder(str(own))
    assert caught.value.hint == ("--checkpoint", f"{own}:{{name}}")


def test_a_name_without_its_scheme_is_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    for name, address in {
        "mine:encoder": "mine.py:encoder",
        "dino_vits16": "torchhub:facebookresearch/dino:dino_vits16",
        "facebook/dinov2-small": "hf-hub:facebook/dinov2-small",
        "vit_small_patch16_224.dino": "timm:vit_small_patch16_224.dino",
        "vit_small_patch16_224": "timm:vit_small_patch16_224.{tag}",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            load_encoder(name)
        assert caught.value.hint == ("--checkpoint", address)


def test_the_newest_checkpoint_is_no_stored_epoch(saved, capsys):
    runs = saved.parents[1]
    for name, age in (("z/last", 9), ("run/epoch0001", 0)):
        path = runs / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        shutil.copy(saved, path)
        os.utime(path, (10**9 - age, 10**9 - age))
    os.utime(saved, (10**9 - 5, 10**9 - 5))
    assert newest_checkpoint(runs) == str(saved)
    assert "trained for 7 steps" in capsys.readouterr().err


def test_layers_of_the_newest_checkpoint_are_checked_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    require_layers([99], [])
    save_encoder(Path("runs/one/last.safetensors"), build_vit(TINY, seed=0), {})
    require_layers([TINY.depth - 1], [])
    with pytest.raises(ConfigurationError):
        require_layers([TINY.depth], [])


def test_the_error_for_a_missing_file_lists_the_addresses(tmp_path):
    for address in (tmp_path / "nothing.pth", tmp_path, "ftp:somewhere"):
        assert "timm:NAME@FILE" in get_load_error(address)
    assert "No such file" in get_load_error(f"timm:vit_tiny_patch16_224@{tmp_path}/nothing.pth")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("weights.pth", b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        ("weights.safetensors", LFS_POINTER, "git lfs pull"),
        ("weights.onnx", LFS_POINTER, "git lfs pull"),
        ("model-00001-of-00002.safetensors", b"anything", "one of several files"),
        ("weights.pth", b"epoch 1: loss 0.5", "begins with text"),
    ],
)
def test_a_file_that_contains_no_weights_is_recognised(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    assert problem in get_load_error(tmp_path / name)


class Call:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __reduce__(self):
        return self.function, ()


@pytest.mark.parametrize(
    ("function", "advice"),
    [(torch.distributed.get_rank, r"one process.*full state_dict\(\)"), (os.getpid, "run code")],
)
def test_a_file_that_calls_functions_is_refused_with_advice(tmp_path, function, advice):
    torch.save({"blocks.0.attn.qkv.weight": Call(function)}, tmp_path / "weights.pth")
    assert re.search(advice, get_load_error(tmp_path / "weights.pth"))


OTHER_ARCHIVES = {
    "TorchScript": lambda model, x, path: torch.jit.save(torch.jit.trace(model, x), path),
    "torch.export": lambda model, x, path: torch.export.save(
        torch.export.export(model, (x,)), path
    ),
    "NumPy": lambda model, _, path: np.savez(path.open("wb"), **model.state_dict()),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHER_ARCHIVES)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_the_hint_for_another_archive_loads_its_weights(tmp_path, monkeypatch, what):
    model, path = timm_model(), tmp_path / "mine.pth"
    OTHER_ARCHIVES[what](model, torch.zeros(1, 3, 32, 32), path)
    monkeypatch.chdir(tmp_path)
    problem, _, command = get_load_error(path).partition(". Save them: ")
    exec(command, {"torch": torch, "numpy": np})
    assert what in problem
    assert_same_weights(load_encoder("weights.pth").module, model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_the_hint_for_a_distributed_checkpoint_joins_its_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = build_vit(TINY, seed=0).state_dict()
    torch.distributed.checkpoint.save({"model": weights}, checkpoint_id="parts")
    for address in ("parts", "parts/__0_0.distcp", "timm:vit_tiny_patch16_224@parts"):
        with pytest.raises(CheckpointError) as raised:
            load_encoder(address)
        _, file = raised.value.hint
        assert file == str(tmp_path / "parts.pth")
    command = str(raised.value).partition("run: python ")[2].partition("; use")[0].split()
    monkeypatch.setattr(sys, "argv", command[1:])
    runpy.run_module(command[1], run_name="__main__", alter_sys=False)
    assert_same_weights(load_encoder(file).module, weights)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: {f"n.{'ab'[i % 2]}.{n}": w[n] for i, n in enumerate(w)}, "a.cls_token"),
        (lambda w: {name: w[name] for name in w if name != "cls_token"}, "expected cls_token"),
        (lambda w: w | {"patch_embed.proj.weight": torch.ones(96, 3, 8, 8)}, "multiple of 64"),
        (lambda _: {"epoch": 3}, "no tensors"),
        (lambda w: list(w.values()), "contains a list"),
    ],
)
def test_weights_that_do_not_match_exactly_are_refused(tmp_path, change, problem):
    torch.save(change(build_vit(DINO_LIKE, seed=0).state_dict()), tmp_path / "weights.pth")
    assert problem in get_load_error(tmp_path / "weights.pth")


def test_random_timm_weights_have_seed_0_and_are_named_random():
    encoder = load_encoder("timm:vit_tiny_patch16_224")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    assert_same_weights(encoder.module.get_submodule("model"), model.state_dict())
    assert encoder.name == "vit_tiny_patch16_224 (random)"
    assert (encoder.depth, encoder.dim, encoder.num_heads) == (12, 192, 3)
    assert (encoder.patch_size, encoder.num_prefix_tokens) == (16, 1)
    assert (encoder.native_size, encoder.mean) == ((224, 224), (0.5, 0.5, 0.5))


def test_files_with_a_head_are_loaded_into_a_timm_architecture(tmp_path):
    path = tmp_path / "mine.pth"
    weights = build_vit(ViTConfig(dim=192, num_heads=3), seed=4).state_dict()
    extra = {name: torch.zeros(5, 192) for name in ("head.weight", "head.mlp.0.weight")}
    torch.save({"model": weights | extra}, path)
    encoder = load_encoder(f"timm:vit_tiny_patch16_224@{path}")
    assert_same_weights(encoder.module.get_submodule("model"), weights)
    assert (encoder.name, encoder.sha256) == ("vit_tiny_patch16_224@mine", file_sha256(path))
    assert (encoder.loaded_keys, encoder.total_keys) == (len(weights), len(weights) + 2)
    # The identity contains how timm initialises the weights.
    assert encoder.architecture == load_encoder("timm:vit_tiny_patch16_224").architecture
    torch.save({"epoch": 3}, path)
    assert "no tensors" in get_load_error(f"timm:vit_tiny_patch16_224@{path}")


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("timm:vit_tiny_patch16_22", "`--checkpoint timm:vit_tiny_patch16_224`"),
        ("timm:vit_tiny_patch16_224.augregg", "augreg_in21k"),
        ("timm:mvitv2_tiny", "`--checkpoint FILE.py:NAME`"),
        ("torchhub:facebookresearch/dino:dino_resnet50", "torchhub:facebookresearch/dino:dino_v"),
    ],
)
def test_unknown_and_unsupported_names_are_refused(uri, hint):
    assert hint in get_load_error(uri)


def test_every_public_name_of_the_package_exists():
    assert all(getattr(models, name) is not None for name in models.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        models.nothing  # noqa: B018
