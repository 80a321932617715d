"""Load timm models as encoders.

Models must accept RGB images. If the class of a model is not in `SUPPORTED_CLASSES`, the model must
also have stages. The outputs of these stages must equal the features of timm's
`forward_intermediates`, with one feature vector per patch.

timm silently resizes position embeddings, patch kernels and tables of relative positions. The model
is therefore built with the patch size and the square token grid of the weights file, unless
config.json states these sizes. If the file still does not fit, an error is raised. After loading,
the weights are compared with the file.
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
    Encoder,
    Normalization,
    WeightsInfo,
    describe_library_model,
    state_dict_sha256,
)
from ssl_bench.models.loading.backbone import Backbone, find_backbone
from ssl_bench.models.loading.checkpoint import (
    MODEL_FOLDER,
    PYTHON_ADVICE,
    PYTHON_FILE,
    TIMM_HINT,
    advise_model_folder,
    format_shape,
    read_rgb,
    read_weights,
    require_unchanged,
    verify_sha256,
)
from ssl_bench.models.loading.foreign import ASSUMED_GRID, rename_dinov3
from ssl_bench.models.loading.hub import download_file, fetch_hub_file
from ssl_bench.models.loading.layouts import dinov3_architecture
from ssl_bench.models.timm_blocks import UnsupportedBlocks, trace_blocks
from ssl_bench.models.timm_model import (
    SUPPORTED_CLASSES,
    TimmBackbone,
    native_size,
    read_block_info,
    token_arrangement,
)
from ssl_bench.system.files import expand_path
from ssl_bench.system.process import reraise_out_of_memory

Weights = Mapping[str, Tensor]

_RANDOM_SEED = 0
_KERNEL, _POSITIONS = "patch_embed.proj.weight", "pos_embed"


def load_timm(uri: str) -> Encoder:
    """Load a timm model as an encoder.

    `uri` is `timm:NAME` for random weights, `timm:NAME.TAG` for published weights, or
    `timm:NAME@FILE` for a weights file. Random weights are drawn with seed 0, and tables then show
    the name with "(random)".
    """
    name, _, file = uri.removeprefix("timm:").partition("@")
    _check_name(name)
    if file:
        label = f"{name}@{Path(file).stem}"
        return _from_file(uri, name, expand_path(file), label=label, config={})
    if "." in name:
        published: Any = timm.get_pretrained_cfg(name)
        hub = published.hf_hub_id
        path = fetch_hub_file(hub) if hub else download_file(str(published.url))
        return _from_file(uri, name, path, label=name, config={})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_RANDOM_SEED)
        model = _create(name, None, {}, {})
    return timm_encoder(model, uri=uri, name=f"{name} (random)", sha256=state_dict_sha256(model))


def load_timm_folder(config: Mapping[str, Any], path: Path, *, uri: str, label: str) -> Encoder:
    """Load the weights in a folder whose config.json describes a timm model.

    Args:
        config: Content of config.json, with `architecture`, and optionally `pretrained_cfg` and
            `model_args`.
        path: The weights file.
        uri: Address of the encoder, such as `local-dir:FOLDER`.
        label: Name of the encoder in tables.
    """
    name = str(config["architecture"]).partition(".")[0]
    _check_name(name)
    arguments = _mapping(config, "model_args", path)
    # Arguments of timm.create_model itself are not allowed. For example, `checkpoint_path` would
    # load other weights.
    reserved = [name for name in signature(timm.create_model).parameters if name in arguments]
    if reserved:
        raise CheckpointError(
            f"config.json next to {path} has {', '.join(reserved)} in model_args, expected only "
            "arguments of the architecture. Remove the others"
        )
    return _from_file(uri, name, path, label=label, config=config)


def load_dinov3_folder(
    path: Path, *, uri: str, label: str, normalization: Normalization
) -> Encoder:
    """Load a DINOv3 weights file of the transformers library into a timm model.

    Args:
        path: The weights file.
        uri: Address of the encoder, such as `local-dir:FOLDER`.
        label: Name of the encoder in tables.
        normalization: Mean and standard deviation of the training images.
    """
    config = {"pretrained_cfg": {"mean": normalization[0], "std": normalization[1]}}
    return _from_file(uri, None, path, label=label, config=config)


def _from_file(
    uri: str, name: str | None, path: Path, *, label: str, config: Mapping[str, Any]
) -> Encoder:
    """Load a weights file into the timm architecture `name`.

    Args:
        uri: Address of the encoder, such as `timm:NAME@FILE`.
        name: timm's name of the architecture. None if the file is a DINOv3 in the format of the
            transformers library. The architecture is then inferred from the weights.
        path: The weights file.
        label: Name of the encoder in tables.
        config: Content of the config.json next to the file. Empty if there is none.
    """
    # A safetensors file is memory-mapped, so its weights are only read when they are copied.
    with require_unchanged(path):
        digest = verify_sha256(path)
        backbone = find_backbone(read_weights(path), path)
        used = None
        if name is None:
            unfused = backbone
            backbone = rename_dinov3(unfused, path)
            # Renaming joins queries, keys and values, so it reduces the number of tensors.
            used = len(unfused.weights) - (len(backbone.ignored) - len(unfused.ignored))
            name = dinov3_architecture(backbone.weights)
            depths, _ = _depths_and_width(backbone.weights)
            config = {**config, "model_args": {"depth": depths[0]} if depths else {}}
        if name is None:
            raise CheckpointError(
                f"{path} is not a DINOv3 of a published size. To use the file, {PYTHON_ADVICE}",
                hint=PYTHON_FILE,
            )
        if not backbone.weights:
            # Without tensors, timm would download published weights.
            raise CheckpointError(f"{path} contains no tensors. Save model.state_dict() in it")
        model, note = _load_weights(name, path, backbone, config)
    source = f"timm {timm.__version__}, {name}"
    note = (backbone.note + note).strip(" ;")
    encoder = timm_encoder(
        model,
        uri=uri,
        name=label,
        sha256=digest,
        keys=(len(model.state_dict()) if used is None else used, backbone.total),
        weights_info=WeightsInfo("timm", source, backbone.ignored, note, path),
    )
    if {"mean", "std"} <= _mapping(config, "pretrained_cfg", path).keys():
        return encoder
    return replace(encoder, normalization_source=f"{ASSUMED}: timm's {name}")


def _check_name(name: str) -> None:
    architecture, dot, tag = name.partition(".")
    if not timm.is_model(architecture):
        similar = get_close_matches(architecture, timm.list_models(), n=3)
        similar = similar or ["vit_small_patch16_224"]
        raise CheckpointError(
            f"timm {timm.__version__} has no model {architecture!r}",
            hint=join_alternatives(
                *[("--checkpoint", f"timm:{timm_name}") for timm_name in similar]
            ),
        )
    tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{architecture}.*")]
    if dot and tag not in tags:
        raise CheckpointError(
            f"timm {timm.__version__} has no weights {tag!r} for {architecture}, "
            f"expected one of: {', '.join(tags) or 'none'}"
        )


def _load_weights(
    name: str, path: Path, backbone: Backbone, config: Mapping[str, Any]
) -> tuple[nn.Module, str]:
    """Return a timm model with the weights of a file, and a note about sizes that were inferred.

    Args:
        name: timm's name of the architecture.
        path: The weights file.
        backbone: Tensors of the encoder in this file.
        config: Content of the config.json next to the file. Empty if there is none.

    Raises:
        CheckpointError: The weights do not fit the architecture.
    """
    weights = _convert_dinov2_registers(backbone.weights)
    arguments, overlay = _read_arguments(config, path)
    meta_model, arguments, note = _infer_sizes(name, path, weights, arguments, overlay)
    pretrained = _mapping(config, "pretrained_cfg", path)
    for key in ("mean", "std"):
        if key in pretrained:
            overlay[key] = read_rgb(pretrained, key, path.with_name("config.json"))
    if size := getattr(getattr(meta_model, "patch_embed", None), "img_size", None):
        # timm does not distinguish token grids with the same number of patches, such as 2 x 8 and
        # 4 x 4.
        overlay["input_size"] = (3, *size)
    _require_depth(name, meta_model, weights, path)
    expected = meta_model.state_dict()
    if wrong := {
        tensor: value
        for tensor, value in expected.items()
        if tensor in weights and weights[tensor].shape != value.shape
    }:
        raise _mismatch(path, name, weights, wrong)
    # `find_backbone` has removed all heads. timm only checks all tensor names if the number of
    # classes is unchanged.
    overlay |= {"state_dict": dict(weights), "num_classes": 0, "label_offset": 0}
    # Do not draw initial weights, because this takes long and the file replaces them.
    can_skip = "weight_init" in signature(type(meta_model).__init__).parameters
    drawing = {"weight_init": "skip"} if can_skip else {}
    has_timm_names = 2 * len(expected.keys() & weights.keys()) >= len(expected)
    with torch.random.fork_rng(devices=[]):
        model = _create(
            *(name, path, arguments | drawing, overlay),
            pretrained=True,
            suggest_name=has_timm_names,
        )
    if (mode := getattr(meta_model, "weight_init_mode", None)) is not None:
        # This attribute is part of the architecture that identifies an encoder.
        model.weight_init_mode = mode
    _require_weights(model, weights, path, name)
    return model, note


def _read_arguments(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the model arguments and the input size from the content of a config.json.

    Returns:
        The model arguments, and a dictionary that overrides timm's `pretrained_cfg` with the input
        size. This dictionary is empty if config.json does not state the input size.
    """
    pretrained = _mapping(config, "pretrained_cfg", path)
    overlay: dict[str, Any] = {}
    if (stated := pretrained.get("input_size", ...)) is not ...:
        sizes = stated if isinstance(stated, (list, tuple)) else ()
        if len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes):
            raise CheckpointError(
                f"config.json next to {path} has input_size={stated!r}, expected "
                "[3, HEIGHT, WIDTH]. Download it again"
            )
        overlay["input_size"] = tuple(sizes)
    return dict(_mapping(config, "model_args", path)), overlay


