"""Find the encoder in a weights file, and rename its tensors.

The first part lists published layouts of Vision Transformers: how they name tensors, and which
tensors are ignored. The second part finds the encoder among everything that training tools store.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ssl_bench.errors import CheckpointError, escape_braces, join_alternatives
from ssl_bench.models.encoder import DINO_NAMES
from ssl_bench.models.loading.checkpoint import (
    IN_PYTHON,
    MODEL_FOLDER,
    PYTHON_FILE,
    TIMM_NAME,
    advise_model_folder,
    check_tensors,
    list_names,
)
from ssl_bench.models.vit import DINO_MARGIN

_MASKED = "token of masked patches, which probes do not use"
_BLOCK = r"blocks\.(\d+)\."


@dataclass(frozen=True)
class Layout:
    """The tensor names of a family of checkpoints.

    Attributes:
        name: Name of the layout in messages and records.
        source: URL of the code that defines the layout.
        marks: Patterns that identify the layout. One must match a name without its prefixes, or a
            prefix.
        renames: Patterns of whole names with their replacements. The first match counts.
        ignored: Reason why tensors are ignored, by pattern of whole names.
        heads: Number of heads by width, for widths with another number than one per 64 channels.
        is_read_by_timm: Whether timm's models load weights with these names.
    """

    name: str
    source: str
    marks: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
    is_read_by_timm: bool = True


@dataclass(frozen=True)
class Description:
    """The properties of an encoder that a configuration states, but no tensor shape.

    Attributes:
        num_heads: Number of attention heads.
        norm_eps: Epsilon of all norms.
        image_size: Height and width in pixels of the positions. None if it is not stated.
        position_margin: See `ssl_bench.models.vit.resize_positions`.
    """

    num_heads: int
    norm_eps: float
    image_size: tuple[int, int] | None = None
    position_margin: float = DINO_MARGIN


_LAYER_SCALES = ((rf"{_BLOCK}gamma_([12])", r"blocks.\1.ls\2.gamma"),)
# Published ViT-H, ViT-g and ViT-G have 16 heads. Tensor shapes do not state it.
_WIDE_HEADS = MappingProxyType({1280: 16, 1408: 16, 1664: 16})

MOCO_V3 = Layout(
    "MoCo-v3",
    "https://github.com/facebookresearch/moco-v3/blob/1c6b717e/vits.py",
    marks=(r"base_encoder\.",),
    # Its ViT-S has 12 heads with 32 channels.
    heads={384: 12, **_WIDE_HEADS},
)
DINOV2 = Layout(
    "DINOv2",
    "https://github.com/facebookresearch/dinov2/blob/e1277af2/dinov2/models/vision_transformer.py",
    marks=(r"register_tokens", rf"{_BLOCK}ls1\.gamma", r"blocks\.\d+\.\d+\.norm1\.weight"),
    renames=(
        # In chunks of FSDP, the second number is the index of the block.
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
    # With global pooling, the only final norm is that of the mean patch.
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
    DINO_NAMES,
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
    is_read_by_timm=False,
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
        # Its first files have other names for the layers of an MLP.
        (rf"{_TV_BLOCK}mlp\.(?:0|linear_1)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_TV_BLOCK}mlp\.(?:3|linear_2)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (r"encoder\.ln\.(\w+)", r"norm.\1"),
    ),
    ignored={r"heads\..*": "a head, after the encoder"},
    heads=_WIDE_HEADS,
    is_read_by_timm=False,
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
"""Renames to the names of DINOv3's own files, except for two linear layers of the MLP."""

