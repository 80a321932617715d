"""Copies to the device and back that keep the host from waiting."""

import pytest
import torch

from ssl_bench.system.device import fetched, sent
from tests.support.simulated_cuda import LEDGER, is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_what_is_sent_may_be_changed_at_once():
    values = torch.arange(6.0).view(2, 3).T
    with LEDGER.counting() as found:
        there = sent(values, CUDA)
    values += 1

    assert there.is_cuda
    assert there.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not found.waits
    assert not found.uploads


def test_all_that_is_fetched_costs_one_wait():
    tensors = [sent(torch.arange(3) * number, CUDA) for number in range(4)]
    with LEDGER.counting() as found:
        here = fetched([*tensors, torch.ones(2)])

    assert [tensor.tolist() for tensor in here[:4]] == [[0, n, 2 * n] for n in range(4)]
    assert not any(tensor.is_cuda for tensor in here)
    assert found.waits.total() == (1 if is_simulated() else 0)