def _infer_sizes(
    name: str,
    path: Path,
    weights: Weights,
    arguments: Mapping[str, Any],
    overlay: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, Any], str]:
    """Infer the patch size and image size of a timm model from the weights.

    Sizes that config.json states are not inferred.

    Args:
        name: timm's name of the architecture.
        path: The weights file.
        weights: Tensors of the file by name.
        arguments: Arguments of the model in config.json.
        overlay: Values that replace entries of timm's `pretrained_cfg`.

    Returns:
        The model on the device "meta" (without memory for its weights), its arguments, and a note
        about the inferred sizes.
    """
    arguments, notes = dict(arguments), list[str]()
    meta_model = _create(name, path, arguments, overlay, device="meta")
    kernel, expected = weights.get(_KERNEL), meta_model.state_dict().get(_KERNEL)
    if "patch_size" not in arguments and kernel is not None and expected is not None:
        rows, cols = kernel.shape[2:] if kernel.ndim == expected.ndim == 4 else (0, 0)
        if rows and rows == cols != expected.shape[3]:
            arguments["patch_size"] = rows
            notes.append(f"patches of {rows} pixels as in the file")
            meta_model = _create(name, path, arguments, overlay, device="meta")
    positions, expected = weights.get(_POSITIONS), getattr(meta_model, _POSITIONS, None)
    is_stated = "img_size" in arguments or "input_size" in overlay
    if not is_stated and positions is not None and positions.ndim == 3 and expected is not None:
        # Accept a square token grid of another size. `_load_weights` refuses all other shapes.
        patch_embed: Any = meta_model.patch_embed
        own_patches = getattr(patch_embed, "num_patches", 0)
        num_patches = positions.shape[1] - expected.shape[1] + own_patches
        side = math.isqrt(max(num_patches, 0))
        if own_patches and num_patches not in (0, own_patches) and side**2 == num_patches:
            arguments["img_size"] = side * patch_embed.feat_ratio()
            notes.append(ASSUMED_GRID.format(side, side))
            meta_model = _create(name, path, arguments, overlay, device="meta")
    return meta_model, arguments, "; ".join(notes)


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"config.json next to {path} has {key}={value!r}, expected an object. Download it again"
        )
    return value


