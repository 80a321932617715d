"""Draw the initial weights of transformer blocks and of depthwise filters.

An initialiser is a dataclass whose fields are the options in `model.init_options`. To add an
initialiser, add its class to `INITIALISERS` or `FILTER_INITIALISERS`. If it also supports timm
models, add its name to the families in timm_config.py.

Initialisers draw in float64, and each weight is rounded once when it is stored. Only
`init_uniform_` draws directly in the dtype of the layer. The matrices of a block follow the
row-vector convention y = x W of the papers. `init_block_` transposes W, because `nn.Linear.weight`
is the transpose. The pixels of a filter are in row-major order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
# Lower bound for squared singular values, so that the factors of a zero matrix are 0, not NaN.
_TINY = 1e-300


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of an attention sub-block, which multiply row vectors: y = x W.

    The columns of `query`, `key` and `value`, and the rows of `output`, are grouped by head.
    """

    query: Float64[Tensor, "dim dim"]
    key: Float64[Tensor, "dim dim"]
    value: Float64[Tensor, "dim dim"]
    output: Float64[Tensor, "dim dim"]


MlpWeights = tuple[Float64[Tensor, "dim hidden"], Float64[Tensor, "hidden dim"]]


@dataclass(frozen=True)
class DefaultInit:
    """DINO's initialisation: normal with standard deviation 0.02, truncated at -2 and 2.

    All other initialisers of transformer blocks are subclasses of this class.

    Attributes:
        min_heads: Smallest number of heads that the initialiser supports.
    """

    min_heads: ClassVar[int] = 1

    def attention(
        self,
        dim: int,
        num_heads: int,  # noqa: ARG002 - used by subclasses
        generator: Generator,
    ) -> AttentionWeights:
        """Draw the weights of the queries, keys, values and output of an attention sub-block."""
        query, key, value, output = (self.draw(dim, dim, generator) for _ in range(4))
        return AttentionWeights(query, key, value, output)

    def mlp(self, dim: int, hidden_dim: int, generator: Generator) -> MlpWeights:
        """Draw the weights of the two linear layers of an MLP."""
        return self.draw(dim, hidden_dim, generator), self.draw(hidden_dim, dim, generator)

    def draw(self, rows: int, cols: int, generator: Generator) -> Matrix:
        """Draw the weight matrix of one layer with `rows` inputs and `cols` outputs."""
        weights = torch.empty(rows, cols, dtype=torch.float64)
        return nn.init.trunc_normal_(weights, std=_DEFAULT_STD, generator=generator)


@dataclass(frozen=True)
class SkiplessInit(DefaultInit):
    """Initialisation from the paper "Cutting the Skip", for encoders without skip connections.

    For a head of width d_h, W_Q W_K^T is the best rank-d_h approximation of alpha Z + beta I, where
    Z is random noise. W_V and W_O, drawn jointly for all heads, are c times the left and the right
    singular vectors of one Gaussian matrix of size dim x dim.

    Attributes:
        alpha: Factor of the noise Z in W_Q W_K^T.
        beta: Factor of the identity in W_Q W_K^T.
        c: Factor of the orthogonal matrices in W_V and W_O. If a LayerNorm follows, c does not
            affect the output of the LayerNorm, and only changes the effective learning rate of W_V
            and W_O.
        noise: Distribution of the entries of Z, whose variance is 1 / dim. The paper uses "normal".
        cancel_logit_scale: Whether to multiply both W_Q and W_K by d_h^(1/4), which cancels the
            factor 1 / sqrt(d_h) of the attention logits. The paper's formulas contain no factor 1 /
            sqrt(d_h). By default, this factor is not cancelled, because short runs trained better
            with the factor.
        suo_gain: Whether to multiply the orthogonal matrices of the MLP by max(sqrt(outputs /
            inputs), 1).

    Source: Ji et al., "Cutting the Skip", https://arxiv.org/abs/2510.00345, section 5. The defaults
    are the paper's values for ViT-S with DINO. The paper's supervised ViT-B has alpha 2, beta 0.6
    and c 3. The paper does not state whether the factor 1 / sqrt(d_h) is cancelled. `suo_gain` is
    part of the MLP initialisation that the paper cites.
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
    """Initialisation that imitates trained attention: W_Q W_K^T near I, and W_V W_O near -I.

    Trockman's thesis combines it with sinusoidal position embeddings. The MLP has the default
    initialisation.

    Attributes:
        alpha1: Factor of the noise in W_Q W_K^T of each head.
        beta1: Factor of the identity in W_Q W_K^T of each head.
        alpha2: Factor of the noise in W_V W_O over all heads.
        beta2: Factor of the negative identity in W_V W_O over all heads.
        noise: Distribution of the entries of the noise matrices, whose variance is 1 / dim.
        parts: Matrices that get this initialisation: all four ("both"), W_Q and W_K ("qk"), or W_V
            and W_O ("vo"). The other matrices get the default initialisation.

    Source: Trockman, "Mimetic initialization" (2025), section 3.2, equations 3.12-3.18. Equation
    3.15 contains Sigma without a square root for W_V. We take the square root for both W_V and W_O,
    as in the text of the thesis.
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
        weights = AttentionWeights(query, key, value=left * roots, output=roots[:, None] * right)
        if self.parts == "both":
            return weights
        default = DefaultInit().attention(dim, num_heads, _separate_generator(noise))
        if self.parts == "qk":
            return replace(weights, value=default.value, output=default.output)
        return replace(weights, query=default.query, key=default.key)


