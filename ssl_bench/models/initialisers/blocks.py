"""Initial weights of a block as pure functions of its sizes and a generator.

All matrices follow the row-vector convention y = x W of the papers; `nn.Linear.weight` holds W
transposed, see `set_block`. They are float64, so that rounding happens once, at the end. Biases
start at 0 everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import scipy.linalg
import torch
from jaxtyping import Float64
from torch import Generator, Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.initialisers.options import (
    MimeticOptions,
    NoOptions,
    SkiplessOptions,
    make_initialiser,
)

Model = TypeVar("Model", bound=nn.Module)
Matrix = Float64[Tensor, "{rows} {cols}"]
_DEFAULT_STD = 0.02
# Keeps the factors of a zero matrix zero instead of 0 / 0.
_TINY = 1e-300


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


@dataclass(frozen=True)
class DefaultInit(NoOptions):
    """Truncated normal of standard deviation 0.02, cut at -2 and 2 as in official DINO and timm.

    Those are absolute bounds, which 0.02 never reaches. All others are subclasses.
    """

    def attention(
        self,
        dim: int,
        num_heads: int,  # noqa: ARG002 - the same for any number of heads
        generator: Generator,
    ) -> AttentionWeights:
        query, key, value, output = (self.draw(dim, dim, generator) for _ in range(4))
        return AttentionWeights(query, key, value, output)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        first = self.draw(dim, hidden_dim, generator)
        return MlpWeights(first, second=self.draw(hidden_dim, dim, generator))

    def draw(self, rows: int, cols: int, generator: Generator) -> Matrix:
        """One matrix; all are drawn alike, each on its own."""
        weights = torch.empty(rows, cols, dtype=torch.float64)
        return nn.init.trunc_normal_(weights, std=_DEFAULT_STD, generator=generator)


@dataclass(frozen=True)
class SkiplessInit(SkiplessOptions, DefaultInit):
    """The initialisation that lets an encoder without skips train."""

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        query, key = _noisy_identity_heads(
            dim, num_heads, generator, alpha=self.alpha, beta=self.beta, noise=self.noise
        )
        if self.cancel_logit_scale:
            root = (dim // num_heads) ** 0.25
            query, key = query * root, key * root
        left, _, right = torch.linalg.svd(_normal(dim, dim, generator))
        return AttentionWeights(query, key, value=self.c * left, output=self.c * right)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        return MlpWeights(
            first=uniform_orthogonal(dim, hidden_dim, generator, gain=self.suo_gain),
            second=uniform_orthogonal(hidden_dim, dim, generator, gain=self.suo_gain),
        )


@dataclass(frozen=True)
class MimeticInit(MimeticOptions, DefaultInit):
    """Attention that looks trained."""

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        query, key = _noisy_identity_heads(
            dim, num_heads, generator, alpha=self.alpha1, beta=self.beta1, noise=self.noise
        )
        noise = _noise_matrix(dim, generator, self.noise)
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


@dataclass(frozen=True)
class XavierInit(DefaultInit):
    """Uniform of variance 2 / (inputs + outputs), each of the six matrices on its own.

    Source: Glorot and Bengio (2010), as for the ViT of Zhang and Martens, "Orthogonal
    Self-Attention", appendix D.
    """

    def draw(self, rows: int, cols: int, generator: Generator) -> Matrix:
        return _uniform(rows, cols, generator) * (2 / (rows + cols)) ** 0.5


@dataclass(frozen=True)
class OsaInit(DefaultInit):
    """Orthogonal self-attention that starts near the identity, for two heads or more.

    Per head [W_Q, W_K] is uniform among the dim x 2 d_v matrices of orthonormal columns, W_V and
    W_O^T among those of d_v columns. The MLP as without skips, SUO.

    Source: Zhang and Martens, "Orthogonal Self-Attention", section 4; the small alpha of 4.3 is
    `ssl_bench.models.orthogonal.attention.OrthogonalAttention`'s own.
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
class ShiftedInputs(DefaultInit):
    """As another initialiser, but the first matrix of an MLP sees its inputs shifted.

    Attributes:
        mean: Added to all entries of the first matrix, of either sign.
        input_std: Deviation of the number that an input channel adds towards all hidden units.

    Source: Trockman, "Mimetic initialization" (2025), section 3.4, equations 3.40 and 3.39, where
    y = W x: its 1_p b_n^T repeats a row of the n inputs for the p hidden units. "N(0, sigma I)" is
    read as sigma, not its root, the deviation.
    """

    plain: DefaultInit
    mean: float
    input_std: float

    def attention(self, dim: int, num_heads: int, generator: Generator) -> AttentionWeights:
        return self.plain.attention(dim, num_heads, generator)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        drawn = self.plain.mlp(dim, hidden_dim, generator)
        of_inputs = _normal(dim, 1, _own_generator(drawn.first))
        return replace(drawn, first=drawn.first + self.mean + self.input_std * of_inputs)


def _own_generator(drawn: Float64[Tensor, "rows cols"]) -> Generator:
    """Another one for what is drawn besides, so that all that is drawn later stays as it is."""
    return Generator().manual_seed(int(drawn[0, 0].view(torch.int64)))


