"""Test that the architecture of a timm model is inferred from a weights file."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.loading.checkpoint import advise_model_folder
from tests.support.foreign_weights import (
    assert_same_weights,
    get_load_error,
    save_checkpoint,
    save_hf_folder,
)

NAME = "vit_tiny_patch16_224"
DINO_NAME = "vit_small_patch16_224.dino"
THREE = "square grid assumed, 3 x 3 patches"


@cache
def weights_of(name: str = NAME, **changes: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0, **changes)
    return {
        key: value + 0.01 * torch.randn_like(value) for key, value in model.state_dict().items()
    }


# Arguments in config.json that make the models small.
SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2}


def load_from_folder(
    folder: Path, weights: Mapping[str, Tensor], name: str = NAME, **config: Any
) -> Encoder:
    return load_encoder(save_hf_folder(folder, dict(weights), {"architecture": name, **config}))


@pytest.mark.parametrize(
    ("name", "changes", "size", "prefix", "note"),
    [
        (NAME, {}, (224, 224), 1, ""),
        (NAME, {"img_size": 448}, (448, 448), 1, "square grid assumed, 28 x 28 patches"),
        (NAME, {"img_size": (288, 512)}, (384, 384), 1, "square grid assumed, 24 x 24 patches"),
        (NAME, {"patch_size": 8}, (224, 224), 1, "patches of 8 pixels as in the file"),
        (
            *(NAME, {"patch_size": 32, "img_size": 64}, (64, 64), 1),
            "patches of 32 pixels as in the file; square grid assumed, 2 x 2 patches",
        ),
        ("deit_tiny_distilled_patch16_224", {"img_size": 48}, (48, 48), 2, THREE),
        ("cait_xxs24_224", {"img_size": 48}, (48, 48), 0, THREE),
        ("deit3_small_patch16_224", {"img_size": 48}, (48, 48), 0, THREE),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 42}, (42, 42), 0, THREE),
        ("eva02_base_patch14_224", {"img_size": 42}, (42, 42), 1, THREE),
    ],
)
def test_sizes_come_from_the_file_and_are_reported(tmp_path, name, changes, size, prefix, note):
    weights = weights_of(name, **SMALL, **changes)
    encoder = load_from_folder(tmp_path / "f", weights, name, model_args=SMALL)
    assert (encoder.native_size, encoder.weights_info.note) == (size, note)
    patches = size[0] * size[1] // encoder.patch_size**2
    assert weights["pos_embed"].shape[1] == patches + prefix
    state = encoder.module.get_submodule("model").state_dict()
    for key in ("pos_embed", "patch_embed.proj.weight", "blocks.1.norm2.weight"):
        assert torch.equal(state[key], weights[key]), key


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        *(("pos_embed", shape) for shape in [(1, 61, 64), (), (1, 0, 64)]),
        *(("patch_embed.proj.weight", shape) for shape in [(64, 4, 16, 16), (5,), (64, 3, 16, 8)]),
        ("blocks.1.mlp.fc1.weight", (128, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path, key, shape):
    weights = weights_of(**SMALL) | {key: torch.randn(shape)}
    config = {"architecture": NAME, "model_args": SMALL}
    assert f"{key} is " in get_load_error(save_hf_folder(tmp_path / "f", weights, config))


ATTO = "convnext_atto"


def advised_config(line: str) -> dict[str, Any]:
    found = re.search(r"config\.json, (\{.*\})(?:, and type |; use `--checkpoint )local-dir", line)
    assert found is not None, line
    return json.loads(found[1].replace("N}", "6}"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (DINO_NAME, {"depth": 2}),
        (NAME, {"depth": 2, "reg_tokens": 4}),
        (ATTO, {"depths": (1, 1, 2, 1)}),
    ],
)
def test_the_hints_for_a_file_of_another_depth_load_it(tmp_path, name, changes):
    weights = weights_of(name, **changes)
    path = save_checkpoint(tmp_path / "w.pth", weights)
    line = get_load_error(f"timm:{name}@{path}")
    assert f"the timm model {name} has 12 blocks" in line

    config = advised_config(line)
    config["model_args"] |= changes
    encoder = load_encoder(save_hf_folder(tmp_path / "f", weights, config))
    assert encoder.depth == int(line.partition("has ")[2].split()[0])
    bare = re.search(r"or `--checkpoint (mean=[^`]+)`", line)
    assert bool(bare) == ("reg_token" not in weights and name != ATTO)
    if bare:
        encoder = load_encoder(bare[1])
        stated: Any = timm.get_pretrained_cfg(name)
        assert encoder.depth == 2
        assert (encoder.mean, encoder.std) == (stated.mean, stated.std)


def test_weights_that_timm_changes_on_loading_are_refused(tmp_path, monkeypatch):
    load = timm.models.VisionTransformer.load_state_dict

    def load_changed(model: Any, weights: dict[str, Tensor], *given: Any, **more: Any) -> Any:
        return load(model, weights | {"norm.bias": weights["norm.bias"] + 1}, *given, **more)

    monkeypatch.setattr(timm.models.VisionTransformer, "load_state_dict", load_changed)
    config = {"architecture": NAME, "model_args": SMALL}
    assert "norm.bias is " in get_load_error(
        save_hf_folder(tmp_path / "f", weights_of(**SMALL), config)
    )


# 7 x 28 patches are as many as the default 14 x 14.
@pytest.mark.parametrize(
    ("grid", "place"),
    [((7, 28), "model_args"), ((7, 28), "pretrained_cfg"), ((3, 5), "model_args")],
)
def test_a_timm_folder_states_rows_and_columns(tmp_path, grid, place):
    size = (16 * grid[0], 16 * grid[1])
    weights = weights_of(**SMALL, img_size=size)
    config: dict[str, Any] = {"model_args": dict(SMALL)}
    if place == "model_args":
        config["model_args"]["img_size"] = size
    else:
        # A mean without a standard deviation does not state how images were normalised.
        config["pretrained_cfg"] = {"input_size": [3, *size], "mean": 0.4}
    encoder = load_from_folder(tmp_path / "f", weights, **config)
    assert encoder.native_size == size
    assert encoder.normalization_source.startswith("assumed")
    assert_same_weights(encoder.module.get_submodule("model"), weights)


OTHER_SIZE = "pos_embed is 1 x 785 x 64, expected 1 x 197 x 64"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_args": {**SMALL, "img_size": 224}}, OTHER_SIZE),
        ({"model_args": {**SMALL, "patch_size": 32}}, "16 x 16, expected 64 x 3 x 32 x 32"),
        ({"model_args": SMALL, "pretrained_cfg": {"input_size": [3, 224, 224]}}, OTHER_SIZE),
        ({"model_args": [1]}, "model_args=[1], expected an object"),
        ({"pretrained_cfg": {"input_size": [3, 224]}}, "expected [3, HEIGHT, WIDTH]"),
        ({"pretrained_cfg": {"mean": [0.5]}}, "expected mean to be one or three numbers"),
        (
            {"pretrained_cfg": {"std": [0, 0, 0]}},
            "expected std to be one or three positive",
        ),
    ],
)
def test_an_inconsistent_timm_folder_is_refused(tmp_path, config, problem):
    weights = weights_of(**SMALL, img_size=448)
    uri = save_hf_folder(tmp_path / "f", weights, {"architecture": NAME, **config})
    assert problem in get_load_error(uri)


@pytest.mark.parametrize(
    ("place", "channels"), [("file", 1), ("model_args", 13), ("pretrained_cfg", 4)]
)
def test_other_numbers_of_channels_are_refused(tmp_path, place, channels):
    weights = weights_of(in_chans=channels, **SMALL)
    config: dict[str, Any] = {"model_args": dict(SMALL)}
    if place == "model_args":
        config["model_args"]["in_chans"] = channels
        config["pretrained_cfg"] = {"mean": [0.5] * channels, "std": [0.5] * channels}
    else:
        config["pretrained_cfg"] = {"input_size": [channels, 224, 224]}
    uri = save_hf_folder(tmp_path / "f", weights, {"architecture": NAME, **config})
    error = get_load_error(tmp_path / "f/model.safetensors" if place == "file" else uri)
    assert f"{channels} channels" in error or f"64 x {channels} x 16 x 16" in error


@pytest.mark.parametrize(("count", "more"), [(3, None), (4, "1"), (6, "3")])
def test_shape_errors_name_three_tensors_and_count_the_others(tmp_path, count, more):
    wrong = [f"blocks.0.mlp.fc{n}.weight" for n in "12"] + ["norm.weight", "pos_embed"]
    wrong = [*wrong, "cls_token", "blocks.0.attn.proj.weight"][:count]
    weights = weights_of(**SMALL) | {key: torch.zeros(1, 6, 64) for key in wrong}
    config = {"architecture": NAME, "model_args": SMALL}

    message = get_load_error(save_hf_folder(tmp_path / "f", weights, config))

    assert message.count(" is 1 x 6 x 64, expected ") == 3
    counted = re.findall(r" and (\d+) more, and nothing is resized", message)
    assert counted == ([] if more is None else [more])
    # The size of the images determines only the shape of the position embedding.
    assert ('"img_size"' in message) == ("pos_embed" in wrong)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_advice_names_a_file_of_the_same_format(suffix):
    file = {"pth": "pytorch_model.bin", "safetensors": "model.safetensors"}[suffix]
    advice = advise_model_folder(Path(f"mine.{suffix}"), '"depth": 2', "vit")
    assert f"save the weights as {file} in a folder" in advice
    assert '{"architecture": "vit", "model_args": {"depth": 2}}' in advice


def test_the_note_tells_how_to_state_an_assumed_head_count(tmp_path):
    changes = {"depth": 2, "img_size": 32, "num_heads": 6}
    weights = weights_of(**changes)
    bare = load_encoder(str(save_checkpoint(tmp_path / "w.pth", weights)))
    config = advised_config(bare.weights_info.note) | {"architecture": NAME}
    assert "3 heads of 64 channels assumed" in bare.weights_info.note
    assert (bare.num_heads, config["model_args"]) == (3, {"num_heads": 6})
    config["model_args"] |= {"depth": 2}
    assert load_encoder(save_hf_folder(tmp_path / "f", weights, config)).num_heads == 6


def test_registers_with_the_names_of_dinov2_are_loaded_into_timm(tmp_path):
    name = "vit_small_patch14_reg4_dinov2"
    weights = weights_of(name, img_size=28, **SMALL)
    positions = torch.randn(1, 1, 64)
    own = {
        **weights,
        "cls_token": weights["cls_token"] - positions,
        "pos_embed": torch.cat([positions, weights["pos_embed"]], 1),
        "register_tokens": weights["reg_token"],
        "mask_token": torch.zeros(1, 64),
    }
    del own["reg_token"]
    encoder = load_from_folder(tmp_path / "own", own, name, model_args=SMALL)

    state = encoder.module.get_submodule("model").state_dict()
    assert state.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-6)
