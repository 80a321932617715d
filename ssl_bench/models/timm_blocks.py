"""Find the blocks of any timm model, and compare their outputs with timm's own features."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.timm_model import (
    BlockInfo,
    count_heads,
    count_registers,
    native_size,
    token_arrangement,
)
from ssl_bench.system.device import evaluation_mode, preserve_process_state

Images = Float[Tensor, "1 3 height width"]
Map = Float[Tensor, "1 width rows cols"]
# Rows and columns of the coarsest token grid in the trial forward pass.
_TRIAL_GRID = (2, 3)
# Largest accepted difference from timm's features, as a fraction of their largest absolute value.
_TOLERANCE = 1e-5


class UnsupportedBlocks(ValueError):
    """Error for a timm model whose blocks do not return one feature vector per patch."""


@dataclass(frozen=True)
class _Stage:
    """The blocks of one stage of a timm model, and the form of their outputs.

    Attributes:
        blocks: Names of the blocks, or only the name of the stage if it cannot be divided.
        width: Number of channels of each output.
        stride: Distance between neighbouring patches in pixels.
        num_prefix_tokens: Number of tokens before the patch tokens, such as [CLS]. None if the
            blocks return feature maps.
        channels_last: Whether the channels are the last axis of feature maps.
    """

    blocks: tuple[str, ...]
    width: int
    stride: int
    num_prefix_tokens: int | None
    channels_last: bool


def trace_blocks(model: Any) -> BlockInfo:
    """Find the blocks of a timm model in a forward pass over an image of random noise.

    A timm model lists its stages in `feature_info`. If all modules of a stage have the same class
    and return features of the same shape, each of these modules is a block. Examples are the
    residual blocks of a ResNet. A stage without such modules is one block. The stem is not a block.
    The output of each stage must equal the features that `model.forward_intermediates` returns.

    Returns:
        The names, widths, strides and token counts of the blocks.

    Raises:
        UnsupportedBlocks: The model rejects the image, a stage does not return the features that
            timm extracts from it, or the blocks have different layouts.
    """
    # Some models store a list, and others store a `FeatureInfo`.
    infos = list(getattr(model.feature_info, "info", model.feature_info))
    names = [info["module"] for info in infos]
    coarsest = max(int(info["reduction"]) for info in infos)
    rows, cols = _TRIAL_GRID
    trial_size = (rows * coarsest, cols * coarsest)
    if trial_size == native_size(model):
        trial_size = (cols * coarsest, rows * coarsest)
    with preserve_process_state(), evaluation_mode(model), torch.no_grad():
        try:
            stages, dynamic_image_size = _trace_stages(model, names, trial_size), True
        except Exception:  # A model may reject an image size with any exception.
            try:
                stages, dynamic_image_size = _trace_stages(model, names, native_size(model)), False
            except UnsupportedBlocks:
                raise
            except Exception as error:
                reason = " ".join(str(error).split())[:160] or type(error).__name__
                raise UnsupportedBlocks(reason) from error
    stages = _remove_stem(model, names, stages)
    prefixes = {stage.num_prefix_tokens or 0 for stage in stages}
    layouts = {stage.channels_last for stage in stages if stage.num_prefix_tokens is None}
    if len(prefixes) > 1 or len(layouts) > 1:
        raise UnsupportedBlocks(
            "its blocks have different numbers of tokens before the patches, or return feature "
            "maps with different orders of axes"
        )
    blocks = [(name, stage) for stage in stages for name in stage.blocks]
    return BlockInfo(
        widths=tuple(stage.width for _, stage in blocks),
        strides=tuple(stage.stride for _, stage in blocks),
        num_heads=count_heads(model.get_submodule(blocks[0][0])),
        num_prefix_tokens=prefixes.pop(),
        num_registers=count_registers(model),
        channels_last=True in layouts,
        dynamic_image_size=dynamic_image_size,
        blocks=tuple(name for name, _ in blocks),
    )


def _trace_stages(model: Any, names: Sequence[str], size: tuple[int, int]) -> list[_Stage]:
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    outputs = _record_outputs(model, names, images)
    expected = model.forward_intermediates(images, intermediates_only=True)
    stages = list[_Stage]()
    for name, features in zip(names, expected, strict=True):
        if name not in outputs:
            raise UnsupportedBlocks(
                f"{name or 'a stage'} does not return exactly one tensor in a forward pass"
            )
        rows, cols = features.shape[2:]
        stride = size[0] // rows
        if size != (rows * stride, cols * stride):
            raise UnsupportedBlocks(
                f"{name} returns {rows} x {cols} features for images of {size[0]} x {size[1]} "
                "pixels, so its patches are not equal squares"
            )
        used = {*names, *(block for stage in stages for block in stage.blocks)}
        blocks = _divide_stage(model, name, outputs, used)
        prefix, channels_last = _find_layout(model, name, outputs[name], features)
        stages.append(_Stage(blocks, features.shape[1], stride, prefix, channels_last))
    return stages


def _record_outputs(model: Any, names: Sequence[str], images: Images) -> dict[str, Tensor]:
    """Run a forward pass, and return copies of the outputs of some modules by module name.

    The outputs of the stages in `names`, and of all modules that may be blocks of these stages, are
    recorded. The result does not contain modules that are called several times, that return
    something other than a tensor, or whose output is later modified in place.
    """
    parts = dict(model.named_modules())
    candidates = {sibling for name in names for sibling in (*_earlier_siblings(name), name)}
    candidates &= parts.keys()
    candidates |= {inner for name in candidates for inner in _inner_blocks(parts, name)}
    calls: dict[str, list[tuple[Any, Any]]] = {}

    def record(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        copy = output.clone() if isinstance(output, Tensor) else None
        calls.setdefault(name, []).append((output, copy))

    handles = [parts[name].register_forward_hook(partial(record, name)) for name in candidates]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: copy
        for name, [(output, copy), *others] in calls.items()
        if not others and copy is not None and torch.equal(output, copy)
    }


def _earlier_siblings(name: str) -> list[str]:
    """Return the names of the modules that come before a module in its list.

    For example, the result for "blocks.2" is ["blocks.0", "blocks.1"]. If the name does not end
    with a number, the result is empty.
    """
    parent, _, index = name.rpartition(".")
    return [f"{parent}.{number}" for number in range(int(index))] if index.isdigit() else []


def _inner_blocks(parts: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the names of the modules that may be the blocks of the stage `name`.

    The names belong to the children of the stage's submodule `blocks`, or of the stage itself if
    there is no such submodule. `parts` contains all modules of the model by name.
    """
    owner = f"{name}.blocks" if f"{name}.blocks" in parts else name
    return [f"{owner}.{child}" for child, _ in parts[owner].named_children()]


