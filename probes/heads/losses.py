"""Compute segmentation losses of patch logits against pixel labels, for many heads at once.

A head is linear, so upsampling its logits gives the same result as applying the head to upsampled
features. Heads therefore compute logits for patches, and only the loss handles pixels. Each loss
returns its value and its gradient. The work is divided into pieces that fit into the CPU's cache.
`summed_logsumexp` computes the expensive part of the loss of bilinearly upsampled logits, without
ever storing the upsampled logits of all heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from ssl_bench.composition.fields import Count, Pixels, check_fields
from ssl_bench.scores import IGNORE_INDEX
from ssl_bench.system.device import float64_device, value_counts
from ssl_bench.system.output import print_message

# Maximum size in bytes of a piece of work, unless a single row of cells is larger. On a CPU, a
# piece fits into the cache. On a GPU, large pieces need few kernel launches.
PIECE_BYTES = {"cpu": 2**21, "cuda": 2**28, "mps": 2**28}
# Exponentials of logits below about -87 underflow in float32, so that their products are wrong.
_LOWEST_LOGIT = -80
# Exponentials are computed as products only in cells of at most this number of pixels, because
# rounding errors grow with the number of factors.
_MAX_PRODUCTS = 16**2
# Maximum number of pixels of a cell for the Triton kernel, which keeps them in registers.
_MAX_KERNEL_PIXELS = 32**2

Logits = Float[Tensor, "heads classes batch rows cols"]


@dataclass(frozen=True)
class PixelTargets:
    """Labels of a batch of images, as two tensors for computing a segmentation loss.

    The loss of a pixel is the logsumexp of its class logits minus the logit of its true class.

    Attributes:
        label_weights: Weights of the patch logits. The sum of label_weights * logits is the sum of
            the true-class logits of all labelled pixels. `MajorityLoss` and `LabelLoss` treat each
            patch as one pixel.
        pixel_weights: Weight of the logsumexp of each pixel, or 0 if the pixel is ignored.
            `UpsampledLoss` groups pixels by cells. A cell is the area between four patch centers.
            `ResampledLoss` has one weight for each pixel of the label maps (shape 1 x batch x
            height x width). All other losses have one weight for each patch (shape 1 x batch x rows
            x cols).
    """

    label_weights: Float[Tensor, "classes batch rows cols"]
    pixel_weights: Float[Tensor, "pixels batch cell_rows cell_cols"]

    def select(self, images: slice) -> "PixelTargets":
        """Return the labels of a slice of the images in the batch."""
        return PixelTargets(self.label_weights[:, images], self.pixel_weights[:, images])


class PixelLoss:
    """The base class of training losses for heads.

    Each file in configs/probe/segmentation/loss selects one loss. The method `loss_and_gradient` of
    this class computes the cross-entropy between the logits of each patch and the distribution of
    its labels. Losses that upsample the logits override this method.
    """

    def settings(self) -> dict[str, Any]:
        """Return the settings of the loss that affect the trained heads, as JSON types."""
        raise NotImplementedError

    def label_size(self, grid: int, patch: int) -> int:
        """Return the side in pixels of the label maps that the loss needs.

        The encoder's input has `grid` x `grid` patches with a side of `patch` pixels.
        """
        return grid * patch

    def targets(
        self, labels: Integer[Tensor, "batch height width"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        """Convert the label maps of a batch to the tensors that are needed to compute the loss.

        `classes` is the number of classes. `grid` contains the numbers of rows and columns of
        patches.
        """
        raise NotImplementedError

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        """Return the loss of each head, summed over the labelled pixels, and its gradient.

        The gradient is with respect to `logits`, the logits of the patches.
        """
        label_weights, pixel_weights = (
            targets.label_weights.to(logits),
            targets.pixel_weights.to(logits),
        )
        probabilities = logits.softmax(1)
        loss = (logsumexp(logits, probabilities, 1) * pixel_weights).flatten(1).sum(1)
        loss -= (logits * label_weights).flatten(1).sum(1)
        return loss, probabilities.mul_(pixel_weights).sub_(label_weights)


@dataclass(frozen=True)
class HistogramLoss(PixelLoss):
    """Cross-entropy of each patch's logits against the histogram of the pixel labels inside it.

    The result is the same as if each pixel had the logits of its patch.
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
    """Cross-entropy of each patch's logits against the most frequent pixel label inside it.

    A patch is left out if it has more ignored pixels than pixels of any class. If several classes
    are equally frequent, the class with the smallest number is used.
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
    """Cross-entropy of the logits of each image against its class, for classification.

    The image is treated as a single patch with a single pixel.
    """

    def targets(
        self, labels: Int64[Tensor, "batch 1 1"], classes: int, grid: tuple[int, int]
    ) -> PixelTargets:
        del grid
        one_hot = F.one_hot(labels, classes).movedim(-1, 0).float()
        return PixelTargets(one_hot, torch.ones_like(one_hot[:1]))


@dataclass(frozen=True)
class UpsampledLoss(PixelLoss):
    """Cross-entropy of bilinearly upsampled logits against label maps.

    The number of pixels along a side of the label maps is a multiple of the number of patches. The
    loss of a pixel is its log-normaliser (the logsumexp of its class logits) minus the logit of its
    true class. Only the log-normalisers need upsampled logits. The sum of the true-class logits is
    computed without upsampling, as a weighted sum of patch logits.

    Attributes:
        factor: Number of label pixels along the side of a patch, or None for label maps at the
            encoder's input size.
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
        padded = F.pad(labels, (before, after, before, after), value=IGNORE_INDEX)
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
        padded = by_corner.new_zeros(*by_corner.shape[1:3], cells.shape[2] + 1, cells.shape[3] + 1)
        _add_to_corners(padded, by_corner)
        label_weights = _fold_edges(padded).float().to(labels.device)
        return PixelTargets(label_weights, (cells != IGNORE_INDEX).float())

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        label_weights, pixel_weights = (
            targets.label_weights.to(logits),
            targets.pixel_weights.to(logits),
        )
        # The loss stays the same if all logits of a patch change by the same value.
        logits = logits - logits.amax(1, keepdim=True)
        normaliser, gradient = summed_logsumexp(logits, pixel_weights)
        loss = normaliser - (logits * label_weights).flatten(1).sum(1)
        return loss, gradient.sub_(label_weights)


