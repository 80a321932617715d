"""A frozen model with everything a probe must know about it; what names it needs no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ssl_bench.errors import CheckpointError
from ssl_bench.models.config import EncoderConfig

if TYPE_CHECKING:
    from torch import nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Colours = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and deviation of training images, RGB in [0, 1]."""
IMAGENET_COLOURS: Colours = (IMAGENET_MEAN, IMAGENET_STD)
ASSUMED = "assumed, the file does not say"
NORM_EPS = 1e-6
# They decide how the weights came about, not what is done with them.
_OF_TRAINING = frozenset(
    {
        *("init", "init_options", "truncated_tokens", "drop_path", "frozen_filters"),
        # Positions are weights: their scale is in them.
        *("position_scale", "mlp_mean", "mlp_input_std"),
    }
)


@dataclass(frozen=True)
class Contents:
    """What a weights file was found to hold.

    Attributes:
        layout: Whose names its tensors have.
        source: Where that layout is published.
        ignored: Tensors that are not used, or what holds several, and why.
        note: What was done to the tensors on the way.
        file: Where they are.
        epoch: How long they were trained, where a run of this suite says so.
    """

    layout: str = "memory"
    source: str = ""
    ignored: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    file: Path | None = None
    epoch: float | None = None


class ModuleFacts(TypedDict, total=False):
    """What `Encoder.from_module` can be told; the rest is found out.

    Attributes:
        patch_size: Pixels; else the kernel of the convolution that makes patches.
        blocks: Name of the list of blocks, such as "blocks" or "encoder.layers"; else the longest
            list of modules of one kind.
        norm: Name of the final norm; else the usual names are looked for.
        image_size: Height and width that it was trained on; else what it says, or 224.
        mean: Of its training images, RGB in [0, 1]; else ImageNet's.
        std: Of the same images.
        num_registers: How many of the tokens before the patches are no [CLS].
        name: How tables call it; else that of its class.
        epoch: Stands in records, for curves over epochs.
    """

    patch_size: int | None
    blocks: str | None
    norm: str | None
    image_size: int | tuple[int, int] | None
    mean: Sequence[float]
    std: Sequence[float]
    num_registers: int
    name: str | None
    epoch: int | float | None


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder of patches, whatever library it comes from.

    Args:
        module: Has `blocks`, `norm` and, in each block with attention, `attn.qkv`; in evaluation
            mode. A block gives tokens, or maps.
        name: How tables call it.
        uri: What was asked for.
        sha256: Of the weights file, or of the state dict where there is no file.
        architecture: Everything else that the forward pass hangs on, in plain JSON types.
        num_heads: 0 where there is no attention.
        num_prefix_tokens: Tokens before the patches: [CLS], registers.
        num_registers: How many of these are no class tokens; they come last.
        mean: Of the images it was trained on, RGB in [0, 1].
        std: Of the same images, RGB.
        colours_from: Who says so.
        native_size: Height and width in pixels of its position embedding, or of its training.
        loaded_keys: Weights taken from the file.
        total_keys: Weights the file holds, heads included.
        contents: What else the file holds.
        strides: Pixels along a side of what a token of each block stands for; empty where that is
            `patch_size` for all of them. The first is `patch_size`.
        widths: Of each block; empty where that is `dim`, which else is that of the last one.
        channels_last: Whether maps have them there. No shape tells where rows, columns and
            channels are equally many.
        any_size: Whether it takes images of other sizes than `native_size`.
        instead: Of usual facets that it lacks, which one probes look at where none was typed.
    """

    module: "nn.Module"
    name: str
    uri: str
    sha256: str
    architecture: Mapping[str, Any]
    patch_size: int
    depth: int
    dim: int
    num_heads: int
    num_prefix_tokens: int
    native_size: tuple[int, int]
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    colours_from: str = "ssl-bench"
    loaded_keys: int = 0
    total_keys: int = 0
    num_registers: int = 0
    contents: Contents = field(default_factory=Contents)
    strides: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    channels_last: bool = False
    any_size: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_module(cls, module: "nn.Module", **facts: Unpack[ModuleFacts]) -> "Encoder":
        """An encoder of one's own: any module that takes images and has a list of blocks.

        One pass over two black images shows what is not said: depth, width, tokens before the
        patches, and whether other sizes are taken. The module itself is used, not a copy, and is in
        evaluation mode afterwards; `ssl_bench.probe(module, ...)` gives its mode back.

        Args:
            module: Takes batch x 3 x height x width, normalised by `mean` and `std`; its blocks
                give tokens (batch x tokens x dim), maps, or tuples that begin with one.
            facts: What is known of it, see `ModuleFacts`.

        Raises:
            CheckpointError: What was expected of the module, what came and what to say.
        """
        from ssl_bench.models.from_module import encoder_of_module

        return encoder_of_module(module, **facts)

    def stride(self, layer: int) -> int:
        """Pixels along a side of what a token of a block stands for."""
        return self.strides[layer] if self.strides else self.patch_size

    def width(self, layer: int) -> int:
        """Of a block."""
        return self.widths[layer] if self.widths else self.dim

    @property
    def is_staged(self) -> bool:
        """Whether blocks differ in their grids or widths."""
        return len(set(zip(self.strides, self.widths, strict=True))) > 1

    def stages(self, layers: Sequence[int]) -> list[tuple["Encoder", tuple[int, ...]]]:
        """The same encoder for blocks of one grid and width each, which its sizes then are."""
        alike: dict[tuple[int, int], list[int]] = {}
        for layer in layers:
            alike.setdefault((self.stride(layer), self.width(layer)), []).append(layer)
        return [
            (replace(self, patch_size=stride, dim=width), tuple(of_stage))
            for (stride, width), of_stage in alike.items()
        ]

    @property
    def has_cls(self) -> bool:
        """Whether the first token is [CLS]."""
        return self.num_prefix_tokens > self.num_registers

    def identity(self) -> dict[str, Any]:
        """What decides the features of an image, in plain JSON types and under records' names."""
        return identity_of(self.sha256, self.architecture, (self.mean, self.std))


def identity_of(sha256: str, architecture: Mapping[str, Any], colours: Colours) -> dict[str, Any]:
    """See `Encoder.identity`."""
    mean, std = colours
    return {"checkpoint_sha256": sha256, "architecture": architecture, "mean": mean, "std": std}


def configured(
    config: EncoderConfig, *, norm_eps: float = NORM_EPS, strides: Sequence[int] = ()
) -> dict[str, Any]:
    """Architecture of an encoder of ours in plain JSON types: what it computes but for its weights.

    All whole numbers, and what else differs from a plain encoder of its kind. `strides` are the
    pixels along a side of what a token of each block stands for, where blocks may differ in it.
    """
    plain = type(config)().to_dict()
    described = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _OF_TRAINING and (type(value) is int or value != plain[name])
    }
    eps = {} if norm_eps == NORM_EPS else {"norm_eps": norm_eps}
    said = {"strides": strides} if strides else {}
    return json.loads(json.dumps({"kind": config.kind, **described, **eps, **said}))


def require_images(config: EncoderConfig, address: str) -> None:
    """Refuse a model that no probe can look at."""
    if config.patch_size == 0:
        version = getattr(config, "version", config.kind)
        raise CheckpointError(
            f"expected an encoder of images, got {address}, a {version} that reads tokens; "
            "what it can is in the log of its run"
        )
