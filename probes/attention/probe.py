"""Attention maps: which patches does the [CLS] token attend to in each block?

The sections of this file are: settings, the pass over the images, masks and scores of an image,
scores of a block, and figures.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor

from probes.attention.recording import AttentionRecorder
from probes.features.stream import batched, read_ahead
from probes.features.training_images import resize_bicubic
from probes.pictures import Picture, blocks_name, draw_heading, save_sheet
from ssl_bench.composition.fields import CountOrZero, OpenFraction, Pixels, Threads
from ssl_bench.data.samples import IGNORE_INDEX, Dataset, ImageSet, Sample
from ssl_bench.data.splits import sample_ids, sample_indices
from ssl_bench.errors import DataError, UnsupportedEncoderError, with_hint
from ssl_bench.evaluation import SIZE_FIELDS, Probe, ProbeContext, Score
from ssl_bench.features import Resize
from ssl_bench.intervals import mean_estimate
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.results import Baseline
from ssl_bench.results.per_image import ImageCurve
from ssl_bench.scores import centre_mask, count_constant_masks, object_counts, object_iou
from ssl_bench.system.files import figure_file_name

METRICS = ("jaccard", "jaccard_holdout", "jaccard_best_head", "jaccard_mean_map")
ENTROPY = "entropy"
FACET = "cls"
PERCENTILES = (1.0, 99.0)
_TILE_HEIGHT = 192
_TILES_PER_ROW = 4
# Height of the maps in a figure of all blocks.
_SHEET_TILE_HEIGHT = 160
# If a map varies by less than this share of its largest value, it is constant up to rounding.
_CONSTANT = 1e-5
# Sums of attention that differ by less than this value are equal up to rounding.
_ROUNDING = 1e-9

Maps = Float64[Tensor, "*some rows cols"]
Counts = Int64[np.ndarray, "heads 4"]


@dataclass(frozen=True)
class Attention(Probe):
    """A probe that draws the attention of [CLS] to the patches and compares it with object masks.

    Attributes:
        protocol: Name of the preset. "dino" sets `mass` to 0.6, as DINO's authors do.
        truth: Masks to compare with: "classes" for class masks, "object" for masks of one object,
            or "none". In class masks, all classes except class 0 count as the object. The default
            depends on the dataset. For class masks whose class 0 is not called background, the
            default is "none".
        mass: Fraction of a head's attention to patches that its predicted mask covers. The mask
            consists of the fewest patches that reach this fraction.
        panels: Number of images to draw in figures, spread over the dataset. With `truth="none"`,
            only these images are encoded. If `panels` is 0, all images are encoded and none is
            drawn.
        image_size: Side in pixels of the squares that images are resized to without keeping their
            aspect ratio, a multiple of the patch size. By default, images keep their size, and
            their sides are reduced to multiples of the patch size.
        max_side: Maximum length of the longer side in pixels. Larger images are reduced to this
            length. The setting has no effect if `image_size` is set.
        num_workers: Number of threads that decode images.

    Source: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers",
    https://arxiv.org/abs/2104.14294, figure 4, and visualize_attention.py of
    https://github.com/facebookresearch/dino/tree/7c446df5.
    """

    protocol: Literal["dino"] = "dino"
    truth: Literal["classes", "object", "none"] = "classes"
    mass: OpenFraction = 0.6
    panels: CountOrZero = 8
    image_size: Pixels | None = None
    max_side: Pixels | None = 640
    num_workers: Threads = 4

    task = "attention"
    has_per_image_values = True
    # `truth` is excluded, because scores with both kinds of true masks are comparable.
    excluded_from_identity = (*Probe.excluded_from_identity, "truth", "panels")

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        if "saliency" in roles:
            return {"truth": "object"}
        return {} if "segmentation" in roles else {"truth": "none"}

    def adapt_to_dataset(self, dataset: Dataset, chosen_fields: Collection[str]) -> "Attention":
        """Return a copy with `truth="none"` if class 0 of the dataset is not called background.

        If the probe does not use class masks, or if the user has set `truth`, return the probe
        unchanged. `chosen_fields` contains the names of the settings that the user has set.
        """
        if self.truth != "classes" or "truth" in chosen_fields:
            return self
        has_background = "background" in dataset.val().class_names[:1]
        return self if has_background else replace(self, truth="none")

    @property
    def role(self) -> str:
        return {"classes": "segmentation", "object": "saliency", "none": "images"}[self.truth]

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = (ENTROPY,) if self.truth == "none" else (*METRICS, ENTROPY)
        return [(layer, FACET, metric) for layer in layers for metric in metrics]

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if self.truth == "none":
            # Only the images in figures are encoded, so their number affects the scores.
            settings["panels"] = self.panels
        if self.image_size is not None:
            del settings["max_side"]
        unset = {name for name in SIZE_FIELDS if settings.get(name) is None}
        return {name: value for name, value in settings.items() if name not in unset}

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.images() if self.truth == "none" else dataset.val()

    def check_encoder(self, encoder: Encoder | EncoderIdentity) -> None:
        if not encoder.has_cls:
            raise UnsupportedEncoderError(
                f"{encoder.name} has no [CLS] token, but this probe draws the attention of [CLS]",
                hint=("--task", "pca"),
            )

    @property
    def resize(self) -> Resize:
        if self.image_size is not None:
            return Resize(self.image_size)
        return Resize(None, keep_aspect_ratio=True, max_side=self.max_side)

    def with_squares(self, side: int) -> "Attention":
        return replace(self, image_size=side)

    def prepare(self, sample: Sample, patch_size: int) -> Float[Tensor, "3 height width"]:
        """Resize an image so that its sides are multiples of the patch size.

        Return the RGB values of the resized image, in [0, 1]. The interpolation is bicubic.
        """
        sides = self.resize.output_size(*sample.image.shape[:2])
        height, width = (max(patch_size, side - side % patch_size) for side in sides)
        return resize_bicubic(sample.image, height, width)

    @property
    def folder(self) -> str:
        """Return the folder name for figures, with `image_size` if this setting is set."""
        return self.protocol if self.image_size is None else f"{self.protocol}-{self.image_size}px"

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        figures: dict[str, Sequence[int]] = {}
        for image_id in sample_ids(images.ids, self.panels) if self.panels else []:
            figures[f"{self.folder}/{_sheet_name(layers, image_id)}"] = layers
            for layer in layers:
                figures[f"{self.folder}/{_tile_name(layer, image_id)}"] = [layer]
        return figures

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the attention maps of all requested layers, with one forward pass for each image.

        Raises:
            UnsupportedEncoderError: A block has no softmax attention between all tokens of an
                image.
            DataError: An image has no mask to score with.
            CheckpointError: The encoder returns NaN for an image.
        """
        images = self.scored_images(context.dataset)
        drawn_ids = set(sample_ids(images.ids, self.panels)) if self.panels else set()
        numbers: Sequence[int] = range(len(images))
        if self.truth == "none" and self.panels:
            numbers = sample_indices(images.ids, self.panels)
        if len(numbers) < len(images):
            line = f"attention: only {len(numbers)} of {len(images)} images are encoded"
            context.say(with_hint(line, hint=("--pictures", str(len(images)))))
        results: dict[int, list[AttentionScores]] = {layer: [] for layer in context.layers}
        # Any kind of feature would do, because only the attention is used. "cls" is small, and the
        # extractor checks that it is finite.
        record = AttentionRecorder(context.extractor(context.layers, "cls"))
        for sample, pixels in self._read(context, images, numbers):
            weights = self._patch_maps(
                context.encoder, pixels, record(pixels[None], [sample.image_id])
            )
            truth = self._object_mask(sample)
            for layer, maps in weights.items():
                results[layer].append(score_image(maps, truth, self.mass))
            if sample.image_id in drawn_ids:
                own = {layer: results[layer][-1] for layer in weights}
                self._draw(context, sample, weights, own)
        for layer in context.layers:
            yield from score_block(layer, results[layer], has_truth=self.truth != "none")

    def _read(
        self, context: ProbeContext, images: ImageSet, numbers: Sequence[int]
    ) -> Iterator[tuple[Sample, Float[Tensor, "3 height width"]]]:
        patch_size = context.encoder.patch_size

        def prepare(sample: Sample) -> tuple[Sample, Float[Tensor, "3 height width"]]:
            return sample, self.prepare(sample, patch_size)

        items = read_ahead(images, numbers, prepare, num_workers=self.num_workers)
        yield from context.progress(items, "attention", len(numbers))

    def _patch_maps(
        self,
        encoder: Encoder,
        pixels: Float[Tensor, "3 height width"],
        weights: Mapping[int, Float[Tensor, "1 heads 1 tokens"]],
    ) -> dict[int, Maps]:
        """For each block, return the attention of [CLS] to the patches (heads x rows x cols).

        `weights` contains the attention of [CLS] to all tokens, by block.
        """
        grid = pixels.shape[1] // encoder.patch_size, pixels.shape[2] // encoder.patch_size
        prefix = encoder.num_prefix_tokens
        return {
            layer: own[0, :, 0, prefix:].cpu().double().unflatten(1, grid)
            for layer, own in weights.items()
        }

    def _object_mask(self, sample: Sample) -> UInt8[np.ndarray, "height width"] | None:
        """Return the true mask of the object in an image, or None if the probe uses no true masks.

        The mask is 1 for the object, 0 for the background, and `IGNORE_INDEX` for pixels that are
        not scored.
        """
        if self.truth == "none":
            return None
        if sample.mask is None:
            raise DataError(
                f"{sample.image_id} has no object mask to compare the attention with",
                hint=("probe.truth=none",),
            )
        return np.where(sample.mask == IGNORE_INDEX, IGNORE_INDEX, sample.mask > 0).astype(np.uint8)

    def _draw(
        self,
        context: ProbeContext,
        sample: Sample,
        weights: Mapping[int, Maps],
        results: Mapping[int, "AttentionScores"],
    ) -> None:
        """Draw the attention maps of one image: a figure for each block, and one for all blocks.

        By block, `weights` contains the attention maps, and `results` contains their scores.
        """
        folder = context.artifacts / self.folder
        shape = (sample.image.shape[0], sample.image.shape[1])
        photograph = Picture(sample.image, (sample.image_id,), shape, _TILE_HEIGHT)
        columns = []
        for layer, maps in weights.items():
            names = ["mean of heads", *(f"head {head}" for head in range(len(maps)))]
            column = [
                Picture(to_colours(values), (f"block {layer}, {name}{note}",), shape, _TILE_HEIGHT)
                for values, name, note in zip(
                    (maps.mean(0), *maps), names, results[layer].notes, strict=True
                )
            ]
            tiles = [picture.tile() for picture in (photograph, *column)]
            save_sheet(
                list(batched(tiles, _TILES_PER_ROW)), folder / _tile_name(layer, sample.image_id)
            )
            columns.append([replace(one, height=_SHEET_TILE_HEIGHT).tile() for one in column])
        first = replace(photograph, height=_SHEET_TILE_HEIGHT).tile()
        blank = Image.new("RGB", first.size, "white")
        rows = [
            [first if number == 0 else blank, *(tile for tile in row if tile is not None)]
            for number, row in enumerate(zip_longest(*columns))
        ]
        line = (
            f"{context.encoder.name}: attention of [CLS] to the patches. In each map, the lowest "
            "attention is dark blue and the highest is yellow"
        )
        path = folder / _sheet_name(list(weights), sample.image_id)
        save_sheet([[draw_heading(line)], *rows], path)


