"""Test that encoders are loaded from Hugging Face repositories.

The weights are random, but have the parameter names of real checkpoints.
"""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import load_encoder
from ssl_bench.models.encoder import IMAGENET_MEAN, IMAGENET_STD
from ssl_bench.models.loading import hub, timm_encoder
from ssl_bench.models.loading.load import load_and_log
from ssl_bench.system.files import file_sha256
from tests.support.foreign_weights import (
    Weights,
    dinov2_weights,
    get_load_error,
    normalise,
    rename_weights,
    same_features,
    save_hf_folder,
    timm_model,
)


# transformers: https://github.com/huggingface/transformers/blob/015e6876, src/transformers/models/
# vit/modeling_vit.py and dinov2/modeling_dinov2.py.
def to_transformers(weights: Weights, kind: str, prefix: str) -> Weights:
    block = r"^(blocks\.\d)\."
    own = {
        rf"{block}norm1": r"\1.layernorm_before", rf"{block}norm2": r"\1.layernorm_after",
        rf"{block}mlp\.fc1": r"\1.intermediate.dense", rf"{block}mlp\.fc2": r"\1.output.dense",
    }  # fmt: skip
    names = {
        rf"{block}attn\.proj": r"\1.attention.output.dense",
        **({} if kind.startswith("dinov2") else own),
        rf"{block}ls(\d)\.gamma": r"\1.layer_scale\2.lambda1",
        r"^blocks": "encoder.layer",
        r"^pos_embed": "position_embeddings",
        r"^patch_embed\.proj": "patch_embeddings.projection",
        r"^(\w+_token|register_tokens|position_\w+|patch_\w+)": r"embeddings.\1",
        r"^norm\.": "layernorm.",
        "^": prefix,
    }
    result: Weights = {}
    for name, value in rename_weights(weights, names).items():
        start, qkv, end = name.partition("attn.qkv")
        thirds = zip(("query", "key", "value"), value.chunk(3), strict=True) if qkv else ()
        result |= {f"{start}attention.attention.{n}{end}": part.clone() for n, part in thirds}
        result |= {} if qkv else {name: value}
    return result


def hugging_face_folder(
    folder: Path, kind: str, weights: Weights, *, prefix: str = "", **config: Any
) -> Path:
    config = {
        "model_type": kind, "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu", "patch_size": 8, "image_size": 32, **config,
    }  # fmt: skip
    colours = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}
    save_hf_folder(folder, to_transformers(weights, kind, prefix), config, colours)
    return folder


def test_transformers_vits_use_norms_and_heads_of_their_configuration(tmp_path):
    # An epsilon of 1e-2 changes the features, unlike the default of 1e-12.
    model = timm_model(heads=4, norm_layer=lambda dim, **_: torch.nn.LayerNorm(dim, eps=1e-2))
    folder = hugging_face_folder(
        tmp_path / "vit", "vit", model.state_dict(), num_attention_heads=4, layer_norm_eps=1e-2
    )
    encoder = same_features(f"local-dir:{folder}", model, extra=("token_normed",))
    assert (encoder.num_heads, encoder.name) == (4, "vit")
    assert encoder.sha256 == file_sha256(folder / "model.safetensors")
    (tmp_path / "link").symlink_to("vit")
    assert load_encoder(f"local-dir:{tmp_path}/link").name == "vit"
    random = load_encoder(f"random:{encoder.uri}")
    assert random.architecture == encoder.architecture
    assert random.normalization_source == encoder.normalization_source == "preprocessor_config.json"


@pytest.mark.parametrize("registers", [0, 4])
def test_a_transformers_dinov2_gives_the_features_of_timm(tmp_path, registers):
    model, weights = dinov2_weights(registers)
    kind = "dinov2_with_registers" if registers else "dinov2"
    folder = hugging_face_folder(
        tmp_path / "hf", kind, weights, prefix=f"{kind}.", patch_size=14, image_size=56
    )
    encoder = same_features(f"local-dir:{folder}", model, extra=("cls_normed",))
    assert encoder.num_registers == registers
    assert encoder.weights_info.ignored.keys() == {"embeddings.mask_token"}


def test_a_transformers_mae_is_loaded_without_its_decoder(tmp_path):
    model = timm_model()
    folder = hugging_face_folder(tmp_path / "mae", "vit_mae", model.state_dict(), prefix="vit.")
    path = folder / "model.safetensors"
    more = {"decoder.mask_token": torch.ones(1), "decoder.decoder_pred.weight": torch.ones(2)}
    safetensors.torch.save_file({**safetensors.torch.load_file(path), **more}, path)
    encoder = same_features(f"local-dir:{folder}", model)
    assert encoder.weights_info.ignored.keys() == more.keys()


