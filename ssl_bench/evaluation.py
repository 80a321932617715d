"""Evaluate probes on the blocks of a frozen encoder.

`Probe` is the base class of all probes. A probe lists the results that it has and scores them.
`Evaluation.run` looks up which of them the store lacks, has the probe score those, and saves each
record as soon as its score is known.
"""

import time
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import ssl_bench
from ssl_bench.composition.compose import changed_settings, load_protocol_values
from ssl_bench.composition.fields import check_fields, require_type
from ssl_bench.data.corruptions import as_settings, corruption_of
from ssl_bench.data.files.readable import (
    ReadableDataset,
    counts_and_first,
    shared_files,
    summary,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.splits import OpenedOnce
from ssl_bench.errors import ConfigurationError, UnfitEncoder, with_hint
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import interval_contains
from ssl_bench.layers import Facet, FacetSpec, parse_facets
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.results import (
    Record,
    ResultKey,
    ResultStore,
    block_stride,
    encoder_id,
    versions,
)
from ssl_bench.results.record import (
    CORRUPTED,
    TRAINED_ON,
    PerImage,
    PerImageKind,
    TrainingImages,
)
from ssl_bench.results.store import summarise_problems
from ssl_bench.system import paths
from ssl_bench.system.device import describe_device
from ssl_bench.system.files import mark_as_output
from ssl_bench.system.progress import say, show_progress
from ssl_bench.system.provenance import provenance_fields

_CPU = torch.device("cpu")
_EXCLUDED = ("protocol", "facet", "num_workers", "guesses")

Progress = Callable[..., Iterable[Any]]
"""A function like `ssl_bench.system.progress.show_progress`, which returns the items unchanged."""


class FeatureCache(UserDict[Any, Any]):
    """Features of the current encoder and image set, shared by consecutive probes.

    `select` states which encoder and images come next, and drops the features of any others, so
    that no memory is held longer than needed. Keys name everything that a feature depends on.

    Attributes:
        started_files: Files that a probe of this command has started, so that later probes add to
            them, with `overwrite` too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started_files: set[Path] = set()
        self._selected: tuple[str, ...] = ()
        self._corruption: str | None = None
        self._used: set[Any] = set()

    def select(
        self, encoder: Encoder, role: str, images: str, corruption: str | None = None
    ) -> None:
        """Keep only features of this encoder and of these images.

        If the same images come again after another corruption, the features that were used since
        the previous change are kept: those of the uncorrupted training images among them.

        Args:
            encoder: Encoder of the next probe.
            role: Role of the dataset that the next probe requires.
            images: Fingerprint of the scored images, before any corruption.
            corruption: Corruption of the scored images. Training images are never corrupted.
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
    """Everything that a probe needs for one encoder and one dataset.

    Attributes:
        encoder: The frozen encoder.
        dataset: The dataset, with the role that the probe requires.
        layers: Block indices to score, 0-based.
        device: Device of the computation.
        dtype: Precision of the encoder's forward pass.
        seed: Seed of everything random.
        artifacts: Folder for the figures that `Probe.run` draws.
        progress: Wraps an iterable to show progress.
        overwrite: Whether results and files of earlier runs are ignored.
        say: Prints one line for the user. No record holds it.
        known: Records of finished results, whose scores need not be computed again.
        features: Features that earlier probes computed with this encoder.
        later: Probes that this one `serves` and that run after it on the same blocks, each with its
            folder of artifacts.
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
    say: Callable[[str], None] = say
    known: Sequence[Record] = ()
    features: FeatureCache = field(default_factory=FeatureCache)
    later: Sequence[tuple["Probe", Path]] = ()

    def extractor(self, layers: Sequence[int], *facets: Facet) -> FeatureExtractor:
        """Return an extractor of these facets and blocks, with the run's device and precision."""
        return FeatureExtractor(
            self.encoder, layers=layers, facets=facets, device=self.device, dtype=self.dtype
        )

    def stages(self) -> list["ProbeContext"]:
        """Split the context by token grid and width, so that all blocks of each part are alike."""
        return [
            replace(self, encoder=encoder, layers=layers)
            for encoder, layers in self.encoder.stages(self.layers)
        ]


@dataclass(frozen=True)
class Score:
    """A metric of one block, with its interval.

    Attributes:
        layer: Block index, 0-based.
        facet: Facet of the block, such as "token" or "cls".
        metric: Name of the metric.
        value: The score, in percent if `unit` is "%".
        ci95: 95 % confidence interval (low, high), if there is one.
        num_images: Number of scored images.
        details: Further values for the record. "undefined" is the reason for a NaN value, which
            tables print.
        per_image: Contribution of each image to a percentage, in one order for all blocks, facets
            and encoders, so that two scores can be compared image by image. It is not kept for
            plain numbers.
        unit: "%", or an empty text for a plain number.
        per_image_kind: How the value follows from `per_image`. It may be left out for hits (a
            boolean, 0 or 1 for each image) and for percentages (finite floats whose mean is the
            value).

    Raises:
        ConfigurationError: Counts do not state their kind, or it is not one of `PerImageKind`.
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
    """Base class of probes, which are frozen dataclasses.

    The fields of the dataclass are what a user can set. Class attributes that a probe does not set
    have the defaults below.

    Attributes:
        task: Name on the command line.
        role: What the dataset must support, a key of `ssl_bench.data.samples.OFFERED`.
        protocol: Field with the name of the preset that gives the other fields their defaults.
        facet: Field with the facets of a block to score, one name or several. None for probes
            without facets.
        known_facets: Names that `facet` accepts, in addition to submodules of blocks.
        image_size: Side in pixels of the square images that the encoder sees. None for its native
            size.
        longer_side: Longer side in pixels of images that keep their aspect ratio. None for their
            original size.
        squash: Side in pixels of the square that such images are resized to instead, without
            keeping the aspect ratio.
        keeps_images: Whether scores come with the contribution of each image.
        metrics_of_sets: Metrics of a whole set, to which single images have no contribution.
        further_protocols: Protocols that `--task all` runs in addition.
        rounds_size: Whether the probe itself rounds a default `image_size` to the patch size.
        takes_long: Whether the probe runs after the others because each image needs many forward
            passes.
        excluded_from_identity: Fields that do not affect results, or that a record stores
            elsewhere. Every other field is part of a result's identity, so adding one invalidates
            finished results.
        metric_version: Version of the metric's code, a plain integer in the class body. Raise it
            if a change of the code changes a number: results of lower versions are then outdated.
    """

    task: str
    protocol: Any
    role: Any
    facet: Any = None
    known_facets: Any = ()
    image_size: Any = None
    longer_side: Any = None
    squash: Any = None
    keeps_images: ClassVar[bool] = False
    metrics_of_sets: ClassVar[Collection[str]] = ()
    further_protocols: ClassVar[Sequence[str]] = ()
    rounds_size: ClassVar[bool] = False
    takes_long: ClassVar[bool] = False
    excluded_from_identity: ClassVar[Collection[str]] = _EXCLUDED
    metric_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        # Raises an error for an unknown name.
        _ = self.facets

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        """Return the settings that a dataset needs in place of the defaults, such as a protocol.

        A setting that the user chose takes precedence.

        Args:
            roles: What the dataset supports, keys of `ssl_bench.data.samples.OFFERED`.
        """
        del roles
        return {}

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        """Return every (layer, facet, metric) that `run` scores."""
        raise NotImplementedError

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Yield the scores of the context's layers, each as soon as it is known."""
        raise NotImplementedError

    @property
    def facet_spec(self) -> FacetSpec | None:
        """Return the parsed `facet` field: facet names, and the block if a name includes one."""
        return parse_facets(self.facet, self.known_facets) if self.known_facets else None

    @property
    def facets(self) -> tuple[Facet, ...]:
        """Return the facets to score, as records name them."""
        return self.facet_spec.names if self.facet_spec else ()

    @property
    def scored_facet(self) -> Facet:
        """Return the facet of a probe that scores exactly one."""
        return self.facets[0]

    def require_fitting(self, encoder: Encoder | EncoderIdentity) -> None:
        """Refuse an encoder whose blocks the probe cannot score.

        Raises:
            UnfitEncoder: A facet needs a [CLS] token and the encoder has none.
        """
        if not encoder.has_cls and {"cls", "cls_patch_mean"}.intersection(self.facets):
            raise UnfitEncoder(
                f"{encoder.name} has no [CLS] token", hint=("probe.facet=patch_mean",)
            )

    def fitted_to_images(self, dataset: Dataset, typed: Collection[str]) -> "Probe":
        """Return the probe with values that suit the dataset, in fields that the user did not set.

        Args:
            dataset: Dataset that the probe runs on.
            typed: Fields that the user set.
        """
        del dataset, typed
        return self

    def with_native_size(self, native_size: tuple[int, int]) -> Any:
        """Return the probe configured for an encoder's native input size (height, width)."""
        del native_size
        return self

    def serves(self, other: "Probe") -> bool:
        """Return whether a run of this probe can also do the work of `other`, which runs later."""
        del other
        return False

    def split(self, dataset: Dataset) -> ImageSet:
        """Return the images to score."""
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """Return the images that the probe fits something to, or None if it fits nothing."""
        del dataset
        return None

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the result, as JSON types."""
        own: Any = self
        return {n: v for n, v in asdict(own).items() if n not in self.excluded_from_identity}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        """Return every figure that a run of these layers writes, with the layers that it shows.

        Paths are relative to `ProbeContext.artifacts`.
        """
        del layers, images, seed
        return {}


def display_name(probe: Probe) -> str:
    """Return the task name, followed by the protocol if it is a secondary one."""
    is_secondary = probe.protocol in probe.further_protocols
    return f"{probe.task}, {probe.protocol}" if is_secondary else probe.task


@dataclass(frozen=True)
class Evaluation:
    """One probe on one dataset, for some layers of one encoder.

    Attributes:
        encoder: The encoder, with its weights loaded.
        dataset: The dataset, with the role that the probe requires.
        probe: The probe, adapted to the encoder and the dataset.
        layers: Block indices, 0-based.
        seed: Seed of everything random.
        device: Device of the computation.
        dtype: Precision of the encoder's forward pass.
        allow_overlap: Whether scored images may also be training images.
        changed: Settings that differ from the protocol's. None if the probe alone determines them.
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
        later: Sequence[Probe] = (),
    ) -> list[Record]:
        """Compute the results that the store lacks, and save each as soon as it is known.

        Args:
            store: Where finished results are looked up and new ones are saved.
            say: Prints a line about skipped and pending results.
            overwrite: Compute finished results again.
            features: Features of earlier probes. This run reads from it and adds to it.
            later: Probes that this one serves and that run after it on the same dataset.

        Returns:
            The records of all requested results, old and new.

        Raises:
            UnreadableImage: An image cannot be read.
        """
        probe, dataset = self.probe, OpenedOnce(self.dataset)
        probe.require_fitting(self.encoder)
        images = probe.split(dataset)
        # Hashed once and first: image files may change before the last score is known.
        keys, plan = self._plan(probe, dataset, store, overwrite=overwrite)
        self._log_plan(plan, keys, images, store, say)
        if store.image_ids(images.fingerprint()) is None:
            store.save_image_ids(images.fingerprint(), images.ids)
        records = dict(plan.finished)
        if plan.layers:
            probes = [probe]
            for other in later:
                _, other_plan = self._plan(other, dataset, store, overwrite=overwrite)
                if other_plan.layers == plan.layers:
                    probes.append(other)
            folders = [figures_folder(store, one.task, images, self.encoder) for one in probes]
            for one, folder in zip(probes, folders, strict=True):
                if one.pictures(plan.layers, images, self.seed):
                    mark_as_output(folder)
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
                # Prints a line only once: all stages of an encoder have the same to report.
                say=cache(say),
                known=list(plan.finished.values()),
                features=self._select_features(features, images, keys[0]),
                later=list(zip(probes[1:], folders[1:], strict=True)),
            )
            by_score = {(key.layer, key.facet, key.metric): key for key in keys}
            start = time.monotonic()
            for score in chain.from_iterable(map(probe.run, context.stages())):
                key = by_score[score.layer, score.facet, score.metric]
                if key in plan.finished:
                    continue
                seconds = time.monotonic() - start
                score = _drop_unusable(score, probe.task, say)
                records[key] = self._record(key, score, unreadable_ids(dataset), seconds)
                store.save(records[key], score.per_image)
        return [records[key] for key in keys if key in records]

    def _plan(
        self, probe: Probe, dataset: Dataset, store: ResultStore, *, overwrite: bool
    ) -> tuple[list[ResultKey], "WorkPlan"]:
        """Return the keys of all results of a probe, and the plan to compute them."""
        images = probe.split(dataset)
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
        corruption = corruption_of(images)
        fingerprint = key.settings[CORRUPTED]["fingerprint"] if corruption else images.fingerprint()
        name = str(corruption) if corruption else None
        features.select(self.encoder, self.probe.role, fingerprint, name)
        return features

    def _log_plan(
        self,
        plan: "WorkPlan",
        keys: Sequence[ResultKey],
        images: ImageSet,
        store: ResultStore,
        say: Callable[[str], None],
    ) -> None:
        where = f"{display_name(self.probe)} on {images.name} {images.split}, {self.encoder.name}"
        if done := len(keys) - len(plan.pending):
            # The developer of another version may have forgotten to raise `metric_version`.
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

    def _record(
        self, key: ResultKey, score: Score, unreadable: dict[str, list[str]], seconds: float
    ) -> Record:
        epoch = self.encoder.contents.epoch
        # The settings may only say "the encoder's own size", so the details state which one.
        is_native = "image_size" in key.settings and key.settings["image_size"] is None
        native = {"image_size": native_square(self.probe, self.encoder, key.layer)}
        return key.record(
            depth=self.encoder.depth,
            value=score.value,
            ci95=score.ci95,
            num_images=score.num_images,
            model=self.encoder.name,
            details={
                **score.details,
                **(native if is_native else {}),
                **position_details(self.probe, self.encoder, key.layer),
                **({"left_out": counts_and_first(unreadable)} if unreadable else {}),
                **({"epoch": epoch} if epoch is not None else {}),
            },
            unit=score.unit,
            per_image_kind=score.per_image_kind,
            changed=changed_settings(self.probe) if self.changed is None else self.changed,
            **provenance_fields(describe_device(self.device), seconds),
        )


