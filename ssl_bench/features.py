"""The only gate between encoders and probes: images in [0, 1] in, features of any block out.

And the square that most probes cut out of a photograph for it.
"""

import difflib
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from ssl_bench.errors import (
    CheckpointError,
    ConfigurationError,
    UnfitEncoder,
    escape_braces,
    join_alternatives,
)
from ssl_bench.layers import FACETS, INNER_FACETS, REGISTERS, Facet, submodule_of
from ssl_bench.models import Encoder
from ssl_bench.system.device import autocast, evaluation_mode, to_device, to_host
from ssl_bench.system.process import is_out_of_memory
from ssl_bench.system.progress import say

Features = dict[int, dict[Facet, Tensor]]
Grid = tuple[int, int]
# Where a hook puts what it hears: features of the layer, its grid, images of the batch.
_Place = tuple[dict[Facet, Tensor], Grid, int]
Layout = Literal["tokens", "channels_first", "channels_last"]

_QKV_PARTS: tuple[Facet, ...] = ("query", "key", "value")
_TOKENS = ("probe.facet=token", "or", "--facet", "token")
# Rows and columns of the patches of the first pass; no square, so that it shows what is a row.
_TRIAL_GRID = (2, 3)
# Of timm's blocks the first also takes in LayerScale and, in post-norm blocks, the norm.
_BEFORE_SKIP = {
    "attn_out": ("drop_path1", "drop_path", "attn"),
    "mlp_out": ("drop_path2", "drop_path", "mlp"),
}
_SUBLAYER = {"attn_out": "attn", "attn_skip": "attn", "mlp_hidden": "mlp", "mlp_out": "mlp"}


