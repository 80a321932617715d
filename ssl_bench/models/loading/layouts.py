"""The encoder in somebody's file: what is written around it, and how its tensors are named.

First the public key layouts of Vision Transformers, as facts: what they rename and what they leave
out. Behind them stands what finds the encoder among everything that training tools write.
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
    named,
    usable,
    with_model_args,
)
from ssl_bench.models.vit import DINO_MARGIN

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
    """What a configuration says of an encoder and no tensor shape does.

    Attributes:
        image_size: Height and width in pixels of its positions; None where it says nothing.
        position_margin: See `ssl_bench.models.vit.resize_positions`.
    """

    num_heads: int
    norm_eps: float
    image_size: tuple[int, int] | None = None
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
        # Its first files name the layers of an MLP in another way than it does now.
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
"""The names of DINOv3's own files; its two linear layers differ with and without a gate."""

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
        # With global pooling there is only ln2, which is applied to the mean patch.
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
"""The image encoder of a CLIP, under the names of timm, which has the norm before its blocks."""

LAYOUTS = (TRANSFORMERS, TORCHVISION, MMPRETRAIN, MOCO_V3, DINOV2, MAE, IBOT, DINO)
"""In the order in which they are tried; the last takes what nothing else marks."""

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
    (r"layer\d\.\d+\.conv\d\.weight", "a ResNet", _BY_BLOCKS.format("layer3")),
    (
        r"stages\.\d+\.(?:\d+\.depthwise_conv|blocks\.\d+\.(?:attn\.w_msa|ffn))\..*",
        "stages of mmpretrain",
        IN_PYTHON,
    ),
    (r"stages\.\d+\..*|downsample_layers\..*", "stages, such as a ConvNeXt's", _BY_NAME),
    (r"layers\.\d+\.blocks\.\d+\..*", "a Swin Transformer", _BY_NAME),
    (r"features\.5\.\d+\..*", "a network of torchvision", _BY_BLOCKS.format("features.5")),
    (r"features\.\d+\..*", "a network of torchvision", IN_PYTHON),
    (r".*relative_position_bias_table", "relative positions, such as a BEiT's", IN_PYTHON),
)
# Names of blocks for which timm's name of the architecture may help.
_TIMM_BLOCK = r"(?:(?:layers|stages)\.\d+\.)?blocks\.\d+\..*"


# The kernel of the patches tells where in a file an encoder begins. Files are seen flat: a slash
# stands between names of dictionaries, a number or whatever else is no text in brackets.
_KERNEL = re.compile(
    r"((?:.*[./])?)((?:patch_embed1?\.(?:module\.)*proj(?:ection)?|embeddings\.patch_embeddings"
    r"(?:\.projection)?|conv_proj|conv1|stem\.0|downsample_layers\.0\.0)\.)weight"
)
_BLOCKS = re.compile(r"(?:blocks?\d?|layers?|stages)\.\w*\d+\.")
_PART = re.compile(r"[./]")
# Words in a name that say which of several encoders it is; MoCo-v3 and solo-learn score the one
# that is trained.
_AVERAGED = {"averaged", "average", "averaging", "avg", "ema", "swa", "teacher", "target"}
_TRAINED = {"current", "momentum", "online", "student"}
# By the first part of a name, seen from where the encoder is.
_BESIDE = {
    r"neck|target_generator": "a head of pretraining",
    r"student": "the student; the teacher leads",
    r"teacher": "a teacher that is no such encoder",
    r"momentum_encoder": "momentum encoder of MoCo-v3, scored on its base encoder",
    r"momentum_backbone": "a moving average of the encoder",
    r"(?:\w+_)?(?:predictor|projector|prototypes)": "a head of pretraining",
    r"(?:\w+_)?head\w*|classifier|fc|pooler": "a head, after the encoder",
    r"\w*(?:loss|criterion)\w*|(?:\w+_)?center\w*|queue": "state of a loss",
    r"decoder": "a decoder, after the encoder",
    r"text\w*|transformer|token_embedding|positional_embedding|ln_final|logit_\w+": "text of CLIP",
    r"\w*optim\w*|\w*sched\w*|\w*scaler\w*|\w*rng\w*": "state of training",
    r"args|config|hyper_parameters|callbacks\w*|loops": "state of training",
}
# timm's ConvNeXt keeps its final norm among its head.
_HEADS = {r"(?:head(?!\.norm\.)|head_dist|fc|classifier|pooler)\..*": "a head, after the encoder"}


