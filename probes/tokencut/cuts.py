"""Objects from the features of one image: TokenCut, and its relatives LOST and MaskCut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import scipy.ndimage
import torch
from jaxtyping import Bool, Float, Float32, Float64, Shaped
from torch import Tensor

from probes.tokencut.eigensolver import (
    FiedlerVector,
    cosines,
    second_eigenvector,
    similarity_graph,
    solve,
)
from ssl_bench.composition.fields import Bounds, OpenFraction
from ssl_bench.neighbours import unit_vectors

TIE = 1e-6
_OTSU_BINS = 256
Tau = Annotated[float, Bounds(-1, 1, allow_high=False)] | Literal["otsu"]
Side = Bool[np.ndarray, "rows cols"]
Bipartition = tuple[Side, tuple[int, int], Side]
"""The side of a cut that holds the seed, the seed's row and column, and the entries whose magnitude
equals the seed's but for rounding."""


@dataclass(frozen=True)
class PatchGrid:
    """An image of any size in patches; those at the right and lower edge may hold padding.

    Attributes:
        height: Of the image in pixels, without padding.
        width: Of the image in pixels, without padding.
    """

    height: int
    width: int
    patch_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the padded image."""
        return -(-self.height // self.patch_size), -(-self.width // self.patch_size)

    @property
    def inner_shape(self) -> tuple[int, int]:
        """Rows and columns without padding; one of each stays in any case."""
        return max(1, self.height // self.patch_size), max(1, self.width // self.patch_size)

    def box(self, mask: Bool[np.ndarray, "rows cols"]) -> Float64[np.ndarray, " 4"]:
        """Smallest (x0, y0, x1, y1) in pixels around a mask, clipped; zeros around nothing."""
        rows, cols = np.nonzero(mask)
        if not len(rows):
            return np.zeros(4)
        low, high = (cols.min(), rows.min()), (cols.max() + 1, rows.max() + 1)
        box = self.patch_size * np.array([*low, *high], np.float64)
        return np.minimum(box, [self.width, self.height, self.width, self.height])

    def is_padding(self, mask: Bool[np.ndarray, "rows cols"]) -> bool:
        """Whether a mask has patches, and of each of them more is padding along one of its sides.

        Their middles lie beyond the image.
        """
        rows, cols = self.patch_size * (np.array(np.nonzero(mask)) + 0.5)
        return len(rows) > 0 and not ((rows <= self.height) & (cols <= self.width)).any()

    def padded(
        self, values: Shaped[np.ndarray, "graph_rows graph_cols"]
    ) -> Shaped[np.ndarray, "rows cols"]:
        """Zeros for the patches that were left out of a graph."""
        rows, cols = (whole - part for whole, part in zip(self.shape, values.shape, strict=True))
        return np.pad(values, ((0, rows), (0, cols)))

    def pixels(self, mask: Bool[np.ndarray, "rows cols"]) -> Bool[np.ndarray, "height width"]:
        """A mask of patches at the pixels of the image, without its padding."""
        large = mask.repeat(self.patch_size, 0).repeat(self.patch_size, 1)
        return large[: self.height, : self.width]


@dataclass(frozen=True)
class Cut:
    """How an object is cut out of the similarity graph; the defaults are TokenCut's.

    Attributes:
        tau: Cosine similarity above which two patches are linked, in [-1, 1); "otsu": of each image
            the one that splits its cosines best, see `otsu_threshold`. LOST links where products
            are positive, and with "otsu" above this cosine.
        eps: Weight of all other links.
        weighted: Links weigh their cosine instead of 1.
        centred: Subtract the image's mean feature first.
        mask_padding: Leave patches that hold padding out of the graph.
        connectivity: Neighbours of a patch, 4 or 8.
        stable_seed: The seed is the first entry within 1e-6 of the largest, not the largest.
        refuse_degenerate: No object where rounding or padding would choose it.
    """

    tau: Tau = 0.2
    eps: OpenFraction = 1e-5
    weighted: bool = False
    centred: bool = False
    mask_padding: bool = False
    connectivity: Literal[4, 8] = 4
    stable_seed: bool = False
    refuse_degenerate: bool = False

    def graph_shape(self, grid: PatchGrid) -> tuple[int, int]:
        """Rows and columns of the patches that make up the graph."""
        return grid.inner_shape if self.mask_padding else grid.shape

    def tokens(
        self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid
    ) -> tuple[Float32[np.ndarray, "tokens dim"], float]:
        """Features of the graph's patches, row by row, and the cosine above which it has links."""
        rows, cols = self.graph_shape(grid)
        tokens = features[:rows, :cols].flatten(0, 1)
        if self.centred:
            tokens = tokens - tokens.mean(0)
        tau = float(otsu_threshold(tokens)) if self.tau == "otsu" else self.tau
        return tokens.detach().float().cpu().numpy(), tau


