"""A transformer block taken apart, and only where the parts give what the block gave."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.system.memory import pass_on_memory

Tokens = Float[Tensor, "tokens dim"]
AttentionMatrices = Float[Tensor, "heads tokens tokens"]

# In float64 another order of the same operations differs by some 1e-14.
_TOLERANCE = 1e-9


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
) -> Parts | None:
    """The parts of a block that made `left` of `entered`, for one image.

    None where they do not: parallel or post-norm blocks, or blocks that are told more than tokens,
    such as rotary positions.
    """
    if not all(hasattr(block, name) for name in ("norm1", "attn", "norm2", "mlp")):
        return None
    whole: Any = block
    scales = [getattr(whole, name, nn.Identity()) for name in ("ls1", "ls2")]
    parts = Parts(
        graying=_of_one_image(getattr(whole, "graying", nn.Identity())),
        norm1=whole.norm1,
        attention=_of_one_image(nn.Sequential(whole.attn, scales[0])),
        norm2=whole.norm2,
        mlp=_of_one_image(nn.Sequential(whole.mlp, scales[1])),
        skip_attention=getattr(whole, "skip_attention", True),
        skip_mlp=getattr(whole, "skip_mlp", True),
        heads=_heads(whole.attn, scales[0], num_heads),
    )
    # A layer of another kind may fail in any way when it is called like this one.
    try:
        agrees = _agree(parts(entered), left)
    except Exception as error:
        pass_on_memory(error)
        return None
    if not agrees:
        return None
    normed = parts.norm1(parts.graying(entered))
    explained = _explains(parts.heads, parts.attention, normed)
    return parts if explained else replace(parts, heads=None)


def _of_one_image(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: module(tokens[None])[0]


def _heads(attention: Any, scale: nn.Module, num_heads: int) -> Heads | None:
    """Plain softmax attention with the weights of a layer; whether it is that layer, is checked."""
    if not all(isinstance(getattr(attention, n, None), nn.Linear) for n in ("qkv", "proj")):
        return None
    if attention.qkv.out_features % (3 * num_heads):
        return None

    def split(tokens: Tensor) -> tuple[Tensor, ...]:
        qkv = attention.qkv(tokens).unflatten(1, (3, num_heads, -1))
        return qkv.permute(1, 2, 0, 3).unbind(0)  # each heads tokens head_dim

    def matrices(tokens: Tensor) -> Tensor:
        q, k, _ = split(tokens)
        q = getattr(attention, "q_norm", nn.Identity())(q)
        k = getattr(attention, "k_norm", nn.Identity())(k)
        return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)

    def joined(weights: Tensor, values: Tensor) -> Tensor:
        return scale(attention.proj((weights @ values).transpose(0, 1).flatten(1)))

    return Heads(matrices, lambda tokens: split(tokens)[2], joined)


def _explains(heads: Heads | None, attention: Callable[[Tensor], Tensor], normed: Tokens) -> bool:
    if heads is None:
        return True
    try:
        return _agree(heads.output(normed), attention(normed))
    except (RuntimeError, TypeError, ValueError) as error:
        pass_on_memory(error)
        return False


def _agree(one: Tensor, other: Tensor) -> bool:
    error = (one - other).abs().max()
    return bool(error <= _TOLERANCE * torch.maximum(other.abs().max(), error.new_tensor(1e-12)))
