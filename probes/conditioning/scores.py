"""Compute the scores of a transformer block from its matrices, Jacobians and tokens.

There is one function for each value of the setting `probe.protocol`, such as `spectra_scores`.
`linear_cka` measures the similarity of two representations of the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.special import bdtr, expit
from torch import Tensor

from probes.conditioning.decomposition import BlockRecord, BlockRecords
from probes.conditioning.jacobians import exact_spectra, lanczos_bounds, rank_details
from probes.spectra import Values, condition_number, effective_rank, singular_values
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Interval, Jackknife
from ssl_bench.neighbours import unit_vectors

MATRIX = "attention_matrix"
OUTPUTS = ("attention", "attention_skip", "mlp", "mlp_skip")
FACETS = (MATRIX, *OUTPUTS)
BLOCK_JACOBIANS = ("attention", "attention_skip", "mlp", "block", "dominant")
JACOBIANS = (*BLOCK_JACOBIANS, "perturbation")
MEAN_LOG_FACETS = ("before", "after")
MEAN_LOG = "mean_log_condition_number"
_MEAN_LOG_GUESSES = (
    "natural logarithms of condition numbers, averaged over blocks, before and after attention",
    "the choice and the number of the images",
)
ESTIMATE = "_estimate"
_SPECTRUM_METRICS = ("condition_number", "effective_rank")
_TERMS = [("dominant", "norm"), ("perturbation", "norm"), ("perturbation", "norm_over_dominant")]
CELLS: Mapping[str, Sequence[tuple[str, str]]] = {
    "spectra": [
        *((facet, metric) for facet in FACETS for metric in _SPECTRUM_METRICS),
        *((facet, "mean_cosine") for facet in OUTPUTS),
        ("token", "cka_with_input"),
    ],
    "jacobian_exact": [
        *((facet, metric) for facet in BLOCK_JACOBIANS for metric in _SPECTRUM_METRICS),
        *_TERMS,
    ],
    # The names differ from those of exact values, so tables never mix bounds and exact values.
    "jacobian_lanczos": [
        *((facet, "condition_number_at_least") for facet in BLOCK_JACOBIANS),
        *((facet, "effective_rank" + ESTIMATE) for facet in BLOCK_JACOBIANS),
        *((facet, metric + ESTIMATE) for facet, metric in _TERMS),
    ],
    "checkpoints": [("token", "cka_with_checkpoint")],
    "mean_log": [(facet, MEAN_LOG) for facet in MEAN_LOG_FACETS],
}
"""For each value of the setting `probe.protocol`, the scores as pairs of a facet and a metric.

