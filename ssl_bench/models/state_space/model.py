"""A Mamba that names the next token: embedding, blocks with skips, norm, and the embedding."""

from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_bench.models.state_space.config import StateSpaceConfig
from ssl_bench.models.state_space.mixers import NORM_EPS, Mamba1Mixer, Mamba2Mixer, Mixer, Tokens


class StateSpaceBlock(nn.Module):
    """x + mixer(RMSNorm x)."""

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        kind = Mamba1Mixer if config.version == "mamba1" else Mamba2Mixer
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.mixer: Mixer = kind(config)

    def forward(self, tokens: Tokens) -> Tokens:
        return tokens + self.mixer(self.norm(tokens))


class StateSpaceModel(nn.Module):
    """Mamba 1 or 2; `build_encoder` makes one with initialised weights."""

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