class FeatureExtractor:
    """Features of a frozen encoder's blocks, all from one forward pass.

    Args:
        encoder: Is moved to `device`.
        layers: Block indices from 0 to depth - 1.
        facets: "token": patches after the block; "token_normed": the same through the encoder's
            final norm; "cls", "cls_normed": the first token, before and after it; "key", "query",
            "value": thirds of the qkv layer's output, heads concatenated; "attn_out",
            "mlp_out": what a sublayer adds to its skip, after LayerScale; "attn_skip": the tokens
            behind the skip of attention, as "token" is behind that of the MLP; "mlp_hidden": what
            enters the MLP's last layer; "blocks.*.NAME": what submodule NAME of the block gives;
            "registers": tokens between [CLS] and the patches.
        device: As torch names it.
        dtype: Below float32 the encoder runs under autocast; features are float32 always.
        pad: Pad right and bottom to a multiple of the patch with zeros, after normalisation, as
            TokenCut does; without it other sizes are refused.

    Of layers that differ in what their tokens stand for, each has its own grid, and the patch is
    the largest; see `ssl_bench.models.Encoder.stages` for those that are alike.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        layers: Sequence[int],
        facets: Sequence[Facet] = ("token",),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pad: bool = False,
    ) -> None:
        _require_asked(encoder, layers, facets)
        self.encoder = encoder
        self.layers = tuple(dict.fromkeys(layers))
        self.facets = tuple(dict.fromkeys(facets))
        self.device = torch.device(device)
        self.dtype = dtype
        self.pad = pad
        self._at_once = sys.maxsize
        self.patch_size = max(map(encoder.stride, self.layers))
        self.dim, self.depth = encoder.width(max(self.layers)), encoder.depth
        self._module = encoder.module.to(self.device)
        self._mean = torch.tensor(encoder.mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(encoder.std, device=self.device).view(3, 1, 1)
        inner = [f for f in self.facets if f in INNER_FACETS or submodule_of(f) is not None]
        self._taps = [_tap(encoder, layer, facet) for layer in self.layers for facet in inner]
        self._layouts: dict[tuple[int, Facet], Layout] = {}
        self._widths = dict.fromkeys(self.facets, self.dim)
        if self._taps:
            patch = max((*encoder.strides, self.patch_size))
            trial = [n * patch for n in _TRIAL_GRID] if encoder.any_size else encoder.native_size
            found, _ = self.unchecked(torch.zeros(2, 3, *trial))
            widths: dict[Facet, int] = {}
            for tap in self._taps:
                width = found[tap.layer][tap.facet].shape[-1]
                if widths.setdefault(tap.facet, width) != width:
                    raise UnfitEncoder(
                        f"{tap.facet} of {encoder.name} has {width} channels in block {tap.layer} "
                        f"and {widths[tap.facet]} in others, expected one number; ask for blocks "
                        "that are alike"
                    )
            self._widths |= widths

    def width(self, facet: Facet) -> int:
        """Of its features, in the last layer where they differ."""
        return self._widths[facet]

    def __call__(
        self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str] = ()
    ) -> Features:
        """Features by layer and facet, float32.

        Args:
            images: RGB in [0, 1]; normalised here.
            ids: What to call them in messages.

        Returns:
            "batch dim" for "cls" and "cls_normed", "batch registers dim" for "registers",
            "batch rows cols dim" for all others.

        Raises:
            ConfigurationError: The patch does not divide height and width, and `pad` is off.
            CheckpointError: Features are not finite, or the encoder does not compute them.
        """
        found, sums = self.unchecked(images)
        self.check(to_host([sums])[0], ids)
        return found

    # Not inference_mode: heads trained on the features need to save them for backward.
    @torch.no_grad()
    def unchecked(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        """As a call, but features may not be finite; `check` takes the sums and says so.

        For work that fetches something from the device in any case: the sums go along with it, and
        the host waits once. Where memory does not suffice, the batch is halved, here and from then
        on.
        """
        while True:
            at_once = max(1, min(self._at_once, len(images)))
            try:
                found = [self._of_part(part) for part in images.split(at_once)]
                break
            except RuntimeError as error:
                if at_once == 1 or not is_out_of_memory(error):
                    raise
            # Not inside the handler: the error keeps alive what filled the memory.
            self._at_once = at_once // 2
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            say(
                f"memory does not suffice for {at_once} images at once: {self._at_once} from now on"
            )
        if len(found) == 1:
            return found[0]
        joined: Features = {
            layer: {f: torch.cat([part[layer][f] for part, _ in found]) for f in self.facets}
            for layer in self.layers
        }
        return joined, torch.cat([sums for _, sums in found], 1)

    def _of_part(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        images = (to_device(images, self.device).to(torch.float32) - self._mean) / self._std
        if self.pad:
            images = pad_to_patch(images, self.patch_size)
        height, width = images.shape[-2:]
        self.require_size(height, width)
        strides = {layer: self.encoder.stride(layer) for layer in self.layers}
        grids = {layer: (height // n, width // n) for layer, n in strides.items()}
        found: Features = {layer: {} for layer in self.layers}
        with (
            evaluation_mode(self._module),
            self._listening(found, grids, len(images)),
            autocast(self.device, self.dtype),
            suppress(_DeepestLayerDone),
        ):
            self._module(images)
        for layer, features in found.items():
            silent = [facet for facet in self.facets if facet not in features]
            if unheard := [facet for facet in silent if facet not in _QKV_PARTS]:
                raise UnfitEncoder(
                    f"{self.encoder.name} never calls {', '.join(unheard)} of block {layer} in a "
                    "pass; ask for a submodule that it calls"
                )
            if silent:
                raise UnfitEncoder(
                    f"layer {layer} of {self.encoder.name} computes no {', '.join(silent)} in its "
                    "qkv layer",
                    hint=_TOKENS,
                )
        # Sums, because they are one pass without a copy.
        sums = [value.flatten(1).sum(1) for item in found.values() for value in item.values()]
        ordered: Features = {
            layer: {facet: features[facet] for facet in self.facets}
            for layer, features in found.items()
        }
        return ordered, torch.stack(sums)

    def check(self, sums: Float[Tensor, "features batch"], ids: Sequence[str] = ()) -> None:
        """Raise a CheckpointError if the sums that `unchecked` gave are not finite."""
        spoilt = (~sums.isfinite()).nonzero()
        if len(spoilt):
            index, image = spoilt[0].tolist()
            name = ids[image] if ids else f"image {image} of the batch"
            raise CheckpointError(
                f"layer {self.layers[index // len(self.facets)]} of {self.encoder.name} gives "
                f"features that are not finite for {name}; its training diverged, or it needs "
                "float32",
                hint=("dtype=float32",),
            )

    def require_size(self, height: int, width: int) -> None:
        """Refuse images that the encoder does not take as they are; with `pad` they are filled up.

        Raises:
            UnfitEncoder: It takes one other size alone.
            ConfigurationError: The patch does not divide height and width.
        """
        if not self.encoder.any_size and (height, width) != self.encoder.native_size:
            rows, cols = self.encoder.native_size
            raise UnfitEncoder(
                f"{self.encoder.name} takes images of {rows} x {cols} pixels alone, got {height} x "
                f"{width}; ask for that size, or let its forward resize its positions"
            )
        if height % self.patch_size or width % self.patch_size:
            near = [
                max(1, round(side / self.patch_size)) * self.patch_size for side in (height, width)
            ]
            raise ConfigurationError(
                f"height and width must be multiples of the patch size {self.patch_size}, got "
                f"{height} x {width}; the nearest are {near[0]} x {near[1]}"
            )

    @contextmanager
    def _listening(self, found: Features, grids: dict[int, Grid], batch: int) -> Generator[None]:
        """Hooks that fill `found` during a forward pass; gone afterwards, whatever happens."""
        blocks = self._module.get_submodule("blocks")
        handles = []
        try:
            for layer in self.layers:
                block = blocks.get_submodule(str(layer))
                keep = partial(self._keep_tokens, found[layer], grids[layer])
                handles.append(block.register_forward_hook(keep))
                # Some of timm's blocks have none, which is told after the pass.
                qkv = dict(block.named_modules()).get("attn.qkv")
                if qkv is not None and any(facet in _QKV_PARTS for facet in self.facets):
                    keep = partial(self._keep_qkv, layer, (found[layer], grids[layer], batch))
                    handles.append(qkv.register_forward_hook(keep))
            for tap in self._taps:
                place = (found[tap.layer], grids[tap.layer], batch)
                hear = partial(self._keep_inner, tap, place, [])
                for module in tap.modules:
                    if tap.side == "input":
                        handles.append(module.register_forward_pre_hook(hear))
                    else:
                        handles.append(module.register_forward_hook(hear))
            deepest = blocks.get_submodule(str(max(self.layers)))
            handles.append(deepest.register_forward_hook(_stop))
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Hooks are given the module, what goes in, and, behind it, what comes out.
    def _keep_tokens(self, features: dict[Facet, Tensor], grid: Grid, *heard: Any) -> None:
        tokens = tokens_among(heard[-1])
        # Blocks of convolutions and of windows give maps; their norm, like all, takes tokens.
        if tokens.ndim != 3:
            last = self.encoder.channels_last
            tokens = tokens.flatten(1, 2) if last else tokens.flatten(2).transpose(1, 2)
        if "token" in self.facets:
            features["token"] = self._patches(tokens, grid)
        if "cls" in self.facets:
            features["cls"] = tokens[:, 0].float()
        if REGISTERS in self.facets:
            prefix = self.encoder.num_prefix_tokens
            features[REGISTERS] = tokens[:, prefix - self.encoder.num_registers : prefix].float()
        if "token_normed" in self.facets or "cls_normed" in self.facets:
            normed = self._module.get_submodule("norm")(tokens)
            if "token_normed" in self.facets:
                features["token_normed"] = self._patches(normed, grid)
            if "cls_normed" in self.facets:
                features["cls_normed"] = normed[:, 0].float()

    def _keep_qkv(self, layer: int, place: _Place, *heard: Any) -> None:
        (features, grid, batch), output = place, heard[-1]
        tokens = self.encoder.num_prefix_tokens + grid[0] * grid[1]
        if output.shape[:2] != (batch, tokens):
            raise UnfitEncoder(
                f"layer {layer} of {self.encoder.name} computes queries, keys and values of "
                f"windows, expected those of an image",
                hint=_TOKENS,
            )
        for facet, part in zip(_QKV_PARTS, output.chunk(3, dim=-1), strict=True):
            if facet in self.facets:
                # A copy, so that the other two thirds can go.
                features[facet] = self._patches(part.contiguous(), grid)

    def _keep_inner(
        self, tap: "_Tap", place: _Place, owners: list[nn.Module], module: nn.Module, *heard: Any
    ) -> None:
        if module in owners:
            raise UnfitEncoder(
                f"{self.encoder.name} calls {tap.name} more than once in a pass, expected "
                "once; ask for a submodule that is called once"
            )
        owners.append(module)
        if len(owners) > 1:
            return
        value = heard[-1] if tap.side == "output" else next(iter(heard[0]), None)
        if not isinstance(value, Tensor):
            raise UnfitEncoder(
                f"{tap.name} of {self.encoder.name} gives a {type(value).__name__}, expected one "
                "tensor; ask for a submodule of it"
            )
        features, grid, batch = place
        possible = _layouts(value.shape, batch, grid, self.encoder.num_prefix_tokens)
        layout = self._layouts.get((tap.layer, tap.facet), next(iter(possible), None))
        if layout is None or layout not in possible:
            raise UnfitEncoder(
                f"{tap.facet} of block {tap.layer} of {self.encoder.name} has the shape "
                f"{tuple(value.shape)} for {batch} images of {grid[0]} x {grid[1]} patches, "
                "expected tokens (batch, tokens, channels) or a map of patches; ask for another "
                "submodule"
            )
        self._layouts[tap.layer, tap.facet] = layout
        if layout == "tokens":
            value = value[:, value.shape[1] - grid[0] * grid[1] :].unflatten(1, grid)
        elif layout == "channels_first":
            value = value.permute(0, 2, 3, 1)
        # A copy: what comes next in the block may work in place.
        features[tap.facet] = value.float().clone()

    def _patches(
        self, tokens: Float[Tensor, "batch tokens width"], grid: Grid
    ) -> Float[Tensor, "batch rows cols width"]:
        return tokens[:, self.encoder.num_prefix_tokens :].unflatten(1, grid).float()


def _require_asked(encoder: Encoder, layers: Sequence[int], facets: Sequence[Facet]) -> None:
    """Refuse what cannot be asked of an encoder before any image passes it."""
    outside = [layer for layer in layers if not 0 <= layer < encoder.depth]
    if outside or not layers:
        raise ConfigurationError(
            f"layers must lie in 0..{encoder.depth - 1} for this encoder, "
            f"got {', '.join(map(str, outside)) or 'none'}"
        )
    unknown = [f for f in facets if f not in (*FACETS, REGISTERS) and submodule_of(f) is None]
    if unknown or not facets:
        raise ConfigurationError(
            f"facets must be among {', '.join(FACETS)} or blocks.*.NAME, "
            f"got {', '.join(unknown) or 'none'}"
        )
    if {"cls", "cls_normed"} & set(facets) and not encoder.has_cls:
        raise UnfitEncoder(f"{encoder.name} has no [CLS] token", hint=_TOKENS)
    if REGISTERS in facets and not encoder.num_registers:
        raise UnfitEncoder(f"{encoder.name} has no registers", hint=_TOKENS)
    last = encoder.width(encoder.depth - 1)
    narrow = [layer for layer in layers if encoder.width(layer) != last]
    if narrow and {"token_normed", "cls_normed"} & set(facets):
        fit = [str(layer) for layer in range(encoder.depth) if encoder.width(layer) == last]
        raise UnfitEncoder(
            f"layer {narrow[0]} of {encoder.name} has width {encoder.width(narrow[0])}, its final "
            f"norm {last}; ask for blocks of the last stage, {','.join(fit)}, or for a "
            "facet that no norm changes, such as token, attn_out or mlp_out"
        )


def tokens_among(output: Any) -> Tensor:
    """What a block gives; those of transformers and of one's own may give more beside it."""
    return output[0] if isinstance(output, (tuple, list)) else output


