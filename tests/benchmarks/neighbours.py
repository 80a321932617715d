"""Exact nearest neighbours on a CPU: faiss against the suite's matrix product, in turn.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.neighbours --json FILE

`knn`: the 20 or 200 nearest, of equal ones the first, as k-NN asks for them; that the product
ranks faiss's candidates is in its time. `retrieval`: the 30 nearest patches, for which faiss's own
similarities are taken. Memories are unit vectors around a thousand centers. CPU time of a thread,
the best of some rounds in which both have their turn; `ratio` is of these, `range` of the rounds.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from probes.features.neighbours import NeighbourSearch
from ssl_bench import neighbours
from ssl_bench.composition.fields import Engine
from ssl_bench.neighbours import nearest_vectors
from tests.benchmarks.provenance import provenance
from tests.benchmarks.tokencut import print_table

_CENTERS, _SPREAD, _AT_ONCE = 1000, 1.0, 50_000


@dataclass(frozen=True)
class Case:
    """What one row measures."""

    use: str
    count: int
    vectors: int
    dim: int = 384
    queries: int = 512
    rounds: int = 3

    def search(self, queries: Tensor, memory: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
        if self.use == "knn":
            return nearest_vectors(queries, memory, self.count, engine=engine)
        return NeighbourSearch(memory, engine).nearest(queries, self.count)


CASES = (
    Case("knn", 20, 10_000, queries=4096, rounds=5),
    Case("knn", 200, 30_000, queries=4096, rounds=5),
    Case("knn", 20, 100_000, queries=2048, rounds=5),
    Case("knn", 200, 100_000, queries=2048, rounds=5),
    Case("knn", 200, 1_000_000),
    Case("knn", 200, 3_000_000, rounds=2),
    Case("retrieval", 30, 10_000, queries=4096, rounds=5),
    Case("retrieval", 30, 100_000, queries=4096, rounds=5),
    Case("retrieval", 30, 1_000_000),
    Case("retrieval", 30, 3_000_000, rounds=2),
    Case("retrieval", 30, 10_000_000, dim=128, queries=1024, rounds=1),
)


def unit_vectors(count: int, dim: int, seed: int) -> Float[Tensor, "count dim"]:
    """Around centers that do not depend on the seed; made in pieces, without a second copy."""
    centers = torch.randn(_CENTERS, dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.empty(count, dim)
    for some in vectors.split(_AT_ONCE):
        which = torch.randint(_CENTERS, (len(some),), generator=generator)
        noise = torch.randn(some.shape, generator=generator)
        some.copy_(F.normalize(centers[which] + _SPREAD * noise, dim=1))
    return vectors


def measured(case: Case) -> dict[str, Any]:
    memory, queries = (
        unit_vectors(count, case.dim, seed)
        for seed, count in ((1, case.vectors), (2, case.queries))
    )
    whole = counted_products()
    found: dict[Engine, tuple[Tensor, Tensor]] = {}
    seconds: dict[Engine, list[float]] = {"torch": [], "faiss": []}
    for engine in seconds:
        case.search(queries[:64], memory, engine)
    whole.clear()
    for _ in range(case.rounds):
        for engine, spent in seconds.items():
            start = time.process_time()
            found[engine] = case.search(queries, memory, engine)
            spent.append(time.process_time() - start)
    repeated = sum(whole) - (case.rounds * case.queries if case.use == "knn" else 0)
    ratios = [one / other for one, other in zip(seconds["torch"], seconds["faiss"], strict=True)]
    product, faiss = (1e3 * min(seconds[engine]) / case.queries for engine in seconds)
    return {
        "use": f"{case.use}, {case.count} of",
        "vectors": f"{case.vectors:,}",
        "dim": case.dim,
        "queries": case.queries,
        "product, ms a query": product,
        "faiss, ms a query": faiss,
        "ratio": product / faiss,
        "range": f"{min(ratios):.2f} to {max(ratios):.2f}",
        **same(found["torch"], found["faiss"]),
        "asked again, %": 100 * repeated / (case.rounds * case.queries),
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def counted_products() -> list[int]:
    """Numbers of queries of whole products, from now on."""
    queries_of, product = [], neighbours._by_product

    def counted(queries: Tensor, *rest: Any) -> Any:
        queries_of.append(len(queries))
        return product(queries, *rest)

    neighbours._by_product = counted
    return queries_of


def same(product: tuple[Tensor, Tensor], faiss: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Percent of neighbours that both have, in the same place, and with the same bits."""
    together = torch.cat([product[1], faiss[1]], 1).sort(dim=1).values
    both = (together[:, 1:] == together[:, :-1]).sum() / product[1].numel()
    shares = {
        "same neighbours, %": both,
        "same places, %": (product[1] == faiss[1]).double().mean(),
        "same bits, %": (product[0] == faiss[0]).double().mean(),
    }
    return {name: 100 * float(share) for name, share in shares.items()}


def in_turn(cases: tuple[Case, ...], measure: Callable[[Case], Any]) -> Iterator[dict[str, Any]]:
    product = neighbours._by_product
    for case in cases:
        yield measure(case)
        neighbours._by_product = product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--most", type=int, default=10**7, help="vectors of the largest case")
    parser.add_argument("--least", type=int, default=0, help="vectors of the smallest case")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    cases = tuple(case for case in CASES if arguments.least <= case.vectors <= arguments.most)
    # Before the figures: what is measured is the code as it is now.
    where = provenance()
    print(where, flush=True)
    rows = list(in_turn(cases, measured))
    print_table("Exact nearest neighbours on a CPU", rows)
    if arguments.json:
        text = json.dumps({"provenance": where, "neighbours": rows}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
