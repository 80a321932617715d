"""Mamba 1 and Mamba 2, which predict the next token of a sequence, and their initialisation.

A block mixes tokens by a convolution over four tokens and a state space model. Each channel has a
decay A < 0. Each token has step sizes Delta, keys B and queries C. The state h and the output y of
a channel are

    h_t = exp(Delta_t A) h_(t-1) + Delta_t x_t B_t,    y_t = C_t . h_t.

Equivalently, y = M x with M_ij = Delta_j sum_n C_in B_jn exp(A_n (Delta_(j+1) + ... + Delta_i)) for
j <= i, and M_ij = 0 for j > i. `scan_channels` (Mamba 1) computes y by the recurrence. `scan_heads`
(Mamba 2) multiplies by M within chunks of tokens and uses the recurrence between chunks.
`channel_mixing` and `head_mixing` return M.

Source: https://arxiv.org/abs/2312.00752 and https://arxiv.org/abs/2405.21060. In equations 3.27 and
3.28 of Trockman's thesis (2025), the output is delayed by one token. The mask 1{i <= j} in equation
3.34 belongs to the transpose of M. In this module, an output depends on its own token and on
earlier tokens.

Initial weights are drawn as the authors of Mamba do. Mimetic initialisation then changes up to four
parts of a layer, so that the layer resembles linear attention whose queries equal its keys:

1. "decay": A drawn value A = -a becomes -a^-8, so that almost nothing is forgotten. If a is 1, A
   stays -1. One of the N states in Mamba 1 has a = 1, and some heads in Mamba 2 have a near 1. With
   `state_decay=constant`, A is -exp(-8) everywhere.
2. "step": The bias of the step sizes becomes log(e - 1), whose softplus is 1. The weights of the
   projection to the step sizes are divided by 100.
3. "correlation": W_C becomes the mean of W_C and W_B.
4. "convolution": The last tap becomes 1, and all other taps and the bias become 0, so that the
   convolution returns its input. If the first tap were 1 instead, the convolution would delay its
   input by three tokens.

Source: section 3.3.2 of Trockman's thesis, with c = 8. The formula A = -exp(-c A_log) of the thesis
could also be meant to hold during training. We multiply A_log by -c once, before training. The
thesis does not define "W_Delta near 0". Here, W_Delta is the drawn matrix divided by 100. In Mamba
1, W_Delta is a product of two matrices. Only the second matrix of this product is reduced, because
two matrices of zeros would never be trained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Generator, Tensor, nn

from ssl_bench.composition.fields import Count, CountOrZero, Depth, ListLength, Width
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import EncoderConfig, check_layers
from ssl_bench.models.initialisers import init_uniform_
from ssl_bench.models.vit import EncoderModule
from ssl_bench.system.device import disable_autocast

Version = Literal["mamba1", "mamba2"]
Part = Literal["decay", "step", "correlation", "convolution"]
StateDecay = Literal["power", "constant"]

NORM_EPS = 1e-5
# Width of a mixer divided by the width of the model.
_EXPANSION = 2
_TAPS = 4
_CHUNK = 64
_DECAY, _STEP, _CORRELATION, _CONVOLUTION = get_args(Part)
_EXPONENT = 8.0
_EMBEDDING_STD = 0.02
# Factor of the weights of the step sizes with the part "step".
_STEP_FACTOR = 0.01
# The softplus of this number is 1.
_UNIT_STEP_BIAS = math.log(math.e - 1)
_SMALLEST_STEP, _LARGEST_STEP = 0.001, 0.1
# Upper bound of the initial -A of the heads of Mamba 2. The lower bound is 1.
_LARGEST_DECAY = 16.0

Tokens = Float[Tensor, "batch tokens dim"]
PerState = Float[Tensor, "batch tokens states"]
PerChannel = Float[Tensor, "batch tokens channels"]
PerHead = Float[Tensor, "batch tokens heads"]


@dataclass(frozen=True)
class StateSpaceConfig(EncoderConfig):
    """Architecture and initialisation of a Mamba that predicts the next token of a sequence.

    Mimetic initialisation changes the initial weights so that a layer resembles linear attention.

    Attributes:
        version: Version of Mamba. "mamba1" has a step size for each channel, and a decay for each
            entry of a channel's state. "mamba2" has one step size and one decay for each head.
        num_states: Number of entries in the state of a channel. Trockman's thesis uses 32 for Mamba
            1.
        head_width: Number of channels in a head of Mamba 2.
        num_tokens: Size of the vocabulary, that is, of letters and special tokens.
        mimetic: Parts of mimetic initialisation (imitation of linear attention) to apply: "decay",
            "step", "correlation" and "convolution". An empty list means the initialisation of
            Mamba's authors.
        mimetic_layers: Indices of the blocks with mimetic initialisation, starting at 0. None means
            all blocks.
        state_decay: Initial decay A if `mimetic` contains "decay". "power" replaces the drawn value
            -a by -a^-8, and "constant" replaces it by -exp(-8).

    Source: chapter 3.3 of Trockman's thesis (2025), with the sizes in section 3.3.4.
    """

    kind = "state_space"

    version: Version = "mamba2"
    dim: Width = 1024
    depth: Depth = 2
    num_states: Count = 128
    head_width: Width = 64
    num_tokens: Count = 28
    mimetic: Annotated[Sequence[Part], ListLength(0, 4)] = ()
    mimetic_layers: Sequence[CountOrZero] | None = None
    state_decay: StateDecay = "power"

    # The model reads no images.
    image_size = 0
    patch_size = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Sort the parts, so that configurations with the same parts are equal.
        parts = tuple(part for part in get_args(Part) if part in self.mimetic)
        object.__setattr__(self, "mimetic", parts)
        if self.version == "mamba2" and self.inner_dim % self.head_width:
            head_width = math.gcd(self.inner_dim, self.head_width)
            raise ConfigurationError(
                f"model.head_width expects a divisor of 2 x model.dim = {self.inner_dim}, got "
                f"{self.head_width}",
                hint=(f"model.head_width={head_width}",),
            )
        check_layers("mimetic_layers", self.mimetic_layers, self.depth)

    @torch.no_grad()
    def build(self, *, seed: int) -> "StateSpaceModel":
        with torch.random.fork_rng(devices=[]):
            model = StateSpaceModel(self)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(model.embedding.weight, std=_EMBEDDING_STD, generator=generator)
        layers = range(self.depth) if self.mimetic_layers is None else self.mimetic_layers
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, StateSpaceBlock)
            _draw_mixer(block.mixer, self.depth, generator)
            # Mimetic parts draw no random numbers, so other weights do not depend on
            # `mimetic_layers`.
            if layer in layers:
                _apply_mimetic_parts(block.mixer, self)
        return model

    def build_empty(self) -> "StateSpaceModel":
        return StateSpaceModel(self)

    def summary(self) -> str:
        states = f"{self.version} with {self.num_states} states"
        return f"{self.depth} blocks of width {self.dim}, {states}"

    @property
    def inner_dim(self) -> int:
        """Number of channels in a Mamba mixer, which is twice the width of the model."""
        return _EXPANSION * self.dim


def causal_convolution(values: Tokens, taps: nn.Conv1d) -> Tokens:
    """Convolve each channel over the current token and the three tokens before it.

    The last of the four taps is applied to the current token.
    """
    return taps(F.pad(values.transpose(1, 2), (_TAPS - 1, 0))).transpose(1, 2)


class Mamba1Mixer(nn.Module):
    """Token mixer of Mamba 1, which maps tokens u to W3 (S(x) silu(z)) with (x, z) = W1 u.

    Here, W1 and W3 are the projections before and after the mixing of tokens. S is a convolution,
    followed by silu and a scan (the recurrence over tokens).

    Source: https://arxiv.org/abs/2312.00752. Equation 3.35 of Trockman's thesis "Mimetic
    initialization" (2025) omits the skip connection D x of the scan and the norm of the block. Both
    are included here.
    """

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        channels, states = config.inner_dim, config.num_states
        self.states, self.rank = states, -(-config.dim // 16)
        self.in_proj = nn.Linear(config.dim, 2 * channels, bias=False)
        self.conv = nn.Conv1d(channels, channels, _TAPS, groups=channels)
        self.selection = nn.Linear(channels, self.rank + 2 * states, bias=False)
        self.step = nn.Linear(self.rank, channels)
        # log(-A). It is stored as a vector, because vectors have no weight decay. Weight decay
        # would pull A to -1.
        self.log_decay = nn.Parameter(torch.empty(channels * states))
        self.scan_skip = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, config.dim, bias=False)

    @property
    def step_weight(self) -> Tensor:
        """Return the second matrix of the low-rank map from tokens to step sizes.

        The matrix has the shape channels x rank.
        """
        return self.step.weight

    @property
    def step_bias(self) -> Tensor:
        return self.step.bias

    @property
    def keys_weight(self) -> Float[Tensor, "states channels"]:
        """Return a view of W_B, the weights that compute the keys B."""
        return self.selection.weight[self.rank : self.rank + self.states]

    @property
    def queries_weight(self) -> Float[Tensor, "states channels"]:
        """Return a view of W_C, the weights that compute the queries C."""
        return self.selection.weight[self.rank + self.states :]

    def forward(self, tokens: Tokens) -> Tokens:
        values, gate = self.in_proj(tokens).chunk(2, -1)
        values = F.silu(causal_convolution(values, self.conv))
        selected = self.selection(values).split((self.rank, self.states, self.states), -1)
        return self.out_proj(self._scan(values, *selected) * F.silu(gate))

    def _scan(self, values: Tokens, low: Tensor, keys: Tensor, queries: Tensor) -> Tokens:
        steps = F.softplus(self.step(low).float())
        # Compute in float32. In bfloat16, sums over hundreds of tokens would be inexact.
        with disable_autocast(values.device):
            values = values.float()
            decay = -self.log_decay.view(-1, self.states).exp()
            mixed = scan_channels(values, steps, decay, keys.float(), queries.float(), chunk=_CHUNK)
            return mixed + self.scan_skip * values


class Mamba2Mixer(nn.Module):
    """Token mixer of Mamba 2, which maps tokens u to W3 RMSNorm(S(x) silu(z)).

    Here, (z, x, B, C, delta) = W u. The parts x, B and C are convolved and passed through silu. S
    is a scan (the recurrence over tokens), whose step sizes are computed from delta.

    Source: https://arxiv.org/abs/2405.21060, with one group of keys and queries.
    """

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        channels, states = config.inner_dim, config.num_states
        heads = channels // config.head_width
        self.heads, self.states = heads, states
        self.in_sizes = (channels, channels + 2 * states, heads)
        self.in_proj = nn.Linear(config.dim, sum(self.in_sizes), bias=False)
        convolved = channels + 2 * states
        self.conv = nn.Conv1d(convolved, convolved, _TAPS, groups=convolved)
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.log_decay = nn.Parameter(torch.empty(heads))
        self.scan_skip = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(channels, eps=NORM_EPS)
        self.out_proj = nn.Linear(channels, config.dim, bias=False)

    @property
    def step_weight(self) -> Float[Tensor, "heads dim"]:
        """Return a view of the weights that compute the step size of each head."""
        return self.in_proj.weight[-self.heads :]

    @property
    def keys_weight(self) -> Float[Tensor, "states dim"]:
        """Return a view of W_B, the weights that compute the keys B."""
        return self.in_proj.weight[-self.heads - 2 * self.states : -self.heads - self.states]

    @property
    def queries_weight(self) -> Float[Tensor, "states dim"]:
        """Return a view of W_C, the weights that compute the queries C."""
        return self.in_proj.weight[-self.heads - self.states : -self.heads]

    def forward(self, tokens: Tokens) -> Tokens:
        gate, inputs, steps = self.in_proj(tokens).split(self.in_sizes, -1)
        inputs = F.silu(causal_convolution(inputs, self.conv))
        channels = inputs.shape[-1] - 2 * self.states
        values, keys, queries = inputs.split((channels, self.states, self.states), -1)
        mixed = self._scan(values, steps, keys, queries)
        return self.out_proj(self.norm(mixed * F.silu(gate)))

    def _scan(self, values: Tokens, steps: Tensor, keys: Tensor, queries: Tensor) -> Tokens:
        with disable_autocast(values.device):
            steps = F.softplus(steps.float() + self.step_bias)
            heads = values.float().unflatten(-1, (self.heads, -1))
            decay = -self.log_decay.exp()
            mixed = scan_heads(heads, steps, decay, keys.float(), queries.float(), chunk=_CHUNK)
            return (mixed + self.scan_skip[:, None] * heads).flatten(-2)


Mixer = Mamba1Mixer | Mamba2Mixer


class StateSpaceBlock(nn.Module):
    """A Mamba mixer after a norm, with a skip connection: x + mixer(RMSNorm(x))."""

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        mixer_class = Mamba1Mixer if config.version == "mamba1" else Mamba2Mixer
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.mixer: Mixer = mixer_class(config)

    def forward(self, tokens: Tokens) -> Tokens:
        return tokens + self.mixer(self.norm(tokens))


class StateSpaceModel(EncoderModule):
    """Language model of Mamba 1 or Mamba 2 blocks. Create it with `build_encoder`."""

    config: StateSpaceConfig

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.num_tokens, config.dim)
        self.blocks = nn.ModuleList(StateSpaceBlock(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)

    def forward(
        self, tokens: Int64[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens choices"]:
        """Return the logits of the next token at each position.

        The logits at a position depend on the token at this position and on all earlier tokens.
        """
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.embedding.weight.T


def _draw_mixer(mixer: Mixer, depth: int, generator: Generator) -> None:
    """Draw the weights of a Mamba mixer in place as the authors of Mamba do.

    The weights of the output projection are divided by sqrt(depth), where depth is the number of
    blocks.
    """
    init_uniform_(mixer.in_proj, generator)
    init_uniform_(mixer.out_proj, generator)
    mixer.out_proj.weight.div_(math.sqrt(depth))
    init_uniform_(mixer.conv, generator)
    if isinstance(mixer, Mamba1Mixer):
        init_uniform_(mixer.selection, generator)
        # The bias is drawn below.
        nn.init.uniform_(
            mixer.step.weight, -(mixer.rank**-0.5), mixer.rank**-0.5, generator=generator
        )
        rates = torch.arange(1.0, mixer.states + 1).repeat(len(mixer.scan_skip))
    else:
        rates = torch.empty(mixer.heads).uniform_(1, _LARGEST_DECAY, generator=generator)
    mixer.log_decay.copy_(rates.log())
    low, high = math.log(_SMALLEST_STEP), math.log(_LARGEST_STEP)
    steps = torch.empty_like(mixer.step_bias).uniform_(low, high, generator=generator).exp()
    mixer.step_bias.copy_(steps.expm1().log())
    mixer.scan_skip.fill_(1)


def _apply_mimetic_parts(mixer: Mixer, config: StateSpaceConfig) -> None:
    if _DECAY in config.mimetic:
        mixer.log_decay.mul_(-_EXPONENT)
        if config.state_decay == "constant":
            mixer.log_decay.fill_(-_EXPONENT)
    if _STEP in config.mimetic:
        mixer.step_weight.mul_(_STEP_FACTOR)
        mixer.step_bias.fill_(_UNIT_STEP_BIAS)
    if _CORRELATION in config.mimetic:
        mixer.queries_weight.add_(mixer.keys_weight).div_(2)
    if _CONVOLUTION in config.mimetic:
        for parameter in mixer.conv.parameters():
            parameter.zero_()
        mixer.conv.weight[..., -1].fill_(1)


def scan_channels(
    inputs: PerChannel,
    steps: PerChannel,
    decay: Float[Tensor, "channels states"],
    keys: PerState,
    queries: PerState,
    *,
    chunk: int,
) -> PerChannel:
    """Compute the output y of Mamba 1's state space model by its recurrence over tokens.

    In each channel, the recurrence is h_t = exp(Delta_t A) h_(t-1) + Delta_t x_t B_t, and the
    output is y_t = C_t . h_t. The recurrence is ten times faster than multiplying x by the matrices
    that `channel_mixing` returns, because each channel has its own matrix.

    Args:
        inputs: Inputs x (batch x tokens x channels).
        steps: Positive step sizes Delta (batch x tokens x channels).
        decay: Decay A (channels x states), at most 0.
        keys: Keys B (batch x tokens x states).
        queries: Queries C (batch x tokens x states).
        chunk: Number of tokens whose states are in memory at the same time.
    """
    outputs = []
    state = inputs.new_zeros(len(inputs), *decay.shape)
    parts = (value.split(chunk, 1) for value in (inputs, steps, keys, queries))
    for values, step, key, query in zip(*parts, strict=True):
        remaining = (step[..., None] * decay).exp()
        updates = (step * values)[..., None] * key[:, :, None]
        states = []
        for share, update in zip(remaining.unbind(1), updates.unbind(1), strict=True):
            state = torch.addcmul(update, share, state)
            states.append(state)
        outputs.append(torch.einsum("btcn,btn->btc", torch.stack(states, 1), query))
    return torch.cat(outputs, 1)


def channel_mixing(
    steps: PerChannel, decay: Float[Tensor, "channels states"], keys: PerState, queries: PerState
) -> Float[Tensor, "batch channels tokens tokens"]:
    """Return the matrix M of each channel of Mamba 1 that maps inputs x to outputs y = M x.

    The rows are output tokens, and the columns are input tokens.

    Args:
        steps: Positive step sizes Delta.
        decay: Decay A, at most 0.
        keys: Keys B.
        queries: Queries C.
    """
    logs = (steps[..., None] * decay).cumsum(1)
    between = _masked_exp(logs[:, :, None] - logs[:, None])  # batch outputs inputs channels states
    products = torch.einsum("bin,bjn,bijcn->bcij", queries, keys, between)
    return products * steps.transpose(1, 2)[:, :, None]


def scan_heads(
    inputs: Float[Tensor, "batch tokens heads width"],
    steps: PerHead,
    decay: Float[Tensor, " heads"],
    keys: PerState,
    queries: PerState,
    *,
    chunk: int,
) -> Float[Tensor, "batch tokens heads width"]:
    """Compute the output y of Mamba 2's state space model in chunks of tokens.

    Within a chunk, inputs are multiplied by the matrix that `head_mixing` returns. A recurrence
    carries the state from chunk to chunk. With a single chunk, the recurrence is not used. With
    chunks of one token, only the recurrence is used.

    Args:
        inputs: Inputs x.
        steps: Positive step sizes Delta.
        decay: Decay A, at most 0.
        keys: Keys B.
        queries: Queries C.
        chunk: Number of tokens in a chunk. The memory grows with its square.
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
        shares = (logs[:, -1:] - logs).exp() * step
        update = torch.einsum("bjhp,bjn->bhpn", shares[..., None] * values, key)
        state = logs[:, -1].exp()[..., None, None] * state + update
    return torch.cat(outputs, 1)


