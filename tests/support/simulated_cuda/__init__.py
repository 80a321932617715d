"""A simulated CUDA device: tensors stay on the host, but device errors are raised as on a real GPU.

`python -m pytest -p tests.support.simulated_cuda.plugin -m gpu` runs tests on it.

Every tensor is a CPU tensor whose storage records the simulated device. The mode `TorchFunctions`
makes `device`, `to`, `numpy` and the functions that create tensors behave as on a real device. The
mode `Operators` sees each operator of the forward and backward pass. It refuses operators that mix
devices or lack a CUDA kernel, and counts waits and copies by file and line. The module `simulation`
replaces functions of `torch.cuda`.

Not simulated: rounding (TF32, atomic additions), autocast, speed, memory, races, errors of cuBLAS,
cuSOLVER and NCCL, compiled code (nothing is compiled), and several devices or processes (a tensor
has no device index).
"""

from tests.support.simulated_cuda.device import LEDGER
from tests.support.simulated_cuda.simulation import is_simulated

__all__ = ["LEDGER", "is_simulated"]
