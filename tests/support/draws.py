"""Statistical tests of the distribution of random draws."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import chi2_contingency, ks_2samp, kstest

# Significance level. Seeds are fixed, so no test fails by chance later.
_LEVEL = 1e-4


def alike(draws: Any, others: Any) -> bool:
    """Return whether two samples agree in distribution (Kolmogorov-Smirnov test)."""
    result: Any = ks_2samp(draws, others)
    return result.pvalue > _LEVEL


def follows(draws: Any, distribution: Callable[[Any], Any]) -> bool:
    """Return whether a sample agrees with a cumulative distribution (Kolmogorov-Smirnov test)."""
    result: Any = kstest(draws, distribution)
    return result.pvalue > _LEVEL


def as_frequent(counts: Sequence[Any], other_counts: Sequence[Any]) -> bool:
    """Return whether two lists of counts agree (chi-square test) and have zeros in common.

    Every outcome that has a count of 0 in one list must also have a count of 0 in the other.
    """
    table = np.array([counts, other_counts])
    occurs = (table > 0).any(axis=0)
    result: Any = chi2_contingency(table[:, occurs])
    return bool(((table > 0).all(axis=0) == occurs).all()) and result.pvalue > _LEVEL