@dataclass(frozen=True)
class XavierInit(DefaultInit):
    """Uniform distribution with variance 2 / (inputs + outputs) for all weight matrices of a block.

    Source: Glorot and Bengio (2010), as used for the ViT in appendix D of Zhang and Martens,
    "Orthogonal Self-Attention".
    """

    def draw(self, rows: int, cols: int, generator: Generator) -> Matrix:
        return _uniform(rows, cols, generator) * (2 / (rows + cols)) ** 0.5


@dataclass(frozen=True)
class OsaInit(DefaultInit):
    """Random orthogonal initialisation for orthogonal self-attention with at least two heads.

    For a head of width d_v, [W_Q, W_K] is uniform among all dim x 2 d_v matrices with orthonormal
    columns. W_V and W_O^T are uniform among all dim x d_v matrices with orthonormal columns. The
    weights of the MLP are uniform orthogonal matrices times max(sqrt(outputs / inputs), 1). With
    the small initial alpha of `ssl_bench.models.OrthogonalAttention`, the attention matrix starts
    close to the identity.

    Source: Zhang and Martens, "Orthogonal Self-Attention", section 4. The small alpha comes from
    section 4.3.
    """

    min_heads: ClassVar[int] = 2

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


def _separate_generator(weights: Float64[Tensor, "rows cols"]) -> Generator:
    """Return a second random generator, for numbers that are drawn only if an option is set.

    If the main generator drew these numbers, the option would also change all weights that are
    drawn later. The seed of the second generator is the bit pattern of the first weight.

    Args:
        weights: Weights that the main generator has drawn.
    """
    return Generator().manual_seed(int(weights[0, 0].view(torch.int64)))


INITIALISERS: dict[str, type[DefaultInit]] = {
    "default": DefaultInit,
    "skipless": SkiplessInit,
    "mimetic": MimeticInit,
    "xavier": XavierInit,
    "osa": OsaInit,
}


