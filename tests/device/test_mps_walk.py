"""Test probes and pretraining on a simulated MPS device."""

from pathlib import Path

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.system.device import to_float64
from tests.device.runs import NOT_ON_MPS, WALKS, pretraining, scores
from tests.support.faults import expect_error
from tests.support.objectives import OBJECTIVES
from tests.support.simulated_mps import simulation


@pytest.mark.slow
@pytest.mark.parametrize("walk", sorted(WALKS.keys() - NOT_ON_MPS))
def test_scores_on_mps_equal_those_on_the_cpu(data, walk):
    on_cpu = scores(data, *WALKS[walk], device="cpu")
    with simulation():
        on_device = scores(data, *WALKS[walk], device="mps")
    assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=0.05, nan_ok=True)
    assert on_cpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "optimizer"), [*((name, "adamw") for name in OBJECTIVES), ("dino", "soap")]
)
def test_every_objective_trains_on_mps(data, objective, optimizer):
    arguments = pretraining(objective, data["class_folders"], f"optimizer={optimizer}")
    with simulation():
        assert main([*arguments, "--device", "mps", "--out", "run"]) == 0
    assert Path("run/last.safetensors").is_file()


def test_simulated_mps_refuses_float64_and_mixed_devices():
    with simulation():
        on_mps = torch.ones(3, device="mps")
        assert (on_mps.device.type, (on_mps + on_mps).device.type, on_mps.is_mps) == (
            "mps",
            "mps",
            True,
        )
        for wrong in (
            lambda: on_mps.double(),
            lambda: torch.zeros(3, dtype=torch.float64, device="mps"),
            lambda: torch.zeros(3, dtype=torch.float64).to("mps"),
            lambda: torch.tensor([1.0], dtype=torch.float64, device="mps"),
            lambda: on_mps.sum(dtype=torch.float64),
            lambda: torch.nn.Linear(3, 3).to("mps").double(),
        ):
            with pytest.raises(TypeError, match="the MPS framework doesn't support float64"):
                wrong()
        with pytest.raises(RuntimeError, match="found mps:0 and cpu"):
            torch.add(on_mps, torch.ones(3))


def test_float64_is_computed_on_the_cpu_if_the_device_lacks_it():
    third = torch.tensor([1 / 3])
    with simulation():
        values = to_float64(third.to("mps"))
        assert (values.device.type, values.dtype) == ("cpu", torch.float64)
    assert torch.equal(to_float64(third), third.double())


def test_a_missing_device_is_an_error_with_a_hint(data, capsys):
    arguments = ["probe", "--task", "pca", "--dataset", "folder", "--device", "mps"]
    arguments += ["--data-root", str(data["folder"]), "--checkpoint", "encoder.safetensors"]
    assert "--device cpu" in expect_error(capsys, arguments, 5)
