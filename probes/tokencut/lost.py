"""LOST: one object that grows from the patch that resembles the fewest others."""

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from probes.tokencut.cuts import Discovery, as_array, component_of, graph_tokens, threshold
from probes.tokencut.options import REFERENCE, Cut, PatchGrid
from probes.tokencut.spectral.graph import cosines


def lost(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_candidates: int = 100,
) -> Discovery:
    """The object that LOST finds in one image.

    Only the preparation, the connectivity and a `tau` of "otsu" apply; else patches are linked
    where their features agree in sign. Of patches of equal degree the first comes first. An object
    that is the whole graph is degenerate: all patches resemble each other.

    Args:
        features: Of one image.
        grid: Where its patches lie.
        cut: See above.
        num_candidates: Patches of lowest degree that may join the seed.

    Source: LOST, https://arxiv.org/abs/2109.14279, equations 1 to 4, and object_discovery.py of
    https://github.com/valeoai/LOST/tree/fcedbec. There `torch.argsort` orders patches of equal
    degree, which promises no order and keeps none on CPUs with vector instructions; and a seed
    whose features are zero is an error there, here an object of one patch.
    """
    graph, shape = graph_tokens(cut, features, grid), cut.graph_shape(grid)
    tokens = as_array(graph)
    products = tokens @ tokens.T
    if cut.tau == "otsu":
        products = cosines(tokens) - float(threshold(cut, graph))
    degrees = _degrees(products)
    by_degree = np.argsort(degrees, kind="stable")
    candidates = by_degree[:num_candidates]

    def grown(seed: int) -> Bool[np.ndarray, "graph_rows graph_cols"]:
        similar = candidates[products[seed, candidates] > 0]
        resembles = (products[similar].sum(0) > 0).reshape(shape)
        resembles.flat[seed] = True
        return component_of(resembles, divmod(seed, shape[1]), cut.connectivity)

    seed, *others = np.flatnonzero(degrees == degrees.min()).tolist()
    component = grown(seed)
    return Discovery(
        grid.padded(component),
        grid.box(component),
        degenerate=bool(component.all())
        or any(bool((grown(other) != component).any()) for other in others),
        tied_cutoff=_order_decides(products[seed], degrees, by_degree, num_candidates),
    )


def _degrees(products: Float32[np.ndarray, "tokens tokens"]) -> Int64[np.ndarray, " tokens"]:
    """Other patches whose features agree with a patch's in sign."""
    return (products > 0).sum(1) - (products.diagonal() > 0)


def _order_decides(
    with_seed: Float32[np.ndarray, " tokens"],
    degrees: Int64[np.ndarray, " tokens"],
    by_degree: Int64[np.ndarray, " tokens"],
    num_candidates: int,
) -> bool:
    """Whether patches that agree with the seed tie for the last places among the candidates."""
    if num_candidates >= len(by_degree):
        return False
    last, next_one = degrees[by_degree[num_candidates - 1 : num_candidates + 1]]
    return bool(last == next_one and (with_seed[degrees == last] > 0).any())
