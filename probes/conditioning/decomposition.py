"""What enters and leaves every block for some images, in float64, and a block taken apart.

Parts are there only where they give what the block gave.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from probes.features.views import resize_bicubic
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, block_tokens
from ssl_bench.models import Encoder
from ssl_bench.system.device import float64_device
from ssl_bench.system.process import reraise_out_of_memory

Tokens = Float[Tensor, "tokens dim"]
# In float64 another order of the same operations differs by some 1e-14.
_TOLERANCE = 1e-9
# As timm, torch, torchvision and others name them; a wrong guess does not give what the block gave.
_NAMES = {
    "norm1": ("norm1", "ln_1", "ln1", "attention_norm", "layernorm_before"),
    "attn": ("attn", "attention", "self_attn", "self_attention"),
    "norm2": ("norm2", "ln_2", "ln2", "mlp_norm", "ffn_norm", "layernorm_after"),
    "mlp": ("mlp", "ffn", "feed_forward"),
}


@dataclass(frozen=True)
class Heads:
    """Softmax attention of one layer with the matrix in the open.

    Attributes:
        matrices: From normed tokens to each head's tokens x tokens matrix.
        values: From normed tokens to each head's values.
        joined: From matrices and values to what the layer returns.
    """

    matrices: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    joined: Callable[[Tensor, Tensor], Tensor]

    def output(self, tokens: Tensor) -> Tensor:
        return self.joined(self.matrices(tokens), self.values(tokens))


@dataclass(frozen=True)
class Parts:
    """One pre-norm block: y = x + attention(norm1(x)), then y + mlp(norm2(y)), skips where on.

    Attributes:
        graying: What the block does to its tokens before that; nothing in most.
        attention: With the layer scale where there is one, as is `mlp`.
        heads: None where the layer is no plain softmax attention.
    """

    graying: Callable[[Tensor], Tensor]
    norm1: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor], Tensor]
    norm2: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    skip_attention: bool
    skip_mlp: bool
    heads: Heads | None

    def after_attention(self, tokens: Tensor) -> Tensor:
        tokens = self.graying(tokens)
        update = self.attention(self.norm1(tokens))
        return tokens + update if self.skip_attention else update

    def __call__(self, tokens: Tensor) -> Tensor:
        middle = self.after_attention(tokens)
        update = self.mlp(self.norm2(middle))
        return middle + update if self.skip_mlp else update


def decompose_block(
    block: nn.Module, entered: Tokens, left: Tokens, num_heads: int
) -> tuple[Parts | None, str]:
    """The parts of a block that made `left` of `entered`, for one image, and why some are missing.

    None where they do not: parallel or post-norm blocks, or blocks that are told more than tokens,
    such as rotary positions.
    """
    whole: Any = block
    found: dict[str, Any] = {part: _first(block, names) for part, names in _NAMES.items()}
    if found["mlp"] is None and isinstance(block, nn.TransformerEncoderLayer):
        found["mlp"] = lambda tokens: whole.linear2(whole.activation(whole.linear1(tokens)))
    for part, module in found.items():
        if module is None:
            return None, f"the block has no part called {' or '.join(_NAMES[part])}"
    scales = [getattr(whole, name, nn.Identity()) for name in ("ls1", "ls2")]
    attention = found["attn"]
    given: Callable[[Tensor], Tensor] = attention
    if isinstance(attention, nn.MultiheadAttention):
        given = lambda tokens: attention(tokens, tokens, tokens, need_weights=False)[0]  # noqa: E731
    parts = Parts(
        graying=_of_one_image(getattr(whole, "graying", nn.Identity())),
        norm1=found["norm1"],
        attention=_of_one_image(given, scales[0]),
        norm2=found["norm2"],
        mlp=_of_one_image(found["mlp"], scales[1]),
        skip_attention=getattr(whole, "skip_attention", True),
        skip_mlp=getattr(whole, "skip_mlp", True),
        heads=None,
    )
    if why := _departure(parts, entered, left):
        return None, f"the block is not x + attn(norm1(x)), then that + mlp(norm2(that)), {why}"
    heads, why = _heads(attention, scales[0], num_heads)
    if heads is not None:
        normed = parts.norm1(parts.graying(entered))
        if departure := _departure(heads.output, normed, parts.attention(normed)):
            heads, why = None, f"attention is not softmax of its qkv, {departure}"
    return replace(parts, heads=heads), why


def _departure(function: Callable[[Tensor], Tensor], given: Tensor, expected: Tensor) -> str:
    """How a function departs from the one that gave `expected`; nothing where it does not."""
    # A layer of another kind may fail in any way when it is called like this one.
    try:
        error = (function(given) - expected).abs().max()
    except Exception as failure:
        reraise_out_of_memory(failure)
        reason = (str(failure).splitlines() or [""])[0]
        return f"which ends in {type(failure).__name__}: {reason}"
    largest = torch.maximum(expected.abs().max(), error.new_tensor(1e-12))
    return "" if error <= _TOLERANCE * largest else "which gives other numbers"


def _first(block: nn.Module, names: Sequence[str]) -> Any:
    """The submodule of one of these names; a layer may keep a tensor by such a name."""
    parts = (getattr(block, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def _of_one_image(*functions: Any) -> Callable[[Tensor], Tensor]:
    """One after the other."""

    def composed(tokens: Tensor) -> Tensor:
        given = tokens[None]
        for function in functions:
            given = function(given)
        return given[0]

    return composed


def _heads(layer: nn.Module, scale: nn.Module, num_heads: int) -> tuple[Heads | None, str]:
    """Plain softmax attention with the weights of a layer, or why there is none.

    Whether it is that layer, is checked.
    """
    attention: Any = layer
    if isinstance(layer, nn.MultiheadAttention) and attention.in_proj_weight is not None:
        weights = attention.in_proj_weight, attention.in_proj_bias
        of_tokens, proj = lambda tokens: functional.linear(tokens, *weights), attention.out_proj
        num_heads = attention.num_heads
    elif all(isinstance(getattr(attention, n, None), nn.Linear) for n in ("qkv", "proj")):
        if (wide := attention.qkv.out_features) % (3 * num_heads):
            return None, f"the {wide} numbers of its qkv are not those of {num_heads} heads"
        of_tokens, proj = attention.qkv, attention.proj
    else:
        return None, f"{type(layer).__name__} has no Linear layers called qkv and proj"

    def split(tokens: Tensor) -> tuple[Tensor, ...]:
        qkv = of_tokens(tokens).unflatten(1, (3, num_heads, -1))
        return qkv.permute(1, 2, 0, 3).unbind(0)  # each heads tokens head_dim

    def matrices(tokens: Tensor) -> Tensor:
        q, k, _ = split(tokens)
        q = getattr(attention, "q_norm", nn.Identity())(q)
        k = getattr(attention, "k_norm", nn.Identity())(k)
        return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)

    def joined(weights: Tensor, values: Tensor) -> Tensor:
        return scale(proj((weights @ values).transpose(0, 1).flatten(1)))

    return Heads(matrices, lambda tokens: split(tokens)[2], joined), ""


@dataclass(frozen=True)
class BlockPass:
    """One block and one image.

    Attributes:
        entered: All tokens, [CLS] and registers among them.
        left: What the block made of them.
        parts: None where the block cannot be taken apart.
        why: It cannot, or its attention cannot; empty where all can.
    """

    block: nn.Module
    entered: Float[Tensor, "tokens dim"]
    left: Float[Tensor, "tokens dim"]
    parts: Parts | None
    why: str

    def whole(self, tokens: Tensor) -> Tensor:
        """The block itself, as a function of one image's tokens."""
        return block_tokens(self.block(tokens[None]))[0]


