"""From the matrices, Jacobians and tokens of a block to scores: numbers with what explains them.

At the end linear CKA: how alike two representations of the same tokens are, whatever their basis.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.special import expit
from torch import Tensor

from probes.conditioning.decomposition import BlockPass, Passes
from probes.conditioning.jacobians import JACOBIANS, exact_spectra, lanczos_extremes, rank_details
from probes.spectra import (
    Values,
    condition_number,
    effective_rank,
    mean_cosine,
    median_with_ci95,
    singular_values,
)
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Interval, Jackknife

MATRIX = "attention_matrix"
OUTPUTS = ("attention", "attention_skip", "mlp", "mlp_skip")
FACETS = (MATRIX, *OUTPUTS)
BLOCK_JACOBIANS = ("attention", "attention_skip", "mlp", "block", "dominant")
AROUND_ATTENTION = ("before", "after")
MEAN_LOG = "mean_log_condition_number"
_MEAN_LOG_GUESSES = (
    "natural logarithms, their mean over blocks, of the tokens before attention and after its skip",
    "which images, and their number",
)
ESTIMATE = "_estimate"
_MATRIX_CELLS = [(facet, m) for facet in FACETS for m in ("condition_number", "effective_rank")]
_COSINE_CELLS = [(facet, "mean_cosine") for facet in OUTPUTS]
_TERMS = [("dominant", "norm"), ("perturbation", "norm"), ("perturbation", "norm_over_dominant")]
CELLS: Mapping[str, Sequence[tuple[str, str]]] = {
    "spectra": [*_MATRIX_CELLS, *_COSINE_CELLS, ("token", "cka_with_input")],
    "jacobian_exact": [
        *((f, m) for f in BLOCK_JACOBIANS for m in ("condition_number", "effective_rank")),
        *_TERMS,
    ],
    # Other names, so that no bound stands in a table as if it were the number.
    "jacobian_lanczos": [
        *((f, "condition_number_at_least") for f in BLOCK_JACOBIANS),
        *((f, "effective_rank" + ESTIMATE) for f in BLOCK_JACOBIANS),
        *((f, m + ESTIMATE) for f, m in _TERMS),
    ],
    "checkpoints": [("token", "cka_with_checkpoint")],
    "mean_log": [(facet, MEAN_LOG) for facet in AROUND_ATTENTION],
}
_SHOWN_VALUES = 16
SAME = "all tokens are the same"
# Why a metric whose name begins so is no number, where nobody knows better.
_UNDEFINED = {"cka": SAME, "mean_cosine": SAME, "norm_over_dominant": "the dominant term is zero"}
Numbers = Float64[np.ndarray, "images values"]
Tokens = Float[Tensor, "images tokens dim"]


def plain(
    layer: int,
    facet: str,
    metric: str,
    value: float,
    ci95: tuple[float, float] | None,
    num_images: int,
    details: Mapping[str, Any],
) -> Score:
    if np.isnan(value):
        whys = [why for name, why in _UNDEFINED.items() if metric.startswith(name)]
        details = {**({"undefined": whys[0]} if whys else {}), **details}
    return Score(layer, facet, metric, value, ci95, num_images, details, unit="")


def _median(layer: int, facet: str, metric: str, numbers: Numbers, **details: Any) -> Score:
    """The median over images (and heads), with what each of them gave."""
    value, ci95 = median_with_ci95(numbers)
    more = {"per_image": numbers.tolist(), **details}
    if np.isinf(numbers).any():
        more["infinite_percent"] = 100 * float(np.isinf(numbers).mean())
    return plain(layer, facet, metric, value, ci95, len(numbers), more)


@torch.no_grad()
def spectra_scores(
    layer: int, passes: Sequence[BlockPass]
) -> tuple[list[Score], dict[str, Float64[Tensor, "images heads values"]]]:
    """Scores of the matrices of one block, and all of their singular values by facet.

    What cannot be had is not there. "attention" and "mlp" are what the sub-block computes; with
    "_skip" its input is added, as the encoder itself does where it has that skip.
    """
    by_image = [_matrices(one) for one in passes]
    scores, spectra = list[Score](), dict[str, Values]()
    for facet in _present(FACETS, by_image):
        matrices = [found[facet] for found in by_image]
        values = torch.stack([singular_values(matrix) for matrix in matrices]).cpu()
        spectra[facet] = values
        # Median over images and heads of the values divided by the largest; 0 if that is 0.
        largest = values[..., :1]
        shares = values / largest.where(largest > 0, 1.0)
        relative = np.median(shares.flatten(0, 1).numpy(), axis=0)
        number = min(_SHOWN_VALUES, len(relative))
        places = np.linspace(0, len(relative) - 1, number).round().astype(int)
        shown = {
            "spectrum": relative[places].tolist(),
            "spectrum_of_places": places.tolist(),
        }
        conditions = condition_number(values, max(matrices[0].shape[1:])).numpy()
        scores.append(_median(layer, facet, "condition_number", conditions, **shown))
        centred = {}
        if facet != MATRIX:
            centred_values = (singular_values(tokens - tokens.mean(0)) for (tokens,) in matrices)
            ranks = [float(effective_rank(one)) for one in centred_values]
            centred["centred_effective_rank"] = float(np.median(ranks))
        of_all = effective_rank(values).numpy()
        scores.append(_median(layer, facet, "effective_rank", of_all, **centred))
        if facet != MATRIX:
            cosines = np.array([[mean_cosine(tokens)] for (tokens,) in matrices])
            scores.append(_median(layer, facet, "mean_cosine", cosines))
    return scores, spectra


def _matrices(one: BlockPass) -> Mapping[str, Float[Tensor, "heads rows cols"]]:
    parts = one.parts
    if parts is None:
        return {}
    middle = parts.after_attention(one.entered)
    entered = parts.graying(one.entered)
    attention = parts.attention(parts.norm1(entered))
    mlp = parts.mlp(parts.norm2(middle))
    updates = (attention, entered + attention, mlp, middle + mlp)
    matrices = {facet: update[None] for facet, update in zip(OUTPUTS, updates, strict=True)}
    if parts.heads is not None:
        matrices[MATRIX] = parts.heads.matrices(parts.norm1(entered))
    return matrices


@torch.no_grad()
def mean_log_scores(layers: Sequence[int], passes: Passes) -> list[Score]:
    """Natural logarithms of tokens' condition numbers before and after attention and its skip.

    Of each image their mean over the blocks up to the asked one, then the median over images; none
    where one of these cannot be taken apart. The tokens before are those that attention is given,
    grayed where the block grays them. Passes are of all blocks up to the last asked one.
    """

    def logarithms(one: BlockPass) -> list[float]:
        assert one.parts is not None
        before = one.parts.graying(one.entered)
        after = before + one.parts.attention(one.parts.norm1(before))
        return [
            float(condition_number(singular_values(tokens), max(tokens.shape)).log())
            for tokens in (before, after)
        ]

    scores = []
    for layer in layers:
        upto = [passes[below] for below in range(layer + 1)]
        if any(one.parts is None for some in upto for one in some):
            continue
        known = [[logarithms(one) for one in some] for some in upto]
        means = np.array(known, dtype=np.float64).mean(0)  # images facets
        scores += [
            _median(
                layer,
                facet,
                MEAN_LOG,
                means[:, [column]],
                blocks=layer + 1,
                guesses=list(_MEAN_LOG_GUESSES),
            )
            for column, facet in enumerate(AROUND_ATTENTION)
        ]
    return scores


def exact_scores(layer: int, passes: Sequence[BlockPass]) -> list[Score]:
    by_image, norms = [exact_spectra(one) for one in passes], dict[str, Numbers]()
    scores = []
    for facet in _present(JACOBIANS, by_image):
        spectra = [found[facet] for found in by_image]
        norms[facet] = _column([float(values[0]) for values in spectra])
        if facet in BLOCK_JACOBIANS:
            more = {"spectra": [rank_details(values) for values in spectra]}
            numbers = _column([float(condition_number(s, len(s))) for s in spectra])
            scores.append(_median(layer, facet, "condition_number", numbers, **more))
            ranks = _column([float(effective_rank(values)) for values in spectra])
            scores.append(_median(layer, facet, "effective_rank", ranks))
    return scores + _term_scores(layer, norms, "", {})


def lanczos_scores(layer: int, passes: Sequence[BlockPass], steps: int, seed: int) -> list[Score]:
    by_image = [lanczos_extremes(one, steps=steps, seed=seed) for one in passes]
    scores, norms, above = list[Score](), dict[str, Numbers](), dict[str, list[float]]()
    for facet in _present(JACOBIANS, by_image):
        found = [one[facet] for one in by_image]
        norms[facet] = _column([one.largest for one in found])
        if facet in ("dominant", "perturbation"):
            above[f"{facet}_at_most"] = [one.largest_at_most for one in found]
        if facet in BLOCK_JACOBIANS:
            more = {"bounds": [one.details() for one in found]}
            numbers = _column([one.condition_number_at_least for one in found])
            scores.append(_median(layer, facet, "condition_number_at_least", numbers, **more))
            ranks = _column([one.effective_rank for one in found])
            scores.append(_median(layer, facet, "effective_rank" + ESTIMATE, ranks))
    return scores + _term_scores(layer, norms, ESTIMATE, above)


def _term_scores(
    layer: int, norms: Mapping[str, Numbers], kind: str, more: Mapping[str, Any]
) -> list[Score]:
    """The spectral norms of B and E, and how small E is beside B."""
    if "perturbation" not in norms:
        return []
    dominant, perturbation = norms["dominant"], norms["perturbation"]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = perturbation / dominant
    return [
        _median(layer, "dominant", "norm" + kind, dominant, **more),
        _median(layer, "perturbation", "norm" + kind, perturbation, **more),
        _median(layer, "perturbation", "norm_over_dominant" + kind, share, **more),
    ]


def _present(facets: Sequence[str], by_image: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those that every image has."""
    return [facet for facet in facets if all(facet in found for found in by_image)]


