"""Features of patches as tests make them up."""

import numpy as np
import torch
from torch import Tensor


def scene(*rectangles: tuple[slice, slice], shape: tuple[int, int] = (6, 8)):
    """Features that equal one of a few orthogonal directions in each patch."""
    labels = np.zeros(shape, int)
    for label, (rows, cols) in enumerate(rectangles, start=1):
        labels[rows, cols] = label
    return labels, torch.eye(4)[torch.from_numpy(labels)]


def mosaic(seed: int) -> Tensor:
    """Nine tiles of nine patches, each around a direction of its own."""
    generator = np.random.default_rng(seed)
    tiles = generator.standard_normal((3, 3, 6)).repeat(3, 0).repeat(3, 1)
    return torch.from_numpy(tiles + 0.5 * generator.standard_normal((9, 9, 6))).float()
