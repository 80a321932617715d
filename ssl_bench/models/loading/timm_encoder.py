"""timm's models as encoders, with positions resized as in DINO.

A file's tensors come into a model as they are: timm renames those of many libraries, and resizes
positions, patches and tables of relative positions that do not fit, without a word, so what it made
is held against the file.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from jaxtyping import Int
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, escape_braces, join_alternatives
from ssl_bench.models.encoder import (
    ASSUMED,
    Colours,
    Contents,
    Encoder,
    of_library,
    state_dict_sha256,
)
from ssl_bench.models.loading.checkpoint import (
    IN_PYTHON,
    MODEL_FOLDER,
    PYTHON_FILE,
    TIMM_NAME,
    colour_of,
    read_weights,
    shape_text,
    unreplaced,
    verified_sha256,
    with_model_args,
)
from ssl_bench.models.loading.foreign import ASSUMED_GRID, dinov3_weights
from ssl_bench.models.loading.hub import downloaded_file, hugging_face_file
from ssl_bench.models.loading.layouts import Backbone, backbone_weights, dinov3_architecture
from ssl_bench.models.timm_blocks import UnsupportedBlocks, trace_blocks
from ssl_bench.models.timm_model import (
    KNOWN,
    TimmBackbone,
    native_size,
    shape_of_model,
    token_arrangement,
)
from ssl_bench.system.files import expand_path
from ssl_bench.system.process import reraise_out_of_memory

# timm's ViTs with rotary positions, such as DINOv3, are of the class Eva.
PlainViT = VisionTransformer | Eva
Weights = Mapping[str, Tensor]

_RANDOM_SEED = 0
_KERNEL, _POSITIONS = "patch_embed.proj.weight", "pos_embed"


def load_timm(uri: str) -> Encoder:
    """Load `timm:NAME`, `timm:NAME.TAG` or `timm:NAME@FILE`.

    Without tag and file the weights are random, always the same, and the name says so.
    """
    name, _, file = uri.removeprefix("timm:").partition("@")
    _check_name(name)
    if file:
        label = f"{name}@{Path(file).stem}"
        return _from_file(uri, name, expand_path(file), label=label, config={})
    if "." in name:
        published, architecture = timm.get_pretrained_cfg(name), name.partition(".")[0]
        if published is None or not (published.hf_hub_id or published.url):
            raise CheckpointError(
                f"timm publishes no weights for {name}; load a file",
                hint=("--checkpoint", f"timm:{architecture}@{{file}}"),
            )
        hub = published.hf_hub_id
        path = hugging_face_file(hub) if hub else downloaded_file(str(published.url))
        return _from_file(uri, name, path, label=name, config={})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_RANDOM_SEED)
        model = _create(name, None, {}, {})
    return timm_encoder(model, uri=uri, name=f"{name} (random)", sha256=state_dict_sha256(model))


def load_timm_folder(config: Mapping[str, Any], path: Path, *, uri: str, label: str) -> Encoder:
    """Load weights that timm wrote, with what the config.json beside them says.

    That is `architecture`, and `pretrained_cfg` and `model_args` where they matter.
    """
    name = str(config["architecture"]).partition(".")[0]
    _check_name(name)
    arguments = _mapping(config, "model_args", path)
    # Such as checkpoint_path, which would put other weights in place of these.
    strange = [name for name in signature(timm.create_model).parameters if name in arguments]
    if strange:
        raise CheckpointError(
            f"config.json beside {path} has {', '.join(strange)} among model_args, expected the "
            "architecture's arguments alone; take it out"
        )
    return _from_file(uri, name, path, label=label, config=config)


def load_dinov3_folder(path: Path, *, uri: str, label: str, colours: Colours) -> Encoder:
    """Load a DINOv3 that transformers wrote, as the architecture of timm that is the same."""
    config = {"pretrained_cfg": {"mean": colours[0], "std": colours[1]}}
    return _from_file(uri, None, path, label=label, config=config)


def _from_file(
    uri: str, name: str | None, path: Path, *, label: str, config: Mapping[str, Any]
) -> Encoder:
    """A file as timm's architecture of a name; without one it is a DINOv3 of transformers."""
    # A file of safetensors is mapped: its weights are read when they are copied into the model.
    with unreplaced(path):
        digest = verified_sha256(path)
        backbone = backbone_weights(read_weights(path), path)
        if name is None:
            backbone = dinov3_weights(backbone, path)
            name = dinov3_architecture(backbone.weights)
            depths, _ = _depths_and_width(backbone.weights)
            config = {**config, "model_args": {"depth": depths[0]} if depths else {}}
        if name is None:
            raise CheckpointError(
                f"{path} is no DINOv3 of a published size; {IN_PYTHON}", hint=PYTHON_FILE
            )
        if not backbone.weights:
            # timm would take "no weights" for "none given" and ask the network.
            raise CheckpointError(f"{path} holds no tensors; save model.state_dict() into it")
        model, note = _with_weights(name, path, backbone, config)
    source = f"timm {timm.__version__}, {name}"
    note = (backbone.note + note).strip(" ;")
    encoder = timm_encoder(
        model,
        uri=uri,
        name=label,
        sha256=digest,
        keys=(len(model.state_dict()), backbone.total),
        contents=Contents("timm", source, backbone.ignored, note, path),
    )
    if {"mean", "std"} <= _mapping(config, "pretrained_cfg", path).keys():
        return encoder
    return replace(encoder, colours_from=f"{ASSUMED}: timm's {name}")


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models("*vit*"), n=3)
        near = near or ["vit_small_patch16_224"]
        raise CheckpointError(
            f"timm {timm.__version__} has no model {architecture!r}",
            hint=join_alternatives(*[("--checkpoint", f"timm:{timm_name}") for timm_name in near]),
        )
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise CheckpointError(
            f"timm {timm.__version__} has no weights {tag!r} for {architecture}; "
            f"it has: {', '.join(tags) or 'none'}"
        )


