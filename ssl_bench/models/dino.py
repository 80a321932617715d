"""Official DINO weights as a model of ours: the architecture is read off the shapes."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ssl_bench.errors import CheckpointError
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.vit import VisionTransformer
from ssl_bench.models.weights import backbone_weights, load_weights, read_weights

# Every DINO ViT has heads of this width, and no tensor shape tells it.
_HEAD_DIM = 64
_TELLING = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")


def load_dino(path: Path) -> tuple[VisionTransformer, tuple[int, int]]:
    """A ViT with skips in DINO's layout, and how many keys of how many were loaded.

    Raises:
        CheckpointError: The file cannot be read, or is not exactly such a ViT.
    """
    weights, total = backbone_weights(read_weights(path))
    model = VisionTransformer(_inferred_config(weights, path))
    load_weights(model, weights, path)
    return model, (len(weights), total)


def _inferred_config(weights: Mapping[str, Tensor], path: Path) -> ViTConfig:
    missing = [name for name in _TELLING if name not in weights]
    if missing:
        came = ", ".join(list(weights)[:3]) or "no tensors"
        raise CheckpointError(
            f"{path} is no Vision Transformer in DINO's layout: expected {', '.join(missing)}, "
            f"came {came}; rename its keys, or use timm:NAME@{path.name}"
        )
    kernel, positions = weights["patch_embed.proj.weight"], weights["pos_embed"]
    dim = len(kernel)
    if kernel.ndim != 4 or positions.ndim != 3 or positions.shape[1] < 2 or dim % _HEAD_DIM:
        raise CheckpointError(
            f"{path} is no Vision Transformer of DINO: expected a width that is a multiple of "
            f"{_HEAD_DIM}, came patch_embed.proj.weight {tuple(kernel.shape)} and pos_embed "
            f"{tuple(positions.shape)}; use timm:NAME@{path.name}"
        )
    patch_size = kernel.shape[-1]
    blocks = [re.match(r"blocks\.(\d+)\.", name) for name in weights]
    return ViTConfig(
        image_size=math.isqrt(positions.shape[1] - 1) * patch_size,
        patch_size=patch_size,
        dim=dim,
        depth=1 + max(int(block[1]) for block in blocks if block),
        num_heads=dim // _HEAD_DIM,
        mlp_ratio=len(weights["blocks.0.mlp.fc1.weight"]) / dim,
        qkv_bias="blocks.0.attn.qkv.bias" in weights,
    )
