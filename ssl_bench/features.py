"""Extract features of the blocks of a frozen encoder.

All probes use `FeatureExtractor`.
"""

import difflib
import itertools
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
    UnsupportedEncoderError,
    escape_braces,
    join_alternatives,
)
from ssl_bench.layers import FACETS, INNER_FACETS, REGISTERS, Facet, submodule_name
from ssl_bench.models import Encoder
from ssl_bench.system.device import autocast, evaluation_mode, to_device, to_host
from ssl_bench.system.output import print_message
from ssl_bench.system.process import is_out_of_memory

Features = dict[int, dict[Facet, Tensor]]
Grid = tuple[int, int]
# Where a hook stores its output: features of a layer by facet, token grid, and batch size.
_Destination = tuple[dict[Facet, Tensor], Grid, int]
Layout = Literal["tokens", "channels_first", "channels_last"]

_QKV_PARTS: tuple[Facet, ...] = ("query", "key", "value")
_TOKENS = ("probe.facet=token", "or", "--facet", "token")
# Rows and columns of patches in the trial pass. The two numbers differ, so that the layout of a
# feature map is unambiguous.
_TRIAL_GRID = (2, 3)
# Submodules whose output is captured for a sublayer. The first submodule that exists is used. In
# timm's blocks, "drop_path" follows LayerScale. In timm's post-norm blocks, it follows the norm.
_SUBLAYER_OUTPUT = {
    "attn_out": ("drop_path1", "drop_path", "attn"),
    "mlp_out": ("drop_path2", "drop_path", "mlp"),
}
_SUBLAYER = {"attn_out": "attn", "attn_skip": "attn", "mlp_hidden": "mlp", "mlp_out": "mlp"}


