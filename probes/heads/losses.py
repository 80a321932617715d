"""Compute losses of patch logits against pixel labels, for many heads at once.

A head is linear, so upsampling its logits gives the same result as applying the head to upsampled
features. Heads therefore compute logits for patches, and only the loss handles pixels. Each loss
returns its value and its gradient. It splits the work into pieces that fit the cache.
`summed_logsumexp` computes the expensive part of the bilinear loss without storing the upsampled
logits of all heads.
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
from ssl_bench.scores import IGNORED
from ssl_bench.system.device import float64_device, value_counts

# Size of a piece in bytes. A piece fits the L2 cache of a CPU core. A GPU is fastest with few large
# kernels.
PIECE_BYTES = {"cpu": 2**20, "cuda": 2**28, "mps": 2**28}
# Matrix products with fewer columns are slow.
_MIN_COLUMNS = 64

Logits = Float[Tensor, "heads classes batch rows cols"]


@dataclass(frozen=True)
class PixelTargets:
    """Labels of a batch in the form that a loss needs. All heads share them.

    Attributes:
        label_weights: Weight of each patch logit in the sum of the label logits of all pixels. The
            label logit of a pixel is its logit for its own label.
        counted: Weight of each pixel of each cell, 0 if the pixel is ignored. A cell is an area
            whose pixels depend on the same patches. Losses of whole patches have a single weight
            for each cell.
    """

    label_weights: Float[Tensor, "classes batch rows cols"]
    counted: Float[Tensor, "pixels batch cell_rows cell_cols"]

    def select(self, images: slice) -> "PixelTargets":
        """Return the targets of some images of the batch."""
        return PixelTargets(self.label_weights[:, images], self.counted[:, images])


class PixelLoss:
    """Base class of the losses. A file of configs/probe/segmentation/loss selects one of them.

    By default, `loss_and_gradient` computes the cross-entropy of the logits of each patch against
    the distribution of its labels. Losses with upsampled logits override this method.
    """

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the result, as JSON types."""
        raise NotImplementedError

    def label_size(self, grid: int, patch: int) -> int:
        """Return the side of the label maps for `grid` x `grid` patches of side `patch`."""
        return grid * patch

    def targets(
        self, labels: Integer[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        """Return the targets of a batch. `grid` is the number of rows and columns of patches."""
        raise NotImplementedError

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        """Return the loss of each head, summed over the labelled pixels, and the gradients."""
        label_weights, counted = targets.label_weights.to(logits), targets.counted.to(logits)
        probabilities = logits.softmax(1)
        loss = (logsumexp(logits, probabilities, 1) * counted).flatten(1).sum(1)
        loss -= (logits * label_weights).flatten(1).sum(1)
        return loss, probabilities.mul_(counted).sub_(label_weights)


@dataclass(frozen=True)
class HistogramLoss(PixelLoss):
    """Cross-entropy of the logits of each patch against the histogram of the labels under it.

    It equals the cross-entropy of all pixels, if each pixel has the logits of its patch.
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
    """Cross-entropy of the logits of each patch against the most frequent label under it.

    A patch is left out if ignored pixels are more frequent than each class. If several classes are
    equally frequent, the class with the smallest number is used.
    """

    def settings(self) -> dict[str, Any]:
        return {"loss": "majority"}

    def targets(
        self, labels: UInt8[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        # Ignored pixels are counted as an additional last class, which is dropped afterwards.
        side = labels.shape[1] // grid[0]
        counts = label_histograms(labels.clamp(max=classes), side, classes + 1)
        winners = F.one_hot(counts.argmax(0), classes + 1).movedim(-1, 0)[:classes].float()
        return PixelTargets(winners, winners.sum(0, keepdim=True))


@dataclass(frozen=True)
class LabelLoss(PixelLoss):
    """Cross-entropy of the logits of each image against its class. An image is a single patch."""

    def targets(
        self, labels: Int64[Tensor, "batch 1 1"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        del grid
        one_hot = F.one_hot(labels, classes).movedim(-1, 0).float()
        return PixelTargets(one_hot, torch.ones_like(one_hot[:1]))


@dataclass(frozen=True)
class UpsampledLoss(PixelLoss):
    """Cross-entropy of bilinearly upsampled logits against labels on a finer grid.

    A cell is the area between the centers of four patches, whose logits are interpolated at its
    pixels. The loss of a pixel is its log-normaliser minus the logit of its label. Label logits are
    summed without upsampling, so only the log-normaliser needs upsampled logits.

    Attributes:
        factor: Side of the label maps in multiples of the token grid, or None for the size of the
            encoder's input.
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
        # Cells lie between patch centers, so the outer cells extend beyond the image.
        before, after = side - side // 2, side // 2
        padded = F.pad(labels, (before, after, before, after), value=IGNORED)
        cells = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side))
        cells = cells.permute(2, 4, 0, 1, 3).flatten(0, 1)  # pixels batch cell_rows cell_cols
        label = cells.clamp(max=classes).flatten(1).long()
        columns = label.shape[1]
        index = label * columns + torch.arange(columns, device=labels.device)
        corners = [
            value_counts(index.flatten(), (classes + 1) * columns, w.repeat_interleave(columns))
            for w in corner_weights(side, labels.device).T
        ]
        by_corner = torch.stack(corners).view(4, classes + 1, *cells.shape[1:])[:, :classes]
        label_weights = _add_corners(by_corner).float().to(labels.device)
        return PixelTargets(label_weights, (cells != IGNORED).float())

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
    """Cross-entropy of bilinearly upsampled logits against labels of any size.

    It also supports sizes that are not a multiple of the token grid. It is slower than
    `UpsampledLoss` for the same number of pixels.

    Attributes:
        size: Side of the label maps in pixels.
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
        weights, (down, across) = [], self._matrices(grid, labels.float())
        for image in labels:
            one_hot = torch.stack([image == number for number in range(classes)]).float()
            weights.append(down.T @ one_hot @ across)
        return PixelTargets(torch.stack(weights, 1), (labels != IGNORED).float()[None])

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
                probabilities = values.softmax(0)
                loss[head] += (logsumexp(values, probabilities, 0) * counted).sum()
                gradient[head, :, image] = down.T @ probabilities.mul_(counted) @ across
        return loss, gradient.sub_(label_weights)

    def _matrices(self, grid: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vertical and the horizontal bilinear weights, with pixels as rows."""
        device = float64_device(like.device)
        pixels = torch.arange(self.size, dtype=torch.float64, device=device)
        matrices = []
        for patches in grid:
            position = ((pixels + 0.5) * (patches / self.size) - 0.5).clamp(0, patches - 1)
            distance = position[:, None] - torch.arange(patches, device=device)
            matrices.append((1 - distance.abs()).clamp(min=0).to(like))
        return matrices[0], matrices[1]


