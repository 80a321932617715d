"""A simulated MPS device that refuses float64 tensors, as a real MPS device does.

The classes of `tests.support.simulated_cuda` record the simulated device of each tensor. The
simulation does not detect operators without a Metal kernel. Rounding, autocast, speed and memory
are not simulated.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from tests.support.simulated_cuda.device import KIND, Operators, TorchFunctions
from tests.support.simulated_cuda.simulation import (
    Generator,
    patched_grouping,
    patched_load,
    patched_run,
)


@contextmanager
def simulation() -> Iterator[None]:
    """Simulate an MPS device inside a `with` block."""
    group = "_group_tensors_by_device_and_dtype"
    patches = [
        (torch.backends.mps, "is_available", lambda: True),
        (torch, "Generator", Generator),
        (torch, "load", patched_load(torch.load)),
        (torch._C, group, patched_grouping(getattr(torch._C, group))),
        (threading.Thread, "run", patched_run(threading.Thread.run)),
    ]
    with ExitStack() as stack:
        stack.callback(KIND.__setitem__, 0, KIND[0])
        KIND[0] = "mps"
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        with Operators(), TorchFunctions():
            yield