def _drop_unusable(score: Score, task: str, say: Callable[[str], None]) -> Score:
    """Return a score without what a record must not hold.

    An interval that excludes its own value is meaningless and is dropped with a message. Plain
    numbers keep no contributions of images.
    """
    if score.ci95 and not interval_contains(score.ci95, score.value):
        low, high = score.ci95
        say(
            f"{task}: block {score.layer}: {score.metric} of {score.facet} is {score.value:.6g}, "
            f"outside its interval [{low:.6g}, {high:.6g}]; recorded without an interval"
        )
        reason = "of so few images it would not hold the value"
        score = replace(score, ci95=None, details={**score.details, "no_interval": reason})
    return score if score.unit == "%" else replace(score, per_image=None, per_image_kind=None)


@dataclass(frozen=True)
class WorkPlan:
    """Results still to compute.

    Attributes:
        pending: Keys of the results without a stored record.
        layers: Layers to run for these results and for missing figures, in the requested order.
        finished: Stored records of the other results.
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
    """Look up which results have no record, and which layers have missing figures.

    A figure that shows several layers is drawn by one run of all of them, so it is never partial.
    """
    finished = {}
    for key in keys:
        with_images = probe.keeps_images and key.metric not in probe.metrics_of_sets
        record = _find_finished(key, store, with_images=with_images)
        if record is not None:
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


def _find_finished(key: ResultKey, store: ResultStore, *, with_images: bool) -> Record | None:
    """Return the stored record, or None if it or its per-image values are missing."""
    record = store.load(key)
    if with_images and record and record.unit == "%" and not store.has_per_image(key):
        return None
    return record


def _list_figures(
    probe: Probe, keys: Sequence[ResultKey], images: ImageSet
) -> dict[str, tuple[int, ...]]:
    """Return every figure with the layers that it shows, stage by stage."""
    stages: dict[int | None, list[ResultKey]] = {}
    for key in keys:
        stages.setdefault(block_stride(key.architecture, key.layer), []).append(key)
    figures: dict[str, tuple[int, ...]] = {}
    for stage in stages.values():
        layers = _distinct_layers(stage)
        for name, shown in probe.pictures(layers, images, keys[0].seed).items():
            figures[name] = (*figures.get(name, ()), *shown)
    return figures


def _distinct_layers(keys: Sequence[ResultKey]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(key.layer for key in keys))


def figures_folder(
    store: ResultStore, task: str, images: ImageSet, encoder: Encoder | EncoderIdentity
) -> Path:
    """Return the folder of a task's figures of these images and this encoder."""
    beginning = paths.encoder_folder(encoder.name, encoder_id(encoder.identity()))
    folder = paths.figures_folder(beginning, images.fingerprint())
    return store.root / "pictures" / task / paths.file_name(images.name) / folder