@torch.no_grad()
def init_block_(
    block: nn.Module,
    initialiser: DefaultInit,
    generator: Generator,
    *,
    mlp_mean: float = 0.0,
    mlp_input_std: float = 0.0,
) -> None:
    """Draw the weights of a transformer block in place, and set its biases to 0.

    The block has `attn.qkv`, `attn.proj`, `attn.num_heads`, `mlp.fc1` and `mlp.fc2`, as in DINO and
    timm. With the initialisers "skipless" and "mimetic", the cost per head is cubic in dim.

    Args:
        block: The block.
        initialiser: Initialiser of the weights, such as `SkiplessInit`.
        generator: Source of random numbers.
        mlp_mean: Constant that is added to all weights of the first layer of the MLP.
        mlp_input_std: Standard deviation of random offsets. One offset per input channel is added
            to all weights of this channel in the first layer of the MLP.

    Source of `mlp_mean` and `mlp_input_std`: Trockman, "Mimetic initialization" (2025), section
    3.4, equations 3.40 and 3.39. We read sigma in "N(0, sigma I)" as the standard deviation.
    """
    # The blocks of this suite and the blocks of timm have no common base class.
    parts: Any = block
    dim, hidden_dim = parts.mlp.fc1.in_features, parts.mlp.fc1.out_features
    attention = initialiser.attention(dim, parts.attn.num_heads, generator)
    first, second = initialiser.mlp(dim, hidden_dim, generator)
    if mlp_mean or mlp_input_std:
        per_input = _normal(dim, 1, _separate_generator(first))
        first = first + mlp_mean + mlp_input_std * per_input
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
    """Return W_Q and W_K such that W_Q W_K^T of each head approximates alpha Z + beta I.

    Each head has its own noise Z. The cost per head is cubic in dim.
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
    """Return U sqrt(S) and V sqrt(S) for the `rank` largest singular values of M = U S V^T.

    The first factor times the transpose of the second is the best approximation of M with this
    rank. The factors are computed from the eigenvectors of M^T M. The method is as accurate as a
    full SVD, and 8 times faster for dim 384 and rank 64.
    """
    dim = len(matrix)
    gram = (matrix.T @ matrix).numpy()
    squares, right = scipy.linalg.eigh(gram, subset_by_index=[dim - rank, dim - 1])
    roots = torch.from_numpy(squares).clamp(min=_TINY) ** 0.25
    right = torch.from_numpy(right)
    return matrix @ right / roots, right * roots


def uniform_orthogonal(rows: int, cols: int, generator: Generator, *, gain: bool) -> Matrix:
    """Draw a matrix with orthonormal rows or columns from the uniform (Haar) distribution.

    With `gain`, multiply the matrix by max(sqrt(cols / rows), 1). Here, rows is the input width of
    the layer, and cols is its output width.

    Source: scale-corrected uniform orthogonal (SUO) initialisation of Martens et al., "Rapid
    training of deep neural networks without skip connections or normalization layers",
    https://arxiv.org/abs/2110.01765.
    """
    tall = _normal(max(rows, cols), min(rows, cols), generator)
    basis, upper = torch.linalg.qr(tall)
    # Otherwise, the distribution would depend on the signs that the QR algorithm chooses.
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
class UniformFilterInit:
    """Depthwise filters with independent weights, uniform on [-1 / size, 1 / size] as in PyTorch.

    Here, `size` is the side of a filter in pixels.
    """

    def filters(
        self,
        count: int,
        size: int,
        depth: float,  # noqa: ARG002 - used by subclasses
        generator: Generator,
    ) -> Filters:
        """Draw the depthwise filters of one layer.

        Args:
            count: Number of filters.
            size: Side of a filter in pixels.
            depth: Relative depth of the layer: 0 for the first layer and 1 for the last.
            generator: Source of random numbers.
        """
        unit = torch.rand(count, size, size, generator=generator, dtype=torch.float64)
        return (2 * unit - 1) / size


@dataclass(frozen=True)
class CovarianceFilterInit(UniformFilterInit):
    """Normally distributed depthwise filters, with a pixel covariance as in trained filters.

    The covariance of the pixels is built from Gaussians, which are narrow in the first layer and
    wider in deeper layers.

    Attributes:
        sigma_0: Squared width of the Gaussians in the first layer, in pixels squared.
        v_sigma: Derivative of the squared width with respect to depth in the first layer. Depth
            increases from 0 in the first layer to 1 in the last layer.
        a_sigma: Second derivative of the squared width with respect to depth.

    Source: Trockman, "Mimetic initialization" (2025), section 3.1.2. The defaults are the thesis's
    values for ConvMixer-256/8 on CIFAR-10 with 2 x 2 patches (appendix B.1). The thesis reports
    poor results for 3 x 3 filters.
    """

    sigma_0: Number = 0.08
    v_sigma: Number = 0.37
    a_sigma: Number = 2.9

    def __post_init__(self) -> None:
        vertex = -self.v_sigma / self.a_sigma if self.a_sigma else 0.0
        lowest = min(self.sigma(depth) for depth in (0.0, 1.0, min(max(vertex, 0.0), 1.0)))
        if not lowest > 0:
            raise ConfigurationError(
                "sigma_0 + v_sigma d + a_sigma d^2 / 2 must be positive for all depths d in [0, 1]"
                f", got {lowest:g} with {self}. Increase model.init_options.sigma_0"
            )

    def sigma(self, depth: float) -> float:
        """Return the squared width of the Gaussians at a depth, in pixels squared.

        The squared width is a quadratic function of the depth. Source: equation 3.11 of Trockman,
        "Mimetic initialization" (2025).

        Args:
            depth: Relative depth of the layer: 0 for the first layer and 1 for the last.
        """
        return self.sigma_0 + self.v_sigma * depth + self.a_sigma * depth**2 / 2

    def filters(self, count: int, size: int, depth: float, generator: Generator) -> Filters:
        root = positive_root(filter_covariance(size, self.sigma(depth)))
        return (_normal(count, size**2, generator) @ root).unflatten(1, (size, size))


FILTER_INITIALISERS: dict[str, type[UniformFilterInit]] = {
    "uniform": UniformFilterInit,
    "covariance": CovarianceFilterInit,
}


def init_uniform_(layer: nn.Module, generator: Generator) -> None:
    """Draw the weights and biases of a convolution or linear layer as PyTorch does by default."""
    bound = layer.get_parameter("weight")[0].numel() ** -0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def init_conv_layers_(
    model: nn.Module,
    depthwise: Sequence[nn.Module],
    init: str,
    options: Mapping[str, Any],
    generator: Generator,
) -> None:
    """Draw all convolutions and linear layers as PyTorch does, then redraw depthwise filters.

    The filters are drawn last, so that the other weights do not depend on `init`.

    Args:
        model: The model, whose weights are changed in place.
        depthwise: Depthwise convolutions from the first to the last layer.
        init: Name of the initialiser of the depthwise filters.
        options: Options of this initialiser.
        generator: Source of random numbers.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            init_uniform_(module, generator)
    initialiser = make_initialiser(FILTER_INITIALISERS, init, options)
    for layer, convolution in enumerate(depthwise):
        weight = convolution.get_parameter("weight")
        count, _, size, _ = weight.shape
        depth = layer / max(1, len(depthwise) - 1)
        filters = initialiser.filters(count, size, depth, generator)
        weight.copy_(filters[:, None])


