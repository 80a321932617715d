"""Wrap a user's module as an encoder.

Python code passes the module itself. Commands accept the address `FILE.py:NAME` of a module.
"""

import importlib.util
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, UnsupportedEncoderError, broken_file_error
from ssl_bench.models.encoder import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Encoder,
    WeightsInfo,
    describe_library_model,
    state_dict_sha256,
)
from ssl_bench.models.loading.addresses import FILE_AND_NAME
from ssl_bench.models.own_code import code_sha256
from ssl_bench.system.device import evaluation_mode, preserve_process_state
from ssl_bench.system.files import expand_path, resolve_links

_NORMS = ("norm", "layernorm", "ln_f", "ln_post", "final_norm", "norm_final", "post_layernorm")
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads")
_USUAL_SIZE, _USUAL_PATCH = 224, 16
_UNIFORM_BLOCKS = (
    "Name a list of blocks that all return the same shape: Encoder.from_module(module, "
    "blocks='NAME'), or load the model as timm:NAME if timm has it"
)
# A token counts as changed if it changes by more than this fraction of the largest change.
_ROUNDING = 1e-3


def load_python_object(uri: str) -> Encoder:
    """Load an encoder from an address `FILE.py:NAME`, such as `my_model.py:encoder`.

    NAME is a PyTorch module, an `Encoder`, or a function without arguments that returns one of
    them. The file can import other files in its folder, as with `python FILE.py`.
    """
    address = FILE_AND_NAME.fullmatch(uri)
    assert address is not None
    path, name = resolve_links(expand_path(address[1])), address[2]
    if not path.is_file():
        raise CheckpointError(f"no file {path}", hint=("--checkpoint", "{file}.py:{name}"))
    target = _run_file(path, name)
    if isinstance(target, Encoder):
        return replace(target, uri=uri)
    if not isinstance(target, nn.Module):
        raise CheckpointError(
            f"expected {name} of {path} to be a torch.nn.Module, an ssl_bench.Encoder, or a "
            f"function that returns one of them, got {type(target).__name__}"
        )
    encoder = Encoder.from_module(target, name=f"{path.stem}.{name}")
    return replace(encoder, uri=uri, weights_info=WeightsInfo("module", file=path))


def _run_file(path: Path, name: str) -> Any:
    """Run a Python file, and return the object in it that has the name `name`.

    If the object is a function or a class, it is called without arguments, and the result is
    returned.
    """
    spec = importlib.util.spec_from_file_location(f"ssl_bench_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # `inspect` finds the source of a class only if its module is in sys.modules.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            known = [
                key
                for key, value in vars(module).items()
                if not key.startswith("_")
                and (callable(value) or isinstance(value, Encoder))
                # Leave out imported classes and functions.
                and (not isinstance(value, type | FunctionType) or value.__module__ == spec.name)
            ]
            raise CheckpointError(f"{path} has no {name}, only {', '.join(known) or 'nothing'}")
        target = getattr(module, name)
        if isinstance(target, nn.Module) or not callable(target):
            return target
        try:
            inspect.signature(target).bind()
        except TypeError as error:
            raise CheckpointError(
                f"{path}:{name} cannot be called without arguments ({error}). Name a function "
                "without arguments that returns the module"
            ) from error
        return target()
    except CheckpointError:
        raise
    except Exception as error:  # A user's file can raise any exception.
        raise CheckpointError(str(broken_file_error(error, ()))) from error
    finally:
        sys.path.remove(str(path.parent))


