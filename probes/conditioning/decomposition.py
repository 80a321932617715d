"""Record the inputs and outputs of transformer blocks in float64, and split the blocks into parts.

`record_blocks` runs the encoder. `decompose_block` splits a block into norms, attention and MLP,
but only if these parts reproduce the output of the block.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from probes.features.training_images import resize_bicubic
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, block_tokens
from ssl_bench.models import Encoder
from ssl_bench.system.device import float64_device
from ssl_bench.system.process import reraise_out_of_memory

Tokens = Float64[Tensor, "tokens dim"]
Function = Callable[[Tensor], Tensor]
"""A function whose input and output are the tokens of one image, or parts of them."""

# Maximum relative difference between the outputs of a block and of its decomposition. In float64,
# changing the order of operations changes results by about 1e-14.
_TOLERANCE = 1e-9
# Attribute names of each part of a block in timm, torch, torchvision and other packages. If a part
# with another meaning has such a name, this is noticed, because the outputs of the block and of its
# decomposition are compared.
_NAMES = {
    "norm1": ("norm1", "ln_1", "ln1", "attention_norm", "layernorm_before"),
    "attn": ("attn", "attention", "self_attn", "self_attention"),
    "norm2": ("norm2", "ln_2", "ln2", "mlp_norm", "ffn_norm", "layernorm_after"),
    "mlp": ("mlp", "ffn", "feed_forward"),
}


@dataclass(frozen=True)
class SoftmaxAttention:
    """A softmax attention layer, split into steps so that its attention matrices are accessible.

    Attributes:
        layer: The original layer. If it has norms of queries and keys (`q_norm`, `k_norm`), they
            are applied.
        qkv: Function that computes the queries, keys and values of all heads from the tokens. Its
            output has the shape tokens x (3 * dim).
        proj: Output projection.
        layer_scale: LayerScale (learned factors of the channels) of the output, or the identity.
        num_heads: Number of heads.
    """

    layer: Any
    qkv: Function
    proj: Function
    layer_scale: Function
    num_heads: int

    def _split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(tokens).unflatten(1, (3, self.num_heads, -1))
        return qkv.permute(1, 2, 0, 3).unbind(0)  # each heads tokens head_dim

    def matrices(self, tokens: Tensor) -> Tensor:
        """Return the attention matrix of each head, with shape heads x tokens x tokens."""
        q, k, _ = self._split(tokens)
        q = getattr(self.layer, "q_norm", nn.Identity())(q)
        k = getattr(self.layer, "k_norm", nn.Identity())(k)
        return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)

    def values(self, tokens: Tensor) -> Tensor:
        """Return the attention values (V) of each head, with shape heads x tokens x head_dim."""
        return self._split(tokens)[2]

    def combine(self, matrices: Tensor, values: Tensor) -> Tensor:
        """Return the output of the attention layer for given attention matrices and values."""
        return self.layer_scale(self.proj((matrices @ values).transpose(0, 1).flatten(1)))

    def output(self, tokens: Tensor) -> Tensor:
        return self.combine(self.matrices(tokens), self.values(tokens))


@dataclass(frozen=True)
class PreNormBlock:
    """A pre-norm transformer block, split into its parts.

    The block computes y = x + attention(norm1(x)), and then y + mlp(norm2(y)). A block without one
    of the two skip connections leaves out "x +" or "y +".

    Attributes:
        graying: Function that computes x from the input tokens. In most blocks, it is the identity.
            In blocks with token graying, it increases the small singular values of the token
            matrix.
        attention: Attention, including its LayerScale (learned factors of the channels).
        mlp: MLP, including its LayerScale.
        skip_attention: Whether x is added to the output of attention.
        skip_mlp: Whether y is added to the output of the MLP.
        heads: Attention with accessible matrices. None if the layer is not plain softmax attention.
    """

    graying: Function
    norm1: Function
    attention: Function
    norm2: Function
    mlp: Function
    skip_attention: bool
    skip_mlp: bool
    heads: SoftmaxAttention | None

    def apply_attention(self, tokens: Tensor) -> Tensor:
        """Return the tokens between the attention and the MLP, given the input of the block."""
        tokens = self.graying(tokens)
        update = self.attention(self.norm1(tokens))
        return tokens + update if self.skip_attention else update

    def __call__(self, tokens: Tensor) -> Tensor:
        middle = self.apply_attention(tokens)
        update = self.mlp(self.norm2(middle))
        return middle + update if self.skip_mlp else update


@dataclass(frozen=True)
class BlockRecord:
    """The input and output of one transformer block for one image.

    Attributes:
        block: The block.
        input: All tokens that enter the block, including [CLS] and registers.
        output: All tokens that leave the block.
        parts: The parts of the block. None if the block cannot be split.
        reason: Why the block or its attention cannot be split. Empty if both can be split.
    """

    block: nn.Module
    input: Tokens
    output: Tokens
    parts: PreNormBlock | None
    reason: str

    def run_block(self, tokens: Tensor) -> Tensor:
        """Run the original block on the tokens of one image."""
        return block_tokens(self.block(tokens[None]))[0]


BlockRecords = dict[int, list[BlockRecord]]
"""For each layer, a list with the `BlockRecord` of each image."""


def record_blocks(
    encoder: Encoder,
    samples: Sequence[Sample],
    layers: Sequence[int],
    image_size: int,
    context: ProbeContext,
) -> tuple[BlockRecords, Float64[Tensor, "images tokens dim"]]:
    """Run a float64 copy of the encoder, and record the input and output of each requested block.

    All images are resized to squares with a side of `image_size` pixels, because condition numbers
    depend on the number of tokens. `context` provides only the device and the progress bar.

    Returns:
        Two results. The first contains a `BlockRecord` for each requested layer and image. The
        second contains the tokens of all images that enter the encoder's first block.

    Raises:
        CheckpointError: Features are not finite.
    """
    device = float64_device(context.device)
    # In float32, rounding would limit condition numbers to about 1e7.
    module = _copy_module(encoder.module).eval().to(device).double()
    module.register_forward_pre_hook(lambda _module, images: images[0].double())
    extractor = FeatureExtractor(replace(encoder, module=module), layers=layers, device=device)
    blocks = module.get_submodule("blocks")
    block_by_layer = {layer: blocks.get_submodule(str(layer)) for layer in layers}
    tokens: dict[int, tuple[Tensor, Tensor]] = {}
    embedded: list[Tensor] = []
    handles = [
        blocks.get_submodule("0").register_forward_pre_hook(
            lambda _block, inputs: embedded.append(inputs[0][0])
        )
    ]
    for layer, block in block_by_layer.items():

        def record(_block: nn.Module, inputs: Any, output: Any, layer: int = layer) -> None:
            tokens[layer] = (inputs[0][0], block_tokens(output)[0])

        handles.append(block.register_forward_hook(record, prepend=True))
    records: BlockRecords = {layer: [] for layer in layers}
    try:
        for sample in context.progress(samples, "conditioning", len(samples)):
            image = resize_bicubic(sample.image, image_size, image_size)
            extractor(image[None].to(device), [sample.image_id])
            for layer, block in block_by_layer.items():
                with torch.no_grad():
                    parts, reason = decompose_block(block, *tokens[layer], encoder.num_heads)
                records[layer].append(BlockRecord(block, *tokens[layer], parts, reason))
    finally:
        for handle in handles:
            handle.remove()
    return records, torch.stack(embedded)


def _copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module, even if some of its tensors are results of autograd.

    `copy.deepcopy` fails for results of autograd. The copy therefore contains detached tensors.
    """
    detached = {
        id(leaf): leaf.detach()
        for part in module.modules()
        for leaf in tree_leaves(vars(part))
        if isinstance(leaf, Tensor) and not leaf.is_leaf
    }
    return copy.deepcopy(module, detached)


