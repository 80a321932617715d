"""How often the intervals of other scores than mean IoU hold the truth, with few images."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import binom

from probes.conditioning.cka import linear_cka, linear_cka_ci95
from probes.spectra import median_with_ci95
from ssl_bench.intervals import Share, mean_estimate

Array = Float[np.ndarray, "..."]
Row = dict[str, Any]

_REPLICATIONS = 500
_RESAMPLES = 300


def other_rows() -> list[Row]:
    """Of shares, their differences in pairs, means, medians and CKA."""
    found = (_shares(), _share_differences(), _means(), _medians(), _cka())
    return [row for rows in found for row in rows]


def _shares() -> Iterator[Row]:
    """Exact: every number of hits with its probability."""
    for images in (10, 26, 60, 200):
        for share in (0.5, 0.9, 0.98, 0.995):
            numbers = np.arange(images + 1)
            chance = binom.pmf(numbers, images, share)
            ends = [Share(np.arange(images) < number).ci95() for number in numbers]
            old = [100 * binom.ppf(q, images, numbers / images) / images for q in (0.025, 0.975)]
            case = f"share of {100 * share:g} %"
            yield _row(case, images, "taken", np.array(ends), 100 * share, chance)
            yield _row(case, images, "percentile", np.stack(old, 1), 100 * share, chance)


def _share_differences() -> Iterator[Row]:
    random = np.random.default_rng(0)
    for images in (10, 26, 60, 200):
        for gained, lost in ((0.02, 0.02), (0.05, 0.0), (0.3, 0.1)):
            ends, old = [], []
            for _ in range(_REPLICATIONS):
                draw = random.random(images)
                first, second = (draw < lost, draw >= 1 - gained)
                ends.append(Share(second).difference_ci95(Share(first)))
                old.append(_percentile(100.0 * (second * 1.0 - first), random))
            case, true = f"gained {100 * gained:g}, lost {100 * lost:g} %", 100 * (gained - lost)
            yield _row(case, images, "taken", np.array(ends), true)
            yield _row(case, images, "percentile", np.array(old), true)


def _means() -> Iterator[Row]:
    random = np.random.default_rng(0)
    for images in (4, 10, 20):
        for one, other in ((2, 1), (20, 2)):
            ends, old = [], []
            for _ in range(_REPLICATIONS):
                values = 100 * random.beta(one, other, images)
                ends.append(mean_estimate(values).ci95())
                old.append(_percentile(values, random))
            case, true = f"mean of beta({one}, {other})", 100 * one / (one + other)
            yield _row(case, images, "taken", np.array(ends), true)
            yield _row(case, images, "percentile", np.array(old), true)


def _medians() -> Iterator[Row]:
    """Over images and six heads, which differ more or less than images do."""
    random = np.random.default_rng(0)
    for images in (4, 6, 16):
        for between_images, between_heads in ((0.3, 1.0), (1.0, 0.3)):
            heads = between_heads * random.normal(size=6)

            def draw(count: int, spread: float = between_images, heads: Array = heads) -> Array:
                image = spread * random.normal(size=(count, 1))
                return heads + image + 0.3 * random.normal(size=(count, 6))

            true, ends, old = float(np.median(draw(200_000))), [], []
            for _ in range(_REPLICATIONS):
                values = draw(images)
                ends.append(median_with_ci95(values)[1])
                chosen = values[random.integers(images, size=(_RESAMPLES, images))]
                medians = np.median(chosen.reshape(_RESAMPLES, -1), axis=1)
                old.append(np.quantile(medians, [0.025, 0.975]))
            case = f"median, images differ by {between_images:g}, heads by {between_heads:g}"
            yield _row(case, images, "taken", np.array(ends), true)
            yield _row(case, images, "percentile", np.array(old), true)


def _cka() -> Iterator[Row]:
    """Of 49 tokens whose image shifts and scales them; one side is a noisy map of the other."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = normal(6, 24)

    def draw(count: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (normal(count, 49, 6) + normal(count, 1, 6)) * (0.2 * normal(count, 1, 1)).exp()
        x = tokens @ basis
        return x, torch.tanh(0.3 * x) + noise * normal(count, 49, 24)

    for noise in (0.3, 2.0):
        true = linear_cka(*draw(4000, noise))
        for images in (4, 8, 16):
            ends = [
                linear_cka_ci95(*draw(images, noise)) or (np.nan, np.nan)
                for _ in range(_REPLICATIONS)
            ]
            yield _row(f"CKA of {true:.2f}", images, "taken", np.array(ends), true)


def _percentile(values: Array, random: np.random.Generator) -> Array:
    chosen = values[random.integers(len(values), size=(_RESAMPLES, len(values)))]
    return np.quantile(chosen.mean(1), [0.025, 0.975])


def _row(
    case: str, images: int, interval: str, ends: Array, true: float, chance: Array | None = None
) -> Row:
    held = (ends[:, 0] <= true) & (true <= ends[:, 1])
    return {
        "case": case,
        "images": images,
        "interval": interval,
        "truth": true,
        "covers": float(np.average(held, weights=chance)),
        "width": float(np.average(ends[:, 1] - ends[:, 0], weights=chance)),
    }
