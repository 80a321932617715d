"""DINOv3 as it is published: its own files, and folders of transformers; the tensors are random.

The names are restated from https://github.com/facebookresearch/dinov3 and from transformers'
models/dinov3_vit/modeling_dinov3_vit.py.
"""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from ssl_bench.features import FeatureExtractor
from ssl_bench.models import load_encoder
from tests.support.foreign_weights import folder_of, message_of

ARCHITECTURE = "vit_tiny_patch16_dinov3_qkvb"
TO_TRANSFORMERS = (
    (r"(cls|mask)_token", r"embeddings.\1_token"),
    (r"storage_tokens", r"embeddings.register_tokens"),
    (r"patch_embed\.proj", r"embeddings.patch_embeddings"),
    (r"blocks\.(\d+)\.ls(\d)\.gamma", r"layer.\1.layer_scale\2.lambda1"),
    (r"attn\.proj", r"attention.o_proj"),
    (r"mlp\.fc1", r"mlp.up_proj"),
    (r"mlp\.fc2", r"mlp.down_proj"),
    (r"^blocks\.", r"layer."),
)
CONFIG = {"model_type": "dinov3_vit", "rope_theta": 100.0}
COLOURS = {"image_mean": [0.43, 0.411, 0.296], "image_std": [0.213, 0.156, 0.143]}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(ARCHITECTURE, num_classes=0, dynamic_img_size=True).eval()
    for parameter in model.parameters():
        # Large biases and scales, so that none can be left out unseen.
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
        else:
            nn.init.uniform_(parameter, -1.5, 1.5)
    return model


def own_names(model: nn.Module) -> dict[str, Tensor]:
    """The weights as DINOv3's own files have them."""
    weights: dict[str, Tensor] = {"mask_token": torch.zeros(1, 192)}
    weights["rope_embed.periods"] = torch.ones(16)
    for name, value in model.state_dict().items():
        new = re.sub(r"gamma_([12])", r"ls\1.gamma", name).replace("reg_token", "storage_tokens")
        if not name.endswith(("q_bias", "k_bias", "v_bias")):
            weights[new] = value
    for block, parts in enumerate(model.get_submodule("blocks").children()):
        attention = parts.get_submodule("attn")
        query, value = attention.get_parameter("q_bias"), attention.get_parameter("v_bias")
        thirds = torch.cat([query, torch.zeros_like(query), value]).detach()
        weights[f"blocks.{block}.attn.qkv.bias"] = thirds
        weights[f"blocks.{block}.attn.qkv.bias_mask"] = torch.ones_like(thirds)
    return weights


def folder_of_transformers(root: Path, model: nn.Module, **config: object) -> str:
    """A folder as `save_pretrained` leaves it; its address."""
    weights = {}
    for name, value in own_names(model).items():
        for pattern, replacement in TO_TRANSFORMERS:
            name = re.sub(pattern, replacement, name)
        if "qkv" in name and "bias_mask" not in name:
            for third, part in zip("qkv", value.chunk(3), strict=True):
                kind = name.rpartition(".")[2]
                if (third, kind) != ("k", "bias"):
                    start = name.partition("attn")[0]
                    weights[f"{start}attention.{third}_proj.{kind}"] = part.contiguous()
        elif "qkv" not in name and not name.startswith("rope_embed"):
            weights[name] = value.clone()
    return folder_of(root, weights, {**CONFIG, **config}, COLOURS)


def assert_same_features(uri: str, model: nn.Module) -> None:
    encoder = load_encoder(uri)
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (5, 4)
    image = torch.rand(1, 3, 32, 48)
    last = encoder.depth - 1
    features = FeatureExtractor(encoder, layers=[last], facets=["token_normed"])(image)
    mean, std = (torch.tensor(colour).view(3, 1, 1) for colour in (encoder.mean, encoder.std))
    with torch.no_grad():
        expected = model.forward_features((image - mean) / std)[:, 5:]  # pyrefly: ignore[not-callable]
    torch.testing.assert_close(
        features[last]["token_normed"].flatten(1, 2), expected, rtol=1e-4, atol=1e-4
    )


def test_the_advice_for_a_file_of_dinov3_loads_it_with_its_biases(tmp_path, model):
    path = tmp_path / "dinov3_vitt16_pretrain.pth"
    torch.save(own_names(model), path)

    said = message_of(path)

    advice = re.search(r"(timm:[^`\s]+)", said)
    assert advice is not None, said
    assert advice[1] == f"timm:{ARCHITECTURE}@{path}"
    assert_same_features(advice[1], model)


def test_a_folder_of_transformers_is_loaded_with_its_own_colours_and_depth(tmp_path, model):
    model = deepcopy(model)
    model.blocks = nn.ModuleList(list(model.blocks)[:3])
    folder = folder_of_transformers(tmp_path / "dinov3", model)

    assert_same_features(folder, model)

    encoder = load_encoder(folder)
    assert encoder.mean == pytest.approx(COLOURS["image_mean"])
    assert encoder.colours_from == "preprocessor_config.json"
    # timm does not compute other rotations.
    folder = folder_of_transformers(tmp_path / "rotated", model, rope_theta=50.0)
    assert "rope_theta=50.0" in message_of(folder)