def _column(values: Sequence[float]) -> Numbers:
    return np.array(values, dtype=np.float64)[:, None]


def cka_with_input(layer: int, passes: Sequence[BlockPass]) -> Score:
    x, y = torch.stack([one.entered for one in passes]), left(passes)
    ci95 = linear_cka_ci95(x, y)
    return plain(layer, "token", "cka_with_input", linear_cka(x, y), ci95, len(passes), {})


def left(passes: Sequence[BlockPass]) -> Float64[Tensor, "images tokens dim"]:
    return torch.stack([one.left for one in passes])


def cka_matrix(
    rows: Sequence[Tensor], columns: Sequence[Tensor]
) -> Float64[np.ndarray, "rows columns"]:
    return np.array([[linear_cka(x, y) for y in columns] for x in rows])


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
    """Return the 95 % interval of `linear_cka` over images, or None.

    It is a bias-corrected jackknife of the logit. Leaving an image out costs images^2 operations,
    not a pass over the tokens.

    Returns:
        None for a single image, a constant side, or the same on both sides. None, too, where the
        correction exceeds the margin: of so few tokens it misses a part of the bias, and the
        interval, which leaves out the value, the CKA of very many images as well.
    """
    count = len(x)
    one, other = _centered(x), _centered(y)
    if count < 2 or not one.any() or not other.any():
        return None
    # All images, then all but one.
    weights = torch.cat([torch.ones(1, count), 1 - torch.eye(count)]).double().to(x.device)
    both, first, second = (
        _squared_covariance(a, b, weights) for a, b in ((one, other), (one, one), (other, other))
    )
    logits = (both / (first * second).sqrt()).logit().cpu().numpy()
    if not np.isfinite(logits).all():
        return None
    jackknife = Jackknife(float(logits[0]), logits[1:])
    center, margin = jackknife.value + jackknife.correction, jackknife.margin
    if np.isnan(margin) or abs(jackknife.correction) > margin:
        return None
    return float(expit(center - margin)), float(expit(center + margin))


