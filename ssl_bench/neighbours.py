"""Exact nearest neighbours among unit vectors, by faiss or a matrix product, and their vote."""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ssl_bench.composition.fields import Engine
from ssl_bench.errors import MachineError
from ssl_bench.metrics import LabelledFeatures, class_rank
from ssl_bench.system.device import to_float64

_EXPONENT_BITS = 0x7F800000
# Similarities that are in memory at once: a quarter of a gibibyte.
_SIMILARITIES = 2**26
# Queries that one call of faiss, and one product with what it found, serve at least.
_ASKED, _RERANKED = 4096, 8
# Queries whose votes are in memory at once.
_VOTING = 4096
# Numbers in all queries from which on faiss computes by blocks; below, it is slower than a product.
_BLOCKWISE = 2**17
# Vectors for each candidate from which on faiss and ranking what it found take less time.
_WORTH = 256
# Candidates beyond those that are asked for, so that rounding seldom leaves one out.
_SPARE = 32
# The most that faiss's kernels select on a GPU.
_MOST_ON_GPU = 2048


def knn_ranks(
    queries: LabelledFeatures,
    bank: LabelledFeatures,
    *,
    num_classes: int,
    neighbours: Sequence[int],
    temperature: float,
    engine: Engine = "auto",
) -> Int64[Tensor, "numbers queries"]:
    """Place of each query's class in the vote of the nearest neighbours, 0 if it wins.

    Cosine similarities s of the k nearest images of the bank vote with exp(s / temperature). Of
    equally near images the earlier counts as nearer, of classes with equally many votes the lower
    one wins, and a class without votes has the place `num_classes`: where fewer than five have any,
    these alone are the top 5, and a class that no neighbour is of is never right.

    Args:
        queries: Images that are asked about; their labels are the truth.
        bank: Images that answer.
        num_classes: Labels are below it.
        neighbours: Numbers of neighbours k, each at most the size of the bank.
        temperature: More than 0; small ones listen to the nearest alone.
        engine: What finds the neighbours; they are the same.

    Source: `knn_classifier` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/eval_knn.py
    where ties, and in the top 5 the order of classes without votes, are left to the sort.
    """
    memory, found = unit_vectors(bank.features.float()), []
    for start in range(0, len(queries.labels), _VOTING):
        some = unit_vectors(queries.features[start : start + _VOTING].float())
        similarities, index = nearest_vectors(some, memory, max(neighbours), engine=engine)
        # Relative to the nearest, so that no temperature overflows.
        votes = torch.exp(to_float64(similarities - similarities[:, :1]) / temperature)
        # Nor makes a neighbour's class one without votes.
        votes = votes.clamp(min=torch.finfo(votes.dtype).tiny)
        named = bank.labels[index].to(votes.device)
        true = queries.labels[start : start + _VOTING].to(votes.device)
        ranks = [vote_rank(votes[:, :k], named[:, :k], true, num_classes) for k in neighbours]
        found.append(torch.stack(ranks))
    return torch.cat(found, dim=1)


def unit_vectors(vectors: Float[Tensor, "*some dim"]) -> Float[Tensor, "*some dim"]:
    """Scale vectors to length 1, however short or long they are; vectors of zeros stay zeros.

    Each is first divided by a power of two near its largest entry, which is exact: squares of
    entries below 2^-63 or above 2^63 would leave the range of float32, and `F.normalize` divides by
    at least 1e-12.
    """
    largest = vectors.abs().amax(-1, keepdim=True)
    return F.normalize(vectors / power_of_two(largest), dim=-1)


def zero_vectors_warning(unit: Float[Tensor, "vectors dim"]) -> list[str]:
    """Return a warning for a record if some vectors have no direction; else nothing."""
    zeros = int((unit == 0).all(1).sum())
    if not zeros:
        return []
    return [f"{zeros} of {len(unit)} vectors are zero: their cosine with every vector counts as 0"]


