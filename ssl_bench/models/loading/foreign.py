"""Load Vision Transformers from weights files of other projects.

Each tensor of a file is either loaded or ignored. `Encoder.weights_info.ignored` states why a
tensor was ignored.
"""

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
    IMAGENET_NORMALIZATION,
    Encoder,
    Normalization,
    WeightsInfo,
    encoder_from_model,
)
from ssl_bench.models.loading.backbone import Backbone, find_backbone
from ssl_bench.models.loading.checkpoint import (
    MODEL_FOLDER,
    PYTHON_ADVICE,
    PYTHON_FILE,
    advise_model_folder,
    format_shape,
    load_weights,
    read_weights,
    require_unchanged,
    timm_hint,
    verify_sha256,
)
from ssl_bench.models.loading.layouts import (
    DINOV3_TRANSFORMERS,
    Layout,
    ModelSpec,
    build_load_hint,
    dinov3_architecture,
    find_layout,
    reject_unsupported,
    rename_tensors,
)
from ssl_bench.models.vit import VisionTransformer

ASSUMED_GRID = "square grid assumed, {} x {} patches"
# The usual number of channels per head. The true number cannot be inferred from tensor shapes.
_HEAD_DIM = 64
_REQUIRED = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
_SCALED_LAYERS = {1: "attn.proj", 2: "mlp.fc2"}


def load_foreign(
    path: Path,
    *,
    uri: str,
    name: str,
    model_spec: ModelSpec | None = None,
    normalization: Normalization = IMAGENET_NORMALIZATION,
    normalization_source: str = ASSUMED,
) -> Encoder:
    """Load a ViT from a weights file of another project.

    The tensors must be named as in one of the `LAYOUTS`, unless the file is an ONNX file.

    Args:
        path: The weights file.
        uri: Address of the encoder, such as the path of the file.
        name: Name of the encoder in tables.
        model_spec: Properties of the encoder from its config.json. None if there is no such file.
            Only files in the transformers library's layout need one.
        normalization: Mean and standard deviation of the training images.
        normalization_source: Text that names the source of `normalization`.
    """
    # A safetensors file is memory-mapped, so its weights are only read when they are copied.
    with require_unchanged(path):
        digest = verify_sha256(path)
        if path.suffix == ".onnx":
            from ssl_bench.models.loading.onnx_file import read_onnx

            content, model_spec = read_onnx(path)
        else:
            content = read_weights(path)
        backbone = find_backbone(content, path)
        names = list(backbone.weights)
        layout = find_layout(names, backbone.prefixes)
        if model_spec is None and any(key.startswith("embeddings.") for key in names):
            raise CheckpointError(
                f"{path} has the layout of the transformers library, which states the number of "
                "heads in config.json. Save the weights and config.json with "
                f"model.save_pretrained({str(path.parent)!r}), and load the folder",
                hint=("--checkpoint", f"local-dir:{escape_braces(str(path.parent))}"),
            )
        if (architecture := dinov3_architecture(backbone.weights)) is not None:
            raise CheckpointError(
                f"{path} is a DINOv3. The ViT of ssl-bench has no rotary positions",
                hint=timm_hint(path, architecture),
            )
        reject_unsupported(backbone.weights, path)
        weights, dropped = rename_tensors(layout, backbone.weights, path)
        used = len(weights)
        note = backbone.note + _fuse_queries_keys_values(weights, path)
        config, grid_size, assumed = _infer_config(weights, layout, model_spec, path)
        note += assumed + _fold_layer_scales(weights, config)
        model = VisionTransformer(config, grid_size)
        load_weights(model, weights, path, hint=build_load_hint(backbone.weights, path))
    if model_spec is not None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = model_spec.norm_eps
        model.position_margin = model_spec.position_margin
    ignored = {**backbone.ignored, **dropped}
    return encoder_from_model(
        model,
        name=name,
        uri=uri,
        sha256=digest,
        keys=(used, backbone.total),
        weights_info=WeightsInfo(layout.name, layout.source, ignored, note.strip(" ;"), path),
        normalization=normalization,
        normalization_source=normalization_source,
    )


