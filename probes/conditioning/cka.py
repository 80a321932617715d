"""Linear CKA: how alike two representations of the same tokens are, whatever their basis."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.special import expit
from torch import Tensor

from ssl_bench.intervals import Interval, Jackknife

Tokens = Float[Tensor, "images tokens dim"]


def linear_cka(x: Tokens, y: Float[Tensor, "images tokens other_dim"]) -> float:
    """Linear CKA over all tokens of all images, in [0, 1]; NaN where one side is constant.

    Rotating either side, or scaling it, changes nothing. With few tokens it is too high: for
    independent Gaussians of n tokens and dimension d it is about d / (n + d).

    Source: Kornblith et al., "Similarity of Neural Network Representations Revisited", 2019, the
    formula with features at the end of its section 3.
    """
    one, other = _centered(x).flatten(0, 1), _centered(y).flatten(0, 1)
    if not one.any() or not other.any():
        return float("nan")
    cross = (one.T @ other).square().sum()
    return float(cross / ((one.T @ one).norm() * (other.T @ other).norm()))


def linear_cka_ci95(x: Tokens, y: Float[Tensor, "images tokens other_dim"]) -> Interval | None:
    """95 % interval of `linear_cka` over images: a jackknife of its logit, bias corrected.

    Leaving an image out costs images^2 operations, not a pass over the tokens. None where the
    images do not tell: a single one, a constant side, the same on both sides.
    """
    count = len(x)
    one, other = _centered(x), _centered(y)
    if count < 2 or not one.any() or not other.any():
        return None
    # All images, then all but one.
    weights = torch.cat([torch.ones(1, count), 1 - torch.eye(count)]).double().to(x.device)
    both, first, second = (
        _moments(a, b).covariance(weights, x.shape[1])
        for a, b in ((one, other), (one, one), (other, other))
    )
    logits = (both / (first * second).sqrt()).logit().cpu().numpy()
    if not np.isfinite(logits).all():
        return None
    jackknife = Jackknife(float(logits[0]), logits[1:])
    center, margin = jackknife.value + jackknife.correction, jackknife.margin
    return (
        None if np.isnan(margin) else (float(expit(center - margin)), float(expit(center + margin)))
    )


@dataclass(frozen=True)
class _Moments:
    """Per image: M = X^T Y and the sums s of x and t of y, as far as `covariance` needs them.

    Attributes:
        products: <M_a, M_b>.
        triples: s_a^T M_b t_c.
        first: s_a^T s_b.
        second: t_a^T t_b.
    """

    products: Float64[Tensor, "images images"]
    triples: Float64[Tensor, "images images images"]
    first: Float64[Tensor, "images images"]
    second: Float64[Tensor, "images images"]

    def covariance(
        self, weights: Float64[Tensor, "sums images"], num_tokens: int
    ) -> Float64[Tensor, " sums"]:
        """Squared norm of the centered cross-covariance, each image counted as often as asked.

        ||sum_a w_a M_a - s t^T / n||^2 with s, t the weighted sums and n the number of tokens.
        """
        total = weights.sum(1) * num_tokens
        products, first, second = (
            torch.einsum("ra,rb,ab->r", weights, weights, matrix)
            for matrix in (self.products, self.first, self.second)
        )
        triples = torch.einsum("ra,rb,rc,abc->r", weights, weights, weights, self.triples)
        return products - 2 * triples / total + first * second / total**2


def _moments(
    x: Float64[Tensor, "images tokens dim"], y: Float64[Tensor, "images tokens other_dim"]
) -> _Moments:
    matrices = torch.einsum("atd,ate->ade", x, y)
    s, t = x.sum(1), y.sum(1)
    return _Moments(
        products=torch.einsum("ade,bde->ab", matrices, matrices),
        triples=torch.einsum("ad,bde,ce->abc", s, matrices, t),
        first=s @ s.T,
        second=t @ t.T,
    )


def _centered(x: Tokens) -> Float64[Tensor, "images tokens dim"]:
    """All tokens less their mean; exactly zero where only rounding tells them apart."""
    x = x.double()
    centered = x - x.mean((0, 1))
    noise = x.shape[0] * x.shape[1] * torch.finfo(torch.float64).eps * x.norm()
    return centered if centered.norm() > noise else torch.zeros_like(centered)
