"""Compute condition numbers and ranks in float64 from singular values or eigenvalues.

The probe `conditioning` measures matrices with the functions `condition_number` and
`effective_rank`. The probe `geometry` measures sets of feature vectors with the other functions.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from probes.features.moments import Moments

Values = Float64[Tensor, "*batch values"]
"""Singular values in descending order."""
# RankMe and LiDAR add this constant to each share of a spectrum.
SHARE_EPS = 1e-7
# If the variance of features, relative to their mean square, is below this value, they differ only
# by rounding in float32.
_CONSTANT = 1e-12


def singular_values(matrices: Float[Tensor, "*batch rows cols"]) -> Values:
    """Return all singular values of each matrix, in descending order and in float64."""
    return torch.linalg.svdvals(matrices.double())


def condition_number(values: Values, size: int) -> Float64[Tensor, "*batch"]:
    """Return the condition number: the largest singular value divided by the smallest.

    The condition number of a singular matrix is infinite. A matrix counts as singular if its
    smallest singular value is at most size * 2.2e-16 times the largest. Rounding errors can turn a
    singular value of zero into such a small value. A matrix of zeros also counts as singular.

    Args:
        values: All singular values of each matrix, in descending order.
        size: Number of rows or columns of a matrix, whichever is larger.
    """
    largest, smallest = values[..., 0], values[..., -1]
    singular = smallest <= size * torch.finfo(torch.float64).eps * largest
    return torch.where(singular, torch.inf, largest / smallest.where(~singular, 1.0))


def effective_rank(values: Values) -> Float64[Tensor, "*batch"]:
    """Return the effective rank of each matrix, given its singular values.

    The singular values are divided by their sum. The effective rank is the exponential of the
    entropy of the resulting shares, or 0 for a matrix of zeros.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    total = values.sum(-1, keepdim=True)
    shares = values / total.where(total > 0, 1.0)
    rank = torch.special.entr(shares).sum(-1).exp()
    return rank.where(total[..., 0] > 0, 0.0)


def rankme(moments: Moments) -> float:
    """Return RankMe, a smooth version of the rank of a set of vectors.

    RankMe is exp(-sum p ln p) with p = s / sum(s) + 1e-7, where s are the singular values of the
    matrix of all vectors. The mean of the vectors is not subtracted. The shares p are not
    normalised again. RankMe is about 1 if all vectors are equal, and NaN if all are zero. Without
    the constant 1e-7, RankMe would be at most min(vectors, dim).

    The singular values are computed as square roots of the eigenvalues of the second-moment matrix.
    Singular values below 1e-7 times the largest one are therefore lost in rounding errors.

    Source: Garrido et al., "RankMe", 2023, https://arxiv.org/abs/2210.02885.
    """
    second_moment = moments.second_moment
    values = _eigenvalues(second_moment, min(moments.count, len(second_moment))).sqrt()
    return _rank_with_constant(values) if values.any() else math.nan


def centred_effective_rank(moments: Moments) -> float:
    """Return the effective rank of a set of vectors after subtracting their mean.

    The effective rank is in [1, min(vectors - 1, dim)], or NaN if all vectors are equal. `moments`
    are the mean and covariance of the vectors.
    """
    if is_constant(moments):
        return math.nan
    return float(effective_rank(_variances(moments).sqrt()))