def _fuse_queries_keys_values(weights: dict[str, Tensor], path: Path) -> str:
    """Join the query, key and value weights of each block into one tensor `attn.qkv`, in place.

    Returns:
        A note for users. It is empty if the weights are already joined.
    """
    matches = [re.fullmatch(r"(blocks\.\d+\.attn\.)query\.(\w+)", name) for name in weights]
    for prefix, kind in [(match[1], match[2]) for match in matches if match]:
        names = [f"{prefix}{third}.{kind}" for third in ("query", "key", "value")]
        shapes = [weights[name].shape if name in weights else None for name in names]
        if len(set(shapes)) > 1 or not shapes[0]:
            listed = ", ".join(
                "nothing" if shape is None else str(tuple(shape)) for shape in shapes
            )
            raise CheckpointError(
                f"{path}: expected equal shapes of {', '.join(names)}, got {listed}. Copy or "
                "download it again"
            )
        weights[f"{prefix}qkv.{kind}"] = torch.cat([weights.pop(name) for name in names])
    return "query, key and value are joined into one layer; " if any(matches) else ""


def rename_dinov3(backbone: Backbone, path: Path) -> Backbone:
    """Rename DINOv3 weights of the transformers library to the names that DINOv3's authors use.

    Queries, keys and values are joined into one layer. If queries have biases but keys have none,
    the biases of the keys are zeros.
    """
    weights, dropped = rename_tensors(DINOV3_TRANSFORMERS, backbone.weights, path)
    gated = any(".mlp.w1." in name for name in weights)
    for old, new in (
        ("up_proj", "w2" if gated else "fc1"),
        ("down_proj", "w3" if gated else "fc2"),
    ):
        pattern = rf"(?:model\.)?layer\.(\d+)\.mlp\.{old}\.(\w+)"
        weights = {re.sub(pattern, rf"blocks.\1.mlp.{new}.\2", n): w for n, w in weights.items()}
    for name in [name for name in weights if name.endswith("attn.query.bias")]:
        # Keys have no bias in DINOv3, so the bias of the keys in the joined layer is zero.
        zeros = torch.zeros_like(weights[name])
        weights.setdefault(name.replace("query", "key"), zeros)
    _fuse_queries_keys_values(weights, path)
    return replace(backbone, weights=weights, ignored={**backbone.ignored, **dropped})


def _fold_layer_scales(weights: dict[str, Tensor], config: ViTConfig) -> str:
    """Multiply each LayerScale into the preceding linear layer in place.

    With these weights, the model needs no LayerScale. If a LayerScale is missing or has an
    unexpected shape, nothing is changed. `load_weights` then raises an error, because the model has
    no parameter for a LayerScale.

    Returns:
        A note for users. It is empty if nothing is changed.
    """
    names = [
        f"blocks.{layer}.ls{half}.gamma" for layer in range(config.depth) for half in _SCALED_LAYERS
    ]
    if any(name not in weights or weights[name].shape != (config.dim,) for name in names):
        return ""
    for layer in range(config.depth):
        for half, linear in _SCALED_LAYERS.items():
            gamma = weights.pop(f"blocks.{layer}.ls{half}.gamma")
            for kind in ("weight", "bias"):
                name = f"blocks.{layer}.{linear}.{kind}"
                # Leave tensors of other shapes to `load_weights`, which reports them.
                if name in weights and weights[name].shape[:1] == (config.dim,):
                    scale = gamma[:, None] if kind == "weight" else gamma
                    # Multiply in float32. In half precision, the product would be less accurate.
                    weights[name] = weights[name].float() * scale.float()
    return "LayerScale is multiplied into attn.proj and mlp.fc2; "


