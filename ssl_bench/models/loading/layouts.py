"""Public key layouts of Vision Transformers, as facts: what they rename and what they leave out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from ssl_bench.errors import CheckpointError
from ssl_bench.models.positions import DINO_MARGIN

_MASKED = "stands for masked patches, of which probes have none"
_BLOCK = r"blocks\.(\d+)\."


@dataclass(frozen=True)
class Layout:
    """How a family of checkpoints names the tensors of an encoder.

    Attributes:
        source: Where the layout is published.
        marks: Patterns of which one must fit a name (without prefixes) or a prefix.
        renames: Patterns of whole names and what takes their place; the first that fits counts.
        ignored: Pattern of whole names to the reason why they are left out.
        heads: Width to number of heads, where it is not a head for 64 channels.
    """

    name: str
    source: str
    marks: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """What a configuration says of an encoder and no tensor shape does.

    Attributes:
        image_size: Height and width in pixels of its positions; None where it says nothing.
        position_margin: See `ssl_bench.models.positions.resize_positions`.
        input_size: Height and width of the only images that an exported graph takes.
    """

    num_heads: int
    norm_eps: float
    image_size: tuple[int, int] | None = None
    input_size: tuple[int, int] | None = None
    position_margin: float = DINO_MARGIN


_LAYER_SCALES = ((rf"{_BLOCK}gamma_([12])", r"blocks.\1.ls\2.gamma"),)
# A published ViT-H has 16 heads of 80 channels, and no tensor shape tells it.
_WIDE_HEADS = MappingProxyType({1280: 16, 1408: 16, 1664: 16})

MOCO_V3 = Layout(
    "MoCo-v3",
    "https://github.com/facebookresearch/moco-v3/blob/1c6b717e/vits.py",
    marks=(r"base_encoder\.",),
    # Its ViT-S has 12 heads of 32 channels.
    heads={384: 12, **_WIDE_HEADS},
)
DINOV2 = Layout(
    "DINOv2",
    "https://github.com/facebookresearch/dinov2/blob/e1277af2/dinov2/models/vision_transformer.py",
    marks=(r"register_tokens", rf"{_BLOCK}ls1\.gamma", r"blocks\.\d+\.\d+\.norm1\.weight"),
    renames=(
        # FSDP's chunks keep the index of the block as the second number.
        (r"blocks\.\d+\.(\d+)\.(.*)", r"blocks.\1.\2"),
        (r"register_tokens", r"reg_token"),
    ),
    ignored={r"mask_token": _MASKED},
    heads=_WIDE_HEADS,
)
MAE = Layout(
    "MAE",
    "https://github.com/facebookresearch/mae/blob/be47fef7/models_mae.py",
    marks=(r"decoder_embed\.weight", r"fc_norm\.weight"),
    # With global pooling the last norm is applied to the mean patch, and there is no other.
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
    marks=(r"masked_embed", rf"{_BLOCK}gamma_1"),
    renames=_LAYER_SCALES,
    ignored={r"masked_embed": _MASKED},
    heads=_WIDE_HEADS,
)
DINO = Layout(
    "DINO, timm",
    "https://github.com/facebookresearch/dino/blob/7c446df5/vision_transformer.py",
    heads=_WIDE_HEADS,
)
_TF_BLOCK = r"encoder\.layer\.(\d+)\."
TRANSFORMERS = Layout(
    "transformers",
    "https://github.com/huggingface/transformers/blob/015e6876/src/transformers/models/"
    "{vit,vit_mae,dinov2,dinov2_with_registers}",
    marks=(r"embeddings\.patch_embeddings\.projection\.weight",),
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
)
_TV_BLOCK = r"encoder\.layers\.encoder_layer_(\d+)\."
TORCHVISION = Layout(
    "torchvision",
    "https://github.com/pytorch/vision/blob/main/torchvision/models/vision_transformer.py",
    marks=(r"conv_proj\.weight",),
    renames=(
        (r"class_token", r"cls_token"),
        (r"encoder\.pos_embedding", r"pos_embed"),
        (r"conv_proj\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_TV_BLOCK}ln_([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (rf"{_TV_BLOCK}self_attention\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        (rf"{_TV_BLOCK}self_attention\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        # Its first files name the layers of an MLP in another way than it does now.
        (rf"{_TV_BLOCK}mlp\.(?:0|linear_1)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_TV_BLOCK}mlp\.(?:3|linear_2)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (r"encoder\.ln\.(\w+)", r"norm.\1"),
    ),
    ignored={r"heads\..*": "a head, after the encoder"},
    heads=_WIDE_HEADS,
)
DINOV3_TRANSFORMERS = Layout(
    "DINOv3 of transformers",
    "https://github.com/huggingface/transformers/tree/main/src/transformers/models/dinov3_vit",
    renames=(
        (r"embeddings\.cls_token", r"cls_token"),
        (r"embeddings\.register_tokens", r"storage_tokens"),
        (r"embeddings\.patch_embeddings\.(\w+)", r"patch_embed.proj.\1"),
        (r"(?:model\.)?layer\.(\d+)\.norm([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (r"(?:model\.)?layer\.(\d+)\.attention\.o_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (r"(?:model\.)?layer\.(\d+)\.attention\.q_proj\.(\w+)", r"blocks.\1.attn.query.\2"),
        (r"(?:model\.)?layer\.(\d+)\.attention\.k_proj\.(\w+)", r"blocks.\1.attn.key.\2"),
        (r"(?:model\.)?layer\.(\d+)\.attention\.v_proj\.(\w+)", r"blocks.\1.attn.value.\2"),
        (r"(?:model\.)?layer\.(\d+)\.layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
        (r"(?:model\.)?layer\.(\d+)\.mlp\.gate_proj\.(\w+)", r"blocks.\1.mlp.w1.\2"),
    ),
    ignored={r"embeddings\.mask_token": _MASKED},
)
"""The names of DINOv3's own files; its two linear layers differ with and without a gate."""