def _tile_name(layer: int, image_id: str) -> str:
    return f"block{layer:02d}/{figure_file_name(image_id)}"


def _sheet_name(layers: Sequence[int], image_id: str) -> str:
    return f"{blocks_name(layers)}/{figure_file_name(image_id)}"


# Masks and scores of an image.


@dataclass(frozen=True)
class AttentionScores:
    """The scores of the attention maps of one block for one image.

    Attributes:
        jaccard: Jaccard index (IoU) in percent between the true mask and the mask of each head.
            None without a true mask.
        jaccard_mean_map: Jaccard index in percent between the true mask and a mask from the mean
            attention map of all heads. NaN without a true mask.
        baseline_jaccard: Jaccard index in percent of each image-independent baseline, such as a box
            in the centre. The keys are the names of the baselines.
        has_object: Whether the true mask has a pixel of the object.
        entropy: Entropy of the map of each head, divided by the logarithm of the number of patches.
        patch_share: Fraction of each head's attention that goes to patches. The rest goes to [CLS]
            and registers.
        is_degenerate: Whether the maps of all heads are constant up to rounding.
    """

    jaccard: Float64[np.ndarray, " heads"] | None
    jaccard_mean_map: float
    baseline_jaccard: Mapping[str, float]
    has_object: bool
    entropy: Float64[np.ndarray, " heads"]
    patch_share: Float64[np.ndarray, " heads"]
    is_degenerate: bool

    @property
    def notes(self) -> list[str]:
        """Return a text for the title of each attention map, such as ": Jaccard 45 %".

        The first text is for the mean attention map over all heads. Each further text is for the
        attention map of one head. Without a true mask, all texts are empty.
        """
        if self.jaccard is None:
            return [""] * (1 + len(self.entropy))
        return [f": Jaccard {value:.0f} %" for value in (self.jaccard_mean_map, *self.jaccard)]


