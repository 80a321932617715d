"""A simulated CUDA device that raises the same errors as a real GPU.

`python -m pytest -p tests.support.simulated_cuda.plugin -m gpu` runs the GPU tests on this device.

All tensors stay in CPU memory, but each tensor reports a simulated device. The class
`TorchFunctions` intercepts functions such as `Tensor.to`, so that they behave as on a GPU. The
class `Operators` raises an error if an operator mixes devices or lacks a CUDA kernel. The module
`simulation` replaces functions of `torch.cuda`.

The simulation ignores rounding, autocast, speed, memory limits and race conditions. Errors of
cuBLAS, cuSOLVER and NCCL are not simulated. Code is never compiled. Only a single device in a
single process is simulated.
"""

from tests.support.simulated_cuda.device import LEDGER
from tests.support.simulated_cuda.simulation import is_simulated

__all__ = ["LEDGER", "is_simulated"]
