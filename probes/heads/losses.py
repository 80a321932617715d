"""Cross-entropy of patch logits against pixel labels, for many heads at once.

A head is linear, so a head after upsampling equals upsampling after the head: logits are made once
a patch, and only the loss knows about pixels. Each loss gives its gradient with its value, and goes
through the pixels in pieces that stay in the cache.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from probes.features.labels import label_histograms
from probes.heads.upsampled_logsumexp import (
    corner_weights,
    logsumexp,
    summed_logsumexp,
)
from ssl_bench.metrics import value_counts
from ssl_bench.scores import IGNORED
from ssl_bench.system.device import float64_device

Logits = Float[Tensor, "heads classes batch rows cols"]


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


@runtime_checkable
class PixelLoss(Protocol):
    """A cross-entropy of patch logits against pixel labels."""

    def label_size(self, grid: int) -> int:
        """Labels along a side of an image of so many patches."""
        ...

    def targets(self, labels: Integer[Tensor, "batch height width"], classes: int) -> PixelTargets:
        """Prepare the labels of a batch once for all heads."""
        ...

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        """Sum of the loss over the pixels that count, and its gradient."""
        ...


@dataclass(frozen=True)
class HistogramLoss:
    """Cross-entropy of each patch's logits against the histogram of the labels under it.

    Equals the cross-entropy over all pixels with logits upsampled by nearest neighbour.
    """

    pixels_per_patch: int

    def label_size(self, grid: int) -> int:
        return grid * self.pixels_per_patch

    def targets(self, labels: UInt8[Tensor, "batch height width"], classes: int) -> PixelTargets:
        histograms = label_histograms(labels, self.pixels_per_patch, classes)
        return PixelTargets(histograms, histograms.sum(0, keepdim=True))

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        return _patch_cross_entropy(logits, targets)


@dataclass(frozen=True)
class ModeLoss:
    """Cross-entropy of each patch's logits against the most frequent label under it.

    Patches that are ignored for the most part do not count; of equally frequent labels the
    smallest wins, and a class before what is ignored.
    """

    pixels_per_patch: int

    def label_size(self, grid: int) -> int:
        return grid * self.pixels_per_patch

    def targets(self, labels: UInt8[Tensor, "batch height width"], classes: int) -> PixelTargets:
        # Ignored pixels as a class behind all others, which may win but is not kept.
        counts = label_histograms(labels.clamp(max=classes), self.pixels_per_patch, classes + 1)
        winners = F.one_hot(counts.argmax(0), classes + 1).movedim(-1, 0)[:classes].float()
        return PixelTargets(winners, winners.sum(0, keepdim=True))

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        return _patch_cross_entropy(logits, targets)


@dataclass(frozen=True)
class LabelLoss:
    """Cross-entropy of the logits of each image, its only patch, against its class."""

    def label_size(self, grid: int) -> int:
        return grid

    def targets(self, labels: Int64[Tensor, "batch 1 1"], classes: int) -> PixelTargets:
        one_hot = F.one_hot(labels, classes).movedim(-1, 0).float()
        return PixelTargets(one_hot, torch.ones_like(one_hot[:1]))

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        return _patch_cross_entropy(logits, targets)


def _patch_cross_entropy(
    logits: Logits, targets: PixelTargets
) -> tuple[Float[Tensor, " heads"], Logits]:
    label_weights, counted = targets.label_weights.to(logits), targets.counted.to(logits)
    shares = logits.softmax(1)
    loss = (logsumexp(logits, shares, 1) * counted).flatten(1).sum(1)
    loss -= (logits * label_weights).flatten(1).sum(1)
    return loss, shares.mul_(counted).sub_(label_weights)


@dataclass(frozen=True)
class UpsampledLoss:
    """Cross-entropy of bilinearly upsampled logits against labels on the finer grid.

    The four patches around a cell of pixels give all its logits. So the labels' part is a weighted
    sum of patch logits, and only the normaliser visits the pixels.
    """

    pixels_per_patch: int

    def label_size(self, grid: int) -> int:
        return grid * self.pixels_per_patch

    def targets(self, labels: UInt8[Tensor, "batch height width"], classes: int) -> PixelTargets:
        cells = _pixels_by_cell(labels, self.pixels_per_patch)
        kept = cells.clamp(max=classes).flatten(1).long()
        _, columns = kept.shape
        index = kept * columns + torch.arange(columns, device=labels.device)
        weights, size = (
            corner_weights(self.pixels_per_patch, labels.device),
            (classes + 1) * columns,
        )
        corners = [
            value_counts(index.flatten(), size, side.repeat_interleave(columns))
            for side in weights.T
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
class ResampledLoss:
    """Cross-entropy of bilinearly resampled logits against labels of any fixed size.

    For sizes that are no multiple of the token grid; slower a pixel than `UpsampledLoss`.

    Attributes:
        rows: Patches of an image from top to bottom.
        cols: Patches from left to right.
        size: Labels along either side.
    """

    rows: int
    cols: int
    size: int

    def label_size(self, grid: int) -> int:
        del grid
        return self.size

    def targets(self, labels: UInt8[Tensor, "batch height width"], classes: int) -> PixelTargets:
        counted = (labels != IGNORED).float()[None]
        return PixelTargets(
            torch.stack([self._weights(one, classes) for one in labels], 1), counted
        )

    def _weights(
        self, labels: UInt8[Tensor, "height width"], classes: int
    ) -> Float[Tensor, "classes rows cols"]:
        present = torch.stack([labels == number for number in range(classes)]).float()
        down, across = self._matrices(present)
        return down.T @ present @ across

    def loss_and_gradient(
        self, logits: Logits, targets: PixelTargets
    ) -> tuple[Float[Tensor, " heads"], Logits]:
        label_weights = targets.label_weights.to(logits)
        down, across = self._matrices(logits)
        loss, gradient = -(logits * label_weights).flatten(1).sum(1), torch.empty_like(logits)
        for head in range(logits.shape[0]):
            for image in range(logits.shape[2]):
                values = down @ logits[head, :, image] @ across.T
                counted = targets.counted[0, image].to(logits)
                shares = values.softmax(0)
                loss[head] += (logsumexp(values, shares, 0) * counted).sum()
                gradient[head, :, image] = down.T @ shares.mul_(counted) @ across
        return loss, gradient.sub_(label_weights)

    def _matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        sides = (self.rows, self.cols)
        down, across = (
            resampling_matrix(patches, self.size, like.device).to(like) for patches in sides
        )
        return down, across


def resampling_matrix(
    patches: int, size: int, device: torch.device | None = None
) -> Float[Tensor, "size patches"]:
    """Bilinear weights (`align_corners=False`) of patches in pixels, along one axis."""
    pixels = torch.arange(size, dtype=torch.float64, device=device and float64_device(device))
    position = ((pixels + 0.5) * (patches / size) - 0.5).clamp(0, patches - 1)
    distance = position[:, None] - torch.arange(patches, device=pixels.device)
    return (1 - distance.abs()).clamp(min=0)


def _pixels_by_cell(
    labels: UInt8[Tensor, "batch height width"], pixels_per_patch: int
) -> UInt8[Tensor, "pixels batch cell_rows cell_cols"]:
    """Cut labels between the patch centers; pixels beyond the image count as ignored."""
    side = pixels_per_patch
    before, after = side - side // 2, side // 2
    padded = F.pad(labels, (before, after, before, after), value=IGNORED)
    cells = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side))
    return cells.permute(2, 4, 0, 1, 3).flatten(0, 1)


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
