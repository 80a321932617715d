"""Test that probes give the same scores on a GPU as on the CPU."""

import pytest
import torch

from ssl_bench.models import build_vit, save_encoder
from tests.device.runs import WALKS, scores
from tests.support.faults import TINY, expect_error
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("walk", WALKS)
def test_scores_on_the_device_equal_those_on_the_cpu(data, walk):
    on_device, on_cpu = (scores(data, *WALKS[walk], device=device) for device in ("cuda", "cpu"))
    # Rounding on a real device can change the nearest centre, and so the result of k-means.
    percent = 3.0 if walk == "clustering, patches" and not is_simulated() else 0.05
    assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=percent, nan_ok=True)
    assert on_cpu


@pytest.mark.parametrize("walk", ["tokencut", "knn"])
def test_a_probe_runs_in_bfloat16(data, walk):
    assert scores(data, *WALKS[walk], "dtype=bfloat16", device="cuda")


@pytest.mark.parametrize("walk", ["segmentation, fast", "retrieval", "pca", "tokencut, lost"])
def test_non_finite_features_are_reported_with_their_block(data, workdir, capsys, walk):
    model = build_vit(TINY, seed=0)
    torch.nn.init.constant_(model.get_parameter("blocks.1.mlp.fc2.weight"), 3e38)
    save_encoder(workdir / "encoder.safetensors", model, {})
    task, dataset, *arguments = WALKS[walk]
    # By default LOST uses keys, which do not depend on the weights that are changed here.
    arguments += ["probe.facet=token"] if walk == "tokencut, lost" else []
    arguments += ["--data-root", str(data[dataset]), "--checkpoint", "encoder.safetensors"]
    message = expect_error(capsys, ["probe", "--task", task, "--dataset", dataset, *arguments], 4)
    assert "block 1 of encoder" in message