def _create(
    name: str,
    path: Path | None,
    arguments: Mapping[str, Any],
    overlay: Mapping[str, Any],
    *,
    pretrained: bool = False,
    device: str | None = None,
    suggest_name: bool = True,
) -> Any:
    """Create a timm model for RGB images. If possible, it accepts images of any size.

    Args:
        name: timm's name of the architecture.
        path: The weights file, for error messages. None for random weights.
        arguments: Arguments of the model.
        overlay: Values that replace entries of timm's `pretrained_cfg`.
        pretrained: Whether to load `overlay["state_dict"]`.
        device: "meta" for a model without memory for its weights. None for the default device.
        suggest_name: Whether error messages suggest using another architecture.
    """
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
        except TypeError:  # The model does not have this argument.
            model = build()
    except Exception as error:  # Converting unknown weights in timm can raise any exception.
        reraise_out_of_memory(error)
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        file = path or "its random weights"
        advice = "use timm's name of another architecture, or " if suggest_name else ""
        raise CheckpointError(
            f"timm:{name} does not fit {file}: {reason}. To load it, {advice}{PYTHON_ADVICE}",
            hint=join_alternatives(*([TIMM_HINT] if suggest_name else []), PYTHON_FILE),
        ) from error
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    channels = next((convolution.in_channels for convolution in convolutions), 3)
    if channels != 3:
        raise CheckpointError(
            f"{path or f'timm:{name}'} is a {name} for images with {channels} channels, expected 3 "
            "(RGB). Use another encoder"
        )
    return model


