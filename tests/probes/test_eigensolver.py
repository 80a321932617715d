"""The second eigenvector: beside LAPACK's dense solution, on made-up graphs and on photographs."""

from collections import Counter

import numpy as np
import pytest
import scipy.linalg
import scipy.ndimage
import skimage.data
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from probes.tokencut import eigensolver
from probes.tokencut.cuts import PatchGrid, discover
from probes.tokencut.eigensolver import map_graphs, second_eigenvector, similarity_graph
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model

TAU, EPS = 0.2, 1e-5


def dense_solution(features, *, weighted=False, tau=TAU):
    """Independent restatement: second and third generalised eigenpair of (D - A, D)."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    weights = np.where(cosines > tau, cosines if weighted else 1.0, EPS).astype(np.float64)
    np.fill_diagonal(weights, np.where(features.any(1), 1, EPS))
    degrees = np.diag(weights.sum(1))
    values, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    return values, vectors[:, 0], degrees.diagonal()  # pyrefly: ignore[bad-index]


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


@pytest.mark.parametrize(("weighted", "tau"), [(False, TAU), (True, TAU), (False, -0.1)])
@pytest.mark.parametrize("num_tokens", [8, 40, 65, 150, 400])
def test_the_vector_is_that_of_the_dense_generalised_problem(num_tokens, weighted, tau):
    features = clouds(num_tokens, seed=num_tokens)
    values, vector, degrees = dense_solution(features, weighted=weighted, tau=tau)

    found = second_eigenvector(features, tau=tau, eps=EPS, weighted=weighted)

    assert found.eigenvalue == pytest.approx(values[0], abs=1e-7)
    assert found.gap == pytest.approx(values[1] - values[0], rel=1e-3)
    assert angle(found.vector, vector, degrees) < 1e-6
    assert found.vector[np.argmax(abs(found.vector))] > 0
    assert not found.degenerate


@pytest.mark.parametrize(
    "features",
    # Small gaps do not spoil the vector.
    [*(clouds(200, seed, spread=1.3) for seed in range(6)), chain(150), chain(300)],
)
def test_the_certificate_bounds_the_true_angle(features, monkeypatch):
    monkeypatch.setattr(eigensolver, "solve_dense", None)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    values, vector, degrees = dense_solution(features)
    assert angle(found.vector, vector, degrees) < found.certificate < 1e-5
    assert found.gap == pytest.approx(values[1] - values[0], rel=1e-3)


def test_what_lanczos_cannot_certify_goes_to_the_dense_solver(monkeypatch):
    features = chain(200)
    monkeypatch.setattr(eigensolver, "_MAX_PRODUCTS", 12)
    _, vector, degrees = dense_solution(features)

    found = second_eigenvector(features, tau=TAU, eps=EPS)

    assert found.certificate < 1e-7
    assert angle(found.vector, vector, degrees) < 1e-9


@pytest.mark.parametrize("num_tokens", [3, 50, 200])
def test_graphs_of_no_answer_are_flagged(num_tokens):
    complete = second_eigenvector(blobs(num_tokens), tau=TAU, eps=EPS)
    lonely = second_eigenvector(np.eye(num_tokens, dtype=np.float32), tau=TAU, eps=EPS)
    zeros = second_eigenvector(np.zeros((num_tokens, 4), np.float32), tau=TAU, eps=EPS)
    # A double eigenvalue: equal tokens, then parts with a structure of their own.
    equal = second_eigenvector(blobs(*3 * [num_tokens]), tau=TAU, eps=EPS)
    parts = np.kron(np.eye(3), clouds(num_tokens, seed=4)).astype(np.float32)

    for found in (complete, lonely, zeros, equal, second_eigenvector(parts, tau=TAU, eps=EPS)):
        assert found.degenerate
        assert np.isfinite(found.vector).all()
    assert complete.eigenvalue == pytest.approx(1)
    assert lonely.eigenvalue == pytest.approx(1 - (1 - EPS) / (1 + EPS * (num_tokens - 1)))
    assert equal.gap < 1e-7


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_one_or_two_tokens_have_no_gap(num_tokens):
    found = second_eigenvector(clouds(num_tokens, seed=0), tau=TAU, eps=EPS)

    assert found.degenerate
    assert found.gap == 0
    assert np.isfinite(found.vector).all()


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


@pytest.mark.parametrize("value", [np.nan, np.inf])
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


def test_graphs_are_mapped_in_order_with_one_blas_thread_each():
    def blas_threads(number):
        libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        return number, {library["num_threads"] for library in libraries}

    with threadpool_limits(2, user_api="blas"):
        found = map_graphs(blas_threads, range(8), num_threads=3)
        afterwards = blas_threads(8)

    assert found == [(number, {1}) for number in range(8)]
    assert afterwards == (8, {2})


def promises(features: torch.Tensor, grid: PatchGrid) -> dict[str, bool]:
    """What the graph of an image promises, beside the dense solution, and whether it is kept."""
    found = discover(features, grid)
    assert found.eigenvector is not None
    rows, cols, dim = features.shape
    tokens = features.reshape(-1, dim).numpy()
    unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    if (unit @ unit.T > TAU).all():
        # Every vector solves it, and LAPACK takes a second to orthogonalise some.
        return {"complete graphs flagged": found.degenerate}
    values, vector, _ = dense_solution(tokens)
    gap, kept = values[1] - values[0], {}
    ours = found.eigenvector.ravel()
    if gap > 1e-5:
        cosine = abs(ours @ vector) / np.linalg.norm(ours) / np.linalg.norm(vector)
        kept["|cos| > .9999"] = bool(cosine > 0.9999)
    side, seed = vector > vector.mean(), int(np.argmax(abs(vector)))
    labels, _ = scipy.ndimage.label((side == side[seed]).reshape(rows, cols))
    mask = labels == labels[seed // cols, seed % cols]
    # As the gap and the seed decide, which no patch outside of the object may equal.
    tied = (abs(vector) >= (1 - 1e-6) * abs(vector).max()) & ~mask.ravel()
    if gap > 1e-3 and not tied.any():
        ys, xs = np.nonzero(mask)
        size = grid.patch_size
        far = min((xs.max() + 1) * size, grid.width), min((ys.max() + 1) * size, grid.height)
        same = (ours > ours.mean()) == side
        kept["same bipartition"] = bool(same.all() or not same.any())
        kept["same box"] = found.box.tolist() == [xs.min() * size, ys.min() * size, *far]
    return kept


# Threads of BLAS make a matrix of this size several times as slow.
@threadpool_limits.wrap(1, user_api="blas")
def keeps_its_promises(images, *, at_least: int) -> None:
    """On all blocks and facets of encoders with and without skip connections."""
    found = []
    for skip in (True, False):
        config = ViTConfig(
            image_size=64, patch_size=16, dim=48, depth=4, num_heads=3,
            skip_attention=skip, skip_mlp=skip,
        )  # fmt: skip
        encoder = encoder_from_model(build_vit(config, seed=0), name="random")
        extractor = FeatureExtractor(encoder, layers=range(4), facets=("key", "token"), pad=True)
        for image in images:
            part = torch.from_numpy(image[:200, :270].copy()).permute(2, 0, 1)[None] / 255
            grid = PatchGrid(part.shape[2], part.shape[3], extractor.patch_size)
            facets = [v for of_block in extractor(part).values() for v in of_block.values()]
            features = [values[0].float() for values in facets]
            # Centred too: in deep blocks of random encoders all patches are alike.
            both = [*features, *(one - one.mean((0, 1)) for one in features)]
            found += [promises(one, grid) for one in both]
            # A common offset links every pair of patches.
            found.append(promises(features[0] + 10 * features[0].norm(dim=-1).max(), grid))
    assert all(all(one.values()) for one in found), found
    counts = Counter(name for one in found for name in one)
    assert counts["same box"] >= at_least <= counts["|cos| > .9999"], counts
    assert counts["complete graphs flagged"] >= 2 * len(images)


def test_every_graph_of_a_photograph_keeps_the_promises():
    keeps_its_promises([skimage.data.chelsea()], at_least=17)


@pytest.mark.slow
def test_every_graph_of_three_more_photographs_keeps_the_promises():
    names = ("coffee", "astronaut", "rocket")
    keeps_its_promises([getattr(skimage.data, name)() for name in names], at_least=53)


@pytest.mark.data
@pytest.mark.slow
def test_every_graph_of_twelve_more_photographs_keeps_the_promises(photos):
    images = Voc(root=photos).discovery()
    keeps_its_promises([images[i].image for i in range(0, 60, 5)], at_least=220)