class _DeepestLayerDone(Exception):
    """Ends the forward pass early."""


def _stop(_block: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
    raise _DeepestLayerDone


@dataclass(frozen=True)
class _Tap:
    """Where a facet from inside of one block is.

    Attributes:
        name: In messages.
        modules: The first of them that is called gives it.
        side: Whether it goes in there or comes out.
    """

    layer: int
    facet: Facet
    name: str
    modules: tuple[nn.Module, ...]
    side: Literal["input", "output"]


def _tap(encoder: Encoder, layer: int, facet: Facet) -> _Tap:
    block = encoder.module.get_submodule("blocks").get_submodule(str(layer))
    parts = dict(block.named_modules())
    path = submodule_of(facet)
    if path is not None:
        if path not in parts:
            near = difflib.get_close_matches(path, [n for n in parts if n], n=1)
            parent = path
            while parent not in parts:
                parent = parent.rpartition(".")[0]
            where = f"blocks.{layer}.{parent}".rstrip(".")
            raise UnfitEncoder(
                f"{encoder.name} has no blocks.{layer}.{path}; {where} has "
                f"{_children(list(parts), parent)}",
                hint=join_alternatives(
                    *[(f"probe.facet=blocks.*.{escape_braces(part)}",) for part in near]
                ),
            )
        return _Tap(layer, facet, f"blocks.{layer}.{path}", (parts[path],), "output")
    found, side = _named(parts, facet)
    if not found:
        raise UnfitEncoder(
            f"block {layer} of {encoder.name} has no {facet}, only {_children(list(parts), '')}; "
            "take a submodule as blocks.*.NAME, or the tokens",
            hint=_TOKENS,
        )
    return _Tap(layer, facet, f"{facet} of block {layer}", found, side)


def _named(
    parts: dict[str, nn.Module], facet: Facet
) -> tuple[tuple[nn.Module, ...], Literal["input", "output"]]:
    if _SUBLAYER[facet] not in parts:
        return (), "output"
    if facet in _BEFORE_SKIP:
        return tuple(parts[name] for name in _BEFORE_SKIP[facet] if name in parts)[:1], "output"
    if facet == "mlp_hidden":
        names = ("mlp.fc2", "mlp.w3", "mlp.w2")
        return tuple(parts[name] for name in names if name in parts)[:1], "input"
    # The norm before the MLP; in post-norm blocks the MLP comes first.
    pair = [parts[name] for name in ("norm2", "mlp") if name in parts]
    return (tuple(pair) if len(pair) == 2 else ()), "input"


def _children(names: list[str], parent: str) -> str:
    start = f"{parent}." if parent else ""
    found = [n.removeprefix(start) for n in names if n.startswith(start) and n != parent]
    return ", ".join(name for name in found if "." not in name) or "no submodules"


def _layouts(shape: Sequence[int], batch: int, grid: Grid, num_prefix_tokens: int) -> list[Layout]:
    """How a tensor may lie on a grid of patches; at most one way where that is no square."""
    patches = grid[0] * grid[1]
    with_prefix = (patches, num_prefix_tokens + patches)
    fits: dict[Layout, bool] = {
        "tokens": len(shape) == 3 and shape[1] in with_prefix,
        "channels_first": len(shape) == 4 and tuple(shape[2:]) == grid,
        "channels_last": len(shape) == 4 and tuple(shape[1:3]) == grid,
    }
    return [layout for layout, is_so in fits.items() if is_so and shape[0] == batch]


def squashed(
    image: UInt8[np.ndarray, "height width 3"], size: tuple[int, int]
) -> Float[Tensor, "3 new_height new_width"]:
    """The whole image at another size, RGB in [0, 1]; over all pixels where it shrinks."""
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 255
    return F.interpolate(pixels, size=size, mode="bilinear", antialias=True)[0]


def pad_to_patch(
    images: Float[Tensor, "*batch 3 height width"], patch_size: int
) -> Float[Tensor, "*batch 3 padded_height padded_width"]:
    """Zeros right and bottom, up to the next multiple of the patch."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % patch_size, 0, -height % patch_size))


def central_square(
    image: UInt8[np.ndarray, "height width 3"], size: int, *, share: float
) -> UInt8[Tensor, "3 {size} {size}"]:
    """Resize an image, bicubic with antialiasing, and cut the square out of its middle.

    Only what lies in the square is computed. Equal to torchvision's `Resize` of the shorter side
    and `CenterCrop`, with which DINO is evaluated, up to rounding.

    Args:
        image: RGB, 0 to 255.
        size: Side of the result in pixels.
        share: Side of the square, relative to the image's shorter side; .875 resizes to 256 where
            `size` is 224. In (0, 1].
    """
    sides, short = image.shape[:2], max(size, round(size / share))
    scaled = [short * side // min(sides) for side in sides]
    first = [round((side - size) / 2) for side in scaled]
    # Pixels around the box count at its rim, as if the whole had been resized.
    top, left = (start * side / new for start, side, new in zip(first, sides, scaled, strict=True))
    bottom, right = (
        (start + size) * side / new for start, side, new in zip(first, sides, scaled, strict=True)
    )
    box = (left, top, right, bottom)
    square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
