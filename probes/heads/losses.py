"""Cross-entropy of patch logits against pixel labels, for many heads at once.

A head is linear, so a head after upsampling equals upsampling after the head: logits are made once
a patch, and only the loss knows about pixels. Each loss gives its gradient with its value, and goes
through the pixels in pieces that stay in the cache. Behind the losses comes what the bilinear one
needs: the log-normaliser of upsampled logits, which never holds those of all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from ssl_bench.composition.fields import Count, Pixels, check_fields
from ssl_bench.metrics import value_counts
from ssl_bench.scores import IGNORED
from ssl_bench.system.device import float64_device

# Of one piece: the second-level cache of a CPU core; a GPU wants few, large kernels.
PIECE_BYTES = {"cpu": 2**20, "cuda": 2**28, "mps": 2**28}
# Columns below which matrix products and vector instructions lose their speed.
_NARROWEST = 64

Logits = Float[Tensor, "heads classes batch rows cols"]


def label_histograms(
    labels: UInt8[Tensor, "batch height width"], pixels_per_patch: int, classes: int
) -> Float[Tensor, "classes batch rows cols"]:
    """Count the labels under each patch; 255 is left out."""
    _, height, width = labels.shape
    rows, cols = height // pixels_per_patch, width // pixels_per_patch
    # int32, because bincount is bound by what it reads.
    down = torch.arange(height, dtype=torch.int32, device=labels.device) // pixels_per_patch
    across = torch.arange(width, dtype=torch.int32, device=labels.device) // pixels_per_patch
    patch = down[:, None] * cols + across
    index = labels.clamp(max=classes).int() * (rows * cols) + patch
    size = (classes + 1) * rows * cols
    counts = torch.stack([value_counts(one.flatten(), size) for one in index])
    return counts.view(-1, classes + 1, rows, cols).transpose(0, 1)[:classes].float()


@dataclass(frozen=True)
class PixelTargets:
    """The labels of a batch in the two forms a loss needs, shared by all heads.

    Attributes:
        label_weights: Weight of each logit in the sum of the label pixels' logits.
        counted: Which pixels count, or how many, by the cell of patches that gives their logits.
    """

    label_weights: Float[Tensor, "classes batch rows cols"]
    counted: Float[Tensor, "pixels batch cell_rows cell_cols"]

    def of(self, images: slice) -> "PixelTargets":
        """The targets of some images of the batch."""
        return PixelTargets(self.label_weights[:, images], self.counted[:, images])


class PixelLoss:
    """A cross-entropy of the logits of each patch against the shares of its labels.

    Losses of pixels inherit from it too, and say what they do otherwise. `probe.loss=NAME` takes
    one of configs/probe/segmentation/loss.
    """

    def settings(self) -> dict[str, Any]:
        """What records say of it."""
        raise NotImplementedError

    def label_size(self, grid: int, patch: int) -> int:
        """Labels along a side of an image of so many patches, each of so many pixels."""
        return grid * patch

    def targets(
        self, labels: Integer[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        """Prepare the labels of a batch, with rows and columns of patches, for all heads."""
        raise NotImplementedError

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        """Sum of the loss over the pixels that count, and its gradient."""
        label_weights, counted = targets.label_weights.to(logits), targets.counted.to(logits)
        shares = logits.softmax(1)
        loss = (logsumexp(logits, shares, 1) * counted).flatten(1).sum(1)
        loss -= (logits * label_weights).flatten(1).sum(1)
        return loss, shares.mul_(counted).sub_(label_weights)


@dataclass(frozen=True)
class HistogramLoss(PixelLoss):
    """Patch logits against the histogram of the labels under the patch.

    Equals the cross-entropy over all pixels with logits upsampled by nearest neighbour.
    """

    def settings(self) -> dict[str, Any]:
        return {"loss": "histogram"}

    def targets(
        self, labels: UInt8[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        histograms = label_histograms(labels, labels.shape[1] // grid[0], classes)
        return PixelTargets(histograms, histograms.sum(0, keepdim=True))


@dataclass(frozen=True)
class MajorityLoss(PixelLoss):
    """Patch logits against the most frequent label under the patch.

    Patches that are ignored for the most part do not count; of equally frequent labels the
    smallest wins, and a class before what is ignored.
    """

    def settings(self) -> dict[str, Any]:
        return {"loss": "majority"}

    def targets(
        self, labels: UInt8[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        # Ignored pixels as a class behind all others, which may win but is not kept.
        side = labels.shape[1] // grid[0]
        counts = label_histograms(labels.clamp(max=classes), side, classes + 1)
        winners = F.one_hot(counts.argmax(0), classes + 1).movedim(-1, 0)[:classes].float()
        return PixelTargets(winners, winners.sum(0, keepdim=True))


@dataclass(frozen=True)
class LabelLoss(PixelLoss):
    """Logits of each image, its only patch, against its class."""

    def targets(
        self, labels: Int64[Tensor, "batch 1 1"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        del grid
        one_hot = F.one_hot(labels, classes).movedim(-1, 0).float()
        return PixelTargets(one_hot, torch.ones_like(one_hot[:1]))


@dataclass(frozen=True)
class UpsampledLoss(PixelLoss):
    """Bilinear logits against labels on a finer grid.

    The four patches around a cell of pixels give all its logits. So the labels' part is a weighted
    sum of patch logits, and only the normaliser visits the pixels.

    Attributes:
        factor: The labels have so many times the side of the token grid; that of the image if None.
    """

    factor: Count | None = 4

    def __post_init__(self) -> None:
        check_fields(self, "probe.loss")

    def settings(self) -> dict[str, Any]:
        return {"loss": f"upsample{self.factor}" if self.factor else "full_resolution"}

    def label_size(self, grid: int, patch: int) -> int:
        return grid * (self.factor or patch)

    def targets(
        self, labels: UInt8[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        side = labels.shape[1] // grid[0]
        # Cut between the patch centers; pixels beyond the image count as ignored.
        before, after = side - side // 2, side // 2
        padded = F.pad(labels, (before, after, before, after), value=IGNORED)
        cells = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side))
        cells = cells.permute(2, 4, 0, 1, 3).flatten(0, 1)  # pixels batch cell_rows cell_cols
        kept = cells.clamp(max=classes).flatten(1).long()
        columns = kept.shape[1]
        index = kept * columns + torch.arange(columns, device=labels.device)
        corners = [
            value_counts(index.flatten(), (classes + 1) * columns, one.repeat_interleave(columns))
            for one in corner_weights(side, labels.device).T
        ]
        by_corner = torch.stack(corners).view(4, classes + 1, *cells.shape[1:])[:, :classes]
        wanted = _add_corners(by_corner).float().to(labels.device)
        return PixelTargets(wanted, (cells != IGNORED).float())

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        label_weights = targets.label_weights.to(logits)
        corners = _take_corners(logits)
        counted = targets.counted.flatten(1).to(logits)
        normaliser, by_corner = summed_logsumexp(corners.flatten(3), counted)
        loss = normaliser - (logits * label_weights).flatten(1).sum(1)
        return loss, _add_corners(by_corner.view(corners.shape)).sub_(label_weights)


@dataclass(frozen=True)
class ResampledLoss(PixelLoss):
    """Bilinear logits against labels of a size of their own.

    For sizes that are no multiple of the token grid; slower a pixel than `UpsampledLoss`.

    Attributes:
        size: Their side in pixels.
    """

    size: Pixels = 100

    def __post_init__(self) -> None:
        check_fields(self, "probe.loss")

    def settings(self) -> dict[str, Any]:
        return {"loss": str(self.size)}

    def label_size(self, grid: int, patch: int) -> int:
        del grid, patch
        return self.size

    def targets(
        self, labels: UInt8[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        found = []
        for one in labels:
            present = torch.stack([one == number for number in range(classes)]).float()
            down, across = self._matrices(grid, present)
            found.append(down.T @ present @ across)
        return PixelTargets(torch.stack(found, 1), (labels != IGNORED).float()[None])

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        label_weights = targets.label_weights.to(logits)
        down, across = self._matrices(logits.shape[-2:], logits)
        loss, gradient = -(logits * label_weights).flatten(1).sum(1), torch.empty_like(logits)
        for head in range(logits.shape[0]):
            for image in range(logits.shape[2]):
                values = down @ logits[head, :, image] @ across.T
                counted = targets.counted[0, image].to(logits)
                shares = values.softmax(0)
                loss[head] += (logsumexp(values, shares, 0) * counted).sum()
                gradient[head, :, image] = down.T @ shares.mul_(counted) @ across
        return loss, gradient.sub_(label_weights)

    def _matrices(self, grid: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Bilinear weights (`align_corners=False`) of patches in pixels, down and across."""
        place = float64_device(like.device)
        pixels = torch.arange(self.size, dtype=torch.float64, device=place)
        found = []
        for patches in grid:
            position = ((pixels + 0.5) * (patches / self.size) - 0.5).clamp(0, patches - 1)
            distance = position[:, None] - torch.arange(patches, device=place)
            found.append((1 - distance.abs()).clamp(min=0).to(like))
        return found[0], found[1]


