"""Encoder x probe x dataset x layers -> records, and the base class of a probe.

A `Probe` says which cells it has and scores them. `Evaluation.run` finds the cells that the store
lacks, has the probe score them, and saves each record as soon as it is known.
"""

import time
from collections import UserDict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
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
from ssl_bench.intervals import holds
from ssl_bench.layers import AskedFacets, Facet, asked_facets
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
from ssl_bench.system.device import provenance
from ssl_bench.system.files import mark_as_written
from ssl_bench.system.progress import say, show_progress

_CPU = torch.device("cpu")
Passed = MutableMapping[Any, Any]
"""Features by everything that they depend on."""

Progress = Callable[..., Iterable[Any]]
"""As `ssl_bench.system.progress.show_progress`, which gives back the items that it is given."""


@dataclass(frozen=True)
class ProbeContext:
    """Everything a probe needs for one checkpoint and one dataset.

    Attributes:
        artifacts: Folder of what `Probe.run` draws; the current one, where nothing is said.
        say: Tells the user one line that no record holds.
        known: Records of asked cells that are finished; their scores need not be given again.
        passed: What probes before this one got from this encoder of the same images.
        later: Probes that this one `serves` and that run after it on the same blocks, each with its
            folder of artifacts.
        begun: Files of this command that no later probe of it begins anew, `overwrite` or not.
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
    passed: Passed = field(default_factory=dict)
    later: Sequence[tuple["Probe", Path]] = ()
    begun: set[Path] = field(default_factory=set)

    def extractor(self, layers: Sequence[int], *facets: Facet) -> FeatureExtractor:
        """What gives these facets of these blocks, where and as the run computes."""
        return FeatureExtractor(
            self.encoder, layers=layers, facets=facets, device=self.device, dtype=self.dtype
        )

    def stages(self) -> list["ProbeContext"]:
        """One for the asked blocks of each grid and width; one alone where all are alike."""
        return [
            replace(self, encoder=encoder, layers=layers)
            for encoder, layers in self.encoder.stages(self.layers)
        ]


@dataclass(frozen=True)
class Score:
    """One number of one block and how sure it is.

    Attributes:
        unit: "%", or nothing for a plain number.
        details: What else a record says; "undefined" is why the value is NaN, which tables print.
        per_image: What each image contributes to a percentage, in the same order for all blocks,
            facets and encoders; pairs images when two scores are compared. Of a plain number it is
            not kept.
        per_image_kind: How the value comes from `per_image`. It may be left out for hits (a boolean
            or a 0 or 1 an image) and for percentages (finite floats whose mean is the value).

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
    """A question asked of every block of a frozen encoder: a frozen dataclass of this class.

    What a probe does not say has the values below. Its own fields are what a user can set.

    Attributes:
        task: Its name on the command line.
        role: What the dataset must support: a key of `ssl_bench.data.roles.OFFERED`.
        protocol: Field of the preset that the other fields' values come from; records carry it.
        facet: What of a block it looks at, one name or several; None where that cannot be said.
        known_facets: The names that it takes there, beside submodules of blocks.
        image_size: Side in pixels of the squares that the encoder sees; None for the encoder's own.
        longer_side: That of photographs which keep their shape; None for their own size.
        squash: Side of the square that such photographs are squashed to instead.
        keeps_images: Whether its scores come with what each image contributes.
        metrics_of_sets: Scores of a whole set, to which no image contributes alone.
        further_protocols: Presets that `--task all` runs too.
        rounds_size: Whether it fits an `image_size` that nobody typed to the patch itself.
        takes_long: Whether it comes after the others, as an image passes the encoder many times.
        not_settings: Fields that change no number, or are said elsewhere in a record; each other
            field is in the identity of a cell, so that one more makes finished cells pending.
        metric_version: Raise it, in the class itself and as a plain number, when a change of the
            code changes a number: recorded results of lower versions are then outdated.
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
    not_settings: ClassVar[Collection[str]] = ("protocol", "facet", "num_workers", "guesses")
    metric_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        # Refuses a name that is not known.
        _ = self.facets

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        """Return the settings that a dataset needs in place of the defaults, such as a protocol.

        A setting that the user chose takes precedence.

        Args:
            roles: What the dataset supports, keys of `ssl_bench.data.roles.OFFERED`.
        """
        del roles
        return {}

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        """Every (layer, facet, metric) that `run` will score."""
        raise NotImplementedError

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the layers of the context, each as soon as it is known."""
        raise NotImplementedError

    @property
    def asked_facets(self) -> AskedFacets | None:
        """What `facet` says, and the one block that it may name."""
        return asked_facets(self.facet, self.known_facets) if self.known_facets else None

    @property
    def facets(self) -> tuple[Facet, ...]:
        """What of a block it looks at, as records have it."""
        return self.asked_facets.names if self.asked_facets else ()

    @property
    def scored_facet(self) -> Facet:
        """The one of a probe that looks at one."""
        return self.facets[0]

    def require_fitting(self, encoder: Encoder | EncoderIdentity) -> None:
        """Refuse an encoder for whose blocks there is no answer.

        Raises:
            UnfitEncoder: a facet is of [CLS], which the encoder has not.
        """
        if not encoder.has_cls and {"cls", "cls_patch_mean"}.intersection(self.facets):
            raise UnfitEncoder(
                f"{encoder.name} has no [CLS] token", hint=("probe.facet=patch_mean",)
            )

    def fitted_to_images(self, dataset: Dataset, typed: Collection[str]) -> "Probe":
        """Itself, with values that the images of a dataset allow in fields that nobody typed."""
        del dataset, typed
        return self

    def shown_to(self, native_size: tuple[int, int]) -> Any:
        """The same probe with the size that an encoder of this one is shown, where it knows it."""
        del native_size
        return self

    def serves(self, other: "Probe") -> bool:
        """Whether a run of this probe can also do what a later one does with the same features."""
        del other
        return False

    def split(self, dataset: Dataset) -> ImageSet:
        """The images that are scored."""
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """The images that something is fitted to before others are scored; None for nothing."""
        del dataset
        return None

    def settings(self) -> dict[str, Any]:
        """What changes the number, as plain JSON types."""
        own: Any = self
        return {n: value for n, value in asdict(own).items() if n not in self.not_settings}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        """Every file that a run of these layers leaves, and which of them it shows.

        Paths are relative to `ProbeContext.artifacts`.
        """
        del layers, images, seed
        return {}


