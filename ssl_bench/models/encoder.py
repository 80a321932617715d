"""A frozen model with everything a probe must know about it, of whatever library it comes from."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, UnfitEncoder
from ssl_bench.models.config import EncoderConfig
from ssl_bench.models.vit import DINO_MARGIN, EncoderModule, VisionTransformer
from ssl_bench.system.device import evaluation_mode, preserve_process_state

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Colours = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and deviation of training images, RGB in [0, 1]."""
IMAGENET_COLOURS: Colours = (IMAGENET_MEAN, IMAGENET_STD)
ASSUMED = "assumed, the file does not say"
DINO_NAMES = "DINO, timm"
"""Layout of files whose tensors are named as here."""
NORM_EPS = 1e-6
# The same sums on another path: timm decides it by the machine.
_OF_MACHINE = frozenset({"training", "fused_attn"})
_NORMS = ("norm", "layernorm", "ln_f", "ln_post", "final_norm", "norm_final", "post_layernorm")
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads")
_USUAL_SIZE = 224
_USUAL_PATCH = 16
# Change of a token, as a share of the largest, that is rounding.
_NOISE = 1e-3


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


class _Identified:
    sha256: str
    architecture: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def identity(self) -> dict[str, Any]:
        """What decides the features of an image, in plain JSON types and under records' names."""
        return {
            "checkpoint_sha256": self.sha256,
            "architecture": self.architecture,
            "mean": self.mean,
            "std": self.std,
        }


