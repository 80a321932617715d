"""Shapes are the file's: nothing is resized between a weights file and an encoder."""

import json
import re
from functools import cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from ssl_bench.cli.__main__ import main
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import load_encoder
from tests.support.foreign_weights import folder_of, message_of, saved, timm_model

NAME = "vit_tiny_patch16_224"
DINO_NAME = "vit_small_patch16_224.dino"


@cache
def weights_of(name: str = NAME, **changes: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0, **changes)
    return {
        key: value + 0.01 * torch.randn_like(value) for key, value in model.state_dict().items()
    }


@pytest.mark.parametrize(
    ("name", "changes", "size", "said"),
    [
        (NAME, {}, (224, 224), ""),
        (NAME, {"img_size": 448}, (448, 448), "square grid assumed, 28 x 28 patches"),
        (NAME, {"img_size": (288, 512)}, (384, 384), "square grid assumed, 24 x 24 patches"),
        (NAME, {"patch_size": 8}, (224, 224), "patches of 8 pixels as in the file"),
        (NAME, {"patch_size": 32, "img_size": 64}, (64, 64), "square grid assumed, 2 x 2"),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32}, (32, 32), "assumed, 2 x 2"),
        ("eva02_tiny_patch14_224", {"img_size": 28}, (28, 28), "square grid assumed, 2 x 2"),
        pytest.param(
            *("cait_xxs24_224", {"img_size": 32}, (32, 32), "square grid assumed, 2 x 2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fault_79_sizes_are_taken_from_the_file_and_said(tmp_path, name, changes, size, said):
    weights = weights_of(name, **changes)
    path = saved(tmp_path / "w.pth", weights)

    encoder = load_encoder(f"timm:{name}@{path}")

    assert encoder.native_size == size
    assert said in encoder.contents.note
    loaded = encoder.module.get_submodule("model").state_dict()
    for key in ("pos_embed", "patch_embed.proj.weight", "blocks.1.mlp.fc1.weight"):
        if key in weights:
            assert torch.equal(loaded[key], weights[key]), key


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (NAME, {"img_size": (96, 160)}, "pos_embed is 1 x 61 x 192, expected 1 x 197 x 192"),
        (NAME, {"class_token": False, "global_pool": "avg"}, "pos_embed is 1 x 196 x 192"),
        (NAME, {"embed_dim": 96}, "cls_token is 1 x 1 x 96, expected 1 x 1 x 192"),
        (NAME, {"mlp_ratio": 2}, "mlp.fc1.weight is 384 x 192, expected 768 x 192"),
        (NAME, {"in_chans": 4}, "patch_embed.proj.weight is 192 x 4 x 16 x 16, expected 192 x 3"),
        ("convnext_atto", {"in_chans": 1}, "stem.0.weight is 40 x 1 x 4 x 4, expected 40 x 3"),
        pytest.param(
            "swin_tiny_patch4_window7_224",
            {"window_size": 8, "img_size": 256},
            "relative_position_bias_table is 225 x 3, expected 169 x 3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fault_79_a_tensor_of_another_shape_is_named(tmp_path, capsys, name, changes, said):
    path = saved(tmp_path / "w.pth", weights_of(name, **changes))

    assert main(["models", f"timm:{name}@{path}"]) == 4

    error = capsys.readouterr().err
    assert said in error
    assert "nothing is resized" in error
    assert error.count("\n") == 1


ATTO = "convnext_atto"


def advised_config(line: str) -> dict[str, Any]:
    found = re.search(r"config\.json, (\{.*\})(?:, and type |; use `--checkpoint )local-dir", line)
    assert found is not None, line
    return json.loads(found[1].replace("N}", "6}"))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            NAME,
            {"depth": 2},
            "has 2 blocks of width 192, but timm:vit_tiny_patch16_224 has 12; put",
        ),
        (DINO_NAME, {"depth": 2}, f"has 2 blocks of width 384, but timm:{DINO_NAME} has 12; put"),
        (NAME, {"depth": 2, "reg_tokens": 4}, "has 2 blocks of width 192, but timm:vit_tiny_"),
        (
            ATTO,
            {"depths": (1, 1, 2, 1)},
            "has 5 blocks of width 40, but timm:convnext_atto has 12; put",
        ),
    ],
)
def test_a_file_of_another_depth_is_told_what_loads_it(tmp_path, name, changes, said):
    weights = weights_of(name, **changes)
    path = saved(tmp_path / "w.pth", weights)

    line = message_of(f"timm:{name}@{path}")

    assert said in line
    config = advised_config(line)
    config["model_args"] |= changes
    encoder = load_encoder(folder_of(tmp_path / "f", weights, config))
    assert encoder.depth == int(line.partition("has ")[2].split()[0])
    bare = re.search(r"or `--checkpoint (mean=[^`]+)`", line)
    assert bool(bare) == ("reg_token" not in weights and name != ATTO)
    if bare:
        told = load_encoder(bare[1])
        usual: Any = timm.get_pretrained_cfg(name)
        assert told.depth == 2
        assert (told.mean, told.std) == (usual.mean, usual.std)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        *(("pos_embed", shape) for shape in [(), (1, 0, 192)]),
        *(("patch_embed.proj.weight", shape) for shape in [(5,), (192, 3, 16, 8)]),
    ],
)
def test_fault_79_any_other_shape_names_the_tensor(tmp_path, key, shape):
    weights = weights_of() | {key: torch.randn(shape)}
    said = message_of(f"timm:{NAME}@{saved(tmp_path / 'w.pth', weights)}")
    assert f"{key} is " in said