def test_a_missing_normalisation_is_refused_with_a_working_hint(tmp_path):
    folder = hugging_face_folder(tmp_path / "vit", "vit", dict(timm_model().state_dict()))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError) as raised:
        load_encoder(f"local-dir:{folder}")
    flag, advised = raised.value.hint
    assert flag == "--checkpoint"
    encoder = load_encoder(advised)
    assert (encoder.mean, encoder.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert encoder.sha256 == file_sha256(folder / "model.safetensors")


def test_transformers_files_without_their_folder_are_refused_with_a_hint(tmp_path):
    folder = hugging_face_folder(tmp_path / "hf", "vit", dict(timm_model().state_dict()))
    assert f"`--checkpoint local-dir:{folder}`" in get_load_error(folder / "model.safetensors")
    assert f"local-dir:{folder}" in get_load_error(folder)
    torch.save({"embeddings.cls_token": torch.ones(1), "layer.0.x": torch.ones(1)}, folder / "x.pt")
    assert f"local-dir:{folder}" in get_load_error(folder / "x.pt")


def test_a_folder_that_lacks_files_is_refused_with_their_names(tmp_path):
    folder = hugging_face_folder(tmp_path / "hf", "vit", dict(timm_model().state_dict()))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert "has no model.safetensors" in get_load_error(f"local-dir:{folder}")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "max_shard_size='100GB'" in get_load_error(f"local-dir:{folder}")
    (folder / "config.json").write_text("[")
    assert "cannot be read" in get_load_error(f"local-dir:{folder}")
    (folder / "config.json").unlink()
    assert "with config.json" in get_load_error(f"local-dir:{folder}")
    assert "hf-hub:ORG/NAME" in get_load_error("hf-hub:a/b/c/d")


def timm_folder(folder: Path, **config: Any) -> tuple[Path, Any]:
    """Save a timm model in the format of timm's `save_for_hf`."""
    torch.manual_seed(1)
    arguments: dict[str, Any] = {"depth": 2, "img_size": 32, "patch_size": 8}
    model: Any = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, dynamic_img_size=True, **arguments
    )
    config = {
        "architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": arguments,
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, **config,
    }  # fmt: skip
    save_hf_folder(folder, model.state_dict(), config)
    model.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    return folder, model.eval()


def test_a_timm_folder_follows_its_configuration(tmp_path):
    folder, model = timm_folder(tmp_path / "mine")
    encoder = same_features(f"local-dir:{folder}", model, extra=("token_normed",))
    assert (encoder.depth, encoder.patch_size, encoder.native_size) == (2, 8, (32, 32))
    assert encoder.weights_info.ignored.keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("arguments", [{"num_heads": 6}, {}])
def test_random_weights_have_the_architecture_of_the_folder(tmp_path, arguments):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **arguments)
    config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments or None}
    # With null, the defaults of timm are used.
    config["pretrained_cfg"] = None
    trained = save_hf_folder(tmp_path / "timm", model.state_dict(), config)
    uri = f"random:{trained}"
    # timm's architecture has 3 heads.
    if arguments:
        assert "initialisation is unknown" in get_load_error(uri)
        return
    random, expected = load_encoder(uri), load_encoder(trained)
    stated = load_encoder(f"random:mean=.4,std=.25:{trained}")
    assert (stated.mean, stated.std) == ((0.4,) * 3, (0.25,) * 3)
    assert random.architecture == expected.architecture
    assert random.normalization_source == expected.normalization_source
    assert random.normalization_source.startswith("assumed")


def test_weights_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    folder, _ = timm_folder(tmp_path / "hf")
    read = timm_encoder.read_weights

    def replace_and_read(path):
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
        return read(path)

    monkeypatch.setattr(timm_encoder, "read_weights", replace_and_read)
    assert "was replaced while it was read" in get_load_error(f"local-dir:{folder}")


@pytest.mark.parametrize("revision", ["", "@abc123"])
def test_a_cached_repository_needs_no_network(tmp_path, monkeypatch, revision):
    folder, model = timm_folder(tmp_path / "mine")
    requests = []

    # A filled cache is simulated, because huggingface_hub defines its layout.
    def find_in_cache(repository, name, revision=None):
        requests.append((repository, revision))
        return str(folder / name)

    monkeypatch.setattr(hub.huggingface_hub, "try_to_load_from_cache", find_in_cache)
    encoder = same_features(f"hf-hub:org/mine{revision}", model)
    assert encoder.name == f"mine{revision}"
    assert set(requests) == {("org/mine", revision[1:] or None)}