@dataclass(frozen=True)
class ResampledLoss(PixelLoss):
    """Cross-entropy of bilinearly upsampled logits against label maps of any size.

    The number of pixels along a side of the label maps need not be a multiple of the number of
    patches. For the same number of pixels, this loss is slower than `UpsampledLoss`.

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
        weights, (down, across) = [], self._bilinear_matrices(grid, labels.float())
        for image in labels:
            one_hot = torch.stack([image == number for number in range(classes)]).float()
            weights.append(down.T @ one_hot @ across)
        return PixelTargets(torch.stack(weights, 1), (labels != IGNORE_INDEX).float()[None])

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        label_weights = targets.label_weights.to(logits)
        down, across = self._bilinear_matrices(logits.shape[-2:], logits)
        loss, gradient = -(logits * label_weights).flatten(1).sum(1), torch.empty_like(logits)
        for head in range(logits.shape[0]):
            for image in range(logits.shape[2]):
                values = down @ logits[head, :, image] @ across.T
                pixel_weights = targets.pixel_weights[0, image].to(logits)
                probabilities = values.softmax(0)
                loss[head] += (logsumexp(values, probabilities, 0) * pixel_weights).sum()
                gradient[head, :, image] = down.T @ probabilities.mul_(pixel_weights) @ across
        return loss, gradient.sub_(label_weights)

    def _bilinear_matrices(self, grid: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices that upsample a map of patches, vertically and horizontally.

        The matrices contain bilinear interpolation weights, with pixels as rows and patches as
        columns. `grid` contains the numbers of rows and columns of patches. The matrices have the
        dtype and device of `like`.
        """
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
    """Count the pixels of each class in the area of each patch. Ignored pixels are not counted.

    A patch covers `pixels_per_patch` x `pixels_per_patch` pixels of the label map.
    """
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


