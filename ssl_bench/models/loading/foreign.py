"""Other people's weights as a model of ours: every tensor is used, or left out for a reason."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, ConfigurationError, escape_braces
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.encoder import (
    ASSUMED,
    IMAGENET_COLOURS,
    Colours,
    Contents,
    Encoder,
    encoder_from_model,
)
from ssl_bench.models.loading.checkpoint import (
    IN_PYTHON,
    MODEL_FOLDER,
    PYTHON_FILE,
    load_weights,
    read_weights,
    shape_text,
    unreplaced,
    verified_sha256,
    with_model_args,
)
from ssl_bench.models.loading.layouts import (
    DINOV3_TRANSFORMERS,
    Backbone,
    Description,
    Layout,
    backbone_weights,
    dinov3_architecture,
    recognised,
    refuse_strangers,
    renamed,
    ways_to_load,
)
from ssl_bench.models.vit import VisionTransformer

ASSUMED_GRID = "square grid assumed, {} x {} patches"
# The usual width of a head, which no tensor shape tells.
_HEAD_DIM = 64
_NEEDED = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
_SCALED = {1: "attn.proj", 2: "mlp.fc2"}


def load_foreign(
    path: Path,
    *,
    uri: str,
    name: str,
    described: Description | None = None,
    colours: Colours = IMAGENET_COLOURS,
    colours_from: str = ASSUMED,
) -> Encoder:
    """A ViT with skips from the layouts of DINO, DINOv2, MAE, iBOT, MoCo-v3 or transformers.

    `described` is needed for transformers; the other layouts imply it, and an ONNX file that
    transformers was exported to says all of its own.
    """
    # A file of safetensors is mapped: its weights are read when they are copied into the model.
    with unreplaced(path):
        digest = verified_sha256(path)
        if path.suffix == ".onnx":
            from ssl_bench.models.loading.onnx_file import read_onnx

            content, described = read_onnx(path)
        else:
            content = read_weights(path)
        backbone = backbone_weights(content, path)
        names = list(backbone.weights)
        layout = recognised(names, backbone.prefixes)
        if described is None and any(one.startswith("embeddings.") for one in names):
            raise CheckpointError(
                f"{path} has the layout of transformers, whose heads and norms stand in "
                "config.json; type the folder once "
                f"model.save_pretrained({str(path.parent)!r}) has written both there",
                hint=("--checkpoint", f"local-dir:{escape_braces(str(path.parent))}"),
            )
        if (architecture := dinov3_architecture(backbone.weights)) is not None:
            raise CheckpointError(
                f"{path} is a DINOv3, whose rotary positions the ViT of this suite does not have",
                hint=("--checkpoint", f"timm:{architecture}@{escape_braces(str(path))}"),
            )
        refuse_strangers(backbone.weights, path)
        weights, dropped = renamed(layout, backbone.weights, path)
        used = len(weights)
        note = backbone.note + _fuse_queries_keys_values(weights, path)
        config, grid_size, assumed = _inferred_config(weights, layout, described, path)
        note += assumed + _fold_layer_scales(weights, config)
        model = VisionTransformer(config, grid_size)
        load_weights(model, weights, path, hint=ways_to_load(backbone.weights, path))
    if described is not None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = described.norm_eps
        model.position_margin = described.position_margin
    ignored = {**backbone.ignored, **dropped}
    return encoder_from_model(
        model,
        name=name,
        uri=uri,
        sha256=digest,
        keys=(used, backbone.total),
        contents=Contents(layout.name, layout.source, ignored, note.strip(" ;"), path),
        colours=colours,
        colours_from=colours_from,
    )


def _fuse_queries_keys_values(weights: dict[str, Tensor], path: Path) -> str:
    """Put three linear layers into the one that a block of ours has; the same products."""
    parts = [re.fullmatch(r"(blocks\.\d+\.attn\.)query\.(\w+)", name) for name in weights]
    for start, kind in [(part[1], part[2]) for part in parts if part]:
        names = [f"{start}{third}.{kind}" for third in ("query", "key", "value")]
        shapes = [weights[name].shape if name in weights else None for name in names]
        if len(set(shapes)) > 1 or not shapes[0]:
            came = ", ".join("nothing" if shape is None else str(tuple(shape)) for shape in shapes)
            raise CheckpointError(
                f"{path}: expected equal shapes of {', '.join(names)}, came {came}; copy or "
                "download it again"
            )
        weights[f"{start}qkv.{kind}"] = torch.cat([weights.pop(name) for name in names])
    return "query, key and value are one layer here; " if any(parts) else ""


def dinov3_weights(backbone: Backbone, path: Path) -> Backbone:
    """Weights that transformers wrote under DINOv3's own names."""
    weights, dropped = renamed(DINOV3_TRANSFORMERS, backbone.weights, path)
    gated = any(".mlp.w1." in name for name in weights)
    for old, new in (
        ("up_proj", "w2" if gated else "fc1"),
        ("down_proj", "w3" if gated else "fc2"),
    ):
        pattern = rf"(?:model\.)?layer\.(\d+)\.mlp\.{old}\.(\w+)"
        weights = {re.sub(pattern, rf"blocks.\1.mlp.{new}.\2", n): w for n, w in weights.items()}
    for name in [name for name in weights if name.endswith("attn.query.bias")]:
        # Keys have none, which is what zeros are.
        zeros = torch.zeros_like(weights[name])
        weights.setdefault(name.replace("query", "key"), zeros)
    _fuse_queries_keys_values(weights, path)
    return replace(backbone, weights=weights, ignored={**backbone.ignored, **dropped})


