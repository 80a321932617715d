"""Layouts of published Vision Transformers. A layout is a naming scheme of the tensors in a file.

To add a layout, define a `Layout` and insert it into `LAYOUTS` before DINO. If its patch embedding
or its blocks have new names, also extend the patterns in backbone.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ssl_bench.errors import CheckpointError, join_alternatives
from ssl_bench.models.encoder import DINO_NAMES
from ssl_bench.models.loading.checkpoint import (
    MODEL_FOLDER,
    PYTHON_ADVICE,
    PYTHON_FILE,
    TIMM_HINT,
    advise_model_folder,
    timm_hint,
)
from ssl_bench.models.vit import DINO_MARGIN

_MASKED = "token of masked patches, which probes do not use"
_BLOCK = r"blocks\.(\d+)\."


@dataclass(frozen=True)
class Layout:
    """The tensor names of a family of checkpoints, as regular expressions for whole names.

    Attributes:
        name: Name of the layout in messages and result records.
        source: URL of the code that defines the layout.
        patterns: Patterns that identify the layout. A file has the layout if a pattern matches a
            tensor name, or a prefix such as "base_encoder." that was removed from the names.
        renames: Rules that rename tensors, as pairs of a pattern and its replacement. For each
            name, the first rule whose pattern matches is used.
        ignored: Patterns of tensors that are not loaded, each with the reason.
        heads: Number of attention heads for some encoder widths. Encoders of other widths have one
            head per 64 channels.
        is_read_by_timm: Whether timm can load weights with these names.
    """

    name: str
    source: str
    patterns: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
    is_read_by_timm: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """Properties of an encoder that cannot be inferred from the shapes of its tensors.

    Attributes:
        num_heads: Number of attention heads in each block.
        norm_eps: Epsilon of all norms.
        image_size: Height and width in pixels of the images that fit the stored position embedding.
            None if unknown.
        position_margin: Number that is added to the new grid size when the position embedding is
            resized. It is the argument `margin` of `ssl_bench.models.vit.resize_positions`.
    """

    num_heads: int
    norm_eps: float
    image_size: tuple[int, int] | None = None
    position_margin: float = DINO_MARGIN


_LAYER_SCALES = ((rf"{_BLOCK}gamma_([12])", r"blocks.\1.ls\2.gamma"),)
# Published ViT-H, ViT-g and ViT-G have 16 heads.
_WIDE_HEADS = {1280: 16, 1408: 16, 1664: 16}

MOCO_V3 = Layout(
    "MoCo-v3",
    "https://github.com/facebookresearch/moco-v3/blob/1c6b717e/vits.py",
    patterns=(r"base_encoder\.",),
    # Its ViT-S has 12 heads of 32 channels.
    heads={384: 12, **_WIDE_HEADS},
)
DINOV2 = Layout(
    "DINOv2",
    "https://github.com/facebookresearch/dinov2/blob/e1277af2/dinov2/models/vision_transformer.py",
    patterns=(r"register_tokens", rf"{_BLOCK}ls1\.gamma", r"blocks\.\d+\.\d+\.norm1\.weight"),
    renames=(
        # If FSDP wrapped the blocks in chunks, the second number is the block's index.
        (r"blocks\.\d+\.(\d+)\.(.*)", r"blocks.\1.\2"),
        (r"register_tokens", r"reg_token"),
    ),
    ignored={r"mask_token": _MASKED},
    heads=_WIDE_HEADS,
)
MAE = Layout(
    "MAE",
    "https://github.com/facebookresearch/mae/blob/be47fef7/models_mae.py",
    patterns=(r"decoder_embed\.weight", r"fc_norm\.weight"),
    # Models with global pooling only have a final norm of the mean patch token, `fc_norm`.
    renames=((r"fc_norm\.(weight|bias)", r"norm.\1"), *_LAYER_SCALES),
    ignored={
        r"decoder_(?:embed|norm|pred|blocks)\..*|decoder_pos_embed": "decoder of MAE",
        r"mask_token": _MASKED,
    },
    heads=_WIDE_HEADS,
)
IBOT = Layout(
    "iBOT",
    "https://github.com/bytedance/ibot/blob/c24f870d/models/vision_transformer.py",
    patterns=(r"masked_embed", rf"{_BLOCK}gamma_1"),
    renames=_LAYER_SCALES,
    ignored={r"masked_embed": _MASKED},
    heads=_WIDE_HEADS,
)
DINO = Layout(
    DINO_NAMES,
    "https://github.com/facebookresearch/dino/blob/7c446df5/vision_transformer.py",
    heads=_WIDE_HEADS,
)
_TF_BLOCK = r"encoder\.layer\.(\d+)\."
TRANSFORMERS = Layout(
    "transformers",
    "https://github.com/huggingface/transformers/blob/015e6876/src/transformers/models/"
    "{vit,vit_mae,dinov2,dinov2_with_registers}",
    patterns=(r"embeddings\.patch_embeddings\.projection\.weight",),
    renames=(
        (r"embeddings\.cls_token", r"cls_token"),
        (r"embeddings\.position_embeddings", r"pos_embed"),
        (r"embeddings\.register_tokens", r"reg_token"),
        (r"embeddings\.patch_embeddings\.projection\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_TF_BLOCK}(?:norm1|layernorm_before)\.(\w+)", r"blocks.\1.norm1.\2"),
        (rf"{_TF_BLOCK}(?:norm2|layernorm_after)\.(\w+)", r"blocks.\1.norm2.\2"),
        (rf"{_TF_BLOCK}attention\.attention\.(query|key|value)\.(\w+)", r"blocks.\1.attn.\2.\3"),
        (rf"{_TF_BLOCK}attention\.output\.dense\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (rf"{_TF_BLOCK}(?:intermediate\.dense|mlp\.fc1)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_TF_BLOCK}(?:output\.dense|mlp\.fc2)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (rf"{_TF_BLOCK}layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
        (r"layernorm\.(\w+)", r"norm.\1"),
    ),
    ignored={r"embeddings\.mask_token": _MASKED},
    is_read_by_timm=False,
)
_TV_BLOCK = r"encoder\.layers\.encoder_layer_(\d+)\."
TORCHVISION = Layout(
    "torchvision",
    "https://github.com/pytorch/vision/blob/main/torchvision/models/vision_transformer.py",
    patterns=(r"conv_proj\.weight",),
    renames=(
        (r"class_token", r"cls_token"),
        (r"encoder\.pos_embedding", r"pos_embed"),
        (r"conv_proj\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_TV_BLOCK}ln_([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (rf"{_TV_BLOCK}self_attention\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        (rf"{_TV_BLOCK}self_attention\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        # The oldest torchvision files call the layers of an MLP linear_1 and linear_2.
        (rf"{_TV_BLOCK}mlp\.(?:0|linear_1)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_TV_BLOCK}mlp\.(?:3|linear_2)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (r"encoder\.ln\.(\w+)", r"norm.\1"),
    ),
    ignored={r"heads\..*": "a head, after the encoder"},
    heads=_WIDE_HEADS,
    is_read_by_timm=False,
)
_V3_BLOCK = r"(?:model\.)?layer\.(\d+)\."
DINOV3_TRANSFORMERS = Layout(
    "DINOv3 of transformers",
    "https://github.com/huggingface/transformers/tree/main/src/transformers/models/dinov3_vit",
    renames=(
        (r"embeddings\.cls_token", r"cls_token"),
        (r"embeddings\.register_tokens", r"storage_tokens"),
        (r"embeddings\.patch_embeddings\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_V3_BLOCK}norm([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (rf"{_V3_BLOCK}attention\.o_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (rf"{_V3_BLOCK}attention\.q_proj\.(\w+)", r"blocks.\1.attn.query.\2"),
        (rf"{_V3_BLOCK}attention\.k_proj\.(\w+)", r"blocks.\1.attn.key.\2"),
        (rf"{_V3_BLOCK}attention\.v_proj\.(\w+)", r"blocks.\1.attn.value.\2"),
        (rf"{_V3_BLOCK}layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
        (rf"{_V3_BLOCK}mlp\.gate_proj\.(\w+)", r"blocks.\1.mlp.w1.\2"),
    ),
    ignored={r"embeddings\.mask_token": _MASKED},
)
"""Renames tensors to the names of DINOv3's authors. `rename_dinov3` renames two more MLP layers."""

