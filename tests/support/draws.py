"""Whether two samples of random draws may come from the same distribution."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import chi2_contingency, ks_2samp, kstest

# Seeds are fixed; one of ten thousand would fail without a reason.
_LEVEL = 1e-4


def alike(draws: Any, others: Any) -> bool:
    """Whether two samples of numbers may have one distribution, by Kolmogorov and Smirnov."""
    result: Any = ks_2samp(draws, others)
    return result.pvalue > _LEVEL


def follows(draws: Any, distribution: Callable[[Any], Any]) -> bool:
    """Whether a sample may have this cumulative distribution, by Kolmogorov and Smirnov."""
    result: Any = kstest(draws, distribution)
    return result.pvalue > _LEVEL


def as_frequent(counts: Sequence[Any], other_counts: Sequence[Any]) -> bool:
    """By the chi-square test; what never happens has to be the same in both."""
    table = np.array([counts, other_counts])
    seen = (table > 0).any(axis=0)
    result: Any = chi2_contingency(table[:, seen])
    return bool(((table > 0).all(axis=0) == seen).all()) and result.pvalue > _LEVEL
