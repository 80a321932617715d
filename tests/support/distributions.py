"""Check whether random draws have the expected distribution."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import chi2_contingency, ks_2samp, kstest

# Significance level. Seeds are fixed, so no test fails by chance later.
_LEVEL = 1e-4


def have_same_distribution(draws: Any, others: Any) -> bool:
    result: Any = ks_2samp(draws, others)
    return result.pvalue > _LEVEL


def has_distribution(draws: Any, distribution: Callable[[Any], Any]) -> bool:
    result: Any = kstest(draws, distribution)
    return result.pvalue > _LEVEL


def have_same_frequencies(counts: Sequence[Any], other_counts: Sequence[Any]) -> bool:
    # An outcome must occur in both lists or in neither.
    table = np.array([counts, other_counts])
    occurs = (table > 0).any(axis=0)
    result: Any = chi2_contingency(table[:, occurs])
    return bool(((table > 0).all(axis=0) == occurs).all()) and result.pvalue > _LEVEL
