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
"""A split of an image's patches into two sides, as a tuple of three elements.

The seed is the patch whose entry in the eigenvector has the largest magnitude. The first element is
the mask of the side that contains the seed. The second is the row and column of the seed. The third
is the mask of all patches with the same magnitude as the seed, up to rounding errors.
"""


@dataclass(frozen=True)
class PatchGrid:
    """The grid of patches that covers an image.

    If the sides of the image are no multiples of the patch size, the patches at the right and lower
    edge contain padding.

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
        """Return the bounding box (x0, y0, x1, y1) of a mask of patches, in pixels.

        The box is clipped to the image. For an empty mask, all four numbers are zero.
        """
        rows, cols = np.nonzero(mask)
        if not len(rows):
            return np.zeros(4)
        low, high = (cols.min(), rows.min()), (cols.max() + 1, rows.max() + 1)
        box = self.patch_size * np.array([*low, *high], np.float64)
        return np.minimum(box, [self.width, self.height, self.width, self.height])

    def is_padding(self, mask: Mask) -> bool:
        """Return whether a mask of patches lies in the padding.

        A mask lies in the padding if the centres of all its patches lie outside the image. The
        result is False for an empty mask.
        """
        rows, cols = self.patch_size * (np.array(np.nonzero(mask)) + 0.5)
        return len(rows) > 0 and not ((rows <= self.height) & (cols <= self.width)).any()

    def pad(
        self, values: Shaped[np.ndarray, "graph_rows graph_cols"]
    ) -> Shaped[np.ndarray, "rows cols"]:
        """Append rows and columns of zeros to a map of patches, until it covers the whole grid.

        If `Cut.mask_padding` is true, the similarity graph does not contain the patches with
        padding at the right and lower edge. Maps from such a graph have no values for these
        patches.
        """
        rows, cols = (whole - part for whole, part in zip(self.shape, values.shape, strict=True))
        return np.pad(values, ((0, rows), (0, cols)))

    def to_pixels(self, mask: Mask) -> Bool[np.ndarray, "height width"]:
        """Convert a mask of patches to a mask of pixels, and cut off the padding."""
        pixels = mask.repeat(self.patch_size, 0).repeat(self.patch_size, 1)
        return pixels[: self.height, : self.width]


@dataclass(frozen=True)
class Cut:
    """Options for building the similarity graph of an image's patches, and for cutting it in two.

    The default values are those of TokenCut.

    Attributes:
        tau: Cosine similarity above which two patches are linked, in [-1, 1). With "otsu", Otsu's
            method computes a threshold for each image. LOST uses tau only if it is "otsu".
            Otherwise, LOST links patches whose features have a positive dot product.
        eps: Weight of two patches that are not linked.
        weighted: Whether the weight of a link is the cosine similarity instead of 1.
        centred: Whether the mean feature of the image is subtracted from all features first.
        mask_padding: Whether patches that contain padding are left out of the graph.
        connectivity: Number (4 or 8) of neighbours of a patch in connected components. With 8,
            diagonal neighbours are connected, too.
        stable_seed: Whether the choice of the seed is independent of rounding errors. The object
            grows from the seed, which is the patch with the largest entry of the eigenvector. If
            several patches have this entry up to rounding errors, this option selects the first.
        refuse_degenerate: Whether to return no object for an image whose object would be arbitrary
            (degenerate graph).
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
        """Return the numbers of rows and columns of the patches in the similarity graph."""
        return grid.inner_shape if self.mask_padding else grid.shape

    def graph_tokens(
        self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid
    ) -> tuple[Float32[np.ndarray, "tokens dim"], float]:
        """Return the features of the patches in the similarity graph, and the threshold tau.

        The patches are in row-major order. Patches whose cosine similarity exceeds tau are linked.
        If `self.tau` is "otsu", tau is computed from the features.
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
    """An object that was found in an image by TokenCut, MaskCut or LOST.

    Attributes:
        mask: Patches of the object.
        box: Bounding box (x0, y0, x1, y1) in pixels. x1 and y1 are exclusive.
        eigenvector: Second eigenvector of the normalised cut, with 0 at patches that are not in the
            graph. None for LOST.
        eigenvalue: Second smallest eigenvalue, lambda_2, of the normalised cut. None for LOST.
        gap: lambda_3 - lambda_2. None for LOST.
        degenerate: Whether the object is arbitrary, because it depends on rounding errors, on the
            order of the patches, or on padding.
        tied_cutoff: For LOST, whether the object may depend on the order of patches. LOST grows the
            object from a fixed number of patches with the lowest degrees. The flag is true if the
            last of these patches was chosen among patches of equal degree.
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
    """Find the main object of an image with TokenCut.

    Args:
        features: Features of the patches of one block.
        grid: Size of the image and of its patches.
        cut: Options of the similarity graph.

    Raises:
        DataError: The features are not finite.

    Source: TokenCut, https://arxiv.org/abs/2202.11539, and object_discovery.py of
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    tokens, tau = cut.graph_tokens(features, grid)
    solution = second_eigenvector(tokens, tau=tau, eps=cut.eps, weighted=cut.weighted)
    return object_at_peak(solution, grid, cut)


def object_at_peak(solution: FiedlerVector, grid: PatchGrid, cut: Cut) -> Discovery:
    """Return TokenCut's object, which lies at the peak of a second eigenvector.

    The patches are split at the mean of the eigenvector. The seed is the patch whose entry has the
    largest magnitude. The object consists of the patches on the seed's side that are connected with
    the seed.
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

    The seed is the patch whose entry has the largest magnitude. If `stable_seed` is true, entries
    that differ only by rounding errors count as equal, and the first of the patches with the
    largest magnitude is the seed.

    Returns:
        The mask of the side that contains the seed, the row and column of the seed, and the mask of
        all patches with the same magnitude.
    """
    magnitude = abs(vector)
    tied = magnitude >= (1 - _TIE) * magnitude.max()
    flat = int(np.argmax(tied if stable_seed else magnitude))
    seed = divmod(flat, vector.shape[1])
    above = vector > vector.mean()
    return above if above[seed] else ~above, seed, tied


def connected_component(foreground: Mask, seed: tuple[int, int], connectivity: int) -> Mask:
    """Return the connected component of a mask that contains the patch (row, column) `seed`.

    `connectivity` is the number of neighbours of a patch, 4 or 8.
    """
    structure = scipy.ndimage.generate_binary_structure(2, 1 if connectivity == 4 else 2)
    labels = np.empty(foreground.shape, np.int32)
    scipy.ndimage.label(foreground, structure, output=labels)
    return labels == labels[seed]


def otsu_threshold(tokens: Float[Tensor, "tokens dim"]) -> Float[Tensor, ""]:
    """Return Otsu's threshold for the cosine similarities of all pairs of tokens.

    Otsu's threshold divides the cosines into two classes such that the variance between the classes
    is as large as possible. Candidates for the threshold are the centres of 256 bins between the
    smallest and the largest cosine. Pairs of a token with itself are left out.

    Source: Otsu, IEEE Transactions on Systems, Man and Cybernetics 9 (1979), equation 18.
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


