"""Which cosines of an image are large, by its own cosines: Otsu's threshold."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_BINS = 256


def otsu_thresholds(features: Float[Tensor, "graphs tokens dim"]) -> Float[Tensor, " graphs"]:
    """Of each image's tokens the threshold that splits the cosines of their pairs best.

    Best is the largest variance between both sides, over the middles of 256 bins between the
    smallest and the largest cosine; a token's cosine with itself does not count. No host waits.

    Source: Otsu, IEEE Trans. Systems, Man and Cybernetics 9 (1979), equation 18.
    """
    return torch.stack([_threshold(F.normalize(tokens.float(), dim=-1)) for tokens in features])


def _threshold(unit: Float[Tensor, "tokens dim"]) -> Float[Tensor, ""]:
    count = len(unit)
    if count < 2:
        return unit.new_zeros(())
    # Without the diagonal, which is every (count + 1)th entry.
    cosines = (unit @ unit.T).flatten()[:-1].view(count - 1, count + 1)[:, 1:].flatten().double()
    least, most = cosines.aminmax()
    width = (most - least) / _BINS
    bins = ((cosines - least) / width.clamp(min=1e-30)).long().clamp_(0, _BINS - 1)
    counts = cosines.new_zeros(_BINS).scatter_add_(0, bins, torch.ones_like(cosines))
    middles = least + width * (torch.arange(_BINS, device=unit.device) + 0.5)
    below, sums = counts.cumsum(0)[:-1], (counts * middles).cumsum(0)
    above = len(cosines) - below
    difference = sums[:-1] / below - (sums[-1] - sums[:-1]) / above.clamp(min=1)
    between = below * above * difference.square()
    return middles[between.argmax()].float()
