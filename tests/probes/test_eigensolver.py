import numpy as np
import pytest
import scipy.linalg
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch.profiler import ProfilerActivity, profile

from probes.tokencut.spectral import eigensolver
from probes.tokencut.spectral.eigensolver import GraphPool, second_eigenvector
from probes.tokencut.spectral.eigensolver_batched import (
    certified_batch,
    second_eigenvectors,
    solve_batch,
)
from probes.tokencut.spectral.graph import similarity_graph
from ssl_bench.errors import DataError

TAU, EPS = 0.2, 1e-5


def dense_solution(features, *, weighted=False):
    """Independent restatement: second and third generalised eigenpair of (D - A, D)."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    weights = np.where(cosines > TAU, cosines if weighted else 1.0, EPS).astype(np.float64)
    np.fill_diagonal(weights, np.where(features.any(1), 1, EPS))
    degrees = np.diag(weights.sum(1))
    values, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    return values, vectors[:, 0], degrees.diagonal()


def clouds(num_tokens, seed, *, num_clouds=4, spread=1.0, dim=16):
    """Tokens around a few directions: connected graphs with a few clusters."""
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((num_clouds, dim))
    members = generator.integers(num_clouds, size=num_tokens)
    noise = spread * generator.standard_normal((num_tokens, dim))
    return (centers[members] + noise).astype(np.float32)


def chain(num_tokens, reach=3.0):
    """Each token is linked to its neighbours within about 1.8 `reach` only: tiny gaps."""
    places = np.arange(num_tokens)
    return np.exp(-(((places[:, None] - places) / reach) ** 2)).astype(np.float32)


def blobs(*sizes):
    """Groups of equal tokens, orthogonal to one another."""
    return np.repeat(np.eye(len(sizes), 8, dtype=np.float32), sizes, axis=0)


def angle(found, vector, degrees):
    one, other = found * np.sqrt(degrees), vector * np.sqrt(degrees)
    one, other = one / np.linalg.norm(one), other / np.linalg.norm(other)
    return np.linalg.norm(one - np.sign(one @ other) * other)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_tokens", [8, 40, 65, 150, 400])
def test_the_vector_is_that_of_the_dense_generalised_problem(num_tokens, weighted):
    features = clouds(num_tokens, seed=num_tokens)
    values, vector, degrees = dense_solution(features, weighted=weighted)

    found = second_eigenvector(features, tau=TAU, eps=EPS, weighted=weighted)

    assert found.eigenvalue == pytest.approx(values[0], abs=1e-7)
    assert found.gap == pytest.approx(values[1] - values[0], rel=1e-3)
    assert angle(found.vector, vector, degrees) < 1e-6
    assert found.vector[np.argmax(abs(found.vector))] > 0
    assert not found.degenerate


@pytest.mark.parametrize("seed", range(6))
def test_the_certificate_bounds_the_true_angle(seed, monkeypatch):
    features = clouds(200, seed, spread=1.3)
    monkeypatch.setattr(eigensolver, "solve_dense", None)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    _, vector, degrees = dense_solution(features)
    assert angle(found.vector, vector, degrees) < found.certificate < 1e-5


@pytest.mark.parametrize("num_tokens", [150, 300])
def test_a_small_gap_does_not_spoil_the_vector(num_tokens, monkeypatch):
    features = chain(num_tokens)
    monkeypatch.setattr(eigensolver, "solve_dense", None)
    values, vector, degrees = dense_solution(features)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    assert 1e-5 < values[1] - values[0] < 1e-2
    assert found.gap == pytest.approx(values[1] - values[0], rel=1e-3)
    assert angle(found.vector, vector, degrees) < 1e-6
    assert found.certificate < 1e-6


def test_what_lanczos_cannot_certify_goes_to_the_dense_solver(monkeypatch):
    features = chain(200)
    monkeypatch.setattr(eigensolver, "_MAX_PRODUCTS", 12)
    _, vector, degrees = dense_solution(features)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    assert found.certificate < 1e-7
    assert angle(found.vector, vector, degrees) < 1e-9


@pytest.mark.parametrize(("one", "other"), [(10, 4), (90, 70)])
def test_two_unequal_blobs_are_counted_by_hand(one, other):
    found = second_eigenvector(blobs(one, other), tau=TAU, eps=EPS)

    degree_one, degree_other = one + EPS * other, other + EPS * one
    assert found.eigenvalue == pytest.approx(EPS * other / degree_one + EPS * one / degree_other)
    assert np.ptp(found.vector[:one]) == pytest.approx(0, abs=1e-9)
    assert np.ptp(found.vector[one:]) == pytest.approx(0, abs=1e-9)
    weighted_sum = one * degree_one * found.vector[0] + other * degree_other * found.vector[-1]
    assert weighted_sum == pytest.approx(0, abs=1e-6)
    assert found.gap == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("size", [15, 60])
def test_a_double_eigenvalue_is_flagged(size):
    found = second_eigenvector(blobs(size, size, size), tau=TAU, eps=EPS)

    assert found.degenerate
    assert found.gap < 1e-7


def test_three_equal_parts_with_a_structure_of_their_own_are_flagged():
    part = clouds(70, seed=4)
    features = np.kron(np.eye(3), part).astype(np.float32)

    assert second_eigenvector(features, tau=TAU, eps=EPS).degenerate


@pytest.mark.parametrize("num_tokens", [3, 50, 200])
def test_a_complete_graph_and_one_without_edges_are_flagged(num_tokens):
    complete = second_eigenvector(blobs(num_tokens), tau=TAU, eps=EPS)
    lonely = second_eigenvector(np.eye(num_tokens, dtype=np.float32), tau=TAU, eps=EPS)

    assert complete.degenerate
    assert complete.eigenvalue == pytest.approx(1)
    assert lonely.degenerate
    assert lonely.eigenvalue == pytest.approx(1 - (1 - EPS) / (1 + EPS * (num_tokens - 1)))
    assert np.isfinite(complete.vector).all()
    assert np.isfinite(lonely.vector).all()


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_one_or_two_tokens_have_no_gap(num_tokens):
    found = second_eigenvector(clouds(num_tokens, seed=0), tau=TAU, eps=EPS)

    assert found.degenerate
    assert found.gap == 0
    assert np.isfinite(found.vector).all()


def test_the_order_of_the_tokens_does_not_matter():
    features, order = clouds(150, seed=1), np.random.default_rng(0).permutation(150)

    found = second_eigenvector(features, tau=TAU, eps=EPS)
    permuted = second_eigenvector(features[order], tau=TAU, eps=EPS)

    assert permuted.vector == pytest.approx(found.vector[order], abs=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_tokens", [40, 150])
def test_a_zero_token_is_linked_to_nothing_not_even_to_itself(num_tokens, weighted):
    features = clouds(num_tokens, seed=2)
    features[[7, 9]] = 0
    values, vector, degrees = dense_solution(features, weighted=weighted)

    with np.errstate(all="raise"):
        found = second_eigenvector(features, tau=TAU, eps=EPS, weighted=weighted)

    assert found.eigenvalue == pytest.approx(values[0], abs=1e-7)
    assert angle(found.vector, vector, degrees) < 1e-6


def test_nothing_but_zero_tokens_is_flagged():
    found = second_eigenvector(np.zeros((80, 4), np.float32), tau=TAU, eps=EPS)

    assert found.degenerate
    assert np.isfinite(found.vector).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_features_that_are_not_finite_are_refused(value):
    features = clouds(30, seed=0)
    features[[3, 8], 1] = value

    with pytest.raises(DataError, match="2 of 30 tokens"):
        second_eigenvector(features, tau=TAU, eps=EPS)


def test_the_threshold_is_strict():
    features = np.array([[1, 0], [0.2, np.sqrt(1 - 0.2**2)]], np.float32)
    cosine = float(features[0] @ features[1])

    assert similarity_graph(features, tau=cosine, eps=EPS).links[0, 1] == 0
    assert similarity_graph(features, tau=cosine - 1e-6, eps=EPS).links[0, 1] == 1


def test_a_pool_maps_in_order_with_one_blas_thread_each():
    def blas_threads(number):
        libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        return number, {library["num_threads"] for library in libraries}

    with threadpool_limits(2, user_api="blas"), GraphPool(3) as pool:
        found = pool.map(blas_threads, range(8))
        afterwards = blas_threads(8)

    assert found == [(number, {1}) for number in range(8)]
    assert afterwards == (8, {2})


@pytest.mark.parametrize("tau", [0.2, -0.1])
def test_padded_batches_give_what_each_graph_gives_alone(tau):
    graphs = [clouds(size, seed=size) for size in (120, 90, 150)]
    graphs[1][7] = 0
    features = torch.full((3, 150, 16), torch.nan)
    features[1] = 1
    valid = torch.zeros(3, 150, dtype=torch.bool)
    for i, graph in enumerate(graphs):
        features[i, : len(graph)], valid[i, : len(graph)] = torch.from_numpy(graph), True

    found = second_eigenvectors(features, valid, tau=tau, eps=EPS)

    for i, graph in enumerate(graphs):
        alone = second_eigenvector(graph, tau=tau, eps=EPS)
        assert found.vectors[i, : len(graph)].numpy() == pytest.approx(alone.vector, abs=1e-6)
        assert (found.vectors[i, len(graph) :] == 0).all()
        assert float(found.eigenvalues[i]) == pytest.approx(alone.eigenvalue, abs=1e-6)
        assert float(found.gaps[i]) == pytest.approx(alone.gap, rel=1e-3)
        assert 0 < float(found.certificates[i]) < 1e-5


def test_a_batch_refuses_broken_tokens_but_not_broken_padding():
    features, valid = torch.randn(2, 60, 8), torch.ones(2, 60, dtype=torch.bool)
    features[1, 5] = torch.nan

    with pytest.raises(DataError, match="finite"):
        second_eigenvectors(features, valid, tau=TAU, eps=EPS)


def test_graphs_that_a_batch_cannot_certify_are_solved_on_the_host():
    features = torch.from_numpy(np.stack([clouds(120, 0), blobs(120) @ np.eye(8, 16), chain_16()]))

    found = solve_batch(features.float(), tau=TAU, eps=EPS)

    for one, graph in zip(found, features.float().numpy(), strict=True):
        alone = second_eigenvector(graph, tau=TAU, eps=EPS)
        assert one.degenerate == alone.degenerate
        assert one.vector == pytest.approx(alone.vector, abs=1e-6)


def test_a_batch_that_is_solved_in_parts_gives_what_it_gives_as_a_whole():
    features = torch.from_numpy(np.stack([clouds(120, seed) for seed in range(5)])).float()
    whole = certified_batch(features, tau=TAU, eps=EPS)

    # Two graphs at once: parts of 2, 2 and 1.
    parts = certified_batch(features, tau=TAU, eps=EPS, links_at_once=2 * 120**2 + 1)

    assert len(parts) == 5
    for one, other in zip(parts, whole, strict=True):
        assert one is not None
        assert other is not None
        assert one.vector == pytest.approx(other.vector, abs=1e-9)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 24, 49, 64, 65])
def test_small_graphs_of_a_batch_are_what_each_is_alone(tokens):
    graphs = np.stack([clouds(tokens, seed) for seed in range(3)])

    found = solve_batch(torch.from_numpy(graphs), tau=TAU, eps=EPS)

    for one, graph in zip(found, graphs, strict=True):
        alone = second_eigenvector(graph, tau=TAU, eps=EPS)
        assert one.degenerate == alone.degenerate
        assert one.gap == pytest.approx(alone.gap, rel=1e-3, abs=1e-9)
        assert alone.degenerate or one.vector == pytest.approx(alone.vector, abs=1e-6)


def test_a_batch_holds_the_links_of_its_graphs_once_in_four_bytes_each():
    features = torch.from_numpy(np.stack([clouds(400, seed) for seed in range(2)]))
    links = 2 * 400**2

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        found = certified_batch(features, tau=TAU, eps=EPS)

    assert all(found)
    taken = [event.self_cpu_memory_usage for event in watched.events() or ()]
    # Smaller ones are the vectors of the Krylov space.
    assert [size for size in taken if size > 2 * links] == [4 * links]


def chain_16():
    """A chain of 120 tokens in 16 dimensions: too slow for a fixed number of steps."""
    places = np.arange(120)[:, None] / 8
    return np.exp(-((places - np.arange(16)) ** 2))
