"""A frozen model with everything a probe must know about it."""

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from ssl_bench.models.vit import VisionTransformer

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Encoder:
    """A frozen Vision Transformer, whatever library it comes from.

    Args:
        module: Has `blocks`, `norm` and, in each block, `attn.qkv`; in evaluation mode.
        name: How tables call it.
        uri: What was asked for.
        sha256: Of the weights file, or of the state dict where there is no file.
        num_prefix_tokens: Tokens before the patches: [CLS], registers.
        mean: Of the images it was trained on, RGB in [0, 1].
        std: Likewise.
        native_size: Height and width in pixels of its position embedding.
        loaded_keys: Weights taken from the file.
        total_keys: Weights the file holds, heads included.
    """

    module: nn.Module
    name: str
    uri: str
    sha256: str
    patch_size: int
    depth: int
    dim: int
    num_heads: int
    num_prefix_tokens: int
    native_size: tuple[int, int]
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    loaded_keys: int = 0
    total_keys: int = 0


def encoder_from_vit(
    model: VisionTransformer,
    *,
    name: str,
    uri: str = "memory",
    sha256: str | None = None,
    keys: tuple[int, int] = (0, 0),
) -> Encoder:
    """Freeze a model of ours as an encoder; `keys` counts loaded and all weights of its file."""
    config = model.config
    return Encoder(
        module=model.eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256 or state_dict_sha256(model),
        patch_size=config.patch_size,
        depth=config.depth,
        dim=config.dim,
        num_heads=config.num_heads,
        num_prefix_tokens=config.num_prefix_tokens,
        native_size=(config.image_size, config.image_size),
        loaded_keys=keys[0],
        total_keys=keys[1],
    )


def state_dict_sha256(module: nn.Module) -> str:
    """Hexadecimal sha256 over names, shapes and bytes of all weights, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
