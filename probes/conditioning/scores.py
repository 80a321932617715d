"""From the matrices and tokens of a block to scores: plain numbers with what explains them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from probes.conditioning import block_jacobians
from probes.conditioning.block_jacobians import exact_spectra, lanczos_extremes
from probes.conditioning.cka import linear_cka, linear_cka_ci95
from probes.conditioning.jacobians import SingularExtremes
from probes.conditioning.matrices import Spectrum, log_condition_numbers
from probes.conditioning.passes import BlockPass, Passes
from probes.conditioning.probe import AROUND_ATTENTION, BLOCK_JACOBIANS, ESTIMATE, MATRIX, MEAN_LOG
from probes.spectra import median_with_ci95
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Score
from ssl_bench.models import Encoder
from ssl_bench.system.files import write_atomically

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
    by_image = [exact_spectra(one) for one in passes]
    scores = []
    for facet in _present(by_image):
        spectra = [found[facet] for found in by_image]
        if facet in BLOCK_JACOBIANS:
            more = {"spectra": [spectrum.details() for spectrum in spectra]}
            numbers = _column([spectrum.condition_number for spectrum in spectra])
            scores.append(_median(layer, facet, "condition_number", numbers, **more))
            ranks = _column([spectrum.effective_rank for spectrum in spectra])
            scores.append(_median(layer, facet, "effective_rank", ranks))
    norms = {f: _column([found[f].norm for found in by_image]) for f in _present(by_image)}
    return scores + _term_scores(layer, norms, "", {})


def lanczos_scores(layer: int, passes: Sequence[BlockPass], steps: int, seed: int) -> list[Score]:
    by_image = [lanczos_extremes(one, steps=steps, seed=seed) for one in passes]
    scores = []
    for facet in _present(by_image):
        found = [one[facet] for one in by_image]
        if facet in BLOCK_JACOBIANS:
            more = {"bounds": [_bounds(one) for one in found]}
            numbers = _column([one.condition_number_at_least for one in found])
            scores.append(_median(layer, facet, "condition_number_at_least", numbers, **more))
            ranks = _column([one.effective_rank for one in found])
            scores.append(_median(layer, facet, "effective_rank" + ESTIMATE, ranks))
    norms = {f: _column([one[f].largest for one in by_image]) for f in _present(by_image)}
    above = {
        f"{f}_at_most": [one[f].largest_at_most for one in by_image]
        for f in ("dominant", "perturbation")
        if f in norms
    }
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


def _present(by_image: Sequence[Mapping[str, Any]]) -> list[str]:
    """Facets that every image has."""
    return [f for f in block_jacobians.FACETS if all(f in found for found in by_image)]


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


def require_same_tokens(
    encoder: Encoder,
    ours: Mapping[int, torch.Tensor],
    other: Encoder,
    theirs: Mapping[int, torch.Tensor],
) -> None:
    counts = [next(iter(states.values())).shape[1] for states in (ours, theirs)]
    if counts[0] != counts[1]:
        raise ConfigurationError(
            f"CKA needs the same tokens: {encoder.name} has {counts[0]}, {other.name} {counts[1]}; "
            "compare encoders of the same patch size and registers"
        )


def save_spectra(spectra: Mapping[int, Mapping[str, Spectrum]], path: Path) -> None:
    """All singular values, images x heads x values, as blockNN_FACET."""
    arrays: dict[str, Any] = {
        f"block{layer:02d}_{facet}": spectrum.values.numpy()
        for layer, facets in spectra.items()
        for facet, spectrum in facets.items()
    }
    write_atomically(path, lambda file: np.savez_compressed(file, **arrays))
