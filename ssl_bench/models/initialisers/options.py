"""What initialisers can be told, without what draws: read before there is any tensor."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from ssl_bench.composition.fields import Within, require
from ssl_bench.errors import ConfigurationError

T = TypeVar("T")

NOISES = ("normal", "uniform")
PARTS = ("both", "qk", "vo")


@dataclass(frozen=True)
class NoOptions:
    """Of initialisers that leave nothing open."""


@dataclass(frozen=True)
class SkiplessOptions:
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

    alpha: float = 1.8
    beta: float = 1.0
    c: float = 3.0
    noise: str = "normal"
    cancel_logit_scale: bool = False
    suo_gain: bool = True

    def __post_init__(self) -> None:
        _check_one_of("noise", self.noise, NOISES)


@dataclass(frozen=True)
class MimeticOptions:
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

    alpha1: float = 0.7
    beta1: float = 0.7
    alpha2: float = 0.4
    beta2: float = 0.4
    noise: str = "normal"
    parts: str = "both"

    def __post_init__(self) -> None:
        _check_one_of("noise", self.noise, NOISES)
        _check_one_of("parts", self.parts, PARTS)


@dataclass(frozen=True)
class CovarianceOptions:
    """Normal filters with the covariance of trained ones: focused at first, wider with depth.

    Args:
        sigma_0: Squared width of the Gaussians in the first layer, in pixels squared.
        v_sigma: How fast it grows with depth there.
        a_sigma: How fast that growth grows.

    Source: Trockman, "Mimetic initialization" (2025), section 3.1.2; the defaults are its values
    for ConvMixer-256/8 on CIFAR-10 with patches of 2 x 2 (appendix B.1). Filters of 3 x 3, it
    reports, fare poorly with it.
    """

    sigma_0: float = 0.08
    v_sigma: float = 0.37
    a_sigma: float = 2.9

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


BLOCK_OPTIONS: Mapping[str, type[NoOptions | SkiplessOptions | MimeticOptions]] = {
    "default": NoOptions,
    "skipless": SkiplessOptions,
    "mimetic": MimeticOptions,
    "xavier": NoOptions,
    "osa": NoOptions,
}
"""Of `ssl_bench.models.initialisers.blocks`, by the name of the initialiser."""

FILTER_OPTIONS: Mapping[str, type[NoOptions | CovarianceOptions]] = {
    "uniform": NoOptions,
    "covariance": CovarianceOptions,
}
"""Of `ssl_bench.models.initialisers.convolutions`, by the name of the initialiser."""


def make_initialiser(kinds: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """The initialiser, or its options, that `kinds` has under a name."""
    if name not in kinds:
        raise ConfigurationError(f"model.init must be one of {', '.join(kinds)}, got {name!r}")
    kind = kinds[name]
    defaults = {item.name: item.default for item in fields(kind)}  # type: ignore[arg-type]
    chosen: dict[str, Any] = {}
    for key, value in options.items():
        if key not in defaults:
            near = ", ".join(get_close_matches(key, defaults) or defaults)
            hint = f"did you mean: {near}?" if near else "it has none; set model.init_options={}"
            raise ConfigurationError(f"model.init={name} has no option {key!r}; {hint}")
        wanted = type(defaults[key])
        if wanted is float:
            require(f"model.init_options.{key}", Annotated[float, Within(-1000, 1000)], value)
        elif not isinstance(value, wanted):
            raise ConfigurationError(
                f"model.init_options.{key} must be of the kind of {defaults[key]!r}, got {value!r}"
            )
        chosen[key] = wanted(value)
    return kind(**chosen)


def in_full(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of an initialiser with the value that holds; None stood for its default."""
    kind = {**BLOCK_OPTIONS, **FILTER_OPTIONS}.get(name, NoOptions)
    return asdict(kind()) | {key: value for key, value in options.items() if value is not None}


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(
            f"model.init_options.{name} must be one of {', '.join(known)}, got {value!r}"
        )