REFERENCE = Cut()


@dataclass(frozen=True)
class Discovery:
    """An object and how sure it is.

    Attributes:
        mask: The object's patches.
        box: (x0, y0, x1, y1) in pixels, far edges exclusive, inside the image.
        eigenvector: 0 at patches outside of the graph; None for methods without a spectrum.
        eigenvalue: lambda_2 of the normalised cut.
        gap: lambda_3 - lambda_2.
        degenerate: Rounding, the order of the patches or padding chooses the object, not the image.
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


def discover(
    features: Float[Tensor, "rows cols dim"], grid: PatchGrid, cut: Cut = REFERENCE
) -> Discovery:
    """The object that TokenCut finds in one image.

    Raises:
        DataError: features are not finite.

    Source: TokenCut, https://arxiv.org/abs/2202.11539, and object_discovery.py of
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    tokens, tau = cut.tokens(features, grid)
    return cut_out(
        second_eigenvector(tokens, tau=tau, eps=cut.eps, weighted=cut.weighted), grid, cut
    )


def cut_out(found: FiedlerVector, grid: PatchGrid, cut: Cut) -> Discovery:
    """The connected component around the peak of a second eigenvector."""
    vector = found.vector.reshape(cut.graph_shape(grid))
    foreground, seed, tied = split_at_mean(vector, stable_seed=cut.stable_seed)
    component = component_of(foreground, seed, cut.connectivity)
    degenerate = found.degenerate or bool((tied & ~component).any()) or grid.is_padding(component)
    if degenerate and cut.refuse_degenerate:
        component = np.zeros_like(component)
    return _discovery(component, grid, found, degenerate)


