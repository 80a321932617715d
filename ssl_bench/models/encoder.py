"""The class `Encoder`: a frozen PyTorch module with the properties that probes need."""

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
"""Mean and standard deviation of the training images' RGB values in [0, 1]."""
IMAGENET_NORMALIZATION: Normalization = (IMAGENET_MEAN, IMAGENET_STD)
ASSUMED = "assumed, the file does not say"
DINO_NAMES = "DINO, timm"
"""Name of the layout whose tensor names are those of this suite's ViT."""
NORM_EPS = 1e-6
# Module attributes that depend on the machine or on the mode, but not on the architecture.
_IGNORED = frozenset({"training", "fused_attn"})


@dataclass(frozen=True)
class WeightsInfo:
    """Information about a weights file and about how it was loaded.

    Attributes:
        layout: Name of the layout, that is, of the naming scheme of the tensors.
        source: Library or repository that defines the layout.
        ignored: Reason why a tensor or dictionary of tensors was not loaded, by its name in the
            file.
        note: Message about the assumptions that the loader made, and about its changes to the
            weights.
        file: Path of the file. None if the weights were not read from a file.
        epoch: Number of training epochs. None if the file does not state it.
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
        uri: Address of the encoder, such as a path or `timm:NAME`.
        name: Name of the encoder in tables.
        sha256: SHA-256 of the weights file, or of the state dict if there is no file.
        architecture: All properties that determine the forward pass, except weights, `mean` and
            `std`, as JSON types.
        patch_size: Side of a patch in pixels. For hierarchical encoders, the stride of block 0.
        depth: Number of blocks.
        num_heads: Number of attention heads of the first block, or 0 if it has no attention. None
            if finding the number would require importing timm, which takes seconds.
        num_prefix_tokens: Number of tokens before the patch tokens, that is, [CLS] and registers.
        native_size: Height and width in pixels of the images that fit the position embedding.
            Without a position embedding, the height and width of the training images.
        mean: Mean of the training images for red, green and blue, in [0, 1].
        std: Standard deviation of the training images for red, green and blue, with values in [0,
            1].
        num_registers: Number of registers, which follow the [CLS] token.
        strides: Stride of each block in pixels. Empty if all blocks have the stride `patch_size`.
        widths: Width of each block. Empty if all blocks are equally wide or the widths are unknown.
        dynamic_image_size: Whether the encoder accepts image sizes other than `native_size`.
        fallback_facets: Replacements of default facets (kinds of features) that the encoder lacks.
            For example, {"key": "token"} replaces keys by tokens.
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
    dynamic_image_size: bool = True
    fallback_facets: Mapping[str, str] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Return the properties of the encoder that determine its features.

        The keys are the names of these properties in result records (stored results).
        """
        return {
            "checkpoint_sha256": self.sha256,
            "architecture": self.architecture,
            "mean": self.mean,
            "std": self.std,
        }

    @property
    def is_staged(self) -> bool:
        """Whether the encoder has stages, that is, blocks of different strides or widths."""
        return len(set(zip_longest(self.strides, self.widths))) > 1

    @property
    def has_cls(self) -> bool:
        """Whether the first token is [CLS]."""
        return self.num_prefix_tokens > self.num_registers


@dataclass(frozen=True, kw_only=True)
class Encoder(EncoderIdentity):
    """A frozen encoder that computes patch features.

    Attributes:
        module: Module with `blocks` and `norm`. Each block with attention has a layer `attn.qkv`.
            Blocks return tokens or feature maps. Features are extracted in evaluation mode.
        dim: Width of the last block.
        normalization_source: Text that names the source of `mean` and `std`, such as
            "preprocessor_config.json".
        loaded_keys: Number of tensors that were loaded from the weights file.
        total_keys: Number of all tensors in the weights file, including heads, or 0 if there is no
            file.
        weights_info: Further information about the weights file, such as its layout.
        channels_last: Whether the channels are the last axis of feature maps.
        position_rule: Text that describes how the position embedding is resized for other image
            sizes. None if there is no position embedding, or if a user's module resizes it.
        tokens_to_maps: Function that arranges patch tokens as maps. None if the patches are already
            in row-major order. Its arguments are the tokens (batch, patches, dim) without prefix
            tokens, and the index of their block. It returns maps (batch, rows, cols, dim).
    """

    module: nn.Module = field(repr=False)
    num_heads: int
    dim: int
    normalization_source: str = "ssl-bench"
    loaded_keys: int = 0
    total_keys: int = 0
    weights_info: WeightsInfo = field(default_factory=WeightsInfo)
    channels_last: bool = False
    position_rule: str | None = None
    tokens_to_maps: Callable[[Tensor, int], Tensor] | None = None

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

        Forward passes over two all-zero images determine the depth, the width, the number of tokens
        before the patches, and whether other image sizes are accepted. The passes run in evaluation
        mode, and the mode of each submodule is restored afterwards. The module is not copied.

        Args:
            module: Module that takes images (batch x 3 x height x width), normalised by `mean` and
                `std`. Its blocks return tokens, feature maps, or tuples whose first item is tokens
                or feature maps. Tokens (batch x tokens x dim) have the order [CLS], registers,
                patches row by row.
            patch_size: Side of a patch in pixels. The default is the stride of the blocks' feature
                maps, or the kernel size of the convolution that embeds patches.
            blocks: Name of the list of blocks, such as "blocks" or "encoder.layers". The default is
                the longest list of modules of the same class.
            norm: Name of the final norm. The default is a norm with a common name such as "norm",
                or the only norm after the blocks.
            image_size: Height and width of the training images in pixels. The default is the first
                of these sizes that the module accepts: an attribute such as `img_size`, 224, or a
                size that fits its position embedding.
            mean: Mean of the training images, as RGB in [0, 1]. A single number applies to all
                channels. The default is the mean of ImageNet.
            std: Standard deviation of the training images, in the same form as `mean`. The default
                is ImageNet's.
            num_registers: Number of registers, that is, of tokens before the patches other than
                [CLS].
            name: Name of the encoder in tables. The default is the class name.
            epoch: Training epoch of the weights. It is stored with each result, so that results can
                be plotted over epochs.

        Raises:
            CheckpointError: The module cannot be used. The message says which argument to pass.
        """
        # Import it here, because own_module.py imports this file.
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
        """Return the stride of the block `layer` in pixels."""
        return self.strides[layer] if self.strides else self.patch_size

    def width(self, layer: int) -> int:
        """Return the width of the block `layer`."""
        return self.widths[layer] if self.widths else self.dim

    def group_by_shape(self, layers: Sequence[int]) -> list[tuple["Encoder", tuple[int, ...]]]:
        """Group blocks that have the same stride and width.

        Args:
            layers: Indices of the blocks.

        Returns:
            For each group, a copy of this encoder, and the indices of its blocks. The `patch_size`
            and `dim` of the copy are the stride and width of the group.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in layers:
            groups.setdefault((self.stride(layer), self.width(layer)), []).append(layer)
        return [
            (replace(self, patch_size=stride, dim=width), tuple(group))
            for (stride, width), group in groups.items()
        ]