def score_image(
    maps: Maps, truth: UInt8[np.ndarray, "height width"] | None, mass: float
) -> AttentionScores:
    """Score the attention maps of all heads of one block for one image.

    Args:
        maps: Attention of [CLS] to the patches, with shape heads x rows x cols.
        truth: True mask: 1 for the object, 0 for the background, `IGNORE_INDEX` for pixels that are
            not scored.
        mass: Fraction of the attention to patches that each predicted mask covers.
    """
    entropy = entropy_share(maps)
    patch_share = maps.sum((1, 2)).numpy()
    is_degenerate = bool(is_constant(maps).all())
    if truth is None:
        return AttentionScores(None, math.nan, {}, False, entropy, patch_share, is_degenerate)
    masks = mass_masks(torch.cat([maps, maps.mean(0, keepdim=True)]), mass)
    *heads, mean_map = object_iou(mask_counts(masks, truth))
    centre = object_counts(centre_mask(truth.shape), truth)
    baseline_jaccard = {
        name: float(object_iou(counts)[0])
        for name, counts in count_constant_masks(centre[None]).items()
    }
    return AttentionScores(
        jaccard=np.array(heads),
        jaccard_mean_map=float(mean_map),
        baseline_jaccard=baseline_jaccard,
        has_object=bool((truth == 1).any()),
        entropy=entropy,
        patch_share=patch_share,
        is_degenerate=is_degenerate,
    )


