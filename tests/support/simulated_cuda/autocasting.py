"""Autocast of a CUDA device: the CPU's does the casting, with what only CUDA's does added."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)
# Computed in float32 by CUDA's autocast and not by the CPU's: "CUDA Ops that can autocast to
# float32" of https://docs.pytorch.org/docs/stable/amp.html, as far as the project calls them.
FLOAT32 = (
    "acos", "binary_cross_entropy_with_logits", "cosine_similarity", "cumprod", "cumsum", "dist",
    "exp", "expm1", "group_norm", "kl_div", "l1_loss", "layer_norm", "linalg_vector_norm", "log",
    "log10", "log1p", "log2", "log_softmax.int", "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt",
    "smooth_l1_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList",
)  # fmt: skip


def autocast_of_cuda() -> torch.library.Library:
    """Registers the float32 list; it is gone with the object."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # They replace the CPU's rule that nothing is cast.
        warnings.simplefilter("ignore")
        for name in FLOAT32:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(_in_float32, operator), "AutocastCPU")
    return library


def patched_start(start: Callable[..., None]) -> Callable[..., None]:
    """`torch.autocast.__init__`, for which "cuda" is the CPU."""

    def begin(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *more: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        start(self, device_type, dtype, *more, **options)

    return begin


def patched_question(ask: Callable[[str], Any]) -> Callable[..., Any]:
    """`torch.is_autocast_enabled` and the like; without a device they mean CUDA."""
    return lambda device="cuda": ask("cpu" if device == "cuda" else device)


def _in_float32(operator: Any, *args: Any, **options: Any) -> Any:
    hidden: Any = torch._C
    keys = hidden.DispatchKeySet(hidden.DispatchKey.AutocastCPU)
    with hidden._ExcludeDispatchKeyGuard(keys):
        raised = {name: _raised(value) for name, value in options.items()}
        return operator(*map(_raised, args), **raised)


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