def summed_logsumexp(
    logits: Logits, pixel_weights: Float[Tensor, "pixels batch cell_rows cell_cols"]
) -> tuple[Float[Tensor, " heads"], Logits]:
    """For each head, sum the log-normalisers of all pixels, and compute the gradient of the sum.

    The log-normaliser of a pixel is the logsumexp of its bilinearly upsampled class logits. To
    limit the memory, the logits are processed in pieces. On a CPU, the pieces fit into the cache.
    On CUDA, a Triton kernel computes the pieces if Triton can compile it, the logits are float32,
    and the cells have at most 32 x 32 pixels. In all other cases, PyTorch computes the pieces.

    Args:
        logits: Logits of the patches. To avoid overflow, the largest logit of a patch must be 0.
        pixel_weights: Weight of each pixel in the sum. Pixels are grouped by cells. A cell is the
            area between four patch centers. Its pixels are in row-major order.

    Returns:
        The weighted sum for each head, and its gradient with respect to `logits`.
    """
    weights = corner_weights(round(len(pixel_weights) ** 0.5), logits.device)
    padded = F.pad(logits.flatten(0, 1), (1, 1, 1, 1), mode="replicate")
    padded = padded.view(*logits.shape[:3], *padded.shape[2:])
    total, gradient = logits.new_zeros(len(logits)), torch.zeros_like(padded)
    compute, values_per_cell = _sum_piece, len(pixel_weights)
    fits_kernel = logits.dtype == torch.float32 and len(pixel_weights) <= _MAX_KERNEL_PIXELS
    if fits_kernel and (kernel := _find_kernel(logits.device)):
        compute, values_per_cell = kernel, 4
    for heads, images, rows in product(*_pieces(padded, values_per_cell)):
        piece = (heads, slice(None), images, slice(rows.start, rows.stop + 1))
        sums, by_corner = compute(padded[piece], pixel_weights[:, images, rows], weights)
        total[heads] += sums
        _add_to_corners(gradient[piece], by_corner)
    return total, _fold_edges(gradient)


@cache
def _find_kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the function `sum_with_kernel`, or None if Triton cannot compile it for the device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from probes.heads.pixel_kernel import sum_with_kernel

    patches, pixel = torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 1)
    try:
        sum_with_kernel(patches.to(device), pixel.to(device), corner_weights(1))
    # Triton raises errors of many types, for example if there is no C compiler.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        print_message(
            f"Triton cannot compile the pixel loss ({reason}), so training the heads is slower"
        )
        return None
    return sum_with_kernel


def _sum_piece(
    padded: Float[Tensor, "heads classes batch tall wide"],
    pixel_weights: Float[Tensor, "pixels batch cell_rows cell_cols"],
    weights: Float[Tensor, "pixels 4"],
) -> tuple[Float[Tensor, " heads"], Float[Tensor, "4 heads classes batch cell_rows cell_cols"]]:
    """For each head, sum the log-normalisers of pixels with PyTorch, and compute the gradient.

    The log-normaliser of a pixel is the logsumexp of its upsampled class logits. This function
    computes the same as `sum_with_kernel`.

    Args:
        padded: Logits of the patches. The patches at the edge of the grid are repeated once beyond
            it.
        pixel_weights: Weight of each pixel of each cell. A cell is the area between four patch
            centers.
        weights: Bilinear weights of the four patches at the corners of a cell, for each pixel.

    Returns:
        The weighted sum for each head, and its gradients with respect to the four corners of each
        cell.
    """
    corners, weight, matrix = (
        torch.stack(_corners(padded)),
        pixel_weights[:, None],
        weights.to(padded),
    )
    is_product = torch.zeros(len(padded), dtype=torch.bool)
    if padded.device.type == "cpu" and 1 < len(weights) <= _MAX_PRODUCTS:
        is_product = padded.flatten(1).amin(1) > _LOWEST_LOGIT
    if is_product.all():
        exponentials = _exponentials(corners.flatten(1), weights).view(-1, *corners.shape[1:])
        sums = exponentials.sum(2)
        normaliser, probabilities = sums.log(), exponentials.mul_((weight / sums)[:, :, None])
        by_corner = (matrix.T @ probabilities.flatten(1)).view(corners.shape)
    elif is_product.any():
        # The result of a head must not depend on the other heads of its piece.
        parts = [_sum_piece(head[None], pixel_weights, weights) for head in padded]
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts], 1)
    else:
        # A softmax on a GPU is up to four times as fast if classes are adjacent in memory.
        corners = corners.movedim(2, -1)
        upsampled = (matrix @ corners.flatten(1)).view(-1, *corners.shape[1:])
        probabilities = upsampled.softmax(-1)
        normaliser = logsumexp(upsampled, probabilities, -1)
        probabilities *= weight[..., None]
        by_corner = (matrix.T @ probabilities.flatten(1)).view(corners.shape).movedim(-1, 2)
    return (normaliser * weight).transpose(0, 1).flatten(1).sum(1), by_corner


