"""How many directions the tokens of an image fill."""

import torch
from jaxtyping import Float
from torch import Tensor


def effective_rank(tokens: Float[Tensor, "tokens dim"]) -> float:
    """Exponential of the entropy of the centered tokens' normalised singular values.

    0 where all tokens are the same.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    values = torch.linalg.svdvals((tokens - tokens.mean(0)).double())
    if not values.any():
        return 0.0
    return float(torch.special.entr(values / values.sum()).sum().exp())