def patch_shares(maps: Maps) -> Float64[Tensor, "*some patches"]:
    """Divide each attention map by its sum.

    An attention map that is zero everywhere becomes constant, so that every map has the sum 1.
    """
    values = maps.flatten(-2)
    totals = values.sum(-1, keepdim=True)
    return torch.where(totals > 0, values / totals.clamp(min=1e-300), 1 / values.shape[-1])


def mass_masks(maps: Maps, mass: float) -> Bool[Tensor, "*some rows cols"]:
    """For each attention map, return the smallest mask with the fraction `mass` of the attention.

    Patches are added to a mask by descending attention. Equal patches are added in row-major order.

    Source: `threshold` in visualize_attention.py of DINO.
    """
    shares = patch_shares(maps)
    ordered, order = shares.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    masks = torch.zeros_like(shares, dtype=torch.bool)
    masks.scatter_(-1, order, before < mass - _ROUNDING)
    return masks.unflatten(-1, maps.shape[-2:])


def mask_counts(
    masks: Bool[Tensor, "heads rows cols"], truth: UInt8[np.ndarray, "height width"]
) -> Counts:
    """Count the pixels in each mask of patches, in the true mask, and in both masks.

    A pixel belongs to the patch that contains its centre.

    Returns:
        Four numbers for each mask of patches: the pixels in both masks, the pixels in the mask of
        patches, the pixels in the true mask, and all scored pixels.
    """
    heads, rows, cols = masks.shape
    numbers = torch.arange(rows * cols, dtype=torch.float32).view(1, 1, rows, cols)
    patches = (
        F.interpolate(numbers, size=truth.shape, mode="nearest-exact").long().flatten().numpy()
    )
    kept = masks.view(heads, rows * cols).long().numpy()

    def count(pixels: Bool[np.ndarray, "height width"]) -> Int64[np.ndarray, " patches"]:
        return np.bincount(patches[pixels.flatten()], minlength=rows * cols)

    true, scored = count(truth == 1), count(truth != IGNORE_INDEX)
    counts = (kept @ true, kept @ scored, [true.sum()] * heads, [scored.sum()] * heads)
    return np.stack(counts, 1).astype(np.int64)


