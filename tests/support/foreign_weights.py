"""Save random timm models in the weight formats of other projects."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.encoder import IMAGENET_MEAN, IMAGENET_STD
from ssl_bench.models.loading.timm_encoder import timm_encoder

Weights = dict[str, Tensor]


def timm_model(
    *,
    patch: int = 8,
    dim: int = 128,
    heads: int = 2,
    grid: tuple[int, int] = (4, 4),
    **kwargs: Any,
) -> Any:
    """Return a timm Vision Transformer with two blocks and random weights."""
    torch.manual_seed(0)
    model: Any = timm.models.VisionTransformer(
        img_size=(grid[0] * patch, grid[1] * patch), patch_size=patch, embed_dim=dim, depth=2,
        num_heads=heads, num_classes=0, dynamic_img_size=True, **kwargs,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.pretrained_cfg = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return model.eval()


def same_features(path: str | Path, model: Any, *, extra: Sequence[Facet] = ()) -> Encoder:
    """Load an encoder and check that its features equal those of a timm model."""
    expected = timm_encoder(model, uri="memory", name="original", sha256="")
    encoder = load_encoder(str(path))
    assert encoder.mean == expected.mean
    assert encoder.native_size == expected.native_size
    # Ignored names may include dictionaries beside the encoder, whose tensors are not counted.
    assert 0 <= encoder.total_keys - encoder.loaded_keys <= len(encoder.weights_info.ignored)
    facets: list[Facet] = ["token", "cls", "key", "query", "value", *extra]
    # The second size requires interpolated position embeddings.
    for size in (expected.native_size, (3 * expected.patch_size, 5 * expected.patch_size)):
        images = torch.rand(2, 3, *size)
        one = FeatureExtractor(encoder, layers=[0, 1], facets=facets)(images)
        other = FeatureExtractor(expected, layers=[0, 1], facets=facets)(images)
        for layer in one:
            for facet in facets:
                torch.testing.assert_close(
                    one[layer][facet], other[layer][facet], rtol=0, atol=1e-5,
                    msg=f"{layer} {facet} {size}",
                )  # fmt: skip
    return encoder


def assert_same_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    loaded = module.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def normalise(encoder: Encoder, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (encoder.mean, encoder.std))
    return (images - mean) / std


def rename_weights(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Weights:
    """Rename weights with the regular expressions in `names`."""
    result: Weights = {}
    for name, value in weights.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        result[name] = value
    return result


def save_checkpoint(path: Path, content: Mapping[str, Any]) -> Path:
    torch.save(dict(content), path)
    return path


def save_hf_folder(
    folder: Path, weights: Weights, config: Mapping[str, Any], colours: Mapping[str, Any] = {}
) -> str:
    """Save weights and configuration in a Hugging Face folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    if colours:
        (folder / "preprocessor_config.json").write_text(json.dumps(colours))
    return f"local-dir:{folder}"


def get_load_error(uri: str | Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load_encoder(str(uri))
    message = str(raised.value)
    assert "\n" not in message
    return message


# DINOv2: https://github.com/facebookresearch/dinov2/blob/e1277af2, dinov2/models/
# vision_transformer.py and dinov2/layers/layer_scale.py: `ls1.gamma`, `mask_token` (1, dim), and
# `register_tokens` (1, R, dim), which get no position embedding.
def dinov2_weights(registers: int) -> tuple[Any, Weights]:
    model = timm_model(
        patch=14, init_values=0.5, reg_tokens=registers, no_embed_class=registers > 0
    )
    weights = dict(model.state_dict())
    if registers:
        # timm has no position embedding of [CLS] here, but DINOv2 stores one.
        cls_position = 0.1 * torch.randn(1, 1, 128)
        weights["pos_embed"] = torch.cat([cls_position, weights["pos_embed"]], dim=1)
        weights["cls_token"] = weights["cls_token"] - cls_position
        weights["register_tokens"] = weights.pop("reg_token")
    return model, {**weights, "mask_token": torch.randn(1, 128)}
