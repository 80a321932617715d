"""timm's attention layers brought to one form: `attn.qkv` computes queries, keys and values."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def give_queries_keys_values(blocks: Iterable[nn.Module]) -> int:
    """Let `qkv` compute all of q, k and v wherever that is the same arithmetic.

    Some of timm's blocks add biases outside of `qkv`, others have three layers in its place; their
    outputs stay the same to rounding. Blocks without one attention layer, and those with fewer
    keys than queries, are left as they are.

    Returns:
        Heads of the first block.
    """
    heads = 0
    for block in blocks:
        # Any: the layers differ from model to model, and so do their types.
        attention: Any = getattr(block, "attn", None)
        heads = heads or getattr(attention or block, "num_heads", 0)
        if attention is None:
            continue
        if getattr(attention, "qkv", None) is None:
            _fuse_layers(attention)
        elif getattr(attention, "q_bias", None) is not None:
            _take_biases_in(attention)
    return heads


@torch.no_grad()
def _fuse_layers(attention: Any) -> None:
    parts: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
    width = parts[0].out_features
    if any(part.out_features != width for part in parts):
        return
    weights = torch.cat([part.weight for part in parts])
    qkv = nn.Linear(
        parts[0].in_features,
        3 * width,
        bias=any(part.bias is not None for part in parts),
        device=weights.device,
        dtype=weights.dtype,
    )
    qkv.weight.copy_(weights)
    if qkv.bias is not None:
        biases = [weights.new_zeros(width) if p.bias is None else p.bias for p in parts]
        qkv.bias.copy_(torch.cat(biases))
    attention.qkv = qkv
    attention.q_proj = attention.k_proj = attention.v_proj = None


@torch.no_grad()
def _take_biases_in(attention: Any) -> None:
    biases = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    attention.qkv.bias = nn.Parameter(biases)
    attention.q_bias = attention.k_bias = attention.v_bias = None