def wrap_module(
    module: nn.Module,
    *,
    patch_size: int | None,
    blocks: str | None,
    norm: str | None,
    image_size: int | tuple[int, int] | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
    num_registers: int,
    name: str | None,
    epoch: int | float | None,
) -> Encoder:
    """Wrap a user's module as an encoder. `Encoder.from_module` describes the arguments."""
    label = name or type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise CheckpointError(
            f"{label} is a TorchScript module, whose blocks cannot be hooked. Pass the original "
            "nn.Module with the same state_dict()"
        )
    rgb_mean = _to_rgb(IMAGENET_MEAN if mean is None else mean, f"{label}: expected mean")
    rgb_std = _to_rgb(IMAGENET_STD if std is None else std, f"{label}: expected std")
    if 0 in rgb_std:
        raise CheckpointError(f"{label}: expected std above 0, got {std!r}")
    parts = dict(module.named_modules())
    blocks = blocks or _find_blocks(module, label)
    if blocks not in parts or not list(parts[blocks].children()):
        raise CheckpointError(
            f"{label} has no list of blocks named {blocks!r}, expected the name of a "
            f"ModuleList or Sequential, such as {', '.join(_module_lists(module)) or 'blocks'}"
        )
    kernel = patch_size or _patch_kernel(module)
    norm = _find_norm(parts, norm, blocks, label)
    own = UserModule(module, blocks, _MissingNorm() if norm is None else parts[norm])
    with preserve_process_state(), evaluation_mode(own):
        sizes = _likely_sizes(module, image_size, kernel or _USUAL_PATCH)
        size, outputs = _find_accepted_size(own, sizes, label)
        stride = _map_stride(outputs, size)
        patch = patch_size or stride or kernel
        if patch is None:
            is_uniform = len({output.shape for output in outputs}) == 1
            raise CheckpointError(
                f"{label} has no convolution over three channels that embeds patches, and its "
                f"blocks return {_format_shapes(outputs)}. "
                + ("Pass patch_size=16" if is_uniform else _UNIFORM_BLOCKS)
            )
        try:
            _trace_blocks(own, (size[0] + patch, size[1] + 2 * patch))
            dynamic_image_size = True
        except Exception:  # A user's module can reject an image size with any exception.
            dynamic_image_size = False
        grid = (size[0] // patch, size[1] // patch)
        widths, num_prefix_tokens, channels_last = _infer_layout(outputs, grid, stride, label)
        shape = outputs[0].shape[1:]
        _require_row_order(own, grid, patch, num_prefix_tokens, shape, channels_last, label)
    attributes = [
        getattr(part, attribute, None) for part in own.blocks[0].modules() for attribute in _HEADS
    ]
    # The feature extractor reads queries, keys and values from the layer `attn.qkv`.
    has_keys = all("attn.qkv" in dict(block.named_modules()) for block in own.blocks)
    fallback_facets = {} if num_prefix_tokens > num_registers else {"cls": "patch_mean"}
    return Encoder(
        module=own,
        name=label,
        uri="memory",
        sha256=state_dict_sha256(module),
        architecture={
            **describe_library_model(module, "module", type(module).__qualname__),
            "code_sha256": code_sha256(module),
            "blocks": blocks,
            "norm": norm,
            "patch_size": patch,
            "native_size": list(size),
            "num_registers": num_registers,
        },
        patch_size=patch,
        depth=len(outputs),
        dim=widths[-1],
        num_heads=next((value for value in attributes if type(value) is int), 0),
        num_prefix_tokens=num_prefix_tokens,
        native_size=size,
        mean=rgb_mean,
        std=rgb_std,
        normalization_source="assumed, ImageNet's" if mean is None else "from_module",
        num_registers=num_registers,
        weights_info=WeightsInfo("module", epoch=None if epoch is None else float(epoch)),
        channels_last=channels_last,
        dynamic_image_size=dynamic_image_size,
        fallback_facets=fallback_facets if has_keys else {**fallback_facets, "key": "token"},
    )


class UserModule(nn.Module):
    """A user's module with the attributes `blocks` and `norm` that feature extraction needs.

    Args:
        module: The user's module.
        blocks: Name of the list of blocks in this module.
        norm: The final norm.
    """

    def __init__(self, module: nn.Module, blocks: str, norm: nn.Module) -> None:
        super().__init__()
        self.module, self.norm = module, norm
        # A ModuleList numbers its blocks. The children of a Sequential may have other names.
        self.blocks = nn.ModuleList(module.get_submodule(blocks).children())

    def forward(self, images: Tensor) -> Any:
        return self.module(images)


class _MissingNorm(nn.Module):
    def forward(self, _tokens: Tensor) -> Tensor:
        """Raise UnsupportedEncoderError, because the final norm of the module is unknown."""
        raise UnsupportedEncoderError(
            "this module has no final norm with a known name. Pass the name of the norm: "
            "ssl_bench.Encoder.from_module(module, norm='NAME')"
        )


def _to_rgb(value: float | Sequence[float], expected: str) -> tuple[float, float, float]:
    try:
        channels = (value, value, value) if isinstance(value, int | float) else value
        red, green, blue = map(float, channels)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{expected} to be three numbers or one number, got {value!r}"
        ) from error
    return red, green, blue


