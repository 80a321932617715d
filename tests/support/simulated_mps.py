"""An MPS device without a Mac: values stay on the host, and float64 is refused as Metal refuses it.

The machinery is that of `tests.support.simulated_cuda`, which says where a tensor is supposed to
lie, and refuses what mixes devices. Here a tensor of the device can have no float64, and no
operator may leave one there.

Not seen: which operators have no kernel for Metal, its rounding, its autocast, speed, memory.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from tests.support.simulated_cuda.device import KIND, Asking, Operators
from tests.support.simulated_cuda.simulation import Generator, grouping, loading, running


@contextmanager
def simulation() -> Iterator[None]:
    """A process with an MPS device, in this thread and in those that start meanwhile."""
    group = "_group_tensors_by_device_and_dtype"
    patches = [
        (torch.backends.mps, "is_available", lambda: True),
        (torch, "Generator", Generator),
        (torch, "load", loading(torch.load)),
        (torch._C, group, grouping(getattr(torch._C, group))),
        (threading.Thread, "run", running(threading.Thread.run)),
    ]
    with ExitStack() as stack:
        stack.callback(KIND.__setitem__, 0, KIND[0])
        KIND[0] = "mps"
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        with Operators(), Asking():
            yield
