"""Linear depth: how well can a linear head predict depth from the patches of each block?

One head is trained for each block and each learning rate, all on the same features of the training
images. Some training images are held out to select the learning rate. The heads then predict the
depth of each pixel of the scored images, and the metrics are averaged over these images.

The sections of this file are: settings, training images, scored images, metrics, and figures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64, UInt8
from PIL import Image
from torch import Tensor

from probes.depth.heads import (
    UPSAMPLING,
    DepthHeads,
    HeadTraining,
    TrainingDepths,
)
from probes.features.journal import Journal
from probes.features.stream import batched, images_per_pass, read_ahead, to_float16
from probes.features.tiers import GIB, StoredFeatures, create_array_file
from probes.features.training_images import (
    LayerGroup,
    TrainingSplit,
    group_layers,
    ids_sha256,
    parse_patch_facet,
    reject_single_block,
    resize_bilinear,
)
from probes.pictures import draw_heading, draw_tile, save_sheet
from ssl_bench.composition.compose import fill_in_guesses
from ssl_bench.composition.fields import (
    Count,
    CountOrZero,
    FilePath,
    FractionBelowOne,
    Pixels,
    Positive,
    PositiveOrZero,
    Rate,
    Threads,
    require_nonempty,
)
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.data.splits import sample_ids, sample_indices
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.intervals import Interval, mean_estimate
from ssl_bench.layers import FacetSpec
from ssl_bench.results import Baseline
from ssl_bench.system.device import to_device, to_float64
from ssl_bench.system.files import cache_folder, figure_file_name, remove_orphans
from ssl_bench.system.process import free_host_memory

UNITS = {
    "delta1": "%",
    "delta2": "%",
    "delta3": "%",
    "rmse": "m",
    "abs_rel": "",
    "log10": "",
    "silog": "",
}
"""Unit of each depth metric, in the order of the results of `image_metrics`."""
_CLS_FACETS = {"token": "cls", "token_normed": "cls_normed"}
_COLOURS = "viridis"
_TILES_PER_ROW = 5

Metrics = Float64[np.ndarray, "images sources rates metrics"]


@dataclass(frozen=True)
class Depth(Probe):
    """A probe that predicts the depth of each pixel with linear heads on the patches of each block.

    The heads of all blocks and all learning rates are trained together on stored features. The
    encoder therefore processes each image only once, except held-out images and drawn images.

    Attributes:
        protocol: Name of the preset. "ssl_bench" has the head and the loss of DINOv2.
        layers_mode: Blocks whose features each head receives. "single" trains a head on each block.
            "multi" trains one head on four evenly spaced blocks up to the last requested layer.
            "last4" trains one head on that layer and the three blocks before it.
        image_size: Side in pixels of the square images that the encoder receives. The default is
            rounded to a multiple of the patch size.
        facet: Features of a patch: token, key, query, value, attn_out, attn_skip, mlp_hidden,
            mlp_out, or a submodule of a block. With token, heads also receive the [CLS] token.
        norm: Normalisation of the features. "standardize" scales each channel to zero mean and unit
            variance on the training set. "final" applies the encoder's final norm. "none" uses the
            output of the block.
        min_depth: Depth of the first bin in metres. Pixels whose depth is not above it count as
            unknown.
        max_depth: Depth of the last bin in metres. Pixels whose depth is not below it count as
            unknown.
        learning_rates: Peak learning rates to compare on the held-out images. The best one is
            selected.
        epochs: Number of passes over the training images.
        images_per_step: Number of images per step, and in a forward pass.
        warmup: Fraction of the steps for the warm-up of the learning rate. In these steps, the loss
            depends only on the mean error of the logarithms of the depths.
        weight_decay: Weight decay of AdamW.
        holdout: Fraction of the training images that are held out to select the learning rate.
        train_images: Maximum number of training images, drawn at random. None for all images.
        panels: Number of scored images to show in figures, spread over the whole set.
        memory_gib: Maximum size of training features in memory in GiB, by default half of the free
            memory. Larger features are stored in a temporary file in `cache`.
        cache: Folder for features and unfinished work, by default the user's cache folder.
        keep_minutes: Minimum time in minutes between two writes of unfinished work. A killed run
            continues from the last write.
        num_workers: Number of threads that decode images.
        guesses: Notes in the results on settings that the authors of the protocol do not specify,
            and on differences from the published protocol. $NAME is replaced by the value of the
            setting NAME.

    Source: Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision",
    https://arxiv.org/abs/2304.07193, section 7.4.
    """

    protocol: Literal["ssl_bench"] = "ssl_bench"
    layers_mode: Literal["single", "multi", "last4"] = "single"
    image_size: Pixels = 512
    facet: str = "token"
    norm: Literal["none", "final", "standardize"] = "standardize"
    min_depth: Positive = 0.001
    max_depth: Positive = 10.0
    learning_rates: Sequence[Rate] = (3e-3, 1e-2, 3e-2)
    epochs: Count = 20
    images_per_step: Count = 8
    warmup: FractionBelowOne = 0.05
    weight_decay: PositiveOrZero = 1e-4
    holdout: FractionBelowOne = 0.1
    train_images: Count | None = None
    panels: CountOrZero = 6
    memory_gib: PositiveOrZero | None = None
    cache: FilePath | None = None
    keep_minutes: PositiveOrZero = 10.0
    num_workers: Threads = 4
    guesses: Sequence[str] = ()

    task = "depth"
    role = "depth"
    has_per_image_values = True
    excluded_from_identity = (
        *Probe.excluded_from_identity,
        *("panels", "memory_gib", "cache", "keep_minutes"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_single_block(self.facet_spec, self.layers_mode)
        require_nonempty("probe.learning_rates", self.learning_rates)
        if self.min_depth >= self.max_depth:
            raise ConfigurationError(
                f"probe.min_depth must be below probe.max_depth, got {self.min_depth} and "
                f"{self.max_depth}",
                hint=("probe.min_depth=0.001",),
            )

    @property
    def facet_spec(self) -> FacetSpec:
        return parse_patch_facet(self.facet, self.norm)

    @property
    def bounds(self) -> tuple[float, float]:
        return self.min_depth, self.max_depth

    @property
    def metrics(self) -> dict[str, str]:
        """Return the names of the scored metrics, with the depth metric that each of them reports.

        For example, "delta1_holdout" and "delta1_oracle" both report "delta1", but select the
        learning rate on different images. `UNITS` lists the depth metrics.
        """
        names = {"delta1_holdout": "delta1"} if self.holdout else {}
        return {**names, "delta1_oracle": "delta1", **{name: name for name in [*UNITS][1:]}}

    def sources(self, layers: Sequence[int]) -> list[LayerGroup]:
        """Return the groups of layers whose features the heads receive.

        A group consists of one layer, or of several layers whose features are concatenated.
        """
        return group_layers(layers, self.layers_mode)

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        sources = self.sources(layers)
        return [
            (source[-1], self.scored_facet, metric) for source in sources for metric in self.metrics
        ]

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "learning_rates": list(self.learning_rates)}

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        shown = [source[-1] for source in self.sources(layers)]
        names = [self.panel_name(image_id) for image_id in sample_ids(images.ids, self.panels)]
        return dict.fromkeys(names, shown)

    def panel_name(self, image_id: str) -> str:
        """Return the file name of the figure of a scored image, given the id of the image."""
        features = [] if self.layers_mode == "single" else [self.layers_mode]
        features += [] if self.scored_facet == "token" else [self.scored_facet]
        return figure_file_name(image_id, prefix="-".join([self.protocol, *features, ""]))

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Train depth heads on the features of each layer, and yield their scores.

        Raises:
            DataError: There are too few training images, or an image has no pixel with a known
                depth.
            MachineError: Neither the memory nor the disk can store the training features.
        """
        yield from DepthRun(self, context).train_and_score()


