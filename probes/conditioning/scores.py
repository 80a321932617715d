"""From the matrices, Jacobians and tokens of a block to scores: numbers with what explains them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.conditioning.cka import linear_cka, linear_cka_ci95
from probes.conditioning.decomposition import BlockPass, Passes
from probes.conditioning.jacobians import (
    JACOBIANS,
    SingularExtremes,
    exact_spectra,
    lanczos_extremes,
)
from probes.spectra import (
    Values,
    condition_number,
    effective_rank,
    mean_cosine,
    median_with_ci95,
    singular_values,
)
from ssl_bench.evaluation import Score
from ssl_bench.models.initialisers.statistics import effective_rank as centered_effective_rank
from ssl_bench.system.files import write_atomically

MATRIX = "attention_matrix"
OUTPUTS = ("attention", "attention_skip", "mlp", "mlp_skip")
FACETS = (MATRIX, *OUTPUTS)
BLOCK_JACOBIANS = ("attention", "attention_skip", "mlp", "block", "dominant")
AROUND_ATTENTION = ("before", "after")
MEAN_LOG = "mean_log_condition_number"
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
Numbers = Float64[np.ndarray, "images values"]


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
        details = {"undefined": SAME, **details}
    return Score(layer, facet, metric, value, ci95, num_images, details, unit="")


def _median(layer: int, facet: str, metric: str, numbers: Numbers, **details: Any) -> Score:
    """The median over images (and heads), with what each of them gave."""
    value, ci95 = median_with_ci95(numbers)
    more = {"per_image": numbers.tolist(), **details}
    if np.isinf(numbers).any():
        more["infinite_percent"] = 100 * float(np.isinf(numbers).mean())
    return plain(layer, facet, metric, value, ci95, len(numbers), more)


@dataclass(frozen=True)
class Spectrum:
    """One kind of matrix of a block, over images (and heads).

    Attributes:
        values: Singular values.
        size: Of the larger side of the matrices.
        cosines: Mean token cosine of each image; None for attention matrices.
        centered_ranks: Effective rank of each image's tokens less their mean; None for attention
            matrices.
    """

    values: Float64[Tensor, "images heads values"]
    size: int
    cosines: Float64[np.ndarray, "images 1"] | None
    centered_ranks: Float64[np.ndarray, "images 1"] | None

    def condition_numbers(self) -> Float64[np.ndarray, "images heads"]:
        return condition_number(self.values, self.size).numpy()

    def effective_ranks(self) -> Float64[np.ndarray, "images heads"]:
        return effective_rank(self.values).numpy()

    def relative(self) -> Float64[np.ndarray, " values"]:
        """Median over images and heads of the values divided by the largest; 0 if that is 0."""
        largest = self.values[..., :1]
        shares = self.values / largest.where(largest > 0, 1.0)
        return np.median(shares.flatten(0, 1).numpy(), axis=0)


@torch.no_grad()
def block_spectra(passes: Sequence[BlockPass]) -> dict[str, Spectrum]:
    """The spectra of one block by facet; what cannot be had is not there.

    "attention" and "mlp" are what the sub-block computes; with "_skip" its input is added, as the
    encoder itself does where it has that skip.
    """
    by_image = [_matrices(one) for one in passes]
    found = {}
    for facet in _present(FACETS, by_image):
        matrices = [of_image[facet] for of_image in by_image]
        values: Values = torch.stack([singular_values(matrix) for matrix in matrices]).cpu()
        cosines = centered = None
        if facet != MATRIX:
            cosines = np.array([[mean_cosine(tokens)] for (tokens,) in matrices])
            centered = np.array([[centered_effective_rank(tokens)] for (tokens,) in matrices])
        found[facet] = Spectrum(values, max(matrices[0].shape[1:]), cosines, centered)
    return found


@torch.no_grad()
def log_condition_numbers(one: BlockPass) -> tuple[float, float] | None:
    """Natural logarithms of the tokens' condition numbers before and after attention and its skip.

    The tokens before are those that attention is given, grayed where the block grays them. None
    where the block cannot be taken apart.
    """
    if one.parts is None:
        return None
    before = one.parts.graying(one.entered)
    after = before + one.parts.attention(one.parts.norm1(before))
    first, second = (
        float(condition_number(singular_values(tokens), max(tokens.shape)).log())
        for tokens in (before, after)
    )
    return first, second


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


def spectra_scores(layer: int, spectra: Mapping[str, Spectrum]) -> list[Score]:
    scores = []
    for facet, spectrum in spectra.items():
        relative = spectrum.relative()
        places = np.linspace(0, len(relative) - 1, min(_SHOWN_VALUES, len(relative))).round()
        shown = {
            "spectrum": relative[places.astype(int)].tolist(),
            "spectrum_of_places": places.astype(int).tolist(),
        }
        conditions, ranks = spectrum.condition_numbers(), spectrum.effective_ranks()
        scores.append(_median(layer, facet, "condition_number", conditions, **shown))
        centered = {}
        if spectrum.centered_ranks is not None:
            centered["centred_effective_rank"] = float(np.median(spectrum.centered_ranks))
        scores.append(_median(layer, facet, "effective_rank", ranks, **centered))
        if facet != MATRIX:
            assert spectrum.cosines is not None
            scores.append(_median(layer, facet, "mean_cosine", spectrum.cosines))
    return scores


def mean_log_scores(layers: Sequence[int], passes: Passes) -> list[Score]:
    """Of each image the mean over the blocks up to the asked one, then the median over images.

    Args:
        layers: The asked ones.
        passes: Of all blocks up to the last of them.
    """
    scores = []
    for layer in layers:
        upto = [[log_condition_numbers(one) for one in passes[below]] for below in range(layer + 1)]
        known = [[pair for pair in pairs if pair is not None] for pairs in upto]
        if any(len(pairs) < len(asked) for pairs, asked in zip(known, upto, strict=True)):
            continue
        means = np.array(known, dtype=np.float64).mean(0)  # images facets
        scores += [
            _median(layer, facet, MEAN_LOG, means[:, [column]], blocks=layer + 1)
            for column, facet in enumerate(AROUND_ATTENTION)
        ]
    return scores


def exact_scores(layer: int, passes: Sequence[BlockPass]) -> list[Score]:
    by_image, norms = [exact_spectra(one) for one in passes], dict[str, Numbers]()
    scores = []
    for facet in _present(JACOBIANS, by_image):
        spectra = [found[facet] for found in by_image]
        norms[facet] = _column([spectrum.norm for spectrum in spectra])
        if facet in BLOCK_JACOBIANS:
            more = {"spectra": [spectrum.details() for spectrum in spectra]}
            numbers = _column([spectrum.condition_number for spectrum in spectra])
            scores.append(_median(layer, facet, "condition_number", numbers, **more))
            ranks = _column([spectrum.effective_rank for spectrum in spectra])
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
            more = {"bounds": [_bounds(one) for one in found]}
            numbers = _column([one.condition_number_at_least for one in found])
            scores.append(_median(layer, facet, "condition_number_at_least", numbers, **more))
            ranks = _column([one.effective_rank for one in found])
            scores.append(_median(layer, facet, "effective_rank" + ESTIMATE, ranks))
    return scores + _term_scores(layer, norms, ESTIMATE, above)


def _bounds(found: SingularExtremes) -> dict[str, Any]:
    return {
        "at_most_with_95_percent": found.condition_number_at_most,
        "steps": found.steps,
        "largest": found.largest,
        "largest_residual": found.largest_residual,
        "largest_at_most": found.largest_at_most,
        "smallest": found.smallest,
        "smallest_residual": found.smallest_residual,
        "smallest_at_least": found.smallest_at_least,
    }


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
    x, y = entered(passes), left(passes)
    ci95 = linear_cka_ci95(x, y)
    return plain(layer, "token", "cka_with_input", linear_cka(x, y), ci95, len(passes), {})


def entered(passes: Sequence[BlockPass]) -> Float64[torch.Tensor, "images tokens dim"]:
    return torch.stack([one.entered for one in passes])


def left(passes: Sequence[BlockPass]) -> Float64[torch.Tensor, "images tokens dim"]:
    return torch.stack([one.left for one in passes])


def cka_matrix(
    rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor]
) -> Float64[np.ndarray, "rows columns"]:
    return np.array([[linear_cka(x, y) for y in columns] for x in rows])


def save_spectra(spectra: Mapping[int, Mapping[str, Spectrum]], path: Path) -> None:
    """All singular values, images x heads x values, as blockNN_FACET."""
    arrays: dict[str, Any] = {
        f"block{layer:02d}_{facet}": spectrum.values.numpy()
        for layer, facets in spectra.items()
        for facet, spectrum in facets.items()
    }
    write_atomically(path, lambda file: np.savez_compressed(file, **arrays))