def called(probe: Probe) -> str:
    """Its task, such as "tokencut", or "tokencut, adaptive" in one of its further protocols."""
    is_further = probe.protocol in probe.further_protocols
    return f"{probe.task}, {probe.protocol}" if is_further else probe.task


def cell_keys(
    probe: Probe,
    images: ImageSet,
    layers: Sequence[int],
    *,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    seed: int,
) -> list[ResultKey]:
    """Every cell of a probe on the images that it scores, known without the encoder.

    `identity` is that of `ssl_bench.models.Encoder.identity`, `settings` of `cell_settings`.
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


def cell_settings(
    probe: Probe, dataset: Dataset, dtype: object, *, allow_overlap: bool = False
) -> dict[str, Any]:
    """What changes the number and has no field of its own in a key.

    Cost: reads the training images for their fingerprint, so ask once.

    Args:
        probe: What is asked.
        dataset: Of which images.
        dtype: Of torch, or its name there.
        allow_overlap: Whether scored images may be files that something is fitted to.

    Raises:
        DataError: An image that is scored is a file that something is fitted to.
    """
    gone, fitted, scored = left_out(dataset), probe.training_images(dataset), probe.split(dataset)
    corrupted = as_settings(scored)
    shared = shared_files(fitted, scored, allowed=allow_overlap) if fitted else 0
    return {
        **probe.settings(),
        "dtype": str(dtype).removeprefix("torch."),
        **({TRAINED_ON: asdict(trained_on(fitted))} if fitted else {}),
        **({CORRUPTED: corrupted} if corrupted else {}),
        **({"fitted_and_scored": shared} if shared else {}),
        # Among the settings, so that no table shows it beside numbers of all images.
        **({"left_out": summary(gone)} if gone else {}),
    }


def trained_on(images: ImageSet) -> TrainingImages:
    """What a record says of the images that something was fitted to."""
    return TrainingImages(images.split, images.fingerprint(), len(images))


def left_out(dataset: Dataset) -> dict[str, list[str]]:
    """Ids of images that cannot be read and are left out, by split."""
    sieve = dataset.dataset if isinstance(dataset, OpenedOnce) else dataset
    return sieve.left_out() if isinstance(sieve, ReadableDataset) else {}


def fit_size(probe: Any, encoder: Encoder | EncoderIdentity, typed: Collection[str]) -> Any:
    """A probe whose images have a size that the encoder takes.

    Its `image_size` is the side of a square that patches must fill, unless its class says
    `rounds_size`; one that nobody typed is rounded to the nearest multiple of the patch. An encoder
    of one size alone gets that one; a probe that sees photographs in their own shape then has it as
    `squash`.

    Args:
        probe: Without any such field it sees images as they are.
        encoder: Its patch is the largest of all blocks, so that no cell hangs on what else is
            asked.
        typed: Fields whose values the user has chosen.

    Raises:
        ConfigurationError: A typed size does not fit.
        UnfitEncoder: The one size is no square.
    """
    if not encoder.any_size:
        return _with_the_only_size(probe, encoder, typed)
    probe = probe.shown_to(encoder.native_size)
    size, patch = probe.image_size, max(encoder.architecture.get("strides") or [encoder.patch_size])
    if size is None or size % patch == 0:
        return probe
    if "image_size" in typed:
        lower = max(1, size // patch) * patch
        raise ConfigurationError(
            f"probe.image_size must be a multiple of the patch size {patch} of {encoder.name}, "
            f"got {size}",
            hint=(f"probe.image_size={lower}", "or", f"probe.image_size={lower + patch}"),
        )
    if probe.rounds_size:
        return probe
    return replace(probe, image_size=max(1, round(size / patch)) * patch)


def _with_the_only_size(
    probe: Any, encoder: Encoder | EncoderIdentity, typed: Collection[str]
) -> Any:
    height, width = encoder.native_size
    if height != width:
        raise UnfitEncoder(
            f"{probe.task} shows encoders that take one size alone squares, {encoder.name} takes "
            f"{height} x {width}; let its forward resize its positions"
        )
    sizes = {n: getattr(probe, n) for n in ("image_size", "longer_side", "squash")}
    for name, size in sizes.items():
        if name in typed and size not in (None, height):
            raise ConfigurationError(
                f"{encoder.name} takes images of {height} x {width} pixels alone, got probe.{name}="
                f"{size}; leave it out, or let its forward resize its positions"
            )
    changes: dict[str, int | None] = {}
    shown = probe.shown_to(encoder.native_size)
    if shown.image_size is not None:
        # Where nobody types a size it may be none, and typing the only one is no other question.
        usual = (
            height
            if shown is not probe
            else (load_protocol_values(probe) or {}).get("image_size", 0)
        )
        changes = {"image_size": None if usual is None else height}
    if "squash" in {item.name for item in fields(probe)}:
        changes["squash"] = height
    return replace(probe, **changes) if changes else probe


def own_size(probe: Probe, encoder: Encoder, layer: int) -> int:
    """Side in pixels of the squares that an encoder sees where its own size is asked for."""
    side, patch = min(encoder.native_size), encoder.stride(layer)
    return max(1, round(side / patch)) * patch if probe.rounds_size else side


def resampled_positions(probe: Probe, encoder: Encoder, layer: int) -> dict[str, str]:
    """Return by which rule stored positions were resampled, as records keep it; empty if not.

    Photographs that keep their shape count as resampled: hardly any has the stored grid.
    """
    own: Any = probe
    names = {item.name for item in fields(own)}
    if encoder.position_rule is None or names.isdisjoint({"image_size", "squash"}):
        return {}
    keeps_shape = "squash" in names
    side = probe.squash if keeps_shape else probe.image_size or own_size(probe, encoder, layer)
    return {} if (side, side) == encoder.native_size else {"positions": encoder.position_rule}


class PassedImages:
    """What passed one encoder for probes that look at the same images; that of others is forgotten.

    So probes that follow each other take what is there, and no memory is held beyond them. Where
    the same images come again after another corruption, what was asked for with the last one is
    held until the next: the images that something is fitted to stay, as long as all fit to them.

    Attributes:
        begun: See `ProbeContext`.
    """

    def __init__(self) -> None:
        self.begun: set[Path] = set()
        self._of: tuple[str, ...] = ()
        self._corrupted: str | None = None
        self._found = _Kept()

    def of(self, encoder: Encoder, role: str, images: str, corrupted: str | None = None) -> Passed:
        """What probes of that role have left of these images.

        Args:
            encoder: Whose features they are.
            role: What the dataset must support.
            images: Fingerprint of the scored ones, before they were corrupted.
            corrupted: What the scored images went through; the others are the same.
        """
        asked = (encoder_id(encoder.identity()), role, images)
        if asked != self._of:
            self._of, self._found = asked, _Kept()
        elif corrupted != self._corrupted:
            self._found.forget_unasked()
        self._corrupted = corrupted
        return self._found


class _Kept(UserDict[Any, Any]):
    """A mapping that knows what it was asked for since it forgot the last time."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: set[Any] = set()

    def forget_unasked(self) -> None:
        self.data = {key: value for key, value in self.data.items() if key in self._asked}
        self._asked = set()

    def __getitem__(self, key: Any) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, item: Any) -> None:
        self._asked.add(key)
        super().__setitem__(key, item)


