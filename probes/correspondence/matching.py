"""Where the points of one image are found in another, by the features of both."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

# Unit vectors closer than this to each other tell nothing apart.
_CONSTANT = 1e-6


def similarities(
    source: Float[Tensor, "batch source_rows source_cols dim"],
    target: Float[Tensor, "batch rows cols dim"],
    points: Float[Tensor, "batch points 2"],
) -> Float[Tensor, "batch points rows cols"]:
    """Cosine between what the source has at some points and every patch of the target.

    Args:
        source: Features of patches.
        target: The same.
        points: (x, y) in the source, relative to its width and height.
    """
    wanted = F.normalize(at_points(source, points), dim=-1)
    offered = F.normalize(target.flatten(1, 2), dim=-1)
    return (wanted @ offered.mT).unflatten(-1, target.shape[1:3])


def at_points(
    features: Float[Tensor, "batch rows cols dim"], points: Float[Tensor, "batch points 2"]
) -> Float[Tensor, "batch points dim"]:
    """Features at points between the middles of patches, bilinear; beyond the last ones theirs."""
    maps = features.permute(0, 3, 1, 2)
    # Without aligned corners -1 and 1 are the edges of the map, as 0 and 1 are ours.
    found = F.grid_sample(
        maps, (2 * points - 1)[:, :, None], padding_mode="border", align_corners=False
    )
    return found[..., 0].mT


def best_cells(
    similarity: Float[Tensor, "batch points rows cols"],
) -> Float[Tensor, "batch points 2"]:
    """The middle of the most similar patch as (x, y) relative to width and height."""
    rows, cols = similarity.shape[-2:]
    best = similarity.flatten(2).argmax(-1)
    cells = torch.stack([best % cols, best // cols], -1) + 0.5
    return cells / torch.tensor([cols, rows], device=cells.device)


def soft_cells(
    similarity: Float[Tensor, "batch points rows cols"], *, sigma: float, temperature: float
) -> Float[Tensor, "batch points 2"]:
    """The mean place under a softmax of similarities that a Gaussian damps away from the best.

    Args:
        similarity: Cosines.
        sigma: Of the Gaussian, in patches.
        temperature: Of the softmax.

    Source: `kernel_softargmax_get_matches_logits` of https://github.com/visinf/INSID3 (f1c9622a),
    `utils/keypoints.py`. Theirs gives the index of a cell, ours its middle.
    """
    rows, cols = similarity.shape[-2:]
    sides = torch.tensor([cols, rows], device=similarity.device)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    middles = torch.stack([x, y], -1).to(similarity) + 0.5  # rows cols 2
    best = (best_cells(similarity) * sides)[:, :, None, None]
    damped = similarity * torch.exp(-(middles - best).square().sum(-1) / (2 * sigma**2))
    weights = (damped.flatten(2) / temperature).softmax(-1)
    return weights @ middles.flatten(0, 1) / sides


def constant(features: Float[Tensor, "batch rows cols dim"]) -> Bool[Tensor, " batch"]:
    """Whether all patches of an image look the same, so that rounding chooses among them."""
    unit = F.normalize(features.flatten(1, 2), dim=-1)
    return (unit - unit[:, :1]).abs().amax((1, 2)) < _CONSTANT
