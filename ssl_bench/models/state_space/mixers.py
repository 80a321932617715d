"""What mixes the tokens in a block of Mamba 1 and 2: a short convolution, then a state space."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.matrix_functions.precision import without_autocast
from ssl_bench.models.state_space.config import StateSpaceConfig
from ssl_bench.models.state_space.scan import scan_channels, scan_heads

NORM_EPS = 1e-5
_TAPS = 4
_CHUNK = 64

Tokens = Float[Tensor, "batch tokens dim"]


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
        with without_autocast(values.device):
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
        with without_autocast(values.device):
            steps = F.softplus(steps.float() + self.step_bias)
            heads = values.float().unflatten(-1, (self.heads, -1))
            decay = -self.log_decay.exp()
            mixed = scan_heads(heads, steps, decay, keys.float(), queries.float(), chunk=_CHUNK)
            return (mixed + self.scan_skip[:, None] * heads).flatten(-2)


Mixer = Mamba1Mixer | Mamba2Mixer
