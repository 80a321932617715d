"""Test pretraining on a GPU with every objective and architecture."""

import shutil

import pytest
import torch

from pretrain.batches import WorkerPlan
from pretrain.crops.multi import MultiCrop
from ssl_bench.cli.__main__ import main
from tests.device.runs import WALKS, pretraining, scores
from tests.support.objectives import OBJECTIVES
from tests.support.runs import interrupt_at_micro_batch, log_rows
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def photos(data):
    return data["class_folders"]


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_on_the_device_equals_one_on_the_cpu(photos, monkeypatch, objective, optimizer):
    same = (f"optimizer={optimizer}", "train.precision=float32", "train.compile=false")
    arguments = pretraining(objective, photos, *same)
    assert main([*arguments, "--device", "cpu", "--out", "cpu"]) == 0
    # On the device, a worker reads the images of a batch in two chunks.
    monkeypatch.setattr("pretrain.train.plan_workers", lambda *_: WorkerPlan(1, 1, 2))
    assert main([*arguments, "--device", "cuda", "--out", "cuda"]) == 0
    on_cpu, on_device = log_rows("cpu"), log_rows("cuda")
    # A real device draws other random numbers, so the masks of MAE differ.
    names = ("lr", "epoch") if objective == "mae" and not is_simulated() else on_cpu[0]
    for row, other in zip(on_device, on_cpu, strict=True):
        assert {n: row[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=1e-3)


MODELS = {
    "no skip": ("vit_tiny_skipless",),
    "registers": (
        "vit_tiny_skip", "model.num_registers=2", "model.position_embedding=sinusoidal",
        "model.drop_path=0.2",
    ),
    "conv_mixer": ("conv_mixer",),
    "mamba1": ("mamba1",),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_trains_in_bfloat16(data, photos, name):
    # `test_waits.py` trains every kind of attention and token graying.
    model, *more = MODELS[name]
    objective = "copying" if name == "mamba1" else "supervised"
    arguments = pretraining(objective, photos, *more, model=model)
    assert main([*arguments, "--device", "cuda", "--out", "run"]) == 0
    assert len(log_rows("run")) == 3
    if name == "conv_mixer":
        for end in ("", ".sha256"):
            shutil.copy(f"run/last.safetensors{end}", f"encoder.safetensors{end}")
        assert scores(data, *WALKS["segmentation, fast"], "dtype=bfloat16", device="cuda")


def test_accumulation_clipping_and_monitors_work_together(photos):
    arguments = pretraining(
        "supervised", photos, "train.accumulation=2", "train.global_norm=true", "train.repeats=2",
        "monitor.knn_epochs=1", "monitor.accuracy_epochs=1", "monitor.neighbours=2",
        "monitor.results=results",
    )  # fmt: skip
    assert main([*arguments, "--device", "cuda", "--out", "run"]) == 0
    assert {"val_top1", "knn_top1"} <= log_rows("run")[-1].keys()


def test_a_stopped_run_continues_on_the_device(photos, monkeypatch):
    # On a device, rows of the log and requests to stop arrive one step late.
    arguments = pretraining(
        "dino", photos, "optimizer=soap", "train.accumulation=2", "--device=cuda"
    )
    arguments.append("train.max_steps=5")
    assert main([*arguments, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        interrupt_at_micro_batch(patch, MultiCrop, 2)
        assert main([*arguments, "--out", "cut"]) == 75
    assert main([*arguments, "--out", "cut", "--resume"]) == 0
    assert log_rows("cut") == log_rows("whole")
