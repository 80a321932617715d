"""The class `Encoder`: a frozen module with the properties that probes need."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.models.config import EncoderConfig
from ssl_bench.models.vit import DINO_MARGIN, EncoderModule, VisionTransformer

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Normalization = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and standard deviation of training images, as RGB in [0, 1]."""
IMAGENET_NORMALIZATION: Normalization = (IMAGENET_MEAN, IMAGENET_STD)
ASSUMED = "assumed, the file does not say"
DINO_NAMES = "DINO, timm"
"""Name of the layout with the same tensor names as the ViT of this suite."""
NORM_EPS = 1e-6
# Attributes of modules that depend on the machine or the mode, but not on the architecture.
_IGNORED = frozenset({"training", "fused_attn"})


@dataclass(frozen=True)
class Contents:
    """Information about a weights file and about how it was loaded.

    Attributes:
        layout: Name of the layout, which defines the names of the tensors.
        source: Library or repository that publishes the layout.
        ignored: Names of tensors, or of containers of tensors, that are not used, with the reasons.
        note: Text about assumptions and changes of the loader.
        file: Path of the file. None if the weights come from memory.
        epoch: Number of epochs of training. None if the file does not state it.
    """

    layout: str = "memory"
    source: str = ""
    ignored: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    file: Path | None = None
    epoch: float | None = None


