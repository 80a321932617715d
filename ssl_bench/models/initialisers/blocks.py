"""Initial weights of a block as pure functions of its sizes and a generator.

All matrices follow the row-vector convention y = x W of the papers; `nn.Linear.weight` holds W
transposed, see `ssl_bench.models.build`. They are float64, so that rounding happens once, at the
end. Biases start at 0 everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Generator, Tensor, nn

from ssl_bench.models.initialisers.choice import make_initialiser
from ssl_bench.models.initialisers.matrices import (
    noise_matrix,
    noisy_identity_heads,
    normal,
    truncated_normal,
    uniform_orthogonal,
    xavier_uniform,
)
from ssl_bench.models.initialisers.options import MimeticOptions, NoOptions, SkiplessOptions


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of one attention sub-block; the columns of the first three are the heads in turn."""

    query: Float64[Tensor, "dim dim"]
    key: Float64[Tensor, "dim dim"]
    value: Float64[Tensor, "dim dim"]
    output: Float64[Tensor, "dim dim"]


@dataclass(frozen=True)
class MlpWeights:
    """Weights of one MLP."""

    first: Float64[Tensor, "dim hidden"]
    second: Float64[Tensor, "hidden dim"]


@runtime_checkable
class Initialiser(Protocol):
    """Draws the weights of one block; its fields are its hyperparameters."""

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights: ...

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights: ...


@dataclass(frozen=True)
class DefaultInit(NoOptions):
    """Truncated normal of standard deviation 0.02, as in official DINO and timm."""

    def attention(
        self,
        dim: int,
        num_heads: int,  # noqa: ARG002 - the same for any number of heads
        generator: Generator,
    ) -> AttentionWeights:
        query, key, value, output = (self.draw(dim, dim, generator) for _ in range(4))
        return AttentionWeights(query, key, value, output)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        return MlpWeights(
            first=self.draw(dim, hidden_dim, generator),
            second=self.draw(hidden_dim, dim, generator),
        )

    def draw(self, rows: int, cols: int, generator: Generator) -> Float64[Tensor, "{rows} {cols}"]:
        """One matrix; all are drawn alike, each on its own."""
        return truncated_normal(rows, cols, generator)


