"""Matrix products in half precision, on processors that have no instructions for it too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_PRODUCTS = frozenset(
    (
        *(functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.einsum),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm),
        *(torch.addmm, torch.baddbmm, functional.scaled_dot_product_attention),
    )
)
# torch's names of processors whose bfloat16 oneDNN does not multiply.
_WITHOUT = ("DEFAULT", "NO AVX", "AVX2")


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Products in a precision below float32, as `torch.autocast` has them; float32 switches it off.

    Where a processor has no bfloat16, factors are rounded to it, multiplied in float32, and the
    result is rounded, which spares torch's slow products there. The two differ in the order of
    sums alone.
    """
    rounded = computed_in(device, dtype) != dtype
    with (
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        RoundedProducts() if rounded else nullcontext(),
    ):
        yield


def computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In what `autocast` multiplies: float32 where a processor has no bfloat16."""
    without = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _WITHOUT
    return torch.float32 if without and dtype == torch.bfloat16 else dtype


class RoundedProducts(TorchFunctionMode):
    """Products of factors rounded to bfloat16, computed in float32 and rounded again.

    Only inside of `torch.autocast`, and not where that is switched off. Gradients are rounded
    where those of `torch.autocast` are, as every cast rounds what flows back through it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        if func not in _PRODUCTS or not torch.is_autocast_enabled("cpu"):
            return func(*given[0], **given[1])
        with torch.autocast("cpu", enabled=False):
            factors, options = tree_map_only(Tensor, _rounded, given)
            product = func(*factors, **options)
        return product.to(torch.bfloat16) if product.dtype == torch.float32 else product


def _rounded(factor: Tensor) -> Tensor:
    # As autocast: no indices, masks or float64.
    if not factor.is_floating_point() or factor.dtype == torch.float64:
        return factor
    return factor.to(torch.bfloat16).float()
