"""An MPS device without a Mac: values stay on the host, and float64 is refused as Metal refuses it.

The machinery is that of `tests.support.simulated_cuda`, which says where a tensor is supposed to
lie, and refuses what mixes devices. Here a tensor of the device can have no float64, and no
operator may leave one there.

Not seen: which operators have no kernel for Metal, its rounding, its autocast, speed, memory.
"""

from tests.support.simulated_mps.simulation import simulation

__all__ = ["simulation"]