def _take_corners(
    patches: Float[Tensor, "*some rows cols"],
) -> Float[Tensor, "4 *some cell_rows cell_cols"]:
    """The four patches around each cell; outside the grid its edge is repeated."""
    shape = patches.shape
    padded = F.pad(patches.flatten(0, -3)[None], (1, 1, 1, 1), mode="replicate")[0]
    padded = padded.view(*shape[:-2], shape[-2] + 2, shape[-1] + 2)
    rows = (padded[..., :-1, :], padded[..., 1:, :])
    return torch.stack([side for row in rows for side in (row[..., :-1], row[..., 1:])])


def _add_corners(
    corners: Float[Tensor, "4 *some cell_rows cell_cols"],
) -> Float[Tensor, "*some rows cols"]:
    """Transpose of `_take_corners`: give every corner's share back to its patch."""
    cell_rows, cell_cols = corners.shape[-2:]
    grid = corners.new_zeros(*corners.shape[1:-2], cell_rows + 1, cell_cols + 1)
    for corner, share in enumerate(corners):
        down, right = divmod(corner, 2)
        grid[..., down : down + cell_rows, right : right + cell_cols] += share
    for axis in (-2, -1):
        grid.select(axis, 1).add_(grid.select(axis, 0))
        grid.select(axis, -2).add_(grid.select(axis, -1))
        grid = grid.narrow(axis, 1, grid.shape[axis] - 2)
    return grid.contiguous()