def _with_weights(
    name: str, path: Path, backbone: Backbone, config: Mapping[str, Any]
) -> tuple[nn.Module, str]:
    """The model with the very tensors of the file, and what was assumed of their shapes."""
    pretrained = _mapping(config, "pretrained_cfg", path)
    arguments = dict(_mapping(config, "model_args", path))
    overlay: dict[str, Any] = {}
    if (given := pretrained.get("input_size", ...)) is not ...:
        sizes = given if isinstance(given, (list, tuple)) else ()
        if len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes):
            raise CheckpointError(
                f"config.json beside {path} has input_size={given!r}, expected [3, HEIGHT, WIDTH]; "
                "fetch it again"
            )
        overlay["input_size"] = tuple(sizes)
    weights, note = _without_register_positions(backbone.weights), ""
    plan = _create(name, path, arguments, overlay, device="meta")
    kernel, own = weights.get(_KERNEL), plan.state_dict().get(_KERNEL)
    if "patch_size" not in arguments and kernel is not None and own is not None:
        rows, cols = kernel.shape[2:] if kernel.ndim == own.ndim == 4 else (0, 0)
        if rows and rows == cols != own.shape[3]:
            arguments["patch_size"] = rows
            note = f"patches of {rows} pixels as in the file"
            plan = _create(name, path, arguments, overlay, device="meta")
    positions, own = weights.get(_POSITIONS), getattr(plan, _POSITIONS, None)
    is_said = "img_size" in arguments or "input_size" in overlay
    if not is_said and positions is not None and own is not None and positions.ndim == 3:
        # Another square of them than the model's; any other number is refused below.
        patch_embed: Any = plan.patch_embed
        num_patches = positions.shape[1] - own.shape[1] + patch_embed.num_patches
        side = math.isqrt(max(num_patches, 0))
        if num_patches not in (0, patch_embed.num_patches) and side**2 == num_patches:
            arguments["img_size"] = side * patch_embed.feat_ratio()
            note = "; ".join(filter(None, [note, ASSUMED_GRID.format(side, side)]))
            plan = _create(name, path, arguments, overlay, device="meta")
    for key in ("mean", "std"):
        if key in pretrained:
            overlay[key] = colour_of(pretrained, key, path.with_name("config.json"))
    if size := getattr(getattr(plan, "patch_embed", None), "img_size", None):
        # Else timm would take positions of equally many patches for those of another grid.
        overlay["input_size"] = (3, *size)
    _require_depth(name, plan, weights, path)
    shapes = {ours: value for ours, value in plan.state_dict().items() if ours in weights}
    if wrong := {o: value for o, value in shapes.items() if weights[o].shape != value.shape}:
        raise _mismatch(path, name, weights, wrong)
    # With its heads dropped and 0 classes on both sides timm loads strictly; else it would skip
    # missing keys without a word.
    overlay |= {"state_dict": dict(weights), "num_classes": 0, "label_offset": 0}
    # Nor draws it what the file replaces, half of the seconds of a large one; who it is says
    # how it is drawn, and stays.
    undrawn = "weight_init" in signature(type(plan).__init__).parameters
    drawing = {"weight_init": "skip"} if undrawn else {}
    with torch.random.fork_rng(devices=[]):
        model = _create(name, path, arguments | drawing, overlay, pretrained=True)
    if (mode := getattr(plan, "weight_init_mode", None)) is not None:
        model.weight_init_mode = mode
    _require_weights(model, weights, path, name)
    return model, note


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"config.json beside {path} has {key}={found!r}, expected an object; fetch it again"
        )
    return found