def pictures_folder(
    store: ResultStore, task: str, images: ImageSet, encoder: Encoder | EncoderIdentity
) -> Path:
    """Where the pictures of these images by an encoder are."""
    beginning = paths.encoder_folder(encoder.name, encoder_id(encoder.identity()))
    folder = paths.pictures_folder(beginning, images.fingerprint())
    return store.root / "pictures" / task / paths.file_name(images.name) / folder


@dataclass(frozen=True)
class Pending:
    """What is to be done.

    Attributes:
        cells: Whose records are to be written.
        layers: That are to be run for them and for pictures, in the order asked for.
        finished: Records of the other cells.
    """

    cells: frozenset[ResultKey]
    layers: tuple[int, ...]
    finished: Mapping[ResultKey, Record]


def find_pending(
    probe: Probe,
    encoder: Encoder | EncoderIdentity,
    keys: Sequence[ResultKey],
    images: ImageSet,
    store: ResultStore,
) -> Pending:
    """Cells that are not finished, and the layers whose pictures are not all there.

    A picture of several layers is drawn by a run of all of them, so that none ever shows a part.
    """
    finished = {}
    for key in keys:
        with_images = probe.keeps_images and key.metric not in probe.metrics_of_sets
        record = _finished(key, store, keeps_images=with_images)
        if record is not None:
            finished[key] = record
    cells = frozenset(key for key in keys if key not in finished)
    layers = {key.layer for key in cells}
    folder, drawn = pictures_folder(store, probe.task, images, encoder), _drawn(probe, keys, images)
    for name, shown in drawn.items():
        if not (folder / name).is_file():
            layers.update(shown)
    for shown in drawn.values():
        if not layers.isdisjoint(shown):
            layers.update(shown)
    return Pending(cells, tuple(layer for layer in _layers(keys) if layer in layers), finished)


