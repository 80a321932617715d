"""Run every probe with every protocol on a device, and compare it with the CPU."""

import pytest
import torch

from tests.device.runs import WALKS, scores
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("walk", WALKS)
def test_a_device_scores_what_the_cpu_does(data, walk):
    on_device, on_cpu = (scores(data, *WALKS[walk], device=device) for device in ("cuda", "cpu"))

    # Rounding of a real device can change the nearest centre, and so the result of k-means.
    percent = 3.0 if walk == "clustering, patches" and not is_simulated() else 0.05
    assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=percent, nan_ok=True)
    assert on_cpu


@pytest.mark.parametrize("walk", ["tokencut", "knn"])
def test_a_probe_runs_in_bfloat16(data, walk):
    assert scores(data, *WALKS[walk], "dtype=bfloat16", device="cuda")