def timm_encoder(
    model: Any,
    *,
    uri: str,
    name: str,
    sha256: str,
    keys: tuple[int, int] = (0, 0),
    weights_info: WeightsInfo | None = None,
) -> Encoder:
    """Freeze a timm model, and return it as an encoder.

    If a block has separate layers for queries, keys and values, they are joined in place as
    `attn.qkv`.

    Args:
        model: The timm model.
        uri: Address from which the model was loaded, such as `timm:NAME`.
        name: Name of the encoder in tables.
        sha256: SHA-256 of the weights.
        keys: Number of loaded tensors, and number of all tensors in the weights file.
        weights_info: Further information about the weights file, such as its layout.

    Raises:
        CheckpointError: The blocks do not return one feature per patch, or patches are not square.
    """
    published = model.pretrained_cfg
    published.pop("state_dict", None)
    architecture = published.get("architecture", type(model).__name__)
    # timm's ViTs with rotary positions, such as DINOv3, are of the class Eva.
    is_plain = isinstance(model, VisionTransformer | Eva)
    if is_plain:
        patch_embed: Any = model.patch_embed
        rows, cols = patch_embed.feat_ratio(as_scalar=False)
        if rows != cols:
            raise CheckpointError(
                f"timm:{architecture} has patches of {rows} x {cols} pixels, expected squares. "
                f"To use this model, {PYTHON_ADVICE}",
                hint=PYTHON_FILE,
            )
    try:
        traced_info = None if isinstance(model, SUPPORTED_CLASSES) else trace_blocks(model)
    except UnsupportedBlocks as error:
        raise CheckpointError(
            f"timm:{architecture} is not supported: {error}. Expected blocks or stages that "
            f"return one feature for each patch. To use this model, {PYTHON_ADVICE}",
            hint=PYTHON_FILE,
        ) from error
    module, block_info = TimmBackbone(model, traced_info), traced_info or read_block_info(model)
    _join_queries_keys_values(module.blocks)
    height, width = native_size(model)
    if traced_info is not None and traced_info.dynamic_image_size:
        # Some ConvNets were trained at sizes such as 176, which are not multiples of the stride.
        coarsest = max(traced_info.strides)
        height, width = (max(1, round(side / coarsest)) * coarsest for side in (height, width))
    described = describe_library_model(model, "timm", architecture)
    stages: dict[str, Any] = {}
    if not is_plain:
        # The blocks differ in grid or width, return maps, or have no [CLS] token.
        described |= {"strides": list(block_info.strides)}
        stages = {
            "strides": block_info.strides,
            "widths": block_info.widths,
            "channels_last": block_info.channels_last,
            "dynamic_image_size": block_info.dynamic_image_size,
            "tokens_to_maps": token_arrangement(model),
        }
    return Encoder(
        module=module.eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256,
        architecture=described,
        patch_size=block_info.strides[0],
        depth=len(block_info.strides),
        dim=block_info.widths[-1],
        num_heads=block_info.num_heads,
        num_prefix_tokens=block_info.num_prefix_tokens,
        num_registers=block_info.num_registers,
        native_size=(height, width),
        mean=tuple(published["mean"]),
        std=tuple(published["std"]),
        normalization_source=f"timm's {architecture}",
        loaded_keys=keys[0],
        total_keys=keys[1],
        weights_info=weights_info or WeightsInfo("timm", f"timm {timm.__version__}"),
        position_rule=module.position_rule,
        **stages,
    )


