"""Evaluate probes on the blocks of a frozen encoder.

`Probe` is the base class of all probes. `Evaluation.run` computes the results of a probe that are
missing from the results folder. Each result is saved as a record as soon as it is computed.
"""

import math
import time
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import ssl_bench
from ssl_bench.composition.compose import changed_settings, load_protocol_values
from ssl_bench.composition.fields import check_fields, require_type
from ssl_bench.data.corruptions import corruption_settings, find_corruption
from ssl_bench.data.files.readable import (
    ReadableDataset,
    count_shared_files,
    left_out_label,
    summarize_left_out,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.splits import CachedDataset
from ssl_bench.errors import ConfigurationError, UnsupportedEncoderError, with_hint
from ssl_bench.features import FeatureExtractor, Resize
from ssl_bench.intervals import interval_contains
from ssl_bench.layers import Facet, FacetSpec, parse_facets
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.results import Record, ResultKey, ResultStore, block_stride, encoder_id, versions
from ssl_bench.results.record import (
    CORRUPTION_KEY,
    TRAINING_IMAGES_KEY,
    PerImage,
    PerImageKind,
    TrainingImages,
)
from ssl_bench.results.store import summarise_problems
from ssl_bench.shared_features import SharedExtractor, SharedFeatures
from ssl_bench.system.device import PeakMemory, describe_device
from ssl_bench.system.files import (
    figures_folder_name,
    figures_folder_prefix,
    file_name,
    mark_as_output,
)
from ssl_bench.system.output import (
    format_duration,
    format_memory,
    format_rate,
    print_message,
    show_progress,
)
from ssl_bench.system.process import provenance_fields

_CPU = torch.device("cpu")
# Shorter runs of a probe do not report their cost.
_MIN_REPORTED_SECONDS = 5.0
SIZE_FIELDS = ("image_size", "longer_side", "max_side", "squash")
"""Names of the probe settings that determine the size to which images are resized."""
_NEW_NAMES = {
    "not_settings": "excluded_from_identity",
    "shown_to": "with_native_size",
    "fitted_to_images": "adapt_to_dataset",
    "adapt_to_images": "adapt_to_dataset",
    "rounds_size": "resize",
    "cells": "list_score_keys",
    "split": "scored_images",
    "pictures": "list_figures",
    "serves": "can_precompute_for",
    "keeps_images": "has_per_image_values",
    "further_protocols": "secondary_protocols",
    "takes_long": "is_slow",
    "require_fitting": "check_encoder",
    "settings_without_cost": "excluded_from_timing",
    **dict.fromkeys(("protocols_by_role", "truths_by_role", "max_sides_by_role"), "settings_for"),
}
"""New names of renamed attributes of `Probe`, by their old names."""

Progress = Callable[..., Iterable[Any]]
"""A function that yields the items of its argument unchanged and shows the progress."""


class FeatureCache(UserDict[Any, Any]):
    """Cache of features of the current encoder and images, shared by consecutive probes.

    Call `evict_unusable` before each probe to free memory. The key of a cache entry must contain
    every setting that affects the cached features, such as the precision.

    Attributes:
        started_files: Files with intermediate results that earlier probes of this command have
            created. Later probes add results to these files. If `overwrite` is set, files with
            intermediate results of earlier commands are deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started_files: set[Path] = set()
        self._selected: tuple[str, ...] = ()
        self._corruption: str | None = None
        self._used: set[Any] = set()

    def evict_unusable(
        self, encoder: Encoder, role: str, images: str, corruption: str | None = None
    ) -> None:
        """Drop cached features that the next probe cannot use, to free memory.

        If the encoder, the role or the images change, all features are dropped. If only the
        corruption changes, all features that were not used with the previous corruption are
        dropped. Features of training images are kept, because training images are never corrupted.

        Args:
            encoder: Encoder of the next probe.
            role: What the next probe needs from a dataset, such as "segmentation".
            images: Digest of the scored images before corruption.
            corruption: Corruption of the scored images with its severity, such as "snow:3", or
                None.
        """
        selected = (encoder_id(encoder.identity()), role, images)
        if selected != self._selected:
            self.data = {}
        elif corruption != self._corruption:
            self.data = {key: value for key, value in self.data.items() if key in self._used}
        if (selected, corruption) != (self._selected, self._corruption):
            self._used = set()
        self._selected, self._corruption = selected, corruption

    def __getitem__(self, key: Any) -> Any:
        self._used.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, item: Any) -> None:
        self._used.add(key)
        super().__setitem__(key, item)


@dataclass(frozen=True)
class ProbeContext:
    """Inputs and settings of a probe for one encoder and one dataset.

    Attributes:
        encoder: The frozen encoder.
        dataset: The dataset, with the annotations that `Probe.role` requires.
        layers: Block indices to score, 0-based.
        device: Device of the computation.
        dtype: Precision of the encoder's forward pass.
        seed: Seed of all random number generators.
        artifacts: Folder for the figures that `Probe.run` draws.
        progress: Function that wraps an iterable to show progress.
        overwrite: Whether to ignore results and files of earlier runs.
        say: Function that prints a message for the user. Messages are not stored in records.
        known: Stored records of requested results, whose scores `Probe.run` need not yield again.
        features: Cache of features that earlier probes computed with this encoder.
        shared: Features of images that several probes of the command encode in the same way, or
            None if no other probe encodes the same images. The method `extractor` reads these
            features and adds new ones.
        later: Probes that run next on the same blocks, each with the folder for its figures.
            `Probe.run` may also compute the encoder outputs that these probes need, to save forward
            passes.
    """

    encoder: Encoder
    dataset: Dataset
    layers: tuple[int, ...]
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    seed: int = 0
    artifacts: Path = Path()
    progress: Progress = show_progress
    overwrite: bool = False
    say: Callable[[str], None] = print_message
    known: Sequence[Record] = ()
    features: FeatureCache = field(default_factory=FeatureCache)
    shared: SharedFeatures | None = None
    later: Sequence[tuple["Probe", Path]] = ()

    def extractor(self, layers: Sequence[int], *facets: Facet) -> FeatureExtractor:
        """Return a feature extractor that uses the encoder, device and precision of this context.

        On a CPU, it reuses the features of images that another probe of the command has encoded.

        Args:
            layers: Block indices, 0-based.
            facets: Facets (kinds of features) to extract, such as "token".
        """
        options: dict[str, Any] = {
            "layers": layers, "facets": facets, "device": self.device, "dtype": self.dtype
        }  # fmt: skip
        if self.shared is not None and self.device.type == "cpu":
            return SharedExtractor(self.shared, self.encoder, **options)
        return FeatureExtractor(self.encoder, **options)

    def stages(self) -> list["ProbeContext"]:
        """Return one context for each stage of the encoder that contains blocks to score.

        The blocks of a stage have the same token grid and feature width. A ViT has only one stage.
        """
        return [
            replace(self, encoder=encoder, layers=layers)
            for encoder, layers in self.encoder.group_by_shape(self.layers)
        ]


@dataclass(frozen=True)
class Score:
    """The value of a metric for one block, with its confidence interval.

    Attributes:
        layer: Block index, 0-based.
        facet: Kind of feature of the block, such as "token" or "cls".
        metric: Name of the metric.
        value: The score, in percent if `unit` is "%".
        ci95: 95 % confidence interval (low, high), or None if it cannot be computed.
        num_images: Number of scored images.
        details: Further values to store with the score. If `value` is NaN, the entry "undefined"
            states the reason, and tables print it.
        per_image: Values of each image from which `value` can be recomputed, such as whether its
            box is correct. The order of the images must be the same for all blocks, facets and
            encoders. Per-image values are only stored if `unit` is "%".
        unit: "%", or an empty string if the value is not a percentage.
        per_image_kind: How `value` is computed from `per_image`, such as "hits" or "mean_iou". The
            kind may be None if `per_image` has one number for each image. Without a kind, booleans
            and integers are hits (1) and misses (0), and floats are percentages whose mean is
            `value`.
    """

    layer: int
    facet: str
    metric: str
    value: float
    ci95: tuple[float, float] | None
    num_images: int
    details: Mapping[str, Any] = field(default_factory=dict)
    per_image: PerImage | None = field(default=None, repr=False, compare=False)
    unit: str = "%"
    per_image_kind: PerImageKind | None = None

    def __post_init__(self) -> None:
        if self.per_image is None or self.unit != "%":
            return
        per_image, kind = np.asarray(self.per_image), self.per_image_kind
        if kind is None and per_image.ndim == 1:
            kind = "percent" if per_image.dtype.kind == "f" else "hits"
        require_type(f"per_image_kind of the score {self.metric}", PerImageKind, kind)
        object.__setattr__(self, "per_image", per_image)
        object.__setattr__(self, "per_image_kind", kind)


class Probe:
    """Base class of probes. A subclass is a frozen dataclass whose fields are settings for users.

    Attributes:
        task: Name of the probe on the command line.
        role: What the probe needs from a dataset, such as "segmentation" for class masks.
            `ssl_bench.data.samples.ROLE_ANNOTATIONS` lists all roles.
        protocol: Name of the preset, which sets the defaults of other fields.
        facet: Facets (kinds of features) to score: one name such as "token", several names, or None
            if the probe has no facets.
        known_facets: Names that `facet` accepts, in addition to submodules of blocks.
        image_size: Side in pixels of the square images that the encoder receives. By default
            (None), squares have the encoder's native size. Probes with other image shapes override
            `resize`.
        has_per_image_values: Whether each score contains the values of single images, in
            `Score.per_image`.
        shares_features: Whether this probe resizes and encodes images in the same way as other
            probes of its role. A command encodes each image only once for all such probes.
        reuses_results: Whether this probe reuses stored results of single images, even if they come
            from an earlier run on another set of images.
        excluded_from_timing: Settings that hardly affect the time of a run. Runs with other values
            of these settings are also used to estimate the time of a run.
        metrics_of_sets: Metrics that are defined only for a whole set of images, so that their
            scores have no `per_image`.
        secondary_protocols: Secondary protocols (presets), which `--task all` runs in addition.
        is_slow: Whether the probe is slow. `--task all` runs slow probes last.
        excluded_from_identity: Fields that are not part of the settings that identify a result. An
            excluded field does not affect results, or a record has its own column for this field.
            To exclude one more field, write `(*Probe.excluded_from_identity, "batch_size")`. If you
            add a field to a probe and do not exclude it, finished results are computed again.
        metric_version: Version of the metric's code, an integer literal in the class body. Increase
            the version after a change of the code that changes scores. Results of lower versions
            are outdated.
    """

    task: str
    protocol: Any
    role: Any
    facet: Any = None
    known_facets: Any = ()
    image_size: Any = None
    has_per_image_values: ClassVar[bool] = False
    shares_features: ClassVar[bool] = False
    reuses_results: ClassVar[bool] = False
    excluded_from_timing: ClassVar[Collection[str]] = ()
    metrics_of_sets: ClassVar[Collection[str]] = ()
    secondary_protocols: ClassVar[Sequence[str]] = ()
    is_slow: ClassVar[bool] = False
    excluded_from_identity: ClassVar[Sequence[str]] = (
        "protocol",
        "facet",
        "num_workers",
        "guesses",
    )
    metric_version: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        for old, new in _NEW_NAMES.items():
            if old in vars(cls):
                raise ConfigurationError(
                    f"{cls.__name__}.{old} has no effect, define {new} instead"
                )

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        # Parsing the facets raises an error if a name is unknown.
        _ = self.facets

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        """Return settings that replace the probe's defaults on a dataset.

        Settings of the user take precedence over the returned settings.

        Args:
            roles: What the dataset can be used for, such as ("segmentation", "images").
                `ssl_bench.data.samples.ROLE_ANNOTATIONS` lists all uses.
        """
        del roles
        return {}

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        """Return each combination (layer, facet, metric) for which `run` computes a score.

        A facet is a kind of feature, such as "key" or "token".

        Args:
            layers: Block indices to score, 0-based.
        """
        raise NotImplementedError

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the blocks in `context.layers`, and yield each score as soon as it is computed."""
        raise NotImplementedError

    @property
    def facet_spec(self) -> FacetSpec | None:
        """Return the facets (kinds of features) to score, or None for probes without facets."""
        return parse_facets(self.facet, self.known_facets) if self.known_facets else None

    @property
    def facets(self) -> tuple[Facet, ...]:
        """Return the names of the facets (kinds of features) to score, as stored with results."""
        return self.facet_spec.names if self.facet_spec else ()

    @property
    def scored_facet(self) -> Facet:
        """Return the facet (kind of feature) of a probe that scores exactly one facet.

        Probes that score several facets must use `facets` instead.
        """
        return self.facets[0]

    def check_encoder(self, encoder: Encoder | EncoderIdentity) -> None:
        """Raise UnsupportedEncoderError if the probe cannot score the blocks of an encoder."""
        if not encoder.has_cls and {"cls", "cls_patch_mean"}.intersection(self.facets):
            raise UnsupportedEncoderError(
                f"{encoder.name} has no [CLS] token", hint=("probe.facet=patch_mean",)
            )

    def adapt_to_dataset(self, dataset: Dataset, chosen_fields: Collection[str]) -> "Probe":
        """Return a copy of the probe whose default settings are adapted to the dataset.

        The default implementation returns the probe unchanged.

        Args:
            dataset: Dataset that the probe runs on.
            chosen_fields: Names of the fields that the user set, which a subclass must not change.
        """
        del dataset, chosen_fields
        return self

    @property
    def resize(self) -> Resize:
        """Return the rule by which images are resized before the encoder receives them."""
        return Resize(self.image_size)

    def with_native_size(self, native_size: tuple[int, int]) -> Any:
        """Return a copy of the probe with settings for the encoder's native image size.

        This method is only called if the encoder accepts several image sizes. The default
        implementation returns the probe unchanged.

        Args:
            native_size: Native height and width in pixels.
        """
        del native_size
        return self

    def with_squares(self, side: int) -> Any:
        """Return a copy of the probe that resizes images to squares of `side` pixels.

        This method is only called if the encoder accepts a single image size. If `image_size` is
        None, the probe already uses the encoder's native size and is returned unchanged.
        """
        own: Any = self
        return self if self.image_size is None else replace(own, image_size=side)

    def can_precompute_for(self, other: "Probe") -> bool:
        """Return whether this probe can also compute the encoder outputs that another probe needs.

        If the result is True and both probes run on the same blocks, `ProbeContext.later` contains
        the other probe. To save forward passes, `run` may also compute the outputs for the probes
        in `ProbeContext.later`.

        Args:
            other: A probe that the same command runs after this one.
        """
        del other
        return False

    def scored_images(self, dataset: Dataset) -> ImageSet:
        """Return the images of a dataset that the probe scores."""
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """Return the images that the probe is trained on, or None if it needs no training."""
        del dataset
        return None

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the probe's results, as JSON types."""
        own: Any = self
        return {n: v for n, v in asdict(own).items() if n not in self.excluded_from_identity}

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        """Return the path of each figure that `run` draws, with the layers that the figure shows.

        The paths are relative to `ProbeContext.artifacts`, the folder for figures.

        Args:
            layers: Block indices to score, 0-based.
            images: The scored images.
            seed: Seed of the probe.
        """
        del layers, images, seed
        return {}


def display_name(probe: Probe) -> str:
    """Return the name of a probe for messages, such as "tokencut" or "tokencut, adaptive".

    The name of the protocol (a preset of settings), such as "adaptive", is only added for protocols
    that `--task all` runs in addition to the default protocol.
    """
    is_secondary = probe.protocol in probe.secondary_protocols
    return f"{probe.task}, {probe.protocol}" if is_secondary else probe.task


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of selected layers of one encoder, with one probe on one dataset.

    Attributes:
        probe: The probe, adapted to the encoder and the dataset by `PlannedProbe.adapt_to`.
        allow_overlap: Whether scored images may also be training images.
        changed: Settings that differ from the probe's protocol (a preset of settings), or None to
            derive them from `probe`. Records store these settings.
        encoder, dataset, layers, seed, device, dtype: The frozen encoder, the dataset, the 0-based
            block indices, the random seed, the device, and the precision of the forward pass.
    """

    encoder: Encoder
    dataset: Dataset
    probe: Probe
    layers: tuple[int, ...]
    seed: int
    device: torch.device
    dtype: torch.dtype
    allow_overlap: bool = False
    changed: Mapping[str, Any] | None = None

    def run(
        self,
        store: ResultStore,
        *,
        say: Callable[[str], None],
        overwrite: bool = False,
        features: FeatureCache | None = None,
        keep_features: bool = False,
        later_probes: Sequence[Probe] = (),
    ) -> list[Record]:
        """Compute the results that are missing from the store, and save each result immediately.

        Args:
            store: Results folder with finished results, to which new results are added.
            say: Function that prints a message for the user.
            overwrite: Compute finished results again.
            features: Cache from which the run reads features, and to which the run adds new
                features.
            keep_features: Whether to keep the features for a later probe that encodes the same
                images in the same way, if there is enough memory.
            later_probes: Probes that run next on the same dataset and can use encoder outputs of
                this run.

        Returns:
            One record (stored result) for each requested result, whether it is old or new.
        """
        probe, dataset = self.probe, CachedDataset(self.dataset)
        probe.check_encoder(self.encoder)
        images = probe.scored_images(dataset)
        # Image files may change during the run, so they are hashed only once, at the start.
        keys, plan = self._plan(probe, dataset, store, overwrite=overwrite)
        self._log_plan(plan, keys, images, store, say)
        if store.image_ids(images.fingerprint()) is None:
            store.save_image_ids(images.fingerprint(), images.ids)
        records = dict(plan.finished)
        if plan.layers:
            probes = [probe]
            for other in later_probes:
                _, other_plan = self._plan(other, dataset, store, overwrite=overwrite)
                if other_plan.layers == plan.layers:
                    probes.append(other)
            folders = [figures_folder(store, one.task, images, self.encoder) for one in probes]
            for one, folder in zip(probes, folders, strict=True):
                if one.list_figures(plan.layers, images, self.seed):
                    mark_as_output(folder)
            features = self._select_features(features, images, keys[0])
            training = probe.training_images(dataset)
            num_training = 0 if training is None else len(training)
            context = ProbeContext(
                encoder=self.encoder,
                dataset=dataset,
                layers=plan.layers,
                device=self.device,
                dtype=self.dtype,
                seed=self.seed,
                artifacts=folders[0],
                progress=show_progress,
                overwrite=overwrite,
                # With `cache`, a message is printed only once, even if every stage repeats it.
                say=cache(say),
                known=list(plan.finished.values()),
                features=features,
                shared=self._select_shared(
                    features, images, len(images) + num_training, keep_features=keep_features
                ),
                later=list(zip(probes[1:], folders[1:], strict=True)),
            )
            by_score = {(key.layer, key.facet, key.metric): key for key in keys}
            memory, start, num_scored = PeakMemory(self.device), time.monotonic(), 0
            for score in chain.from_iterable(map(probe.run, context.stages())):
                key = by_score[score.layer, score.facet, score.metric]
                if key in plan.finished:
                    continue
                seconds, peak = time.monotonic() - start, memory.read()
                score = _drop_unusable(score, probe.task, say)
                records[key] = self._record(key, score, unreadable_ids(dataset), seconds, peak)
                store.save(records[key], score.per_image)
                num_scored = max(num_scored, score.num_images)
            if (seconds := time.monotonic() - start) >= _MIN_REPORTED_SECONDS:
                num_images = (num_scored or len(images)) + num_training
                say(self._describe_cost(images, num_images, seconds, memory.read()))
        return [records[key] for key in keys if key in records]

    def _plan(
        self, probe: Probe, dataset: Dataset, store: ResultStore, *, overwrite: bool
    ) -> tuple[list[ResultKey], "WorkPlan"]:
        images = probe.scored_images(dataset)
        keys = result_keys(
            probe,
            images,
            self.layers,
            identity=self.encoder.identity(),
            settings=result_settings(probe, dataset, self.dtype, allow_overlap=self.allow_overlap),
            seed=self.seed,
        )
        if overwrite:
            return keys, WorkPlan(frozenset(keys), _distinct_layers(keys), {})
        return keys, find_pending(probe, self.encoder, keys, images, store)

    def _select_features(
        self, features: FeatureCache | None, images: ImageSet, key: ResultKey
    ) -> FeatureCache:
        features = FeatureCache() if features is None else features
        corruption = find_corruption(images)
        fingerprint = (
            key.settings[CORRUPTION_KEY]["fingerprint"] if corruption else images.fingerprint()
        )
        name = str(corruption) if corruption else None
        features.evict_unusable(self.encoder, self.probe.role, fingerprint, name)
        return features

    def _select_shared(
        self, features: FeatureCache, images: ImageSet, num_images: int, *, keep_features: bool
    ) -> SharedFeatures | None:
        """Return the image features that this probe shares with other probes of the command.

        The shared features are created in `features` if needed. The result is None if the probe
        shares no features, if the images are corrupted, or if no earlier or later probe uses the
        features.

        Args:
            features: Cache that contains the shared features.
            images: The scored images.
            num_images: Number of images that the probe encodes, including training images.
            keep_features: Whether a later probe encodes the same images in the same way.
        """
        # Each corruption gives other images, so their features would fill the memory.
        if not self.probe.shares_features or find_corruption(images) is not None:
            return None
        if keep_features:
            features.setdefault(SharedFeatures, SharedFeatures(num_images))
        if (shared := features.get(SharedFeatures)) is not None:
            shared.keeps_new = keep_features
        return shared

    def _log_plan(
        self,
        plan: "WorkPlan",
        keys: Sequence[ResultKey],
        images: ImageSet,
        store: ResultStore,
        say: Callable[[str], None],
    ) -> None:
        where = self._describe(images)
        if done := len(keys) - len(plan.pending):
            # Print other versions, because someone may have forgotten to increase `metric_version`.
            versions_used = {record.version for record in plan.finished.values()}
            others = ", ".join(sorted(versions_used - {ssl_bench.__version__}))
            by = f", computed by version {others}" if others else ""
            line = f"{where}: skipping {done} of {len(keys)} results that already exist{by}"
            say(with_hint(line, hint=("--overwrite",)))
        if outdated := store.find_older_versions(plan.pending):
            say(f"{where}: {len(outdated)} results are outdated and will be computed again")
        errors = {path: store.unreadable.get(path) for path in map(store.path, plan.pending)}
        if damaged := {path: why for path, why in errors.items() if why is not None}:
            say(f"{where}: computing damaged records again: {summarise_problems(damaged)}")
        if plan.layers:
            reason = "" if plan.pending else "drawing missing pictures again, "
            say(f"{where}: {reason}layers {', '.join(map(str, plan.layers))}")

    def _describe(self, images: ImageSet) -> str:
        return f"{display_name(self.probe)} on {images.name} {images.split}, {self.encoder.name}"

    def _describe_cost(
        self, images: ImageSet, num_images: int, seconds: float, peak: int | None
    ) -> str:
        """Return a message about speed and memory, such as "500 images in 40 s, 12.5 images/s"."""
        memory = f", peak memory {format_memory(peak)}" if peak is not None else ""
        return (
            f"{self._describe(images)}: {num_images:,} images in {format_duration(seconds)}, "
            f"{format_rate(num_images, seconds)} images/s{memory}"
        )

    def _record(
        self,
        key: ResultKey,
        score: Score,
        unreadable: dict[str, list[str]],
        seconds: float,
        peak_memory: int | None,
    ) -> Record:
        details = {**score.details}
        # If the settings leave the image size to the encoder, the details state it in pixels.
        if key.settings.get("image_size", "") is None:
            size, stride = self.encoder.native_size, self.encoder.stride(key.layer)
            details["image_size"] = self.probe.resize.square_side(size, stride)
        details |= position_details(self.probe, self.encoder, key.layer)
        if unreadable:
            details["left_out"] = summarize_left_out(unreadable)
        if self.encoder.weights_info.epoch is not None:
            details["epoch"] = self.encoder.weights_info.epoch
        return key.record(
            depth=self.encoder.depth,
            value=score.value,
            ci95=score.ci95,
            num_images=score.num_images,
            model=self.encoder.name,
            details=details,
            unit=score.unit,
            per_image_kind=score.per_image_kind,
            changed=changed_settings(self.probe) if self.changed is None else self.changed,
            peak_memory=peak_memory,
            **provenance_fields(describe_device(self.device), seconds),
        )


def _drop_unusable(score: Score, task: str, say: Callable[[str], None]) -> Score:
    """Return a copy of a score without data that should not be stored.

    A confidence interval that does not contain the value of the score is removed, and `say` prints
    a message. The values of single images are removed if the score is not a percentage.
    """
    if score.ci95 and not interval_contains(score.ci95, score.value):
        low, high = score.ci95
        say(
            f"{task}: block {score.layer}: {score.metric} of {score.facet} is {score.value:.6g}, "
            f"outside its interval [{low:.6g}, {high:.6g}], so it is stored without an interval"
        )
        reason = "with so few images it would not contain the score"
        score = replace(score, ci95=None, details={**score.details, "no_interval": reason})
    return score if score.unit == "%" else replace(score, per_image=None, per_image_kind=None)


@dataclass(frozen=True)
class WorkPlan:
    """The missing results and the stored results of a probe.

    Attributes:
        pending: Keys that identify the missing results.
        layers: Block indices with missing results or missing figures, in the requested order.
        finished: Records of all results that are not missing, by key.
    """

    pending: frozenset[ResultKey]
    layers: tuple[int, ...]
    finished: Mapping[ResultKey, Record]


def find_pending(
    probe: Probe,
    encoder: Encoder | EncoderIdentity,
    keys: Sequence[ResultKey],
    images: ImageSet,
    store: ResultStore,
) -> WorkPlan:
    """Find the results of a probe that are missing in a results folder.

    A result also counts as missing if its record lacks the per-image values that the probe should
    store. The returned layers are those with a missing result or figure. If a figure must be drawn
    again, all layers that it shows are returned.

    Args:
        probe: The probe, adapted to the encoder.
        encoder: The encoder.
        keys: Keys that identify all requested results.
        images: The scored images.
        store: Results folder.
    """
    finished = {}
    for key in keys:
        record = store.load(key)
        if record is None:
            continue
        with_images = probe.has_per_image_values and key.metric not in probe.metrics_of_sets
        # An undefined score may have no per-image values.
        is_percentage = record.unit == "%" and not math.isnan(record.value)
        if not (with_images and is_percentage) or store.has_per_image(key):
            finished[key] = record
    pending = frozenset(key for key in keys if key not in finished)
    layers = {key.layer for key in pending}
    folder = figures_folder(store, probe.task, images, encoder)
    figures = _list_figures(probe, keys, images)
    for name, shown in figures.items():
        if not (folder / name).is_file():
            layers.update(shown)
    for shown in figures.values():
        if not layers.isdisjoint(shown):
            layers.update(shown)
    ordered = tuple(layer for layer in _distinct_layers(keys) if layer in layers)
    return WorkPlan(pending, ordered, finished)


def _list_figures(
    probe: Probe, keys: Sequence[ResultKey], images: ImageSet
) -> dict[str, tuple[int, ...]]:
    """Return the path of each figure of a probe, with the layers that the figure shows.

    `keys` identifies the requested results.
    """
    stages: dict[int | None, list[ResultKey]] = {}
    for key in keys:
        stages.setdefault(block_stride(key.architecture, key.layer), []).append(key)
    figures: dict[str, tuple[int, ...]] = {}
    for stage in stages.values():
        layers = _distinct_layers(stage)
        for name, shown in probe.list_figures(layers, images, keys[0].seed).items():
            figures[name] = (*figures.get(name, ()), *shown)
    return figures


def _distinct_layers(keys: Sequence[ResultKey]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(key.layer for key in keys))


def figures_folder(
    store: ResultStore, task: str, images: ImageSet, encoder: Encoder | EncoderIdentity
) -> Path:
    prefix = figures_folder_prefix(encoder.name, encoder_id(encoder.identity()))
    folder = figures_folder_name(prefix, images.fingerprint())
    return store.root / "pictures" / task / file_name(images.name) / folder


def result_keys(
    probe: Probe,
    images: ImageSet,
    layers: Sequence[int],
    *,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    seed: int,
) -> list[ResultKey]:
    """Return the keys that identify the results of a probe, one for each layer, facet and metric.

    A facet is a kind of feature, such as "token".

    Args:
        probe: The probe.
        images: The scored images.
        layers: Block indices, 0-based.
        identity: Fields that identify the encoder, from `Encoder.identity`.
        settings: Settings that affect the results, from `result_settings`.
        seed: Seed of the probe.
    """
    fingerprint = images.fingerprint()
    return [
        ResultKey(
            task=probe.task,
            dataset=images.name,
            split=images.split,
            layer=layer,
            facet=facet,
            protocol=probe.protocol,
            metric=metric,
            **identity,
            dataset_fingerprint=fingerprint,
            seed=seed,
            settings=settings,
            metric_version=probe.metric_version,
            pipeline_version=versions.PIPELINE_VERSION,
        )
        for layer, facet, metric in probe.list_score_keys(layers)
    ]


def result_settings(
    probe: Probe, dataset: Dataset, dtype: object, *, allow_overlap: bool = False
) -> dict[str, Any]:
    """Return the settings that affect all results of a probe, as JSON types.

    The settings include entries that identify the training images, the corruption and the
    unreadable images. Call this function only once, because it reads all training images to compute
    a digest.

    Args:
        probe: The probe.
        dataset: The dataset.
        dtype: Precision of the encoder, a torch dtype or its name.
        allow_overlap: Whether scored images may also be training images. If False, a scored image
            that is also a training image raises a DataError.
    """
    training, scored = probe.training_images(dataset), probe.scored_images(dataset)
    corrupted, unreadable = corruption_settings(scored), unreadable_ids(dataset)
    shared = count_shared_files(training, scored, allowed=allow_overlap) if training else 0
    return {
        **probe.settings(),
        "dtype": str(dtype).removeprefix("torch."),
        **({TRAINING_IMAGES_KEY: asdict(describe_training_images(training))} if training else {}),
        **({CORRUPTION_KEY: corrupted} if corrupted else {}),
        **({"fitted_and_scored": shared} if shared else {}),
        # Left-out images are a setting, so no table mixes these results with complete results.
        **({"left_out": left_out_label(unreadable)} if unreadable else {}),
    }


def describe_training_images(images: ImageSet) -> TrainingImages:
    return TrainingImages(images.split, images.fingerprint(), len(images))


def unreadable_ids(dataset: Dataset) -> dict[str, list[str]]:
    """Return the ids of the unreadable images that were left out, by split name such as "val"."""
    original = dataset.dataset if isinstance(dataset, CachedDataset) else dataset
    return original.unreadable_ids() if isinstance(original, ReadableDataset) else {}


def adapt_image_size(
    probe: Any, encoder: Encoder | EncoderIdentity, chosen_fields: Collection[str]
) -> Any:
    """Return a copy of a probe with an image size that the encoder accepts.

    If the encoder accepts only one size, the probe uses this size. If the encoder accepts several
    sizes, an `image_size` that the user set must be a multiple of the patch size. A default
    `image_size` is rounded to the nearest multiple, unless the probe's rule `resize` rounds image
    sizes itself.

    Args:
        probe: The probe.
        encoder: The encoder. If the distance between neighbouring tokens differs between blocks,
            the largest distance counts as the patch size. The image size thus does not depend on
            which blocks are scored.
        chosen_fields: Names of the fields that the user set.

    Raises:
        ConfigurationError: The encoder does not accept a size that the user set.
        UnsupportedEncoderError: The encoder accepts only one size, and this size is not square.
    """
    if not encoder.dynamic_image_size:
        return _set_only_size(probe, encoder, chosen_fields)
    probe = probe.with_native_size(encoder.native_size)
    size, patch = probe.image_size, max(encoder.architecture.get("strides") or [encoder.patch_size])
    if size is None or size % patch == 0:
        return probe
    if "image_size" in chosen_fields:
        lower = max(1, size // patch) * patch
        raise ConfigurationError(
            f"probe.image_size must be a multiple of {patch}, the patch size of {encoder.name}, "
            f"got {size}",
            hint=(f"probe.image_size={lower}", "or", f"probe.image_size={lower + patch}"),
        )
    # Another field, such as `squash`, may determine the size of the images.
    if probe.resize.round_to_patch or probe.resize.side != size:
        return probe
    return replace(probe, image_size=max(1, round(size / patch)) * patch)


def _set_only_size(
    probe: Any, encoder: Encoder | EncoderIdentity, chosen_fields: Collection[str]
) -> Any:
    height, width = encoder.native_size
    if height != width:
        raise UnsupportedEncoderError(
            f"{encoder.name} only accepts images of {height} x {width} pixels, but {probe.task} "
            "uses square images. Choose another task"
        )
    for name in SIZE_FIELDS:
        # `max_side` has no effect on square images.
        if (
            name in chosen_fields
            and name != "max_side"
            and getattr(probe, name) not in (None, height)
        ):
            raise ConfigurationError(
                f"{encoder.name} only accepts images of {height} x {width} pixels, got "
                f"probe.{name}={getattr(probe, name)}. Leave out probe.{name}"
            )
    # If the protocol's default is None, it means the encoder's only size. None is then stored even
    # if the user typed this size, so that both spellings give the same result.
    if (load_protocol_values(probe) or {}).get("image_size", height) is None:
        probe = replace(probe, image_size=None)
    return probe.with_squares(height)


def position_details(probe: Probe, encoder: Encoder, layer: int) -> dict[str, str]:
    """Return an entry for `Record.details` that states how position embeddings are resized.

    The key of the entry is "positions". The result is empty if the encoder resizes no position
    embeddings, for example because all images have the native size. The embeddings always count as
    resized for images that keep their aspect ratio, because such images rarely have the native
    size.
    """
    resize = probe.resize
    side = resize.square_side(encoder.native_size, encoder.stride(layer))
    is_native = not resize.keep_aspect_ratio and (side, side) == encoder.native_size
    rule = None if is_native else encoder.position_rule
    return {} if rule is None else {"positions": rule}