def _create(
    name: str,
    path: Path | None,
    arguments: Mapping[str, Any],
    overlay: Mapping[str, Any],
    *,
    pretrained: bool = False,
    device: str | None = None,
) -> Any:
    """Create a model of timm for RGB images of any size, if it supports several sizes."""
    build = partial(
        timm.create_model,
        name,
        pretrained=pretrained,
        pretrained_cfg_overlay=dict(overlay) or None,
        num_classes=0,
        device=device,
        **arguments,
    )
    try:
        try:
            model: Any = build(dynamic_img_size=True)
        except TypeError:  # Models without this argument accept any size or only one.
            model = build()
    except Exception as error:  # timm converts the keys of many libraries, and fails in any way.
        reraise_out_of_memory(error)
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        file = path or "its random weights"
        raise CheckpointError(
            f"timm:{name} does not fit {file}: {reason}; take timm's name of another "
            f"architecture, or {IN_PYTHON}",
            hint=join_alternatives(TIMM_NAME, PYTHON_FILE),
        ) from error
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    channels = next((convolution.in_channels for convolution in convolutions), 3)
    if channels != 3:
        raise CheckpointError(
            f"{path or f'timm:{name}'} is a {name} for images of {channels} channels, expected 3 "
            "(RGB); take another encoder"
        )
    return model