A facet is a part of a block, such as its attention.
"""

# Number of singular values of a spectrum that are stored with a score.
_STORED_VALUES = 16
EQUAL_TOKENS = "all tokens are the same"
# Reasons for a score of NaN, by the beginning of the metric's name.
_UNDEFINED = {
    "cka": EQUAL_TOKENS,
    "mean_cosine": EQUAL_TOKENS,
    "norm_over_dominant": "the dominant term is zero",
}
Numbers = Float64[np.ndarray, "images values"]
Tokens = Float[Tensor, "images tokens dim"]
OtherTokens = Float[Tensor, "images tokens other_dim"]


def make_score(
    layer: int,
    facet: str,
    metric: str,
    value: float,
    ci95: Interval | None,
    num_images: int,
    details: Mapping[str, Any],
) -> Score:
    """Return a `Score` without a unit. The details of a NaN score state the reason."""
    if np.isnan(value):
        reasons = [_UNDEFINED[name] for name in _UNDEFINED if metric.startswith(name)]
        details = {**({"undefined": reasons[0]} if reasons else {}), **details}
    return Score(layer, facet, metric, value, ci95, num_images, details, unit="")


def _median_score(layer: int, facet: str, metric: str, numbers: Numbers, **details: Any) -> Score:
    """Return a score with the median of a metric over images and heads.

    `numbers` contains the values for all images and heads. The details of the score contain
    `numbers` and all further keyword arguments.
    """
    value, ci95 = median_with_ci95(numbers)
    more = {"per_image": numbers.tolist(), **details}
    if np.isinf(numbers).any():
        more["infinite_percent"] = 100 * float(np.isinf(numbers).mean())
    return make_score(layer, facet, metric, value, ci95, len(numbers), more)


def median_with_ci95(numbers: Numbers) -> tuple[float, Interval | None]:
    """Return the median of all values of all images, and its 95 % interval from the sign test.

    `numbers` contains the values of each image. Infinity counts as larger than all other numbers.
    Each end of the interval is the median of one image. If the median of all values lies outside
    the interval, the interval is extended to this median. The interval makes no assumption about
    the distribution. With two to eight images, the interval extends from the smallest to the
    largest median of an image. Such an interval contains the true median with a probability of 1 -
    2^(1 - images), which is below 95 % for fewer than six images.

    Returns:
        The median and its interval. If any number is NaN, the median is NaN and the interval is
        None. The interval is also None if there is only one image.
    """
    count, value = len(numbers), float(np.median(numbers))
    if count < 2 or np.isnan(value):
        return value, None
    medians = np.sort(np.median(numbers, axis=1))
    # The images are sorted by their medians. The ends of the interval are the medians of the images
    # with this number, counted from the first and from the last image.
    beyond = max(1, int((bdtr(np.arange(count), count, 0.5) <= 0.025).sum()))
    return value, (
        min(value, float(medians[beyond - 1])),
        max(value, float(medians[count - beyond])),
    )


@torch.no_grad()
def spectra_scores(
    layer: int, records: Sequence[BlockRecord]
) -> tuple[list[Score], dict[str, Float64[Tensor, "images heads values"]]]:
    """Score the attention matrices of one block, and the outputs of its attention and MLP.

    Scores are grouped by facet (kind of matrix). The facet "attention_matrix" has one matrix for
    each head. The facets "attention" and "mlp" are the output tokens of attention and MLP. The
    facets "attention_skip" and "mlp_skip" are the outputs plus the tokens before attention or MLP,
    even if the encoder has no such skip connection. `records` contains the input and output of the
    block for each image.

    Returns:
        The scores, and the singular values of each facet. A facet is left out if the block cannot
        be split into the parts that the facet needs.
    """
    by_image = [_collect_matrices(record) for record in records]
    scores, spectra = list[Score](), dict[str, Values]()
    for facet in _common_facets(FACETS, by_image):
        matrices = [found[facet] for found in by_image]
        values = torch.stack([singular_values(matrix) for matrix in matrices]).cpu()
        spectra[facet] = values
        conditions = condition_number(values, max(matrices[0].shape[1:])).numpy()
        spectrum = _median_spectrum(values)
        scores.append(_median_score(layer, facet, "condition_number", conditions, **spectrum))
        ranks = effective_rank(values).numpy()
        if facet == MATRIX:
            scores.append(_median_score(layer, facet, "effective_rank", ranks))
            continue
        outputs = [tokens for (tokens,) in matrices]
        centred = [float(effective_rank(singular_values(x - x.mean(0)))) for x in outputs]
        details = {"centred_effective_rank": float(np.median(centred))}
        scores.append(_median_score(layer, facet, "effective_rank", ranks, **details))
        cosines = _to_column([mean_cosine(tokens) for tokens in outputs])
        scores.append(_median_score(layer, facet, "mean_cosine", cosines))
    return scores, spectra


def _collect_matrices(record: BlockRecord) -> Mapping[str, Float[Tensor, "heads rows cols"]]:
    """Return the matrices of one block for one image, by kind of matrix.

    The kind "attention_matrix" has one matrix for each head. Each other kind has one matrix with
    the output tokens of attention or MLP, with or without the skip connection. The dictionary is
    empty if the block cannot be split into its attention and its MLP.
    """
    parts = record.parts
    if parts is None:
        return {}
    middle = parts.apply_attention(record.input)
    grayed = parts.graying(record.input)
    attention = parts.attention(parts.norm1(grayed))
    mlp = parts.mlp(parts.norm2(middle))
    outputs = (attention, grayed + attention, mlp, middle + mlp)
    matrices = {facet: output[None] for facet, output in zip(OUTPUTS, outputs, strict=True)}
    if parts.heads is not None:
        matrices[MATRIX] = parts.heads.matrices(parts.norm1(grayed))
    return matrices


def _median_spectrum(values: Float64[Tensor, "images heads values"]) -> dict[str, Any]:
    """Return the median spectrum of some matrices, as details to store with a score.

    The singular values of each matrix are divided by the largest one. For each position in the
    sorted singular values, the median is then taken over images and heads. At most `_STORED_VALUES`
    evenly spaced positions are returned, together with their indices.
    """
    largest = values[..., :1]
    shares = values / largest.where(largest > 0, 1.0)
    relative = np.median(shares.flatten(0, 1).numpy(), axis=0)
    number = min(_STORED_VALUES, len(relative))
    places = np.linspace(0, len(relative) - 1, number).round().astype(int)
    return {"spectrum": relative[places].tolist(), "spectrum_of_places": places.tolist()}


def mean_cosine(tokens: Float[Tensor, "tokens dim"]) -> float:
    """Return the mean cosine similarity over all pairs of different tokens, in [-1, 1].

    The cosine similarity to a token of zeros is 0. The mean is NaN if there is only one token.
    """
    unit = unit_vectors(tokens.double())
    count = len(tokens)
    if count < 2:
        return float("nan")
    pairs = unit.sum(0).square().sum() - unit.square().sum()
    return float(pairs) / (count * (count - 1))


@torch.no_grad()
def mean_log_scores(layers: Sequence[int], records: BlockRecords) -> list[Score]:
    """Score the mean logarithm of the condition numbers of tokens before and after attention.

    The facet (kind of token matrix) "before" contains the input of the norm before attention. In a
    block with token graying, "before" contains the grayed tokens. The facet "after" is the sum of
    "before" and the output of attention. For each image, the logarithms are averaged over blocks 0
    to the scored block. The score is the median of these averages over images. A block has no score
    if the block or an earlier block cannot be split into its parts.

    Args:
        layers: Indices of the blocks to score.
        records: Inputs and outputs of all blocks up to the last scored one.
    """
    scores = []
    for layer in layers:
        blocks = [records[block] for block in range(layer + 1)]
        if any(record.parts is None for block in blocks for record in block):
            continue
        logarithms = [[_log_condition_numbers(record) for record in block] for block in blocks]
        means = np.array(logarithms, dtype=np.float64).mean(0)  # images facets
        details = {"blocks": layer + 1, "guesses": list(_MEAN_LOG_GUESSES)}
        scores += [
            _median_score(layer, facet, MEAN_LOG, means[:, [column]], **details)
            for column, facet in enumerate(MEAN_LOG_FACETS)
        ]
    return scores


def _log_condition_numbers(record: BlockRecord) -> list[float]:
    """Return the logarithms of the condition numbers of tokens before and after attention.

    The tokens after attention are the tokens before attention plus the output of attention.
    `record` contains the input of a block for one image.
    """
    assert record.parts is not None
    before = record.parts.graying(record.input)
    after = before + record.parts.attention(record.parts.norm1(before))
    return [
        float(condition_number(singular_values(tokens), max(tokens.shape)).log())
        for tokens in (before, after)
    ]


def exact_scores(layer: int, records: Sequence[BlockRecord]) -> list[Score]:
    """Score the Jacobians of one block from all of their singular values.

    `records` contains the input and output of the block for each image.
    """
    by_image = [exact_spectra(record) for record in records]
    scores, norms = list[Score](), dict[str, Numbers]()
    for facet in _common_facets(JACOBIANS, by_image):
        spectra = [found[facet] for found in by_image]
        norms[facet] = _to_column([float(values[0]) for values in spectra])
        if facet in BLOCK_JACOBIANS:
            details = {"spectra": [rank_details(values) for values in spectra]}
            numbers = _to_column([float(condition_number(s, len(s))) for s in spectra])
            scores.append(_median_score(layer, facet, "condition_number", numbers, **details))
            ranks = _to_column([float(effective_rank(values)) for values in spectra])
            scores.append(_median_score(layer, facet, "effective_rank", ranks))
    return scores + _term_scores(layer, norms, "", {})


def lanczos_scores(
    layer: int, records: Sequence[BlockRecord], steps: int, seed: int
) -> list[Score]:
    """Score the Jacobians of one block from bounds of their singular values.

    The bounds come from `steps` Lanczos iterations, whose start vectors depend on `seed`. `records`
    contains the input and output of the block for each image.
    """
    by_image = [lanczos_bounds(record, steps=steps, seed=seed) for record in records]
    scores, norms, at_most = list[Score](), dict[str, Numbers](), dict[str, list[float]]()
    for facet in _common_facets(JACOBIANS, by_image):
        bounds = [found[facet] for found in by_image]
        norms[facet] = _to_column([bound.largest for bound in bounds])
        if facet in ("dominant", "perturbation"):
            at_most[f"{facet}_at_most"] = [bound.largest_at_most for bound in bounds]
        if facet in BLOCK_JACOBIANS:
            details = {"bounds": [bound.details() for bound in bounds]}
            numbers = _to_column([bound.condition_number_at_least for bound in bounds])
            metric = "condition_number_at_least"
            scores.append(_median_score(layer, facet, metric, numbers, **details))
            ranks = _to_column([bound.effective_rank for bound in bounds])
            scores.append(_median_score(layer, facet, "effective_rank" + ESTIMATE, ranks))
    return scores + _term_scores(layer, norms, ESTIMATE, at_most)


def _term_scores(
    layer: int, norms: Mapping[str, Numbers], suffix: str, details: Mapping[str, Any]
) -> list[Score]:
    """Score the spectral norms of the two terms of the attention Jacobian, and their ratio.

    The term "dominant" is the derivative with fixed attention matrices, and "perturbation" is the
    derivative with fixed values. The ratio is the "perturbation" norm divided by the "dominant"
    norm. `norms` contains the norms of each term for all images. `suffix` is appended to the names
    of the metrics.
    """
    if "perturbation" not in norms:
        return []
    dominant, perturbation = norms["dominant"], norms["perturbation"]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = perturbation / dominant
    return [
        _median_score(layer, "dominant", "norm" + suffix, dominant, **details),
        _median_score(layer, "perturbation", "norm" + suffix, perturbation, **details),
        _median_score(layer, "perturbation", "norm_over_dominant" + suffix, share, **details),
    ]


def _common_facets(facets: Sequence[str], by_image: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the facets (kinds of matrices) that every image has, in the order of `facets`.

    For each image, `by_image` contains a dictionary with facets as keys.
    """
    return [facet for facet in facets if all(facet in found for found in by_image)]


