"""Initial weights of blocks and of depthwise filters, as pure functions of sizes and a generator.

An initialiser is a dataclass whose fields are its options, `model.init_options`. All is float64, so
that rounding happens once, at the end. Matrices of blocks follow the row-vector convention y = x W
of the papers; `nn.Linear.weight` holds W transposed, see `set_block`. Their biases start at 0.
Pixels of a filter are counted row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

import scipy.linalg
import torch
from jaxtyping import Float64
from torch import Generator, Tensor, nn

from ssl_bench.composition.choices import unknown_name_error
from ssl_bench.composition.fields import Bounds, require_type
from ssl_bench.errors import ConfigurationError

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)
Matrix = Float64[Tensor, "{rows} {cols}"]
Filters = Float64[Tensor, "{count} {size} {size}"]
Covariance = Float64[Tensor, "pixels pixels"]
Number = Annotated[float, Bounds(-1000, 1000)]
Noise = Literal["normal", "uniform"]
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


MlpWeights = tuple[Float64[Tensor, "dim hidden"], Float64[Tensor, "hidden dim"]]


@dataclass(frozen=True)
class DefaultInit:
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
        return self.draw(dim, hidden_dim, generator), self.draw(hidden_dim, dim, generator)

    def draw(self, rows: int, cols: int, generator: Generator) -> Matrix:
        """One matrix; all are drawn alike, each on its own."""
        weights = torch.empty(rows, cols, dtype=torch.float64)
        return nn.init.trunc_normal_(weights, std=_DEFAULT_STD, generator=generator)


@dataclass(frozen=True)
class SkiplessInit(DefaultInit):
    """The initialisation that lets an encoder without skips train.

    Args:
        alpha: Share of noise in W_Q W_K^T of each head.
        beta: Share of the identity in it.
        c: Scale of W_V and of W_O; their product is c^2 times an orthogonal matrix. Behind a
            LayerNorm it leaves the forward pass alone and sets the relative learning rate.
        noise: Distribution of Z, "normal" as the paper states it, or "uniform", which departs from
            it; both of variance 1 / dim.
        cancel_logit_scale: Multiply W_Q and W_K by d_h^1/4 each, so that the attention's usual
            1 / sqrt(d_h) cancels and the logits are those of the paper's formulas, which have no
            such factor. Off: short runs trained better with the factor.
        suo_gain: Scale the orthogonal matrices of the MLP by max(sqrt(out / in), 1).

    Source: Ji et al., "Cutting the Skip", https://arxiv.org/abs/2510.00345, section 5; defaults are
    its values for ViT-S under DINO. Their supervised ViT-B has alpha 2, beta 0.6, c 3. What the
    paper leaves open are the last two options.
    """

    alpha: Number = 1.8
    beta: Number = 1.0
    c: Number = 3.0
    noise: Noise = "normal"
    cancel_logit_scale: bool = False
    suo_gain: bool = True

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
        first = uniform_orthogonal(dim, hidden_dim, generator, gain=self.suo_gain)
        return first, uniform_orthogonal(hidden_dim, dim, generator, gain=self.suo_gain)


@dataclass(frozen=True)
class MimeticInit(DefaultInit):
    """Attention that looks trained: W_Q W_K^T near +I, W_V W_O near -I.

    The thesis needs `position_embedding=sinusoidal` with it. The MLP is that of the default draw.

    Args:
        alpha1: Share of noise in W_Q W_K^T of each head.
        beta1: Share of the identity in it.
        alpha2: Share of noise in W_V W_O over all heads.
        beta2: Share of the negative identity in it; a negative share puts W_V W_O near +I.
        noise: Distribution of Z, "normal" or "uniform", both of variance 1 / dim.
        parts: "qk" draws W_V and W_O, "vo" W_Q and W_K as `default` does; all other weights are
            those of "both".

    Source: Trockman, "Mimetic initialization" (2025), section 3.2, equations 3.12-3.18. Equation
    3.15 prints Sigma without the root for W_V; we take the root on both sides, as the text says.
    """

    alpha1: Number = 0.7
    beta1: Number = 0.7
    alpha2: Number = 0.4
    beta2: Number = 0.4
    noise: Noise = "normal"
    parts: Literal["both", "qk", "vo"] = "both"

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
    `ssl_bench.models.OrthogonalAttention`'s own.
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


@torch.no_grad()
def set_block(
    block: nn.Module,
    initialiser: DefaultInit,
    generator: Generator,
    *,
    mlp_mean: float = 0.0,
    mlp_input_std: float = 0.0,
) -> None:
    """Draw attention and MLP of a block that names its layers as DINO and timm do; no bias stays.

    Cost: that of the initialiser; "skipless" and "mimetic" are cubic in dim, once a head.

    `mlp_mean`, of either sign, is added to all entries of the first matrix of the MLP;
    `mlp_input_std` is the deviation of the number that an input channel adds towards all hidden
    units. Source of both: Trockman, "Mimetic initialization" (2025), section 3.4, equations 3.40
    and 3.39, where y = W x: its 1_p b_n^T repeats a row of the n inputs for the p hidden units.
    "N(0, sigma I)" is read as sigma, not its root, the deviation.
    """
    # Any: ours and those of timm's families have no class in common.
    parts: Any = block
    dim, hidden_dim = parts.mlp.fc1.in_features, parts.mlp.fc1.out_features
    attention = initialiser.attention(dim, parts.attn.num_heads, generator)
    first, second = initialiser.mlp(dim, hidden_dim, generator)
    if mlp_mean or mlp_input_std:
        of_inputs = _normal(dim, 1, _own_generator(first))
        first = first + mlp_mean + mlp_input_std * of_inputs
    inputs = torch.cat([attention.query, attention.key, attention.value], dim=1)
    linears = (parts.attn.qkv, parts.attn.proj, parts.mlp.fc1, parts.mlp.fc2)
    matrices = (inputs, attention.output, first, second)
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


@dataclass(frozen=True)
class UniformFilters:
    """Independent weights between -1 / size and 1 / size, PyTorch's default."""

    def filters(
        self,
        count: int,
        size: int,
        depth: float,  # noqa: ARG002 - the same in every layer
        generator: Generator,
    ) -> Filters:
        """Filters of `size` x `size` pixels; `depth` is 0 in the first layer and 1 in the last."""
        unit = torch.rand(count, size, size, generator=generator, dtype=torch.float64)
        return (2 * unit - 1) / size


