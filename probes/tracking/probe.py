"""Tracking: do the patches of a block find an object again in later frames of a video?

The sections of this file are: settings, the pass over the frames of each video, the masks of a
video in one block, and the scores of a block.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float64, UInt8
from torch import Tensor

from probes.features.stream import batched, map_ahead
from probes.tracking.pictures import (
    ANIMATION_FRAMES,
    STRIP_FRAMES,
    choose_frames,
    draw_overlay,
    save_animation,
    save_mask,
    save_strip,
)
from probes.tracking.propagation import (
    LabelPropagation,
    PatchFeatures,
    PropagationConfig,
    labels_to_mask,
    shrink_mask,
)
from probes.tracking.scores import (
    DECAYS,
    PERCENTAGES,
    ObjectMask,
    ObjectScores,
    split_objects,
    symmetric_ci95,
    video_estimate,
)
from ssl_bench.composition.compose import changed_settings
from ssl_bench.composition.fields import Count, CountOrZero, Pixels, Temperature, Threads
from ssl_bench.data.samples import IGNORE_INDEX, Dataset, ImageSet, Sample
from ssl_bench.data.splits import sample_ids
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, Resize
from ssl_bench.layers import INNER_FACETS, Facet
from ssl_bench.results import Baseline
from ssl_bench.system.device import to_device
from ssl_bench.system.files import figure_file_name

AREA = "area_ratio"
# Both sides of a resized frame are multiples of the patch size. In DINO's script, the longer side
# is also a multiple of 64.
_LONG_SIDE_MULTIPLE = 64

LayerFacet = tuple[int, Facet]
IndexedMask = UInt8[np.ndarray, "height width"]


@dataclass(frozen=True)
class Tracking(Probe):
    """A training-free probe that propagates the masks of a video's first frame to later frames.

    Each patch gets its label from the most similar patches of earlier frames.

    Attributes:
        protocol: Name of the preset. "dino" is the evaluation of DINO's authors on DAVIS.
        facet: One or several facets (kinds of features) to compare: token, token_normed, key,
            query, value, attn_out, attn_skip, mlp_hidden, mlp_out, or submodules of a block.
        truth: "masks" scores frames that have a mask. "none" only saves the propagated masks. The
            default depends on whether the first video has masks.
        image_size: Shorter side in pixels of the resized frames. It is reduced to a multiple of the
            patch size.
        long_side_multiple: The longer side is reduced to a multiple of this number. The default is
            64, or the patch size if 64 is not a multiple of it.
        keep_aspect_ratio: Whether frames keep their aspect ratio, up to rounding. Otherwise, both
            sides have `image_size` pixels.
        latest_frames: Number of preceding frames whose patches are compared with those of a frame,
            in addition to the first frame of the video.
        radius: Largest distance between compared patches along rows and along columns, in patches.
        neighbours: Number of most similar patches whose labels are propagated.
        temperature: The weight of a label is exp(cosine similarity / temperature).
        panels: Number of videos with figures. They are spread over the dataset.
        save_masks: Whether to save the propagated masks of all frames as PNG files. They are always
            saved if `truth` is "none".
        batch_size: Number of frames in a forward pass.
        num_workers: Number of threads that decode frames.

    Source: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers",
    https://arxiv.org/abs/2104.14294, table 5, and eval_video_segmentation.py of
    https://github.com/facebookresearch/dino/tree/7c446df5.
    """

    protocol: Literal["dino"] = "dino"
    facet: str | Sequence[str] = "token_normed"
    truth: Literal["masks", "none"] = "masks"
    image_size: Pixels = 480
    long_side_multiple: Pixels | None = None
    keep_aspect_ratio: bool = True
    latest_frames: CountOrZero = 7
    radius: CountOrZero = 12
    neighbours: Count = 5
    temperature: Temperature = 0.1
    panels: CountOrZero = 4
    save_masks: bool = False
    batch_size: Count = 2
    num_workers: Threads = 4

    task = "tracking"
    role = "tracking"
    known_facets = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
    has_per_image_values = True
    is_slow = True
    excluded_from_identity = (
        *Probe.excluded_from_identity,
        "truth",
        "panels",
        "save_masks",
        "batch_size",
    )

    def adapt_to_dataset(self, dataset: Dataset, chosen_fields: Collection[str]) -> "Tracking":
        """Return a copy with `truth="none"` if the first video has no mask that can be scored.

        The masks of the first and the last frame are never scored. The probe is returned unchanged
        if any other frame has a mask, if the user has set `truth`, or if the video does not list
        its frames. `chosen_fields` contains the names of the settings that the user has set.
        """
        frames = dataset.val()[0].frames
        if "truth" in chosen_fields or frames is None:
            return self
        scored = (frames[number] for number in range(1, len(frames) - 1))
        has_masks = any(frame.mask is not None for frame in scored)
        return self if has_masks else replace(self, truth="none")

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = (*PERCENTAGES, *DECAYS, AREA) if self.truth == "masks" else (AREA,)
        return list(itertools.product(layers, self.facets, metrics))

    @property
    def resize(self) -> Resize:
        return Resize(
            self.image_size, keep_aspect_ratio=self.keep_aspect_ratio, round_to_patch=True
        )

    def with_squares(self, side: int) -> "Tracking":
        return replace(self, image_size=side, keep_aspect_ratio=False)

    def frame_size(self, height: int, width: int, patch_size: int) -> tuple[int, int]:
        """Return the height and width in pixels of a frame after resizing.

        `height` and `width` are the original size of the frame in pixels.
        """
        short = max(1, self.image_size // patch_size) * patch_size
        if not self.keep_aspect_ratio:
            return short, short
        multiple = self.long_side_multiple or _LONG_SIDE_MULTIPLE
        if self.long_side_multiple is None and multiple % patch_size:
            multiple = patch_size
        longer = self.image_size * max(height, width) / min(height, width)
        # If a frame is almost a square, the longer side could otherwise become the shorter one.
        longer = max(short, int(longer // multiple) * multiple)
        return (short, longer) if width >= height else (longer, short)

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        videos = sample_ids(images.ids, self.panels)
        return {
            path: [layer]
            for layer, facet, video in itertools.product(layers, self.facets, videos)
            for path in self.figure_paths(layer, facet, video)
        }

    def figure_paths(self, layer: int, facet: Facet, video: str) -> tuple[str, str]:
        """Return the paths of the two figures of a video, relative to `ProbeContext.artifacts`.

        The first figure shows some of the frames side by side, and the second figure is an
        animation. `video` is the id of the video.
        """
        name = f"block{layer:02d}_{facet}/{figure_file_name(video)}"
        return f"{self.folder}/{name}", f"{self.folder}-animated/{name}"

    @property
    def folder(self) -> str:
        """Return the name of the folder for figures.

        The folder name consists of the preset's name and the settings that the user has changed.
        """
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        return "_".join([self.protocol, *changed])

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Track the objects of all videos, and yield the scores of all layers and facets.

        A facet is a kind of feature, such as keys.

        Raises:
            DataError: A frame cannot be read, or a video has no mask to score.
            CheckpointError: Features are not finite.
        """
        videos = self.scored_images(context.dataset)
        extractor = context.extractor(context.layers, *self.facets)
        drawn = set(sample_ids(videos.ids, self.panels))
        results: dict[LayerFacet, list[VideoResult]] = {}
        baselines: list[VideoResult] = []
        for index in range(len(videos)):
            video = videos[index]
            is_drawn = video.image_id in drawn
            baseline, own = self._track_video(context, extractor, video, is_drawn=is_drawn)
            baselines.append(baseline)
            for layer_facet, result in own.items():
                results.setdefault(layer_facet, []).append(result)
        for layer_facet, own in results.items():
            yield from score_block(layer_facet, own, baselines)

    def _track_video(
        self, context: ProbeContext, extractor: FeatureExtractor, video: Sample, *, is_drawn: bool
    ) -> tuple["VideoResult", dict[LayerFacet, "VideoResult"]]:
        """Track the objects of one video in all layers and facets (kinds of features).

        `is_drawn` states whether the figures of the video are saved.

        Returns:
            Two results. The first is the result of a baseline, which uses the mask of the first
            frame for all frames. The second contains the result of each layer and facet.
        """
        if video.frames is None or video.mask is None:
            raise DataError(
                f"{video.image_id} must be a video whose first frame has a mask. Add this mask"
            )
        first = np.where(video.mask == IGNORE_INDEX, 0, video.mask).astype(np.uint8)
        # The channel of an object is its position in this list. Channel 0 is the background.
        numbers = np.unique(np.append(first, np.uint8(0)))
        num_frames, (height, width) = len(video.frames), first.shape
        strides = (*context.encoder.strides, extractor.patch_size)
        size = self.frame_size(height, width, max(strides))
        rows, cols = (side // extractor.patch_size for side in size)
        patches = np.searchsorted(numbers, shrink_mask(first, (rows, cols)))
        labels = F.one_hot(torch.from_numpy(patches), len(numbers)).float()
        labels = to_device(labels, context.device)
        config = PropagationConfig(
            self.latest_frames, self.radius, self.neighbours, self.temperature
        )
        baseline_track = VideoTrack(numbers[1:], first)
        tracks: dict[LayerFacet, VideoTrack] = {}
        propagations: dict[LayerFacet, LabelPropagation] = {}
        frames = self._encode(context, extractor, video, size)
        for number, (frame, features) in enumerate(frames):
            is_scored = self.truth == "masks" and 0 < number < num_frames - 1
            truth = frame.mask if is_scored else None
            true = None if truth is None else split_objects(truth, numbers[1:])
            baseline_track.add_frame(first, true)
            for layer_facet, own in features.items():
                if number == 0:
                    propagations[layer_facet] = LabelPropagation(own, labels, config)
                    tracks[layer_facet] = VideoTrack(numbers[1:], first)
                    predicted = first
                else:
                    propagated = propagations[layer_facet].propagate(own)
                    mask = labels_to_mask(propagated, extractor.patch_size, (height, width))
                    predicted = numbers[mask]
                tracks[layer_facet].add_frame(predicted, true)
                if self.save_masks or self.truth == "none":
                    save_mask(predicted, context.artifacts / self._mask_path(layer_facet, frame))
                if is_drawn:
                    tracks[layer_facet].add_picture(number, num_frames, frame, truth)
        if self.truth == "masks" and not baseline_track.scores.region:
            raise DataError(
                f"{video.image_id} has no mask to score, because the first and the last frame are "
                "not scored and no other frame has a mask",
                hint=("probe.truth=none",),
            )
        for layer_facet, track in tracks.items():
            if is_drawn:
                strip, animation = self.figure_paths(*layer_facet, video.image_id)
                heading = f"{context.encoder.name}, block {layer_facet[0]}: {video.image_id}"
                save_strip(track.strip, heading, context.artifacts / strip)
                save_animation(track.animation, context.artifacts / animation)
        return baseline_track.result(), {key: track.result() for key, track in tracks.items()}

    def _encode(
        self,
        context: ProbeContext,
        extractor: FeatureExtractor,
        video: Sample,
        size: tuple[int, int],
    ) -> Iterator[tuple[Sample, dict[LayerFacet, PatchFeatures]]]:
        """Yield each frame of a video with its patch features, by layer and facet.

        A facet is a kind of feature, such as keys. OpenCV resizes the frames to the height and
        width in `size`, as in DINO's script.
        """
        frames = video.frames
        assert frames is not None

        def prepare(number: int) -> tuple[Sample, UInt8[Tensor, "3 height width"]]:
            frame: Sample = frames[number]
            pixels = cv2.resize(frame.image, size[::-1], interpolation=cv2.INTER_LINEAR)
            return frame, torch.from_numpy(pixels).permute(2, 0, 1)

        prepared = map_ahead(
            prepare,
            range(len(frames)),
            num_workers=self.num_workers,
            max_ahead=2 * self.num_workers,
        )
        shown = context.progress(prepared, f"tracking {video.image_id}", len(frames))
        for batch in batched(shown, self.batch_size):
            pixels = torch.stack([pixels for _, pixels in batch]).float() / 255
            features = extractor(pixels, [frame.image_id for frame, _ in batch])
            for row, (frame, _) in enumerate(batch):
                yield (
                    frame,
                    {
                        (layer, facet): own[row]
                        for layer, facets in features.items()
                        for facet, own in facets.items()
                    },
                )

    def _mask_path(self, layer_facet: LayerFacet, frame: Sample) -> Path:
        """Return the path of the file with the predicted mask of a frame.

        The path is relative to the output folder, `ProbeContext.artifacts`. HTML reports do not
        show the files with predicted masks.
        """
        layer, facet = layer_facet
        *folders, name = frame.image_id.split("/")
        return Path(self.folder, "masks", f"block{layer:02d}_{facet}", *folders, f"{name}.png")


# The masks of a video in one block.


@dataclass(frozen=True)
class VideoResult:
    """The scores of one layer and facet (kind of feature) for a video.

    Attributes:
        statistics: Value of each metric for each object. Empty without true masks.
        area_ratio: Predicted area of each object in the last frame, divided by its area in the
            first frame.
        num_scored: Number of scored frames.
    """

    statistics: Mapping[str, Float64[np.ndarray, " objects"]]
    area_ratio: Float64[np.ndarray, " objects"]
    num_scored: int


class VideoTrack:
    """The scores and figures of the predicted masks of one video, collected frame by frame.

    Args:
        objects: Pixel value that represents each object in the masks.
        first: Mask of the first frame, with the number of the object at each pixel.
    """

    def __init__(self, objects: UInt8[np.ndarray, " objects"], first: IndexedMask) -> None:
        self._objects, self._first, self._last = objects, first, first
        self.scores = ObjectScores()
        self.strip: list[tuple[UInt8[np.ndarray, "height width 3"], str]] = []
        self.animation: list[UInt8[np.ndarray, "height width 3"]] = []

    def add_frame(self, predicted: IndexedMask, true: Sequence[ObjectMask] | None) -> None:
        """Store the predicted mask of the next frame, and score it if `true` is given.

        `true` contains the true mask and contour of each object.
        """
        self._last = predicted
        if true is not None:
            self.scores.add_frame(split_objects(predicted, self._objects), true)

    def add_picture(
        self, number: int, num_frames: int, frame: Sample, truth: IndexedMask | None
    ) -> None:
        """Draw the frame that was added last, if a figure of the video contains it.

        A video has two figures: a strip of some frames, and an animation.

        Args:
            number: Index of the frame in the video.
            num_frames: Number of frames in the video.
            frame: The frame.
            truth: True mask of the frame. None if the frame is not scored.
        """
        in_strip = number in choose_frames(num_frames, STRIP_FRAMES)
        in_animation = number in choose_frames(num_frames, ANIMATION_FRAMES)
        if in_strip or in_animation:
            drawn = draw_overlay(frame.image, self._last, truth)
            self.animation += [drawn] * in_animation
            note = ", given" if number == 0 else ""
            if truth is not None:
                note = f", J {100 * float(np.mean(self.scores.region[-1])):.0f} %"
            self.strip += [(drawn, f"frame {number}{note}")] * in_strip

    def result(self) -> VideoResult:
        areas = [
            np.array([np.count_nonzero(mask == number) for number in self._objects], np.float64)
            for mask in (self._first, self._last)
        ]
        statistics = self.scores.statistics() if self.scores.region else {}
        return VideoResult(statistics, areas[1] / areas[0], len(self.scores.region))


# Scores of a block.


def score_block(
    layer_facet: LayerFacet, results: Sequence[VideoResult], baselines: Sequence[VideoResult]
) -> Iterator[Score]:
    """Yield the scores of one layer and facet (kind of feature), averaged over all objects.

    Args:
        layer_facet: The layer and facet (kind of feature).
        results: Result of each video.
        baselines: For each video, the result of using the mask of the first frame for all frames.
    """
    num_videos = len(results)
    details = {
        "objects": sum(len(result.area_ratio) for result in results),
        "frames": sum(result.num_scored for result in results),
    }
    metrics = (*PERCENTAGES, *DECAYS) if results[0].statistics else ()
    for metric in metrics:
        values = [result.statistics[metric] for result in results]
        contributions, estimate = video_estimate(values)
        first_mask = np.concatenate([result.statistics[metric] for result in baselines])
        own = {
            **details,
            "by_video": [float(of_video.mean()) for of_video in values],
            **Baseline("first mask in its place", float(first_mask.mean())).as_details(),
        }
        cell = (*layer_facet, metric)
        if metric in PERCENTAGES:
            ci95 = estimate.ci95()
            yield Score(*cell, estimate.value, ci95, num_videos, own, per_image=contributions)
        else:
            # A decay may be negative. Lower values are better.
            yield Score(*cell, estimate.value, symmetric_ci95(estimate), num_videos, own, unit="")
    _, estimate = video_estimate([result.area_ratio for result in results])
    cell = (*layer_facet, AREA)
    yield Score(*cell, estimate.value, symmetric_ci95(estimate), num_videos, details, unit="")