def _to_column(values: Sequence[float]) -> Numbers:
    return np.array(values, dtype=np.float64)[:, None]


def cka_with_input(layer: int, records: Sequence[BlockRecord]) -> Score:
    """Return a score with the linear CKA between the input and the output of one block.

    `records` contains the input and output of the block for each image.
    """
    x, y = torch.stack([record.input for record in records]), stack_outputs(records)
    ci95 = linear_cka_ci95(x, y)
    return make_score(layer, "token", "cka_with_input", linear_cka(x, y), ci95, len(records), {})


def stack_outputs(records: Sequence[BlockRecord]) -> Float64[Tensor, "images tokens dim"]:
    """Return the output tokens of one block for all images, as one tensor.

    `records` contains the input and output of the block for each image.
    """
    return torch.stack([record.output for record in records])


@dataclass(frozen=True)
class CkaMatrix:
    """A matrix with the linear CKA (similarity of tokens) between pairs of blocks.

    Attributes:
        values: CKA of the block in each row with the block in each column.
        rows: Names of the blocks in the rows.
        columns: Names of the blocks in the columns.
        other: Name of the encoder whose blocks are the columns. Empty if rows and columns belong to
            the same encoder.
    """

    values: Float64[np.ndarray, "rows columns"]
    rows: Sequence[str]
    columns: Sequence[str]
    other: str