@dataclass(frozen=True)
class EncoderIdentity(_Identified):
    """What names the cells of an encoder; the fields are those of `Encoder`.

    Attributes:
        num_heads: None where only timm knows, which takes seconds to import.
    """

    uri: str
    name: str
    sha256: str
    architecture: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    depth: int
    patch_size: int
    native_size: tuple[int, int]
    num_heads: int | None
    is_staged: bool
    has_cls: bool
    any_size: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoder(_Identified):
    """A frozen encoder of patches, whatever library it comes from.

    Args:
        module: Has `blocks`, `norm` and, in each block with attention, `attn.qkv`. A block gives
            tokens, or maps. Passes are in evaluation mode, whatever its own mode is.
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
        position_rule: How it resamples stored positions for images of another size; None where it
            stores none, or where that is up to the module.
    """

    module: nn.Module = field(repr=False)
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
    position_rule: str | None = None

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
        """An encoder of one's own: any module that takes images and has a list of blocks.

        One pass over two black images shows what is not said: depth, width, tokens before the
        patches, and whether other sizes are taken; patches that are changed show where they are
        among the tokens. The module itself is used, not a copy. Each pass switches it to
        evaluation mode and gives each submodule its own mode back.

        Args:
            module: Takes batch x 3 x height x width, normalised by `mean` and `std`; its blocks
                give tokens (batch x tokens x dim: [CLS], registers, then patches row by row),
                maps, or tuples that begin with one.
            patch_size: Pixels along a side of a patch; else the stride of the maps that blocks
                give, or the kernel of the convolution that makes patches.
            blocks: Name of the list of blocks, such as "blocks" or "encoder.layers"; else the
                longest list of modules of one kind.
            norm: Name of the final norm; else the usual names are looked for.
            image_size: Height and width that it was trained on; else what it says, or 224 or what
                else it takes, such as the square that its table of positions fits.
            mean: Of its training images, RGB in [0, 1], three numbers or one; else ImageNet's.
            std: Of the same images.
            num_registers: How many of the tokens before the patches are no [CLS].
            name: How tables call it; else that of its class.
            epoch: Stands in records, for curves over epochs.

        Raises:
            CheckpointError: What was expected of the module, what came and what to say.
        """
        called = name or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise CheckpointError(
                f"{called} is TorchScript, whose blocks cannot be heard; hand on the module of "
                "Python that it was made of, with the same state_dict()"
            )
        colour = _rgb(IMAGENET_MEAN if mean is None else mean, f"{called}: expected mean")
        deviation = _rgb(IMAGENET_STD if std is None else std, f"{called}: expected std")
        if 0 in deviation:
            raise CheckpointError(f"{called}: expected std above 0, got {std!r}")
        parts = dict(module.named_modules())
        if not blocks:
            lists = _lists(module)
            longest = [one for one, count in lists.items() if count == max(lists.values())]
            if len(longest) != 1:
                came = ", ".join(lists) or "no list of modules of one kind"
                raise CheckpointError(
                    f"{called}: expected one longest list of blocks, came {came}; name it: "
                    "Encoder.from_module(module, blocks='NAME')"
                )
            blocks = longest[0]
        if blocks not in parts or not list(parts[blocks].children()):
            raise CheckpointError(
                f"{called} has no list of blocks called {blocks!r}; expected the name of a "
                f"ModuleList or Sequential, such as {', '.join(_lists(module)) or 'blocks'}"
            )
        kernel = patch_size or _patch_kernel(module)
        norm = _final_norm(parts, norm, blocks, called)
        own = OwnModule(module, blocks, _NoNorm() if norm is None else parts[norm])
        with preserve_process_state(), evaluation_mode(own):
            sizes = _sizes(module, image_size, kernel or _USUAL_PATCH)
            size, outputs = _first_pass(own, sizes, called)
            stride = _map_stride(outputs, size)
            patch = patch_size or stride or kernel
            if patch is None:
                raise CheckpointError(
                    f"{called} has no convolution of three channels into patches, and its blocks "
                    f"give {_shapes_text(outputs)}; say patch_size=16, or name a list of blocks "
                    "that all give the same: Encoder.from_module(module, blocks='NAME')"
                )
            try:
                _heard(own, (size[0] + patch, size[1] + 2 * patch))
                any_size = True
            except Exception:  # Somebody's forward may refuse a size in any way.
                any_size = False
            grid = (size[0] // patch, size[1] // patch)
            widths, prefix, channels_last = _anatomy(outputs, grid, stride, called)
            shape = outputs[0].shape[1:]
            _require_row_by_row(own, grid, patch, prefix, shape, channels_last, called)
        # Imported here, because only modules of users need it.
        from ssl_bench.models.own_code import code_sha256

        inner = next(own.blocks.children()).modules()
        heads = [getattr(part, name, None) for part in inner for name in _HEADS]
        # The layer that keys are taken from.
        has_keys = all("attn.qkv" in dict(one.named_modules()) for one in own.blocks.children())
        lacking = {} if prefix > num_registers else {"cls": "patch_mean"}
        return cls(
            module=own,
            name=called,
            uri="memory",
            sha256=state_dict_sha256(module),
            architecture={
                **of_library(module, "module", type(module).__qualname__),
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
            num_heads=next((n for n in heads if isinstance(n, int) and not isinstance(n, bool)), 0),
            num_prefix_tokens=prefix,
            native_size=size,
            mean=colour,
            std=deviation,
            colours_from="assumed, ImageNet's" if mean is None else "from_module",
            num_registers=num_registers,
            contents=Contents("module", epoch=None if epoch is None else float(epoch)),
            channels_last=channels_last,
            any_size=any_size,
            instead=lacking if has_keys else {**lacking, "key": "token"},
        )

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


class OwnModule(nn.Module):
    """Somebody's module under the names that the extractor asks for: `blocks` and `norm`."""

    def __init__(self, module: nn.Module, blocks: str, norm: nn.Module) -> None:
        super().__init__()
        self.module, self.norm = module, norm
        # A new list, because layers are counted, but children of a Sequential may have names.
        self.blocks = nn.ModuleList(module.get_submodule(blocks).children())

    def forward(self, images: Tensor) -> Any:
        """Whatever the module gives; blocks are heard while it runs."""
        return self.module(images)


class _NoNorm(nn.Module):
    def forward(self, _tokens: Tensor) -> Tensor:
        """Raise: there is none."""
        raise UnfitEncoder(
            "this module has no final norm that is known; name it: "
            "ssl_bench.Encoder.from_module(module, norm='NAME') is what to probe then"
        )


def _lists(module: nn.Module) -> dict[str, int]:
    """Lists of modules of one kind, with how many there are."""
    return {
        name: len(children)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and (children := list(part.children()))
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].children())
    }


