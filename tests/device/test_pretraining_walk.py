"""`pretrain` on a device: every objective, optimizer and architecture, from start to resume."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.crops.multi import MultiCrop
from pretrain.objectives.dino import DinoLearner
from ssl_bench.cli.__main__ import main
from tests.device.runs import OBJECTIVES, SMALL
from tests.support.runs import end_after_parts, log_rows
from tests.support.simulated_cuda import LEDGER, is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def photos(data):
    return data["class_folders"]


def trained(photos, out, objective, *more, device="cuda"):
    """Train; the rows of the log."""
    words = [f"objective={objective}", *SMALL, *OBJECTIVES[objective], *more]
    root = photos if objective == "supervised" else photos / "train"
    code = main(["pretrain", "--data-root", str(root), "--device", device, "--out", out, *words])
    assert code == 0
    return log_rows(out)


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_device_learns_what_the_cpu_does(photos, objective, optimizer):
    same = (f"optimizer={optimizer}", "train.precision=float32", "train.compile=false")
    on_device, on_cpu = (
        trained(photos, device, objective, *same, device=device) for device in ("cuda", "cpu")
    )

    # Random numbers of a real device are others: its masks and drawn layers are.
    names = ("lr", "epoch") if objective == "mae" and not is_simulated() else on_cpu[0]
    for row, other in zip(on_device, on_cpu, strict=True):
        assert {n: row[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_the_advice_after_memory_ran_out_works(photos, monkeypatch, capsys, optimizer):
    # A stand-in for a full device: the loss refuses more than one image at once.
    usual = DinoLearner.loss

    def limited(self, network, views, step):
        if len(views[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(self, network, views, step)

    monkeypatch.setattr(DinoLearner, "loss", limited)
    monkeypatch.setattr("pretrain.step.count_training_flops", lambda *_: 1e6)
    words = [
        *("pretrain", "--data-root", str(photos / "train"), "--device", "cuda", "--out", "run"),
        *(*SMALL, *OBJECTIVES["dino"], f"optimizer={optimizer}", "train.batch_size=2"),
    ]
    assert main(words) == 5
    assert "`train.accumulation=2 --overwrite`" in capsys.readouterr().err

    assert main([*words, "train.accumulation=2", "--overwrite"]) == 0


MODELS = {
    "linear": ("model.attention=linear",),
    "osa_qr": ("model.attention=osa_qr", "model.qkv_bias=false"),
    "osa_newton_schulz": ("model.attention=osa_newton_schulz", "model.qkv_bias=false"),
    "svd": ("model.graying=svd",),
    "dct": ("model.graying=dct",),
    "no skip": ("model.skip_attention=false", "model.skip_mlp=false", "model.init=skipless"),
    "registers": ("model.num_registers=2", "model.position_embedding=sinusoidal"),
    "drop path": ("model.drop_path=0.2",),
}


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_trains_in_bfloat16(photos, model, optimizer):
    rows = trained(photos, "run", "supervised", f"optimizer={optimizer}", *MODELS[model])

    assert all(math.isfinite(row["gradient_norm"]) for row in rows)


def test_a_conv_mixer_trains(photos):
    words = [
        *("pretrain", "--data-root", str(photos), "--device", "cuda", "--out", "run"),
        *("model=conv_mixer", "objective=supervised", "data.labels=true", "model.image_size=16"),
        *("model.dim=12", "model.depth=2", "model.kernel_size=3", "train.batch_size=2"),
        *("train.max_steps=3", "train.num_workers=0"),
    ]
    assert main(words) == 0
    assert len(log_rows("run")) == 3


# Three pieces of one image fit into the kibibytes, three of two do not.
@pytest.mark.parametrize(("objective", "kib"), [("dino", 201), ("mae", 15), ("supervised", 76)])
def test_batches_that_come_in_pieces_are_those_that_come_whole(photos, objective, kib, capsys):
    whole = trained(photos, "whole", objective)
    cut = ("train.num_workers=1", f"train.shared_memory_gib={kib / 2**20:.8f}")
    pieces = trained(photos, "pieces", objective, *cut)

    assert "batches in 2 chunks" in capsys.readouterr().err
    assert pieces == whole


def test_accumulation_workers_clipping_and_monitors_work_together(photos):
    rows = trained(
        photos, "run", "supervised", "train.accumulation=2", "train.num_workers=1",
        "train.global_norm=true", "train.repeats=2", "monitor.knn_epochs=1",
        "monitor.accuracy_epochs=1", "monitor.neighbours=2", "monitor.results=results",
    )  # fmt: skip

    assert "val_top1" in rows[-1]
    assert "knn_top1" in rows[-1]


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(photos, monkeypatch, optimizer):
    # A device's rows arrive a step late, and with them the word to stop.
    words = (f"optimizer={optimizer}", "train.accumulation=2", "train.max_steps=5")
    whole = trained(photos, "whole", "dino", *words)
    arguments = [
        *("pretrain", "--data-root", str(photos / "train"), "--device", "cuda", "--out", "cut"),
        *(*SMALL, *OBJECTIVES["dino"], *words),
    ]
    with monkeypatch.context() as patch:
        end_after_parts(patch, MultiCrop, 2)
        assert main(arguments) == 75
    assert main([*arguments, "--resume"]) == 0

    assert log_rows("cut") == whole


@pytest.mark.skipif(not is_simulated(), reason="a real device compiles")
def test_the_parts_that_say_so_are_compiled(photos):
    with LEDGER.counting() as found:
        trained(photos, "run", "dino")

    assert found.compiled.total() > 0


@pytest.mark.parametrize("model", ["mamba1", "mamba2"])
def test_strings_are_copied_on_a_device_as_on_the_cpu(model):
    small = ("model.dim=16", "model.num_states=4", "model.head_width=8", "train.batch_size=4")
    task = ("objective.length=4", "objective.test_lengths=[4]", "train.max_steps=3")
    words = [f"model={model}", *small, "objective=copying", *task, "train.precision=float32"]
    for device in ("cuda", "cpu"):
        assert main(["pretrain", *words, "--device", device, "--out", device]) == 0

    for row, other in zip(log_rows("cuda"), log_rows("cpu"), strict=True):
        assert row == pytest.approx(other, rel=1e-3)


@pytest.mark.skipif(not is_simulated(), reason="needs two real devices, which NCCL asks for")
def test_two_processes_learn_what_one_does(photos):
    words = ("optimizer=soap", "train.precision=float32", "train.compile=false")
    alone = trained(photos, "alone", "mae", *words, "train.accumulation=2")
    command = [
        *(sys.executable, "-W", "ignore", "-m", "tests.support.simulated_cuda", "pretrain"),
        *("--data-root", str(photos / "train"), "--device", "cuda", "--out", "two"),
        *("objective=mae", *SMALL, *OBJECTIVES["mae"], *words),
    ]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["PYTHONPATH"] = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(command, env={**shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]

    # Masks are drawn by each process for itself; the images and rates are those of one.
    together = log_rows("two")
    names = ("step", "epoch", "lr", "weight_decay")
    assert [[row[n] for n in names] for row in together] == [[r[n] for n in names] for r in alone]
    assert all(math.isfinite(row["gradient_norm"]) for row in together)