def _finished(key: ResultKey, store: ResultStore, *, keeps_images: bool) -> Record | None:
    """Its record, if it is there, and what each image contributed to a percentage."""
    record = store.load(key)
    if keeps_images and record and record.unit == "%" and not store.has_per_image(key):
        return None
    return record


def _drawn(probe: Probe, keys: Sequence[ResultKey], images: ImageSet) -> dict[str, tuple[int, ...]]:
    """Every file and what it shows, drawn stage by stage as `ProbeContext.stages` has them."""
    stages: dict[int | None, list[ResultKey]] = {}
    for key in keys:
        stages.setdefault(block_stride(key.architecture, key.layer), []).append(key)
    drawn: dict[str, tuple[int, ...]] = {}
    for of_stage in stages.values():
        for name, shown in probe.pictures(_layers(of_stage), images, keys[0].seed).items():
            drawn[name] = (*drawn.get(name, ()), *shown)
    return drawn


def _layers(keys: Sequence[ResultKey]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(key.layer for key in keys))


@dataclass(frozen=True)
class Evaluation:
    """One probe on one dataset for the asked layers of one encoder.

    Attributes:
        changed: Settings that are not those of the protocol, where the probe alone cannot tell.
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
        passed: PassedImages | None = None,
        later: Sequence[Probe] = (),
    ) -> list[Record]:
        """Compute the cells that the store lacks, each saved as soon as it is known.

        Args:
            store: Where finished cells are looked up and new ones go.
            say: Gets one line on what was skipped and what runs.
            overwrite: Compute finished cells again.
            passed: Of probes before this one; it takes part and leaves its own.
            later: Probes that this one serves and that run after it on the same dataset.

        Returns:
            The records of all asked cells, old and new.

        Raises:
            UnreadableImage: an image cannot be read.
        """
        passed = passed or PassedImages()
        probe, encoder, dataset = self.probe, self.encoder, OpenedOnce(self.dataset)
        probe.require_fitting(encoder)
        images = probe.split(dataset)
        # Once, before anything is computed: images may change before the last score is known.
        keys, pending = self._pending(probe, dataset, store, overwrite=overwrite)
        self._tell(pending, keys, images, store, say)
        if store.image_ids(images.fingerprint()) is None:
            store.save_image_ids(images.fingerprint(), images.ids)
        records = dict(pending.finished)
        if pending.layers:
            together = [
                (one, pictures_folder(store, one.task, images, encoder))
                for one in (probe, *later)
                if one is probe
                or self._pending(one, dataset, store, overwrite=overwrite)[1].layers
                == pending.layers
            ]
            for one, artifacts in together:
                if one.pictures(pending.layers, images, self.seed):
                    mark_as_written(artifacts)
            settings = keys[0].settings
            corruption = corruption_of(images)
            context = ProbeContext(
                encoder=encoder,
                dataset=dataset,
                layers=pending.layers,
                device=self.device,
                dtype=self.dtype,
                seed=self.seed,
                artifacts=together[0][1],
                progress=show_progress,
                overwrite=overwrite,
                # A line the first time alone: every stage of an encoder has the same to say.
                say=cache(say),
                known=list(pending.finished.values()),
                passed=passed.of(
                    encoder,
                    probe.role,
                    settings[CORRUPTED]["fingerprint"] if corruption else images.fingerprint(),
                    str(corruption) if corruption else None,
                ),
                later=together[1:],
                begun=passed.begun,
            )
            asked, start = {(k.layer, k.facet, k.metric): k for k in keys}, time.monotonic()
            for score in chain.from_iterable(map(probe.run, context.stages())):
                key = asked[score.layer, score.facet, score.metric]
                # Those of finished cells stay as they are.
                if key not in pending.finished:
                    seconds = time.monotonic() - start
                    if score.ci95 and not holds(score.ci95, score.value):
                        low, high = score.ci95
                        say(
                            f"{probe.task}: block {score.layer}: {score.metric} of {score.facet} "
                            f"is {score.value:.6g}, outside of its interval [{low:.6g}, "
                            f"{high:.6g}]; it is recorded without one"
                        )
                        # Of one that leaves its own value out nobody knows what it says.
                        why = "of so few images it would not hold the value"
                        details = {**score.details, "no_interval": why}
                        score = replace(score, ci95=None, details=details)
                    if score.unit != "%":
                        score = replace(score, per_image=None, per_image_kind=None)
                    records[key] = self._record(key, score, left_out(dataset), seconds)
                    store.save(records[key], score.per_image)
        return [records[key] for key in keys if key in records]

    def _pending(
        self, probe: Probe, dataset: Dataset, store: ResultStore, *, overwrite: bool
    ) -> tuple[list[ResultKey], Pending]:
        """Return all cells of a probe on the dataset, and those to compute."""
        images = probe.split(dataset)
        keys = cell_keys(
            probe,
            images,
            self.layers,
            identity=self.encoder.identity(),
            settings=cell_settings(probe, dataset, self.dtype, allow_overlap=self.allow_overlap),
            seed=self.seed,
        )
        if overwrite:
            return keys, Pending(frozenset(keys), _layers(keys), {})
        return keys, find_pending(probe, self.encoder, keys, images, store)

    def _tell(
        self,
        pending: Pending,
        keys: Sequence[ResultKey],
        images: ImageSet,
        store: ResultStore,
        say: Callable[[str], None],
    ) -> None:
        where = f"{called(self.probe)} on {images.name} {images.split}, {self.encoder.name}"
        if done := len(keys) - len(pending.cells):
            # Nobody may have raised `metric_version`.
            computed_by = {record.version for record in pending.finished.values()}
            others = sorted(computed_by - {ssl_bench.__version__})
            by = f", computed by version {', '.join(others)}" if others else ""
            line = f"{where}: {done} of {len(keys)} scores finished before{by}, skipped"
            say(with_hint(line, hint=("--overwrite",)))
        if older := store.find_older_versions(pending.cells):
            say(f"{where}: {len(older)} scores are outdated, this version computes others")
        broken = {path: store.unreadable.get(path) for path in map(store.path, pending.cells)}
        if known := {path: why for path, why in broken.items() if why is not None}:
            say(f"{where}: computed again, because of {summarise_problems(known)}")
        if pending.layers:
            again = "" if pending.cells else "pictures are missing and drawn again, "
            say(f"{where}: {again}layers {', '.join(map(str, pending.layers))}")

    def _record(
        self, key: ResultKey, score: Score, gone: dict[str, list[str]], seconds: float
    ) -> Record:
        epoch = self.encoder.contents.epoch
        # Settings say what was asked for, which may be the encoder's own size, whatever that is.
        is_own = "image_size" in key.settings and key.settings["image_size"] is None
        return key.record(
            depth=self.encoder.depth,
            value=score.value,
            ci95=score.ci95,
            num_images=score.num_images,
            model=self.encoder.name,
            details={
                **score.details,
                **({"image_size": own_size(self.probe, self.encoder, key.layer)} if is_own else {}),
                **resampled_positions(self.probe, self.encoder, key.layer),
                **({"left_out": counts_and_first(gone)} if gone else {}),
                **({"epoch": epoch} if epoch is not None else {}),
            },
            unit=score.unit,
            per_image_kind=score.per_image_kind,
            changed=changed_settings(self.probe) if self.changed is None else self.changed,
            **provenance(self.device, seconds),
        )