@pytest.mark.parametrize(
    ("kind", "grid"), [("vit", (2, 8)), ("vit_mae", (3, 5)), ("dinov2", (8, 2))]
)
def test_the_grid_comes_from_the_configuration(tmp_path, kind, grid):
    model = timm_model(grid=grid)
    size = [8 * side for side in grid]
    folder = hugging_face_folder(
        tmp_path / "hf", kind, model.state_dict(), image_size=size, patch_size=[8, 8]
    )
    encoder = same_features(f"local-dir:{folder}", model)
    assert "assumed" not in encoder.weights_info.note
    assert encoder.architecture["grid_size"] == list(grid)
    assert encoder.native_size == tuple(size)
    random = load_encoder(f"random:local-dir:{folder}")
    assert random.architecture == encoder.architecture


def test_an_assumed_square_grid_is_announced(tmp_path, capsys):
    folder = hugging_face_folder(
        tmp_path / "hf", "vit", dict(timm_model().state_dict()), image_size=None
    )
    load_and_log(f"local-dir:{folder}")
    assert "square grid assumed, 4 x 4 patches" in capsys.readouterr().err
    weights = dict(timm_model(grid=(3, 5)).state_dict())
    folder = hugging_face_folder(tmp_path / "3x5", "vit", weights, image_size=None)
    assert "image_size=[HEIGHT, WIDTH]" in get_load_error(f"local-dir:{folder}")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "quick_gelu"}, {"use_swiglu_ffn": True}, {"hidden_size": 192},
        {"num_attention_heads": None}, {"num_attention_heads": 3}, {"model_type": "swin"},
        {"image_size": 64}, {"image_size": [32]}, {"patch_size": 16}, {"patch_size": [8, 4]},
        {"intermediate_size": 128}, {"qkv_bias": False}, {"layer_norm_eps": float("nan")},
        {"layer_norm_eps": 0}, {"num_hidden_layers": 3}, {"num_register_tokens": 1},
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_configurations_are_refused(tmp_path, change):
    weights = dict(timm_model().state_dict())
    folder = hugging_face_folder(tmp_path / "hf", "vit", weights, **change)
    get_load_error(f"local-dir:{folder}")


def folder_with_preprocessor(tmp_path: Path, **changes: Any) -> str:
    folder = hugging_face_folder(tmp_path / "hf", "vit", dict(timm_model().state_dict()))
    described = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    return f"local-dir:{folder}"


@pytest.mark.parametrize(
    ("normalized", "rescaled"),
    [
        ({}, {}),
        ({"do_normalize": True}, {"rescale_factor": 1 / 127.5}),
        ({"do_normalize": False}, {"do_rescale": False, "rescale_factor": 7.0}),
        ({"do_normalize": False}, {}),
    ],
)
def test_pixels_are_normalised_as_the_preprocessor_states(tmp_path, normalized, rescaled):
    encoder = load_encoder(folder_with_preprocessor(tmp_path, **normalized, **rescaled))
    factor = rescaled.get("rescale_factor", 1 / 255) if rescaled.get("do_rescale", True) else 1
    red = 200.0 * factor
    if normalized.get("do_normalize", True):
        red = (red - 0.5) / 0.2
    assert (200 / 255 - encoder.mean[0]) / encoder.std[0] == pytest.approx(red)


