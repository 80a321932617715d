"""`python -m tests.support.simulated_cuda WORDS`: a command of ssl-bench on such a device."""

import sys

import torch

from pretrain import resources
from ssl_bench.cli.__main__ import main
from tests.support.simulated_cuda.simulation import simulation, why_not

if (reason := why_not()) is not None:
    raise SystemExit(reason)
torch.set_num_threads(1)
# The rate of a real device's products is measured with larger matrices.
resources._LARGE_SIDE = 64
with simulation():
    code = main()
sys.exit(code)