def test_fault_79_numbers_that_timm_would_change_on_the_way_are_refused(tmp_path, monkeypatch):
    load = timm.models.VisionTransformer.load_state_dict

    def changed(model: Any, weights: dict[str, Tensor], *given: Any, **more: Any) -> Any:
        return load(model, weights | {"norm.bias": weights["norm.bias"] + 1}, *given, **more)

    monkeypatch.setattr(timm.models.VisionTransformer, "load_state_dict", changed)
    assert "norm.bias is " in message_of(f"timm:{NAME}@{saved(tmp_path / 'w.pth', weights_of())}")


# 7 x 28 patches are as many as the 14 x 14 of the name.
@pytest.mark.parametrize("grid", [(7, 28), (3, 5)])
@pytest.mark.parametrize("place", ["model_args", "pretrained_cfg"])
def test_fault_79_a_folder_of_timm_says_rows_and_columns(tmp_path, grid, place):
    size = (16 * grid[0], 16 * grid[1])
    weights = weights_of(depth=2, img_size=size)
    said: dict[str, Any] = {"model_args": {"depth": 2}}
    if place == "model_args":
        said["model_args"]["img_size"] = size
    else:
        said["pretrained_cfg"] = {"input_size": [3, *size]}

    encoder = load_encoder(folder_of(tmp_path / "f", weights, {"architecture": NAME, **said}))

    assert encoder.native_size == size
    loaded = encoder.module.get_submodule("model").state_dict()
    assert all(torch.equal(loaded[key], weights[key]) for key in weights if "qkv" not in key)


OF_ANOTHER_SIZE = "pos_embed is 1 x 785 x 192, expected 1 x 197 x 192"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_args": {"depth": 2, "img_size": 224}}, OF_ANOTHER_SIZE),
        (
            {"model_args": {"depth": 2}, "pretrained_cfg": {"input_size": [3, 224, 224]}},
            OF_ANOTHER_SIZE,
        ),
        ({"model_args": [1]}, "model_args=[1], expected an object"),
        ({"pretrained_cfg": {"input_size": [3, 224]}}, "expected [3, HEIGHT, WIDTH]"),
        ({"pretrained_cfg": {"mean": [0.5]}}, "expected mean to be three numbers"),
        ({"pretrained_cfg": {"std": [0, 0, 0]}}, "expected std to be three numbers"),
    ],
)
def test_fault_79_a_folder_of_timm_that_says_something_else_is_refused(tmp_path, config, said):
    weights = weights_of(depth=2, img_size=448)
    assert said in message_of(folder_of(tmp_path / "f", weights, {"architecture": NAME, **config}))


