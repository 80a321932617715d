"""Mamba 1 and 2 that name the next token, and how they start.

A block mixes tokens by a short convolution, then a state space. They start as their authors let
them, and, if asked, with the four pieces of mimetic initialisation, which make a layer similar to
linear attention whose queries are its keys:

1. decay: A = -a^-8 instead of -a, so that next to nothing is forgotten. Where a is 1, which is one
   state of N in Mamba 1 and heads near it in Mamba 2, A stays at -1; `state_decay=constant` has
   A = -exp(-8) everywhere.
2. step: Delta = softplus(b) = 1 with b = log(e - 1), and weights of a hundredth.
3. correlation: W_C becomes the mean of W_C and W_B.
4. convolution: the last tap is 1, all others and the bias 0. The first tap would delay by three.

Source: section 3.3.2 of Trockman's thesis (2025), c = 8. Guesses: the thesis writes
A = -exp(-c A_log), which could stay so while A_log is trained; here A_log is changed once. "W_Delta
near 0" is a hundredth of what was drawn, in Mamba 1 of the factor next to Delta alone, since two
factors of zero would never be trained.

The scans at the end are selective state spaces as a product with a T x T matrix, as a recurrence,
and between the two.
For a channel with decay A < 0 and steps Delta, keys B and queries C of every token:

    h_t = exp(Delta_t A) h_(t-1) + Delta_t x_t B_t,    y_t = C_t . h_t.

Unrolled, y = M x with M_ij = Delta_j sum_n C_in B_jn exp(A_n (Delta_(j+1) + ... + Delta_i)) for
j <= i, and 0 for later j.

Source: https://arxiv.org/abs/2312.00752 and https://arxiv.org/abs/2405.21060. Equations 3.27 and
3.28 of Trockman's thesis delay the output by one token, and the mask of 3.34, 1{i <= j}, is that of
the transpose; an output here sees its own token and those before it.
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
from ssl_bench.models.initialisers import draw_uniform
from ssl_bench.models.vit import EncoderModule
from ssl_bench.system.device import disable_autocast

Version = Literal["mamba1", "mamba2"]
Piece = Literal["decay", "step", "correlation", "convolution"]
StateDecay = Literal["power", "constant"]

NORM_EPS = 1e-5
# Width of a mixer over that of the model.
_EXPANSION = 2
_TAPS = 4
_CHUNK = 64
_DECAY, _STEP, _CORRELATION, _CONVOLUTION = get_args(Piece)
_EXPONENT = 8.0
_EMBEDDING_STD = 0.02
# Of what is drawn for the weights of the steps.
_STEP_SHARE = 0.01
# softplus of it is 1.
_UNIT_STEP_BIAS = math.log(math.e - 1)
_LEAST_STEP, _LARGEST_STEP = 0.001, 0.1
# Heads of Mamba 2 have decays from 1 to this.
_LARGEST_DECAY = 16.0

Tokens = Float[Tensor, "batch tokens dim"]
Selected = Float[Tensor, "batch tokens states"]
PerChannel = Float[Tensor, "batch tokens channels"]
PerHead = Float[Tensor, "batch tokens heads"]


@dataclass(frozen=True)
class StateSpaceConfig(EncoderConfig):
    """Architecture and initialisation of a Mamba, which reads tokens and names the next one.

    Args:
        version: "mamba1" has a state and a step a channel, "mamba2" a step and a decay a head.
        num_states: Numbers that a channel keeps of the past. Mamba 1 takes 32 in the thesis.
        head_width: Channels of a head of Mamba 2; Mamba 1 has no heads.
        num_tokens: Different ones, those that are no letters included.
        mimetic: Pieces of mimetic initialisation, see above; none is the
            architecture's own start.
        mimetic_layers: That have them, from 0; None stands for all.
        state_decay: What piece "decay" starts from: "power" raises the drawn decay to the power
            -8, which leaves a decay of 1 as it is; "constant" is exp(-8) everywhere.

    Source: chapter 3.3 of Trockman's thesis (2025); sizes there in section 3.3.4.
    """

    kind = "state_space"

    version: Version = "mamba2"
    dim: Width = 1024
    depth: Depth = 2
    num_states: Count = 128
    head_width: Width = 64
    num_tokens: Count = 28
    mimetic: Annotated[Sequence[Piece], ListLength(0, 4)] = ()
    mimetic_layers: Sequence[CountOrZero] | None = None
    state_decay: StateDecay = "power"

    # There are no images.
    image_size = 0
    patch_size = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # In whatever order they are given, equal configurations shall be equal.
        pieces = tuple(piece for piece in get_args(Piece) if piece in self.mimetic)
        object.__setattr__(self, "mimetic", pieces)
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
            _draw(block.mixer, self.depth, generator)
            # The changes draw no numbers, so all other weights do not depend on them.
            if layer in layers:
                _mimic(block.mixer, self)
        return model

    def build_empty(self) -> "StateSpaceModel":
        return StateSpaceModel(self)

    def summary(self) -> str:
        states = f"{self.version} with {self.num_states} states"
        return f"{self.depth} blocks of width {self.dim}, {states}"

    @property
    def inner_dim(self) -> int:
        """Number of channels in a mixer."""
        return _EXPANSION * self.dim


def convolved(values: Tokens, taps: nn.Conv1d) -> Tokens:
    """Each channel of a token from its own last values; the last tap is for the token itself."""
    return taps(F.pad(values.transpose(1, 2), (_TAPS - 1, 0))).transpose(1, 2)


class Mamba1Mixer(nn.Module):
    """W3 (S(x) silu(z)) with (x, z) = W1 u; S has a convolution, silu, and a scan over channels.

    Source: https://arxiv.org/abs/2312.00752. Equation 3.35 of the thesis leaves out the skip `D x`
    of the scan, which is here, and writes the norm of the block nowhere.
    """

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        channels, states = config.inner_dim, config.num_states
        self.states, self.rank = states, -(-config.dim // 16)
        self.in_proj = nn.Linear(config.dim, 2 * channels, bias=False)
        self.conv = nn.Conv1d(channels, channels, _TAPS, groups=channels)
        self.selection = nn.Linear(channels, self.rank + 2 * states, bias=False)
        self.step = nn.Linear(self.rank, channels)
        # One vector, so that no optimizer decays it: zeros would stand for a decay of -1.
        self.log_decay = nn.Parameter(torch.empty(channels * states))
        self.scan_skip = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, config.dim, bias=False)

    @property
    def step_weight(self) -> Tensor:
        """From the `rank` numbers of a token to the steps of its channels."""
        return self.step.weight

    @property
    def step_bias(self) -> Tensor:
        return self.step.bias

    @property
    def keys_weight(self) -> Float[Tensor, "states channels"]:
        """W_B; a view."""
        return self.selection.weight[self.rank : self.rank + self.states]

    @property
    def queries_weight(self) -> Float[Tensor, "states channels"]:
        """W_C; a view."""
        return self.selection.weight[self.rank + self.states :]

    def forward(self, tokens: Tokens) -> Tokens:
        values, gate = self.in_proj(tokens).chunk(2, -1)
        values = F.silu(convolved(values, self.conv))
        selected = self.selection(values).split((self.rank, self.states, self.states), -1)
        return self.out_proj(self._scan(values, *selected) * F.silu(gate))

    def _scan(self, values: Tokens, low: Tensor, keys: Tensor, queries: Tensor) -> Tokens:
        steps = F.softplus(self.step(low).float())
        # Sums over hundreds of tokens want more than bfloat16.
        with disable_autocast(values.device):
            values = values.float()
            decay = -self.log_decay.view(-1, self.states).exp()
            mixed = scan_channels(values, steps, decay, keys.float(), queries.float(), chunk=_CHUNK)
            return mixed + self.scan_skip * values


class Mamba2Mixer(nn.Module):
    """W3 RMSNorm(S(x) silu(z)) with (z, x, B, C, delta) = W u; x, B and C pass the convolution.

    Source: https://arxiv.org/abs/2405.21060, with one group of keys and queries.
    """

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        channels, states = config.inner_dim, config.num_states
        heads = channels // config.head_width
        self.heads, self.states = heads, states
        self.in_sizes = (channels, channels + 2 * states, heads)
        self.in_proj = nn.Linear(config.dim, sum(self.in_sizes), bias=False)
        passing = channels + 2 * states
        self.conv = nn.Conv1d(passing, passing, _TAPS, groups=passing)
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.log_decay = nn.Parameter(torch.empty(heads))
        self.scan_skip = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(channels, eps=NORM_EPS)
        self.out_proj = nn.Linear(channels, config.dim, bias=False)

    @property
    def step_weight(self) -> Float[Tensor, "heads dim"]:
        """A view."""
        return self.in_proj.weight[-self.heads :]

    @property
    def keys_weight(self) -> Float[Tensor, "states dim"]:
        """W_B; a view."""
        return self.in_proj.weight[-self.heads - 2 * self.states : -self.heads - self.states]

    @property
    def queries_weight(self) -> Float[Tensor, "states dim"]:
        """W_C; a view."""
        return self.in_proj.weight[-self.heads - self.states : -self.heads]

    def forward(self, tokens: Tokens) -> Tokens:
        gate, inside, steps = self.in_proj(tokens).split(self.in_sizes, -1)
        inside = F.silu(convolved(inside, self.conv))
        channels = inside.shape[-1] - 2 * self.states
        values, keys, queries = inside.split((channels, self.states, self.states), -1)
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
    """x + mixer(RMSNorm x)."""

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        kind = Mamba1Mixer if config.version == "mamba1" else Mamba2Mixer
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.mixer: Mixer = kind(config)

    def forward(self, tokens: Tokens) -> Tokens:
        return tokens + self.mixer(self.norm(tokens))


class StateSpaceModel(EncoderModule):
    """Mamba 1 or 2; `build_encoder` makes one with initialised weights."""

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
        """Logits of the token after each; none sees a later one."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.embedding.weight.T