def summed_logsumexp(
    corners: Float[Tensor, "4 heads classes cells"], counted: Float[Tensor, "pixels cells"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, "4 heads classes cells"]]:
    """Sum over the pixels of the log-normaliser of their logits, and its gradient by corner.

    A product with the bilinear weights, a softmax, and the product with their transpose, of so few
    heads, cells and pixels at a time that their upsampled logits stay in the cache.

    Args:
        corners: Logits of the four patches around each cell: upper left, upper right, lower left,
            lower right.
        counted: Weight of each pixel, row by row in its cell; their number is a square.
    """
    weights = corner_weights(round(len(counted) ** 0.5), corners.device).to(corners)
    total, gradient = corners.new_zeros(corners.shape[1]), torch.zeros_like(corners)
    # A GPU's softmax is up to four times as fast where classes are neighbours in memory.
    axis = 2 if corners.device.type == "cpu" else 3
    for heads, cells, pixels in product(*_cuts(corners, len(counted))):
        part = corners[:, heads, :, cells].movedim(2, axis)
        shape = part.shape[1:]
        logits = (weights[pixels] @ part.reshape(4, -1)).view(-1, *shape)
        times = counted[pixels, None, cells]
        if corners.device.type == "cpu":
            # By hand, which takes .6 to .8 of the time of a softmax across such planes.
            top = logits.amax(axis)
            shares = logits.sub_(top.unsqueeze(axis)).exp_()
            sums = shares.sum(axis)
            normaliser, scale = sums.log() + top, times / sums
        else:
            shares = logits.softmax(axis)
            normaliser, scale = logsumexp(logits, shares, axis), times
        total[heads] += (normaliser * times).sum((0, 2))
        back = weights[pixels].T @ shares.mul_(scale.unsqueeze(axis)).flatten(1)
        gradient[:, heads, :, cells] += back.view(4, *shape).movedim(axis, 2)
    return total, gradient


def corner_weights(side: int, device: torch.device | None = None) -> Float[Tensor, "pixels 4"]:
    """Bilinear weights of the four surrounding patches for the pixels of one cell.

    A cell lies between four patch centers; its pixels are those of bilinear upsampling with
    `align_corners=False`. Corners: upper left, upper right, lower left, lower right.
    """
    first = 0.5 if side % 2 == 0 else 0.0
    numbers = torch.arange(side, dtype=torch.float64, device=device and float64_device(device))
    after = (numbers + first) / side
    sides = torch.stack([1 - after, after], -1)
    return torch.einsum("yi,xj->yxij", sides, sides).reshape(-1, 4)


def logsumexp(logits: Tensor, shares: Tensor, axis: int) -> Tensor:
    """Logarithm of the sum of exponentials, from the softmax that is already known."""
    # The largest share is at least 1 / classes, so that its logarithm is exact.
    return logits.amax(axis) - shares.amax(axis).log_()


def _cuts(corners: Tensor, pixels: int) -> tuple[list[slice], ...]:
    """Heads, cells and pixels, cut so that upsampled logits of a piece stay in the cache."""
    _, heads, classes, cells = corners.shape
    budget = PIECE_BYTES[corners.device.type] // (classes * corners.element_size())
    some_cells = min(cells, max(_NARROWEST, budget // pixels))
    some_pixels = min(pixels, max(1, budget // some_cells))
    some_heads = min(heads, max(1, budget // (some_cells * some_pixels)))
    counts = ((heads, some_heads), (cells, some_cells), (pixels, some_pixels))
    return tuple(
        [slice(first, first + some) for first in range(0, count, some)] for count, some in counts
    )