@pytest.mark.parametrize(
    ("address", "channels"),
    [("file", 1), ("file", 13), ("timm file", 4), ("model_args", 13), ("input_size", 4)],
)
def test_fault_79_images_of_other_channels_are_refused(tmp_path, capsys, address, channels):
    weights = weights_of(in_chans=channels)
    path = saved(tmp_path / "w.pth", weights)
    if address == "model_args":
        colours = {"mean": [0.5] * channels, "std": [0.5] * channels}
        said: dict[str, Any] = {"model_args": {"in_chans": channels}, "pretrained_cfg": colours}
        uri = folder_of(tmp_path / "f", weights, {"architecture": NAME, **said})
    elif address == "input_size":
        said = {"pretrained_cfg": {"input_size": [channels, 224, 224]}}
        uri = folder_of(tmp_path / "f", weights, {"architecture": NAME, **said})
    else:
        uri = str(path) if address == "file" else f"timm:{NAME}@{path}"

    assert main(["models", uri]) == 4

    error = capsys.readouterr().err
    assert f"{channels} channels" in error or f"192 x {channels} x 16 x 16" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("deit3_small_patch16_224", 0),
        ("vit_small_patch14_reg4_dinov2", 0),
        ("vit_base_patch16_siglip_224", 0),
        ("vit_base_patch16_reg4_gap_256", 0),
        ("eva02_base_patch14_224", 1),
    ],
)
def test_fault_79_positions_are_counted_without_the_tokens_of_a_family(tmp_path, name, prefix):
    small = {"depth": 1, "embed_dim": 64, "num_heads": 2}
    patch = 14 if "patch14" in name else 16
    weights = weights_of(name, img_size=3 * patch, **small)
    encoder = load_encoder(
        folder_of(tmp_path / "f", weights, {"architecture": name, "model_args": small})
    )
    assert weights["pos_embed"].shape[1] == 9 + prefix
    assert encoder.native_size == (3 * patch, 3 * patch)
    assert encoder.contents.note == "square grid assumed, 3 x 3 patches"


def test_fault_79_heads_and_grid_of_bare_files_are_announced(tmp_path, capsys):
    # MoCo-v3's linear evaluation saves its ViT-S, of 12 heads, under the names of DINO.
    weights = {f"module.{n}": w for n, w in timm_model(dim=384, heads=12).state_dict().items()}
    path = saved(tmp_path / "linear.pth", {"state_dict": weights, "arch": "vit_small"})

    assert main(["models", str(path)]) == 0

    said = capsys.readouterr().out
    assert "square grid assumed, 4 x 4 patches; 6 heads of 64 channels assumed, if it has" in said


def test_heads_that_are_assumed_otherwise_are_said_as_the_note_says(tmp_path):
    changes = {"depth": 2, "img_size": 32, "num_heads": 6}
    weights = weights_of(**changes)
    bare = load_encoder(str(saved(tmp_path / "w.pth", weights)))
    config = advised_config(bare.contents.note) | {"architecture": NAME}
    assert (bare.num_heads, config["model_args"]) == (3, {"num_heads": 6})
    config["model_args"] |= {"depth": 2}

    assert load_encoder(folder_of(tmp_path / "f", weights, config)).num_heads == 6


def test_registers_of_dinov2_under_its_own_names_are_timms(tmp_path):
    name, small = "vit_small_patch14_reg4_dinov2", {"depth": 2, "embed_dim": 64, "num_heads": 2}
    weights = weights_of(name, img_size=28, **small)
    positions = torch.randn(1, 1, 64)
    own = {
        **weights,
        "cls_token": weights["cls_token"] - positions,
        "pos_embed": torch.cat([positions, weights["pos_embed"]], 1),
        "register_tokens": weights["reg_token"],
        "mask_token": torch.zeros(1, 64),
    }
    del own["reg_token"]

    one, other = (
        load_encoder(
            folder_of(tmp_path / place, content, {"architecture": name, "model_args": small})
        )
        for place, content in (("own", own), ("timm", weights))
    )

    images = torch.rand(1, 3, 28, 42)
    found, expected = (
        FeatureExtractor(e, layers=[1], facets=["token"])(images)[1]["token"] for e in (one, other)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