def _exponentials(
    corners: Float[Tensor, "4 values"], weights: Float[Tensor, "pixels 4"]
) -> Float[Tensor, "pixels values"]:
    """Return the exponentials of bilinearly upsampled logits, computed mostly by multiplication.

    Within a cell (the area between four patch centers), the logit at the pixel (x, y) is a + bx +
    cy + dxy. The exponential of the logit at a pixel is therefore the exponential at the previous
    pixel times a factor. A multiplication is faster than the exponential function.

    Args:
        corners: Logits of the four patches at the corners of each cell.
        weights: Bilinear weights of these four patches for each pixel of a cell.
    """
    side = round(len(weights) ** 0.5)
    grid = weights.view(side, side, 4)
    first, right, down = grid[0, 0], grid[0, 1] - grid[0, 0], grid[1, 0] - grid[0, 0]
    diagonal = grid[1, 1] - grid[1, 0] - right
    steps = torch.stack([first, right, down, diagonal]).to(corners)
    first, right, down, diagonal = (steps @ corners).exp_()
    result, ratio = corners.new_empty(side, side, len(first)), corners.new_empty(side, len(first))
    result[0, 0], ratio[0] = first, down
    for x in range(1, side):
        torch.mul(result[0, x - 1], right, out=result[0, x])
        torch.mul(ratio[x - 1], diagonal, out=ratio[x])
    for y in range(1, side):
        torch.mul(result[y - 1], ratio, out=result[y])
    return result.flatten(0, 1)


def _corners(
    padded: Float[Tensor, "*some tall wide"],
) -> list[Float[Tensor, "*some cell_rows cell_cols"]]:
    """Return the values of the four patches at the corners of each cell.

    A cell is the area between four patch centers. The order is upper left, upper right, lower left
    and lower right. The results are tensor views of `padded`, a map of patches.
    """
    rows = (padded[..., :-1, :], padded[..., 1:, :])
    return [side for row in rows for side in (row[..., :-1], row[..., 1:])]


def _add_to_corners(
    padded: Float[Tensor, "*some tall wide"],
    values: Float[Tensor, "4 *some cell_rows cell_cols"],
) -> None:
    for corner, each in zip(_corners(padded), values, strict=True):
        corner += each


def _fold_edges(padded: Float[Tensor, "*some tall wide"]) -> Float[Tensor, "*some rows cols"]:
    """Add the padding of a gradient map to the outermost patches, and remove the padding.

    The padding of the logits repeats the outermost patches once, so the gradients in the padding
    belong to these patches.
    """
    for axis in (-2, -1):
        padded.select(axis, 1).add_(padded.select(axis, 0))
        padded.select(axis, -2).add_(padded.select(axis, -1))
        padded = padded.narrow(axis, 1, padded.shape[axis] - 2)
    return padded.contiguous()


def corner_weights(side: int, device: torch.device | None = None) -> Float[Tensor, "pixels 4"]:
    """Return the bilinear weights of the four surrounding patches for the pixels of one cell.

    A cell is the area between four patch centers, and has `side` x `side` pixels. The weights are
    those of bilinear upsampling with `align_corners=False`. The order of the patches is upper left,
    upper right, lower left, lower right.
    """
    first = 0.5 if side % 2 == 0 else 0.0
    numbers = torch.arange(side, dtype=torch.float64, device=device and float64_device(device))
    after = (numbers + first) / side
    sides = torch.stack([1 - after, after], -1)
    return torch.einsum("yi,xj->yxij", sides, sides).reshape(-1, 4)


def logsumexp(logits: Tensor, probabilities: Tensor, axis: int) -> Tensor:
    """Return the logsumexp of logits, computed from the logits and their softmax.

    `probabilities` are the softmax of the logits along the tensor axis `axis`.
    """
    # The largest probability is at least 1 / classes, so its logarithm is accurate.
    return logits.amax(axis) - probabilities.amax(axis).log_()


def _pieces(
    padded: Float[Tensor, "heads classes batch tall wide"], values_per_cell: int
) -> list[list[slice]]:
    """Split the computation of a loss into pieces of limited size in memory.

    Return three lists: slices of heads, slices of images, and slices of rows of cells. A cell is
    the area between four patch centers. One slice from each list defines a piece. For each class,
    each cell needs `values_per_cell` values in memory.
    """
    heads, classes, images, tall, wide = padded.shape
    budget, pieces = PIECE_BYTES[padded.device.type], []
    size = values_per_cell * classes * (wide - 1) * padded.element_size()
    for count in (tall - 1, images, heads):
        length = min(count, max(1, budget // size))
        pieces.insert(0, [slice(i, min(count, i + length)) for i in range(0, count, length)])
        size *= length
    return pieces
