"""Decorate functions so that the types of their arguments and results are checked.

Functions inside other functions are not checked. They are created anew at each call, and preparing
their checks took a third of a training step.
"""

from functools import cache
from typing import Any

from beartype import beartype


@cache
def _can_check() -> bool:
    # Imported here, because the process that starts the workers of xdist needs no torch.
    import torch

    # On a GPU, code is compiled together with its checks. They break torch 2.11 and cause 33
    # graphs instead of 3 in torch 2.15.
    return torch.__version__ >= "2.15" and not torch.cuda.is_available()


def checked(function: Any, *options: Any, **more: Any) -> Any:
    if not _can_check() or "<locals>" in function.__qualname__:
        return function
    return beartype(function, *options, **more)