def _find_blocks(module: nn.Module, label: str) -> str:
    lists = _module_lists(module)
    longest = [name for name, count in lists.items() if count == max(lists.values())]
    if len(longest) != 1:
        raise CheckpointError(
            f"{label}: expected one longest list of blocks (modules of the same class), found "
            f"{', '.join(lists) or 'no list'}. Pass the name of the list of blocks: "
            "Encoder.from_module(module, blocks='NAME')"
        )
    return longest[0]


def _module_lists(module: nn.Module) -> dict[str, int]:
    """Return the name and length of each list of modules that may be the blocks of an encoder.

    Such a list is a `ModuleList` or `Sequential` whose items have the same class and contain other
    modules.
    """
    return {
        name: len(children)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and (children := list(part.children()))
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].children())
    }


def _patch_kernel(module: nn.Module) -> int | None:
    """Return the kernel size of a module's patch embedding, or None if it has none.

    The patch embedding is the first RGB convolution whose stride equals its kernel size.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3:
            rows, cols = part.kernel_size
            if rows == cols and part.stride == part.kernel_size and rows > 1:
                return rows
    return None


def _find_norm(
    parts: Mapping[str, nn.Module], norm: str | None, blocks: str, label: str
) -> str | None:
    if norm is not None:
        if norm not in parts:
            raise CheckpointError(
                f"{label} has no module {norm!r}. Pass the name of its final norm"
            )
        return norm
    parent = blocks.rpartition(".")[0]
    paths = [f"{place}{'.' if place else ''}{name}" for place in (parent, "") for name in _NORMS]
    usual = [path for path in paths if path in parts]
    # Norms that are registered after the blocks.
    later = [
        path
        for path, part in list(parts.items())[list(parts).index(blocks) :]
        if not path.startswith(f"{blocks}.") and type(part).__name__.lower().endswith("norm")
    ]
    return usual[0] if usual else later[0] if len(later) == 1 else None


def _likely_sizes(
    module: nn.Module, image_size: int | tuple[int, int] | None, patch: int
) -> list[tuple[int, int]]:
    """Return image sizes (height, width) in pixels to try, with the most likely first.

    Args:
        module: The user's module. Its attributes, such as `img_size`, and its position embedding
            suggest sizes.
        image_size: Size that the user states, which then is the only size in the result. None if
            the user states no size.
        patch: Side of a patch in pixels. Guessed sizes are multiples of this side.
    """
    if image_size is not None:
        return [(image_size, image_size) if isinstance(image_size, int) else image_size]
    attributes = [
        getattr(part, name, None)
        for part in (module, getattr(module, "patch_embed", None), getattr(module, "config", None))
        for name in ("img_size", "image_size")
    ]
    sizes = [(value, value) if isinstance(value, int) else value for value in attributes]
    stated = [(int(s[0]), int(s[1])) for s in sizes if isinstance(s, (tuple, list)) and len(s) == 2]
    usual = max(1, round(_USUAL_SIZE / patch)) * patch
    # A position embedding has one row per patch, and a few rows for [CLS] and registers.
    tables = [
        math.isqrt(table.shape[-2])
        for name, table in (*module.named_parameters(), *module.named_buffers())
        if (table.ndim == 3 and len(table) == 1) or (table.ndim == 2 and "pos" in name)
    ]
    sides = (14, 16, 8, 4, 2, *(side for side in tables if side > 1))
    return [*stated, (usual, usual), *((side * patch, side * patch) for side in sides)]


def _trace_blocks(own: UserModule, size: tuple[int, int]) -> list[Tensor]:
    """Return the outputs of all blocks for two all-zero images of a size (height, width).

    Raises:
        UnsupportedEncoderError: A block is never called.
    """
    outputs: dict[int, Tensor] = {}

    def keep(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[layer] = output[0] if isinstance(output, (tuple, list)) else output

    handles = [
        block.register_forward_hook(partial(keep, layer)) for layer, block in enumerate(own.blocks)
    ]
    try:
        with torch.no_grad():
            own(torch.zeros(2, 3, *size, device=_device(own)))
    finally:
        for handle in handles:
            handle.remove()
    layers = range(len(own.blocks))
    if len(outputs) < len(layers):
        raise UnsupportedEncoderError(
            f"blocks {sorted(set(layers) - outputs.keys())} are never called"
        )
    return [outputs[layer] for layer in layers]


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _find_accepted_size(
    own: UserModule, sizes: Sequence[tuple[int, int]], label: str
) -> tuple[tuple[int, int], list[Tensor]]:
    """Return the first image size that a module accepts, and the outputs of its blocks.

    Args:
        own: The wrapped module.
        sizes: Sizes to try, as height and width in pixels.
        label: Name of the module, for error messages.

    Raises:
        CheckpointError: The module accepts none of the sizes.
        UnsupportedEncoderError: The module accepts a size, but a block is never called.
    """
    reason = ""
    for size in dict.fromkeys(sizes):
        try:
            return size, _trace_blocks(own, size)
        except UnsupportedEncoderError as error:
            raise UnsupportedEncoderError(f"{label} cannot be probed: {error}") from error
        except Exception as error:  # A user's module can raise any exception.
            reason = reason or " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if short := [p.dtype for p in own.parameters() if p.dtype in (torch.float16, torch.bfloat16)]:
        raise CheckpointError(
            f"{label} has weights in {short[0]} and does not accept images in float32 ({reason}). "
            "Pass module.float()"
        )
    tried = ", ".join(f"{height} x {width}" for height, width in dict.fromkeys(sizes))
    raise CheckpointError(
        f"{label} does not accept images (batch x 3 x height x width) of {tried}: {reason}. State "
        "the size that it accepts: Encoder.from_module(module, image_size=...)"
    )


def _map_stride(outputs: list[Tensor], size: tuple[int, int]) -> int | None:
    """Return the stride of feature maps in pixels, or None if the outputs have no common stride.

    The stride is the side of the image divided by the side of the map. Outputs other than feature
    maps are ignored.

    Args:
        outputs: Output of each block.
        size: Height and width of the images in pixels.
    """
    for axes in (slice(2, 4), slice(1, 3)):
        grids = {tuple(output.shape[axes]) for output in outputs if output.ndim == 4}
        (rows, cols), *others = grids or {(0, 0)}
        stride = size[0] // rows if rows else 0
        if stride and not others and (rows * stride, cols * stride) == size:
            return stride
    return None


def _infer_layout(
    outputs: list[Tensor], grid: tuple[int, int], stride: int | None, label: str
) -> tuple[list[int], int, bool]:
    """Infer the layout of the blocks' outputs from their shapes.

    Args:
        outputs: Output of each block for two images.
        grid: Rows and columns of the patches.
        stride: Stride of feature maps in pixels, for the error message. None if unknown.
        label: Name of the module, for the error message.

    Returns:
        The width of each block, the number of tokens before the patch tokens, and whether the
        channels are the last axis of feature maps.

    Raises:
        CheckpointError: The outputs are neither tokens nor feature maps of this grid.
    """
    patches, shapes = grid[0] * grid[1], {tuple(output.shape[:-1]) for output in outputs}
    first = outputs[0]
    if len(shapes) == 1 and first.ndim == 3 and first.shape[0] == 2 and first.shape[1] >= patches:
        return [output.shape[-1] for output in outputs], first.shape[1] - patches, False
    if all(output.ndim == 4 and tuple(output.shape[2:]) == grid for output in outputs):
        return [output.shape[1] for output in outputs], 0, False
    if all(output.ndim == 4 and tuple(output.shape[1:3]) == grid for output in outputs):
        return [output.shape[-1] for output in outputs], 0, True
    if first.ndim == 3 and first.shape[1] == 2:
        remedy = "Put the batch first"
    elif stride is not None:
        remedy = f"Pass patch_size={stride}"
    elif len(shapes) > 1:
        remedy = _UNIFORM_BLOCKS
    else:
        remedy = "Name another list of blocks, or pass the true patch_size"
    raise CheckpointError(
        f"{label}: expected blocks that return tokens (batch x tokens x dim) or maps of "
        f"{grid[0]} x {grid[1]} patches for two images, got {_format_shapes(outputs)}. {remedy}"
    )


def _format_shapes(outputs: Sequence[Tensor]) -> str:
    shapes = dict.fromkeys(" x ".join(map(str, output.shape)) for output in outputs)
    return " and ".join(list(shapes)[:3])


class _FirstBlockReached(Exception):
    """Exception that stops a forward pass before the first block."""


def _require_row_order(
    own: UserModule,
    grid: tuple[int, int],
    patch: int,
    num_prefix_tokens: int,
    shape: torch.Size,
    channels_last: bool,
    label: str,
) -> None:
    """Raise CheckpointError unless the tokens are [CLS], then registers, then patches row by row.

    Each of two test images differs from a zero image in one patch. In the input of the first block,
    the token at the position of the changed patch must change. If all tokens change, the order
    cannot be determined, and no error is raised.

    Args:
        own: The wrapped module.
        grid: Rows and columns of the patches.
        patch: Side of a patch in pixels.
        num_prefix_tokens: Number of tokens before the patch tokens.
        shape: Shape of the first block's output without its batch axis. If its input has another
            shape, nothing is checked.
        channels_last: Whether the channels are the last axis of feature maps.
        label: Name of the module, for the error message.
    """
    (rows, cols), inputs = grid, list[Tensor]()

    def keep(_module: nn.Module, positional: Any, keywords: Mapping[str, Any]) -> None:
        values = (*positional, *keywords.values())
        inputs.extend(value for value in values if isinstance(value, Tensor))
        raise _FirstBlockReached

    device = _device(own)
    images = torch.zeros(3, 3, rows * patch, cols * patch, device=device)
    pixels = torch.linspace(0, 1, 3 * patch**2, device=device).view(3, patch, patch)
    places = [(0, min(1, cols - 1)), (rows - 1, 0)]
    for image, (row, col) in zip(images[1:], places, strict=True):
        image[:, row * patch : (row + 1) * patch, col * patch : (col + 1) * patch] = pixels
    handle = own.blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad(), suppress(_FirstBlockReached):
            own(images)
    finally:
        handle.remove()
    if not inputs or inputs[0].shape[1:] != shape:
        return
    channels = 0 if len(shape) == 3 and not channels_last else -1
    for tokens, (row, col) in zip(inputs[0][1:], places, strict=True):
        change = (tokens - inputs[0][0]).abs().amax(channels).flatten()
        changed = (change > _ROUNDING * change.max()).nonzero().flatten().tolist()
        expected = num_prefix_tokens + row * cols + col
        if changed and expected not in changed:
            raise CheckpointError(
                f"{label}: the patch in row {row}, column {col} is token {changed[0]} of "
                f"{len(change)}, expected {expected}. Pass tokens to the blocks in the order "
                "[CLS], registers, patches row by row"
            )
