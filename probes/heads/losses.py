"""Cross-entropy of patch logits against pixel labels, for many heads at once.

A head is linear, so a head after upsampling equals upsampling after the head: logits are made once
a patch, and only the loss knows about pixels. Each loss gives its gradient with its value, and goes
through the pixels in pieces that stay in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from probes.features.labels import label_histograms
from probes.heads.upsampled_logsumexp import corner_weights, logsumexp, summed_logsumexp
from ssl_bench.composition.fields import Count, Pixels, check_fields
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