def recognised(names: Sequence[str], prefixes: Sequence[str]) -> Layout:
    """The first layout with a mark among the names or the prefixes that stood before them."""
    present = (*names, *prefixes)
    marked = (
        layout
        for layout in LAYOUTS
        if any(re.fullmatch(mark, name) for mark in layout.marks for name in present)
    )
    return next(marked, DINO)


def refuse_strangers(weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse encoders of another kind, with who takes them."""
    for pattern, what, way in _NOT_VIT:
        if (found := _fitting(weights, pattern)) is not None:
            raise CheckpointError(
                f"{path} holds {what} ({found}), expected a Vision Transformer in one of the "
                f"layouts that `ssl-bench models` lists; {way}",
                hint=TIMM_NAME if way == _BY_NAME else PYTHON_FILE,
            )
    for pattern, what, architectures in _UNSUPPORTED_VIT:
        if (found := _fitting(weights, pattern)) is not None:
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
                f"{path} has {what} ({found}), which the ViT of this suite does not have; "
                f"{_BY_NAME}, or, if it differs from that, {with_model_args(path, '...')}",
                hint=join_alternatives(*(known or [TIMM_NAME]), MODEL_FOLDER),
            )


def ways_to_load(weights: Iterable[str], path: Path) -> tuple[str, ...]:
    """The hint for a file that is in no layout of ours: Python, and timm if names are like its."""
    by_name = ("--checkpoint", f"timm:{{timm_name}}@{escape_braces(str(path))}")
    is_like_timm = _fitting(weights, _TIMM_BLOCK) is not None
    return join_alternatives(by_name if is_like_timm else (), PYTHON_FILE)


def dinov3_architecture(weights: Mapping[str, Tensor]) -> str | None:
    """Timm's architecture of the weights of a DINOv3 in its own or timm's names; else None.

    With the biases of query and value, which timm's other architectures leave out, though not all
    files have zeros there.
    """
    kernel = weights.get("patch_embed.proj.weight")
    is_timms = {"cls_token", "reg_token"} <= weights.keys() and "pos_embed" not in weights
    if kernel is None or kernel.ndim != 4 or not ("storage_tokens" in weights or is_timms):
        return None
    size = _SIZES.get(len(kernel))
    if size is None:
        return None
    is_gated = _fitting(weights, r"blocks\.0\.mlp\.(?:w1|fc1_g)\.weight") is not None
    biases = "_qkvb" if _fitting(weights, r"blocks\.0\.attn\.(?:qkv\.bias|q_bias)") else ""
    plus = "_plus" if is_gated and size != "7b" else ""
    return f"vit_{size}{plus}_patch16_dinov3{biases}"


def _fitting(names: Iterable[str], pattern: str) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def renamed(
    layout: Layout, weights: Mapping[str, Tensor], path: object
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that a layout uses, under our names, and why others are left out."""
    dropped = reasons(weights, layout.ignored)
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name in dropped:
            continue
        fitting = (rename for rename in layout.renames if re.fullmatch(rename[0], name))
        pattern, replacement = next(fitting, (r"$^", ""))
        ours = re.sub(pattern, replacement, name)
        if ours in found:
            raise CheckpointError(f"{path} holds {ours} twice, the second time as {name}")
        found[ours] = value
    return found, dropped


@dataclass(frozen=True)
class Backbone:
    """The tensors of an encoder in somebody's file.

    Attributes:
        weights: Under names without the prefixes of wrappers.
        total: Tensors in the dictionary that held them.
        ignored: Every other tensor of the file, or what held several, and why it is left out.
        prefixes: What was taken off the names.
        note: Which of several encoders this is.
    """

    weights: Mapping[str, Tensor]
    total: int
    ignored: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    note: str = ""


def backbone_weights(content: Mapping[str, Any], path: Path) -> Backbone:
    """The encoder's weights under plain names, whatever was written around them.

    Of several encoders the one is taken whose name says that it is an average.
    """
    leaves = list(_leaves(content))
    tensors = _once(((name, one) for name, one in leaves if isinstance(one, Tensor)), path)
    training = tuple(
        {name.partition("param_groups/")[0] for name, _ in leaves if "/param_groups/" in name}
    )
    # Before its first update an average holds what the model was initialised with.
    unaveraged = tuple(
        name.removesuffix("n_averaged")
        for name, value in leaves
        if name.endswith(("/n_averaged", ".n_averaged")) and str(value) in ("0", "tensor(0)")
    )
    candidates = {name: one for name, one in tensors.items() if not name.startswith(training)}
    encoders = _encoders(candidates)
    if not tensors:
        return Backbone({}, 0, {})
    if not (roots := encoders or _largest(candidates)):
        raise CheckpointError(
            f"{path} is no Vision Transformer: none of its tensors is named as a weight, but "
            f"{named(list(tensors))}; save model.state_dict() instead"
        )
    root = _chosen(roots, unaveraged, path)
    others = [other for other in roots if other != root]
    container = root[: root.rfind("/") + 1]
    if odd := [name for name in tensors if name.startswith(f"{container}[")]:
        raise CheckpointError(
            f"{path}: {odd[0].removeprefix(container)} is a name that is no text; "
            "save model.state_dict() instead"
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
        above = _ancestor((root, name))
        # What lies in a dictionary of its own goes by the name of that.
        key = name.removeprefix(above).partition("/")[0]
        if name.startswith(training):
            ignored[key] = "state of training"
        elif why := _reason_beside(name, value, above, root, others):
            ignored[key] = why
        else:
            unknown.append(key)
    inside = ((_without("module", name.removeprefix(root)), own[name]) for name in own)
    weights = _once(inside, path)
    if _fitting(weights, CLIP.marks[0]) is not None:
        weights, projection = renamed(CLIP, weights, path)
        ignored |= projection
        for name, ndim in (("cls_token", 1), ("pos_embed", 2)):
            if name in weights and weights[name].ndim == ndim:
                weights[name] = weights[name].reshape(1, -1, weights[name].shape[-1])
    if unknown:
        if not encoders:
            refuse_strangers(weights, path)
        raise CheckpointError(
            f"{path} holds {named(list(dict.fromkeys(unknown)))}, which is neither an encoder's "
            "nor known to be left out; save the encoder's state_dict alone"
        )
    heads = reasons(weights, _HEADS)
    plain = {name: value for name, value in weights.items() if name not in heads}
    total = sum(
        name.startswith(container) and "/" not in name[len(container) :] for name in tensors
    )
    note = f"{_shown(root)} is taken, not {named([_shown(one) for one in others])}; "
    parts = tuple(f"{part}." for part in _PART.split(root) if part)
    return Backbone(usable(plain, path), total, {**ignored, **heads}, parts, note if others else "")


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """What containers of any depth hold, under names of the way to it."""
    items: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        items = (
            (_without(r"_\w+", k) if isinstance(k, str) else f"[{k!r}]", v)
            for k, v in value.items()
        )
    elif isinstance(value, (list, tuple)):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}/{key}" if name else key)


def _without(wrapper: str, name: str) -> str:
    """A name of a tensor without the parts that wrappers of modules put anywhere into it."""
    return re.sub(rf"(?:^|(?<=\.)){wrapper}\.", "", name)


def _once(pairs: Iterable[tuple[str, Tensor]], path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(
                f"{path} holds {name} twice, with and without a wrapper around it; save the "
                "encoder's state_dict alone"
            )
        found[name] = value
    return found


def _encoders(names: Collection[str]) -> list[str]:
    """What stands before the names of each encoder: a patch kernel, its bias, and blocks."""
    kernels = dict.fromkeys(found.groups() for name in names if (found := _KERNEL.fullmatch(name)))
    return [
        root
        for root, kernel in kernels
        if any(name.startswith(root) and _BLOCKS.search(name, len(root)) for name in names)
        and (
            f"{root}{kernel}bias" in names
            or not any(name.endswith(f"{kernel}bias") for name in names)
        )
    ]


def _largest(tensors: Mapping[str, Tensor]) -> list[str]:
    """The same where no encoder is known: for the dictionaries that hold the most tensors."""
    inside: dict[str, list[str]] = {}
    for name, value in tensors.items():
        container, _, key = name.rpartition("/")
        if not key.startswith("[") and not _is_number(key, value):
            inside.setdefault(f"{container}/" if container else "", []).append(name)
    most = max(map(len, inside.values()), default=0)
    return [
        _ancestor(names) if most > 1 else container
        for container, names in inside.items()
        if len(names) == most
    ]


def _chosen(roots: list[str], unaveraged: tuple[str, ...], path: Path) -> str:
    """Of encoders the one that is an average; where they part for the first time that is asked."""
    if len(roots) == 1:
        return roots[0]
    above = _ancestor(roots)
    branches: dict[str, list[str]] = {}
    for root in roots:
        branches.setdefault(_PART.split(root.removeprefix(above))[0], []).append(root)
    ranks = {
        branch: max(_rank(root, above, unaveraged) for root in inside)
        for branch, inside in branches.items()
    }
    best = [branch for branch in branches if ranks[branch] == max(ranks.values())]
    if len(best) > 1:
        shown = named([_shown(branches[branch][0]) for branch in best])
        raise CheckpointError(
            f"{path} holds {len(best)} encoders ({shown}), and no name says which of them "
            "is the average; save the state_dict of one"
        )
    return _chosen(branches[best[0]], unaveraged, path)


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


def _reason_beside(
    name: str, value: Tensor, above: str, root: str, others: Sequence[str]
) -> str | None:
    """Why a tensor that is not the encoder's is left out; None if nobody knows.

    Its name and `root`, with which those of the encoder begin, both begin with `above`.
    """
    beside = name.removeprefix(above)
    part = _PART.split(beside)[0]
    branch = name[: len(above) + len(part) + 1]
    if why := reasons([part], _BESIDE).get(part):
        return why
    if any(
        one.startswith(branch) or (root.startswith(one) and name.startswith(one)) for one in others
    ):
        return "another encoder, see the note"
    if _is_number(beside.rpartition("/")[2], value):
        return "a number beside the weights"
    is_outside = "/" in root[len(above) :] and not set("./") & set(beside)
    return "a tensor beside the state_dict of the model" if is_outside else None


def _is_number(key: str, value: Tensor) -> bool:
    """Whether this is no parameter of a module, nor the token or position of a damaged file."""
    return value.numel() == 1 and not re.search(r"\.|token|embed", key)


def _ancestor(names: Sequence[str]) -> str:
    """What names begin with, in whole parts."""
    common = os.path.commonprefix(names)  # noqa: RUF071 - cut at a whole part in the next line
    return common[: max(common.rfind("."), common.rfind("/")) + 1]


def _shown(root: str) -> str:
    return root.rstrip("./") or "what has no prefix"


def reasons(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Why tensors are not used, by patterns of whole names; without those that none fits."""
    found = (
        (name, next((w for p, w in known.items() if re.fullmatch(p, name)), None)) for name in names
    )
    return {name: why for name, why in found if why is not None}