def discover_with_lost(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_candidates: int = 100,
) -> Discovery:
    """Find the main object of an image with LOST.

    Two patches are linked if the dot product of their features is positive. If `cut.tau` is "otsu",
    patches are instead linked if their cosine exceeds Otsu's threshold. The degree of a patch is
    the number of its links. The first seed is the patch of lowest degree. The `num_candidates`
    patches of lowest degree are candidates for further seeds. Candidates that are linked to the
    first seed become seeds. A patch belongs to the object if its dot products with all seeds have a
    positive sum and it is connected with the first seed. Patches of equal degree are sorted by
    their position in the image.

    The object is degenerate (arbitrary) if it covers the whole graph or lies in the padding. The
    object is also degenerate if another first seed of the same degree would give another object.

    Args:
        features: Features of the patches of one block.
        grid: Size of the image and of its patches.
        cut: Options of the graph. Apart from `tau`, the options `centred`, `mask_padding` and
            `connectivity` have an effect.
        num_candidates: Number of patches that may become seeds.

    Source: LOST, https://arxiv.org/abs/2109.14279, equations 1 to 4, and object_discovery.py of
    https://github.com/valeoai/LOST/tree/fcedbec. The authors' `torch.argsort` is not stable, so
    their order of patches of equal degree depends on the CPU. If the features of the seed are zero,
    the authors' code fails, and `discover_with_lost` returns an object of one patch.
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


def discover_with_maskcut(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_masks: int = 3,
) -> list[Discovery]:
    """Find several objects of an image with MaskCut, in the order of their discovery.

    MaskCut runs for `num_masks` rounds. Each round finds one object or none. The links of the found
    patches are then removed from the similarity graph. In all rounds, patches are linked if their
    cosine similarity exceeds the same threshold tau. Otsu's threshold is raised to at least 0,
    because a negative tau would link the patches of earlier objects again. The paper uses a tau of
    0.15. The options `stable_seed` and `refuse_degenerate` of `cut` have no effect.

    Source: MaskCut of CutLER, https://arxiv.org/abs/2301.11320, section 3.2, and maskcut.py of
    https://github.com/facebookresearch/CutLER/tree/cca0a27. Unlike the authors' code, this function
    does not resize the image and has no conditional random field. The sign of the eigenvector does
    not depend on LAPACK.
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

    Each round finds a connected component of patches. The object of a round consists of those
    patches of its component that belong to no component of an earlier round.

    Args:
        solve_without: Function that returns the second eigenvector of the similarity graph. Its
            argument is a mask of the patches whose links are removed from the graph.
        grid: Size of the image and of its patches.
        cut: Options of the graph.
        num_masks: Number of rounds.
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
                # The component is too small to be masked, so further rounds would find it again.
                break
            if (component & previous).sum() / (component | previous).sum() > 0.5:
                # In the authors' code, this uses up the next round. That round finds this component
                # again, and accepts it without this check.
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
    """Split patches at the mean of a vector, and return a side that is not the background.

    A side with at least three corners of the image counts as the background. If the side above the
    mean is not the background, this side is returned, and its seed is the patch with the largest
    entry. Otherwise, the side below the mean is returned, and its seed is the patch with the
    smallest entry.

    Unlike in the authors' code, the sign of the eigenvector does not depend on LAPACK. The entry of
    largest magnitude in a `FiedlerVector` is always positive. The side above the mean therefore
    contains this entry, as in the authors' paper.
    """
    above = vector > vector.mean()
    if above[[0, 0, -1, -1], [0, -1, 0, -1]].sum() < 3:
        return split_at_mean(vector)
    seed = divmod(int(np.argmin(vector)), vector.shape[1])
    return ~above, seed, vector <= (1 - _TIE) * vector[seed]
