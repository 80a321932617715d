"""Find exact nearest neighbours of unit vectors, and classify images by a weighted k-NN vote.

The search uses faiss or a matrix product, which find the same neighbours.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ssl_bench.composition.fields import Engine
from ssl_bench.errors import MachineError
from ssl_bench.system.device import floor_to_power_of_two, to_float64

# Number of similarities in memory at a time. They take 0.25 GiB.
_MAX_SIMILARITIES = 2**26
# Minimum number of queries in one call of faiss, and in one matrix product that ranks candidates.
_FAISS_QUERIES, _RERANK_QUERIES = 4096, 8
# Number of queries whose votes are in memory at a time.
_VOTE_QUERIES = 4096
# If all query vectors together have fewer entries than this, the matrix product is faster, because
# faiss does not process so few queries in blocks.
_FAISS_MIN_ENTRIES = 2**17
# If there are at least this many database vectors for each candidate, faiss is faster than the
# matrix product.
_FAISS_MIN_RATIO = 256
# Number of candidates beyond the requested neighbours. Rounding then rarely excludes a neighbour.
_EXTRA_CANDIDATES = 32
# Largest number of neighbours that faiss's GPU kernels can select.
_FAISS_MAX_ON_GPU = 2048


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """One feature vector and one class label for each image."""

    features: Float[Tensor, "images dim"]
    labels: Int64[Tensor, " images"]

    def to(self, device: torch.device) -> "LabelledFeatures":
        return LabelledFeatures(self.features.to(device), self.labels.to(device))

    def take(self, rows: Int64[Tensor, " rows"]) -> "LabelledFeatures":
        """Return the features and labels of the images at the given row indices."""
        return LabelledFeatures(self.features[rows], self.labels[rows])


def knn_ranks(
    queries: LabelledFeatures,
    train: LabelledFeatures,
    *,
    num_classes: int,
    neighbours: Sequence[int],
    temperature: float,
    engine: Engine = "auto",
) -> Int64[Tensor, "numbers queries"]:
    """Return the rank of each query's true class in the k-NN vote, for each k in `neighbours`.

    The k training images nearest to the query vote for their own classes. Each vote has the weight
    exp(s / temperature), where s is the cosine similarity to the query. The class with the largest
    sum of votes has rank 0. A true class without votes has the rank `num_classes`, so it never
    counts as correct, even in the top 5.

    Images with equal similarities, and classes with equal votes, are ordered by index.

    Args:
        queries: Features and true classes of the images to classify.
        train: Features and classes of the training images.
        num_classes: Number of classes.
        neighbours: Numbers of neighbours k, at most the number of training images.
        temperature: A smaller value gives the nearest images more weight.
        engine: Library of the neighbour search, which does not affect the ranks.

    Returns:
        The ranks, with one row for each k and one column for each query.

    Source: `knn_classifier` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/eval_knn.py
    In the code of DINO, tied classes and classes without votes are in arbitrary order.
    """
    database, by_part = unit_vectors(train.features.float()), []
    for start in range(0, len(queries.labels), _VOTE_QUERIES):
        chunk = unit_vectors(queries.features[start : start + _VOTE_QUERIES].float())
        similarities, index = nearest_vectors(chunk, database, max(neighbours), engine=engine)
        # Similarities are relative to the nearest image, so exp never overflows.
        votes = torch.exp(to_float64(similarities - similarities[:, :1]) / temperature)
        # A vote that underflows to 0 would turn a neighbour's class into a class without votes.
        votes = votes.clamp(min=torch.finfo(votes.dtype).tiny)
        labels = train.labels[index].to(votes.device)
        true = queries.labels[start : start + _VOTE_QUERIES].to(votes.device)
        ranks = [vote_rank(votes[:, :k], labels[:, :k], true, num_classes) for k in neighbours]
        by_part.append(torch.stack(ranks))
    return torch.cat(by_part, dim=1)


def unit_vectors(vectors: Float[Tensor, "*some dim"]) -> Float[Tensor, "*some dim"]:
    """Return vectors divided by their L2 norms. Zero vectors stay zero.

    Each vector is first divided by a power of two near its largest entry, which causes no rounding
    error. Without this division, the squares of entries below 2^-63 or above 2^63 would leave the
    range of float32. The function `F.normalize` would divide very short vectors by 1e-12 instead of
    their norm.
    """
    largest = vectors.abs().amax(-1, keepdim=True)
    return F.normalize(vectors / floor_to_power_of_two(largest), dim=-1)


def zero_vectors_warning(unit: Float[Tensor, "vectors dim"]) -> list[str]:
    """Return a list with a warning if some vectors are zero, or else an empty list.

    Args:
        unit: Vectors that `unit_vectors` has normalised.
    """
    zeros = int((unit == 0).all(1).sum())
    if not zeros:
        return []
    return [f"{zeros} of {len(unit)} vectors are zero: their cosine with every vector counts as 0"]


def vote_rank(
    votes: Float64[Tensor, "queries voters"],
    labels: Int64[Tensor, "queries voters"],
    targets: Int64[Tensor, " queries"],
    num_classes: int,
) -> Int64[Tensor, " queries"]:
    """Return the rank of the true class in a weighted vote, or `num_classes` if it has no votes.

    Args:
        votes: Weight of each vote.
        labels: Class that each vote is for.
        targets: True class of each query.
        num_classes: Number of classes.
    """
    totals = votes.new_zeros(len(votes), num_classes).scatter_add_(1, labels, votes)
    own = totals.gather(1, targets[:, None])
    return torch.where(own[:, 0] > 0, class_rank(totals, targets), num_classes)


def nearest_vectors(
    queries: Float[Tensor, "queries dim"],
    database: Float[Tensor, "database dim"],
    k: int,
    *,
    engine: Engine = "auto",
) -> tuple[Float[Tensor, "queries {k}"], Int64[Tensor, "queries {k}"]]:
    """Return cosine similarities and indices of the nearest vectors to each query, nearest first.

    If similarities are equal, the vector with the lower index comes first. The result does not
    depend on the search engine. faiss only proposes candidates, and a matrix product computes their
    similarities again. If rounding errors of faiss may have excluded a neighbour, a matrix product
    searches all vectors instead.

    Args:
        queries: Unit vectors in float32.
        database: At least `k` unit vectors in float32 to search.
        k: Number of neighbours of each query.
        engine: "faiss", "torch" for a matrix product, or "auto" for the engine that is probably
            faster, according to measurements with similar numbers of vectors.

    Raises:
        MachineError: The vectors are on a GPU, the engine is "faiss", and faiss has no GPU kernels.
    """
    if not _should_use_faiss(queries, database, k, engine):
        return _nearest_by_product(queries, database, k)
    by_block = []
    # The parts have nearly equal sizes, because small products are slow and round differently.
    for chunk in queries.tensor_split(max(1, len(queries) // _FAISS_QUERIES)):
        similarities, candidates = faiss_nearest(chunk, database, k + _EXTRA_CANDIDATES)
        parts = max(1, len(chunk) // _RERANK_QUERIES)
        split = [x.tensor_split(parts) for x in (chunk, similarities[:, -1], candidates)]
        for block, farthest, proposed in zip(*split, strict=True):
            by_block.append(_rerank(block, farthest, proposed, database, k))
    return _concatenate(by_block)


def faiss_nearest(
    queries: Float[Tensor, "queries dim"], database: Float[Tensor, "database dim"], k: int
) -> tuple[Float[Tensor, "queries {k}"], Int64[Tensor, "queries {k}"]]:
    """Find the nearest vectors with faiss. Return similarities and indices, nearest first.

    The similarity is the inner product. Vectors with equal similarities have an arbitrary order.
    Contiguous tensors are not copied.

    Args:
        queries: Vectors in float32 whose neighbours are searched.
        database: Vectors in float32 to search.
        k: Number of neighbours of each query.

    Raises:
        MachineError: The vectors are on a GPU and faiss has no GPU kernels.
    """
    # faiss is imported after torch. In the opposite order, their OpenMP libraries clash.
    import faiss

    queries, database = queries.contiguous(), database.contiguous()
    if database.device.type == "cpu":
        product = faiss.METRIC_INNER_PRODUCT
        values, index = faiss.knn(queries.numpy(), database.numpy(), k, metric=product)
        return torch.from_numpy(values), torch.from_numpy(index)
    return _faiss_nearest_on_gpu(faiss, queries, database, k)


def prefers_faiss(
    queries: Float[Tensor, "queries dim"], database: Float[Tensor, "database dim"], engine: Engine
) -> bool:
    """Return whether the setting `engine` selects faiss for these vectors.

    The setting "auto" selects faiss on a CPU if there are enough queries.

    Args:
        queries: Vectors whose neighbours are searched.
        database: Vectors to search.
        engine: Setting of the user: "auto", "faiss" or "torch".
    """
    is_faster = database.device.type == "cpu" and queries.numel() >= _FAISS_MIN_ENTRIES
    return engine == "faiss" or (engine == "auto" and is_faster)


def stable_topk(
    similarities: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "rows {k}"], Int64[Tensor, "rows {k}"]]:
    """Return the largest values of each row and their column indices, largest value first.

    If values are equal, the value with the lower column index comes first.
    """
    values, index = similarities.topk(k)
    # topk selects arbitrarily among equal values. Rows with a tie between selected and unselected
    # values are therefore sorted in full.
    is_tied = (similarities >= values[:, -1:]).sum(1) > k
    if is_tied.any():
        ordered = similarities[is_tied].sort(dim=1, descending=True, stable=True)
        values[is_tied], index[is_tied] = ordered.values[:, :k], ordered.indices[:, :k]
    index, order = index.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, index.gather(1, order)


def _should_use_faiss(queries: Tensor, database: Tensor, k: int, engine: Engine) -> bool:
    """Return whether to search with faiss instead of a matrix product.

    faiss is not used if it cannot run, or if its neighbours could differ from those of a matrix
    product. With the engine "auto", faiss is only used if it is also faster.
    """
    on_gpu, candidates = database.device.type != "cpu", k + _EXTRA_CANDIDATES
    if candidates >= len(database) or (on_gpu and candidates > _FAISS_MAX_ON_GPU):
        return False
    # Matrix products with few rows round differently, so the engines would disagree.
    if len(queries) < _RERANK_QUERIES or not prefers_faiss(queries, database, engine):
        return False
    return engine == "faiss" or _FAISS_MIN_RATIO * candidates <= len(database)


def _nearest_by_product(
    queries: Float[Tensor, "queries dim"], database: Float[Tensor, "database dim"], k: int
) -> tuple[Float[Tensor, "queries {k}"], Int64[Tensor, "queries {k}"]]:
    rows = max(1, _MAX_SIMILARITIES // len(database))
    return _concatenate([stable_topk(chunk @ database.T, k) for chunk in queries.split(rows)])


def _concatenate(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    values, index = map(torch.cat, zip(*parts, strict=True))
    return values, index


def _rerank(
    queries: Float[Tensor, "chunk dim"],
    farthest: Float[Tensor, " chunk"],
    candidates: Int64[Tensor, "chunk candidates"],
    database: Float[Tensor, "database dim"],
    k: int,
) -> tuple[Float[Tensor, "chunk {k}"], Int64[Tensor, "chunk {k}"]]:
    """Return the nearest neighbours among the candidates that faiss proposed.

    If a neighbour may be missing from the candidates, all vectors are searched instead.

    Args:
        queries: Unit vectors whose neighbours are searched.
        farthest: Similarity of each query to its least similar candidate, as faiss computed it.
        candidates: Indices of each query's candidates in `database`.
        database: Unit vectors to search.
        k: Number of neighbours of each query.

    Returns:
        Cosine similarities and indices in `database`, nearest first.
    """
    columns = candidates.unique()
    values, index = stable_topk(queries @ database[columns].T, k)
    # Both engines round, so this is twice the rounding error of a sum of `dim` products.
    rounding = 1.01 * database.shape[1] * torch.finfo(torch.float32).eps
    if bool((values[:, -1] > farthest + rounding).all()):
        return values, columns[index]
    return _nearest_by_product(queries, database, k)


def _faiss_nearest_on_gpu(
    faiss: Any, queries: Tensor, database: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    if not (hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus()):
        raise MachineError(
            f"faiss {faiss.__version__} finds no GPU, but the features are on a GPU",
            hint=("probe.engine=torch", "or", "--device", "cpu"),
        )
    # After this import, faiss accepts and returns torch tensors, and uses torch's CUDA stream.
    importlib.import_module("faiss.contrib.torch_utils")
    product, device = faiss.METRIC_INNER_PRODUCT, database.device.index or 0
    with torch.cuda.device(device):
        return faiss.knn_gpu(_gpu_resources(), queries, database, k, metric=product, device=device)


@cache
def _gpu_resources() -> Any:
    """Return the object that owns faiss's working memory on the GPU.

    The memory exceeds 1 GiB, so the object is created only once.
    """
    return importlib.import_module("faiss").StandardGpuResources()


def class_rank(
    scores: Float[Tensor, "*heads queries classes"], targets: Int64[Tensor, " queries"]
) -> Int64[Tensor, "*heads queries"]:
    """Return the rank of the true class by score. The class with the highest score has rank 0.

    If scores are equal, the class with the lower index ranks first. If any score of a query is not
    finite, the rank is the number of classes, so the query never counts as correct.

    Args:
        scores: Score of each class for each query, for one or several classifiers (heads).
        targets: True class of each query.
    """
    num_classes = scores.shape[-1]
    own = scores.gather(-1, targets.expand(scores.shape[:-1])[..., None])
    lower = torch.arange(num_classes, device=targets.device) < targets[:, None]
    before = (scores > own) | ((scores == own) & lower)
    return torch.where(scores.isfinite().all(-1), before.sum(-1), num_classes)
