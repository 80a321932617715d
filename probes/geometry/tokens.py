"""What can be said of the patch tokens of each image alone: long ones, and likeness to others."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Patches = Float[Tensor, "images rows cols dim"]


def outlier_share(patches: Patches, factor: float) -> Float[Tensor, " images"]:
    """Of each image the percent of patches longer than `factor` times its median length.

    Of an even number of patches the median is the mean of the two in the middle.
    """
    lengths = patches.norm(dim=-1).flatten(1).sort(1).values
    count = lengths.shape[1]
    median = (lengths[:, (count - 1) // 2] + lengths[:, count // 2]) / 2
    return 100 * (lengths > factor * median[:, None]).float().mean(1)


def patch_cosine(
    tokens: Float[Tensor, "images tokens dim"], patches: Patches
) -> Float[Tensor, " images"]:
    """Of each image the mean cosine of these tokens with all patches; 0 with a zero token."""
    # A mean of products of unit vectors is the product of their means.
    ours = F.normalize(tokens, dim=-1).mean(1)
    theirs = F.normalize(patches.flatten(1, 2), dim=-1).mean(1)
    return (ours * theirs).sum(-1)