def _patch_kernel(module: nn.Module) -> int | None:
    """The kernel of the first convolution that takes colours and steps as far as it sees."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3:
            rows, cols = part.kernel_size
            if rows == cols and part.stride == part.kernel_size and rows > 1:
                return rows
    return None


def _final_norm(
    parts: Mapping[str, nn.Module], norm: str | None, blocks: str, called: str
) -> str | None:
    if norm is not None:
        if norm not in parts:
            raise CheckpointError(f"{called} has no module {norm!r} for its final norm")
        return norm
    beside = blocks.rpartition(".")[0]
    paths = [f"{place}{'.' if place else ''}{name}" for place in (beside, "") for name in _NORMS]
    found = [path for path in paths if path in parts]
    # Else the only one that is written down behind the blocks.
    behind = [
        path
        for path, part in list(parts.items())[list(parts).index(blocks) :]
        if not path.startswith(f"{blocks}.") and type(part).__name__.lower().endswith("norm")
    ]
    return found[0] if found else behind[0] if len(behind) == 1 else None


def _rgb(value: float | Sequence[float], expected: str) -> tuple[float, float, float]:
    try:
        given = (value, value, value) if isinstance(value, int | float) else value
        red, green, blue = map(float, given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{expected} of three numbers or one, got {value!r}") from error
    return red, green, blue


def _sizes(
    module: nn.Module, asked: int | tuple[int, int] | None, patch: int
) -> list[tuple[int, int]]:
    """Heights and widths that are tried, the likeliest first."""
    if asked is not None:
        return [(asked, asked) if isinstance(asked, int) else asked]
    said = [
        getattr(part, name, None)
        for part in (module, getattr(module, "patch_embed", None), getattr(module, "config", None))
        for name in ("img_size", "image_size")
    ]
    sizes = [(one, one) if isinstance(one, int) else one for one in said]
    usual = max(1, round(_USUAL_SIZE / patch)) * patch
    stated = [(int(s[0]), int(s[1])) for s in sizes if isinstance(s, (tuple, list)) and len(s) == 2]
    # A table of positions has a row for each patch, and a few for tokens before them.
    tables = [
        math.isqrt(table.shape[-2])
        for name, table in (*module.named_parameters(), *module.named_buffers())
        if (table.ndim == 3 and len(table) == 1) or (table.ndim == 2 and "pos" in name)
    ]
    sides = (14, 16, 8, 4, 2, *(side for side in tables if side > 1))
    return [*stated, (usual, usual), *((side * patch, side * patch) for side in sides)]


def _heard(own: OwnModule, size: tuple[int, int]) -> list[Tensor]:
    """What the blocks give for two black images, in their order."""
    device = next((p.device for p in own.parameters()), torch.device("cpu"))
    found: dict[int, Tensor] = {}

    def keep(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        found[layer] = output[0] if isinstance(output, (tuple, list)) else output

    children = list(own.blocks.children())
    handles = [
        child.register_forward_hook(partial(keep, layer)) for layer, child in enumerate(children)
    ]
    try:
        with torch.no_grad():
            own(torch.zeros(2, 3, *size, device=device))
    finally:
        for handle in handles:
            handle.remove()
    if len(found) < len(children):
        raise UnfitEncoder(f"blocks {sorted(set(range(len(children))) - found.keys())} never run")
    return [found[layer] for layer in range(len(children))]


def _first_pass(
    own: OwnModule, sizes: Sequence[tuple[int, int]], called: str
) -> tuple[tuple[int, int], list[Tensor]]:
    """The first of several sizes that the module takes, and what its blocks give."""
    why = ""
    for size in dict.fromkeys(sizes):
        try:
            return size, _heard(own, size)
        except Exception as error:  # Somebody's forward may fail in any way.
            why = why or " ".join(f"{type(error).__name__}: {error}".split())[:200]
    tried = ", ".join(f"{h} x {w}" for h, w in dict.fromkeys(sizes))
    if short := [p.dtype for p in own.parameters() if p.dtype in (torch.float16, torch.bfloat16)]:
        raise CheckpointError(
            f"{called} has weights of {short[0]} and takes no images of float32 ({why}); hand on "
            "module.float()"
        )
    raise CheckpointError(
        f"{called} takes no images (batch x 3 x height x width) of {tried}: {why}; say what it "
        "takes and hand on the encoder: Encoder.from_module(module, image_size=...)"
    )


def _map_stride(outputs: list[Tensor], size: tuple[int, int]) -> int | None:
    """Pixels along a side of what a position of the blocks' maps stands for; None without maps."""
    for axes in (slice(2, 4), slice(1, 3)):
        grids = {tuple(output.shape[axes]) for output in outputs if output.ndim == 4}
        (rows, cols), *others = grids or {(0, 0)}
        stride = size[0] // rows if rows else 0
        if stride and not others and (rows * stride, cols * stride) == size:
            return stride
    return None


