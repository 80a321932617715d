"""What an initialisation does to the tokens, block by block."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ssl_bench.models import VisionTransformer
from ssl_bench.models.initialisers import effective_rank


@dataclass(frozen=True)
class TokenStatistics:
    """How far the tokens of an image are from being all the same.

    Args:
        effective_rank: Exponential of the entropy of the normalised singular values of the centered
            tokens; 1 where they lie on a line. Of rounding alone where `mean_cosine` is 1.
        mean_cosine: Mean over all pairs of different tokens; 1 where they have collapsed.
        condition_number: Largest over smallest singular value of the tokens.
    """

    effective_rank: float
    mean_cosine: float
    condition_number: float


def token_statistics(tokens: Float[Tensor, "tokens dim"]) -> TokenStatistics:
    """Statistics of one image's tokens, in float64."""
    tokens = tokens.double()
    scales = torch.linalg.svdvals(tokens)
    unit = F.normalize(tokens, dim=1)
    count = len(tokens)
    return TokenStatistics(
        effective_rank=effective_rank(tokens),
        mean_cosine=float(((unit @ unit.T).sum() - count) / (count * (count - 1))),
        condition_number=float(scales[0] / scales[-1]),
    )


@torch.no_grad()
def block_statistics(
    model: VisionTransformer, image: Float[Tensor, "3 height width"]
) -> list[TokenStatistics]:
    """Statistics after each block, for one normalised image; all tokens count, [CLS] too."""
    x = model.embed(image[None])
    statistics = []
    for block in model.blocks:
        x = block(x)
        statistics.append(token_statistics(x[0]))
    return statistics