def label_histograms(
    labels: UInt8[Tensor, "batch height width"], pixels_per_patch: int, classes: int
) -> Float[Tensor, "classes batch rows cols"]:
    """Count the pixels of each class under each patch. Ignored pixels are not counted."""
    _, height, width = labels.shape
    rows, cols = height // pixels_per_patch, width // pixels_per_patch
    # bincount is limited by memory bandwidth, so the indices are int32.
    down = torch.arange(height, dtype=torch.int32, device=labels.device) // pixels_per_patch
    across = torch.arange(width, dtype=torch.int32, device=labels.device) // pixels_per_patch
    patch = down[:, None] * cols + across
    index = labels.clamp(max=classes).int() * (rows * cols) + patch
    size = (classes + 1) * rows * cols
    counts = torch.stack([value_counts(image.flatten(), size) for image in index])
    return counts.view(-1, classes + 1, rows, cols).transpose(0, 1)[:classes].float()


def _take_corners(
    patches: Float[Tensor, "*some rows cols"],
) -> Float[Tensor, "4 *some cell_rows cell_cols"]:
    """Return the four patches around each cell. Beyond the grid, its edge patches are repeated."""
    shape = patches.shape
    padded = F.pad(patches.flatten(0, -3)[None], (1, 1, 1, 1), mode="replicate")[0]
    padded = padded.view(*shape[:-2], shape[-2] + 2, shape[-1] + 2)
    rows = (padded[..., :-1, :], padded[..., 1:, :])
    return torch.stack([side for row in rows for side in (row[..., :-1], row[..., 1:])])