def timm_encoder(
    model: Any,
    *,
    uri: str,
    name: str,
    sha256: str,
    keys: tuple[int, int] = (0, 0),
    contents: Contents | None = None,
) -> Encoder:
    """Freeze a model of timm as an encoder.

    A layer `attn.qkv` that computes all of the queries, keys and values replaces separate layers
    and biases.

    Raises:
        CheckpointError: The blocks of the model do not return features of every patch.
    """
    published = model.pretrained_cfg
    published.pop("state_dict", None)
    architecture = published.get("architecture", type(model).__name__)
    is_plain = isinstance(model, PlainViT)
    if is_plain:
        patch_embed: Any = model.patch_embed
        rows, cols = patch_embed.feat_ratio(as_scalar=False)
        if rows != cols:
            raise CheckpointError(
                f"timm:{architecture} has patches of {rows} x {cols} pixels, expected squares; "
                f"{IN_PYTHON}",
                hint=PYTHON_FILE,
            )
    try:
        traced = None if isinstance(model, KNOWN) else trace_blocks(model)
    except UnsupportedBlocks as error:
        raise CheckpointError(
            f"timm:{architecture} is not supported: {error}; expected blocks or stages that return "
            f"one feature for each patch; {IN_PYTHON}",
            hint=PYTHON_FILE,
        ) from error
    module, shape = TimmBackbone(model, traced), traced or shape_of_model(model)
    _join_queries_keys_values(module.blocks)
    described = of_library(model, "timm", architecture)
    stages: dict[str, Any] = {}
    if not is_plain:
        # The blocks differ in grid and width, return maps, or do not contain [CLS].
        described |= {"strides": list(shape.strides)}
        stages = {
            "strides": shape.strides,
            "widths": shape.widths,
            "channels_last": shape.channels_last,
            "any_size": shape.any_size,
            "arrange": token_arrangement(model),
        }
    return Encoder(
        module=module.eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256,
        architecture=described,
        patch_size=shape.strides[0],
        depth=len(shape.strides),
        dim=shape.widths[-1],
        num_heads=shape.num_heads,
        num_prefix_tokens=shape.num_prefix_tokens,
        num_registers=shape.num_registers,
        native_size=native_size(model),
        mean=tuple(published["mean"]),
        std=tuple(published["std"]),
        colours_from=f"timm's {architecture}",
        loaded_keys=keys[0],
        total_keys=keys[1],
        contents=contents or Contents("timm", f"timm {timm.__version__}"),
        position_rule=module.position_rule,
        **stages,
    )


@torch.no_grad()
def _join_queries_keys_values(blocks: Iterable[nn.Module]) -> None:
    """Let `attn.qkv` compute all queries, keys and values of a block, biases included.

    Some attention layers of timm add biases outside of `qkv`, others have three layers instead.
    Their outputs stay the same up to rounding. Blocks with other layers, or with fewer keys than
    queries, do not change.
    """
    for block in blocks:
        # Any: the layers differ from model to model, and so do their types.
        attention: Any = getattr(block, "attn", None)
        if getattr(attention, "qkv", None) is not None:
            biases: list[Any] = [getattr(attention, f"{part}_bias", None) for part in "qkv"]
            if all(bias is not None for bias in biases):
                attention.qkv.bias = nn.Parameter(torch.cat(biases))
                attention.q_bias = attention.k_bias = attention.v_bias = None
            continue
        parts: list[Any] = [getattr(attention, f"{part}_proj", None) for part in "qkv"]
        if not all(isinstance(part, nn.Linear) for part in parts):
            continue
        width = parts[0].out_features
        if any(part.out_features != width for part in parts):
            continue
        weights = torch.cat([part.weight for part in parts])
        has_bias = any(part.bias is not None for part in parts)
        like = {"device": weights.device, "dtype": weights.dtype}
        qkv = nn.Linear(parts[0].in_features, 3 * width, bias=has_bias, **like)
        qkv.weight.copy_(weights)
        if has_bias:
            zeros = weights.new_zeros(width)
            qkv.bias.copy_(torch.cat([zeros if p.bias is None else p.bias for p in parts]))
        attention.qkv = qkv
        attention.q_proj = attention.k_proj = attention.v_proj = None


def _without_register_positions(weights: Weights) -> dict[str, Tensor]:
    """Those of a DINOv2 with registers as timm has them: the position of [CLS] is added to it."""
    found = dict(weights)
    positions, cls_token = weights.get(_POSITIONS), weights.get("cls_token")
    if "register_tokens" not in weights or positions is None or cls_token is None:
        return found
    if positions.ndim == cls_token.ndim == 3 and positions.shape[2] == cls_token.shape[2]:
        found["reg_token"] = found.pop("register_tokens")
        found["cls_token"] = cls_token + positions[:, 0]
        found[_POSITIONS] = positions[:, 1:]
    return found