def filter_covariance(size: int, sigma: float) -> Covariance:
    """Return the covariance matrix from which `CovarianceFilterInit` draws the pixels of a filter.

    A Gaussian has the value exp(-r^2 / (2 sigma)) at distance r from its peak. Let z_p be the value
    at pixel p of a Gaussian with its peak at the centre of the filter. Let c_pq be the value at
    pixel q of a Gaussian with its peak at pixel p. The covariance of the pixels p and q is ((z_p +
    z_q) c_pq - z_p z_q) / 2. This is equation 3.10 of Trockman's thesis "Mimetic initialization"
    (2025), in the pixel order of equation 3.1. The matrix may have negative eigenvalues.

    Where equations of the thesis disagree, we follow figure A.3 of the thesis:

    - Pixel indices start at 0. Equation 3.5 counts from 1, which would place the peak one pixel
      before the centre of the filter.
    - The Gaussian of equation 3.6 is shifted to have its peak at pixel p, with periodic boundaries.
      With equation B.1, the peak would be at the mirror image of p about the centre.
    - The factor 1/2 of equation 3.10 is included, although equation 3.9 omits it.

    Args:
        size: Side of the filter in pixels, an odd number.
        sigma: Squared width of the Gaussians, in pixels squared.
    """
    middle = size // 2
    squares = (torch.arange(size, dtype=torch.float64) - middle) ** 2
    centred = torch.exp(-(squares[:, None] + squares) / (2 * sigma))
    shifted = torch.stack(
        [
            centred.roll((row - middle, col - middle), dims=(0, 1)).flatten()
            for row in range(size)
            for col in range(size)
        ]
    )
    z_q, z_p = centred.flatten()[None, :], centred.flatten()[:, None]
    return (z_p * (shifted - z_q) + z_q * shifted) / 2


