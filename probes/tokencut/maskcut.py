"""MaskCut: several objects of one image, one cut after the other."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from probes.tokencut.cuts import (
    TIE,
    Bipartition,
    Discovery,
    as_array,
    component_of,
    graph_tokens,
    split_at_mean,
    threshold,
)
from probes.tokencut.options import REFERENCE, Cut, PatchGrid
from probes.tokencut.spectral.eigensolver import FiedlerVector, solve
from probes.tokencut.spectral.graph import similarity_graph
from ssl_bench.system.transfers import sent

Tokens = Float[Tensor, "tokens dim"]
Taus = Sequence[float | Float[Tensor, ""]]
Solver = Callable[[Sequence[Tokens], Taus], Sequence[FiedlerVector]]


def maskcut(
    features: Float[Tensor, "rows cols dim"],
    grid: PatchGrid,
    cut: Cut = REFERENCE,
    *,
    num_masks: int = 3,
) -> list[Discovery]:
    """Several objects of one image, in the order in which they were cut out.

    Args:
        features: Of one image.
        grid: Where its patches lie.
        cut: The paper's tau is 0.15, none may be negative. Of the options eps, weighted, centred,
            mask_padding and connectivity apply.
        num_masks: Rounds, each of which gives a mask at most.

    Source: MaskCut of CutLER, https://arxiv.org/abs/2301.11320, section 3.2, and maskcut.py of
    https://github.com/facebookresearch/CutLER/tree/cca0a27, on the patches of the image at its own
    size and without the conditional random field. There the corners are counted after the sign
    that LAPACK gives the eigenvector; see `split_off_the_corners`.
    """
    search = MaskCutSearch(features, grid, cut, num_masks)
    tokens, tau = as_array(search.tokens()), float(search.tau)
    graph = similarity_graph(tokens, tau=tau, eps=cut.eps, weighted=cut.weighted)
    while not search.finished:
        search.take(solve(graph.isolated(search.painted)))
    return search.found


class MaskCutSearch:
    """The rounds of one image: `tokens` are to be cut, `take` takes the cut, until `finished`.

    All rounds have the `tau` of the whole image, no negative one: painted patches have cosine 0.
    The patches of a mask stay in the graph as zero features, which are linked to nothing. A later
    object may hold them again; its mask is reported without them.
    """

    def __init__(
        self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid, cut: Cut, num_masks: int
    ) -> None:
        self.found: list[Discovery] = []
        self._all_tokens = graph_tokens(cut, features, grid)
        self.tau = threshold(cut, self._all_tokens)
        if isinstance(self.tau, Tensor):
            self.tau = self.tau.clamp(min=0)
        self._grid, self._connectivity = grid, cut.connectivity
        self._rounds_left = num_masks
        self._painted = np.zeros(cut.graph_shape(grid), bool)
        self._previous = self._painted

    @property
    def finished(self) -> bool:
        return self._rounds_left <= 0 or bool(self._painted.all())

    @property
    def painted(self) -> Bool[np.ndarray, " tokens"]:
        """Patches of the graph that belong to masks."""
        return self._painted.ravel()

    def tokens(self) -> Tokens:
        """Features of the graph that is to be cut next."""
        painted = sent(torch.from_numpy(self.painted), self._all_tokens.device)
        return self._all_tokens.masked_fill(painted[:, None], 0)

    def take(self, spectrum: FiedlerVector) -> None:
        """Cut the object out, and keep it unless it is too small or was found just before."""
        vector = spectrum.vector.reshape(self._painted.shape)
        split = split_off_the_corners(vector)
        component = component_of(split.foreground, split.seed, self._connectivity)
        self._rounds_left -= 1
        if self._painted.any():
            if _is_small(component):
                # Nothing is painted, so all further rounds would find it again.
                self._rounds_left = 0
                return
            if _overlap(component, self._previous) > 0.5:
                # The next round cuts the same graph and has no mask to compare with: it keeps it.
                self._rounds_left -= 1
                if self._rounds_left < 0:
                    return
        self._keep(spectrum, component, tied=bool((split.tied & ~component).any()))

    def _keep(
        self, spectrum: FiedlerVector, component: Bool[np.ndarray, "rows cols"], *, tied: bool
    ) -> None:
        mask = component & ~self._painted
        self._painted, self._previous = self._painted | component, component
        if not mask.any():
            return
        self.found.append(
            Discovery(
                mask=self._grid.padded(mask),
                box=self._grid.box(mask),
                eigenvector=self._grid.padded(spectrum.vector.reshape(mask.shape)),
                eigenvalue=spectrum.eigenvalue,
                gap=spectrum.gap,
                degenerate=spectrum.degenerate or tied,
            )
        )


def search_together(searches: Sequence[MaskCutSearch], solver: Solver) -> None:
    """Finish several searches; the solver is called once a round, for all that go on."""
    while waiting := [search for search in searches if not search.finished]:
        spectra = solver([search.tokens() for search in waiting], [s.tau for s in waiting])
        for search, spectrum in zip(waiting, spectra, strict=True):
            search.take(spectrum)


def split_off_the_corners(vector: Float64[np.ndarray, "rows cols"]) -> Bipartition:
    """As TokenCut splits, unless that side has three corners of the image or more: then the other.

    The authors count the corners of the side above the mean, whichever sign the eigenvector has,
    and so find either of the two objects where the side of the peak has three corners. Here the
    peak is positive, as in their paper, where the foreground holds it and is turned for its
    corners alone. On the other side the seed is its own peak.
    """
    split = split_at_mean(vector)
    signed = vector * np.sign(vector[split.seed])
    above = signed > signed.mean()
    if above[[0, 0, -1, -1], [0, -1, 0, -1]].sum() < 3:
        return split
    seed = divmod(int(np.argmin(signed)), vector.shape[1])
    return Bipartition(~above, seed, signed <= (1 - TIE) * signed[seed])


def _is_small(mask: Bool[np.ndarray, "rows cols"]) -> bool:
    """Whether it covers a hundredth of the patches or less."""
    return bool(100 * mask.sum() <= mask.size)


def _overlap(one: Bool[np.ndarray, "rows cols"], other: Bool[np.ndarray, "rows cols"]) -> float:
    """Intersection over union; one of them holds a patch."""
    return (one & other).sum() / (one | other).sum()