def _require_weights(model: nn.Module, weights: Weights, path: Path, name: str) -> None:
    """Every number of the model is one of the file, under timm's name or another."""
    own = model.state_dict()
    made = {
        ours: value
        for ours, value in own.items()
        if ours in weights and not torch.equal(_bits(weights[ours]), _bits(value))
    }
    if renamed := own.keys() - weights.keys():
        # Some are joined or cut under other names, and there are biases that are 0 here.
        numbers = np.concatenate([np.zeros(1, np.int32), *map(_bits, weights.values())])
        # Once for all layers: a ViT-S has 22 million and some hundred layers.
        numbers.sort()
        made |= {ours: own[ours] for ours in renamed if not _are_of(numbers, _bits(own[ours]))}
    if made:
        raise _mismatch(path, name, weights, made)


def _depths_and_width(weights: Weights) -> tuple[Sequence[int], int]:
    """Blocks of each stage, where the names are timm's, and width of the first convolution."""
    found = (re.match(r"((?:(?:layers|stages)\.\d+\.)?blocks\.)(\d+)\.\D", n) for n in weights)
    blocks = sorted({(one[1], one[2]) for one in found if one})
    width = next((len(value) for value in weights.values() if value.ndim == 4), 0)
    return list(Counter(stage for stage, _ in blocks).values()), width


def _require_depth(name: str, plan: nn.Module, weights: Weights, path: Path) -> None:
    depths, width = _depths_and_width(weights)
    expected, own_width = _depths_and_width(plan.state_dict())
    if depths == expected or len(depths) != len(expected) or width != own_width:
        return
    different = f'"depths": {depths}' if len(depths) > 1 else f'"depth": {depths[0]}'
    way, stated = with_model_args(path, different, name), ()
    # The ViT of this suite has any depth.
    plain = VisionTransformer(depth=1, num_classes=0).state_dict().keys()
    if plain == {re.sub(r"^blocks\.\d+", "blocks.0", key) for key in weights}:
        known: Any = plan.pretrained_cfg
        mean, std = ("/".join(f"{one:g}" for one in known[key]) for key in ("mean", "std"))
        stated = ("--checkpoint", f"mean={mean},std={std}:{escape_braces(str(path))}")
    raise CheckpointError(
        f"{path} has {sum(depths)} blocks of width {width}, timm:{name} {sum(expected)}; {way}",
        hint=join_alternatives(MODEL_FOLDER, stated),
    )


def _mismatch(path: Path, name: str, weights: Weights, wrong: Weights) -> CheckpointError:
    shown = "; ".join(
        f"{ours} is {shape_text(weights[ours]) if ours in weights else 'of no such name'}, "
        f"expected {shape_text(value)}"
        for ours, value in list(wrong.items())[:3]
    )
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    different = '"img_size": [HEIGHT, WIDTH]' if _POSITIONS in wrong else "..."
    return CheckpointError(
        f"timm:{name} does not fit {path}: {shown}{more}, and nothing is resized; take timm's "
        f"name of the file's architecture, or {with_model_args(path, different, name)}",
        hint=join_alternatives(TIMM_NAME, MODEL_FOLDER),
    )


def _bits(value: Tensor) -> Int[Tensor, " numbers"]:
    """Of all numbers in single precision; any NaN equals itself."""
    return value.detach().float().contiguous().flatten().view(torch.int32)


def _are_of(numbers: Int[np.ndarray, " numbers"], bits: Int[Tensor, " some"]) -> bool:
    """Whether each of the bits is one of the numbers, which ascend."""
    asked = np.sort(bits.numpy())
    places = np.searchsorted(numbers, asked).clip(max=len(numbers) - 1)
    return bool((numbers[places] == asked).all())
