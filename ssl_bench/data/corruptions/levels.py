"""From shares of full brightness to the levels of a picture."""

from typing import Any

import numpy as np
from jaxtyping import Float, UInt8


def as_levels(shares: Float[np.ndarray, "*axes"] | Any) -> UInt8[np.ndarray, "*axes"]:
    """Levels 0 to 255 of shares, which are cut off at 0 and 1; fractions are dropped."""
    return (np.clip(shares, 0, 1) * 255).astype(np.uint8)
