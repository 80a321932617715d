"""Find objects in the features of one image with TokenCut, LOST and MaskCut."""

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
    cosine_similarities,
    second_eigenvector,
    similarity_graph,
    solve,
)
from ssl_bench.composition.fields import Bounds, OpenFraction
from ssl_bench.neighbours import unit_vectors

_TIE = 1e-6
_OTSU_BINS = 256
Tau = Annotated[float, Bounds(-1, 1, allow_high=False)] | Literal["otsu"]
Mask = Bool[np.ndarray, "rows cols"]
Bipartition = tuple[Mask, tuple[int, int], Mask]
"""The side of a cut that contains the seed, the (row, column) of the seed, and all patches that tie
with the seed. Tied patches have the magnitude of the seed, up to rounding errors."""


@dataclass(frozen=True)
class PatchGrid:
    """The grid of patches that covers an image. Patches at the right and lower edge may be padded.

    Attributes:
        height: Height of the image in pixels, without padding.
        width: Width of the image in pixels, without padding.
        patch_size: Side of a patch in pixels.
    """

    height: int
    width: int
    patch_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches, including patches with padding."""
        return -(-self.height // self.patch_size), -(-self.width // self.patch_size)

    @property
    def inner_shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches without padding.

        Both numbers are at least 1.
        """
        return max(1, self.height // self.patch_size), max(1, self.width // self.patch_size)

    def bounding_box(self, mask: Mask) -> Float64[np.ndarray, " 4"]:
        """Return the box (x0, y0, x1, y1) of a mask in pixels, clipped to the image.

        The box of an empty mask is all zeros.
        """
        rows, cols = np.nonzero(mask)
        if not len(rows):
            return np.zeros(4)
        low, high = (cols.min(), rows.min()), (cols.max() + 1, rows.max() + 1)
        box = self.patch_size * np.array([*low, *high], np.float64)
        return np.minimum(box, [self.width, self.height, self.width, self.height])

    def is_padding(self, mask: Mask) -> bool:
        """Return whether the centres of all patches of a mask lie outside the image.

        The result is False for an empty mask.
        """
        rows, cols = self.patch_size * (np.array(np.nonzero(mask)) + 0.5)
        return len(rows) > 0 and not ((rows <= self.height) & (cols <= self.width)).any()

    def pad(
        self, values: Shaped[np.ndarray, "graph_rows graph_cols"]
    ) -> Shaped[np.ndarray, "rows cols"]:
        """Append rows and columns of zeros to a map that lacks the patches with padding.

        `Cut.mask_padding` leaves these patches out of the similarity graph.
        """
        rows, cols = (whole - part for whole, part in zip(self.shape, values.shape, strict=True))
        return np.pad(values, ((0, rows), (0, cols)))

    def to_pixels(self, mask: Mask) -> Bool[np.ndarray, "height width"]:
        """Convert a mask of patches to a mask of pixels, and cut off the padding."""
        pixels = mask.repeat(self.patch_size, 0).repeat(self.patch_size, 1)
        return pixels[: self.height, : self.width]


@dataclass(frozen=True)
class Cut:
    """Options of the similarity graph of patches and of its cut. Defaults are those of TokenCut.

    Attributes:
        tau: Cosine similarity above which two patches are linked, in [-1, 1). With "otsu", Otsu's
            method computes a threshold for each image. LOST uses tau only if it is "otsu".
            Otherwise, LOST links patches whose features have a positive dot product.
        eps: Weight of two patches that are not linked.
        weighted: Whether the weight of a link is the cosine instead of 1.
        centred: Whether the mean feature of the image is subtracted first.
        mask_padding: Whether patches that contain padding are left out of the graph.
        connectivity: Number of neighbours of a patch in connected components, 4 or 8.
        stable_seed: Whether the first patch is used as the seed if several patches tie for the
            largest entry of the eigenvector. If false, rounding errors select one of these patches.
        refuse_degenerate: Whether no object is returned for images with a degenerate graph, whose
            object would be arbitrary.
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
        """Return the numbers of rows and columns of patches in the graph."""
        return grid.inner_shape if self.mask_padding else grid.shape

    def graph_tokens(
        self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid
    ) -> tuple[Float32[np.ndarray, "tokens dim"], float]:
        """Return the features of the patches in the graph, row by row, and the threshold tau.

        If `tau` is "otsu", the threshold is computed from these features.
        """
        rows, cols = self.graph_shape(grid)
        tokens = features[:rows, :cols].flatten(0, 1)
        if self.centred:
            tokens = tokens - tokens.mean(0)
        tau = float(otsu_threshold(tokens)) if self.tau == "otsu" else self.tau
        return tokens.detach().float().cpu().numpy(), tau


REFERENCE = Cut()


@dataclass(frozen=True)
class Discovery:
    """An object that was found in an image.

    Attributes:
        mask: Patches of the object.
        box: Bounding box (x0, y0, x1, y1) in pixels. x1 and y1 are exclusive.
        eigenvector: Second eigenvector, with 0 at patches that are not in the graph. None for LOST.
        eigenvalue: Second smallest eigenvalue, lambda_2, of the normalised cut. None for LOST.
        gap: lambda_3 - lambda_2. None for LOST.
        degenerate: Whether the object is arbitrary, because it depends on rounding errors, on the
            order of the patches, or on padding.
        tied_cutoff: Whether patches of equal degree tie for the last place among LOST's candidates.
            If true, the object may depend on the order of these patches.
    """

    mask: Mask
    box: Float64[np.ndarray, " 4"]
    eigenvector: Float64[np.ndarray, "rows cols"] | None = None
    eigenvalue: float | None = None
    gap: float | None = None
    degenerate: bool = False
    tied_cutoff: bool = False


def discover(
    features: Float[Tensor, "rows cols dim"], grid: PatchGrid, cut: Cut = REFERENCE
) -> Discovery:
    """Find the object of an image with TokenCut.

    Raises:
        DataError: The features are not finite.

    Source: TokenCut, https://arxiv.org/abs/2202.11539, and object_discovery.py of
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    tokens, tau = cut.graph_tokens(features, grid)
    solution = second_eigenvector(tokens, tau=tau, eps=cut.eps, weighted=cut.weighted)
    return object_at_peak(solution, grid, cut)


def object_at_peak(solution: FiedlerVector, grid: PatchGrid, cut: Cut) -> Discovery:
    """Return the object at the peak of a second eigenvector.

    The patches are split at the mean of the eigenvector. The object is the connected component
    around the entry of largest magnitude.
    """
    vector = solution.vector.reshape(cut.graph_shape(grid))
    foreground, seed, tied = split_at_mean(vector, stable_seed=cut.stable_seed)
    component = connected_component(foreground, seed, cut.connectivity)
    degenerate = (
        solution.degenerate or bool((tied & ~component).any()) or grid.is_padding(component)
    )
    if degenerate and cut.refuse_degenerate:
        component = np.zeros_like(component)
    return _discovery_from_mask(component, grid, solution, degenerate)


def _discovery_from_mask(
    mask: Bool[np.ndarray, "graph_rows graph_cols"],
    grid: PatchGrid,
    solution: FiedlerVector,
    degenerate: bool,
) -> Discovery:
    return Discovery(
        mask=grid.pad(mask),
        box=grid.bounding_box(mask),
        eigenvector=grid.pad(solution.vector.reshape(mask.shape)),
        eigenvalue=solution.eigenvalue,
        gap=solution.gap,
        degenerate=degenerate,
    )


def split_at_mean(
    vector: Float64[np.ndarray, "rows cols"], *, stable_seed: bool = False
) -> Bipartition:
    """Split the patches into those above and those not above the mean of a vector.

    The seed is the patch whose entry has the largest magnitude. Return the side that contains the
    seed, the seed, and all patches that tie with it.
    """
    magnitude = abs(vector)
    tied = magnitude >= (1 - _TIE) * magnitude.max()
    flat = int(np.argmax(tied if stable_seed else magnitude))
    seed = divmod(flat, vector.shape[1])
    above = vector > vector.mean()
    return above if above[seed] else ~above, seed, tied


def connected_component(foreground: Mask, seed: tuple[int, int], connectivity: int) -> Mask:
    """Return the connected component of a mask that contains the seed."""
    structure = scipy.ndimage.generate_binary_structure(2, 1 if connectivity == 4 else 2)
    labels = np.empty(foreground.shape, np.int32)
    scipy.ndimage.label(foreground, structure, output=labels)
    return labels == labels[seed]


def otsu_threshold(tokens: Float[Tensor, "tokens dim"]) -> Float[Tensor, ""]:
    """Return Otsu's threshold for the cosines of all pairs of tokens.

    It maximises the between-class variance of the cosines. Candidates are the centres of 256 bins
    between the smallest and the largest cosine. Pairs of a token with itself are left out.

    Source: Otsu, IEEE Trans. Systems, Man and Cybernetics 9 (1979), equation 18.
    """
    unit, count = unit_vectors(tokens.float()), len(tokens)
    if count < 2:
        return unit.new_zeros(())
    # Every (count + 1)th entry lies on the diagonal, which is left out.
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
    """Find the object of an image with LOST.

    Two patches are linked if the dot product of their features is positive. If `cut.tau` is "otsu",
    they are linked if their cosine exceeds Otsu's threshold. The options `centred`, `mask_padding`
    and `connectivity` also apply. The degree of a patch is the number of its links. The object
    grows from the patch of lowest degree, the seed. The `num_candidates` patches of lowest degree
    may join the seed. Among patches of equal degree, earlier patches take precedence. An object is
    degenerate (arbitrary) if it covers the whole graph or lies in the padding. It is also
    degenerate if another seed of the same degree grows to another object.

    Source: LOST, https://arxiv.org/abs/2109.14279, equations 1 to 4, and object_discovery.py of
    https://github.com/valeoai/LOST/tree/fcedbec. The authors' `torch.argsort` is not stable, so
    their order of patches of equal degree depends on the CPU. Their code fails if the features of
    the seed are zero. In this case, `lost` returns an object of one patch.
    """
    tokens, tau = cut.graph_tokens(features, grid)
    shape = cut.graph_shape(grid)
    if cut.tau == "otsu":
        products = cosine_similarities(tokens) - tau
    else:
        # Only the signs of products matter. Scaling by a power of two prevents small products from
        # becoming 0.
        scaled = np.ldexp(tokens, -np.frexp(np.abs(tokens).max(initial=0.0))[1])
        products = scaled @ scaled.T
    # A patch is not linked to itself.
    degrees = (products > 0).sum(1) - (products.diagonal() > 0)
    by_degree = np.argsort(degrees, kind="stable")
    candidates = by_degree[:num_candidates]

    def grow(seed: int) -> Bool[np.ndarray, "graph_rows graph_cols"]:
        similar = candidates[products[seed, candidates] > 0]
        foreground = (products[similar].sum(0) > 0).reshape(shape)
        foreground.flat[seed] = True
        return connected_component(foreground, divmod(seed, shape[1]), cut.connectivity)

    seed, *tied_seeds = np.flatnonzero(degrees == degrees.min()).tolist()
    component, tied_cutoff = grow(seed), False
    if num_candidates < len(degrees):
        last, first_excluded = degrees[by_degree[num_candidates - 1 : num_candidates + 1]]
        # Ties only matter among patches that are linked to the seed.
        tied_cutoff = bool(last == first_excluded and (products[seed][degrees == last] > 0).any())
    return Discovery(
        grid.pad(component),
        grid.bounding_box(component),
        degenerate=bool(component.all())
        or grid.is_padding(component)
        or any(bool((grow(other) != component).any()) for other in tied_seeds),
        tied_cutoff=tied_cutoff,
    )


def maskcut(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_masks: int = 3,
) -> list[Discovery]:
    """Find several objects of an image with MaskCut, in the order in which it finds them.

    Each of the `num_masks` rounds adds one mask or none. All rounds use the same threshold tau. It
    is at least 0, because a lower threshold would link patches of earlier masks, whose cosines are
    0. The paper uses a tau of 0.15. `stable_seed` and `refuse_degenerate` have no effect.

    Source: MaskCut of CutLER, https://arxiv.org/abs/2301.11320, section 3.2, and maskcut.py of
    https://github.com/facebookresearch/CutLER/tree/cca0a27. This function does not resize the image
    and has no conditional random field. `split_away_from_corners` describes how the sign of the
    eigenvector differs.
    """
    tokens, tau = cut.graph_tokens(features, grid)
    if cut.tau == "otsu":
        tau = max(0.0, tau)
    graph = similarity_graph(tokens, tau=tau, eps=cut.eps, weighted=cut.weighted)
    return run_maskcut(lambda masked: solve(graph.isolate(masked)), grid, cut, num_masks)


def run_maskcut(
    solve_without: Callable[[Bool[np.ndarray, " tokens"]], FiedlerVector],
    grid: PatchGrid,
    cut: Cut,
    num_masks: int,
) -> list[Discovery]:
    """Run the rounds of MaskCut, and return the objects that they find.

    `solve_without` returns the second eigenvector of the graph without the links of some patches.
    In each round, these are the patches of all earlier components. The object of a round is a
    connected component without these patches.
    """
    objects: list[Discovery] = []
    masked = previous = np.zeros(cut.graph_shape(grid), bool)
    rounds_left = num_masks
    while rounds_left > 0 and not masked.all():
        solution = solve_without(masked.ravel())
        foreground, seed, tied = split_away_from_corners(solution.vector.reshape(masked.shape))
        component = connected_component(foreground, seed, cut.connectivity)
        rounds_left -= 1
        if masked.any():
            if 100 * component.sum() <= component.size:
                # Nothing is masked, so all further rounds would find the same component.
                break
            if (component & previous).sum() / (component | previous).sum() > 0.5:
                # The authors' next round finds this component again and accepts it unchecked.
                rounds_left -= 1
                if rounds_left < 0:
                    break
        mask = component & ~masked
        masked, previous = masked | component, component
        if mask.any():
            degenerate = solution.degenerate or bool((tied & ~component).any())
            degenerate |= grid.is_padding(mask)
            objects.append(_discovery_from_mask(mask, grid, solution, degenerate))
    return objects


def split_away_from_corners(vector: Float64[np.ndarray, "rows cols"]) -> Bipartition:
    """Split patches at the mean of a vector, and return a side with at most two image corners.

    The result is that of `split_at_mean`, unless the side above the mean contains at least three
    corners. In that case, the side below the mean is returned, and the seed is the patch with the
    smallest entry.

    In the authors' code, LAPACK decides the sign of the eigenvector and thus which side is above
    the mean. The entry of largest magnitude of a `FiedlerVector` is positive. The side above the
    mean therefore contains the peak, as in the authors' paper.
    """
    above = vector > vector.mean()
    if above[[0, 0, -1, -1], [0, -1, 0, -1]].sum() < 3:
        return split_at_mean(vector)
    seed = divmod(int(np.argmin(vector)), vector.shape[1])
    return ~above, seed, vector <= (1 - _TIE) * vector[seed]