def _divide_stage(
    model: Any, stage: str, outputs: Mapping[str, Tensor], used: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the blocks of a stage of a timm model, in order.

    The modules inside a stage are its blocks if all of them have the same class and output shape.
    In addition, the last of these modules must return the stage's output, and each must contain
    further modules. If a condition is not met, the stage itself is its only block.

    For Hiera, timm lists only the last block of each stage. Earlier modules in the `ModuleList` of
    such a block also belong to its stage, if they have the same class and output shape. Each module
    of the stage is divided into blocks separately.

    Args:
        model: The timm model.
        stage: Name of the stage, or of its last block.
        outputs: Output of each module in a forward pass, by the name of the module.
        used: Names of modules that cannot be added, because they belong to other stages.
    """
    parts = dict(model.named_modules())
    shape, kind = outputs[stage].shape, type(parts[stage])

    def is_alike(name: str, kind: type[nn.Module]) -> bool:
        return name in outputs and outputs[name].shape == shape and type(parts[name]) is kind

    earlier = takewhile(
        lambda name: name not in used and is_alike(name, kind), reversed(_earlier_siblings(stage))
    )
    blocks = list[str]()
    for name in (*reversed(list(earlier)), stage):
        inner = _inner_blocks(parts, name)
        kind_inside = type(parts[inner[0]]) if inner else nn.Module
        is_divided = (
            all(is_alike(block, kind_inside) and [*parts[block].children()] for block in inner)
            and inner
            and torch.equal(outputs[inner[-1]], outputs[name])
        )
        blocks += inner if is_divided else [name]
    return tuple(blocks)


def _find_layout(model: Any, stage: str, output: Tensor, expected: Map) -> tuple[int | None, bool]:
    """Find the layout of a stage's output by comparing it with timm's own features.

    Args:
        model: The timm model.
        stage: Name of the stage, or of its last block.
        output: Output of the stage in a forward pass.
        expected: Feature map that timm's `forward_intermediates` returns for the stage.

    Returns:
        The number of tokens before the patch tokens (None for feature maps), and whether the
        channels are the last axis of feature maps.

    Raises:
        UnsupportedBlocks: The output does not match timm's features in any layout.
    """
    grid = expected.shape[2:]
    prefix = output.shape[1] - grid[0] * grid[1]
    maps: list[tuple[int | None, bool, Tensor]] = []
    if output.ndim == 4:
        maps = [(None, False, output), (None, True, output.permute(0, 3, 1, 2))]
    elif output.ndim == 3 and prefix >= 0:
        patches, tokens_to_maps = output[:, prefix:], token_arrangement(model)
        if tokens_to_maps is None:
            rows = patches.unflatten(1, grid)
        else:
            rows = tokens_to_maps(patches, int(stage.rpartition(".")[2]))
        maps = [(prefix, False, rows.permute(0, 3, 1, 2))]
    tolerance = _TOLERANCE * expected.abs().max().item()
    for num_prefix_tokens, channels_last, features in maps:
        if features.shape == expected.shape and torch.allclose(
            features, expected, rtol=0, atol=tolerance, equal_nan=True
        ):
            return num_prefix_tokens, channels_last
    raise UnsupportedBlocks(f"{stage} does not return the features that timm extracts from it")


def _remove_stem(model: Any, names: Sequence[str], stages: Sequence[_Stage]) -> Sequence[_Stage]:
    """Return the stages of a timm model that are not part of the stem.

    The stem consists of the layers before the first block. The stem contains all stages before the
    first stage that is divided into blocks, except stages of the same class as these blocks. If no
    stage is divided into blocks, all stages are returned.

    Args:
        model: The timm model.
        names: Name of each stage.
        stages: Blocks of each stage, in the same order.
    """
    for first, (name, stage) in enumerate(zip(names, stages, strict=True)):
        if stage.blocks != (name,):
            kind = type(model.get_submodule(stage.blocks[0]))
            before = [s for s in stages[:first] if type(model.get_submodule(s.blocks[0])) is kind]
            return [*before, *stages[first:]]
    return stages
