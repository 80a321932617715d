"""What CUDA's operators do to the host, as far as a mode in Python can know it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Operators that read a value or a number of values back, and how often. Of torch 2.15,
# aten/src/ATen/native/cuda; the linear algebra reads whether it converged.
WAITS = {
    "aten::_local_scalar_dense": 1,
    "aten::equal": 1,
    "aten::nonzero": 1,
    "aten::argwhere": 1,
    "aten::masked_select": 1,
    # The smallest and the largest value.
    "aten::bincount": 2,
    "aten::histc": 1,
    "aten::_unique2": 1,
    "aten::unique_dim": 1,
    "aten::unique_consecutive": 1,
    "aten::repeat_interleave": 1,
    "aten::_linalg_check_errors": 1,
    "aten::_linalg_svd": 1,
    "aten::_linalg_eigh": 1,
    "aten::linalg_eig": 1,
    "aten::linalg_lstsq": 1,
    # How often each matrix is squared.
    "aten::linalg_matrix_exp": 1,
}
INDEXING = frozenset(
    f"aten::{name}"
    for name in (
        "index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_",
        "_unsafe_index_put",
    )
)  # fmt: skip
# A scalar of the host may stand beside tensors of the device here too.
_TAKES_SCALARS = frozenset(
    f"aten::{name}"
    for name in (
        "fill_", "fill", "masked_fill", "masked_fill_", "where", "index_fill_", "lerp",
        "_foreach_mul", "_foreach_mul_", "_foreach_add_", "_foreach_div", "_foreach_div_",
    )
)  # fmt: skip
# Neither compute nor copy anything.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in ("detach", "detach_", "alias", "lift_fresh", "is_pinned", "_pin_memory", "set_")
)


@dataclass(frozen=True)
class Operator:
    """What is asked of an operator, once for all its calls.

    Attributes:
        writes: Whether it writes to each of its arguments.
        takes_scalars: Tensors without axes may lie on the host beside tensors of the device.
        has_kernel: For CUDA, in this build of torch.
    """

    name: str
    writes: tuple[bool, ...]
    takes_scalars: bool
    is_indexing: bool
    has_kernel: bool

    def waits(self, options: dict[str, Any]) -> int:
        """How often the host waits in one call."""
        if self.name == "aten::repeat_interleave" and options.get("output_size") is not None:
            return 0
        return WAITS.get(self.name, 0)


@cache
def operator_of(function: Any) -> Operator:
    schema = function._schema
    name, overload = schema.name, function._overloadname
    full = name if overload == "default" else f"{name}.{overload}"
    indexing = name in INDEXING
    return Operator(
        name=name,
        writes=tuple(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in schema.arguments
        ),
        takes_scalars=torch.Tag.pointwise in function.tags or name in _TAKES_SCALARS or indexing,
        is_indexing=indexing,
        has_kernel="_for_cpu" in name or _has_kernel(full),
    )


def _has_kernel(name: str) -> bool:
    ask: Any = torch._C
    return ask._dispatch_has_kernel_for_dispatch_key(
        name, "CUDA"
    ) or ask._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
