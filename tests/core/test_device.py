import os
import subprocess
import sys

import pytest
import torch

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.system import device as module
from ssl_bench.system.device import choose_device, device_name, free_memory
from ssl_bench.system.launch import let_threads_sleep
from tests.support.places import one_of
from tests.support.without_torch import REPOSITORY


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has GPUs; the indices that were made the current one."""
    current = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    # The number that is tried on a device needs one.
    monkeypatch.setattr(module, "_usable", torch.device)
    return current


def test_the_asked_device_is_the_current_one_from_then_on(two_gpus):
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert two_gpus == [1]
    assert choose_device(None) == torch.device("cuda")
    assert two_gpus == [1]


def test_each_process_of_torchrun_has_a_device_of_its_own(two_gpus, monkeypatch):
    one_of(monkeypatch, 4, RANK="3", LOCAL_RANK="3")

    assert choose_device(None) == choose_device("cuda") == torch.device("cuda", 3)
    assert choose_device("cpu") == torch.device("cpu")
    assert two_gpus == [3, 3]


def test_float32_is_float32_on_a_gpu_and_its_name_says_so(two_gpus):
    assert device_name(torch.device("cuda")) == "cuda: H200, TF32 on"
    # As a container's variable has it; what is chosen switches it off again.
    torch.backends.cuda.matmul.allow_tf32 = True

    choose_device("cuda")

    assert not torch.backends.cuda.matmul.allow_tf32
    assert device_name(torch.device("cuda")) == "cuda: H200, TF32 off"


def test_what_torch_keeps_for_reuse_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 25)

    assert free_memory(torch.device("cuda")) == 10 + 35


def test_a_device_that_is_unknown_or_absent_is_named():
    with pytest.raises(
        ConfigurationError, match="expected --device cpu, cuda or cuda:N, got 'gpu'"
    ):
        choose_device("gpu")
    with pytest.raises(MachineError, match="device meta is not usable here"):
        choose_device("meta")


@pytest.mark.parametrize(
    ("said", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, None)],
)
def test_threads_sleep_while_they_wait_unless_told_otherwise(monkeypatch, said, policy):
    monkeypatch.setattr(os, "environ", dict(said))

    let_threads_sleep()

    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_the_command_says_how_threads_wait_before_torch_reads_it():
    script = (
        "import os, sys; from ssl_bench.cli.__main__ import main; main(['table', '--out', 'none']);"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}

    said = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert said.stdout.split()[-2:] == ["PASSIVE", "False"]