def cka_matrix(
    rows: Mapping[str, Tokens], columns: Mapping[str, OtherTokens], other: str = ""
) -> CkaMatrix:
    """Compute the linear CKA for each pair of a block in `rows` and a block in `columns`.

    `rows` and `columns` are dictionaries from block names to tokens. If the blocks in `columns`
    belong to another encoder, `other` is the name of this encoder.
    """
    values = np.array([[linear_cka(x, y) for y in columns.values()] for x in rows.values()])
    return CkaMatrix(values, list(rows), list(columns), other)


def linear_cka(x: Tokens, y: OtherTokens) -> float:
    """Return the linear CKA between two representations `x` and `y` of the same tokens, in [0, 1].

    The tokens of all images are compared together. The CKA does not change if `x` or `y` is rotated
    or scaled. The CKA is biased upwards if there are few tokens. For n independent Gaussian tokens
    of dimension d, the CKA is about d / (n + d), not 0. The CKA is NaN if all tokens of `x` or all
    tokens of `y` are equal.

    Source: Kornblith et al., "Similarity of Neural Network Representations Revisited", 2019, last
    equation of section 3.
    """
    x, y = _centre(x).flatten(0, 1), _centre(y).flatten(0, 1)
    if not x.any() or not y.any():
        return float("nan")
    cross = (x.T @ y).square().sum()
    return float(cross / ((x.T @ x).norm() * (y.T @ y).norm()))