_MM_LAYER = r"layers\.(\d+)\."
MMPRETRAIN = Layout(
    "mmpretrain",
    "https://github.com/open-mmlab/mmpretrain/blob/00030e3f/mmpretrain/models/backbones/"
    "vision_transformer.py",
    marks=(rf"{_MM_LAYER}ffn\.layers\.0\.0\.weight",),
    renames=(
        (r"patch_embed\.projection\.(\w+)", r"patch_embed.proj.\1"),
        (rf"{_MM_LAYER}ln([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (rf"{_MM_LAYER}attn\.(qkv|proj)\.(\w+)", r"blocks.\1.attn.\2.\3"),
        (rf"{_MM_LAYER}ffn\.layers\.0\.0\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_MM_LAYER}ffn\.layers\.1\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (rf"{_MM_LAYER}(?:attn|ffn)\.gamma([12])\.weight", r"blocks.\1.ls\2.gamma"),
        # With global pooling, the only final norm is ln2, that of the mean patch.
        (r"ln[12]\.(\w+)", r"norm.\1"),
    ),
    ignored={r"mask_token": _MASKED},
    heads=_WIDE_HEADS,
    is_read_by_timm=False,
)
CLIP = Layout(
    "CLIP",
    "https://github.com/openai/CLIP/blob/d05afc43/clip/model.py",
    marks=(r"transformer\.resblocks\.\d+\.attn\.in_proj_weight",),
    renames=(
        (r"class_embedding", r"cls_token"),
        (r"positional_embedding", r"pos_embed"),
        (r"conv1\.(\w+)", r"patch_embed.proj.\1"),
        (r"ln_pre\.(\w+)", r"norm_pre.\1"),
        (r"ln_post\.(\w+)", r"norm.\1"),
        (r"transformer\.resblocks\.(\d+)\.ln_([12])\.(\w+)", r"blocks.\1.norm\2.\3"),
        (r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
        (r"transformer\.resblocks\.(\d+)\.attn\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
        (r"transformer\.resblocks\.(\d+)\.mlp\.c_fc\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
        (r"transformer\.resblocks\.(\d+)\.mlp\.c_proj\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
        (r"transformer\.resblocks\.(\d+)\.ls_([12])\.gamma", r"blocks.\1.ls\2.gamma"),
    ),
    ignored={r"proj": "a head, after the encoder"},
)
"""Renames the image encoder of a CLIP to the names of timm, which has all of its layers."""

LAYOUTS = (TRANSFORMERS, TORCHVISION, MMPRETRAIN, MOCO_V3, DINOV2, MAE, IBOT, DINO)
"""The layouts in the order in which they are tried. The last one is the default."""

# Tensors that the ViT of this suite does not have, and the architectures of timm that have them.
_UNSUPPORTED_VIT = (
    (r"blocks\.(?:\d+\.)+mlp\.w12\.\w+", "the SwiGLU MLP of ViT-g", "vit_giant_patch14_dinov2"),
    (r".*\.mlp\.weights_in\.\w+", "the SwiGLU MLP of ViT-g", "vit_giant_patch14_dinov2"),
    (r"dist_token", "a distillation token", "deit_{size}_distilled_patch16_224"),
    (r"storage_tokens|rope_embed\..*", "the rotary positions of DINOv3", ""),
    (
        r"norm_pre\.\w+",
        "a norm before the first block, as CLIP has (OpenAI's with QuickGELU)",
        "vit_{size}_patch{patch}_clip_224 vit_{size}_patch{patch}_clip_quickgelu_224",
    ),
    (r".*\.attn\.[qk]_norm\.\w+", "norms of queries and keys", ""),
    (r"reg_token", "registers as timm stores them", "vit_{size}_patch14_reg4_dinov2"),
    (r"attn_pool\..*", "attention pooling", "vit_{size}_patch16_siglip_224"),
)
# timm's word for a width. DINOv3 with a gated MLP has "plus" in its name.
_SIZES = MappingProxyType(
    {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 4096: "7b"}
)
_USUAL_PATCH = 16
_BY_NAME = "take timm's name of its architecture"
_BY_BLOCKS = IN_PYTHON + ", with Encoder.from_module(model, blocks={!r})"
# Networks that are no plain Vision Transformer, and how they are loaded.
_NOT_VIT = (
    (r"layer\d\.\d+\.conv\d\.weight", "a ResNet", _BY_NAME),
    (
        r"stages\.\d+\.(?:\d+\.depthwise_conv|blocks\.\d+\.(?:attn\.w_msa|ffn))\..*",
        "stages of mmpretrain",
        IN_PYTHON,
    ),
    (r"stages\.\d+\..*|downsample_layers\..*", "stages, such as a ConvNeXt's", _BY_NAME),
    (r"layers\.\d+\.blocks\.\d+\..*", "a Swin Transformer", _BY_NAME),
    (r"features\.5\.\d+\..*", "a network of torchvision", _BY_BLOCKS.format("features.5")),
    (r"features\.\d+\..*", "a network of torchvision", IN_PYTHON),
    (r".*relative_position_bias_table", "relative positions, such as a BEiT's", _BY_NAME),
)
# Names of blocks for which timm's name of the architecture may help.
_TIMM_BLOCK = r"(?:(?:layers|stages)\.\d+\.)?blocks\.\d+\..*"


# The patch kernel shows where an encoder is. Nested files are flattened: slashes separate the keys
# of dictionaries, and keys that are not texts are in brackets.
_KERNEL = re.compile(
    r"((?:.*[./])?)((?:patch_embed1?\.(?:module\.)*proj(?:ection)?|embeddings\.patch_embeddings"
    r"(?:\.projection)?|conv_proj|conv1|stem\.0|downsample_layers\.0\.0)\.)weight"
)
_BLOCKS = re.compile(r"(?:blocks?\d?|layers?|stages)\.\w*\d+\.")
_PART = re.compile(r"[./]")
# Words in names that distinguish several encoders. MoCo-v3 and solo-learn evaluate the trained one.
_AVERAGED = {"averaged", "average", "averaging", "avg", "ema", "swa", "teacher", "target"}
_TRAINED = {"current", "momentum", "online", "student"}
# Reasons to ignore tensors outside of the encoder, by the first part of their names.
_OUTSIDE = {
    r"neck|target_generator": "a head of pretraining",
    r"student": "the student, because the teacher is used",
    r"teacher": "a teacher that is not this encoder",
    r"momentum_encoder": "the momentum encoder of MoCo-v3, which is evaluated by its base encoder",
    r"momentum_backbone": "a moving average of the encoder",
    r"(?:\w+_)?(?:predictor|projector|prototypes)": "a head of pretraining",
    r"(?:\w+_)?head\w*|classifier|fc|pooler": "a head, after the encoder",
    r"\w*(?:loss|criterion)\w*|(?:\w+_)?center\w*|queue": "state of a loss",
    r"decoder": "a decoder, after the encoder",
    r"text\w*|transformer|token_embedding|positional_embedding|ln_final|logit_\w+": "text of CLIP",
    r"\w*optim\w*|\w*sched\w*|\w*scaler\w*|\w*rng\w*": "state of training",
    r"args|config|hyper_parameters|callbacks\w*|loops": "state of training",
}
# In timm's ConvNeXt, the final norm is part of the head.
_HEADS = {r"(?:head(?!\.norm\.)|head_dist|fc|classifier|pooler)\..*": "a head, after the encoder"}


def find_layout(names: Sequence[str], prefixes: Sequence[str]) -> Layout:
    """Return the first layout with a mark among the names or the prefixes that were removed."""
    present = (*names, *prefixes)
    marked = (
        layout
        for layout in LAYOUTS
        if any(re.fullmatch(mark, name) for mark in layout.marks for name in present)
    )
    return next(marked, DINO)


def reject_unsupported(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise an error for other networks than plain ViTs, with a way to load them."""
    for pattern, network, remedy in _NOT_VIT:
        if (name := _first_match(weights, pattern)) is not None:
            raise CheckpointError(
                f"{path} holds {network} ({name}), expected a Vision Transformer in one of the "
                f"layouts that `ssl-bench models` lists; {remedy}",
                hint=TIMM_NAME if remedy == _BY_NAME else PYTHON_FILE,
            )
    for pattern, feature, architectures in _UNSUPPORTED_VIT:
        if (name := _first_match(weights, pattern)) is not None:
            # timm takes seconds to import.
            import timm

            kernel = weights.get("patch_embed.proj.weight")
            width, patch = (0, 0) if kernel is None or kernel.ndim != 4 else kernel.shape[::3]
            names = [
                architecture.format(size=_SIZES.get(width), patch=side)
                for architecture in architectures.split()
                for side in (patch, _USUAL_PATCH)
            ]
            known = [
                ("--checkpoint", f"timm:{timm_name}@{escape_braces(str(path))}")
                for timm_name in dict.fromkeys(names)
                if timm.is_model(timm_name)
            ]
            raise CheckpointError(
                f"{path} has {feature} ({name}), which the ViT of this suite does not have; "
                f"{_BY_NAME}, or, if it differs from that, {advise_model_folder(path, '...')}",
                hint=join_alternatives(*(known or [TIMM_NAME]), MODEL_FOLDER),
            )


def ways_to_load(weights: Iterable[str], path: Path) -> tuple[str, ...]:
    """Return the hint for an unknown layout: Python, and timm if the names are similar."""
    by_name = ("--checkpoint", f"timm:{{timm_name}}@{escape_braces(str(path))}")
    is_like_timm = _first_match(weights, _TIMM_BLOCK) is not None
    return join_alternatives(by_name if is_like_timm else (), PYTHON_FILE)


def dinov3_architecture(weights: Mapping[str, Tensor]) -> str | None:
    """Return timm's name for a DINOv3 with its own or timm's tensor names, or None.

    If the file has biases of queries and values, it is the architecture with these biases
    (`_qkvb`), because they are not zero in all files.
    """
    kernel = weights.get("patch_embed.proj.weight")
    has_timm_names = {"cls_token", "reg_token"} <= weights.keys() and "pos_embed" not in weights
    if kernel is None or kernel.ndim != 4 or not ("storage_tokens" in weights or has_timm_names):
        return None
    size = _SIZES.get(len(kernel))
    if size is None:
        return None
    is_gated = _first_match(weights, r"blocks\.0\.mlp\.(?:w1|fc1_g)\.weight") is not None
    biases = "_qkvb" if _first_match(weights, r"blocks\.0\.attn\.(?:qkv\.bias|q_bias)") else ""
    plus = "_plus" if is_gated and size != "7b" else ""
    return f"vit_{size}{plus}_patch16_dinov3{biases}"


def _first_match(names: Iterable[str], pattern: str) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def rename_tensors(
    layout: Layout, weights: Mapping[str, Tensor], path: object
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename the tensors of a layout. Also return the reasons why other tensors are ignored."""
    ignored = find_reasons(weights, layout.ignored)
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name in ignored:
            continue
        matches = (rename for rename in layout.renames if re.fullmatch(rename[0], name))
        pattern, replacement = next(matches, (r"$^", ""))
        new_name = re.sub(pattern, replacement, name)
        if new_name in tensors:
            raise CheckpointError(f"{path} holds {new_name} twice, the second time as {name}")
        tensors[new_name] = value
    return tensors, ignored


@dataclass(frozen=True)
class Backbone:
    """The tensors of an encoder in a weights file.

    Attributes:
        weights: Tensors by name, without the prefixes of wrappers.
        total: Number of tensors in the dictionary that contains them.
        ignored: Reason for each other tensor, or container of tensors, that is not used.
        prefixes: Parts that were removed from the beginning of the names.
        note: Which of several encoders this is.
    """

    weights: Mapping[str, Tensor]
    total: int
    ignored: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    note: str = ""


def backbone_weights(content: Mapping[str, Any], path: Path) -> Backbone:
    """Find the encoder in the content of a weights file.

    If there are several encoders, the one whose name indicates an average is used.
    """
    leaves = list(_leaves(content))
    tensors = _require_unique(
        ((name, value) for name, value in leaves if isinstance(value, Tensor)), path
    )
    training = tuple(
        {name.partition("param_groups/")[0] for name, _ in leaves if "/param_groups/" in name}
    )
    # Before its first update, an average contains the initial weights.
    unaveraged = tuple(
        name.removesuffix("n_averaged")
        for name, value in leaves
        if name.endswith(("/n_averaged", ".n_averaged")) and str(value) in ("0", "tensor(0)")
    )
    candidates = {name: value for name, value in tensors.items() if not name.startswith(training)}
    encoders = _find_encoders(candidates)
    if not tensors:
        return Backbone({}, 0, {})
    if not (roots := encoders or _largest_containers(candidates)):
        raise CheckpointError(
            f"{path} is no Vision Transformer: no tensor has the name of a weight, but "
            f"{list_names(list(tensors))}. Save model.state_dict() instead"
        )
    root = _choose_encoder(roots, unaveraged, path)
    others = [other for other in roots if other != root]
    container = root[: root.rfind("/") + 1]
    if invalid := [name for name in tensors if name.startswith(f"{container}[")]:
        raise CheckpointError(
            f"{path}: {invalid[0].removeprefix(container)} is a name that is no text. "
            "Save model.state_dict() instead"
        )
    own: dict[str, Tensor] = {}
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    inner = tuple(other for other in others if other.startswith(root))
    for name, value in tensors.items():
        is_inside = name.startswith(root) and not name.startswith(inner)
        if is_inside and not _is_number(name.removeprefix(root), value):
            own[name] = value
            continue
        above = _common_prefix((root, name))
        # Tensors in a separate dictionary are reported by the name of the dictionary.
        key = name.removeprefix(above).partition("/")[0]
        if name.startswith(training):
            ignored[key] = "state of training"
        elif reason := _reason_outside(name, value, above, root, others):
            ignored[key] = reason
        else:
            unknown.append(key)
    inside = ((_remove_wrapper("module", name.removeprefix(root)), own[name]) for name in own)
    weights = _require_unique(inside, path)
    if _first_match(weights, CLIP.marks[0]) is not None:
        weights, projection = rename_tensors(CLIP, weights, path)
        ignored |= projection
        for name, ndim in (("cls_token", 1), ("pos_embed", 2)):
            if name in weights and weights[name].ndim == ndim:
                weights[name] = weights[name][(None,) * (3 - ndim)]
    if unknown:
        if not encoders:
            reject_unsupported(weights, path)
        raise CheckpointError(
            f"{path} holds {list_names(list(dict.fromkeys(unknown)))}, which neither belong to an "
            "encoder nor are known to be ignored. Save the state_dict of the encoder alone"
        )
    heads = find_reasons(weights, _HEADS)
    plain = {name: value for name, value in weights.items() if name not in heads}
    total = sum(
        name.startswith(container) and "/" not in name[len(container) :] for name in tensors
    )
    note = f"{_label(root)} is used, not {list_names(list(map(_label, others)))}; "
    parts = tuple(f"{part}." for part in _PART.split(root) if part)
    return Backbone(
        check_tensors(plain, path), total, {**ignored, **heads}, parts, note if others else ""
    )


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested containers, with the path to each value."""
    items: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        items = (
            (_remove_wrapper(r"_\w+", k) if isinstance(k, str) else f"[{k!r}]", v)
            for k, v in value.items()
        )
    elif isinstance(value, (list, tuple)):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}/{key}" if name else key)


def _remove_wrapper(wrapper: str, name: str) -> str:
    """Remove the parts that wrappers of modules insert anywhere into the name of a tensor."""
    return re.sub(rf"(?:^|(?<=\.)){wrapper}\.", "", name)


def _require_unique(pairs: Iterable[tuple[str, Tensor]], path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in pairs:
        if name in tensors:
            raise CheckpointError(
                f"{path} holds {name} twice, with and without a wrapper. Save the state_dict of "
                "the encoder alone"
            )
        tensors[name] = value
    return tensors


def _find_encoders(names: Collection[str]) -> list[str]:
    """Return the prefix of each encoder, which has a patch kernel, its bias, and blocks."""
    kernels = dict.fromkeys(match.groups() for name in names if (match := _KERNEL.fullmatch(name)))
    return [
        root
        for root, kernel in kernels
        if any(name.startswith(root) and _BLOCKS.search(name, len(root)) for name in names)
        and (
            f"{root}{kernel}bias" in names
            or not any(name.endswith(f"{kernel}bias") for name in names)
        )
    ]


def _largest_containers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes of the dictionaries with the most tensors, for unknown encoders."""
    inside: dict[str, list[str]] = {}
    for name, value in tensors.items():
        container, _, key = name.rpartition("/")
        if not key.startswith("[") and not _is_number(key, value):
            inside.setdefault(f"{container}/" if container else "", []).append(name)
    most = max(map(len, inside.values()), default=0)
    return [
        _common_prefix(names) if most > 1 else container
        for container, names in inside.items()
        if len(names) == most
    ]


def _choose_encoder(roots: list[str], unaveraged: tuple[str, ...], path: Path) -> str:
    """Return the prefix of the averaged encoder, judged by the first parts that differ."""
    if len(roots) == 1:
        return roots[0]
    above = _common_prefix(roots)
    branches: dict[str, list[str]] = {}
    for root in roots:
        branches.setdefault(_PART.split(root.removeprefix(above))[0], []).append(root)
    ranks = {
        branch: max(_rank(root, above, unaveraged) for root in inside)
        for branch, inside in branches.items()
    }
    best = [branch for branch in branches if ranks[branch] == max(ranks.values())]
    if len(best) > 1:
        labels = list_names([_label(branches[branch][0]) for branch in best])
        raise CheckpointError(
            f"{path} holds {len(best)} encoders ({labels}), and no name shows which of them is the "
            "average. Save the state_dict of one"
        )
    return _choose_encoder(branches[best[0]], unaveraged, path)


def _rank(root: str, above: str, unaveraged: tuple[str, ...]) -> int:
    below = root.removeprefix(above)
    if any(len(place) > len(above) and root.startswith(place) for place in unaveraged):
        return 0
    for part in _PART.split(below):
        words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)}
        if words & _AVERAGED:
            return 2
        if "current" in words and f"{above}averaging_state/" in unaveraged:
            return 3
        if words & _TRAINED:
            return 0
    return 1


def _reason_outside(
    name: str, value: Tensor, above: str, root: str, others: Sequence[str]
) -> str | None:
    """Return the reason why a tensor outside of the encoder is ignored, or None if it is unknown.

    `root` is the prefix of the encoder, and `above` the common prefix of `root` and the name.
    """
    rest = name.removeprefix(above)
    part = _PART.split(rest)[0]
    branch = name[: len(above) + len(part) + 1]
    if reason := find_reasons([part], _OUTSIDE).get(part):
        return reason
    if any(
        other.startswith(branch) or (root.startswith(other) and name.startswith(other))
        for other in others
    ):
        return "another encoder, see the note"
    if _is_number(rest.rpartition("/")[2], value):
        return "a number next to the weights"
    is_outside = "/" in root[len(above) :] and not set("./") & set(rest)
    return "a tensor next to the state_dict of the model" if is_outside else None


def _is_number(key: str, value: Tensor) -> bool:
    """Whether a tensor is a plain number, not a parameter, token or position of a damaged file."""
    return value.numel() == 1 and not re.search(r"\.|token|embed", key)


def _common_prefix(names: Sequence[str]) -> str:
    """Return the longest common prefix that ends with a whole part."""
    common = os.path.commonprefix(names)  # noqa: RUF071 - cut at a whole part in the next line
    return common[: max(common.rfind("."), common.rfind("/")) + 1]


def _label(root: str) -> str:
    return root.rstrip("./") or "the encoder without a prefix"


def find_reasons(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each name that matches a pattern in `known`."""
    reasons: dict[str, str] = {}
    for name in names:
        for pattern, reason in known.items():
            if re.fullmatch(pattern, name):
                reasons.setdefault(name, reason)
    return reasons