@dataclass(frozen=True)
class SkiplessInit(SkiplessOptions):
    """The initialisation that lets an encoder without skips train."""

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        query, key = noisy_identity_heads(
            dim, num_heads, generator, alpha=self.alpha, beta=self.beta, noise=self.noise
        )
        if self.cancel_logit_scale:
            root = (dim // num_heads) ** 0.25
            query, key = query * root, key * root
        left, _, right = torch.linalg.svd(normal(dim, dim, generator))
        return AttentionWeights(query, key, value=self.c * left, output=self.c * right)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        return MlpWeights(
            first=uniform_orthogonal(dim, hidden_dim, generator, gain=self.suo_gain),
            second=uniform_orthogonal(hidden_dim, dim, generator, gain=self.suo_gain),
        )


@dataclass(frozen=True)
class MimeticInit(MimeticOptions):
    """Attention that looks trained."""

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        query, key = noisy_identity_heads(
            dim, num_heads, generator, alpha=self.alpha1, beta=self.beta1, noise=self.noise
        )
        noise = noise_matrix(dim, generator, self.noise)
        product = self.alpha2 * noise - self.beta2 * torch.eye(dim, dtype=noise.dtype)
        left, scales, right = torch.linalg.svd(product)
        roots = scales.sqrt()
        drawn = AttentionWeights(query, key, value=left * roots, output=roots[:, None] * right)
        if self.parts == "both":
            return drawn
        plain = DefaultInit().attention(dim, num_heads, _own_generator(noise))
        if self.parts == "qk":
            return replace(drawn, value=plain.value, output=plain.output)
        return replace(drawn, query=plain.query, key=plain.key)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        return DefaultInit().mlp(dim, hidden_dim, generator)


@dataclass(frozen=True)
class XavierInit(DefaultInit):
    """Uniform of variance 2 / (inputs + outputs), each of the six matrices on its own.

    Source: Glorot and Bengio (2010), as for the ViT of Zhang and Martens, "Orthogonal
    Self-Attention", appendix D.
    """

    def draw(self, rows: int, cols: int, generator: Generator) -> Float64[Tensor, "{rows} {cols}"]:
        return xavier_uniform(rows, cols, generator)


@dataclass(frozen=True)
class OsaInit(NoOptions):
    """Orthogonal self-attention that starts near the identity, for two heads or more.

    Per head [W_Q, W_K] is uniform among the dim x 2 d_v matrices of orthonormal columns, W_V and
    W_O^T among those of d_v columns. The MLP as without skips, SUO.

    Source: Zhang and Martens, "Orthogonal Self-Attention", section 4; the small alpha of 4.3 is
    `ssl_bench.models.attention.OrthogonalAttention`'s own.
    """

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        width = dim // num_heads
        pairs, values, outputs = (
            [uniform_orthogonal(dim, cols, generator, gain=False) for _ in range(num_heads)]
            for cols in (2 * width, width, width)
        )
        return AttentionWeights(
            query=torch.cat([pair[:, :width] for pair in pairs], dim=1),
            key=torch.cat([pair[:, width:] for pair in pairs], dim=1),
            value=torch.cat(values, dim=1),
            output=torch.cat(outputs, dim=1).T,
        )

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        return SkiplessInit().mlp(dim, hidden_dim, generator)


@dataclass(frozen=True)
class ShiftedInputs:
    """As another initialiser, but the first matrix of an MLP sees its inputs shifted.

    Attributes:
        mean: Added to all entries of the first matrix, of either sign.
        input_std: Deviation of the number that an input channel adds towards all hidden units.

    Source: Trockman, "Mimetic initialization" (2025), section 3.4, equations 3.40 and 3.39, where
    y = W x: its 1_p b_n^T repeats a row of the n inputs for the p hidden units. "N(0, sigma I)" is
    read as sigma, not its root, the deviation.
    """

    plain: Initialiser
    mean: float
    input_std: float

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        return self.plain.attention(dim, num_heads, generator)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        drawn = self.plain.mlp(dim, hidden_dim, generator)
        of_inputs = normal(dim, 1, _own_generator(drawn.first))
        return replace(drawn, first=drawn.first + self.mean + self.input_std * of_inputs)


def _own_generator(drawn: Float64[Tensor, "rows cols"]) -> Generator:
    """Another one for what is drawn besides, so that all that is drawn later stays as it is."""
    return Generator().manual_seed(int(drawn[0, 0].view(torch.int64)))


_Kind = DefaultInit | SkiplessInit | MimeticInit | XavierInit | OsaInit
INITIALISERS: dict[str, type[_Kind]] = {
    "default": DefaultInit,
    "skipless": SkiplessInit,
    "mimetic": MimeticInit,
    "xavier": XavierInit,
    "osa": OsaInit,
}


def initialiser_of(name: str, options: Mapping[str, Any]) -> Initialiser:
    """The initialiser of that name.

    Raises:
        ConfigurationError: An unknown name or option, or a value of the wrong type.
    """
    return make_initialiser(INITIALISERS, name, options)


@torch.no_grad()
def set_block(block: nn.Module, initialiser: Initialiser, generator: Generator) -> None:
    """Draw attention and MLP of a block that names its layers as DINO and timm do; no bias stays.

    Cost: that of the initialiser, see `ssl_bench.models.initialisers.matrices`.
    """
    # Any: ours and those of timm's families have no class in common.
    parts: Any = block
    dim, hidden_dim = parts.mlp.fc1.in_features, parts.mlp.fc1.out_features
    attention = initialiser.attention(dim, parts.attn.num_heads, generator)
    mlp = initialiser.mlp(dim, hidden_dim, generator)
    inputs = torch.cat([attention.query, attention.key, attention.value], dim=1)
    linears = (parts.attn.qkv, parts.attn.proj, parts.mlp.fc1, parts.mlp.fc2)
    matrices = (inputs, attention.output, mlp.first, mlp.second)
    for linear, matrix in zip(linears, matrices, strict=True):
        linear.weight.copy_(matrix.T)
        if linear.bias is not None:
            linear.bias.zero_()
