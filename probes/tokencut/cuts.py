"""One object from the features of one image: TokenCut, and what its relatives share with it."""

from dataclasses import dataclass, field

import numpy as np
import scipy.ndimage
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from probes.tokencut.options import REFERENCE, Cut, PatchGrid
from probes.tokencut.spectral.eigensolver import FiedlerVector, second_eigenvector
from probes.tokencut.spectral.otsu import otsu_thresholds

TIE = 1e-6


@dataclass(frozen=True)
class Discovery:
    """An object and how sure it is.

    Attributes:
        mask: The object's patches.
        box: (x0, y0, x1, y1) in pixels, far edges exclusive, inside the image.
        eigenvector: 0 at patches outside of the graph; None for methods without a spectrum.
        eigenvalue: lambda_2 of the normalised cut.
        gap: lambda_3 - lambda_2.
        degenerate: Rounding and the order of the patches choose the object, not the image.
        tied_cutoff: Of LOST: which of several patches of one degree may join the seed hangs on
            their order. The object may or may not depend on it.
    """

    mask: Bool[np.ndarray, "rows cols"]
    box: Float64[np.ndarray, " 4"]
    eigenvector: Float64[np.ndarray, "rows cols"] | None = None
    eigenvalue: float | None = None
    gap: float | None = None
    degenerate: bool = False
    tied_cutoff: bool = False


@dataclass(frozen=True)
class Bipartition:
    """Both sides of a cut.

    Attributes:
        foreground: The side that holds the seed.
        seed: Row and column.
        tied: Entries whose magnitude equals the seed's but for rounding.
    """

    foreground: Bool[np.ndarray, "rows cols"]
    seed: tuple[int, int]
    tied: Bool[np.ndarray, "rows cols"] = field(repr=False)


def discover(
    features: Float[Tensor, "rows cols dim"], grid: PatchGrid, cut: Cut = REFERENCE
) -> Discovery:
    """The object that TokenCut finds in one image.

    Raises:
        DataError: features are not finite.

    Source: TokenCut, https://arxiv.org/abs/2202.11539, and object_discovery.py of
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    tokens = graph_tokens(cut, features, grid)
    tau = float(threshold(cut, tokens))
    found = second_eigenvector(as_array(tokens), tau=tau, eps=cut.eps, weighted=cut.weighted)
    return cut_out(found, grid, cut)


def graph_tokens(
    cut: Cut, features: Float[Tensor, "rows cols dim"], grid: PatchGrid
) -> Float[Tensor, "tokens dim"]:
    """Features of the graph's patches, row by row."""
    rows, cols = cut.graph_shape(grid)
    tokens = features[:rows, :cols].flatten(0, 1)
    return tokens - tokens.mean(0) if cut.centred else tokens


def threshold(cut: Cut, tokens: Float[Tensor, "tokens dim"]) -> float | Float[Tensor, ""]:
    """Cosine above which the patches of an image are linked; on the device if found there."""
    return otsu_thresholds(tokens[None])[0] if cut.tau == "otsu" else cut.tau


def as_array(tokens: Float[Tensor, "tokens dim"]) -> Float32[np.ndarray, "tokens dim"]:
    return tokens.detach().float().cpu().numpy()


def cut_out(found: FiedlerVector, grid: PatchGrid, cut: Cut) -> Discovery:
    """The connected component around the peak of a second eigenvector."""
    vector = found.vector.reshape(cut.graph_shape(grid))
    split = split_at_mean(vector, stable_seed=cut.stable_seed)
    component = component_of(split.foreground, split.seed, cut.connectivity)
    degenerate = found.degenerate or bool((split.tied & ~component).any())
    if degenerate and cut.refuse_degenerate:
        component = np.zeros_like(component)
    return Discovery(
        mask=grid.padded(component),
        box=grid.box(component),
        eigenvector=grid.padded(vector),
        eigenvalue=found.eigenvalue,
        gap=found.gap,
        degenerate=degenerate,
    )


def split_at_mean(
    vector: Float64[np.ndarray, "rows cols"], *, stable_seed: bool = False
) -> Bipartition:
    """Cut at the mean; the seed is the entry of largest magnitude, the first if several are."""
    magnitude = abs(vector)
    tied = magnitude >= (1 - TIE) * magnitude.max()
    flat = int(np.argmax(tied if stable_seed else magnitude))
    seed = divmod(flat, vector.shape[1])
    above = vector > vector.mean()
    return Bipartition(above if above[seed] else ~above, seed, tied)


def component_of(
    foreground: Bool[np.ndarray, "rows cols"], seed: tuple[int, int], connectivity: int
) -> Bool[np.ndarray, "rows cols"]:
    """The connected part of a mask that holds the seed."""
    structure = scipy.ndimage.generate_binary_structure(2, 1 if connectivity == 4 else 2)
    labels = np.empty(foreground.shape, np.int32)
    scipy.ndimage.label(foreground, structure, output=labels)
    return labels == labels[seed]