def _squared_covariance(
    x: Float64[Tensor, "images tokens dim"],
    y: Float64[Tensor, "images tokens other_dim"],
    weights: Float64[Tensor, "sums images"],
) -> Float64[Tensor, " sums"]:
    """Squared norm of the centered cross-covariance, each image counted as often as asked.

    ||sum_a w_a M_a - s t^T / n||^2 with M_a = X_a^T Y_a of each image, s and t the weighted sums
    of x and y and n the number of tokens.
    """
    matrices = torch.einsum("atd,ate->ade", x, y)
    s, t = x.sum(1), y.sum(1)
    total = weights.sum(1) * x.shape[1]
    products, first, second = (
        torch.einsum("ra,rb,ab->r", weights, weights, matrix)
        for matrix in (torch.einsum("ade,bde->ab", matrices, matrices), s @ s.T, t @ t.T)
    )
    by_three = torch.einsum("ad,bde,ce->abc", s, matrices, t)
    triples = torch.einsum("ra,rb,rc,abc->r", weights, weights, weights, by_three)
    return products - 2 * triples / total + first * second / total**2


def _centered(x: Tokens) -> Float64[Tensor, "images tokens dim"]:
    """All tokens less their mean; exactly zero where only rounding tells them apart."""
    x = x.double()
    centered = x - x.mean((0, 1))
    noise = x.shape[0] * x.shape[1] * torch.finfo(torch.float64).eps * x.norm()
    return centered if centered.norm() > noise else torch.zeros_like(centered)
