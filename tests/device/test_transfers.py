"""Test copies of tensors between the CPU and a GPU."""

import pytest
import torch
from torch import Tensor, nn

import ssl_bench
from ssl_bench.system.device import to_device, to_host, upload
from tests.support import own_module
from tests.support.simulated_cuda import LEDGER, is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_a_tensor_may_be_changed_right_after_its_copy_starts():
    values = torch.arange(6.0).view(2, 3).T
    with LEDGER.counting() as counts:
        copied = to_device(values, CUDA)
    values += 1
    assert copied.is_cuda
    assert copied.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not counts.waits
    assert not counts.uploads


def test_pinned_memory_is_copied_beside_earlier_computations(monkeypatch):
    kept = list[Tensor]()
    if is_simulated():
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _: kept.append(tensor))
    values = torch.arange(6.0).pin_memory()
    with LEDGER.counting() as counts:
        copied = upload(values, CUDA)
        doubled = 2 * copied
        same = upload(copied, CUDA)
    assert doubled.tolist() == [0, 2, 4, 6, 8, 10]
    assert same is copied
    assert not counts.waits
    assert not counts.uploads
    # The memory of the copy is kept until the computations have read it.
    assert counts.early_uploads.total() == len(kept) == (1 if is_simulated() else 0)


def test_copying_many_tensors_to_the_host_waits_once():
    tensors = [to_device(torch.arange(3) * number, CUDA) for number in range(4)]
    with LEDGER.counting() as counts:
        copied = to_host([*tensors, torch.ones(2)])
    assert [tensor.tolist() for tensor in copied[:4]] == [[0, n, 2 * n] for n in range(4)]
    assert not any(tensor.is_cuda for tensor in copied)
    assert counts.waits.total() == (1 if is_simulated() else 0)


def tensors_of(module: nn.Module) -> list[Tensor]:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *gradients, *module.buffers()]


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_probe_restores_the_memory_of_a_module(workdir, home):
    # An optimizer or another module may share the weights, gradients and buffers.
    module = own_module.own()
    module.register_buffer("scale", torch.ones(1))
    module = module.to(home)
    module(torch.rand(2, 3, 32, 32).to(home)).mean().backward()
    encoder = ssl_bench.Encoder.from_module(module)
    tensors = tensors_of(module)
    memory = [tensor.data_ptr() for tensor in tensors]
    few = {"dataset.num_train": 6, "layer": -1, "out": workdir / "out"}

    for device in ("cpu", "cuda", None):
        for probed in (encoder, module):
            ssl_bench.probe(probed, task="geometry", device=device, overwrite=True, **few)
        now = tensors_of(module)
        assert all(one is other for one, other in zip(now, tensors, strict=True))
        assert {tensor.device.type for tensor in now} == {home}
        assert [tensor.data_ptr() for tensor in now] == memory


def test_an_encoder_from_a_module_computes_on_its_device(workdir):
    encoder = ssl_bench.Encoder.from_module(own_module.own())
    (first, *_) = ssl_bench.probe(
        encoder, task="geometry", layer=-1, out=workdir / "out", **{"dataset.num_train": 6}
    )
    assert first.device.startswith("cpu")
