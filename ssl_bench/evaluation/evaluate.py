"""Checkpoint x probe x dataset x layers -> records."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_bench.composition.presets import changed_settings
from ssl_bench.data.corruptions import corruption_of
from ssl_bench.data.files.readable import ReadableDataset, counts_and_first, with_a_way_out
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.views import OpenedOnce
from ssl_bench.errors import UnreadableImage
from ssl_bench.evaluation.cells import cell_keys, cell_settings, left_out
from ssl_bench.evaluation.passed import PassedImages
from ssl_bench.evaluation.pending import Pending, find_pending, pictures_folder
from ssl_bench.evaluation.probe import Probe, ProbeContext, Score, called
from ssl_bench.models import Encoder
from ssl_bench.results import OUTDATED, CellKey, Record, ResultStore, encoder_id
from ssl_bench.results.ranges import holds
from ssl_bench.results.store import first_few
from ssl_bench.system.progress import show_progress
from ssl_bench.system.written import mark_as_written

if TYPE_CHECKING:
    import torch


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
    device: "torch.device"
    dtype: "torch.dtype"
    allow_overlap: bool = False
    changed: Mapping[str, Any] | None = None

    def run(
        self,
        store: ResultStore,
        *,
        say: Callable[[str], None],
        overwrite: bool = False,
        passed: PassedImages | None = None,
    ) -> list[Record]:
        """Compute the cells that the store lacks, each saved as soon as it is known.

        Args:
            store: Where finished cells are looked up and new ones go.
            say: Gets one line on what was skipped and what runs.
            overwrite: Compute finished cells again.
            passed: Of probes before this one; it takes part and leaves its own.

        Returns:
            The records of all asked cells, old and new.

        Raises:
            UnreadableImage: an image cannot be read, and is not to be left out.
        """
        try:
            whole = replace(self, dataset=OpenedOnce(self.dataset))
            return whole._run(store, say, passed or PassedImages(), overwrite=overwrite)
        except UnreadableImage as error:
            # Of images that were looked through, one was replaced since.
            if isinstance(self.dataset, ReadableDataset):
                raise
            raise with_a_way_out(error) from error

    def _run(
        self,
        store: ResultStore,
        say: Callable[[str], None],
        passed: PassedImages,
        *,
        overwrite: bool,
    ) -> list[Record]:
        images, keys = self._asked()
        artifacts = self.artifacts(store, images)
        pending = self._pending(keys, images, store, say, overwrite=overwrite)
        records = dict(pending.finished)
        if pending.layers:
            if self.probe.pictures(pending.layers, images, self.seed):
                mark_as_written(artifacts)
            context = ProbeContext(
                encoder=self.encoder,
                dataset=self.dataset,
                layers=pending.layers,
                device=self.device,
                dtype=self.dtype,
                seed=self.seed,
                artifacts=artifacts,
                progress=show_progress,
                overwrite=overwrite,
                say=_once(say),
                known=list(pending.finished.values()),
                passed=passed.of(self.encoder, self.probe.role, _corrupted(images)),
            )
            asked = {(key.layer, key.facet, key.metric): key for key in keys}
            start = time.monotonic()
            for score in chain.from_iterable(map(self.probe.run, context.stages())):
                key = asked[score.layer, score.facet, score.metric]
                # Those of finished cells stay as they are.
                if key not in pending.finished:
                    records[key] = self._record(key, score, time.monotonic() - start)
                    store.save(records[key], score.per_image)
        return [records[key] for key in keys if key in records]

    def _asked(self) -> tuple[ImageSet, list[CellKey]]:
        """The images that are scored, and all that is asked about them."""
        images = self.probe.split(self.dataset)
        # Once, before anything is computed: images may change before the last score is known.
        settings, identity = cell_settings(self), self.encoder.identity()
        return images, cell_keys(self, images, self.layers, identity=identity, settings=settings)

    def _pending(
        self,
        keys: Sequence[CellKey],
        images: ImageSet,
        store: ResultStore,
        say: Callable[[str], None],
        *,
        overwrite: bool,
    ) -> Pending:
        if overwrite:
            pending = Pending.everything(keys)
        else:
            artifacts = self.artifacts(store, images)
            pending = find_pending(self.probe, keys, images, store, artifacts)
        self._tell(pending, keys, images, store, say)
        if store.image_ids(images.fingerprint()) is None:
            store.save_image_ids(images.fingerprint(), images.ids)
        return pending

    def _tell(
        self,
        pending: Pending,
        keys: Sequence[CellKey],
        images: ImageSet,
        store: ResultStore,
        say: Callable[[str], None],
    ) -> None:
        where = f"{called(self.probe)} on {images.name} {images.split}, {self.encoder.name}"
        if done := len(keys) - len(pending.cells):
            say(f"{where}: {done} of {len(keys)} scores finished before, skipped (--overwrite)")
        broken = {path: store.unreadable.get(path) for path in map(store.path, pending.cells)}
        if known := {path: why for path, why in broken.items() if why not in (None, OUTDATED)}:
            say(f"{where}: computed again, because of {first_few(known)}")
        if pending.cells and (old := store.outdated(next(k for k in keys if k in pending.cells))):
            say(f"{where}: ignored {old} and its like: {OUTDATED}")
        if pending.layers:
            again = "" if pending.cells else "pictures are missing and drawn again, "
            say(f"{where}: {again}layers {', '.join(map(str, pending.layers))}")

    def artifacts(self, store: ResultStore, images: ImageSet) -> Path:
        """Folder for the pictures and per-image results of this encoder and these images."""
        encoder = self.encoder
        known_as = encoder_id(encoder.identity())
        return pictures_folder(store, self.probe.task, images, encoder.name, known_as)

    def _record(self, key: CellKey, score: Score, seconds: float) -> Record:
        # It asks torch for its version, and a plan is made of questions without answers.
        from ssl_bench.results.provenance import provenance

        gone, epoch = left_out(self.dataset), self.encoder.contents.epoch
        return key.record(
            depth=self.encoder.depth,
            value=score.value,
            # Of one that leaves its own value out nobody knows what it says.
            ci95=score.ci95 if holds(score.ci95, score.value) else None,
            num_images=score.num_images,
            model=self.encoder.name,
            details={
                **score.details,
                **({"left_out": counts_and_first(gone)} if gone else {}),
                **({"epoch": epoch} if epoch is not None else {}),
            },
            unit=score.unit,
            changed=changed_settings(self.probe) if self.changed is None else self.changed,
            **provenance(self.device, seconds),
        )


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Says a line the first time alone: every stage of an encoder has the same to say."""
    said: set[str] = set()

    def say_new(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return say_new


def _corrupted(images: ImageSet) -> str | None:
    """What the scored images went through, in words."""
    corruption = corruption_of(images)
    return None if corruption is None else str(corruption)
