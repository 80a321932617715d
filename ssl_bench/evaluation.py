"""Checkpoint x probe x dataset x layers -> records."""

import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ssl_bench import __version__
from ssl_bench.data.files.readable import ReadableDataset, counts_and_first, summary
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import UnreadableImage
from ssl_bench.models import Encoder
from ssl_bench.results.pending import Pending, find_pending, pictures_folder
from ssl_bench.results.store import (
    OUTDATED,
    TRAINED_ON,
    CellKey,
    PerImage,
    Record,
    ResultStore,
    TrainingImages,
    encoder_id,
    source_commit,
)
from ssl_bench.system.progress import show_progress

T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """Shows how far an iteration is; gives back the items of `items` unchanged."""

    def __call__(
        self, items: Iterable[T], description: str, total: int | None = None
    ) -> Iterable[T]: ...


@dataclass(frozen=True)
class ProbeContext:
    """Everything a probe needs for one checkpoint and one dataset.

    Attributes:
        say: Tells the user one line that no record holds.
        known: Records of asked cells that are finished; their scores need not be given again.
    """

    encoder: Encoder
    dataset: Dataset
    layers: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    seed: int
    artifacts: Path
    progress: Progress
    overwrite: bool = False
    say: Callable[[str], None] = print
    known: Sequence[Record] = ()


@dataclass(frozen=True)
class Score:
    """One number of one block and how sure it is.

    Attributes:
        unit: "%", or nothing for a plain number.
        per_image: What each image contributes, in the same order for all blocks, facets and
            encoders; pairs images when two scores are compared.
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


@runtime_checkable
class Probe(Protocol):
    """A question asked of every block of a frozen encoder."""

    @property
    def task(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    @property
    def role(self) -> str:
        """What the dataset must support: a role of `ssl_bench.data.samples.Dataset`."""
        ...

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        """Every (layer, facet, metric) that `run` will score."""
        ...

    def split(self, dataset: Dataset) -> ImageSet:
        """The images that are scored."""
        ...

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """The images that something is fitted to before others are scored; None for nothing."""
        ...

    def settings(self) -> dict[str, Any]:
        """What changes the number, as plain JSON types."""
        ...

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the layers of the context, each as soon as it is known."""
        ...