@dataclass(frozen=True)
class EncoderIdentity:
    """The properties of an encoder that are known before its weights are loaded.

    Attributes:
        uri: Address that the encoder was loaded from.
        name: Name of the encoder in tables.
        sha256: Digest of the weights file, or of the state dict if there is no file.
        architecture: Properties of the forward pass other than weights, `mean` and `std`, as JSON
            types.
        patch_size: Side of a patch in pixels. In hierarchical encoders, the stride of block 0.
        depth: Number of blocks.
        num_heads: Number of attention heads of the first block, 0 without attention. None if the
            number is unknown before timm is imported, which takes seconds.
        num_prefix_tokens: Number of tokens before the patch tokens: [CLS] and registers.
        native_size: Height and width in pixels of images that fit the position embedding. Without
            a position embedding, height and width of the training images.
        mean: Mean of the training images, as RGB in [0, 1].
        std: Standard deviation of the training images, as RGB.
        num_registers: Number of registers, which follow the [CLS] token.
        strides: Stride of each block in pixels. Empty if all blocks have the stride `patch_size`.
        widths: Width of each block. Empty if all blocks are equally wide or the widths are unknown.
        any_size: Whether the encoder accepts images of other sizes than `native_size`.
        fallback_facets: Replacement for each default facet that the encoder lacks.
    """

    uri: str
    name: str
    sha256: str
    architecture: Mapping[str, Any]
    patch_size: int
    depth: int
    num_heads: int | None
    num_prefix_tokens: int
    native_size: tuple[int, int]
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    num_registers: int = 0
    strides: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    any_size: bool = True
    fallback_facets: Mapping[str, str] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Return the properties that determine the features, with their names in records."""
        return {
            "checkpoint_sha256": self.sha256,
            "architecture": self.architecture,
            "mean": self.mean,
            "std": self.std,
        }

    @property
    def is_staged(self) -> bool:
        """Whether blocks differ in their strides or widths."""
        return len(set(zip_longest(self.strides, self.widths))) > 1

    @property
    def has_cls(self) -> bool:
        """Whether the first token is [CLS]."""
        return self.num_prefix_tokens > self.num_registers


@dataclass(frozen=True, kw_only=True)
class Encoder(EncoderIdentity):
    """A frozen encoder that computes features of patches.

    Attributes:
        module: Module with `blocks`, `norm` and, in each block with attention, `attn.qkv`. Blocks
            return tokens or feature maps. Features are extracted in evaluation mode.
        dim: Width of the last block.
        colours_from: Text that names the source of `mean` and `std`.
        loaded_keys: Number of tensors that were loaded from the weights file.
        total_keys: Number of all tensors in the weights file, including heads. It is 0 if there is
            no file.
        contents: Further information about the weights file.
        channels_last: Whether feature maps have their channels in the last axis.
        position_rule: Text that describes how stored positions are resampled for other image sizes.
            None if there are no stored positions, or if a user's module resamples them.
        arrange: Function that arranges patch tokens as maps. None if the patches are row by row.
            The arguments are tokens (batch, patches, dim) without prefix tokens and the index of
            their block. The result has the shape (batch, rows, cols, dim).
    """

    module: nn.Module = field(repr=False)
    num_heads: int
    dim: int
    colours_from: str = "ssl-bench"
    loaded_keys: int = 0
    total_keys: int = 0
    contents: Contents = field(default_factory=Contents)
    channels_last: bool = False
    position_rule: str | None = None
    arrange: Callable[[Tensor, int], Tensor] | None = None

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        patch_size: int | None = None,
        blocks: str | None = None,
        norm: str | None = None,
        image_size: int | tuple[int, int] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        num_registers: int = 0,
        name: str | None = None,
        epoch: int | float | None = None,
    ) -> "Encoder":
        """Wrap any module that takes images and has a list of blocks.

        Forward passes of two zero images show the depth, the width, the number of tokens before the
        patches, and whether other image sizes are accepted. The module is used, not a copy of it.
        Each pass runs in evaluation mode. After the pass, all submodules have their former modes.

        Args:
            module: Module that takes images (batch x 3 x height x width), normalised by `mean` and
                `std`. Its blocks return tokens, feature maps, or tuples that begin with tokens or
                feature maps. Tokens (batch x tokens x dim) have the order [CLS], registers, patches
                row by row.
            patch_size: Side of a patch in pixels. By default the stride of the blocks' feature
                maps, or the kernel size of the convolution that embeds patches.
            blocks: Name of the list of blocks, such as "blocks" or "encoder.layers". By default the
                longest list of modules of one class.
            norm: Name of the final norm. By default a norm with a usual name, or the only norm
                after the blocks.
            image_size: Height and width of the training images in pixels. By default the first size
                that the module accepts: an attribute such as `img_size`, 224, or a size that fits
                its table of positions.
            mean: Mean of the training images, as RGB in [0, 1]. One number stands for all channels.
                By default the mean of ImageNet.
            std: Standard deviation of the training images, in the same form as `mean`.
            num_registers: Number of tokens before the patches that are not [CLS].
            name: Name of the encoder in tables. By default the name of the class.
            epoch: Epoch that is stored in records, for curves over epochs.

        Raises:
            CheckpointError: The module cannot be used. The message says what to pass.
        """
        # Imported here, because own_module.py imports this file.
        from ssl_bench.models.loading.own_module import wrap_module

        return wrap_module(
            module,
            patch_size=patch_size,
            blocks=blocks,
            norm=norm,
            image_size=image_size,
            mean=mean,
            std=std,
            num_registers=num_registers,
            name=name,
            epoch=epoch,
        )

    def stride(self, layer: int) -> int:
        """Return the stride of a block in pixels."""
        return self.strides[layer] if self.strides else self.patch_size

    def width(self, layer: int) -> int:
        """Return the width of a block."""
        return self.widths[layer] if self.widths else self.dim

    def stages(self, layers: Sequence[int]) -> list[tuple["Encoder", tuple[int, ...]]]:
        """Group layers by stride and width, and return (encoder, layers) for each group.

        The encoder is a copy with the `patch_size` and the `dim` of the group.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in layers:
            groups.setdefault((self.stride(layer), self.width(layer)), []).append(layer)
        return [
            (replace(self, patch_size=stride, dim=width), tuple(group))
            for (stride, width), group in groups.items()
        ]


def describe_library_model(model: nn.Module, library: str, name: str) -> dict[str, Any]:
    """Return the architecture of a model of another library: its name and a digest of its modules.

    The digest covers the class of each module, and attributes that are numbers, texts or functions,
    such as epsilons. If the library is "module", the digest does not cover the names of the files
    that define the classes. Notebooks, scripts and `FILE.py:NAME` name the same file differently.
    """
    lines = [
        json.dumps(
            [
                path,
                (f"{type(module).__module__}." if library != "module" else "")
                + type(module).__qualname__,
                {
                    key: getattr(value, "__qualname__", None) or repr(value)
                    for key, value in sorted(vars(module).items())
                    if not key.startswith("_") and key not in _IGNORED and _is_plain(value)
                },
            ]
        )
        for path, module in model.named_modules()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"kind": library, "name": name, "modules_sha256": digest}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    is_function = callable(value) and hasattr(value, "__qualname__")
    return value is None or isinstance(value, (bool, int, float, str)) or is_function