Passes = dict[int, list[BlockPass]]


def _copied(module: nn.Module) -> nn.Module:
    """Copy a module, which may keep activations of a training step that have gradients."""
    kept = {
        id(one): one.detach()
        for part in module.modules()
        for one in tree_leaves(vars(part))
        if isinstance(one, Tensor) and not one.is_leaf
    }
    return copy.deepcopy(module, kept)


def block_passes(
    encoder: Encoder, samples: Sequence[Sample], image_size: int, context: ProbeContext
) -> tuple[Passes, Float[Tensor, "images tokens dim"]]:
    """By layer the passes of all images, squeezed to squares of one size, and what enters block 0.

    Raises:
        CheckpointError: Features are not finite.
    """
    device = float64_device(context.device)
    # Rounding ends at 1e16, not at 1e7.
    module = _copied(encoder.module).eval().to(device).double()
    module.register_forward_pre_hook(lambda _module, images: images[0].double())
    double = replace(encoder, module=module)
    extractor = FeatureExtractor(double, layers=context.layers, device=device)
    blocks = module.get_submodule("blocks")
    asked = {layer: blocks.get_submodule(str(layer)) for layer in context.layers}
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    embedded: list[Tensor] = []
    handles = [
        blocks.get_submodule("0").register_forward_pre_hook(
            lambda _block, inputs: embedded.append(inputs[0][0])
        )
    ]
    for layer, block in asked.items():

        def keep(_block: nn.Module, inputs: Any, output: Any, layer: int = layer) -> None:
            seen[layer] = (inputs[0][0], block_tokens(output)[0])

        handles.append(block.register_forward_hook(keep, prepend=True))
    found: Passes = {layer: [] for layer in context.layers}
    try:
        for sample in context.progress(samples, "conditioning", len(samples)):
            # A square: condition numbers depend on the number of tokens.
            image = resize_bicubic(sample.image, image_size, image_size)
            extractor(image[None].to(device), [sample.image_id])
            for layer, block in asked.items():
                entered, left = seen[layer]
                with torch.no_grad():
                    parts, why = decompose_block(block, entered, left, encoder.num_heads)
                found[layer].append(BlockPass(block, entered, left, parts, why))
    finally:
        for handle in handles:
            handle.remove()
    return found, torch.stack(embedded)
