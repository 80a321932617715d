"""Train linear heads that predict the depth of each pixel.

A head computes the logits of 256 depth bins for each patch. The depths of the bins are evenly
spaced. The predicted depth of a pixel is the mean over the bins, weighted by their positive logits.

A *source* is one layer, or several layers whose channels are concatenated. Each source has one head
for each learning rate.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from probes.features.journal import Journal
from probes.features.tiers import StoredFeatures
from probes.features.training_images import LayerGroup
from probes.heads.losses import PIECE_BYTES, corner_weights
from probes.heads.sgd import (
    HeadAdamW,
    RunningStatistics,
    Schedule,
    concatenate_layers,
    shuffled_batches,
    update_heads,
)
from ssl_bench.evaluation import Progress

NUM_BINS = 256
UPSAMPLING = 4
"""Number of pixels of a predicted depth map along the side of a patch."""
_ADDED_TO_LOGITS = 0.1
_ADDED_TO_DEPTH = 1e-3
_MEAN_WEIGHT = 0.15

Patches = Float[Tensor, "batch rows cols patch_dim"]
Cls = Float[Tensor, "batch cls_dim"]
DepthMaps = Float[Tensor, "rates batch height width"]


@dataclass(frozen=True)
class TrainingDepths:
    """Features and depth maps of all training images.

    Attributes:
        patches: Features of the patches. Their labels are depth maps in metres, which have
            `UPSAMPLING` x `UPSAMPLING` pixels for each patch.
        cls: [CLS] tokens. They have 0 channels if the heads do not use [CLS] tokens.
    """

    patches: StoredFeatures
    cls: Float[Tensor, "layers images cls_dim"]


@dataclass
class DepthHeads:
    """Linear heads that predict depth, one for each pair of a source and a learning rate.

    A source is a group of blocks whose concatenated features are the input of a head. A head
    computes a logit for each of several depth bins.

    Attributes:
        weight: Weights for the channels of the patch, followed by those for the channels of the
            [CLS] token.
        bias: Bias of each bin.
        bins: Depth of each bin in metres.
        constant_channels: Number of channels of each source that do not vary over the training
            images.
        seconds: Time that the training took in seconds, including interrupted runs.
    """

    weight: Float[Tensor, "sources rates bins dim"]
    bias: Float[Tensor, "sources rates bins"]
    bins: Float[Tensor, " bins"]
    constant_channels: Sequence[int]
    seconds: float = 0.0

    def predict(self, source: int, patches: Patches, cls: Cls) -> DepthMaps:
        """Return the depth maps that the heads of one source predict for a batch, in metres.

        The maps have `UPSAMPLING` x `UPSAMPLING` pixels for each patch. `source` is the index of
        the source (group of layers). `cls` contains the [CLS] tokens.
        """
        return predict_depth(self.weight[source], self.bias[source], self.bins, patches, cls)


@dataclass(frozen=True)
class HeadTraining:
    """Training of linear depth heads with AdamW and a cosine schedule.

    Attributes:
        learning_rates: Peak learning rates. One head of each source is trained for each rate.
        epochs: Number of passes over the training images.
        batch_size: Number of images per step.
        warmup: Fraction of the steps for the warm-up of the learning rate. In these steps, the loss
            depends only on the mean error of the logarithms of the depths. The heads therefore
            learn the overall scale first.
        weight_decay: Weight decay of AdamW.
        standardize: Whether each channel is standardised over the training images.
        bounds: Depth of the first and of the last bin in metres. Depths that are not between them
            count as unknown.
        seed: Seed of the initial weights and of the order of the images.
    """

    learning_rates: Sequence[float]
    epochs: int
    batch_size: int
    warmup: float
    weight_decay: float
    standardize: bool
    bounds: tuple[float, float]
    seed: int

    def train(
        self,
        features: TrainingDepths,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        device: torch.device,
        progress: Progress,
        journal: Journal,
    ) -> DepthHeads:
        """Train a head for each pair of a source (group of layers) and a learning rate.

        The heads of one source do not depend on the heads of other sources.

        Args:
            features: Features and depth maps of all training images.
            sources: Groups of layers. The heads of a group receive the concatenated features of its
                layers.
            entries: Indices of the images to train on.
            device: Device of the heads.
            progress: Function that shows a progress bar.
            journal: File that stores the state of the training. If it contains the state of an
                interrupted training, this training is continued.
        """
        state: dict[str, Any] = journal.entries[-1] if journal.entries else {}
        start = time.monotonic() - state.get("seconds", 0.0)
        layers = [*chain(*sources)]
        read = features.patches.reader(layers, device)
        all_cls = features.cls[[features.patches.layers.index(layer) for layer in layers]]
        cls_by_source = concatenate_layers(all_cls[:, :, None, None], len(sources))[:, :, 0, 0]
        cls_by_source = cls_by_source.to(device)

        # Measure mean and deviation of all channels.
        statistics = [RunningStatistics.start(device)]
        some = entries.split(self.batch_size)
        for batch in progress(read(some), "mean and deviation", len(some)):
            statistics[0].add(batch.features)
        if all_cls.shape[-1]:
            statistics.append(RunningStatistics.start(device))
            statistics[1].add(all_cls[:, entries, None, None])
        parts = [each.standardization(len(sources), device) for each in statistics]
        mean, scale = (torch.cat([getattr(p, k) for p in parts], 1) for k in ("mean", "scale"))
        constant_channels = (scale == 0).sum(1).tolist()
        if not self.standardize:
            mean, scale = torch.zeros_like(mean), torch.ones_like(scale)

        # Train all heads on the same shuffled batches.
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(NUM_BINS, mean.shape[1], generator=generator).mul_(0.01).to(device)
        weight = weight.repeat(len(sources), len(self.learning_rates), 1, 1)
        bias = weight.new_zeros(weight.shape[:3])
        states: list[list[dict[str, Tensor]]] = [[{}, {}] for _ in sources]
        if state:
            weight, bias = (part.to(device) for part in state["parameters"])
            states = [[_move_tensors(each, device) for each in pair] for pair in state["optimizer"]]
        bins = torch.linspace(*self.bounds, NUM_BINS, device=device)
        optimizer, schedule = HeadAdamW(self.weight_decay), Schedule("cosine", self.warmup)
        peak = torch.tensor(self.learning_rates, device=device)
        by_epoch = shuffled_batches(entries, self.batch_size, epochs=self.epochs, seed=self.seed)
        steps, done = [*chain(*by_epoch)], state.get("step", 0)

        def make_state(step: int) -> dict[str, Any]:
            seconds = time.monotonic() - start
            parameters = [weight, bias]
            return {
                "seconds": seconds, "step": step, "parameters": parameters, "optimizer": states
            }  # fmt: skip

        name = f"heads of layers {sources[0][-1]} to {sources[-1][-1]}"
        for step, batch in enumerate(progress(read(steps[done:]), name, len(steps) - done), done):
            patches = concatenate_layers(batch.features, len(sources))
            dim, is_known = patches.shape[-1], self.is_known(batch.labels)
            rates = peak * schedule.factor(step, len(steps))
            only_mean = step < self.warmup * len(steps)
            # The logits of all sources would not fit into memory.
            for source in range(len(sources)):
                x = (patches[source].float() - mean[source, :dim]) * scale[source, :dim]
                cls = cls_by_source[source, steps[step]]
                cls = (cls - mean[source, dim:]) * scale[source, dim:]
                parameters = weight[source, None], bias[source, None]
                leaves = [each[0].detach().requires_grad_() for each in parameters]
                depth = predict_depth(leaves[0], leaves[1], bins, x, cls)
                loss = scale_invariant_loss(depth, batch.labels, is_known, only_mean=only_mean)
                gradients = [each[None] for each in torch.autograd.grad(loss.sum(), leaves)]
                update_heads(optimizer, parameters, gradients, states[source], rates, step + 1)
            if journal.is_due():
                journal.replace(make_state(step + 1))
        if journal.is_due():
            journal.replace(make_state(len(steps)))
        # Fold the standardisation into the heads.
        weight = weight * scale[:, None, None]
        bias = bias - (weight * mean[:, None, None]).sum(-1)
        return DepthHeads(weight, bias, bins, constant_channels, time.monotonic() - start)

    def is_known(self, depth: Float[Tensor, "*some"]) -> Bool[Tensor, "*some"]:
        """Return whether each depth is known (lies between the bounds)."""
        return (depth > self.bounds[0]) & (depth < self.bounds[1])


def _move_tensors(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def predict_depth(
    weight: Float[Tensor, "rates bins dim"],
    bias: Float[Tensor, "rates bins"],
    bins: Float[Tensor, " bins"],
    patches: Patches,
    cls: Cls,
) -> DepthMaps:
    """Return the depth maps that the heads of one source (group of layers) predict for a batch.

    Depths are in metres. There is one head for each learning rate.

    Args:
        weight: Weights for the channels of the patch, followed by those for the [CLS] token.
        bias: Bias of each depth bin.
        bins: Depth of each bin in metres.
        patches: Features of the patches.
        cls: [CLS] tokens.
    """
    dim = patches.shape[-1]
    by_patch = (patches.flatten(0, 2) @ weight[..., :dim].mT).unflatten(1, patches.shape[:3])
    by_image = cls @ weight[..., dim:].mT + bias[:, None]
    logits = by_patch + by_image[:, :, None, None]
    return decode_depth(logits.flatten(0, 1), bins).unflatten(0, logits.shape[:2])


def decode_depth(
    logits: Float[Tensor, "maps rows cols bins"], bins: Float[Tensor, " bins"]
) -> Float[Tensor, "maps height width"]:
    """Upsample the logits of depth bins bilinearly, and return the predicted depth of each pixel.

    The depth of a pixel is the weighted mean of the depths of all bins. The weight of a bin is its
    logit plus 0.1, or 0.1 if the logit is negative.

    Source: `BNHead` and `DepthBaseDecodeHead` in dinov2/eval/depth/models/decode_heads of
    https://github.com/facebookresearch/dinov2/tree/b8931f7b.
    """
    maps, rows, cols, _ = logits.shape
    tall = torch.cat([logits[:, :1], logits, logits[:, -1:]], 1)
    padded = torch.cat([tall[:, :, :1], tall, tall[:, :, -1:]], 2)
    by_cell = PositiveSums.apply(padded, bins)
    pixels = by_cell.view(2, UPSAMPLING, UPSAMPLING, maps, rows + 1, cols + 1)
    pixels = pixels.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)
    # The outer cells extend beyond the image by half a patch.
    outside = UPSAMPLING // 2
    weighted, total = pixels[:, :, outside:-outside, outside:-outside]
    depths = weighted + _ADDED_TO_LOGITS * bins.sum()
    return depths / (total + _ADDED_TO_LOGITS * len(bins))


class PositiveSums(torch.autograd.Function):
    """An autograd function that upsamples logits of depth bins, and sums them over the bins.

    For each pixel, the function computes two sums over the bins. The first sum adds up positive
    logit * depth of the bin, and the second sum adds up the positive logits. The pixels of the
    result are ordered by cells. A cell is the area between the centres of four patches, from which
    the logits in the cell are interpolated.

    To save memory, upsampled logits are computed in pieces, and computed again in the backward
    pass. For one head and an image of 37 x 37 patches, all upsampled logits would take 22 MB.
    """

    @staticmethod
    def forward(
        ctx: Any, padded: Float[Tensor, "maps tall wide bins"], bins: Float[Tensor, " bins"]
    ) -> Float[Tensor, "2 pixels maps cell_rows cell_cols"]:
        ctx.save_for_backward(padded, bins)
        maps, tall, wide, _ = padded.shape
        sums = padded.new_empty(2, UPSAMPLING**2, maps, tall - 1, wide - 1)
        for maps_and_rows, positive in _upsample(padded):
            part = sums[:, :, *maps_and_rows]
            part[0] = positive @ bins
            torch.sum(positive, -1, out=part[1])
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Float[Tensor, "maps tall wide bins"], None]:
        (gradient,), (padded, bins) = gradients, ctx.saved_tensors
        by_bin, result = torch.stack([bins, torch.ones_like(bins)]), torch.zeros_like(padded)
        weights = corner_weights(UPSAMPLING, padded.device).to(padded)
        for (maps, rows), positive in _upsample(padded):
            logit_gradient = gradient[:, :, maps, rows].flatten(1).T @ by_bin
            logit_gradient = logit_gradient.view_as(positive)
            logit_gradient = torch.ops.aten.threshold_backward(logit_gradient, positive, 0)
            by_corner = (weights.T @ logit_gradient.flatten(1)).view(4, *positive.shape[1:])
            for corner, values in zip(_corners(result, maps, rows), by_corner, strict=True):
                corner += values
        return result, None


def _corners(
    padded: Float[Tensor, "maps tall wide bins"], maps: slice, rows: slice
) -> list[Float[Tensor, "some_maps some_rows cell_cols bins"]]:
    """Return the values at the upper left, upper right, lower left and lower right cell corners.

    A cell is the area between the centres of four patches, which are its corners. `maps` selects
    maps, and `rows` selects rows of cells. The results are tensor views of `padded`.
    """
    above, below = padded[maps, rows], padded[maps, rows.start + 1 : rows.stop + 1]
    return [side for row in (above, below) for side in (row[:, :, :-1], row[:, :, 1:])]


def _upsample(
    padded: Float[Tensor, "maps tall wide bins"],
) -> Iterator[tuple[tuple[slice, slice], Float[Tensor, "pixels maps rows cell_cols bins"]]]:
    """Upsample logits in pieces, to limit the memory.

    A piece has at most `PIECE_BYTES` bytes, unless a single row of cells is larger. A cell is the
    area between the centres of four patches. For each piece, yield the slices of its maps and of
    its rows of cells, and the upsampled logits of the piece with negative logits replaced by 0.
    """
    weights = corner_weights(UPSAMPLING, padded.device).to(padded)
    maps, tall, wide, bins = padded.shape
    row_bytes = UPSAMPLING**2 * (wide - 1) * bins * padded.element_size()
    num_rows = max(1, PIECE_BYTES[padded.device.type] // row_bytes)
    num_maps = max(1, num_rows // (tall - 1))
    for first_map in range(0, maps, num_maps):
        for first_row in range(0, tall - 1, num_rows):
            piece = (
                slice(first_map, min(maps, first_map + num_maps)),
                slice(first_row, min(tall - 1, first_row + num_rows)),
            )
            corners = torch.stack(_corners(padded, *piece))
            logits = (weights @ corners.flatten(1)).view(-1, *corners.shape[1:])
            yield piece, logits.relu_()


def scale_invariant_loss(
    depth: DepthMaps,
    target: Float[Tensor, "batch height width"],
    is_known: Bool[Tensor, "batch height width"],
    *,
    only_mean: bool = False,
) -> Float[Tensor, " rates"]:
    """For each head, return the scale-invariant loss over all pixels with a known depth.

    The loss is sqrt(var(g) + 0.15 mean(g)^2), where g = ln(depth + 0.001) - ln(target + 0.001). The
    loss is 1e-6 if no depth is known.

    Args:
        depth: Predicted depth in metres.
        target: True depth in metres.
        is_known: Whether the depth of each pixel is known.
        only_mean: Whether to leave out the term var(g).

    Source: `SigLoss` in dinov2/eval/depth/models/losses/sigloss.py of
    https://github.com/facebookresearch/dinov2/tree/b8931f7b.
    """
    g = (depth + _ADDED_TO_DEPTH).log() - (target + _ADDED_TO_DEPTH).log()
    count = is_known.sum().clamp(min=2)
    mean = (g * is_known).flatten(1).sum(1) / count
    total = _MEAN_WEIGHT * mean.square()
    if not only_mean:
        squares = (g - mean[:, None, None, None]).square() * is_known
        total = total + squares.flatten(1).sum(1) / (count - 1)
    # The derivative of a square root is infinite at 0.
    return total.clamp(min=1e-12).sqrt()
