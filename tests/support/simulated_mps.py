"""A simulated MPS device: tensors stay on the host, but float64 is refused as on a Mac.

The modes of `tests.support.simulated_cuda` record the simulated device of each tensor and refuse
operators that mix devices. In addition, no operator or copy may create a float64 tensor on the
device.

Not simulated: operators without a Metal kernel, rounding, autocast, speed and memory.
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
    """Inside a `with` block, simulate an MPS device in this thread and in new threads."""
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
