"""Selective state spaces as a product with a T x T matrix, as a recurrence, and between the two.

For a channel with decay A < 0 and steps Delta, keys B and queries C of every token:

    h_t = exp(Delta_t A) h_(t-1) + Delta_t x_t B_t,    y_t = C_t . h_t.

Unrolled, y = M x with M_ij = Delta_j sum_n C_in B_jn exp(A_n (Delta_(j+1) + ... + Delta_i)) for
j <= i, and 0 for later j.

Source: https://arxiv.org/abs/2312.00752 and https://arxiv.org/abs/2405.21060. Equations 3.27 and
3.28 of Trockman's thesis delay the output by one token, and the mask of 3.34, 1{i <= j}, is that of
the transpose; an output here sees its own token and those before it.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

Selected = Float[Tensor, "batch tokens states"]
PerChannel = Float[Tensor, "batch tokens channels"]
PerHead = Float[Tensor, "batch tokens heads"]


def scan_channels(
    inputs: PerChannel,
    steps: PerChannel,
    decay: Float[Tensor, "channels states"],
    keys: Selected,
    queries: Selected,
    *,
    chunk: int,
) -> PerChannel:
    """Mamba 1: every channel has steps of its own, and every number of its state a decay.

    It is the recurrence, which takes a tenth of the time of matrices that no two channels share.

    `steps` are above 0, `decay` below, where 0 forgets nothing; of `chunk` tokens, at least 1, all
    states are in memory at a time.
    """
    outputs = []
    state = inputs.new_zeros(len(inputs), *decay.shape)
    parts = (value.split(chunk, 1) for value in (inputs, steps, keys, queries))
    for values, step, key, query in zip(*parts, strict=True):
        kept = (step[..., None] * decay).exp()
        added = (step * values)[..., None] * key[:, :, None]
        states = []
        for share, news in zip(kept.unbind(1), added.unbind(1), strict=True):
            state = torch.addcmul(news, share, state)
            states.append(state)
        outputs.append(torch.einsum("btcn,btn->btc", torch.stack(states, 1), query))
    return torch.cat(outputs, 1)


def channel_mixing(
    steps: PerChannel, decay: Float[Tensor, "channels states"], keys: Selected, queries: Selected
) -> Float[Tensor, "batch channels tokens tokens"]:
    """M of every channel of Mamba 1; rows are outputs."""
    logs = (steps[..., None] * decay).cumsum(1)
    between = _causal(logs[:, :, None] - logs[:, None])  # batch outputs inputs channels states
    products = torch.einsum("bin,bjn,bijcn->bcij", queries, keys, between)
    return products * steps.transpose(1, 2)[:, :, None]


def scan_heads(
    inputs: Float[Tensor, "batch tokens heads width"],
    steps: PerHead,
    decay: Float[Tensor, " heads"],
    keys: Selected,
    queries: Selected,
    *,
    chunk: int,
) -> Float[Tensor, "batch tokens heads width"]:
    """Mamba 2: the channels of a head have its steps, and all numbers of their states its decay.

    Inside of `chunk` tokens it is the matrix, whose memory grows with their square, from one chunk
    to the next the state: a chunk of all tokens is the matrix form, chunks of one token are the
    recurrence. Steps and decay as of `scan_channels`.
    """
    outputs = []
    batch, _, heads, width = inputs.shape
    state = inputs.new_zeros(batch, heads, width, keys.shape[-1])
    parts = (value.split(chunk, 1) for value in (inputs, steps, keys, queries))
    for values, step, key, query in zip(*parts, strict=True):
        logs = (step * decay).cumsum(1)
        inside = torch.einsum("bhij,bjhp->bihp", head_mixing(step, decay, key, query), values)
        carried = torch.einsum("bin,bhpn->bihp", query, state) * logs.exp()[..., None]
        outputs.append(inside + carried)
        kept = (logs[:, -1:] - logs).exp() * step
        update = torch.einsum("bjhp,bjn->bhpn", kept[..., None] * values, key)
        state = logs[:, -1].exp()[..., None, None] * state + update
    return torch.cat(outputs, 1)


def head_mixing(
    steps: PerHead, decay: Float[Tensor, " heads"], keys: Selected, queries: Selected
) -> Float[Tensor, "batch heads tokens tokens"]:
    """M of every head of Mamba 2; rows are outputs."""
    logs = (steps * decay).cumsum(1)
    between = _causal(logs[:, :, None] - logs[:, None])  # batch outputs inputs heads
    products = torch.einsum("bin,bjn->bij", queries, keys)[..., None] * between
    return (products * steps[:, None]).permute(0, 3, 1, 2)


def _causal(logs: Tensor) -> Tensor:
    """What is left of each input, (batch, outputs, inputs, ...), at each output; 0 before it."""
    tokens = logs.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=logs.device).triu(1)
    # Before exp: a growth over the tokens that are left out may be too large for a float.
    later = later.view(1, tokens, tokens, *[1] * (logs.ndim - 3))
    return logs.masked_fill(later, -math.inf).exp()