def state_dict_sha256(module: nn.Module) -> str:
    """Return the sha256 of names, types, shapes and bytes of all tensors, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_config(config: EncoderConfig, *, strides: Sequence[int] = ()) -> dict[str, Any]:
    """Return the architecture of an encoder of this suite as JSON types, for its identity.

    The result contains all integers of the configuration, and other values that differ from their
    defaults. Values that only training uses are left out. `strides` are the strides of all blocks
    in pixels, for encoders whose blocks may have different strides.
    """
    defaults = type(config)().to_dict()
    architecture: dict[str, Any] = {"kind": config.kind}
    for name, value in config.to_dict().items():
        if name not in config.training_fields and (type(value) is int or value != defaults[name]):
            architecture[name] = value
    if strides:
        architecture["strides"] = strides
    return json.loads(json.dumps(architecture))


def require_images(config: EncoderConfig, address: str) -> None:
    """Raise CheckpointError if a model does not take images, such as a Mamba that copies tokens."""
    if config.patch_size == 0:
        version = getattr(config, "version", config.kind)
        raise CheckpointError(
            f"expected an encoder of images, but {address} is a {version} that reads tokens. Its "
            "scores are in the log of its run"
        )


def build_encoder(config: EncoderConfig, *, seed: int) -> EncoderModule:
    """Return an encoder with initial weights, which depend only on `config` and `seed`."""
    return config.build(seed=seed)


def encoder_from_model(
    model: EncoderModule,
    *,
    name: str,
    uri: str = "memory",
    sha256: str | None = None,
    keys: tuple[int, int] = (0, 0),
    contents: Contents | None = None,
    colours: Normalization = IMAGENET_NORMALIZATION,
    colours_from: str = "ssl-bench",
) -> Encoder:
    """Return a frozen encoder that contains a model of this suite.

    Args:
        model: The model with its weights.
        name: Name of the encoder in tables.
        uri: Address that the model was loaded from.
        sha256: Digest of the weights file. By default the digest of the state dict.
        keys: The attributes `loaded_keys` and `total_keys` of the encoder.
        contents: Further information about the weights file.
        colours: Mean and standard deviation of the training images.
        colours_from: Text that names the source of `colours`.
    """
    config: EncoderConfig = model.config
    require_images(config, uri)
    shape = config.shape
    strides = shape.strides if shape else ()
    described = describe_config(config, strides=strides)
    native_size = (config.image_size, config.image_size)
    if isinstance(model, VisionTransformer):
        # Norms in checkpoints of other libraries may have another epsilon.
        epsilons = {part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)}
        (eps,) = epsilons or {NORM_EPS}
        if eps != NORM_EPS:
            described["norm_eps"] = eps
        rows, cols = model.grid_size
        native_size = (rows * config.patch_size, cols * config.patch_size)
        if rows != cols:
            described["grid_size"] = [rows, cols]
        if model.position_margin != DINO_MARGIN:
            described["position_margin"] = model.position_margin
    return Encoder(
        module=model.eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256 or state_dict_sha256(model),
        architecture=described,
        patch_size=strides[0] if strides else config.patch_size,
        depth=config.depth,
        dim=config.dim,
        num_heads=config.num_heads,
        num_prefix_tokens=config.num_prefix_tokens,
        native_size=native_size,
        loaded_keys=keys[0],
        mean=colours[0],
        std=colours[1],
        colours_from=colours_from,
        total_keys=keys[1],
        num_registers=config.num_registers,
        contents=contents or Contents(),
        strides=strides,
        widths=shape.widths if shape else (),
        channels_last=shape is not None and shape.channels_last,
        position_rule=model.position_rule,
    )