@dataclass(frozen=True)
class CovarianceFilters(UniformFilters):
    """Normal filters with the covariance of trained ones: focused at first, wider with depth.

    Args:
        sigma_0: Squared width of the Gaussians in the first layer, in pixels squared.
        v_sigma: How fast it grows with depth there.
        a_sigma: How fast that growth grows.

    Source: Trockman, "Mimetic initialization" (2025), section 3.1.2; the defaults are its values
    for ConvMixer-256/8 on CIFAR-10 with patches of 2 x 2 (appendix B.1). Filters of 3 x 3, it
    reports, fare poorly with it.
    """

    sigma_0: Number = 0.08
    v_sigma: Number = 0.37
    a_sigma: Number = 2.9

    def __post_init__(self) -> None:
        turning = -self.v_sigma / self.a_sigma if self.a_sigma else 0.0
        lowest = min(self.sigma(depth) for depth in (0.0, 1.0, min(max(turning, 0.0), 1.0)))
        if not lowest > 0:
            raise ConfigurationError(
                "model.init_options: sigma_0 + v_sigma d + a_sigma d^2 / 2 must stay positive for "
                f"d from 0 to 1, got {lowest:g} with {self}; raise sigma_0"
            )

    def sigma(self, depth: float) -> float:
        """Equation 3.11."""
        return self.sigma_0 + self.v_sigma * depth + self.a_sigma * depth**2 / 2

    def filters(self, count: int, size: int, depth: float, generator: Generator) -> Filters:
        """Cost: an eigendecomposition of size^2 x size^2, once a layer."""
        root = positive_root(filter_covariance(size, self.sigma(depth)))
        normal = torch.randn(count, size**2, generator=generator, dtype=torch.float64)
        return (normal @ root).unflatten(1, (size, size))


FILTER_INITIALISERS: dict[str, type[UniformFilters]] = {
    "uniform": UniformFilters,
    "covariance": CovarianceFilters,
}