@torch.no_grad()
def _join_queries_keys_values(blocks: Iterable[nn.Module]) -> None:
    """Join the layers for queries, keys and values of each block in one layer `attn.qkv`.

    The blocks are changed in place. Some attention modules of timm have the three layers `q_proj`,
    `k_proj` and `v_proj`, which are joined. Other attention modules have a layer `qkv` and separate
    biases, which become part of this layer. The outputs of the modules stay the same up to
    rounding. A block is not changed if its attention has another form, or if its queries, keys and
    values differ in width.
    """
    for block in blocks:
        # The attributes and their types differ between models.
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


def _convert_dinov2_registers(weights: Weights) -> dict[str, Tensor]:
    """Convert the weights of a DINOv2 with registers to timm's form.

    The position embedding of [CLS] is added to the [CLS] token, and the registers are renamed.
    Other weights are returned unchanged.
    """
    converted = dict(weights)
    positions, cls_token = weights.get(_POSITIONS), weights.get("cls_token")
    if "register_tokens" not in weights or positions is None or cls_token is None:
        return converted
    if positions.ndim == cls_token.ndim == 3 and positions.shape[2] == cls_token.shape[2]:
        converted["reg_token"] = converted.pop("register_tokens")
        converted["cls_token"] = cls_token + positions[:, 0]
        converted[_POSITIONS] = positions[:, 1:]
    return converted


def _require_weights(model: nn.Module, weights: Weights, path: Path, name: str) -> None:
    """Raise CheckpointError if a tensor of the model was not loaded from the file.

    If the file has a tensor of the same name, both tensors must be equal. timm may have renamed,
    joined or split the other tensors. Each number in such a tensor must be zero, or equal to any
    number in the file.

    Args:
        model: The timm model after loading.
        weights: Tensors of the file by name.
        path: The weights file, for the error message.
        name: timm's name of the architecture, for the error message.
    """
    own = model.state_dict()
    changed = {
        tensor: value
        for tensor, value in own.items()
        if tensor in weights and not torch.equal(_bits(weights[tensor]), _bits(value))
    }
    if renamed := own.keys() - weights.keys():
        # Include zero, because timm adds biases of zero.
        numbers = np.concatenate([np.zeros(1, np.int32), *map(_bits, weights.values())])
        # Sort once for all tensors, because a ViT-S has 22 million numbers.
        numbers.sort()
        changed |= {
            tensor: own[tensor] for tensor in renamed if not _contains(numbers, _bits(own[tensor]))
        }
    if changed:
        raise _mismatch(path, name, weights, changed)


