"""Test the search for nearest neighbours."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from ssl_bench import neighbours
from ssl_bench.errors import MachineError
from ssl_bench.neighbours import faiss_nearest, nearest_vectors, stable_topk
from tests.support.simulated_cuda import is_simulated


def unit_vectors(count: int, dim: int = 24, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=generator), dim=1)


def record_products(monkeypatch) -> list[int]:
    rows, whole = [], neighbours._nearest_by_product

    def record(queries, memory, count):
        rows.append(len(queries))
        return whole(queries, memory, count)

    monkeypatch.setattr(neighbours, "_nearest_by_product", record)
    return rows


def assert_identical(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("num_queries", [8, 23, 150])
def test_faiss_and_the_product_are_bitwise_identical(monkeypatch, num_queries):
    monkeypatch.setattr(neighbours, "_FAISS_QUERIES", 100)
    memory, queries = unit_vectors(3000), unit_vectors(num_queries, seed=1)
    rows = record_products(monkeypatch)

    found = nearest_vectors(queries, memory, 20, engine="faiss")

    assert not rows
    assert_identical(found, stable_topk(queries @ memory.T, 20))


def test_products_decide_if_faiss_cannot_return_all_equal_vectors(monkeypatch):
    memory = torch.cat([unit_vectors(2000), unit_vectors(1, seed=5).expand(200, -1)])
    queries = torch.cat([unit_vectors(40, seed=1), memory[-40:]])
    rows = record_products(monkeypatch)

    values, index = nearest_vectors(queries, memory, 5, engine="faiss")

    assert 0 < sum(rows) < 80
    assert index[40:].tolist() == [list(range(2000, 2005))] * 40
    assert_identical((values, index), stable_topk(queries @ memory.T, 5))


@pytest.mark.parametrize("below", [-1.0, 1e-6])
def test_a_vector_that_faiss_omits_within_rounding_is_found(monkeypatch, below):
    memory, queries = unit_vectors(3000), unit_vectors(40, seed=1)
    similarities, index = faiss_nearest(queries, memory, 53)
    # Sums of 24 products of float32 are exact to 1.5e-6 in each engine.
    last = similarities[:, 20:21] - below

    def omit_the_nearest(*_):
        return last.expand(-1, 52), index[:, 1:]

    monkeypatch.setattr(neighbours, "faiss_nearest", omit_the_nearest)

    found = nearest_vectors(queries, memory, 20, engine="faiss")

    assert_identical(found, stable_topk(queries @ memory.T, 20))


@pytest.mark.parametrize(
    ("num_vectors", "num_queries", "engine", "by_faiss"),
    [
        (14_000, 8, "auto", True), (14_000, 7, "auto", False), (13_000, 8, "auto", False),
        (13_000, 8, "faiss", True), (13_000, 7, "faiss", False), (52, 8, "faiss", False),
        (14_000, 8, "torch", False),
    ],
)  # fmt: skip
def test_faiss_is_used_for_large_sets(monkeypatch, num_vectors, num_queries, engine, by_faiss):
    monkeypatch.setattr(neighbours, "_FAISS_MIN_ENTRIES", 8 * 24)
    rows = record_products(monkeypatch)

    nearest_vectors(unit_vectors(num_queries), unit_vectors(num_vectors), 20, engine=engine)

    assert bool(rows) != by_faiss


def test_faiss_without_gpu_support_is_refused_for_gpu_tensors(monkeypatch):
    faiss = ModuleType("faiss")
    faiss.__version__ = "9.9"  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    with pytest.raises(MachineError, match=r"faiss 9\.9") as caught:
        faiss_nearest(*meta_tensors(), 3)
    assert caught.value.hint == ("probe.engine=torch", "or", "--device", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(is_simulated(), reason="faiss's kernels need a real device")
def test_faiss_on_a_gpu_agrees_with_the_product():
    pytest.importorskip("faiss")
    memory, queries = unit_vectors(20_000).cuda(), unit_vectors(200, seed=1).cuda()

    values, index = nearest_vectors(queries, memory, 20, engine="faiss")

    expected = stable_topk(queries @ memory.T, 20)
    torch.testing.assert_close(values, expected[0], rtol=0, atol=1e-5)
    assert (index == expected[1]).double().mean() > 0.999


def meta_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(2, 4, device="meta"), torch.empty(8, 4, device="meta")