def _fold_layer_scales(weights: dict[str, Tensor], config: ViTConfig) -> str:
    """Multiply LayerScale into the layer before it, which gives the same sums.

    Where one is missing or of another shape none is folded, and loading names those that are left.
    """
    names = [f"blocks.{layer}.ls{half}.gamma" for layer in range(config.depth) for half in _SCALED]
    if any(name not in weights or weights[name].shape != (config.dim,) for name in names):
        return ""
    for layer in range(config.depth):
        for half, linear in _SCALED.items():
            gamma = weights.pop(f"blocks.{layer}.ls{half}.gamma")
            for kind in ("weight", "bias"):
                name = f"blocks.{layer}.{linear}.{kind}"
                # Loading refuses any other shape.
                if name in weights and weights[name].shape[:1] == (config.dim,):
                    scale = gamma[:, None] if kind == "weight" else gamma
                    # A file in half precision would lose digits in the product.
                    weights[name] = weights[name].float() * scale.float()
    return "LayerScale is multiplied into attn.proj and mlp.fc2; "


def _inferred_config(
    weights: Mapping[str, Tensor], layout: Layout, described: Description | None, path: Path
) -> tuple[ViTConfig, tuple[int, int], str]:
    """Configuration, rows and columns of the positions, and what of both is assumed."""
    _require_needed(weights, layout, path, head_dim=_HEAD_DIM if described is None else 1)
    kernel, positions = weights["patch_embed.proj.weight"], weights["pos_embed"]
    dim, patch_size = len(kernel), kernel.shape[-1]
    blocks = [re.match(r"blocks\.(\d+)\.", name) for name in weights]
    registers = weights.get("reg_token")
    rows, cols, assumed = _grid_size(described, positions.shape[1] - 1, patch_size, path)
    if described is None:
        heads = layout.heads.get(dim, dim // _HEAD_DIM)
        other = with_model_args(path, '"num_heads": N') + ", and type local-dir:FOLDER"
        if not layout.is_read_by_timm:
            other = f"{IN_PYTHON}, and type FILE.py:NAME"
        assumed += f"{heads} heads of {dim // heads} channels assumed, if it has others {other}; "
    else:
        heads = described.num_heads
    try:
        config = ViTConfig(
            image_size=rows * patch_size,
            patch_size=patch_size,
            dim=dim,
            depth=1 + max(int(block[1]) for block in blocks if block),
            num_heads=heads,
            mlp_ratio=len(weights["blocks.0.mlp.fc1.weight"]) / dim,
            qkv_bias="blocks.0.attn.qkv.bias" in weights,
            num_registers=0 if registers is None or registers.ndim != 3 else registers.shape[1],
        )
    except ConfigurationError as error:
        raise CheckpointError(f"{path} does not fit the ViT of this suite: {error}") from error
    return config, (rows, cols), assumed


def _grid_size(
    described: Description | None, num_patches: int, patch_size: int, path: Path
) -> tuple[int, int, str]:
    """Rows and columns of positions, and what of it is assumed."""
    if described is not None and described.image_size is not None:
        height, width = described.image_size
        rows, cols = height // patch_size, width // patch_size
        if rows * cols != num_patches:
            raise CheckpointError(
                f"{path} has pos_embed for {num_patches} patches; config.json says images of "
                f"{height} x {width} pixels, which are {rows} x {cols} patches of {patch_size}; "
                "fetch both again"
            )
        return rows, cols, ""
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        way, hint = "say image_size=[HEIGHT, WIDTH] in its config.json", ()
        if described is None:
            way, hint = with_model_args(path, '"img_size": [HEIGHT, WIDTH]'), MODEL_FOLDER
        raise CheckpointError(
            f"{path} has pos_embed for {num_patches} patches, which are no square, and nothing "
            f"says rows and columns; {way}",
            hint=hint,
        )
    return side, side, f"{ASSUMED_GRID.format(side, side)}; "


def _require_needed(
    weights: Mapping[str, Tensor], layout: Layout, path: Path, *, head_dim: int
) -> None:
    missing = [name for name in _NEEDED if name not in weights]
    if missing:
        came = ", ".join(list(weights)[:3]) or "no tensors"
        raise CheckpointError(
            f"{path} is no Vision Transformer in DINO's layout or one that is like it: expected "
            f"{', '.join(missing)}, came {came}; rename its keys, or {IN_PYTHON}",
            hint=ways_to_load(weights, path),
        )
    _, positions, kernel, linear = (weights[name] for name in _NEEDED)
    if kernel.ndim == 2:
        raise CheckpointError(
            f"{path} embeds patches by a linear layer ({_NEEDED[2]} is {shape_text(kernel)}), and "
            "nothing says in which order its pixels stand; reshape it to dim x 3 x rows x columns, "
            f"or {IN_PYTHON}",
            hint=PYTHON_FILE,
        )
    if kernel.ndim == 4 and (kernel.shape[1] != 3 or kernel.shape[2] != kernel.shape[3]):
        raise CheckpointError(
            f"{path} has patches of {kernel.shape[2]} x {kernel.shape[3]} pixels in "
            f"{kernel.shape[1]} channels ({_NEEDED[2]}), expected squares of RGB; take another "
            "encoder"
        )
    sound = kernel.ndim == 4 and positions.ndim == 3 and positions.shape[1] > 1 and linear.ndim == 2
    if not sound or len(kernel) % head_dim:
        came = (f"{name} {tuple(weights[name].shape)}" for name in _NEEDED)
        raise CheckpointError(
            f"{path} is no Vision Transformer of {layout.name}: expected a width that is a "
            f"multiple of {head_dim}, came {', '.join(came)}; take timm's name of its "
            "architecture",
            hint=("--checkpoint", f"timm:{{timm_name}}@{escape_braces(str(path))}"),
        )
