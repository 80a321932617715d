"""The same bits from the same run on a CUDA device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ssl_bench.errors import ConfigurationError

# cuBLAS reads it when it is first used; without it its products may be summed in any order.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Compute only with what gives the same bits every time, and refuse what cannot.

    Two runs are then equal on devices of one kind with one version of torch. On a CPU they are
    without it.

    Raises:
        ConfigurationError: something in the run exists in no deterministic form.
    """
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        what = str(error).partition(" does not have")[0][:100]
        raise ConfigurationError(
            f"train.deterministic=true: {what} has no deterministic form on this device; leave "
            "train.deterministic out"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