@runtime_checkable
class Question(Protocol):
    """What is asked of an encoder: with its weights and the layers it names the cells."""

    @property
    def probe(self) -> Probe: ...

    @property
    def dataset(self) -> Dataset: ...

    @property
    def seed(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


def cell_keys(
    question: Question,
    images: ImageSet,
    layers: Sequence[int],
    *,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[CellKey]:
    """Every cell of a question on the split that its probe scores, known without the encoder.

    `identity` is that of `ssl_bench.models.Encoder.identity`, `settings` of `cell_settings`.
    """
    fingerprint = images.fingerprint()
    return [
        CellKey(
            task=question.probe.task,
            dataset=images.name,
            split=images.split,
            layer=layer,
            facet=facet,
            protocol=question.probe.protocol,
            metric=metric,
            **identity,
            dataset_fingerprint=fingerprint,
            seed=question.seed,
            settings=settings,
        )
        for layer, facet, metric in question.probe.cells(layers)
    ]


def cell_settings(question: Question) -> dict[str, Any]:
    """What changes the number and has no field of its own in a key.

    Cost: opens the training images and reads them for their fingerprint, so ask once.
    """
    gone = _left_out(question.dataset)
    fitted = question.probe.training_images(question.dataset)
    return {
        **question.probe.settings(),
        "dtype": str(question.dtype).removeprefix("torch."),
        **({TRAINED_ON: asdict(trained_on(fitted))} if fitted else {}),
        # Among the settings, so that no table shows it beside numbers of all images.
        **({"left_out": summary(gone)} if gone else {}),
    }


def trained_on(images: ImageSet) -> TrainingImages:
    """What a record says of the images that something was fitted to."""
    return TrainingImages(images.split, images.fingerprint(), len(images))


def _left_out(dataset: Dataset) -> dict[str, list[str]]:
    return dataset.left_out() if isinstance(dataset, ReadableDataset) else {}


@dataclass(frozen=True)
class Evaluation:
    """One probe on one dataset for the asked layers of one encoder."""

    encoder: Encoder
    dataset: Dataset
    probe: Probe
    layers: tuple[int, ...]
    seed: int
    device: torch.device
    dtype: torch.dtype

    def run(
        self, store: ResultStore, *, say: Callable[[str], None], overwrite: bool = False
    ) -> list[Record]:
        """Compute the cells that the store lacks, each saved as soon as it is known.

        Where `dataset` is a `ReadableDataset`, images that cannot be read are left out of all
        splits, and the probe begins again.

        Args:
            store: Where finished cells are looked up and new ones go.
            say: Gets one line on what was skipped and what runs.
            overwrite: Compute finished cells again.

        Returns:
            The records of all asked cells, old and new.

        Raises:
            UnreadableImage: an image cannot be read, and is not to be left out.
        """
        while True:
            try:
                return self._run(store, say=say, overwrite=overwrite)
            except UnreadableImage as error:
                sieve = self.dataset
                if not isinstance(sieve, ReadableDataset):
                    way = "or leave such images out with --on-bad-image skip"
                    raise UnreadableImage(f"{error}, {way}") from error
                if not sieve.leave_out_unreadable(show_progress):
                    raise
                gone = summary(sieve.left_out())
                say(f"{error}; left out as unreadable: {gone}; beginning again")

    def _run(
        self, store: ResultStore, *, say: Callable[[str], None], overwrite: bool
    ) -> list[Record]:
        images = self.probe.split(self.dataset)
        # Once, before anything is computed: images may change before the last score is known.
        settings = cell_settings(self)
        keys = cell_keys(
            self, images, self.layers, identity=self.encoder.identity(), settings=settings
        )
        pending = find_pending(self.probe, keys, images, store, self.artifacts(store, images))
        if overwrite:
            pending = Pending.everything(keys)
        where = f"{self.probe.task} on {images.name} {images.split}, {self.encoder.name}"
        if done := len(keys) - len(pending.cells):
            say(f"{where}: {done} of {len(keys)} cells finished before, skipped (--overwrite)")
        if pending.cells and (old := store.outdated(next(k for k in keys if k in pending.cells))):
            say(f"{where}: ignored {old} and its like: {OUTDATED}")
        if store.image_ids(images.fingerprint()) is None:
            store.save_image_ids(images.fingerprint(), images.ids)
        if pending.layers:
            again = "" if pending.cells else "pictures are missing and drawn again, "
            say(f"{where}: {again}layers {', '.join(map(str, pending.layers))}")
            finished = dict.fromkeys(key for key in keys if key not in pending.cells)
            context = self._context(
                pending.layers, images, store, finished, say=say, overwrite=overwrite
            )
            start = time.monotonic()
            for score in self.probe.run(context):
                record = self._record(score, images, settings, time.monotonic() - start)
                # Those of finished cells stay as they are.
                if record.key() not in finished:
                    store.save(record, score.per_image)
        return [record for key in keys if (record := store.load(key)) is not None]

    def _context(
        self,
        layers: tuple[int, ...],
        images: ImageSet,
        store: ResultStore,
        finished: Collection[CellKey],
        *,
        say: Callable[[str], None],
        overwrite: bool,
    ) -> ProbeContext:
        return ProbeContext(
            encoder=self.encoder,
            dataset=self.dataset,
            layers=layers,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            artifacts=self.artifacts(store, images),
            progress=show_progress,
            overwrite=overwrite,
            say=say,
            known=[record for key in finished if (record := store.load(key)) is not None],
        )

    def _epoch(self) -> dict[str, float]:
        """How long the encoder was trained, where its file says so."""
        epoch = self.encoder.contents.epoch
        return {} if epoch is None else {"epoch": epoch}

    def artifacts(self, store: ResultStore, images: ImageSet) -> Path:
        """Folder for the pictures and per-image results of this encoder."""
        encoder = self.encoder
        known_as = encoder_id(encoder.identity())
        return pictures_folder(store, self.probe.task, images.name, encoder.name, known_as)

    def _record(
        self, score: Score, images: ImageSet, settings: Mapping[str, Any], seconds: float
    ) -> Record:
        left_out = _left_out(self.dataset)
        unreadable = {"left_out": counts_and_first(left_out)} if left_out else {}
        return Record(
            task=self.probe.task,
            dataset=images.name,
            split=images.split,
            layer=score.layer,
            depth=self.encoder.depth,
            facet=score.facet,
            protocol=self.probe.protocol,
            metric=score.metric,
            value=score.value,
            ci95=score.ci95,
            num_images=score.num_images,
            model=self.encoder.name,
            **self.encoder.identity(),
            dataset_fingerprint=images.fingerprint(),
            seed=self.seed,
            settings=settings,
            version=__version__,
            git_commit=source_commit(),
            torch=torch.__version__,
            device=device_name(self.device),
            seconds=round(seconds, 3),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            details={**score.details, **unreadable, **self._epoch()},
            unit=score.unit,
        )


def device_name(device: torch.device) -> str:
    """What a record says of the hardware, such as "cuda: NVIDIA H200" or "cpu: x86_64"."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {platform.machine()}, {torch.get_num_threads()} threads"
