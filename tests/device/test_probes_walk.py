"""Every probe with every protocol on a device, by the command line, beside the CPU's records."""

import math

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ConvMixerConfig, build_encoder, save_encoder
from tests.device.runs import WALKS, scores
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("walk", WALKS)
def test_a_device_scores_what_the_cpu_does(data, walk):
    on_device, on_cpu = (scores(data, *WALKS[walk], device=device) for device in ("cuda", "cpu"))

    # Where rounding decides which centre is nearer, k-means goes another way on a real device.
    percent = 3.0 if walk == "clustering, patches" and not is_simulated() else 0.05
    assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=percent, nan_ok=True)
    assert on_cpu


@pytest.mark.parametrize("task", ["segmentation", "tokencut", "knn"])
def test_bfloat16_gives_scores_too(data, task):
    walk = WALKS["segmentation, fast" if task == "segmentation" else task]
    found = scores(data, *walk, "dtype=bfloat16", device="cuda")

    assert all(math.isfinite(value) for (*_, m), value in found.items() if "top5" not in m)


def test_a_conv_mixer_is_probed(data, place):
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    save_encoder(place / "encoder.safetensors", build_encoder(config, seed=0), {})

    assert scores(data, *WALKS["segmentation, fast"], device="cuda")


def test_the_doctor_finds_the_device(capsys):
    main(["doctor"])

    assert torch.cuda.get_device_name() in "".join(capsys.readouterr())