def alpha_req(moments: Moments, ranks: tuple[int, int]) -> tuple[float, tuple[int, int]]:
    """Fit a power law to the eigenvalues of the covariance (alpha-ReQ), and return its exponent.

    The exponent is the slope of ln(eigenvalue) over -ln(rank), fitted by least squares with weights
    1 / rank.

    Args:
        moments: Mean and covariance of the vectors.
        ranks: First and last rank of the eigenvalues to fit. The largest eigenvalue has rank 1.

    Returns:
        The exponent, and the first and last rank that were used. Ranks whose eigenvalue is zero are
        not used. The exponent is NaN if fewer than two eigenvalues remain.

    Source: Agrawal et al., "alpha-ReQ", 2022. The weights are those of
    https://github.com/kumarkrishna/fastssl/blob/96dfa37b/fastssl/utils/powerlaw.py.
    """
    first, last = ranks
    num_positive = 0 if is_constant(moments) else int((_variances(moments) > 0).sum())
    last = min(last, num_positive)
    if last <= first:
        return math.nan, (first, last)
    rank = torch.arange(first, last + 1, dtype=torch.float64)
    y = _variances(moments)[first - 1 : last].log().cpu()
    weights = (1 / rank) / (1 / rank).sum()
    x = -rank.log()
    x, y = x - (weights * x).sum(), y - (weights * y).sum()
    slope = (weights * x * y).sum() / (weights * x.square()).sum()
    return float(slope), (first, last)


def lidar(views: Float64[Tensor, "images views dim"], *, delta: float) -> float:
    """Return LiDAR, a rank of image vectors that takes the spread of their views into account.

    LiDAR is exp(-sum p ln p) with p = l / sum(l) + 1e-7, where l are the eigenvalues of the matrix
    W^-1/2 B W^-1/2. The vector of an image is the mean of its views, and B is the covariance of the
    image vectors. W is the covariance of the views around the vector of their image, with `delta`
    added to the diagonal of W. All `dim` eigenvalues count, including zeros, so the rank can be
    slightly above min(images - 1, dim).

    The result is NaN for a single image, and if all images have the same mean.

    Source: Thilak et al., "LiDAR", ICLR 2024, https://arxiv.org/abs/2312.04000. The paper adds a
    constant to the shares without stating its value. The value 1e-7 is taken from RankMe and from
    https://github.com/arnab39/reptrix.
    """
    count, num_views, dim = views.shape
    means = views.mean(1)
    centred_means = means - means.mean(0)
    if count < 2 or centred_means.square().sum() <= _CONSTANT * means.square().sum():
        return math.nan
    deviations = (views - means[:, None]).flatten(0, 1)
    within = deviations.T @ deviations / (count * (num_views - 1))
    within.diagonal().add_(delta)
    variances, axes = torch.linalg.eigh(within)
    whitened = (centred_means @ axes) / variances.clamp(min=delta).sqrt()
    # Both products have the same nonzero eigenvalues. The smaller one is faster.
    product = whitened @ whitened.T if count < dim else whitened.T @ whitened
    values = _eigenvalues(product, min(count - 1, dim))
    return _rank_with_constant(F.pad(values, (0, dim - len(values))))


def is_constant(moments: Moments) -> bool:
    """Return whether all vectors are equal up to rounding in float32, given their moments."""
    variance = float(moments.covariance.diagonal().sum())
    return variance <= _CONSTANT * float(moments.second_moment.diagonal().sum())


def _variances(moments: Moments) -> Float64[Tensor, " values"]:
    """Return the eigenvalues of the covariance of vectors, largest first.

    The covariance of n vectors has at most n - 1 nonzero eigenvalues. All other eigenvalues are
    left out.
    """
    covariance = moments.covariance
    return _eigenvalues(covariance, max(1, min(moments.count - 1, len(covariance))))


def _eigenvalues(matrix: Float64[Tensor, "dim dim"], limit: int) -> Float64[Tensor, " values"]:
    """Return the `limit` largest eigenvalues of a positive semidefinite matrix, largest first.

    Values that are zero up to rounding errors are set to 0.
    """
    values = torch.linalg.eigvalsh(matrix).flip(0)[:limit]
    rounding_error = len(matrix) * torch.finfo(torch.float64).eps * values[0]
    return torch.where(values > rounding_error, values, 0.0)


def _rank_with_constant(values: Float64[Tensor, " values"]) -> float:
    """Return the effective rank of non-negative values, with a small constant added to each share.

    The values are divided by their sum, and the constant `SHARE_EPS` is added to each of the
    resulting shares. The effective rank is the exponential of the entropy of the shares.
    """
    return float(torch.special.entr(values / values.sum() + SHARE_EPS).sum().exp())