def _add_corners(
    corners: Float[Tensor, "4 *some cell_rows cell_cols"],
) -> Float[Tensor, "*some rows cols"]:
    """Sum the values of each patch over the cells around it (transpose of `_take_corners`)."""
    cell_rows, cell_cols = corners.shape[-2:]
    grid = corners.new_zeros(*corners.shape[1:-2], cell_rows + 1, cell_cols + 1)
    for number, corner in enumerate(corners):
        down, right = divmod(number, 2)
        grid[..., down : down + cell_rows, right : right + cell_cols] += corner
    # Add the values of the repeated patches beyond the grid to the edge patches.
    for axis in (-2, -1):
        grid.select(axis, 1).add_(grid.select(axis, 0))
        grid.select(axis, -2).add_(grid.select(axis, -1))
        grid = grid.narrow(axis, 1, grid.shape[axis] - 2)
    return grid.contiguous()


def summed_logsumexp(
    corners: Float[Tensor, "4 heads classes cells"], counted: Float[Tensor, "pixels cells"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, "4 heads classes cells"]]:
    """Return the sum of the log-normalisers of all pixels, and the gradient of this sum.

    The logits of pixels are the matrix product of bilinear weights and `corners`. They are computed
    in pieces that fit the cache.

    Args:
        corners: Logits of the four patches around each cell: upper left, upper right, lower left,
            lower right.
        counted: Weight of each pixel of a cell. The pixels of a cell are in row-major order.
    """
    weights = corner_weights(round(len(counted) ** 0.5), corners.device).to(corners)
    total, gradient = corners.new_zeros(corners.shape[1]), torch.zeros_like(corners)
    # A softmax on a GPU is up to four times as fast if classes are adjacent in memory.
    axis = 2 if corners.device.type == "cpu" else 3
    for heads, cells, pixels in product(*_pieces(corners, len(counted))):
        part = corners[:, heads, :, cells].movedim(2, axis)
        shape = part.shape[1:]
        logits = (weights[pixels] @ part.reshape(4, -1)).view(-1, *shape)
        weight = counted[pixels, None, cells]
        if corners.device.type == "cpu":
            # This takes 0.6 to 0.8 of the time of `softmax` along this axis.
            largest = logits.amax(axis)
            probabilities = logits.sub_(largest.unsqueeze(axis)).exp_()
            sums = probabilities.sum(axis)
            normaliser, scale = sums.log() + largest, weight / sums
        else:
            probabilities = logits.softmax(axis)
            normaliser, scale = logsumexp(logits, probabilities, axis), weight
        total[heads] += (normaliser * weight).sum((0, 2))
        back = weights[pixels].T @ probabilities.mul_(scale.unsqueeze(axis)).flatten(1)
        gradient[:, heads, :, cells] += back.view(4, *shape).movedim(axis, 2)
    return total, gradient


def corner_weights(side: int, device: torch.device | None = None) -> Float[Tensor, "pixels 4"]:
    """Return the bilinear weights of the four surrounding patches for the pixels of one cell.

    A cell lies between four patch centers and has `side` x `side` pixels, as in bilinear upsampling
    with `align_corners=False`. The order of patches is upper left, upper right, lower left, lower
    right.
    """
    first = 0.5 if side % 2 == 0 else 0.0
    numbers = torch.arange(side, dtype=torch.float64, device=device and float64_device(device))
    after = (numbers + first) / side
    sides = torch.stack([1 - after, after], -1)
    return torch.einsum("yi,xj->yxij", sides, sides).reshape(-1, 4)


def logsumexp(logits: Tensor, probabilities: Tensor, axis: int) -> Tensor:
    """Return the logarithm of the sum of exponentials, given the softmax of the logits."""
    # The largest probability is at least 1 / classes, so its logarithm is accurate.
    return logits.amax(axis) - probabilities.amax(axis).log_()


def _pieces(corners: Tensor, pixels: int) -> tuple[list[slice], ...]:
    """Split heads, cells and pixels into pieces whose upsampled logits fit the cache."""
    _, heads, classes, cells = corners.shape
    budget = PIECE_BYTES[corners.device.type] // (classes * corners.element_size())
    num_cells = min(cells, max(_MIN_COLUMNS, budget // pixels))
    num_pixels = min(pixels, max(1, budget // num_cells))
    num_heads = min(heads, max(1, budget // (num_cells * num_pixels)))
    sizes = ((heads, num_heads), (cells, num_cells), (pixels, num_pixels))
    return tuple(
        [slice(start, start + size) for start in range(0, count, size)] for count, size in sizes
    )