def entropy_share(maps: Maps) -> Float64[np.ndarray, " *some"]:
    """Return the entropy of each attention map, divided by its maximum.

    The maximum entropy for N patches is log N, for the same attention to all patches.
    """
    shares = patch_shares(maps)
    most = math.log(max(2, shares.shape[-1]))
    return (torch.special.entr(shares).sum(-1) / most).numpy()


def is_constant(maps: Maps) -> Bool[Tensor, " *some"]:
    values = maps.flatten(-2)
    largest = values.amax(-1)
    return largest - values.amin(-1) <= _CONSTANT * largest


# Scores of a block.


def score_block(
    layer: int, results: Sequence[AttentionScores], *, has_truth: bool
) -> Iterator[Score]:
    """Yield the scores of one block's attention maps, averaged over all images.

    With true masks, yield the Jaccard indices in `METRICS` and the entropy of the attention maps.
    Without true masks, yield only the entropy. `results` contains the scores of each image.
    """
    num_images = len(results)
    shared = {"degenerate_percent": 100 * float(np.mean([one.is_degenerate for one in results]))}
    if has_truth:
        by_head = np.array([one.jaccard for one in results])
        heads = ImageCurve("jaccard", dict(enumerate(by_head.T)), kind="percent")
        held_out, chosen = heads.choose_held_out()
        values = {
            "jaccard": by_head.mean(1),
            "jaccard_holdout": held_out,
            "jaccard_best_head": by_head.max(1),
            "jaccard_mean_map": np.array([one.jaccard_mean_map for one in results]),
        }
        own_details = {
            "jaccard": {"by_head": by_head.mean(0).tolist(), "best_head": heads.find_best_layer()},
            "jaccard_holdout": {"heads": chosen},
        }
        names = results[0].baseline_jaccard
        baselines = {
            name: float(np.mean([one.baseline_jaccard[name] for one in results])) for name in names
        }
        shared |= {
            **Baseline.best(baselines).as_details(),
            "images_without_object": sum(not one.has_object for one in results),
        }
        for metric in METRICS:
            estimate = mean_estimate(values[metric])
            details = {**shared, **own_details.get(metric, {})}
            cell, number = (layer, FACET, metric), (estimate.value, estimate.ci95())
            yield Score(*cell, *number, num_images, details, per_image=values[metric])
    entropy = np.array([one.entropy for one in results])
    # `mean_estimate` limits the interval to 100 %, which is an entropy of 1.
    estimate = mean_estimate(100 * entropy.mean(1))
    percents = estimate.ci95()
    ci95 = None if percents is None else (percents[0] / 100, percents[1] / 100)
    details = {
        "degenerate_percent": shared["degenerate_percent"],
        "by_head": entropy.mean(0).tolist(),
        "patch_share_by_head": np.mean([one.patch_share for one in results], 0).tolist(),
    }
    value = estimate.value / 100
    yield Score(layer, FACET, ENTROPY, value, ci95, num_images, details, unit="")


def to_colours(one_map: Float64[Tensor, "rows cols"]) -> UInt8[np.ndarray, "rows cols 3"]:
    """Convert an attention map to an RGB image with viridis, the colour map of DINO's script.

    The 1st percentile of the map is dark blue, and the 99th percentile is yellow.
    """
    values = one_map.numpy()
    low, high = np.percentile(values, PERCENTILES)
    share = (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)
    return (
        (255 * matplotlib.colormaps["viridis"](share.clip(0, 1))[..., :3]).round().astype(np.uint8)
    )