def describe_library_model(model: nn.Module, library: str, name: str) -> dict[str, Any]:
    """Describe the architecture of another library's model by its name and a hash of its modules.

    The hash is a SHA-256 of the class of each module, and of its attributes that are numbers,
    strings or functions, such as an epsilon. For a user's own model (`library` is "module"), the
    hash does not include the import path of each class. The import path of a user's class depends
    on how the model is loaded, for example from a notebook or from `FILE.py:NAME`.

    Args:
        model: The model.
        library: Name of the library, such as "timm", or "module" for a user's own model.
        name: Name of the architecture.

    Returns:
        The keys "kind" (the library), "name" and "modules_sha256".
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
    """Return the SHA-256 of a module's state dict.

    The hash includes the names, dtypes, shapes and bytes of all tensors, in the order of their
    names.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_config(config: EncoderConfig, *, strides: Sequence[int] = ()) -> dict[str, Any]:
    """Describe the architecture of an encoder of this suite as a JSON object.

    Result records (stored results) use the JSON object to identify the encoder. The object contains
    all integers of the configuration, even those with default values. Other values of the
    configuration are only included if they differ from their defaults. Fields that only affect
    training are left out.

    Args:
        config: Configuration of the encoder.
        strides: Stride of each block in pixels. Empty for encoders whose blocks always have the
            same stride.
    """
    defaults = type(config)().to_dict()
    architecture: dict[str, Any] = {"kind": config.kind}
    for name, value in config.to_dict().items():
        if name not in config.training_fields and (type(value) is int or value != defaults[name]):
            architecture[name] = value
    if strides:
        architecture["strides"] = strides
    return json.loads(json.dumps(architecture))


def require_image_encoder(config: EncoderConfig, address: str) -> None:
    """Raise CheckpointError if a model does not read images, such as a Mamba that reads tokens."""
    if config.patch_size == 0:
        version = getattr(config, "version", config.kind)
        raise CheckpointError(
            f"expected an encoder of images, but {address} is a {version} that reads tokens. The "
            "log of its training run contains its scores"
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
    weights_info: WeightsInfo | None = None,
    normalization: Normalization = IMAGENET_NORMALIZATION,
    normalization_source: str = "ssl-bench",
) -> Encoder:
    """Freeze a model of this suite, and return it as an encoder.

    Args:
        model: The model with its weights.
        name: Name of the encoder in tables.
        uri: Address from which the model was loaded, such as `runs/skip`.
        sha256: SHA-256 of the weights file. The default is the SHA-256 of the state dict.
        keys: Number of loaded tensors, and number of all tensors in the weights file.
        weights_info: Further information about the weights file, such as its layout.
        normalization: Mean and standard deviation of the training images.
        normalization_source: Text that names the source of `normalization`.
    """
    config: EncoderConfig = model.config
    require_image_encoder(config, uri)
    block_info = config.block_info
    strides = block_info.strides if block_info else ()
    described = describe_config(config, strides=strides)
    native_size = (config.image_size, config.image_size)
    if isinstance(model, VisionTransformer):
        # Norms in checkpoints of other libraries may have a different epsilon.
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
        mean=normalization[0],
        std=normalization[1],
        normalization_source=normalization_source,
        total_keys=keys[1],
        num_registers=config.num_registers,
        weights_info=weights_info or WeightsInfo(),
        strides=strides,
        widths=block_info.widths if block_info else (),
        channels_last=block_info is not None and block_info.channels_last,
        position_rule=model.position_rule,
    )
