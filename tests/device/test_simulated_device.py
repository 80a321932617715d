"""Test that the simulated CUDA device raises the same errors as a real GPU."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.simulated_cuda import LEDGER, is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_simulated(), reason="tests the simulated device"),
]
CUDA = torch.device("cuda")


def on_device(*shape):
    return torch.randn(*shape, device=CUDA)


REFUSED = {
    "a sum of both": lambda: on_device(3, 4) + torch.randn(3, 4),
    "an update of the host": lambda: torch.zeros(3).add_(on_device(3)),
    "an update of a scalar of the host": lambda: torch.zeros(()).add_(on_device(3).sum()),
    "a row of the host among others": lambda: torch.cat([on_device(1, 4), torch.zeros(1, 4)]),
    "a scalar of the host among others": lambda: torch.stack([on_device(()), torch.zeros(())]),
    "an index of the device for the host": lambda: torch.arange(4)[
        torch.ones(2, device=CUDA).long()
    ],
    "a product with weights of the host": lambda: torch.nn.Linear(4, 2)(on_device(3, 4)),
    "numpy": lambda: on_device(3).numpy(),
    "numpy.asarray": lambda: np.asarray(on_device(3)),
    "a generator of the host": lambda: torch.randn(3, device=CUDA, generator=torch.Generator()),
    "a generator of the device": lambda: torch.randn(3, generator=torch.Generator(CUDA)),
    "a copy that is read too early": lambda: on_device(3).to("cpu", non_blocking=True),
    "pinning the device": lambda: on_device(3).pin_memory(),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_that_a_device_refuses_are_refused(mistake):
    with pytest.raises((RuntimeError, TypeError), match=r"device|cuda|pinned"):
        REFUSED[mistake]()


def test_gradients_deep_copies_and_threads_use_the_device():
    layer = torch.nn.Linear(4, 2).to(CUDA)
    (layer(on_device(3, 4)) * torch.tensor(2.0)).sum().backward()
    with ThreadPoolExecutor(1) as pool:
        in_thread = pool.submit(lambda: layer.weight + 1).result()
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_cuda
    assert copy.deepcopy(layer).weight.is_cuda
    assert in_thread.device == torch.device("cuda:0")
    assert torch.zeros(3).device.type == "cpu"


def test_the_gradient_of_a_host_tensor_is_on_the_host():
    weights = torch.ones(3, requires_grad=True)
    (weights.to(CUDA) * on_device(3)).sum().backward()
    assert weights.grad is not None
    assert not weights.grad.is_cuda


WAITS = {
    "item": (lambda x: x.sum().item(), 1),
    "float": (lambda x: float(x.sum()), 1),
    "a condition": (lambda x: bool((x > 0).all()), 1),
    "a list": (lambda x: x.tolist(), 1),
    "a copy": (lambda x: x.cpu(), 1),
    "a mask": (lambda x: x[x > 0], 1),
    "nonzero": (lambda x: (x > 0).nonzero(), 1),
    "counting": (lambda x: (x > 0).long().bincount(), 2),
    "an eigendecomposition": (lambda x: torch.linalg.eigh(x[:, None] * x), 1),
    "an exponential of matrices": (lambda x: torch.linalg.matrix_exp(x[:, None] * x), 1),
    "Cholesky factors": (lambda x: torch.linalg.cholesky_ex(x[:, None] * x + x.square().sum()), 0),
    "a QR decomposition": (lambda x: torch.linalg.qr(x[:, None] * x), 0),
    "filling a mask": (lambda x: x.masked_fill_(x > 0, 1.0), 0),
    "filling a mask by its index": (lambda x: x.__setitem__(x > 0, 1.0), 0),
    "indicators": (lambda x: F.one_hot((x > 0).long(), 2), 0),
    "a copy to pinned memory": (
        lambda x: torch.empty(5, pin_memory=True).copy_(x, non_blocking=True), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WAITS)
def test_waits_are_counted_at_their_line(what):
    (work, expected), x = WAITS[what], on_device(5)
    with LEDGER.counting() as counts:
        work(x)
    assert sum(counts.waits.values()) == expected
    assert all("test_simulated_device.py:" in place for place in counts.waits)


def test_only_pinned_memory_is_copied_without_waiting():
    pinned, plain = torch.ones(3).pin_memory(), torch.ones(3)
    with LEDGER.counting() as counts:
        pinned.to(CUDA, non_blocking=True)
        pinned.to(CUDA)
        plain.to(CUDA, non_blocking=True)
        torch.tensor([1.0], device=CUDA)
        on_device(3)[[0, 1]]
    assert sum(counts.pinned_uploads.values()) == 1
    assert sum(counts.uploads.values()) == 4


def test_an_asynchronous_copy_is_complete_only_after_a_wait():
    values, event = torch.arange(3.0).to(CUDA), torch.cuda.Event()
    target = torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
    event.record()
    values += 1
    early = target.tolist()
    event.synchronize()
    assert early != [0, 1, 2]
    assert target.tolist() == [0, 1, 2]