def linear_cka_ci95(x: Tokens, y: OtherTokens) -> Interval | None:
    """Return the 95 % confidence interval of the linear CKA of two representations.

    The interval comes from a jackknife over images on the logit scale, and is corrected for bias.

    Returns:
        The interval. It is None for a single image, if all tokens are equal, and if the CKA is 1.
        It is also None if the bias correction exceeds the margin of the interval, because there are
        then too few tokens to estimate the bias.
    """
    count = len(x)
    x, y = _centre(x), _centre(y)
    if count < 2 or not x.any() or not y.any():
        return None
    # The first row weights all images equally. Each further row leaves out one image.
    weights = torch.cat([torch.ones(1, count), 1 - torch.eye(count)]).double().to(x.device)
    xy, xx, yy = (_squared_covariance(a, b, weights) for a, b in ((x, y), (x, x), (y, y)))
    logits = (xy / (xx * yy).sqrt()).logit().cpu().numpy()
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
    """Return the squared Frobenius norm of the centred cross-covariance of x and y.

    Each row w of `weights` contains a weight for each image, and gives one value:
    ||sum_a w_a M_a - s t^T / n||^2. Here, M_a = X_a^T Y_a is the product for image a. The vectors s
    and t are the weighted sums of the tokens of x and y, and n is the weighted number of tokens.
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


def _centre(x: Tokens) -> Float64[Tensor, "images tokens dim"]:
    """Subtract the mean token. If all tokens are equal up to rounding, the result is exactly 0."""
    x = x.double()
    centred = x - x.mean((0, 1))
    noise = x.shape[0] * x.shape[1] * torch.finfo(torch.float64).eps * x.norm()
    return centred if centred.norm() > noise else torch.zeros_like(centred)