LAYOUTS = (TRANSFORMERS, TORCHVISION, MOCO_V3, DINOV2, MAE, IBOT, DINO)
"""In the order in which they are tried; the last takes what nothing else marks."""

# What tells an encoder that our ViT is not, and the architecture of timm that is the same.
_STRANGERS = (
    (r"blocks\.(?:\d+\.)+mlp\.w12\.\w+", "the SwiGLU MLP of ViT-g", "vit_giant_patch14_dinov2"),
    (r".*\.mlp\.weights_in\.\w+", "the SwiGLU MLP of ViT-g", "vit_giant_patch14_dinov2"),
    (r"dist_token", "a distillation token", "deit_small_distilled_patch16_224"),
    (r"storage_tokens|rope_embed\..*", "the rotary positions of DINOv3", "NAME"),
    (r"norm_pre\.\w+", "a norm before the first block", "vit_base_patch16_clip_224"),
    (r".*\.attn\.[qk]_norm\.\w+", "norms of queries and keys", "NAME"),
    (r".*relative_position_bias_table", "relative positions", "NAME"),
    (r"reg_token", "registers as timm stores them", "vit_base_patch14_reg4_dinov2"),
    (r"attn_pool\..*", "attention pooling", "vit_base_patch16_siglip_224"),
)


# Networks without blocks that take tokens; nothing here reads their features.
_UNSUPPORTED = (
    (r"conv1\.weight|layer\d\.\d+\.conv\d\.weight", "a ResNet"),
    (r"stages\.\d+\..*|downsample_layers\..*", "a network of stages, such as ConvNeXt"),
    (r"layers\.\d+\.blocks\.\d+\..*", "a Swin Transformer"),
    (r"features\.\d+\..*", "a network of torchvision"),
)


def recognised(names: Sequence[str], prefixes: Sequence[str]) -> Layout:
    """The first layout with a mark among the names or the prefixes that stood before them."""
    present = (*names, *prefixes)
    marked = (
        layout
        for layout in LAYOUTS
        if any(re.fullmatch(mark, name) for mark in layout.marks for name in present)
    )
    return next(marked, DINO)


def refuse_strangers(names: Sequence[str], path: object) -> None:
    """Refuse encoders of another kind."""
    for pattern, what in _UNSUPPORTED:
        if (found := _first(names, pattern)) is not None:
            raise CheckpointError(
                f"{path} holds {what} ({found}), which is not supported; supported are Vision "
                "Transformers in the layouts that `ssl-bench models` lists, those of timm, and "
                "ConvMixers of this suite"
            )
    for pattern, what, architecture in _STRANGERS:
        found = _first(names, pattern)
        if found is not None:
            raise CheckpointError(
                f"{path} has {what} ({found}), which the ViT of this suite does not have; "
                f"use timm:{architecture}@FILE with timm's name of its architecture"
            )


# Width to timm's word; the ones with a gate in their MLP are its "plus".
_DINOV3_SIZES = MappingProxyType(
    {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 4096: "7b"}
)


def dinov3_architecture(weights: Mapping[str, Tensor]) -> str | None:
    """Timm's architecture of the weights of a DINOv3 in its own names; None of another encoder.

    With the biases of query and value, which timm's other architectures leave out, though not all
    files have zeros there.
    """
    kernel = weights.get("patch_embed.proj.weight")
    if kernel is None or kernel.ndim != 4 or "storage_tokens" not in weights:
        return None
    size = _DINOV3_SIZES.get(len(kernel))
    if size is None:
        return None
    plus = "_plus" if "blocks.0.mlp.w1.weight" in weights and size != "7b" else ""
    biases = "_qkvb" if "blocks.0.attn.qkv.bias" in weights else ""
    return f"vit_{size}{plus}_patch16_dinov3{biases}"


def _first(names: Sequence[str], pattern: str) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def renamed(layout: Layout, weights: Mapping[str, Tensor], path: object) -> dict[str, Tensor]:
    """The tensors under our names; those without a rename keep theirs."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        fitting = (rename for rename in layout.renames if re.fullmatch(rename[0], name))
        pattern, replacement = next(fitting, (r"$^", ""))
        ours = re.sub(pattern, replacement, name)
        if ours in found:
            raise CheckpointError(f"{path} holds {ours} twice, the second time as {name}")
        found[ours] = value
    return found
