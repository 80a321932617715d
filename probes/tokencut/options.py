"""How an object is cut out of an image, and the patches it is cut from."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float64, Shaped

from ssl_bench.composition.fields import InnerShare, Within


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

    def box(self, mask: Bool[np.ndarray, "rows cols"]) -> Float64[np.ndarray, " 4"]:
        """Smallest (x0, y0, x1, y1) in pixels around a mask, clipped; zeros around nothing."""
        rows, cols = np.nonzero(mask)
        if not len(rows):
            return np.zeros(4)
        low, high = (cols.min(), rows.min()), (cols.max() + 1, rows.max() + 1)
        box = self.patch_size * np.array([*low, *high], np.float64)
        return np.minimum(box, [self.width, self.height, self.width, self.height])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the padded image."""
        return -(-self.height // self.patch_size), -(-self.width // self.patch_size)

    @property
    def inner_shape(self) -> tuple[int, int]:
        """Rows and columns without padding; one of each stays in any case."""
        return max(1, self.height // self.patch_size), max(1, self.width // self.patch_size)

    def padded(
        self, values: Shaped[np.ndarray, "graph_rows graph_cols"]
    ) -> Shaped[np.ndarray, "rows cols"]:
        """Zeros for the patches that were left out of a graph."""
        rows, cols = (whole - part for whole, part in zip(self.shape, values.shape, strict=True))
        return np.pad(values, ((0, rows), (0, cols)))


def at_pixels(
    mask: Bool[np.ndarray, "rows cols"], shape: tuple[int, ...], patch_size: int
) -> Bool[np.ndarray, "height width"]:
    """A mask of patches for the pixels of an image of this height and width."""
    large = mask.repeat(patch_size, 0).repeat(patch_size, 1)
    return large[: shape[0], : shape[1]]


Tau = Annotated[float, Within(-1, 1, below=True)] | Literal["otsu"]


@dataclass(frozen=True)
class Cut:
    """How an object is cut out of the similarity graph; the defaults are TokenCut's.

    Attributes:
        tau: Cosine similarity above which two patches are linked, in [-1, 1); "otsu": of each image
            the one that splits its cosines best, see `otsu_thresholds`. LOST links where products
            are positive, and with "otsu" above this cosine.
        eps: Weight of all other links.
        weighted: Links weigh their cosine instead of 1.
        centred: Subtract the image's mean feature first.
        mask_padding: Leave patches that hold padding out of the graph.
        connectivity: Neighbours of a patch, 4 or 8.
        stable_seed: The seed is the first entry within 1e-6 of the largest, not the largest.
        refuse_degenerate: No object where rounding would choose it.
    """

    tau: Tau = 0.2
    eps: InnerShare = 1e-5
    weighted: bool = False
    centred: bool = False
    mask_padding: bool = False
    connectivity: Literal[4, 8] = 4
    stable_seed: bool = False
    refuse_degenerate: bool = False

    def graph_shape(self, grid: PatchGrid) -> tuple[int, int]:
        """Rows and columns of the patches that make up the graph."""
        return grid.inner_shape if self.mask_padding else grid.shape


REFERENCE = Cut()
