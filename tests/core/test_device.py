import pytest
import torch

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.results.provenance import device_name
from ssl_bench.system import device as module
from ssl_bench.system.device import choose_device, free_memory


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
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert choose_device(None) == choose_device("cuda") == torch.device("cuda", 3)
    assert choose_device("cpu") == torch.device("cpu")
    assert two_gpus == [3, 3]


def test_float32_is_float32_on_a_gpu_and_its_name_says_so(two_gpus):
    assert device_name(torch.device("cuda")) == "cuda: H200, TF32 on"

    choose_device("cuda")

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
