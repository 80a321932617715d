"""Create random matrices and compute their condition numbers."""

import torch

from probes.spectra import condition_number, effective_rank, singular_values


def condition(matrix):
    return float(condition_number(singular_values(matrix), max(matrix.shape)))


def rank(matrix):
    return float(effective_rank(singular_values(matrix)))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(size, seed=0):
    return torch.linalg.qr(normal(size, size, seed=seed)).Q