def head_mixing(
    steps: PerHead, decay: Float[Tensor, " heads"], keys: PerState, queries: PerState
) -> Float[Tensor, "batch heads tokens tokens"]:
    """Return the matrix M of each head of Mamba 2 that maps inputs x to outputs y = M x.

    The rows are output tokens, and the columns are input tokens.

    Args:
        steps: Positive step sizes Delta.
        decay: Decay A, at most 0.
        keys: Keys B.
        queries: Queries C.
    """
    logs = (steps * decay).cumsum(1)
    between = _masked_exp(logs[:, :, None] - logs[:, None])  # batch outputs inputs heads
    products = torch.einsum("bin,bjn->bij", queries, keys)[..., None] * between
    return (products * steps[:, None]).permute(0, 3, 1, 2)


def _masked_exp(logs: Tensor) -> Tensor:
    """Return exp(logs), with 0 where the input token is later than the output token.

    The shape of `logs` is (batch, output tokens, input tokens, ...).
    """
    tokens = logs.shape[1]
    is_later = torch.ones(tokens, tokens, dtype=torch.bool, device=logs.device).triu(1)
    # Mask before exp, because exp could overflow for inputs later than the output.
    is_later = is_later.view(1, tokens, tokens, *[1] * (logs.ndim - 3))
    return logs.masked_fill(is_later, -math.inf).exp()