def draw_uniform(layer: nn.Module, generator: Generator) -> None:
    """Weights and biases of a convolution or linear layer as PyTorch draws them by default."""
    bound = layer.get_parameter("weight")[0].numel() ** -0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def draw_convolutions(
    model: nn.Module,
    depthwise: Sequence[nn.Module],
    init: str,
    options: Mapping[str, Any],
    generator: Generator,
) -> None:
    """All convolutions and linear layers as PyTorch does, then the depthwise filters by `init`.

    The filters come last, so that all other weights are the same under any `init`; their layers lie
    evenly between depths 0 and 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw_uniform(module, generator)
    initialiser = make_initialiser(FILTER_INITIALISERS, init, options)
    for layer, convolution in enumerate(depthwise):
        weight = convolution.get_parameter("weight")
        count, _, size, _ = weight.shape
        depth = layer / max(1, len(depthwise) - 1)
        filters = initialiser.filters(count, size, depth, generator)
        weight.copy_(filters[:, None])


def filter_covariance(size: int, sigma: float) -> Covariance:
    """Covariance of the pixels of a filter, symmetric, but not yet positive semi-definite.

    With z_p the Gaussian exp(-r^2 / (2 sigma)) about the middle and c_pq the one about pixel p,
    both at pixel q, it is ((z_p + z_q) c_pq - z_p z_q) / 2: equation 3.10, in the order of 3.1.

    The indices of equation 3.5, from 1 on with a center of floor(size / 2), would put the peak one
    pixel before the middle of an odd filter; counted from 0, as in its figure A.3, they put it
    there.

    The Gaussian of equation 3.6 is moved forward until its peak is at p, and what leaves one side
    comes back on the other, as the text and figure A.3 have it. Equation B.1 prints the
    opposite direction, which would put the peak at the mirror image of p. Equation 3.9 lacks
    the factor 1/2 that 3.10 and figure A.3 have.

    Args:
        size: Pixels along a side; odd.
        sigma: Squared width of the Gaussians, in pixels squared.
    """
    middle = size // 2
    squares = (torch.arange(size, dtype=torch.float64) - middle) ** 2
    still = torch.exp(-(squares[:, None] + squares) / (2 * sigma))
    moved = torch.stack(
        [
            still.roll((row - middle, col - middle), dims=(0, 1)).flatten()
            for row in range(size)
            for col in range(size)
        ]
    )
    static, mask = still.flatten()[None, :], still.flatten()[:, None]
    return (mask * (moved - static) + static * moved) / 2


def positive_root(covariance: Covariance) -> Covariance:
    """Symmetric root of the nearest positive semi-definite matrix.

    The root is symmetric because that one is unique: eigenvectors of equal eigenvalues, of which
    these matrices have many, are whatever basis the library finds.

    NumPy's `multivariate_normal`, which figure A.4 calls, does not project but flips the sign of
    negative eigenvalues.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def make_initialiser(kinds: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """The initialiser that `kinds` has under a name."""
    if name not in kinds:
        raise ConfigurationError(f"model.init must be one of {', '.join(kinds)}, got {name!r}")
    known = {item.name: item for item in fields(kinds[name])}  # pyrefly: ignore[bad-argument-type]
    for key, value in options.items():
        if key not in known:
            message = f"model.init={name} has no option {key!r}"
            if not known:
                raise ConfigurationError(message, hint=("model.init_options={{}}",))
            raise unknown_name_error(
                message, key, known, hint=("model.init_options.{near}={value}",)
            )
        require_type(f"model.init_options.{key}", known[key].type, value)
    return kinds[name](**{key: type(known[key].default)(one) for key, one in options.items()})


def in_full(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of an initialiser with the value that holds; None stood for its default."""
    kind: Any = {**INITIALISERS, **FILTER_INITIALISERS}.get(name, DefaultInit)
    return asdict(kind()) | {key: value for key, value in options.items() if value is not None}


def skipless_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """Draw the blocks of a ViT as "Cutting the Skip" does, so that it trains without skips.

    What `model.init=skipless` draws for a model of timm, to the bit; the global RNG is left alone.
    All biases of the blocks become 0, and whatever is no attention or MLP stays.

    Args:
        model: Has `blocks`, each with `attn.qkv`, `attn.proj`, `attn.num_heads`, `mlp.fc1` and
            `mlp.fc2`, as a ViT of `timm.create_model` or of this suite.
        seed: Decides what is drawn.
        options: Those of `SkiplessInit`.

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
    initialiser = make_initialiser(INITIALISERS, name, options)
    generator = Generator().manual_seed(seed)
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