class DepthRun:
    """A run of the depth probe with one encoder on one dataset.

    The constructor computes no features.

    Attributes:
        sources: Groups of layers. The heads of a source receive the features of all of its layers.
        split: The training images. Some of them are held out to select the learning rate.
        training: Training method of the heads.
    """

    def __init__(self, probe: Depth, context: ProbeContext) -> None:
        self.probe, self.context = probe, context
        self.images, self.scored_images = (
            probe.training_images(context.dataset), probe.scored_images(context.dataset)
        )  # fmt: skip
        self.split = TrainingSplit.draw(
            self.images, max_images=probe.train_images, holdout=probe.holdout, seed=context.seed
        )
        self.sources = probe.sources(context.layers)
        self.cls_facet = _CLS_FACETS.get(probe.scored_facet) if context.encoder.has_cls else None
        facets = [facet for facet in (probe.scored_facet, self.cls_facet) if facet]
        layers = sorted({layer for source in self.sources for layer in source})
        self.extractor = context.extractor(layers, *facets)
        self.training = HeadTraining(
            learning_rates=probe.learning_rates,
            epochs=probe.epochs,
            batch_size=probe.images_per_step,
            warmup=probe.warmup,
            weight_decay=probe.weight_decay,
            standardize=probe.norm == "standardize",
            bounds=probe.bounds,
            seed=context.seed,
        )

    def train_and_score(self) -> Iterator[Score]:
        """Train the heads, draw figures, and yield the scores of all sources (groups of layers)."""
        probe, context = self.probe, self.context
        features = self.compute_features()
        entries = self.split.train_view_indices(views=1)
        mean_depth = self.mean_depth(features.patches.labels[entries])
        journal = self._open_journal()
        heads = self.training.train(
            features, self.sources, entries, context.device, context.progress, journal
        )
        del features
        held_out = [self.split.indices[position] for position in sorted(self.split.held_out)]
        held_out_metrics = self.score(heads, self.images, held_out)[0] if held_out else None
        everything = range(len(self.scored_images))
        metrics, baseline = self.score(heads, self.scored_images, everything, mean_depth)

        # The learning rate of each source is selected on held-out images. If there are none, it is
        # selected on the scored images.
        selection = metrics if held_out_metrics is None else held_out_metrics
        head_indices = selection[..., 0].mean(0).argmax(1).tolist()
        # Save the figures before any score is recorded.
        self._draw_panels(heads, head_indices)
        shared = {
            "num_train_images": len(entries),
            "num_held_out_images": len(held_out),
            "train_ids_sha256": ids_sha256(self.split.ids(self.images)),
            "train_seconds": round(heads.seconds, 3),
            "guesses": fill_in_guesses(probe, probe.guesses),
        }
        for index in range(len(self.sources)):
            by_rate = None if held_out_metrics is None else held_out_metrics[:, index, :, 0].mean(0)
            details = {
                "delta1_by_rate": metrics[:, index, :, 0].mean(0).tolist(),
                "delta1_by_rate_held_out": None if by_rate is None else by_rate.tolist(),
                **self._head_details(heads, index),
                **shared,
            }
            yield from self._source_scores(index, head_indices[index], metrics, baseline, details)
        journal.remove()
        remove_orphans(journal.path.parent)

    # Training images

    def compute_features(self) -> TrainingDepths:
        """Compute the features and the depth maps of the training images.

        Raises:
            DataError: No training image has a pixel with a known depth between the bounds.
        """
        extractor, probe = self.extractor, self.probe
        side, count = probe.image_size // extractor.patch_size, len(self.split.indices)
        shape = (len(extractor.layers), count, side, side, extractor.width(probe.scored_facet))
        limit = free_host_memory() / 2 if probe.memory_gib is None else probe.memory_gib * GIB
        is_small = 2 * prod(shape) <= limit
        self.context.say(
            f"depth: {2 * prod(shape) / GIB:.1f} GiB of training features are stored "
            f"{'in memory' if is_small else 'in a temporary file'} (limit of the memory: "
            f"{limit / GIB:.1f} GiB)"
        )
        folder = cache_folder(probe.cache) / "features"
        features = (
            torch.empty(shape, dtype=torch.float16)
            if is_small
            else create_array_file(folder, shape, np.float16)
        )
        scales = torch.empty(shape[:2])
        cls = torch.empty(*shape[:2], extractor.width(self.cls_facet) if self.cls_facet else 0)
        depths = torch.empty(count, UPSAMPLING * side, UPSAMPLING * side)
        start = 0
        for batch in self._encode(self.images, self.split.indices, "training images"):
            rows = slice(start, start := start + len(batch.samples))
            for number, layer in enumerate(extractor.layers):
                half, scales[number, rows] = to_float16(batch.patches[layer])
                features[number, rows] = half
                cls[number, rows] = batch.cls[layer]
            for row, sample in zip(range(rows.start, rows.stop), batch.samples, strict=True):
                depth = torch.from_numpy(_require_depth(sample))[None, None]
                depths[row] = F.interpolate(depth, depths.shape[1:], mode="nearest-exact")[0, 0]
        if not self.training.is_known(depths[self.split.train_view_indices(views=1)]).any():
            raise _no_depth_error(f"{self.images.name} {self.images.split}", probe.bounds)
        tier = "memory" if is_small else "disk"
        stored = StoredFeatures(extractor.layers, features, depths, scales=scales, tier=tier)
        return TrainingDepths(stored, cls)

    def mean_depth(self, depths: Float[Tensor, "images rows cols"]) -> Float[Tensor, "rows cols"]:
        """Return the mean depth map over images, which a baseline predicts for every image.

        At each position, the mean is over the images with a known depth at this position. If no
        image has a known depth at a position, the mean over all positions is used.
        """
        is_known = self.training.is_known(depths)
        mean = (depths * is_known).sum(0) / is_known.sum(0)
        return torch.where(is_known.any(0), mean, depths[is_known].mean())

    def _encode(
        self, images: ImageSet, indices: Sequence[int], label: str
    ) -> Iterator["EncodedBatch"]:
        probe, extractor = self.probe, self.extractor
        size = probe.image_size

        def prepare(sample: Sample) -> tuple[Sample, Float[Tensor, "3 size size"]]:
            pixels = torch.from_numpy(sample.image).permute(2, 0, 1).float() / 255
            return sample, resize_bilinear(pixels, size, size)

        items = read_ahead(images, indices, prepare, num_workers=probe.num_workers)
        shown = self.context.progress(items, label, len(indices))
        num_images = images_per_pass(probe.images_per_step, size, self.context.device)
        for batch in batched(shown, num_images):
            samples = [sample for sample, _ in batch]
            ids = [sample.image_id for sample in samples]
            features = extractor(torch.stack([pixels for _, pixels in batch]), ids)
            patches = {layer: own[probe.scored_facet] for layer, own in features.items()}
            empty = torch.empty(len(batch), 0, device=self.context.device)
            cls = {
                layer: own[self.cls_facet] if self.cls_facet else empty
                for layer, own in features.items()
            }
            yield EncodedBatch(samples, patches, cls)

    # Scored images

    def score(
        self,
        heads: DepthHeads,
        images: ImageSet,
        indices: Sequence[int],
        mean_depth: Float[Tensor, "rows cols"] | None = None,
    ) -> tuple[Metrics, Float64[np.ndarray, "_images metrics"]]:
        """Compute the depth metrics of all heads on each image, and optionally those of a baseline.

        Args:
            heads: Heads for each source (group of layers) and learning rate.
            images: Set of images.
            indices: Indices of the images to score.
            mean_depth: Depth map that the baseline predicts for every image. None for no baseline.

        Returns:
            The metrics of the heads, with shape images x sources x rates x metrics, and the metrics
            of the baseline, with shape images x metrics. Without `mean_depth`, the second array is
            empty.

        Raises:
            DataError: An image has no pixel with a known depth between the bounds.
        """
        metrics, constant = [], []
        for batch in self._encode(images, indices, f"{images.split} images"):
            by_source = self._predict(heads, batch)
            for number, sample in enumerate(batch.samples):
                depth = torch.from_numpy(_require_depth(sample))
                if not self.training.is_known(depth).any():
                    raise _no_depth_error(sample.image_id, self.probe.bounds)
                own = [
                    image_metrics(resize_depth(maps[:, number], depth), depth, self.probe.bounds)
                    for maps in by_source
                ]
                metrics.append(torch.stack(own).cpu().numpy())
                if mean_depth is not None:
                    predicted = resize_depth(mean_depth[None], depth)
                    constant.append(image_metrics(predicted, depth, self.probe.bounds)[0].numpy())
        return np.stack(metrics), np.reshape(constant, (-1, len(UNITS)))

    @torch.no_grad()
    def _predict(
        self, heads: DepthHeads, batch: "EncodedBatch"
    ) -> list[Float[Tensor, "rates images rows cols"]]:
        return [
            heads.predict(
                index,
                torch.cat([batch.patches[layer] for layer in source], -1),
                torch.cat([batch.cls[layer] for layer in source], -1),
            )
            for index, source in enumerate(self.sources)
        ]

    # Scores

    def _source_scores(
        self,
        index: int,
        head_index: int,
        metrics: Metrics,
        baseline: Float64[np.ndarray, "images metrics"],
        details: Mapping[str, Any],
    ) -> Iterator[Score]:
        """Yield the scores of one source (group of blocks whose features are the input of a head).

        "delta1_oracle" uses the learning rate with the highest delta1 on the scored images. All
        other metrics use the learning rate that was selected on held-out images, if there are any.

        `index` is the index of the source, and `head_index` is the index of the selected learning
        rate. `metrics` contains the depth metrics of all images, sources and learning rates.
        """
        rates = list(self.probe.learning_rates)
        best = int(metrics[:, index, :, 0].mean(0).argmax())
        for metric, column in self.probe.metrics.items():
            choice, number = (
                best if metric == "delta1_oracle" else head_index,
                [*UNITS].index(column),
            )
            values = metrics[:, index, choice, number]
            is_edge = len(rates) > 1 and choice in (0, len(rates) - 1)
            edge = f"the chosen learning rate {rates[choice]:g} is at the edge of its grid"
            constant = {"mean depth of the training images": float(baseline[:, number].mean())}
            own = {
                "learning_rate": rates[choice],
                "learning_rates": rates,
                **details,
                **Baseline.best(constant).as_details(),
                "warnings": [*details["warnings"], *([edge] if is_edge else [])],
            }
            yield Score(
                self.sources[index][-1],
                self.probe.scored_facet,
                metric,
                float(values.mean()),
                mean_interval(values, UNITS[column]),
                len(values),
                own,
                per_image=values,
                unit=UNITS[column],
            )

    def _head_details(self, heads: DepthHeads, index: int) -> dict[str, Any]:
        width, constant = heads.weight.shape[-1], heads.constant_channels[index]
        degenerate = "degenerate: all training patches have the same features"
        return {
            "constant_features": constant == width,
            "constant_channels_percent": round(100 * constant / width, 1),
            "warnings": [degenerate] if constant == width else [],
            "layers": list(self.sources[index]),
        }

    # Files

    def _draw_panels(self, heads: DepthHeads, head_indices: Sequence[int]) -> None:
        """Save figures of some scored images: photograph, true depth, predictions and a colour bar.

        `head_indices` contains the index of the selected learning rate of each source (group of
        layers).
        """
        indices = sample_indices(self.scored_images.ids, self.probe.panels)
        for batch in self._encode(self.scored_images, indices, "images to draw"):
            by_source = self._predict(heads, batch)
            for number, sample in enumerate(batch.samples):
                depth = torch.from_numpy(_require_depth(sample))
                maps = {"depth": torch.where(self.training.is_known(depth), depth, torch.nan)}
                for source, rate, predicted in zip(
                    self.sources, head_indices, by_source, strict=True
                ):
                    title = f"block{'s' * (len(source) > 1)} {', '.join(map(str, source))}"
                    maps[title] = resize_depth(predicted[rate, number, None], depth)[0].cpu()
                path = self.context.artifacts / self.probe.panel_name(sample.image_id)
                draw_depths(sample.image, {k: v.numpy() for k, v in maps.items()}, path)

    def _open_journal(self) -> Journal:
        """Open a file that stores unfinished work, so that an interrupted run can continue."""
        ids = self.split.ids(self.images)
        header = {
            **self.context.encoder.identity(),
            "dtype": str(self.context.dtype),
            "settings": self.probe.settings(),
            "facet": self.probe.scored_facet,
            "training": repr(self.training),
            "images": (self.images.fingerprint(), ids, sorted(self.split.held_out)),
            "sources": self.sources,
        }
        return Journal(
            cache_folder(self.probe.cache) / "heads",
            "depth",
            header,
            say=self.context.say,
            minutes=self.probe.keep_minutes,
            is_cache=True,
        )


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of samples with their patch features and [CLS] tokens, by layer.

    If the heads do not use [CLS] tokens, the width of `cls` is 0.
    """

    samples: Sequence[Sample]
    patches: Mapping[int, Float[Tensor, "batch rows cols dim"]]
    cls: Mapping[int, Float[Tensor, "batch cls_dim"]]


def _require_depth(sample: Sample) -> Float32[np.ndarray, "height width"]:
    if sample.depth is None:
        raise DataError(f"{sample.image_id} has no depth map, but every image needs one. Add it")
    return sample.depth


def _no_depth_error(name: str, bounds: tuple[float, float]) -> DataError:
    return DataError(
        f"{name} has no pixel with a depth between {bounds[0]:g} and {bounds[1]:g} metres. Check "
        "the unit of the depth maps, or change the range",
        hint=("probe.max_depth={number}",),
    )


# Metrics of an image.


def resize_depth(
    predicted: Float[Tensor, "maps rows cols"], depth: Float[Tensor, "height width"]
) -> Float[Tensor, "maps height width"]:
    """Resize predicted depth maps to the size of the true map `depth` by bilinear interpolation."""
    return F.interpolate(predicted[None], depth.shape, mode="bilinear")[0]


def image_metrics(
    predicted: Float[Tensor, "heads height width"],
    depth: Float[Tensor, "height width"],
    bounds: tuple[float, float],
) -> Float64[Tensor, "heads metrics"]:
    """Return the depth metrics of one image for each head, in the order of `UNITS`.

    The metrics compare the predicted depth d with the true depth t of pixels with a known depth:

    - delta1, delta2, delta3: percentage of pixels with max(d / t, t / d) < 1.25, 1.25^2, 1.25^3.
    - rmse: root of the mean of (d - t)^2.
    - abs_rel: mean of |d - t| / t.
    - log10: mean of |log10 d - log10 t|.
    - silog: 100 times the standard deviation of ln d - ln t.

    Args:
        predicted: Predicted depth in metres.
        depth: True depth in metres.
        bounds: Only pixels whose true depth is between these two values are scored.
    """
    low, high = bounds
    is_known = ((depth > low) & (depth < high)).to(predicted.device)
    d, t = to_float64(predicted[:, is_known]), to_float64(to_device(depth, predicted.device))
    t = t[is_known.to(t.device)]
    ratio = torch.maximum(d / t, t / d)
    log_ratio = d.log() - t.log()
    deltas = [100 * (ratio < 1.25**power).double().mean(1) for power in (1, 2, 3)]
    rmse = (d - t).square().mean(1).sqrt()
    abs_rel = ((d - t).abs() / t).mean(1)
    log10 = log_ratio.abs().mean(1) / np.log(10)
    silog = 100 * log_ratio.std(1, correction=0)
    return torch.stack([*deltas, rmse, abs_rel, log10, silog], 1)


def mean_interval(values: Float64[np.ndarray, " images"], unit: str) -> Interval | None:
    """Return the 95 % confidence interval of the mean of non-negative values.

    If the unit is "%", the upper end of the interval is at most 100.
    """
    # `mean_estimate` limits intervals to 100. Values that are no percentages are scaled to [0, 1].
    scale = 1.0 if unit == "%" else float(values.max()) or 1.0
    ci95 = mean_estimate(values / scale).ci95()
    return None if ci95 is None else (scale * ci95[0], scale * ci95[1])


# Figures.


def draw_depths(
    image: UInt8[np.ndarray, "height width 3"],
    maps: Mapping[str, Float32[np.ndarray, "height width"]],
    path: Any,
) -> None:
    """Save a figure of an image and its depth maps with a common colour scale.

    The heading of the figure states the range of the colour scale.

    Args:
        image: The image.
        maps: Depth maps in metres by title. The range of the first map determines the colours.
            Pixels with NaN are white.
        path: File of the figure.
    """
    first = next(iter(maps.values()))
    low, high = float(np.nanmin(first)), float(np.nanmax(first))
    tiles = [draw_tile(image, "photograph")]
    tiles += [draw_tile(colour_depth(depth, low, high), title) for title, depth in maps.items()]
    bar = np.linspace(low, high, 240, dtype=np.float32)[None].repeat(12, 0)
    heading = draw_heading(f"depth from {low:.2f} m (dark blue) to {high:.2f} m (yellow)")
    legend = Image.fromarray(colour_depth(bar, low, high))
    rows = [tiles[i : i + _TILES_PER_ROW] for i in range(0, len(tiles), _TILES_PER_ROW)]
    save_sheet([[heading, legend], *rows], path)


def colour_depth(
    depth: Float32[np.ndarray, "height width"], low: float, high: float
) -> UInt8[np.ndarray, "height width 3"]:
    """Convert a depth map to an RGB image, from dark blue at `low` to yellow at `high`.

    Pixels with NaN are white.
    """
    share = ((depth - low) / max(high - low, 1e-6)).clip(0, 1)
    colours = 255 * matplotlib.colormaps[_COLOURS](share)[..., :3]
    return np.where(np.isnan(depth)[..., None], 255, colours.round()).astype(np.uint8)