def _infer_config(
    weights: Mapping[str, Tensor], layout: Layout, model_spec: ModelSpec | None, path: Path
) -> tuple[ViTConfig, tuple[int, int], str]:
    """Infer the configuration of a ViT from its weights.

    Returns:
        The configuration, the rows and columns of the position embedding, and a note for users
        about assumptions, such as the number of heads.
    """
    _check_required(weights, layout, path, head_dim=_HEAD_DIM if model_spec is None else 1)
    kernel, positions = weights["patch_embed.proj.weight"], weights["pos_embed"]
    dim, patch_size = len(kernel), kernel.shape[-1]
    blocks = [re.match(r"blocks\.(\d+)\.", name) for name in weights]
    registers = weights.get("reg_token")
    rows, cols, assumed = _grid_size(model_spec, positions.shape[1] - 1, patch_size, path)
    if model_spec is None:
        heads = layout.heads.get(dim, dim // _HEAD_DIM)
        other = advise_model_folder(path, '"num_heads": N') + ", and type local-dir:FOLDER"
        if not layout.is_read_by_timm:
            other = f"{PYTHON_ADVICE}, and type FILE.py:NAME"
        assumed += f"{heads} heads of {dim // heads} channels assumed. If this is wrong, {other}; "
    else:
        heads = model_spec.num_heads
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
        raise CheckpointError(
            f"{path} contains weights that the ViT of ssl-bench does not support: {error}"
        ) from error
    return config, (rows, cols), assumed


def _grid_size(
    model_spec: ModelSpec | None, num_patches: int, patch_size: int, path: Path
) -> tuple[int, int, str]:
    """Return the rows and columns of the position embedding, and a note about assumptions.

    Args:
        model_spec: Properties of the encoder from its config.json, which may state the image size.
        num_patches: Number of patches in the position embedding. If the image size is unknown, they
            must form a square.
        patch_size: Side of a patch in pixels.
        path: The weights file, for error messages.
    """
    if model_spec is not None and model_spec.image_size is not None:
        height, width = model_spec.image_size
        rows, cols = height // patch_size, width // patch_size
        if rows * cols != num_patches:
            raise CheckpointError(
                f"{path} has pos_embed for {num_patches} patches, but config.json states images "
                f"of {height} x {width} pixels, which have {rows} x {cols} patches of {patch_size} "
                "pixels. "
                "Download both files again"
            )
        return rows, cols, ""
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        remedy, hint = "set image_size=[HEIGHT, WIDTH] in its config.json", ()
        if model_spec is None:
            remedy, hint = advise_model_folder(path, '"img_size": [HEIGHT, WIDTH]'), MODEL_FOLDER
        raise CheckpointError(
            f"{path} has pos_embed for {num_patches} patches, which do not form a square, and does "
            f"not state their rows and columns. To load it, {remedy}",
            hint=hint,
        )
    return side, side, f"{ASSUMED_GRID.format(side, side)}; "


def _check_required(
    weights: Mapping[str, Tensor], layout: Layout, path: Path, *, head_dim: int
) -> None:
    missing = [name for name in _REQUIRED if name not in weights]
    if missing:
        first = ", ".join(list(weights)[:3]) or "no tensors"
        raise CheckpointError(
            f"{path} is not a Vision Transformer in a known layout: expected {', '.join(missing)}, "
            f"got {first}. Rename the tensors in the file, or {PYTHON_ADVICE}",
            hint=build_load_hint(weights, path),
        )
    _, positions, kernel, linear = (weights[name] for name in _REQUIRED)
    if kernel.ndim == 2:
        raise CheckpointError(
            f"{path} embeds patches with a linear layer ({_REQUIRED[2]} is {format_shape(kernel)}) "
            "and does not state the order of pixels. Reshape this tensor to dim x 3 x rows x "
            f"columns, or {PYTHON_ADVICE}",
            hint=PYTHON_FILE,
        )
    if kernel.ndim == 4 and (kernel.shape[1] != 3 or kernel.shape[2] != kernel.shape[3]):
        raise CheckpointError(
            f"{path} has patches of {kernel.shape[2]} x {kernel.shape[3]} pixels in "
            f"{kernel.shape[1]} channels ({_REQUIRED[2]}), expected square RGB patches. To use it, "
            f"{PYTHON_ADVICE}"
        )
    has_axes = (kernel.ndim, positions.ndim, linear.ndim) == (4, 3, 2) and positions.shape[1] > 1
    if not has_axes or len(kernel) % head_dim:
        shapes = (f"{name} {tuple(weights[name].shape)}" for name in _REQUIRED)
        raise CheckpointError(
            f"{path} is not a {layout.name} Vision Transformer: expected a width that is a "
            f"multiple of {head_dim}, got {', '.join(shapes)}. If timm has this "
            "architecture, load the file under the name that timm uses for it",
            hint=timm_hint(path),
        )