def _draw(mixer: Mixer, depth: int, generator: Generator) -> None:
    """The start of the architectures' authors; what writes into the skip shrinks with depth."""
    draw_uniform(mixer.in_proj, generator)
    draw_uniform(mixer.out_proj, generator)
    mixer.out_proj.weight.div_(math.sqrt(depth))
    draw_uniform(mixer.conv, generator)
    if isinstance(mixer, Mamba1Mixer):
        draw_uniform(mixer.selection, generator)
        # Without its bias, which has a range of its own.
        nn.init.uniform_(
            mixer.step.weight, -(mixer.rank**-0.5), mixer.rank**-0.5, generator=generator
        )
        decays = torch.arange(1.0, mixer.states + 1).repeat(len(mixer.scan_skip))
    else:
        decays = torch.empty(mixer.heads).uniform_(1, _LARGEST_DECAY, generator=generator)
    mixer.log_decay.copy_(decays.log())
    low, high = math.log(_LEAST_STEP), math.log(_LARGEST_STEP)
    steps = torch.empty_like(mixer.step_bias).uniform_(low, high, generator=generator).exp()
    mixer.step_bias.copy_(steps.expm1().log())
    mixer.scan_skip.fill_(1)


def _mimic(mixer: Mixer, config: StateSpaceConfig) -> None:
    if _DECAY in config.mimetic:
        mixer.log_decay.mul_(-_EXPONENT)
        if config.state_decay == "constant":
            mixer.log_decay.fill_(-_EXPONENT)
    if _STEP in config.mimetic:
        mixer.step_weight.mul_(_STEP_SHARE)
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
