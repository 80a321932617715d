"""Our solver against a dense one that shares no line with it, on the graph of one image."""

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.ndimage
import torch
from torch import Tensor

from probes.tokencut.cuts import PatchGrid, discover

TAU, EPS = 0.2, 1e-5


@dataclass(frozen=True)
class Agreement:
    """What one graph shows.

    Attributes:
        complete: Every pair of patches is linked.
        well_posed: As the gap and the seed decide, which no patch outside of the object equals.
    """

    gap: float
    complete: bool
    well_posed: bool
    flagged: bool
    cosine: float
    same_bipartition: bool
    same_box: bool


def compare(features: Tensor, grid: PatchGrid) -> Agreement:
    """Our solver against the reference protocol in float64 with dense matrices, of one image."""
    found = discover(features, grid)
    assert found.eigenvector is not None
    rows, cols, dim = features.shape
    tokens = features.reshape(-1, dim).numpy()
    unit = tokens / np.maximum(np.linalg.norm(tokens, axis=1, keepdims=True), 1e-12)
    linked = unit @ unit.T > TAU
    np.fill_diagonal(linked, True)
    if linked.all():
        # Every vector solves it, and LAPACK takes a second to orthogonalise some.
        return Agreement(0.0, True, False, found.degenerate, 0.0, False, False)
    weights = np.where(linked, 1.0, EPS)
    degrees = np.diag(weights.sum(1))
    values, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    vector, gap = vectors[:, 0], float(values[1] - values[0])
    side, seed = vector > vector.mean(), int(np.argmax(abs(vector)))
    labels, _ = scipy.ndimage.label((side == side[seed]).reshape(rows, cols))  # type: ignore[misc]
    mask = labels == labels[seed // cols, seed % cols]
    tied = (abs(vector) >= (1 - 1e-6) * abs(vector).max()) & ~mask.ravel()
    ys, xs = np.nonzero(mask)
    size = grid.patch_size
    far = min((xs.max() + 1) * size, grid.width), min((ys.max() + 1) * size, grid.height)
    ours = found.eigenvector.ravel()
    cosine = abs(ours @ vector) / np.linalg.norm(ours) / np.linalg.norm(vector)
    same = (ours > ours.mean()) == side
    return Agreement(
        gap=gap,
        complete=False,
        well_posed=gap > 1e-3 and not tied.any(),
        flagged=found.degenerate,
        cosine=float(cosine),
        same_bipartition=bool(same.all() or not same.any()),
        same_box=found.box.tolist() == [xs.min() * size, ys.min() * size, *far],
    )


def tally(found: list[Agreement]) -> dict[str, tuple[int, int]]:
    """How many of how many keep what is promised, by promise."""
    posed = [one for one in found if one.well_posed]
    clear = [one for one in found if one.gap > 1e-5]
    complete = [one for one in found if one.complete]
    return {
        "same bipartition": (sum(one.same_bipartition for one in posed), len(posed)),
        "same box": (sum(one.same_box for one in posed), len(posed)),
        "|cos| > .9999": (sum(one.cosine > 0.9999 for one in clear), len(clear)),
        "complete graphs flagged": (sum(one.flagged for one in complete), len(complete)),
    }


def photograph_features(
    extractor, image: np.ndarray, height: int, width: int
) -> tuple[list[Tensor], PatchGrid]:
    """Features of all asked blocks and facets for the upper left part of a photograph."""
    part = torch.from_numpy(image[:height, :width].copy()).permute(2, 0, 1)[None] / 255
    grid = PatchGrid(part.shape[2], part.shape[3], extractor.patch_size)
    return [v[0].float() for facets in extractor(part).values() for v in facets.values()], grid