_MM_LAYER = r"layers\.(\d+)\."
MMPRETRAIN = Layout(
    "mmpretrain",
    "https://github.com/open-mmlab/mmpretrain/blob/00030e3f/mmpretrain/models/backbones/"
    "vision_transformer.py",
    patterns=(rf"{_MM_LAYER}ffn\.layers\.0\.0\.weight",),
    renames=(
        (r"patch_embed\.projection\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_MM_LAYER}ln([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (rf"{_MM_LAYER}attn\.(qkv|proj)\.(\w+)", r"blocks.\1.attn.\2.\3"),
        (rf"{_MM_LAYER}ffn\.layers\.0\.0\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_MM_LAYER}ffn\.layers\.1\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (rf"{_MM_LAYER}(?:attn|ffn)\.gamma([12])\.weight", r"blocks.\1.ls\2.gamma"),
        # Models with global pooling only have a final norm of the mean patch token, `ln2`.
        (r"ln[12]\.(\w+)", r"norm.\1"),
    ),
    ignored={r"mask_token": _MASKED},
    heads=_WIDE_HEADS,
    is_read_by_timm=False,
)
_CLIP_BLOCK = r"transformer\.resblocks\.(\d+)\."
CLIP = Layout(
    "CLIP",
    "https://github.com/openai/CLIP/blob/d05afc43/clip/model.py",
    patterns=(r"transformer\.resblocks\.\d+\.attn\.in_proj_weight",),
    renames=(
        (r"class_embedding", r"cls_token"),
        (r"positional_embedding", r"pos_embed"),
        (r"conv1\.(\w+)", r"patch_embed.proj.\1"),
        (r"ln_pre\.(\w+)", r"norm_pre.\1"),
        (r"ln_post\.(\w+)", r"norm.\1"),
        (rf"{_CLIP_BLOCK}ln_([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (rf"{_CLIP_BLOCK}attn\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        (rf"{_CLIP_BLOCK}attn\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (rf"{_CLIP_BLOCK}mlp\.c_fc\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_CLIP_BLOCK}mlp\.c_proj\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (rf"{_CLIP_BLOCK}ls_([12])\.gamma", r"blocks.\1.ls\2.gamma"),
    ),
    ignored={r"proj": "a head, after the encoder"},
)
"""Renames the tensors of CLIP's image encoder to timm's names, because timm loads this encoder."""
SAM = Layout(
    "SAM",
    "https://github.com/facebookresearch/segment-anything/blob/main/segment_anything/modeling/"
    "image_encoder.py",
    patterns=(r"blocks\.\d+\.mlp\.lin1\.weight",),
    renames=((rf"{_BLOCK}mlp\.lin([12])\.(\w+)", r"blocks.\1.mlp.fc\2.\3"),),
)
"""Renames the tensors of SAM's image encoder to timm's names, because timm loads this encoder."""

LAYOUTS = (TRANSFORMERS, TORCHVISION, MMPRETRAIN, MOCO_V3, DINOV2, MAE, IBOT, DINO)
"""Layouts that the ViT of this suite can load. `find_layout` tries them in this order.

DINO comes last, because it is the layout of all files that match no pattern. CLIP, SAM and
DINOV3_TRANSFORMERS are not listed, because timm loads these encoders.
"""

# Parts that the ViT of this suite does not have. Each entry consists of a pattern for the names of
# the part's tensors, a description, and the timm architectures that have the part.
_UNSUPPORTED_VIT = (
    (r"blocks\.(?:\d+\.)+mlp\.w12\.\w+", "the SwiGLU MLP of ViT-g", "vit_giant_patch14_dinov2"),
    (r".*\.mlp\.weights_in\.\w+", "the SwiGLU MLP of ViT-g", "vit_giant_patch14_dinov2"),
    (r"dist_token", "a distillation token", "deit_{size}_distilled_patch16_224"),
    (r"storage_tokens|rope_embed\..*", "the rotary positions of DINOv3", ""),
    (
        r"norm_pre\.\w+",
        "a norm before the first block, as CLIP has (OpenAI's CLIP also has QuickGELU)",
        "vit_{size}_patch{patch}_clip_224 vit_{size}_patch{patch}_clip_quickgelu_224",
    ),
    (r".*\.attn\.[qk]_norm\.\w+", "norms of queries and keys", ""),
    (r"reg_token", "registers as timm stores them", "vit_{size}_patch14_reg4_dinov2"),
    (r"attn_pool\..*", "attention pooling", "vit_{size}_patch16_siglip_224"),
)
# timm's names of model sizes, by width.
_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 4096: "7b"}
_USUAL_PATCH = 16
_TIMM_ADVICE = "load the file under the name that timm uses for it"
_BLOCKS_ADVICE = PYTHON_ADVICE + ", with Encoder.from_module(model, blocks={!r})"
# Networks that are not plain ViTs. Each entry consists of a pattern for the names of tensors, a
# description, and advice.
_NOT_VIT = (
    (r"layer\d\.\d+\.conv\d\.weight", "a ResNet", _TIMM_ADVICE),
    (
        r"stages\.\d+\.(?:\d+\.depthwise_conv|blocks\.\d+\.(?:attn\.w_msa|ffn))\..*",
        "stages of mmpretrain",
        PYTHON_ADVICE,
    ),
    (r"stages\.\d+\..*|downsample_layers\..*", "stages, such as a ConvNeXt's", _TIMM_ADVICE),
    (r"layers\.\d+\.blocks\.\d+\..*", "a Swin Transformer", _TIMM_ADVICE),
    (r"features\.5\.\d+\..*", "a network of torchvision", _BLOCKS_ADVICE.format("features.5")),
    (r"features\.\d+\..*", "a network of torchvision", PYTHON_ADVICE),
    (r".*relative_position_bias_table", "relative positions, such as a BEiT's", _TIMM_ADVICE),
)
# Pattern for the names of tensors in the blocks of timm models.
_TIMM_BLOCK = r"(?:(?:layers|stages)\.\d+\.)?blocks\.\d+\..*"


def find_layout(names: Sequence[str], prefixes: Sequence[str]) -> Layout:
    """Return the layout of a weights file, that is, the naming scheme of its tensors.

    The result is the first layout in `LAYOUTS` with a pattern (`Layout.patterns`) that matches a
    tensor name or a prefix, or DINO's layout if no pattern matches.

    Args:
        names: Names of the tensors, without prefixes.
        prefixes: Prefixes that were removed from these names, such as "base_encoder.".
    """
    present = (*names, *prefixes)
    marked = (
        layout
        for layout in LAYOUTS
        if any(re.fullmatch(pattern, name) for pattern in layout.patterns for name in present)
    )
    return next(marked, DINO)


def reject_unsupported(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError if a weights file contains a model other than a supported plain ViT.

    Unsupported models are, for example, a ResNet or a ViT with a SwiGLU MLP. The error suggests
    another way to load the file, such as a timm model.

    Args:
        weights: Tensors of the file by name.
        path: The weights file, for the error message.
    """
    for pattern, network, remedy in _NOT_VIT:
        if (name := first_match(weights, pattern)) is not None:
            raise CheckpointError(
                f"{path} contains {network} ({name}), expected a Vision Transformer in one of the "
                f"layouts that `ssl-bench models` lists. To use it, {remedy}",
                hint=TIMM_HINT if remedy == _TIMM_ADVICE else PYTHON_FILE,
            )
    for pattern, feature, architectures in _UNSUPPORTED_VIT:
        if (name := first_match(weights, pattern)) is not None:
            # timm takes seconds to import.
            import timm

            kernel = weights.get("patch_embed.proj.weight")
            width, patch = (0, 0) if kernel is None or kernel.ndim != 4 else kernel.shape[::3]
            names = [
                architecture.format(size=_SIZES.get(width), patch=side)
                for architecture in architectures.split()
                for side in (patch, _USUAL_PATCH)
            ]
            known = [timm_hint(path, n) for n in dict.fromkeys(names) if timm.is_model(n)]
            raise CheckpointError(
                f"{path} has {feature} ({name}), which the ViT of ssl-bench does not support. "
                f"To use the file, {_TIMM_ADVICE}. If its arguments differ from timm's defaults, "
                f"{advise_model_folder(path, '...')}",
                hint=join_alternatives(*(known or [TIMM_HINT]), MODEL_FOLDER),
            )


def build_load_hint(weights: Iterable[str], path: Path) -> tuple[str, ...]:
    """Return command-line arguments that an error message suggests for a file in an unknown layout.

    The arguments load the encoder from a Python file. If the tensors are named as in timm,
    arguments that load a timm model are suggested as well.

    Args:
        weights: Names of the tensors in the file.
        path: The weights file.
    """
    is_like_timm = first_match(weights, _TIMM_BLOCK) is not None
    return join_alternatives(timm_hint(path) if is_like_timm else (), PYTHON_FILE)


def dinov3_architecture(weights: Mapping[str, Tensor]) -> str | None:
    """Return timm's architecture name for the weights of a DINOv3, or None for other weights.

    The tensors may have the names of timm or of DINOv3's authors. If the file has biases of queries
    and values, the result is timm's variant with these biases, such as
    `vit_small_patch16_dinov3_qkvb`.
    """
    kernel = weights.get("patch_embed.proj.weight")
    has_timm_names = {"cls_token", "reg_token"} <= weights.keys() and "pos_embed" not in weights
    if kernel is None or kernel.ndim != 4 or not ("storage_tokens" in weights or has_timm_names):
        return None
    size = _SIZES.get(len(kernel))
    if size is None:
        return None
    is_gated = first_match(weights, r"blocks\.0\.mlp\.(?:w1|fc1_g)\.weight") is not None
    biases = "_qkvb" if first_match(weights, r"blocks\.0\.attn\.(?:qkv\.bias|q_bias)") else ""
    plus = "_plus" if is_gated and size != "7b" else ""
    return f"vit_{size}{plus}_patch16_dinov3{biases}"


def first_match(names: Iterable[str], pattern: str) -> str | None:
    """Return the first name that a regular expression matches completely, or None."""
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def rename_tensors(
    layout: Layout, weights: Mapping[str, Tensor], path: object
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename the tensors of a weights file by the rules of a layout.

    Args:
        layout: Layout of the file, with rules for renaming and for ignoring tensors.
        weights: Tensors of the file by name.
        path: The weights file, for the error message.

    Returns:
        The tensors by their new names, and the reason for each ignored tensor by its old name.

    Raises:
        CheckpointError: Two tensors get the same new name.
    """
    ignored = find_reasons(weights, layout.ignored)
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name in ignored:
            continue
        matches = (rename for rename in layout.renames if re.fullmatch(rename[0], name))
        pattern, replacement = next(matches, (r"$^", ""))
        new_name = re.sub(pattern, replacement, name)
        if new_name in tensors:
            raise CheckpointError(
                f"{path} contains {new_name} twice, the second time as {name}. Remove one of them"
            )
        tensors[new_name] = value
    return tensors, ignored


def find_reasons(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Find the tensors to ignore, and return the reason for each of their names.

    Args:
        names: Names of all tensors.
        known: Regular expressions for the names of tensors to ignore, each with the reason.
    """
    reasons: dict[str, str] = {}
    for name in names:
        for pattern, reason in known.items():
            if re.fullmatch(pattern, name):
                reasons.setdefault(name, reason)
    return reasons