def _depths_and_width(weights: Weights) -> tuple[Sequence[int], int]:
    """Return the number of blocks in each stage, and the output channels of the first convolution.

    Both results are read from the names and shapes of the tensors. Only blocks whose tensors have
    timm's names are counted.
    """
    names = (re.match(r"((?:(?:layers|stages)\.\d+\.)?blocks\.)(\d+)\.\D", n) for n in weights)
    blocks = sorted({(match[1], match[2]) for match in names if match})
    width = next((len(value) for value in weights.values() if value.ndim == 4), 0)
    return list(Counter(stage for stage, _ in blocks).values()), width


def _require_depth(name: str, meta_model: nn.Module, weights: Weights, path: Path) -> None:
    """Raise CheckpointError if `weights` and `meta_model` have different numbers of blocks.

    `name` and `path` are timm's name of the model and the weights file, for the error message.
    """
    depths, width = _depths_and_width(weights)
    expected, expected_width = _depths_and_width(meta_model.state_dict())
    if depths == expected or len(depths) != len(expected) or width != expected_width:
        return
    different = f'"depths": {depths}' if len(depths) > 1 else f'"depth": {depths[0]}'
    advice, bare_file = advise_model_folder(path, different, name), ()
    # The ViT of this suite can have any depth.
    plain = VisionTransformer(depth=1, num_classes=0).state_dict().keys()
    if plain == {re.sub(r"^blocks\.\d+", "blocks.0", tensor) for tensor in weights}:
        known: Any = meta_model.pretrained_cfg
        mean, std = ("/".join(f"{value:g}" for value in known[key]) for key in ("mean", "std"))
        bare_file = ("--checkpoint", f"mean={mean},std={std}:{escape_braces(str(path))}")
    raise CheckpointError(
        f"{path} has {sum(depths)} blocks of width {width}, but the timm model {name} has "
        f"{sum(expected)} blocks. To use the file, {advice}",
        hint=join_alternatives(MODEL_FOLDER, bare_file),
    )


def _mismatch(path: Path, name: str, weights: Weights, wrong: Weights) -> CheckpointError:
    """Return an error that lists the first three tensors of a timm model that do not fit a file.

    `weights` are the tensors of the file, and `wrong` the tensors of the model that do not fit.
    """
    differences = "; ".join(
        f"{tensor} is {format_shape(weights[tensor]) if tensor in weights else 'not in the file'}, "
        f"expected {format_shape(value)}"
        for tensor, value in list(wrong.items())[:3]
    )
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    different = '"img_size": [HEIGHT, WIDTH]' if _POSITIONS in wrong else "..."
    return CheckpointError(
        f"timm:{name} does not fit {path}: {differences}{more}, and nothing is resized. Use "
        f"timm's name of the file's architecture, or {advise_model_folder(path, different, name)}",
        hint=join_alternatives(TIMM_HINT, MODEL_FOLDER),
    )


def _bits(value: Tensor) -> Int[Tensor, " numbers"]:
    """Convert all numbers to float32, and return their bit patterns as integers.

    Unlike the numbers themselves, bit patterns can be compared even for NaN.
    """
    return value.detach().float().contiguous().flatten().view(torch.int32)


def _contains(numbers: Int[np.ndarray, " numbers"], bits: Int[Tensor, " some"]) -> bool:
    """Return whether all `bits` occur in `numbers`, which must be in ascending order."""
    wanted = np.sort(bits.numpy())
    places = np.searchsorted(numbers, wanted).clip(max=len(numbers) - 1)
    return bool((numbers[places] == wanted).all())
