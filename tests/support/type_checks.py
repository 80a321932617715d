"""Check the types of arguments and results in the first calls of each function."""

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import jaxtyping

# Later calls within a test rarely have other types, and checking them takes time.
CALLS_PER_TEST = 4
calls: Counter[Callable[..., Any]] = Counter()
_check_all_calls = jaxtyping.jaxtyped


@functools.cache
def _can_check() -> bool:
    # Imported here, because the process that starts the workers of xdist needs no torch.
    import torch

    # On a GPU, code is compiled together with its checks. They break torch 2.11 and cause 33
    # graphs instead of 3 in torch 2.15.
    return torch.__version__ >= "2.15" and not torch.cuda.is_available()


def check_first_calls(function: Any = None, **options: Any) -> Any:
    """Apply `jaxtyping.jaxtyped`, but check only the first calls of a function."""
    # The checks are prepared at the first call: preparing all would take 5 s in each process. Those
    # of nested functions would be prepared again at each call of the outer function.
    if function is None:
        return functools.partial(check_first_calls, **options)
    if not isinstance(function, types.FunctionType):
        return _check_all_calls(function, **options)
    if "<locals>" in function.__qualname__ or not _can_check():
        return function

    @functools.cache
    def prepare_checks() -> Callable[..., Any]:
        return _check_all_calls(function, **options)

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        calls[function] += 1
        run = function if calls[function] > CALLS_PER_TEST else prepare_checks()
        return run(*args, **kwargs)

    return check
