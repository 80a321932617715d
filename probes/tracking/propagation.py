"""Propagate the labels of patches from earlier frames of a video to the next frame."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.neighbours import unit_vectors

# Number of patches that are compared in one matrix product. A larger product would contain more
# pairs of patches that are not needed, because their distance exceeds `PropagationConfig.radius`.
_QUERIES = 160
# If a channel varies by less than this share of its maximum, it is constant up to rounding.
_CONSTANT = 1e-6

PatchFeatures = Float[Tensor, "rows cols dim"]
PatchLabels = Float[Tensor, "rows cols channels"]


@dataclass(frozen=True)
class PropagationConfig:
    """Settings that select and weight the patches of earlier frames for the label of a patch.

    Attributes:
        latest_frames: Number of preceding frames to compare with, in addition to the first frame.
        radius: Largest distance between two compared patches along rows and along columns, in
            patches.
        neighbours: Number of most similar patches that are used, over all frames together.
        temperature: The weight of a patch is exp(cosine similarity / temperature).
    """

    latest_frames: int
    radius: int
    neighbours: int
    temperature: float


class LabelPropagation:
    """Patch labels of a video, propagated from frame to frame with the features of one block.

    The features of the first frame and of the latest frames are stored as unit vectors.

    Args:
        features: Patch features of the first frame.
        labels: Labels of the patches of the first frame, with one channel for each label.
        config: Settings that select and weight the patches whose labels are propagated.

    Source: eval_video_segmentation.py of https://github.com/facebookresearch/dino/tree/7c446df5.
    """

    def __init__(
        self, features: PatchFeatures, labels: PatchLabels, config: PropagationConfig
    ) -> None:
        self._config = config
        # Patches are compared within slices of rows. This saves most if there are more rows than
        # columns.
        self._is_transposed = features.shape[1] > features.shape[0]
        first, labels = self._arrange(unit_vectors(features)), self._arrange(labels)
        shape, num_frames = labels.shape, 1 + config.latest_frames
        # The matrix product is fastest if the patches are adjacent in memory.
        self._features = first.new_empty((num_frames, first.shape[2], *shape[:2]))
        self._labels = labels.new_empty((num_frames, *shape))
        self._features[0], self._labels[0] = first.permute(2, 0, 1), labels
        self._num_propagated = 0

    def propagate(self, features: PatchFeatures) -> PatchLabels:
        """Compute the patch labels of the next frame of the video from its patch features.

        The labels and the features are stored, because later frames are compared with them.
        """
        own = self._arrange(unit_vectors(features))
        count = 1 + min(self._num_propagated, self._config.latest_frames)
        labels = propagate_labels(own, self._features[:count], self._labels[:count], self._config)
        if self._config.latest_frames:
            # The order of the frames does not matter, so the oldest one is replaced.
            slot = 1 + self._num_propagated % self._config.latest_frames
            self._features[slot], self._labels[slot] = own.permute(2, 0, 1), labels
        self._num_propagated += 1
        return self._arrange(labels)

    def _arrange(self, patches: Float[Tensor, "_ _ _"]) -> Float[Tensor, "_ _ _"]:
        return patches.transpose(0, 1) if self._is_transposed else patches


def propagate_labels(
    target: PatchFeatures,
    sources: Float[Tensor, "frames dim rows cols"],
    labels: Float[Tensor, "frames rows cols channels"],
    config: PropagationConfig,
) -> PatchLabels:
    """Compute the label of each patch from the labels of the most similar patches near it.

    The label is the weighted mean of the labels of the `config.neighbours` most similar patches. If
    several patches tie for the last place, all of them are included. To save time and memory, a few
    rows of patches are compared at a time, and only with rows within the distance `config.radius`.

    Args:
        target: Unit vectors of the patches whose labels are computed.
        sources: Unit vectors of the patches in earlier frames.
        labels: Labels of the patches in earlier frames.
        config: Settings that select and weight the patches whose labels are propagated.
    """
    rows, cols = target.shape[:2]
    step = max(1, _QUERIES // cols)
    numbers = [torch.arange(side, device=target.device) for side in (rows, cols)]
    is_far_row, is_far_col = ((n[:, None] - n).abs() > config.radius for n in numbers)
    parts = []
    for first in range(0, rows, step):
        own = slice(first, first + step)
        near = slice(max(0, first - config.radius), first + step + config.radius)
        excluded = is_far_row[own, None, near, None] | is_far_col[None, :, None]
        parts.append(
            _weighted_labels(
                target[own].flatten(0, 1) @ sources[:, :, near].flatten(2),
                labels[:, near],
                excluded.flatten(0, 1).flatten(1),
                config,
            )
        )
    return torch.cat(parts).unflatten(0, (rows, cols))


def _weighted_labels(
    similarity: Float[Tensor, "frames queries patches"],
    labels: Float[Tensor, "frames rows cols channels"],
    excluded: Bool[Tensor, "queries patches"],
    config: PropagationConfig,
) -> Float[Tensor, "queries channels"]:
    """Return the weighted mean label of the patches that are most similar to each query patch.

    To find the k most similar patches quickly, only some rows of patches are sorted. A row can
    contain one of the k largest similarities only if its maximum is among the k largest row maxima.

    Args:
        similarity: Cosine similarities of each query patch with the patches of earlier frames.
        labels: Labels of the patches of earlier frames.
        excluded: Whether a patch is too far from a query patch to be compared with it.
        config: Settings that select and weight the patches.
    """
    # Adding a matrix is ten times as fast as a masked assignment.
    similarity += torch.zeros_like(similarity[0]).masked_fill_(excluded, -torch.inf)
    lines = similarity.unflatten(2, labels.shape[1:3])
    maxima = lines.amax(3).transpose(0, 1)  # queries frames rows
    k = min(config.neighbours, maxima[0].numel())
    best = maxima.flatten(1).topk(k, sorted=False).indices
    frame, row = best // maxima.shape[2], best % maxima.shape[2]
    query = torch.arange(len(best), device=best.device)[:, None]
    values = lines[frame, query, row].flatten(1)
    least = values.topk(min(config.neighbours, values.shape[1])).values[:, -1]
    query, frame, row = (maxima >= least[:, None, None]).nonzero(as_tuple=True)
    line, col = (lines[frame, query, row] >= least[query, None]).nonzero(as_tuple=True)
    query, frame, row = query[line], frame[line], row[line]
    weights = (lines[frame, query, row, col] / config.temperature).exp()
    weighted = weights[:, None] * F.pad(labels[frame, row, col], (0, 1), value=1.0)
    sums = weighted.new_zeros((len(maxima), weighted.shape[1])).index_add_(0, query, weighted)
    return sums[:, :-1] / sums[:, -1:]


def shrink_mask(
    mask: UInt8[np.ndarray, "height width"], grid: tuple[int, int]
) -> UInt8[np.ndarray, "rows cols"]:
    """Reduce a mask to patches. Each patch gets the label of its central pixel.

    `grid` contains the numbers of rows and columns of patches.
    """
    return _resize_nearest(mask, grid)


def labels_to_mask(
    labels: PatchLabels, patch_size: int, size: tuple[int, int]
) -> UInt8[np.ndarray, "height width"]:
    """Convert labels of patches, with one channel for each label, to a mask of label numbers.

    Channels are interpolated bilinearly to the size of the encoder's input. Each channel that is
    not constant is then scaled to [0, 1]. A pixel gets the index of its largest channel. The mask
    is resized to `size`, the height and width of the video.
    """
    sides = [side * patch_size for side in labels.shape[:2]]
    channels = labels.permute(2, 0, 1)[None]
    channels = F.interpolate(channels, size=sides, mode="bilinear", align_corners=False)[0]
    low, high = channels.amin((1, 2), keepdim=True), channels.amax((1, 2), keepdim=True)
    varies = high - low > _CONSTANT * high
    scaled = torch.where(varies, (channels - low) / torch.where(varies, high - low, 1.0), channels)
    return _resize_nearest(scaled.argmax(0).to(torch.uint8).cpu().numpy(), size)


def _resize_nearest(
    numbers: UInt8[np.ndarray, "_ _"], size: tuple[int, int]
) -> UInt8[np.ndarray, "_ _"]:
    resized = Image.fromarray(numbers).resize(size[::-1], Image.Resampling.NEAREST)
    return np.array(resized)