@pytest.mark.parametrize(
    "change",
    [
        {"do_normalize": "false"}, {"do_rescale": None}, {"rescale_factor": 0},
        {"rescale_factor": 1e-310}, {"rescale_factor": "1/255"},
        {"image_mean": [0.5, float("nan"), 0.5]}, {"image_mean": [0.5]},
        {"image_std": [0.2, 0.3, 0]}, {"do_flip_channel_order": True}, {"rescale_offset": True},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_preprocessor_is_refused_by_key(tmp_path, change):
    (key,) = change
    assert key in get_load_error(folder_with_preprocessor(tmp_path, **change))


def test_a_timm_folder_cannot_name_another_file_of_weights(tmp_path):
    other, _ = timm_folder(tmp_path / "other")
    arguments = {"depth": 2, "checkpoint_path": str(other / "model.safetensors")}
    folder, _ = timm_folder(tmp_path / "mine", model_args=arguments)
    assert "model_args" in get_load_error(f"local-dir:{folder}")


# DINOv3: https://github.com/facebookresearch/dinov3, and dinov3_vit/modeling_dinov3_vit.py of
# transformers.
ARCHITECTURE = "vit_tiny_patch16_dinov3_qkvb"
TO_TRANSFORMERS = {
    r"(cls|mask)_token": r"embeddings.\1_token",
    r"storage_tokens": r"embeddings.register_tokens",
    r"patch_embed\.proj": r"embeddings.patch_embeddings",
    r"blocks\.(\d+)\.ls(\d)\.gamma": r"layer.\1.layer_scale\2.lambda1",
    r"attn\.proj": r"attention.o_proj",
    r"mlp\.fc1": r"mlp.up_proj",
    r"mlp\.fc2": r"mlp.down_proj",
    r"^blocks\.": r"layer.",
}
DINOV3_CONFIG = {"model_type": "dinov3_vit", "rope_theta": 100.0}
DINOV3_COLOURS = {"image_mean": [0.43, 0.411, 0.296], "image_std": [0.213, 0.156, 0.143]}


@pytest.fixture(scope="module")
def dinov3() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(ARCHITECTURE, num_classes=0, dynamic_img_size=True).eval()
    for parameter in model.parameters():
        # Biases and scales are large, so that a missing one would be noticed.
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
        else:
            nn.init.uniform_(parameter, -1.5, 1.5)
    return model


def official_weights(model: nn.Module) -> dict[str, Tensor]:
    """Rename the weights of a model as in the official DINOv3 checkpoints."""
    names = {r"gamma_([12])": r"ls\1.gamma", "reg_token": "storage_tokens"}
    weights = rename_weights(model.state_dict(), names)
    weights = {name: value for name, value in weights.items() if "_bias" not in name}
    weights |= {"mask_token": torch.zeros(1, 192), "rope_embed.periods": torch.ones(16)}
    for block, parts in enumerate(model.get_submodule("blocks").children()):
        attention = parts.get_submodule("attn")
        query, value = attention.get_parameter("q_bias"), attention.get_parameter("v_bias")
        thirds = torch.cat([query, torch.zeros_like(query), value]).detach()
        weights[f"blocks.{block}.attn.qkv.bias"] = thirds
        weights[f"blocks.{block}.attn.qkv.bias_mask"] = torch.ones_like(thirds)
    return weights


def dinov3_folder(root: Path, model: nn.Module, **config: object) -> str:
    """Save a DINOv3 model in the format of transformers' `save_pretrained`."""
    weights = {}
    for name, value in rename_weights(official_weights(model), TO_TRANSFORMERS).items():
        if "qkv" in name and "bias_mask" not in name:
            for third, part in zip("qkv", value.chunk(3), strict=True):
                kind = name.rpartition(".")[2]
                if (third, kind) != ("k", "bias"):
                    start = name.partition("attn")[0]
                    weights[f"{start}attention.{third}_proj.{kind}"] = part.contiguous()
        elif "qkv" not in name and not name.startswith("rope_embed"):
            weights[name] = value.clone()
    return save_hf_folder(root, weights, {**DINOV3_CONFIG, **config}, DINOV3_COLOURS)


def assert_same_features(uri: str, model: Any) -> None:
    encoder = load_encoder(uri)
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (5, 4)
    image = torch.rand(1, 3, 32, 48)
    last = encoder.depth - 1
    features = FeatureExtractor(encoder, layers=[last], facets=["token_normed"])(image)
    with torch.no_grad():
        expected = model.forward_features(normalise(encoder, image))[:, 5:]
    torch.testing.assert_close(
        features[last]["token_normed"].flatten(1, 2), expected, rtol=1e-4, atol=1e-4
    )


def test_hints_for_dinov3_files_load_them_with_biases(tmp_path, dinov3):
    path = tmp_path / "dinov3_vitt16_pretrain.pth"
    torch.save(official_weights(dinov3), path)
    (hint,) = re.findall(r"timm:[^`\s]+", get_load_error(path))
    assert hint == f"timm:{ARCHITECTURE}@{path}"
    assert_same_features(hint, dinov3)


def test_a_transformers_dinov3_has_its_own_normalisation_and_depth(tmp_path, dinov3):
    model = deepcopy(dinov3)
    model.blocks = nn.ModuleList(list(model.blocks)[:2])
    folder = dinov3_folder(tmp_path / "dinov3", model)
    assert_same_features(folder, model)
    encoder = load_encoder(folder)
    assert encoder.mean == pytest.approx(DINOV3_COLOURS["image_mean"])
    assert encoder.normalization_source == "preprocessor_config.json"
    # Only the mask token is not used.
    assert (encoder.loaded_keys, encoder.total_keys) == (40, 41)
    # timm supports no other base of the rotary positions. Its key depends on the version of
    # transformers.
    places = ({"rope_theta": 50.0}, {"rope_parameters": {"rope_theta": 50.0}})
    for number, stated in enumerate(places):
        folder = dinov3_folder(tmp_path / f"rotated{number}", model, **stated)
        assert "rope_theta=50.0" in get_load_error(folder)