def result_keys(
    probe: Probe,
    images: ImageSet,
    layers: Sequence[int],
    *,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    seed: int,
) -> list[ResultKey]:
    """Return the keys of all results of a probe. The encoder's weights are not needed.

    Args:
        probe: The probe.
        images: The scored images.
        layers: Block indices, 0-based.
        identity: From `ssl_bench.models.Encoder.identity`.
        settings: From `result_settings`.
        seed: Seed of everything random.
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
        for layer, facet, metric in probe.cells(layers)
    ]


def result_settings(
    probe: Probe, dataset: Dataset, dtype: object, *, allow_overlap: bool = False
) -> dict[str, Any]:
    """Return the settings of a result that have no field of their own in its key.

    This reads the training images for their fingerprint, so call it once.

    Args:
        probe: The probe.
        dataset: The dataset.
        dtype: Precision of the encoder, a torch dtype or its name.
        allow_overlap: Whether scored images may also be training images.

    Raises:
        DataError: A scored image is also a training image.
    """
    training, scored = probe.training_images(dataset), probe.split(dataset)
    corrupted, unreadable = as_settings(scored), unreadable_ids(dataset)
    shared = shared_files(training, scored, allowed=allow_overlap) if training else 0
    return {
        **probe.settings(),
        "dtype": str(dtype).removeprefix("torch."),
        **({TRAINED_ON: asdict(describe_training_images(training))} if training else {}),
        **({CORRUPTED: corrupted} if corrupted else {}),
        **({"fitted_and_scored": shared} if shared else {}),
        # A setting, so that no table shows the result next to those of all images.
        **({"left_out": summary(unreadable)} if unreadable else {}),
    }


def describe_training_images(images: ImageSet) -> TrainingImages:
    """Return what a record stores about training images."""
    return TrainingImages(images.split, images.fingerprint(), len(images))


def unreadable_ids(dataset: Dataset) -> dict[str, list[str]]:
    """Return the ids of images that are left out because they cannot be read, by split."""
    original = dataset.dataset if isinstance(dataset, OpenedOnce) else dataset
    return original.left_out() if isinstance(original, ReadableDataset) else {}


def fit_size(probe: Any, encoder: Encoder | EncoderIdentity, typed: Collection[str]) -> Any:
    """Return the probe with an image size that the encoder accepts.

    `image_size` must be a multiple of the patch size, unless the probe rounds it by itself
    (`rounds_size`). A default value is rounded to the nearest multiple. If the encoder accepts only
    one size, the probe gets that size, as `squash` if its images keep their aspect ratio.

    Args:
        probe: The probe. A probe without size fields is returned unchanged.
        encoder: The encoder. The largest patch of all its blocks counts, so that a result does not
            depend on which other blocks are scored.
        typed: Fields that the user set.

    Raises:
        ConfigurationError: A size that the user set does not fit.
        UnfitEncoder: The encoder accepts only one size and it is not square.
    """
    if not encoder.any_size:
        return _with_only_size(probe, encoder, typed)
    probe = probe.with_native_size(encoder.native_size)
    size, patch = probe.image_size, max(encoder.architecture.get("strides") or [encoder.patch_size])
    if size is None or size % patch == 0:
        return probe
    if "image_size" in typed:
        lower = max(1, size // patch) * patch
        raise ConfigurationError(
            f"probe.image_size must be a multiple of {patch}, the patch size of {encoder.name}, "
            f"got {size}",
            hint=(f"probe.image_size={lower}", "or", f"probe.image_size={lower + patch}"),
        )
    if probe.rounds_size:
        return probe
    return replace(probe, image_size=max(1, round(size / patch)) * patch)


def _with_only_size(probe: Any, encoder: Encoder | EncoderIdentity, typed: Collection[str]) -> Any:
    height, width = encoder.native_size
    if height != width:
        raise UnfitEncoder(
            f"{encoder.name} only accepts images of {height} x {width} pixels, but {probe.task} "
            "uses square images"
        )
    for name in ("image_size", "longer_side", "squash"):
        size = getattr(probe, name)
        if name in typed and size not in (None, height):
            raise ConfigurationError(
                f"{encoder.name} only accepts images of {height} x {width} pixels, got "
                f"probe.{name}={size}; leave probe.{name} out"
            )
    changes: dict[str, int | None] = {}
    native = probe.with_native_size(encoder.native_size)
    if native.image_size is not None:
        # If the protocol's default is None, the result must be the same as with the size typed.
        default = (
            height
            if native is not probe
            else (load_protocol_values(probe) or {}).get("image_size", 0)
        )
        changes = {"image_size": None if default is None else height}
    if "squash" in {item.name for item in fields(probe)}:
        changes["squash"] = height
    return replace(probe, **changes) if changes else probe


def native_square(probe: Probe, encoder: Encoder, layer: int) -> int:
    """Return the side in pixels of the square images if the encoder's native size is used."""
    side, patch = min(encoder.native_size), encoder.stride(layer)
    return max(1, round(side / patch)) * patch if probe.rounds_size else side


def position_details(probe: Probe, encoder: Encoder, layer: int) -> dict[str, str]:
    """Return how stored position embeddings were resampled, for a record; empty if they were not.

    Images that keep their aspect ratio count as resampled: hardly any has the stored grid.
    """
    own: Any = probe
    names = {item.name for item in fields(own)}
    if encoder.position_rule is None or names.isdisjoint({"image_size", "squash"}):
        return {}
    keeps_shape = "squash" in names
    side = probe.squash if keeps_shape else probe.image_size or native_square(probe, encoder, layer)
    return {} if (side, side) == encoder.native_size else {"positions": encoder.position_rule}
