"""Test the eigensolver that TokenCut uses."""

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.linalg
import skimage.data
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from probes.tokencut import eigensolver
from probes.tokencut.eigensolver import map_graphs, second_eigenvector, similarity_graph
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model

TAU, EPS = 0.2, 1e-5


def dense_solution(features, *, weighted=False, tau=TAU):
    """Solve the eigenvalue problem of a token graph with scipy."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    weights = np.where(cosines > tau, cosines if weighted else 1.0, EPS).astype(np.float64)
    np.fill_diagonal(weights, np.where(features.any(1), 1, EPS))
    degrees = np.diag(weights.sum(1))
    values, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    return values, vectors[:, 0], degrees.diagonal()  # pyrefly: ignore[bad-index]


def clouds(num_tokens, seed, *, num_clouds=4, spread=1.0, dim=16):
    """Return random tokens that are grouped around a few centres."""
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((num_clouds, dim))
    members = generator.integers(num_clouds, size=num_tokens)
    noise = spread * generator.standard_normal((num_tokens, dim))
    return (centers[members] + noise).astype(np.float32)


def chain(num_tokens, reach=3.0):
    """Return tokens whose similarity graph has nearly equal eigenvalues."""
    places = np.arange(num_tokens)
    return np.exp(-(((places[:, None] - places) / reach) ** 2)).astype(np.float32)


def blobs(*sizes):
    return np.repeat(np.eye(len(sizes), 8, dtype=np.float32), sizes, axis=0)


def angle(found, vector, degrees):
    one, other = found * np.sqrt(degrees), vector * np.sqrt(degrees)
    one, other = one / np.linalg.norm(one), other / np.linalg.norm(other)
    return np.linalg.norm(one - np.sign(one @ other) * other)


@pytest.mark.parametrize(("weighted", "tau"), [(False, TAU), (True, TAU), (False, -0.1)])
@pytest.mark.parametrize("num_tokens", [8, 65, 150])
def test_the_vector_equals_the_dense_solution(num_tokens, weighted, tau):
    features = clouds(num_tokens, seed=num_tokens)
    values, vector, degrees = dense_solution(features, weighted=weighted, tau=tau)

    found = second_eigenvector(features, tau=tau, eps=EPS, weighted=weighted)

    assert found.eigenvalue == pytest.approx(values[0], abs=1e-7)
    assert found.gap == pytest.approx(values[1] - values[0], rel=1e-3)
    assert angle(found.vector, vector, degrees) < 1e-6
    assert found.vector[np.argmax(abs(found.vector))] > 0
    assert not found.degenerate


# The last graph has a small gap.
@pytest.mark.parametrize("features", [clouds(200, 0, spread=1.3), chain(300)])
def test_the_error_bound_exceeds_the_true_angle(features, monkeypatch):
    monkeypatch.setattr(eigensolver, "solve_dense", None)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    values, vector, degrees = dense_solution(features)
    assert angle(found.vector, vector, degrees) < found.error_bound < 1e-5
    assert found.gap == pytest.approx(values[1] - values[0], rel=1e-3)


def test_the_dense_solver_is_used_if_lanczos_does_not_converge(monkeypatch):
    features = chain(200)
    monkeypatch.setattr(eigensolver, "_MAX_PRODUCTS", 12)
    _, vector, degrees = dense_solution(features)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    assert found.error_bound < 1e-7
    assert angle(found.vector, vector, degrees) < 1e-9


@pytest.mark.parametrize("num_tokens", [3, 100])
def test_graphs_without_a_unique_answer_are_degenerate(num_tokens):
    complete = second_eigenvector(blobs(num_tokens), tau=TAU, eps=EPS)
    lonely = second_eigenvector(np.eye(num_tokens, dtype=np.float32), tau=TAU, eps=EPS)
    zeros = second_eigenvector(np.zeros((num_tokens, 4), np.float32), tau=TAU, eps=EPS)
    # These graphs have a double eigenvalue, because they have three unconnected parts.
    equal = second_eigenvector(blobs(*3 * [num_tokens]), tau=TAU, eps=EPS)
    parts = np.kron(np.eye(3), clouds(num_tokens, seed=4)).astype(np.float32)

    for found in (complete, lonely, zeros, equal, second_eigenvector(parts, tau=TAU, eps=EPS)):
        assert found.degenerate
        assert np.isfinite(found.vector).all()
    assert complete.eigenvalue == pytest.approx(1)
    assert lonely.eigenvalue == pytest.approx(1 - (1 - EPS) / (1 + EPS * (num_tokens - 1)))
    assert equal.gap < 1e-7
    for few in (1, 2):
        found = second_eigenvector(clouds(few, seed=0), tau=TAU, eps=EPS)
        assert found.degenerate
        assert found.gap == 0
        assert np.isfinite(found.vector).all()


def test_eigenvectors_of_two_tokens_are_orthogonal_to_constant_ones():
    # The first degree is 1 + EPS. The zero token has the degree 2 * EPS.
    for second, vector, value in (
        ([0, 1], [1, -1], 2 * EPS / (1 + EPS)),
        ([0, 0], [-2 * EPS, 1 + EPS], 1.5 - 1 / (1 + EPS)),
    ):
        found = second_eigenvector(np.array([[1, 0], second], np.float32), tau=TAU, eps=EPS)
        assert found.vector / abs(found.vector).max() == pytest.approx(
            np.array(vector) / max(vector), rel=1e-4
        )
        assert found.eigenvalue == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_zero_token_has_no_links(weighted):
    features = clouds(40, seed=2)
    features[[7, 9]] = 0
    values, vector, degrees = dense_solution(features, weighted=weighted)

    with np.errstate(all="raise"):
        found = second_eigenvector(features, tau=TAU, eps=EPS, weighted=weighted)

    assert found.eigenvalue == pytest.approx(values[0], abs=1e-7)
    assert angle(found.vector, vector, degrees) < 1e-6


def test_features_that_are_not_finite_are_refused():
    features = clouds(30, seed=0)
    features[[3, 8], 1] = np.nan, np.inf

    with pytest.raises(DataError, match="2 of 30 tokens"):
        second_eigenvector(features, tau=TAU, eps=EPS)


def test_the_threshold_is_strict():
    features = np.array([[1, 0], [0.2, np.sqrt(1 - 0.2**2)]], np.float32)
    cosine = float(features[0] @ features[1])

    assert similarity_graph(features, tau=cosine, eps=EPS).links[0, 1] == 0
    assert similarity_graph(features, tau=cosine - 1e-6, eps=EPS).links[0, 1] == 1


def test_graphs_are_mapped_in_order_with_one_blas_thread_each():
    def blas_threads(number):
        libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        return number, {library["num_threads"] for library in libraries}

    with threadpool_limits(2, user_api="blas"):
        found = map_graphs(blas_threads, range(8), num_threads=3)
        afterwards = blas_threads(8)

    assert found == [(number, {1}) for number in range(8)]
    assert afterwards == (8, {2})


# BLAS is several times slower with more than one thread for a matrix of this size.
@threadpool_limits.wrap(1, user_api="blas")
def compare_with_dense_solutions(images, *, min_unique: int) -> None:
    """Check that our eigensolver and scipy compute the same eigenvectors."""
    numbers = Counter()
    for skip, image in itertools.product((True, False), images):
        config = ViTConfig(
            image_size=64, patch_size=16, dim=48, depth=4, num_heads=3,
            skip_attention=skip, skip_mlp=skip,
        )  # fmt: skip
        encoder = encoder_from_model(build_vit(config, seed=0), name="random")
        extractor = FeatureExtractor(encoder, layers=range(4), facets=("key", "token"), pad=True)
        part = torch.from_numpy(image[:200, :270].copy()).permute(2, 0, 1)[None] / 255
        facets = [v for of_block in extractor(part).values() for v in of_block.values()]
        maps = [values[0].float().flatten(0, 1).numpy() for values in facets]
        # In deep blocks of random encoders, patches are similar unless they are centred.
        for tokens in [*maps, *(one - one.mean(0) for one in maps), maps[0] + 1e3]:
            found = second_eigenvector(tokens, tau=TAU, eps=EPS)
            unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
            if (unit @ unit.T > TAU).all():
                assert found.degenerate
                numbers["complete"] += 1
                continue
            values, vector, degrees = dense_solution(tokens)
            if values[1] - values[0] > 1e-5:
                assert angle(found.vector, vector, degrees) < 1e-4
                numbers["unique"] += 1
    assert numbers["unique"] >= min_unique, numbers
    assert numbers["complete"] >= 2 * len(images), numbers


def test_vectors_of_a_photograph_equal_the_dense_solution():
    compare_with_dense_solutions([skimage.data.chelsea()], min_unique=17)


@pytest.mark.data
@pytest.mark.slow
def test_vectors_of_three_photographs_equal_the_dense_solution(photos):
    images = Voc(root=photos).discovery()
    compare_with_dense_solutions([images[i].image for i in range(0, 60, 20)], min_unique=50)
