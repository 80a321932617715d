"""phi(S) = (exp(S) - I) S^-1 of skew-symmetric matrices, by products alone."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_bench.models.precision import without_autocast
from ssl_bench.system.device import float64_device

Square = Float[Tensor, "*batch rank rank"]
Product = Callable[[Tensor, Tensor], Tensor]

# Taylor polynomial of the exponential: three groups of four terms, all but the constant one.
_DEGREE = 12
# More would scale to zero what float32 can hold.
_MOST_DOUBLINGS = 100
# Digits of an angle behind the point, to the base 2, that must be left.
_ANGLE_BITS = 7


def phi(skew: Square) -> Square:
    """(exp(S) - I) S^-1 = I + S / 2 + S^2 / 6 + ... of skew-symmetric matrices, singular ones too.

    Taylor polynomial of S / 2^n, then n times phi(2 X) = phi(X) + phi(X) X phi(X) / 2. Products
    alone, so that gradients cost twice the values; those of `torch.matrix_exp` take the exponential
    of a matrix of twice the side. In float32 on CUDA, or compiled, it is `phi_without_waiting`.
    """
    if skew.dtype == torch.float32 and (skew.is_cuda or torch.compiler.is_compiling()):
        return phi_without_waiting(skew)
    doublings = _doublings(skew, _MOST_DOUBLINGS)
    small = skew * torch.exp2(-doublings.to(skew.dtype))
    # The host waits for this number. A copy without values, such as FLOPs are counted on, cannot
    # say how many.
    count = 0 if skew.is_meta else int(doublings.max())
    return _doubled(small, doublings, count, torch.matmul, _identity(skew))


def phi_without_waiting(skew: Square) -> Square:
    """The same, bit by bit, without a look at values: as many doublings as are ever needed.

    The norm has no bound, for queries, keys and their factor are learned. Where rounding moves an
    angle by 2^-7 (norms of 1e5 in float32, 16 doublings), it is phi(w S) w, and phi(S) S still a
    rotation less I, that of a norm within this limit. The gradient holds w fixed, computes all
    anew, so that nothing but the matrix is kept for it, and is no further differentiable.
    """
    return _Phi.apply(skew)  # pyright: ignore[reportReturnType]


def most_doublings(dtype: torch.dtype) -> int:
    """How many doublings `phi_without_waiting` has for all matrices."""
    return -round(math.log2(torch.finfo(dtype).eps)) - _ANGLE_BITS


class _Phi(torch.autograd.Function):
    """`phi_without_waiting` with its gradient."""

    @staticmethod
    def forward(ctx: Any, skew: Tensor) -> Tensor:
        ctx.save_for_backward(skew)
        within, doublings = _limited(skew)
        small = skew * within * torch.exp2(-doublings.to(skew.dtype))
        count = most_doublings(skew.dtype)
        return within * _doubled(small, doublings, count, torch.matmul, _identity(skew))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The adjoint of the derivative at S is the derivative at S^T."""
        skew, gradient = ctx.saved_tensors[0].mT, gradients[0]
        within, doublings = _limited(skew)
        identity = _identity(skew).expand_as(skew)
        one = torch.stack([identity, torch.zeros_like(identity)])
        both = torch.stack([skew, gradient]) * within * torch.exp2(-doublings.to(skew.dtype))
        with without_autocast(skew.device):
            count = most_doublings(skew.dtype)
            return within * _doubled(both, doublings, count, _product_rule, one)[1]


def _limited(skew: Square) -> tuple[Float[Tensor, "*batch 1 1"], Int64[Tensor, "*batch 1 1"]]:
    """What keeps each matrix within the limit, and how often it is doubled then."""
    count = most_doublings(skew.dtype)
    within = (_largest(skew.dtype) * 2**count / _norm_bound(skew)).clamp(max=1)
    return within, _doublings(skew, count)


def _product_rule(
    left: Float[Tensor, "2 *batch rank rank"], right: Float[Tensor, "2 *batch rank rank"]
) -> Float[Tensor, "2 *batch rank rank"]:
    """The product of two matrices and its derivative, of the matrices and theirs."""
    change = left[1] @ right[0] + left[0] @ right[1]
    return torch.stack([left[0] @ right[0], change])


def _doubled(
    small: Tensor, doublings: Tensor, count: int, product: Product, identity: Tensor
) -> Tensor:
    """Function phi of 2^doublings times what is small, each matrix as often as it says."""
    value = _taylor(small, product, identity)
    for number in range(count):
        is_due = number < doublings
        value = torch.where(is_due, value + product(product(value, small), value) / 2, value)
        small = torch.where(is_due, 2 * small, small)
    return value


def _doublings(skew: Square, most: int) -> Int64[Tensor, "*batch 1 1"]:
    """How often each matrix must be halved until the polynomial is exact to rounding."""
    exponent = torch.log2(_norm_bound(skew) / _largest(skew.dtype)).ceil().nan_to_num(0.0)
    return exponent.clamp(0, most).long()


def _norm_bound(skew: Square) -> Float[Tensor, "*batch 1 1"]:
    # Singular values of a skew-symmetric matrix come in pairs.
    return torch.linalg.matrix_norm(skew.detach(), keepdim=True) / math.sqrt(2)


def _largest(dtype: torch.dtype) -> float:
    """Norm up to which the polynomial is exact to rounding."""
    return (torch.finfo(dtype).eps * math.factorial(_DEGREE + 1)) ** (1 / (_DEGREE + 1))


def _identity(like: Square) -> Float[Tensor, "rank rank"]:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _taylor(small: Tensor, product: Product, identity: Tensor) -> Tensor:
    """Sum of X^n / (n + 1)! for n below the degree, in five products."""
    square = product(small, small)
    powers = torch.stack([identity.expand_as(small), small, square, product(square, small)])
    # Made where they are used: to send them, the host would have to wait for the device.
    numbers = torch.arange(1, _DEGREE + 1, dtype=torch.float64, device=float64_device(small.device))
    coefficients = numbers.cumprod(0).reciprocal().to(small.dtype).to(small.device).view(-1, 4)
    low, middle, high = torch.tensordot(coefficients, powers, dims=1)
    fourth = product(square, square)
    return low + product(fourth, middle + product(fourth, high))
