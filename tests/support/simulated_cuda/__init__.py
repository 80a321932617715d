"""A CUDA device without one: values stay on the host, and what a device would refuse is refused.

`python -m pytest -p tests.support.simulated_cuda.plugin -m gpu` runs tests on it.

Every tensor is a CPU tensor whose storage says where it is supposed to lie. Two modes
keep up the appearance: one of torch's functions, through which `device`, `to`, `numpy` and all
that makes tensors answer as a device would, and one of its operators, forwards and backwards,
which refuses mixed devices and what has no kernel, and counts waits and copies by file and line.
`simulation` answers for `torch.cuda`. Nothing else is simulated: this device is there for launches,
waits and the places of tensors.

Not seen: the device's own rounding (TF32, atomic additions), its autocast, speed, memory, races,
what cuBLAS, cuSOLVER and NCCL refuse, compiled code (nothing is compiled), several devices or
processes (a tensor has no index).
"""

from tests.support.simulated_cuda.device import LEDGER
from tests.support.simulated_cuda.simulation import is_simulated

__all__ = ["LEDGER", "is_simulated"]