def decompose_block(
    block: nn.Module, tokens: Tokens, output: Tokens, num_heads: int
) -> tuple[PreNormBlock | None, str]:
    """Split a block into its parts, and check that the parts reproduce the output of the block.

    Parallel blocks, post-norm blocks, and blocks with further arguments such as rotary positions
    cannot be split.

    Args:
        block: The block.
        tokens: Input of the block for one image.
        output: Output of the block for these tokens.
        num_heads: Number of attention heads, for layers that do not store this number.

    Returns:
        Two results. The first is the decomposed block, or None if the block cannot be split. The
        second is the reason why the block or its attention cannot be split, or an empty string.
    """
    module: Any = block
    parts: dict[str, Any] = {part: _find_submodule(block, _NAMES[part]) for part in _NAMES}
    if parts["mlp"] is None and isinstance(block, nn.TransformerEncoderLayer):
        parts["mlp"] = lambda x: module.linear2(module.activation(module.linear1(x)))
    for part, names in _NAMES.items():
        if parts[part] is None:
            return None, f"the block has no part called {' or '.join(names)}"
    layer_scales = [getattr(module, name, nn.Identity()) for name in ("ls1", "ls2")]
    attention = parts["attn"]
    call: Function = attention
    if isinstance(attention, nn.MultiheadAttention):
        call = lambda x: attention(x, x, x, need_weights=False)[0]  # noqa: E731
    decomposed = PreNormBlock(
        graying=_make_unbatched(getattr(module, "graying", nn.Identity())),
        norm1=parts["norm1"],
        attention=_make_unbatched(call, layer_scales[0]),
        norm2=parts["norm2"],
        mlp=_make_unbatched(parts["mlp"], layer_scales[1]),
        skip_attention=getattr(module, "skip_attention", True),
        skip_mlp=getattr(module, "skip_mlp", True),
        heads=None,
    )
    if mismatch := find_mismatch(decomposed, tokens, output):
        formula = "x + attn(norm1(x)), then that + mlp(norm2(that))"
        return None, f"the block is not {formula}, {mismatch}"
    heads, reason = _expose_attention(attention, layer_scales[0], num_heads)
    if heads is not None:
        normed = decomposed.norm1(decomposed.graying(tokens))
        if mismatch := find_mismatch(heads.output, normed, decomposed.attention(normed)):
            heads, reason = None, f"attention is not softmax attention of its qkv, {mismatch}"
    return replace(decomposed, heads=heads), reason