def _discovery(
    mask: Bool[np.ndarray, "graph_rows graph_cols"],
    grid: PatchGrid,
    found: FiedlerVector,
    degenerate: bool,
) -> Discovery:
    return Discovery(
        mask=grid.padded(mask),
        box=grid.box(mask),
        eigenvector=grid.padded(found.vector.reshape(mask.shape)),
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
    return above if above[seed] else ~above, seed, tied


def component_of(
    foreground: Bool[np.ndarray, "rows cols"], seed: tuple[int, int], connectivity: int
) -> Bool[np.ndarray, "rows cols"]:
    """The connected part of a mask that holds the seed."""
    structure = scipy.ndimage.generate_binary_structure(2, 1 if connectivity == 4 else 2)
    labels = np.empty(foreground.shape, np.int32)
    scipy.ndimage.label(foreground, structure, output=labels)
    return labels == labels[seed]


def otsu_threshold(tokens: Float[Tensor, "tokens dim"]) -> Float[Tensor, ""]:
    """The threshold that splits the cosines of an image's pairs of tokens best.

    Best is the largest variance between both sides, over the middles of 256 bins between the
    smallest and the largest cosine; a token's cosine with itself does not count.

    Source: Otsu, IEEE Trans. Systems, Man and Cybernetics 9 (1979), equation 18.
    """
    unit, count = unit_vectors(tokens.float()), len(tokens)
    if count < 2:
        return unit.new_zeros(())
    # Without the diagonal, which is every (count + 1)th entry.
    cosines = (unit @ unit.T).flatten()[:-1].view(count - 1, count + 1)[:, 1:].flatten().double()
    least, most = cosines.aminmax()
    width = (most - least) / _OTSU_BINS
    bins = ((cosines - least) / width.clamp(min=1e-30)).long().clamp_(0, _OTSU_BINS - 1)
    counts = cosines.new_zeros(_OTSU_BINS).scatter_add_(0, bins, torch.ones_like(cosines))
    middles = least + width * (torch.arange(_OTSU_BINS, device=unit.device) + 0.5)
    below, sums = counts.cumsum(0)[:-1], (counts * middles).cumsum(0)
    above = len(cosines) - below
    difference = sums[:-1] / below - (sums[-1] - sums[:-1]) / above.clamp(min=1)
    between = below * above * difference.square()
    return middles[between.argmax()].float()


def lost(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_candidates: int = 100,
) -> Discovery:
    """The object that LOST finds in one image: it grows from the patch that resembles the fewest.

    Only the preparation, the connectivity and a `tau` of "otsu" apply; else patches are linked
    where their features agree in sign. So many candidates of lowest degree may join the seed; of
    patches of equal degree the first comes first. An object that is the whole graph is degenerate:
    all patches resemble each other.

    Source: LOST, https://arxiv.org/abs/2109.14279, equations 1 to 4, and object_discovery.py of
    https://github.com/valeoai/LOST/tree/fcedbec. There `torch.argsort` orders patches of equal
    degree, which promises no order and keeps none on CPUs with vector instructions; and a seed
    whose features are zero is an error there, here an object of one patch.
    """
    tokens, tau = cut.tokens(features, grid)
    shape = cut.graph_shape(grid)
    if cut.tau == "otsu":
        products = cosines(tokens) - tau
    else:
        # Only signs count: scaled exactly, so that small products do not become 0.
        scaled = np.ldexp(tokens, -np.frexp(np.abs(tokens).max(initial=0.0))[1])
        products = scaled @ scaled.T
    # Other patches that agree with one.
    degrees = (products > 0).sum(1) - (products.diagonal() > 0)
    by_degree = np.argsort(degrees, kind="stable")
    candidates = by_degree[:num_candidates]

    def grown(seed: int) -> Bool[np.ndarray, "graph_rows graph_cols"]:
        similar = candidates[products[seed, candidates] > 0]
        resembles = (products[similar].sum(0) > 0).reshape(shape)
        resembles.flat[seed] = True
        return component_of(resembles, divmod(seed, shape[1]), cut.connectivity)

    seed, *others = np.flatnonzero(degrees == degrees.min()).tolist()
    component, tied_cutoff = grown(seed), False
    if num_candidates < len(degrees):
        last, next_one = degrees[by_degree[num_candidates - 1 : num_candidates + 1]]
        # Patches that agree with the seed tie for the last places among the candidates.
        tied_cutoff = bool(last == next_one and (products[seed][degrees == last] > 0).any())
    return Discovery(
        grid.padded(component),
        grid.box(component),
        degenerate=bool(component.all())
        or grid.is_padding(component)
        or any(bool((grown(other) != component).any()) for other in others),
        tied_cutoff=tied_cutoff,
    )


def maskcut(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_masks: int = 3,
) -> list[Discovery]:
    """Several objects of one image, in the order in which they were cut out.

    Each round gives a mask at most. All have the threshold of the whole image, none below 0:
    patches of earlier masks have cosine 0 with all. The paper's tau is 0.15. Of the options eps,
    weighted, centred, mask_padding and connectivity apply.

    Source: MaskCut of CutLER, https://arxiv.org/abs/2301.11320, section 3.2, and maskcut.py of
    https://github.com/facebookresearch/CutLER/tree/cca0a27, on the patches of the image at its own
    size and without the conditional random field. There the corners are counted after the sign
    that LAPACK gives the eigenvector; see `split_off_the_corners`.
    """
    tokens, tau = cut.tokens(features, grid)
    if cut.tau == "otsu":
        tau = max(0.0, tau)
    graph = similarity_graph(tokens, tau=tau, eps=cut.eps, weighted=cut.weighted)
    return cut_repeatedly(lambda masked: solve(graph.isolated(masked)), grid, cut, num_masks)


def cut_repeatedly(
    eigenvector_without: Callable[[Bool[np.ndarray, " tokens"]], FiedlerVector],
    grid: PatchGrid,
    cut: Cut,
    num_masks: int,
) -> list[Discovery]:
    """The rounds of MaskCut, of which each is given the patches of all masks before it.

    They are linked to nothing in the graph of its eigenvector. A later object may hold them again;
    its mask is reported without them.
    """
    found: list[Discovery] = []
    masked = previous = np.zeros(cut.graph_shape(grid), bool)
    rounds_left = num_masks
    while rounds_left > 0 and not masked.all():
        spectrum = eigenvector_without(masked.ravel())
        foreground, seed, tied = split_off_the_corners(spectrum.vector.reshape(masked.shape))
        component = component_of(foreground, seed, cut.connectivity)
        rounds_left -= 1
        if masked.any():
            if 100 * component.sum() <= component.size:
                # Nothing is added, so all further rounds would find it again.
                break
            if (component & previous).sum() / (component | previous).sum() > 0.5:
                # The next round cuts the same graph and has no mask to compare with: it keeps it.
                rounds_left -= 1
                if rounds_left < 0:
                    break
        mask = component & ~masked
        masked, previous = masked | component, component
        if mask.any():
            degenerate = spectrum.degenerate or bool((tied & ~component).any())
            degenerate |= grid.is_padding(mask)
            found.append(_discovery(mask, grid, spectrum, degenerate))
    return found


def split_off_the_corners(vector: Float64[np.ndarray, "rows cols"]) -> Bipartition:
    """As TokenCut splits, unless that side has three corners of the image or more: then the other.

    The authors count the corners of the side above the mean, whichever sign the eigenvector has,
    and so find either of the two objects where the side of the peak has three corners. Here the
    peak of a `FiedlerVector` is positive, as in their paper, where the foreground holds it and is
    turned for its corners alone. On the other side the seed is its own peak.
    """
    above = vector > vector.mean()
    if above[[0, 0, -1, -1], [0, -1, 0, -1]].sum() < 3:
        return split_at_mean(vector)
    seed = divmod(int(np.argmin(vector)), vector.shape[1])
    return ~above, seed, vector <= (1 - TIE) * vector[seed]