def positive_root(covariance: Covariance) -> Covariance:
    """Return the symmetric square root of the nearest positive semi-definite matrix.

    Negative eigenvalues of `covariance` are set to 0. The symmetric root is unique, although the
    eigenvectors of repeated eigenvalues are arbitrary. The code in figure A.4 of Trockman's thesis
    "Mimetic initialization" (2025) calls NumPy's `multivariate_normal`, which replaces negative
    eigenvalues by their absolute values instead.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def make_initialiser(kinds: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """Create an initialiser with the given options.

    Args:
        kinds: Classes of initialisers by name.
        name: Name of the initialiser.
        options: Values of fields of its class. All other fields have their defaults.

    Raises:
        ConfigurationError: The name is unknown or an option is not allowed.
    """
    if name not in kinds:
        message = f"unknown model.init={name}"
        raise unknown_name_error(message, name, kinds, hint=("model.init={near}",))
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
    return kinds[name](**{key: type(known[key].default)(value) for key, value in options.items()})


def fill_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options of the initialiser `name`.

    Options that are absent or None have their default values.
    """
    kind: Any = {**INITIALISERS, **FILTER_INITIALISERS}.get(name, DefaultInit)
    return asdict(kind()) | {key: value for key, value in options.items() if value is not None}


def skipless_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """Initialise the blocks of a ViT in place for training without skip connections.

    The weights are drawn as in Ji et al., "Cutting the Skip". A timm model that is configured with
    `model.init=skipless` gets the same weights for the same seed. All biases of the blocks are set
    to 0. Other parameters and the global random number generator are not changed.

    Args:
        model: A ViT from timm or from this suite. Each of its `blocks` has `attn.qkv`, `attn.proj`,
            `attn.num_heads`, `mlp.fc1` and `mlp.fc2`.
        seed: Seed of the weights.
        options: Options of the initialisation, which are the fields of `SkiplessInit`.

    Returns:
        The same model.

    Raises:
        ConfigurationError: The model has no such blocks, or an option is not allowed.
    """
    return _draw_blocks(model, "skipless", seed, options)


def mimetic_(model: Model, *, seed: int = 0, **options: Any) -> Model:
    """Initialise the blocks of a ViT in place so that they resemble trained blocks.

    The weights are drawn as in Trockman, "Mimetic initialization". All biases of the blocks are set
    to 0.

    Args:
        model: A ViT from timm or from this suite. Each of its `blocks` has `attn.qkv`, `attn.proj`,
            `attn.num_heads`, `mlp.fc1` and `mlp.fc2`.
        seed: Seed of the weights.
        options: Options of the initialisation, which are the fields of `MimeticInit`.

    Returns:
        The same model.

    Raises:
        ConfigurationError: The model has no such blocks, or an option is not allowed.
    """
    return _draw_blocks(model, "mimetic", seed, options)


def _draw_blocks(model: Model, name: str, seed: int, options: dict[str, Any]) -> Model:
    initialiser = make_initialiser(INITIALISERS, name, options)
    generator = Generator().manual_seed(seed)
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
        raise ConfigurationError(
            f"expected a ViT with a list of modules named `blocks`, got {type(model).__name__}"
        )
    for block in blocks:
        try:
            init_block_(block, initialiser, generator)
        except AttributeError as error:
            raise ConfigurationError(
                f"expected blocks with attn.qkv, attn.proj, attn.num_heads, mlp.fc1 and mlp.fc2, "
                f"got {type(block).__name__} of {type(model).__name__}: {error}"
            ) from error
    return model