def _find_submodule(block: nn.Module, names: Sequence[str]) -> Any:
    """Return the first submodule of a block that has one of the given names, or None."""
    parts = (getattr(block, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def _make_unbatched(*functions: Any) -> Function:
    """Chain functions into one function of the tokens of a single image.

    The given functions are called one after the other with a batch of one image.
    """

    def run_chain(tokens: Tensor) -> Tensor:
        batch = tokens[None]
        for function in functions:
            batch = function(batch)
        return batch[0]

    return run_chain


def find_mismatch(function: Function, tokens: Tensor, expected: Tensor) -> str:
    """Compare the output of a function with the expected output, and describe the difference.

    Return the end of an error message, such as "which gives a different output". If both outputs
    agree up to rounding, return an empty string. `tokens` is the input of the function.
    """
    # A layer of unknown type can raise any exception.
    try:
        error = (function(tokens) - expected).abs().max()
    except Exception as failure:
        reraise_out_of_memory(failure)
        reason = (str(failure).splitlines() or [""])[0]
        return f"which fails with {type(failure).__name__}: {reason}"
    largest = torch.maximum(expected.abs().max(), error.new_tensor(1e-12))
    return "" if error <= _TOLERANCE * largest else "which gives a different output"


def _expose_attention(
    layer: nn.Module, layer_scale: nn.Module, num_heads: int
) -> tuple[SoftmaxAttention | None, str]:
    """Build a `SoftmaxAttention` from the weights of an attention layer.

    Return the `SoftmaxAttention` and an empty string, or None and the reason why there is none. The
    caller must check that the `SoftmaxAttention` reproduces the output of the layer.
    """
    attention: Any = layer
    if isinstance(layer, nn.MultiheadAttention) and attention.in_proj_weight is not None:
        weights = attention.in_proj_weight, attention.in_proj_bias
        qkv, proj = lambda tokens: functional.linear(tokens, *weights), attention.out_proj
        num_heads = attention.num_heads
    elif all(isinstance(getattr(attention, n, None), nn.Linear) for n in ("qkv", "proj")):
        if (width := attention.qkv.out_features) % (3 * num_heads):
            return None, f"its qkv has {width} outputs, which {num_heads} heads cannot share"
        qkv, proj = attention.qkv, attention.proj
    else:
        return None, f"{type(layer).__name__} has no Linear layers called qkv and proj"
    return SoftmaxAttention(layer, qkv, proj, layer_scale, num_heads), ""