def _anatomy(
    outputs: list[Tensor], grid: tuple[int, int], stride: int | None, called: str
) -> tuple[list[int], int, bool]:
    """Widths of the blocks, tokens before the patches, and whether maps have channels last."""
    patches, shapes = grid[0] * grid[1], {tuple(output.shape[:-1]) for output in outputs}
    first = outputs[0]
    if len(shapes) == 1 and first.ndim == 3 and first.shape[0] == 2 and first.shape[1] >= patches:
        return [output.shape[-1] for output in outputs], first.shape[1] - patches, False
    if all(output.ndim == 4 and tuple(output.shape[2:]) == grid for output in outputs):
        return [output.shape[1] for output in outputs], 0, False
    if all(output.ndim == 4 and tuple(output.shape[1:3]) == grid for output in outputs):
        return [output.shape[-1] for output in outputs], 0, True
    if first.ndim == 3 and first.shape[1] == 2:
        what = "put the batch first"
    elif stride is not None:
        what = f"say patch_size={stride}"
    elif len(shapes) > 1:
        what = "name a list of blocks that all give the same: blocks='NAME'"
    else:
        what = "name another list of blocks, or the true patch_size"
    raise CheckpointError(
        f"{called}: expected blocks that give tokens (batch x tokens x dim) or maps of "
        f"{grid[0]} x {grid[1]} patches for two images, came {_shapes_text(outputs)}; {what}"
    )


def _shapes_text(outputs: Sequence[Tensor]) -> str:
    shapes = dict.fromkeys(" x ".join(map(str, output.shape)) for output in outputs)
    return " and ".join(list(shapes)[:3])


class _Seen(Exception):
    """What enters the first block is known."""


def _require_row_by_row(
    own: OwnModule,
    grid: tuple[int, int],
    patch: int,
    prefix: int,
    shape: torch.Size,
    channels_last: bool,
    called: str,
) -> None:
    """Refuse tokens in another order than [CLS], registers, then patches row by row.

    Pixels of one patch of an image are changed, and what enters the first block of shape `shape`
    shows which tokens change with them. Where pixels reach all tokens there, nothing is refused.
    """
    (rows, cols), found = grid, list[Tensor]()

    def keep(_module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> None:
        found.extend(one for one in (*inputs, *options.values()) if isinstance(one, Tensor))
        raise _Seen

    device = next((p.device for p in own.parameters()), torch.device("cpu"))
    images = torch.zeros(3, 3, rows * patch, cols * patch, device=device)
    pixels = torch.linspace(0, 1, 3 * patch**2, device=device).view(3, patch, patch)
    places = [(0, min(1, cols - 1)), (rows - 1, 0)]
    for image, (row, col) in zip(images[1:], places, strict=True):
        image[:, row * patch : (row + 1) * patch, col * patch : (col + 1) * patch] = pixels
    handle = next(own.blocks.children()).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad(), suppress(_Seen):
            own(images)
    finally:
        handle.remove()
    if not found or found[0].shape[1:] != shape:
        return
    channels = 0 if len(shape) == 3 and not channels_last else -1
    for tokens, (row, col) in zip(found[0][1:], places, strict=True):
        change = (tokens - found[0][0]).abs().amax(channels).flatten()
        moved = (change > _NOISE * change.max()).nonzero().flatten().tolist()
        expected = prefix + row * cols + col
        if moved and expected not in moved:
            raise CheckpointError(
                f"{called}: the patch in row {row}, column {col} is token {moved[0]} of "
                f"{len(change)}, expected {expected}; give blocks their tokens in the order [CLS], "
                "registers, then patches row by row"
            )


def of_library(model: nn.Module, library: str, name: str) -> dict[str, Any]:
    """Architecture of somebody else's model: its name there, and a digest of all of its modules.

    Of each module these are its class, and the numbers, texts and functions that it holds beside
    its weights, such as epsilons. A class of one's own goes by its name alone: the file that it is
    in is called otherwise in a notebook, in a script and by `--checkpoint FILE.py:NAME`.
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
                    if not key.startswith("_") and key not in _OF_MACHINE and _is_plain(value)
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
    """Hexadecimal sha256 over names, shapes and bytes of all weights, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
        if name not in config.training_fields and (type(value) is int or value != plain[name])
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
    colours: Colours = IMAGENET_COLOURS,
    colours_from: str = "ssl-bench",
) -> Encoder:
    """Freeze a model of ours as an encoder; `keys` counts loaded and all weights of its file."""
    config: EncoderConfig = model.config
    require_images(config, uri)
    shape = config.shape
    described = configured(config, strides=shape.strides if shape else ())
    native_size = (config.image_size, config.image_size)
    if isinstance(model, VisionTransformer):
        # Norms in checkpoints of other libraries may have another epsilon.
        epsilons = {part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)}
        (eps,) = epsilons or {NORM_EPS}
        described = configured(config, norm_eps=eps)
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
        patch_size=shape.strides[0] if shape else config.patch_size,
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
        strides=shape.strides if shape else (),
        widths=shape.widths if shape else (),
        channels_last=shape is not None and shape.channels_last,
        position_rule=model.position_rule,
    )
