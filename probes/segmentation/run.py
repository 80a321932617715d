"""Linear segmentation of one encoder on one dataset: features, heads, scores, pictures."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from probes.features.sources import LayerGroup
from probes.features.split import TrainingSplit
from probes.features.stream import read_ahead
from probes.features.tiers.cache import TrainingPass
from probes.features.tiers.room import Room
from probes.features.tiers.training import TrainingFeatures
from probes.features.views import nearest_labels
from probes.heads.image_counts import ImageCounts
from probes.heads.kept import KeptState
from probes.heads.scored_images import Scoring
from probes.heads.scores import HeadScores, ScoredStream
from probes.heads.sgd import TrainedHeads, Training
from probes.segmentation.files import FileNames
from probes.segmentation.panels import draw_panel
from probes.segmentation.report import SourceReport
from ssl_bench.data.limited import sampled_numbers
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Score
from ssl_bench.system.files import remove_orphans, write_text_atomically


@dataclass(frozen=True)
class SegmentationRun:
    """All parts of a run, put together by the probe.

    Attributes:
        refit: Whether heads are fitted anew to all training images once the held-out ones have
            chosen between them.
        room: What the features may take, and where.
        kept: Folder for heads and counts of runs that may be killed.
        keep_minutes: Between two writings of these.
        facet: Under which the scores are recorded.
        folder: Where panels go.
        names: What they are called.
        panels: How many.
    """

    training_pass: TrainingPass
    training: Training
    scoring: Scoring
    split: TrainingSplit
    val_images: ImageSet
    sources: Sequence[LayerGroup]
    refit: bool
    room: Room
    kept: Path
    keep_minutes: float
    facet: str
    folder: Path
    names: FileNames
    panels: int

    def scores(self, guesses: Sequence[str]) -> Iterator[Score]:
        """Train all heads on passes over the training images, score them on one over the others.

        Raises:
            DataError: the labels hold too few classes.
        """
        features = self.features()
        heads = self.train(features)
        held_out = self.count_held_out(heads, features)
        if self.refit:
            heads = self._fit(features, self.split.every_entry(self.training_pass.views.count))
        reports, drawn = self.score(heads, held_out, self._details(heads, features, guesses))
        # Before the scores, so that no record stands there without them.
        self._draw(drawn, [report.chosen for report in reports])
        self._list_training_images()
        for report in reports:
            yield from report.scores()
        self._forget_kept()

    def features(self) -> TrainingFeatures:
        return self.training_pass.run(self.room)

    def train(self, features: TrainingFeatures) -> TrainedHeads:
        """Train the heads of all sources on the images that are not held out."""
        entries = self.split.entries(self.training_pass.views.count)
        seen = features.facts.classes(entries)
        if len(seen) < 2:
            names = [self.val_images.class_names[number] for number in seen]
            raise DataError(
                f"the training labels of {self.training_pass.images.name} hold "
                f"{names or 'no class'}, expected at least two classes"
            )
        return self._fit(features, entries)

    def count_held_out(
        self, heads: TrainedHeads, features: TrainingFeatures
    ) -> Int64[np.ndarray, "sources values 3 classes"] | None:
        """Counts summed over the held-out images, from their cached features."""
        if not self.split.held_out:
            return None
        stream = self._stream(heads)
        total = torch.zeros(1, dtype=torch.int64, device=self.training.device)
        positions = torch.tensor(sorted(self.split.held_out))
        entries = positions * self.training_pass.views.count
        read = features.of_layers(features.layers, self.training.device)
        chosen = entries.split(self.training_pass.batch_size)
        shown = self.training_pass.progress(read(chosen), "held-out images", len(chosen))
        for batch, some in zip(shown, positions.split(self.training_pass.batch_size), strict=False):
            for number, position in enumerate(some.tolist()):
                one = batch.features[:, number : number + 1]
                sample = self.training_pass.images[self.split.indices[position]]
                image = self.scoring.prepare(sample)
                blocks = dict(zip(features.layers, one, strict=True))
                total = total + stream.count_one(stream.predict(blocks, image), image.mask)
        return total.cpu().numpy()

    def score(
        self,
        heads: TrainedHeads,
        held_out: Int64[np.ndarray, "sources values 3 classes"] | None,
        details: dict[str, Any],
    ) -> tuple[list[SourceReport], list[Tensor]]:
        """Stream the scored images once through encoder and heads."""
        images, training_pass = self.val_images, self.training_pass
        per_image, drawn = self._counted(heads)
        if not per_image.has_labels:
            raise DataError(f"{images.name} {images.split} has no labelled pixel")
        width = training_pass.extractor.width(training_pass.facet)
        reports = [
            SourceReport(
                layer=source[-1],
                facet=self.facet,
                hyperparameter=self.training.hyperparameter,
                values=self.training.values,
                constant=heads.constant_channels[index] / width / len(source),
                class_names=images.class_names,
                val=HeadScores(per_image, index),
                held_out=None if held_out is None else held_out[index],
                shared={**details, "layers": list(source)},
            )
            for index, source in enumerate(self.sources)
        ]
        return reports, drawn

    def _counted(self, heads: TrainedHeads) -> tuple[ImageCounts, list[Tensor]]:
        """Counts of every scored image, and what is predicted of those that are drawn.

        Of what a killed run had counted nothing passes again.
        """
        stream, kept = self._stream(heads), self._kept(self._counts_path())
        per_image = stream.nothing()
        if kept.found:
            per_image.extend(kept.found)

        def write(counts: ImageCounts) -> None:
            if kept.is_due():
                kept.write(counts.state())

        every = range(len(self.val_images))
        self._passed(stream, every[len(per_image) :], per_image, write)
        # Once more, since a killed run may have counted them long ago.
        keeping, drawn = replace(stream, keep=True), self._drawn_images
        return per_image, self._passed(keeping, drawn, stream.nothing()) if drawn else []

    @property
    def _drawn_images(self) -> list[int]:
        return sampled_numbers(self.val_images.ids, self.panels)

    def _passed(
        self,
        stream: ScoredStream,
        indices: Sequence[int],
        per_image: ImageCounts,
        written: Callable[[ImageCounts], None] = lambda _: None,
    ) -> list[Tensor]:
        images, training_pass = self.val_images, self.training_pass
        items = read_ahead(images, indices, self.scoring.prepare, workers=training_pass.workers)
        shown = self.training_pass.progress(items, "scored images", len(indices))
        return stream.count(training_pass.extractor, training_pass.facet, shown, per_image, written)

    def _fit(self, features: TrainingFeatures, entries: Int64[Tensor, " chosen"]) -> TrainedHeads:
        """Heads of all sources; those that a killed run had finished are taken from its file."""
        kept = self._kept(self._heads_path(entries))
        if "finished" in kept.found:
            return TrainedHeads(**kept.found["finished"]).on(self.training.device)
        progress = self.training_pass.progress
        heads = self.training.train(features, self.sources, entries, progress, kept)
        if heads.seconds >= 60 * self.keep_minutes:
            kept.write({"finished": vars(heads)})
        return heads

    def _kept(self, path: Path) -> KeptState:
        return KeptState(path, self.keep_minutes, self.training_pass.say)

    def _heads_path(self, entries: Int64[Tensor, " chosen"]) -> Path:
        """Named after all that the heads depend on."""
        header = self.training_pass.header()
        return self._named("heads", header, self.sources, entries.tolist())

    def _counts_path(self) -> Path:
        """Named after all that the counts depend on."""
        images = (self.val_images.fingerprint(), *self.val_images.ids)
        split = (self.split.indices, sorted(self.split.held_out), self.refit)
        return self._named(
            "counts", self.training_pass.header(), self.sources, split, images, repr(self.scoring)
        )

    def _named(self, ending: str, *facts: Any) -> Path:
        words = json.dumps([repr(self.training), *facts])
        return self.kept / f"{sha256(words.encode()).hexdigest()[:16]}.{ending}"

    def _forget_kept(self) -> None:
        views = self.training_pass.views.count
        for entries in (self.split.entries(views), self.split.every_entry(views)):
            self._heads_path(entries).unlink(missing_ok=True)
        self._counts_path().unlink(missing_ok=True)
        remove_orphans(self.kept)

    def _stream(self, heads: TrainedHeads) -> ScoredStream:
        return ScoredStream(
            heads=heads,
            scoring=self.scoring,
            classes=self.training.classes,
            batch_size=self.training_pass.batch_size,
        )

    def _details(
        self, heads: TrainedHeads, features: TrainingFeatures, guesses: Sequence[str]
    ) -> dict[str, Any]:
        """What records say of the training, the same for all sources."""
        num_held_out, views = len(self.split.held_out), self.training_pass.views.count
        ignored = features.facts.without_label()[::views]
        return {
            "num_train_images": len(self.split.indices) - (0 if self.refit else num_held_out),
            "num_held_out_images": num_held_out,
            "train_ids_sha256": self.split.ids_sha256(self.training_pass.images),
            "all_ignored_train_images": int(ignored.sum()),
            "train_seconds": round(heads.seconds, 3),
            "unconverged_heads": heads.unfinished,
            "stalled_heads": heads.stalled,
            "feature_tier": features.tier,
            "encoder_passes": features.passes,
            "guesses": list(guesses),
        }

    def _list_training_images(self) -> None:
        """Leave the ids that were trained on beside the pictures; records hold their digest."""
        ids = self.split.ids(self.training_pass.images)
        text = "".join(f"{image_id}\n" for image_id in ids)
        write_text_atomically(self.folder / self.names.training_images, text)

    def _draw(self, drawn: Sequence[Tensor], rates: Sequence[int]) -> None:
        for index, predicted in zip(self._drawn_images, drawn, strict=True):
            sample = self.val_images[index]
            image = self.scoring.prepare(sample)
            masks = {"ground truth": image.mask}
            for source, rate, by_rate in zip(self.sources, rates, predicted, strict=True):
                title = f"layer{'s' * (len(source) > 1)} {', '.join(map(str, source))}"
                masks[title] = by_rate[rate]
            size = sample.image.shape[:2]
            full = {title: nearest_labels(mask, *size).numpy() for title, mask in masks.items()}
            path = self.folder / self.names.panel(sample.image_id)
            draw_panel(sample.image, full, self.val_images.class_names, path)