INITIALISERS: dict[str, type[DefaultInit]] = {
    "default": DefaultInit,
    "skipless": SkiplessInit,
    "mimetic": MimeticInit,
    "xavier": XavierInit,
    "osa": OsaInit,
}


def initialiser_of(name: str, options: Mapping[str, Any]) -> DefaultInit:
    """The initialiser of that name."""
    return make_initialiser(INITIALISERS, name, options)


@torch.no_grad()
def set_block(block: nn.Module, initialiser: DefaultInit, generator: Generator) -> None:
    """Draw attention and MLP of a block that names its layers as DINO and timm do; no bias stays.

    Cost: that of the initialiser; "skipless" and "mimetic" are cubic in dim, once a head.
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


def _noisy_identity_heads(
    dim: int, num_heads: int, generator: Generator, *, alpha: float, beta: float, noise: str
) -> tuple[Float64[Tensor, "dim dim"], Float64[Tensor, "dim dim"]]:
    """W_Q and W_K whose product is, per head, the best rank-d_h version of alpha Z + beta I.

    Every head has a Z of its own. Cost: cubic in dim, once a head.
    """
    head_dim = dim // num_heads
    queries, keys = [], []
    for _ in range(num_heads):
        product = alpha * _noise_matrix(dim, generator, noise)
        product += beta * torch.eye(dim, dtype=product.dtype)
        query, key = balanced_factors(product, head_dim)
        queries.append(query)
        keys.append(key)
    return torch.cat(queries, dim=1), torch.cat(keys, dim=1)


def balanced_factors(
    matrix: Float64[Tensor, "dim dim"], rank: int
) -> tuple[Float64[Tensor, "dim {rank}"], Float64[Tensor, "dim {rank}"]]:
    """(U sqrt(S), V sqrt(S)) of the `rank` largest singular values of U S V^T.

    From the largest eigenvectors of M^T M: their product is as exact as that of the full SVD, and 8
    times faster at dim 384, rank 64.
    """
    dim = len(matrix)
    gram = (matrix.T @ matrix).numpy()
    squares, right = scipy.linalg.eigh(gram, subset_by_index=[dim - rank, dim - 1])
    roots = torch.from_numpy(squares).clamp(min=_TINY) ** 0.25
    right = torch.from_numpy(right)
    return matrix @ right / roots, right * roots


def uniform_orthogonal(rows: int, cols: int, generator: Generator, *, gain: bool) -> Matrix:
    """A Haar-distributed semi-orthogonal matrix, scaled by max(sqrt(cols / rows), 1) if asked.

    Source: Martens et al., "Rapid training of deep neural networks without skip connections or
    normalization layers", https://arxiv.org/abs/2110.01765 (SUO). rows is the input width here.
    """
    tall = _normal(max(rows, cols), min(rows, cols), generator)
    basis, upper = torch.linalg.qr(tall)
    # Without the signs the distribution would depend on how QR chooses them.
    basis = basis * upper.diagonal().sign()
    weights = basis if rows >= cols else basis.T
    return weights * (max((cols / rows) ** 0.5, 1.0) if gain else 1.0)


def _normal(rows: int, cols: int, generator: Generator) -> Matrix:
    return torch.randn(rows, cols, generator=generator, dtype=torch.float64)


def _uniform(rows: int, cols: int, generator: Generator) -> Matrix:
    unit = torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    return (2 * unit - 1) * 3**0.5


def _noise_matrix(dim: int, generator: Generator, noise: str) -> Float64[Tensor, "{dim} {dim}"]:
    draw = {"normal": _normal, "uniform": _uniform}[noise]
    return draw(dim, dim, generator) / dim**0.5


def skipless_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """Draw the blocks of a ViT as "Cutting the Skip" does, so that it trains without skips.

    What `model.init=skipless` draws for a model of timm, to the bit; the global RNG is left alone.
    All biases of the blocks become 0, and whatever is no attention or MLP stays.

    Args:
        model: Has `blocks`, each with `attn.qkv`, `attn.proj`, `attn.num_heads`, `mlp.fc1` and
            `mlp.fc2`, as a ViT of `timm.create_model` or of this suite.
        seed: Decides what is drawn.
        options: Those of `ssl_bench.models.initialisers.options.SkiplessOptions`.

    Returns:
        The same model.

    Raises:
        ConfigurationError: No such anatomy, or no such option.
    """
    return _drawn(model, "skipless", seed, options)


def mimetic_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """As `skipless_`: attention that looks trained, of "Mimetic initialization", section 3.2."""
    return _drawn(model, "mimetic", seed, options)


def _drawn(model: Model, name: str, seed: int, options: dict[str, Any]) -> Model:
    initialiser, generator = initialiser_of(name, options), Generator().manual_seed(seed)
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
        raise ConfigurationError(
            f"expected a ViT with blocks as timm names them, got {type(model).__name__} without"
        )
    for block in blocks:
        try:
            set_block(block, initialiser, generator)
        except AttributeError as error:
            raise ConfigurationError(
                f"expected blocks with attn.qkv, attn.proj, attn.num_heads, mlp.fc1 and mlp.fc2, "
                f"got {type(block).__name__} of {type(model).__name__}: {error}"
            ) from error
    return model