class FeatureExtractor:
    """Extractor of features from several blocks of a frozen encoder, in one forward pass.

    Args:
        encoder: The encoder, which is moved to `device`.
        layers: Block indices, 0-based.
        facets: Features of a block to extract:

            - "token": patch tokens after the block.
            - "token_normed": patch tokens after the block and the encoder's final norm.
            - "cls": the first token after the block.
            - "cls_normed": the first token after the block and the encoder's final norm.
            - "key", "query", "value": parts of the qkv layer's output, with concatenated heads.
            - "attn_out", "mlp_out": output of the attention or MLP sublayer, after LayerScale and
              before the skip connection.
            - "attn_skip": patch tokens after the skip connection of the attention sublayer.
            - "mlp_hidden": input of the last layer of the MLP.
            - "blocks.*.NAME": output of the block's submodule NAME.
            - "registers": register tokens, which precede the patch tokens.
        device: Device of the computation.
        dtype: Precision of the encoder's forward pass. Precisions below float32 use autocast. The
            features are always float32. Features that are not finite in float16 are computed again
            in float32.
        pad: Whether to pad normalised images with zeros to a multiple of the patch size, on the
            right and at the bottom, as TokenCut does. If `pad` is False, images of other sizes
            raise an error.

    Attributes:
        encoder, layers, facets, device, dtype, pad: The arguments, without duplicate layers and
            facets.
        patch_size: Distance between neighbouring tokens in pixels (stride), or the largest stride
            if the layers of a hierarchical encoder differ. `Encoder.group_by_shape` groups layers
            with the same stride and width.
        dim: Feature width of the deepest layer.
        depth: Number of blocks of the encoder.
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
        _check_request(encoder, layers, facets)
        self.encoder = encoder
        self.layers = tuple(dict.fromkeys(layers))
        self.facets = tuple(dict.fromkeys(facets))
        self.device = torch.device(device)
        self.dtype = dtype
        self.pad = pad
        self._max_batch = sys.maxsize
        self._num_recomputed = 0
        self.patch_size = max(map(encoder.stride, self.layers))
        self.dim, self.depth = encoder.width(max(self.layers)), encoder.depth
        self._module = encoder.module.to(self.device)
        self._mean = torch.tensor(encoder.mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(encoder.std, device=self.device).view(3, 1, 1)
        inner = [f for f in self.facets if f in INNER_FACETS or submodule_name(f) is not None]
        self._hook_points = [
            _find_hook_point(encoder, layer, facet) for layer in self.layers for facet in inner
        ]
        self._layouts: dict[tuple[int, Facet], Layout] = {}
        self._widths = dict.fromkeys(self.facets, self.dim)
        if self._hook_points:
            self._widths |= self._measure_widths()

    def _measure_widths(self) -> dict[Facet, int]:
        """Encode two black images to measure the number of channels of each facet.

        A facet is a kind of feature, such as "mlp_hidden". Only facets inside a block are measured,
        because the width of a block's output is already known.
        """
        encoder = self.encoder
        patch = max((*encoder.strides, self.patch_size))
        is_dynamic = encoder.dynamic_image_size
        trial = [n * patch for n in _TRIAL_GRID] if is_dynamic else encoder.native_size
        features, _ = self._extract_batch(torch.zeros(2, 3, *trial), self.dtype)
        widths: dict[Facet, int] = {}
        for point in self._hook_points:
            width = features[point.layer][point.facet].shape[-1]
            if widths.setdefault(point.facet, width) != width:
                raise UnsupportedEncoderError(
                    f"{point.facet} of {encoder.name} has {width} channels in block {point.layer}, "
                    f"but {widths[point.facet]} in an earlier block. Choose blocks of equal width"
                )
        return widths

    def width(self, facet: Facet) -> int:
        """Return the number of channels of a facet (kind of feature, such as "token").

        If the layers have different widths, return the width of the deepest layer.
        """
        return self._widths[facet]

    def __call__(
        self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str] = ()
    ) -> Features:
        """Extract features of images, and return them as float32 tensors by layer and facet.

        A facet is a kind of feature, such as "token" or "key".

        Args:
            images: RGB images with values in [0, 1]. The extractor normalises them.
            ids: Names of the images for error messages.

        Returns:
            Tensors of the shape "batch dim" for "cls" and "cls_normed", "batch registers dim" for
            "registers", and "batch rows cols dim" for all other facets.

        Raises:
            ConfigurationError: `pad` is False, and the height or width of the images is not a
                multiple of the patch size.
            CheckpointError: Features are not finite.
            UnsupportedEncoderError: The encoder does not compute a facet, or does not accept the
                image size.
        """
        features, sums = self.extract_unchecked(images)
        self.require_finite(to_host([sums])[0], ids)
        return features

    # With torch.inference_mode, heads could not be trained on the features.
    @torch.no_grad()
    def extract_unchecked(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        """Extract features and their sums, without checking that the features are finite.

        A sum is finite only if all features in it are finite. To check the features, copy the sums
        to the CPU and pass them to `require_finite`. If you copy the sums together with other data,
        the CPU waits for the GPU only once. With float16, the CPU waits once more, to check whether
        the range of float16 is large enough.

        If memory runs out, the batch size is halved for this call and all later calls. If an image
        has features that are not finite in float16, they are computed again in float32.

        Args:
            images: RGB images with values in [0, 1].

        Returns:
            The features by layer and facet (kind of feature), and their sums. The sums have one row
            for each pair of a layer and a facet, and one column for each image.
        """
        features, sums = self.extract_in_one_precision(images)
        # The range of bfloat16 equals that of float32. On a GPU, this waits for the forward pass.
        if self.dtype == torch.float16 and not sums.isfinite().all():
            self._recompute_overflows(images, features, sums)
        return features, sums

    def _recompute_overflows(
        self,
        images: Float[Tensor, "batch 3 height width"],
        features: Features,
        sums: Float[Tensor, "features batch"],
    ) -> None:
        """Replace features that are not finite by features that are computed in float32.

        `features` and `sums` are results of `extract_in_one_precision`, which are modified in
        place. If the sum of an image's features in a layer is not finite, these features are
        replaced. The features of all other layers are kept, so the features of a layer do not
        depend on which other layers are extracted.
        """
        chosen = (~sums.isfinite()).any(0).nonzero().flatten()
        exact, exact_sums = self.extract_in_one_precision(
            images[chosen.to(images.device)], torch.float32
        )
        pairs = itertools.product(self.layers, self.facets)
        for (layer, facet), row in zip(pairs, sums, strict=True):
            is_lost = ~row[chosen].isfinite()
            # A facet may be a view of other memory, so it is copied.
            features[layer][facet] = features[layer][facet].index_copy(
                0, chosen[is_lost], exact[layer][facet][is_lost]
            )
        sums[:, chosen] = torch.where(sums[:, chosen].isfinite(), sums[:, chosen], exact_sums)
        before = self._num_recomputed
        self._num_recomputed += int(exact_sums.isfinite().all(0).sum())
        # Print a message after 1, 2, 4, 8, ... images.
        if self._num_recomputed.bit_length() > before.bit_length():
            print_message(
                f"{self.encoder.name}: images encoded in float32, because float16 is too small for "
                f"their features: {self._num_recomputed} so far"
            )

    @torch.no_grad()
    def extract_in_one_precision(
        self, images: Float[Tensor, "batch 3 height width"], dtype: torch.dtype | None = None
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        """Extract features and their sums, without computing any of them again in float32.

        Args:
            images: RGB images with values in [0, 1].
            dtype: Precision of the forward pass (default: the precision of the extractor).

        Returns:
            The features by layer and facet (kind of feature), which may not be finite, and their
            sums. The sums have one row for each pair of a layer and a facet, and one column for
            each image.
        """
        dtype = dtype or self.dtype
        while True:
            batch = max(1, min(self._max_batch, len(images)))
            try:
                parts = [self._extract_batch(part, dtype) for part in images.split(batch)]
                break
            except RuntimeError as error:
                if batch == 1 or not is_out_of_memory(error):
                    raise
            # This is outside of the except block, because the exception keeps tensors in memory.
            self._max_batch = batch // 2
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            print_message(f"out of memory at batch size {batch}, reducing it to {self._max_batch}")
        if len(parts) == 1:
            return parts[0]
        joined: Features = {
            layer: {f: torch.cat([part[layer][f] for part, _ in parts]) for f in self.facets}
            for layer in self.layers
        }
        return joined, torch.cat([sums for _, sums in parts], 1)

    def _extract_batch(
        self, images: Float[Tensor, "batch 3 height width"], dtype: torch.dtype
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        images = (to_device(images, self.device).to(torch.float32) - self._mean) / self._std
        if self.pad:
            images = pad_to_patch(images, self.patch_size)
        height, width = images.shape[-2:]
        self.require_size(height, width)
        strides = {layer: self.encoder.stride(layer) for layer in self.layers}
        grids = {layer: (height // n, width // n) for layer, n in strides.items()}
        captured: Features = {layer: {} for layer in self.layers}
        with (
            evaluation_mode(self._module),
            self._install_hooks(captured, grids, len(images)),
            autocast(self.device, dtype),
            suppress(_DeepestLayerDone),
        ):
            self._module(images)
        for layer, features in captured.items():
            missing = [facet for facet in self.facets if facet not in features]
            if never_called := [facet for facet in missing if facet not in _QKV_PARTS]:
                raise UnsupportedEncoderError(
                    f"{self.encoder.name} never calls {', '.join(never_called)} of block {layer} "
                    "in a forward pass, so there is no output. Choose another facet"
                )
            if missing:
                raise UnsupportedEncoderError(
                    f"block {layer} of {self.encoder.name} has no qkv layer that computes "
                    f"{', '.join(missing)}",
                    hint=_TOKENS,
                )
        ordered: Features = {
            layer: {facet: features[facet] for facet in self.facets}
            for layer, features in captured.items()
        }
        # A sum is finite only if all of its terms are finite. Sums need no copy of the features.
        sums = [value.flatten(1).sum(1) for item in ordered.values() for value in item.values()]
        return ordered, torch.stack(sums)

    def require_finite(
        self,
        sums: Float[Tensor, "features batch"],
        ids: Sequence[str] = (),
        *,
        hint: Sequence[str] = (),
    ) -> None:
        """Raise a CheckpointError if any feature is not finite.

        Args:
            sums: Sums of features that `extract_unchecked` returned, as a tensor on the CPU.
            ids: Names of the images, for the error message.
            hint: Setting that the error message suggests, such as another precision.
        """
        invalid = (~sums.isfinite()).nonzero()
        if len(invalid):
            index, image = invalid[0].tolist()
            name = ids[image] if ids else f"image {image} of the batch"
            layer = self.layers[index // len(self.facets)]
            raise CheckpointError(
                f"block {layer} of {self.encoder.name} has NaN or infinite features for {name}: "
                f"training diverged{' or the encoder needs another precision' if hint else ''}",
                hint=hint,
            )

    def require_size(self, height: int, width: int) -> None:
        """Raise an error if the encoder does not accept images of this height and width in pixels.

        If the extractor pads images, pass the size after padding.
        """
        if not self.encoder.dynamic_image_size and (height, width) != self.encoder.native_size:
            rows, cols = self.encoder.native_size
            raise UnsupportedEncoderError(
                f"{self.encoder.name} only accepts images of {rows} x {cols} pixels, "
                f"got {height} x {width}"
            )
        if height % self.patch_size or width % self.patch_size:
            near = [
                max(1, round(side / self.patch_size)) * self.patch_size for side in (height, width)
            ]
            raise ConfigurationError(
                f"image height and width must be multiples of the patch size {self.patch_size}, "
                f"got {height} x {width} (nearest: {near[0]} x {near[1]})"
            )

    @contextmanager
    def _install_hooks(
        self, captured: Features, grids: dict[int, Grid], batch: int
    ) -> Generator[None]:
        """Install hooks that store features in `captured`, and remove the hooks on exit.

        Args:
            captured: Dictionary that the hooks fill with features by layer and kind of feature.
            grids: Numbers of rows and columns of patches, by layer.
            batch: Number of images.
        """
        blocks = self._module.get_submodule("blocks")
        handles = []
        try:
            for layer in self.layers:
                block = blocks.get_submodule(str(layer))
                capture = partial(self._capture_tokens, layer, (captured[layer], grids[layer]))
                handles.append(block.register_forward_hook(capture))
                # Some of timm's blocks have no qkv layer. `_extract_batch` then raises an error.
                qkv = dict(block.named_modules()).get("attn.qkv")
                if qkv is not None and any(facet in _QKV_PARTS for facet in self.facets):
                    destination = (captured[layer], grids[layer], batch)
                    capture = partial(self._capture_qkv, layer, destination)
                    handles.append(qkv.register_forward_hook(capture))
            for point in self._hook_points:
                destination = (captured[point.layer], grids[point.layer], batch)
                capture = partial(self._capture_inner, point, destination, [])
                for module in point.modules:
                    if point.side == "input":
                        handles.append(module.register_forward_pre_hook(capture))
                    else:
                        handles.append(module.register_forward_hook(capture))
            deepest = blocks.get_submodule(str(max(self.layers)))
            handles.append(deepest.register_forward_hook(_stop))
            yield
        finally:
            for handle in handles:
                handle.remove()

    # `arguments` are those that torch passes to a forward hook: module, inputs and output.
    def _capture_tokens(
        self, layer: int, destination: tuple[dict[Facet, Tensor], Grid], *arguments: Any
    ) -> None:
        (features, grid), tokens = destination, block_tokens(arguments[-1])
        # Convolutional and windowed blocks return feature maps, but the final norm expects tokens.
        if tokens.ndim != 3:
            last = self.encoder.channels_last
            tokens = tokens.flatten(1, 2) if last else tokens.flatten(2).transpose(1, 2)
        if "token" in self.facets:
            features["token"] = self._patches(layer, tokens, grid)
        if "cls" in self.facets:
            features["cls"] = tokens[:, 0].float()
        if REGISTERS in self.facets:
            prefix = self.encoder.num_prefix_tokens
            features[REGISTERS] = tokens[:, prefix - self.encoder.num_registers : prefix].float()
        if "token_normed" in self.facets or "cls_normed" in self.facets:
            normed = self._module.get_submodule("norm")(tokens)
            if "token_normed" in self.facets:
                features["token_normed"] = self._patches(layer, normed, grid)
            if "cls_normed" in self.facets:
                features["cls_normed"] = normed[:, 0].float()

    def _capture_qkv(self, layer: int, destination: _Destination, *arguments: Any) -> None:
        (features, grid, batch), output = destination, arguments[-1]
        tokens = self.encoder.num_prefix_tokens + grid[0] * grid[1]
        if output.shape[:2] != (batch, tokens):
            raise UnsupportedEncoderError(
                f"block {layer} of {self.encoder.name} computes queries, keys and values in "
                "windows or before pooling, expected one of each for every output token",
                hint=_TOKENS,
            )
        for facet, part in zip(_QKV_PARTS, output.chunk(3, dim=-1), strict=True):
            if facet in self.facets:
                features[facet] = self._patches(layer, part, grid)

    def _capture_inner(
        self,
        point: "_HookPoint",
        destination: _Destination,
        called: list[nn.Module],
        module: nn.Module,
        *arguments: Any,
    ) -> None:
        if module in called:
            raise UnsupportedEncoderError(
                f"{self.encoder.name} calls {point.name} more than once in a forward pass, "
                "expected one call. Choose another facet"
            )
        called.append(module)
        if len(called) > 1:
            return
        value = arguments[-1] if point.side == "output" else next(iter(arguments[0]), None)
        if not isinstance(value, Tensor):
            raise UnsupportedEncoderError(
                f"{point.name} of {self.encoder.name} returns a {type(value).__name__}, expected "
                "one tensor. Choose another facet"
            )
        features, grid, batch = destination
        possible = _find_layouts(value.shape, batch, grid, self.encoder.num_prefix_tokens)
        layout = self._layouts.get((point.layer, point.facet), next(iter(possible), None))
        if layout is None or layout not in possible:
            raise UnsupportedEncoderError(
                f"{point.facet} of block {point.layer} of {self.encoder.name} has the shape "
                f"{tuple(value.shape)} for {batch} images of {grid[0]} x {grid[1]} patches, "
                "expected tokens or a map of patches. Choose another facet"
            )
        self._layouts[point.layer, point.facet] = layout
        if layout == "tokens":
            value = self._arrange(point.layer, value[:, value.shape[1] - grid[0] * grid[1] :], grid)
        elif layout == "channels_first":
            value = value.permute(0, 2, 3, 1)
        # The tensor is copied, because later modules of the block may modify it in place.
        features[point.facet] = value.float().clone()

    def _patches(
        self, layer: int, tokens: Float[Tensor, "batch tokens width"], grid: Grid
    ) -> Float[Tensor, "batch rows cols width"]:
        return self._arrange(layer, tokens[:, self.encoder.num_prefix_tokens :], grid).float()

    def _arrange(
        self, layer: int, patches: Float[Tensor, "batch patches width"], grid: Grid
    ) -> Float[Tensor, "batch rows cols width"]:
        if self.encoder.tokens_to_maps is None:
            return patches.unflatten(1, grid)
        return self.encoder.tokens_to_maps(patches, layer)


def _check_request(encoder: Encoder, layers: Sequence[int], facets: Sequence[Facet]) -> None:
    """Raise an error if the encoder lacks any of the layers or facets (kinds of features)."""
    outside = [layer for layer in layers if not 0 <= layer < encoder.depth]
    if outside or not layers:
        raise ConfigurationError(
            f"layers must lie in 0..{encoder.depth - 1} for this encoder, "
            f"got {', '.join(map(str, outside)) or 'none'}"
        )
    unknown = [f for f in facets if f not in (*FACETS, REGISTERS) and submodule_name(f) is None]
    if unknown or not facets:
        raise ConfigurationError(
            f"facets must be among {', '.join(FACETS)} or of the form blocks.*.NAME, "
            f"got {', '.join(unknown) or 'none'}"
        )
    if {"cls", "cls_normed"} & set(facets) and not encoder.has_cls:
        raise UnsupportedEncoderError(f"{encoder.name} has no [CLS] token", hint=_TOKENS)
    if REGISTERS in facets and not encoder.num_registers:
        raise UnsupportedEncoderError(f"{encoder.name} has no registers", hint=_TOKENS)
    last = encoder.width(encoder.depth - 1)
    narrow = [layer for layer in layers if encoder.width(layer) != last]
    has_norm = not isinstance(encoder.module.get_submodule("norm"), nn.Identity)
    if narrow and has_norm and {"token_normed", "cls_normed"} & set(facets):
        wide = [str(layer) for layer in range(encoder.depth) if encoder.width(layer) == last]
        block_list = ",".join(wide)
        raise UnsupportedEncoderError(
            f"block {narrow[0]} of {encoder.name} has width {encoder.width(narrow[0])}, but the "
            f"final norm has width {last}",
            hint=("--layer", block_list, "or", "--facet", "token"),
        )


def block_tokens(output: Any) -> Tensor:
    """Return the tokens in a block's output.

    If the output is a tuple or list, the tokens are its first item.
    """
    return output[0] if isinstance(output, (tuple, list)) else output


class _DeepestLayerDone(Exception):
    """Raised by a hook to end the forward pass after the deepest requested layer."""


def _stop(_block: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
    raise _DeepestLayerDone


@dataclass(frozen=True)
class _HookPoint:
    """Position in one block at which a hook captures a facet (kind of feature).

    Attributes:
        layer: Index of the block.
        facet: Name of the facet.
        name: Name of the position in error messages, such as "blocks.3.mlp.fc1".
        modules: Submodules of the block that can provide the facet. The facet is captured at the
            first submodule that the forward pass calls.
        side: Whether the input or the output of the submodule is captured.
    """

    layer: int
    facet: Facet
    name: str
    modules: tuple[nn.Module, ...]
    side: Literal["input", "output"]


def _find_hook_point(encoder: Encoder, layer: int, facet: Facet) -> _HookPoint:
    """Return the position in a block at which a facet (kind of feature) is captured.

    Raises:
        UnsupportedEncoderError: The block does not have this facet.
    """
    block = encoder.module.get_submodule("blocks").get_submodule(str(layer))
    parts = dict(block.named_modules())
    path = submodule_name(facet)
    if path is not None:
        if path not in parts:
            similar = difflib.get_close_matches(path, [n for n in parts if n], n=1)
            parent = path
            while parent not in parts:
                parent = parent.rpartition(".")[0]
            where = f"blocks.{layer}.{parent}".rstrip(".")
            raise UnsupportedEncoderError(
                f"{encoder.name} has no submodule blocks.{layer}.{path} (submodules of {where}: "
                f"{_list_children(list(parts), parent)})",
                hint=join_alternatives(
                    *[(f"probe.facet=blocks.*.{escape_braces(part)}",) for part in similar]
                ),
            )
        return _HookPoint(layer, facet, f"blocks.{layer}.{path}", (parts[path],), "output")
    modules, side = _find_modules(parts, facet)
    if not modules:
        raise UnsupportedEncoderError(
            f"block {layer} of {encoder.name} has no {facet} (its submodules: "
            f"{_list_children(list(parts), '')})",
            hint=("probe.facet=blocks.*.{name}", "or", "probe.facet=token"),
        )
    return _HookPoint(layer, facet, f"{facet} of block {layer}", modules, side)


def _find_modules(
    parts: dict[str, nn.Module], facet: Facet
) -> tuple[tuple[nn.Module, ...], Literal["input", "output"]]:
    """Find the submodules of a block whose input or output is a facet, such as "mlp_hidden".

    A facet is a kind of feature. `parts` contains all submodules of the block by name.

    Returns:
        The submodules, and whether to capture their input or their output. There are no submodules
        if the block does not have the facet. If there are several submodules, the first one that is
        called is used.
    """
    if _SUBLAYER[facet] not in parts:
        return (), "output"
    if facet in _SUBLAYER_OUTPUT:
        return tuple(parts[name] for name in _SUBLAYER_OUTPUT[facet] if name in parts)[:1], "output"
    if facet == "mlp_hidden":
        names = ("mlp.fc2", "mlp.w3", "mlp.w2")
        return tuple(parts[name] for name in names if name in parts)[:1], "input"
    # "attn_skip" is the input of the norm before the MLP. In post-norm blocks, it is the input of
    # the MLP.
    pair = [parts[name] for name in ("norm2", "mlp") if name in parts]
    return (tuple(pair) if len(pair) == 2 else ()), "input"


def _list_children(names: list[str], parent: str) -> str:
    prefix = f"{parent}." if parent else ""
    below = [n.removeprefix(prefix) for n in names if n.startswith(prefix) and n != parent]
    return ", ".join(name for name in below if "." not in name) or "none"


def _find_layouts(
    shape: Sequence[int], batch: int, grid: Grid, num_prefix_tokens: int
) -> list[Layout]:
    """Return the layouts that the shape of a feature tensor allows, such as "channels_last".

    The shape may allow two layouts, for example if 8 x 8 patches have 8 channels. At most one
    layout is possible if the numbers of rows and columns of patches (`grid`) differ.
    `num_prefix_tokens` is the number of tokens before the patch tokens, such as [CLS] and
    registers.
    """
    patches = grid[0] * grid[1]
    token_counts = (patches, num_prefix_tokens + patches)
    fits: dict[Layout, bool] = {
        "tokens": len(shape) == 3 and shape[1] in token_counts,
        "channels_first": len(shape) == 4 and tuple(shape[2:]) == grid,
        "channels_last": len(shape) == 4 and tuple(shape[1:3]) == grid,
    }
    return [layout for layout, is_so in fits.items() if is_so and shape[0] == batch]


@dataclass(frozen=True)
class Resize:
    """Rule for resizing images before an encoder receives them.

    Attributes:
        side: Side of square images in pixels, or the longer side of images that keep their aspect
            ratio. If `side` is None, square images have the encoder's native size, and other images
            keep their size unless their longer side exceeds `max_side`.
        keep_aspect_ratio: Whether images keep their aspect ratio, instead of becoming squares.
        max_side: Maximum length of the longer side in pixels if `side` is None. Larger images are
            reduced to this length.
        round_to_patch: Whether both sides are rounded to multiples of the patch size.
    """

    side: int | None
    keep_aspect_ratio: bool = False
    max_side: int | None = None
    round_to_patch: bool = False

    def square_side(self, native_size: tuple[int, int], patch_size: int = 1) -> int:
        """Return the side in pixels of the square images that this rule produces.

        If the attribute `side` is None, use the smaller of the encoder's native height and width.

        Args:
            native_size: Native height and width of the encoder in pixels.
            patch_size: If `round_to_patch` is true, the side is rounded to a multiple of
                `patch_size`.
        """
        return self._round(self.side or min(native_size), patch_size)

    def output_size(self, height: int, width: int, patch_size: int = 1) -> tuple[int, int]:
        """Return the height and width in pixels to which an image is resized.

        If images become squares, the attribute `side` must not be None, because this method does
        not know the encoder's native size.

        Args:
            height: Height of the image in pixels.
            width: Width of the image in pixels.
            patch_size: If `round_to_patch` is true, both sides are rounded to multiples of
                `patch_size`.
        """
        longer = max(height, width)
        side = self.side or min(longer, self.max_side or longer)
        if not self.keep_aspect_ratio:
            height = width = longer
        new_height, new_width = height * side / longer, width * side / longer
        return self._round(new_height, patch_size), self._round(new_width, patch_size)

    def _round(self, length: int | float, patch_size: int) -> int:
        multiple = patch_size if self.round_to_patch else 1
        return max(1, round(length / multiple)) * multiple


def resize_image(
    image: UInt8[np.ndarray, "height width 3"], size: tuple[int, int]
) -> Float[Tensor, "3 new_height new_width"]:
    """Resize an image to a height and width, by bilinear interpolation with antialiasing.

    The input has values from 0 to 255, and the output has values in [0, 1].
    """
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 255
    return F.interpolate(pixels, size=size, mode="bilinear", antialias=True)[0]


def pad_to_patch(
    images: Float[Tensor, "*batch 3 height width"], patch_size: int
) -> Float[Tensor, "*batch 3 padded_height padded_width"]:
    """Pad the height and width of images to multiples of the patch size.

    Zeros are added on the right and at the bottom.
    """
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % patch_size, 0, -height % patch_size))


def central_square(
    image: UInt8[np.ndarray, "height width 3"], size: int, *, crop_share: float
) -> UInt8[Tensor, "3 {size} {size}"]:
    """Resize an image by bicubic interpolation with antialiasing, and crop the central square.

    Up to rounding, the output equals torchvision's `Resize` followed by `CenterCrop`, which DINO's
    evaluation uses. For speed, pixels outside of the square are not computed.

    Args:
        image: RGB image with values from 0 to 255.
        size: Side of the output in pixels.
        crop_share: Ratio of the square's side to the shorter side of the image, in (0, 1]. For
            example, if `crop_share` is 0.875 and `size` is 224, the shorter side is resized to 256
            pixels.
    """
    sides, short = image.shape[:2], max(size, round(size / crop_share))
    scaled = [short * side // min(sides) for side in sides]
    first = [round((side - size) / 2) for side in scaled]
    # With `box`, the filter reads pixels outside of the square, as if the whole image were resized.
    top, left = (start * side / new for start, side, new in zip(first, sides, scaled, strict=True))
    bottom, right = (
        (start + size) * side / new for start, side, new in zip(first, sides, scaled, strict=True)
    )
    box = (left, top, right, bottom)
    square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
