"""What runs on a GPU in the place of decompositions, against them, in float64."""

import math

import pytest
import torch
from torch import Tensor

from ssl_bench.models.graying import gray_by_cholesky, gray_by_svd
from ssl_bench.models.orthogonal import (
    OrthogonalAttention,
    cholesky_basis,
    most_doublings,
    phi,
    phi_without_sync,
)
from tests.support.matrices import normal as drawn

ANGLES = [0.0, 0.1, 200.0, 1e4]


def with_values(values: Tensor, rows: int, cols: int) -> Tensor:
    """Two matrices with these singular values."""
    left, right = (
        torch.linalg.qr(drawn(2, size, len(values), seed=size)).Q for size in (rows, cols)
    )
    return (left * values) @ right.mT


def rotating(norm: float, count: int = 2, side: int = 8) -> Tensor:
    """Skew-symmetric matrices, float32."""
    x = drawn(count, side, side)
    skew = x - x.mT
    return (skew * norm / torch.linalg.matrix_norm(skew, 2)[:, None, None]).float()


@pytest.mark.parametrize("norm", ANGLES)
def test_phi_without_waiting_is_phi_bit_by_bit(norm):
    skew = rotating(norm)
    assert torch.equal(phi_without_sync(skew), phi(skew))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_doublings_are_enough_as_long_as_rounding_leaves_angles(dtype):
    # The largest matrix that is left as it is: rounding moves its angles by 2^-7.
    largest = (torch.finfo(dtype).eps * math.factorial(13)) ** (1 / 13) * 2 ** most_doublings(dtype)
    assert largest * torch.finfo(dtype).eps == pytest.approx(2**-7, rel=1)
    angle = torch.tensor(0.999 * largest, dtype=dtype)
    skew = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=dtype) * angle
    exponential = torch.eye(2, dtype=dtype) + phi_without_sync(skew) @ skew
    cosine, sine = angle.double().cos(), angle.double().sin()
    expected = torch.stack([cosine, -sine, sine, cosine]).view(2, 2)
    torch.testing.assert_close(exponential.double(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("norm", [1e6, 1e15])
def test_beyond_them_it_is_a_rotation_still_and_its_gradient_finite(norm):
    skew = rotating(norm).requires_grad_()
    phi_without_sync(skew).sum().backward()
    assert skew.grad is not None
    assert skew.grad.isfinite().all()
    skew = skew.detach().double()
    exponential = torch.eye(8) + phi_without_sync(skew.float()).double() @ skew
    error = exponential.mT @ exponential - torch.eye(8)
    assert error.abs().max() < 0.05


@pytest.mark.parametrize("norm", [0.1, 30.0])
def test_the_gradient_of_phi_without_waiting_is_that_of_its_doublings(norm):
    weights = drawn(2, 8, 8, seed=1)
    found = []
    for function, dtype in ((phi_without_sync, torch.float32), (phi, torch.float64)):
        skew = rotating(norm).to(dtype).requires_grad_()
        (function(skew) * weights.to(dtype)).sum().backward()
        assert skew.grad is not None
        found.append(skew.grad.double())
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_the_gradient_of_phi_agrees_with_finite_differences_beyond_skewness():
    x = (0.3 * drawn(1, 3, 3)).requires_grad_()
    assert torch.autograd.gradcheck(phi_without_sync, (x,))


@pytest.mark.parametrize("shape", [(30, 8), (5, 8)])
@pytest.mark.parametrize("decades", [0, 7, 12])
def test_a_cholesky_basis_is_orthonormal_and_holds_the_columns(shape, decades):
    rank = min(shape)
    m = with_values(torch.logspace(0, -decades, rank).double(), *shape).float()
    basis = cholesky_basis(m).double()
    assert (m - basis @ (basis.mT @ m.double())).abs().max() < 2e-7
    assert torch.linalg.svdvals(basis)[:, :rank].sub(1).abs().max() < 2e-6


@pytest.mark.parametrize("function", [cholesky_basis, lambda x: gray_by_cholesky(x, 0.7)])
def test_an_image_that_is_zero_or_not_finite_leaves_others_alone(function):
    assert torch.equal(function(torch.zeros(2, 5, 3)), torch.zeros(2, 5, 3))
    x = drawn(2, 9, 4).float()
    expected = function(x)[1]
    x[0, 3, 2] = math.nan
    result = function(x)
    assert result[0].isnan().any()
    assert torch.equal(result[1], expected)


@pytest.mark.parametrize(("count", "alpha"), [(1, 0.1), (5, 1.0), (30, 1.0)])
def test_attention_with_a_cholesky_basis_is_that_with_qr(count, alpha, monkeypatch):
    torch.manual_seed(0)
    attention, x = OrthogonalAttention(12, 3, "qr", alpha), drawn(2, count, 12, seed=1)
    weights = drawn(2, count, 12, seed=2)
    expected = _values_and_gradients(attention.double(), x, weights)
    monkeypatch.setattr("ssl_bench.models.orthogonal.orthonormal_basis", cholesky_basis)
    monkeypatch.setattr("ssl_bench.models.orthogonal.phi", phi_without_sync)
    ours = _values_and_gradients(attention.float(), x.float(), weights.float())
    for one, other in zip(ours, expected, strict=True):
        scale = other.abs().max().clamp_min(1)
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=1e-5)


def _values_and_gradients(
    attention: OrthogonalAttention, start: Tensor, weights: Tensor
) -> list[Tensor]:
    x = start.clone().requires_grad_()
    value = attention(x)
    given = [x, *attention.parameters()]
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), given)]


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
@pytest.mark.parametrize("decades", [0.5, 5])
@pytest.mark.parametrize("exponent", [0.5, 0.95])
def test_raised_singular_values_are_those_of_the_decomposition(shape, decades, exponent):
    x = with_values(torch.logspace(1, 1 - decades, min(shape)).double(), *shape).float()
    weights = drawn(*x.shape, seed=3)
    found = []
    for function, start in ((gray_by_cholesky, x), (gray_by_svd, x.double())):
        given = start.clone().requires_grad_()
        value = function(given, exponent)
        (gradient,) = torch.autograd.grad((value * weights.to(value.dtype)).sum(), given)
        scales = 10.0, gradient.abs().max()
        found += [value.detach().double() / scales[0], gradient.double() / scales[1]]
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[1], found[3], rtol=0, atol=2e-5)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e15])
@pytest.mark.parametrize("case", ["full rank", "same tokens", "one token"])
def test_raising_singular_matrices_gives_finite_values_and_gradients(case, factor):
    x = {
        "full rank": drawn(1, 7, 5),
        "same tokens": drawn(1, 1, 5).expand(1, 7, 5),
        "one token": drawn(1, 1, 5),
    }[case].float() * factor
    given = x.clone().requires_grad_()
    assert torch.equal(gray_by_cholesky(given, 1.0), x)
    value = gray_by_cholesky(given, 0.5)
    value.backward(drawn(*x.shape, seed=3).float())
    assert given.grad is not None
    assert value.isfinite().all()
    assert given.grad.isfinite().all()
    if case != "full rank":
        torch.testing.assert_close(
            value / max(factor, 1e-38), x / max(factor, 1e-38), rtol=0, atol=1e-5
        )