def power_of_two(numbers: Float[Tensor, "*some"]) -> Float[Tensor, "*some"]:
    """Return the largest power of two that is not above each number; 2^-126 for smaller ones.

    Args:
        numbers: At least 0, with the range of float32.
    """
    least = numbers.float().clamp(min=torch.finfo(torch.float32).tiny)
    # Without its mantissa; exact on every device, which logarithms are not.
    power = (least.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power.to(numbers.dtype)


def vote_rank(
    votes: Float64[Tensor, "queries voters"],
    named: Int64[Tensor, "queries voters"],
    targets: Int64[Tensor, " queries"],
    num_classes: int,
) -> Int64[Tensor, " queries"]:
    """How many classes come before the true one when every voter votes for the class it names."""
    totals = votes.new_zeros(len(votes), num_classes).scatter_add_(1, named, votes)
    own = totals.gather(1, targets[:, None])
    return torch.where(own[:, 0] > 0, class_rank(totals, targets), num_classes)


def nearest_vectors(
    queries: Float[Tensor, "queries dim"],
    memory: Float[Tensor, "memory dim"],
    count: int,
    *,
    engine: Engine = "auto",
) -> tuple[Float[Tensor, "queries {count}"], Int64[Tensor, "queries {count}"]]:
    """Cosine similarity and index of the nearest vectors, in order; of equal ones the first.

    Both engines give the same: faiss only chooses candidates, their similarities are those of the
    matrix product, and where a vector that was not chosen could be as near within the rounding of
    float32, the whole product decides. "auto" takes faiss where it was measured to be faster.

    Args:
        queries: Of length 1, float32.
        memory: Of length 1, float32; at least `count`.
        count: How many neighbours.
        engine: See `ssl_bench.composition.fields.Engine`.

    Raises:
        MachineError: faiss is asked for on a GPU and was built without its kernels.
    """
    if not _is_for_faiss(queries, memory, count, engine):
        return _by_product(queries, memory, count)
    found = []
    # Parts of nearly one size: a small rest is slow, and products of a few rows round otherwise.
    for some in queries.tensor_split(max(1, len(queries) // _ASKED)):
        similarities, candidates = faiss_nearest(some, memory, count + _SPARE)
        parts = max(1, len(some) // _RERANKED)
        split = [x.tensor_split(parts) for x in (some, similarities[:, -1], candidates)]
        for block, farthest, which in zip(*split, strict=True):
            found.append(_reranked(block, farthest, which, memory, count))
    return torch.cat([values for values, _ in found]), torch.cat([index for _, index in found])


def faiss_nearest(
    queries: Float[Tensor, "queries dim"], memory: Float[Tensor, "memory dim"], count: int
) -> tuple[Float[Tensor, "queries {count}"], Int64[Tensor, "queries {count}"]]:
    """Similarity and index of the nearest vectors, in order; of equal ones any. Nothing is copied.

    Raises:
        MachineError: the memory is on a GPU and faiss was built without its kernels.
    """
    # Imported late, and after torch: the other way round their OpenMP libraries clash.
    import faiss

    queries, memory = queries.contiguous(), memory.contiguous()
    if memory.device.type == "cpu":
        product = faiss.METRIC_INNER_PRODUCT
        values, index = faiss.knn(queries.numpy(), memory.numpy(), count, metric=product)
        return torch.from_numpy(values), torch.from_numpy(index)
    return _faiss_nearest_on_gpu(faiss, queries, memory, count)


def takes_faiss(
    queries: Float[Tensor, "queries dim"], memory: Float[Tensor, "memory dim"], engine: Engine
) -> bool:
    """Whether faiss compares these; under "auto" on a CPU, for as many as it computes by blocks."""
    is_faster = memory.device.type == "cpu" and queries.numel() >= _BLOCKWISE
    return engine == "faiss" or (engine == "auto" and is_faster)


def nearest(
    similarities: Float[Tensor, "rows columns"], count: int
) -> tuple[Float[Tensor, "rows {count}"], Int64[Tensor, "rows {count}"]]:
    """The largest values of each row and their columns, in order; of equal ones the first."""
    values, index = similarities.topk(count)
    # topk takes any of several equal values; where some were left out, only a full sort is fair.
    unfair = (similarities >= values[:, -1:]).sum(1) > count
    if unfair.any():
        ordered = similarities[unfair].sort(dim=1, descending=True, stable=True)
        values[unfair], index[unfair] = ordered.values[:, :count], ordered.indices[:, :count]
    index, order = index.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, index.gather(1, order)


def _is_for_faiss(queries: Tensor, memory: Tensor, count: int, engine: Engine) -> bool:
    """Whether faiss can give candidates, and under "auto" whether that saves time."""
    on_gpu, candidates = memory.device.type != "cpu", count + _SPARE
    if candidates >= len(memory) or (on_gpu and candidates > _MOST_ON_GPU):
        return False
    # Products of fewer rows round otherwise than those of many.
    if len(queries) < _RERANKED or not takes_faiss(queries, memory, engine):
        return False
    return engine == "faiss" or _WORTH * candidates <= len(memory)


def _by_product(
    queries: Float[Tensor, "queries dim"], memory: Float[Tensor, "memory dim"], count: int
) -> tuple[Float[Tensor, "queries {count}"], Int64[Tensor, "queries {count}"]]:
    rows = max(1, _SIMILARITIES // len(memory))
    found = [nearest(some @ memory.T, count) for some in queries.split(rows)]
    return torch.cat([values for values, _ in found]), torch.cat([index for _, index in found])


def _reranked(
    queries: Float[Tensor, "some dim"],
    farthest: Float[Tensor, " some"],
    candidates: Int64[Tensor, "some candidates"],
    memory: Float[Tensor, "memory dim"],
    count: int,
) -> tuple[Float[Tensor, "some {count}"], Int64[Tensor, "some {count}"]]:
    """The nearest by the product with the candidates of all queries, if no other can be nearer."""
    columns = candidates.unique()
    values, index = nearest(queries @ memory[columns].T, count)
    # Twice the error of a sum of `dim` products of unit vectors, one of each engine.
    rounding = 1.01 * memory.shape[1] * torch.finfo(torch.float32).eps
    if bool((values[:, -1] > farthest + rounding).all()):
        return values, columns[index]
    return _by_product(queries, memory, count)


def _faiss_nearest_on_gpu(
    faiss: Any, queries: Tensor, memory: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    if not (hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus()):
        raise MachineError(
            f"faiss {faiss.__version__} finds no GPU",
            hint=("probe.engine=torch", "or", "--device", "cpu"),
        )
    # Teaches faiss to read and to give tensors, in the order of torch's stream.
    importlib.import_module("faiss.contrib.torch_utils")
    product, device = faiss.METRIC_INNER_PRODUCT, memory.device.index or 0
    with torch.cuda.device(device):
        return faiss.knn_gpu(_gpu_memory(), queries, memory, count, metric=product, device=device)


@cache
def _gpu_memory() -> Any:
    """What faiss computes in; taken once, since it is more than a gibibyte."""
    return importlib.import_module("faiss").StandardGpuResources()
