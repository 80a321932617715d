"""Linear segmentation of one encoder on one dataset: features, heads, scores, pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from probes.features.cache import TrainingPass
from probes.features.split import TrainingSplit
from probes.features.stream import batches, read_ahead
from probes.features.training import TrainingFeatures
from probes.features.views import nearest_labels
from probes.heads.scored_images import Scoring
from probes.heads.scores import HeadScores, ScoredStream
from probes.heads.sgd import LayerGroup, TrainedHeads, Training
from probes.pictures import image_name
from probes.segmentation.panels import draw_panel
from probes.segmentation.report import SourceReport
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Progress, Score
from ssl_bench.scores import IGNORED
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.transfers import sent


@dataclass(frozen=True)
class FileNames:
    """Of what a run leaves beside its records."""

    protocol: str
    features: str
    seed: int

    def panel(self, image_id: str) -> str:
        return image_name(image_id, before=f"{self.protocol}-{self.features}-")

    @property
    def training_images(self) -> str:
        return f"{self.protocol}-{self.features}-seed{self.seed}-train.txt"


@dataclass(frozen=True)
class SegmentationRun:
    """All parts of a run, put together by the probe.

    Attributes:
        refit: Whether heads are fitted anew to all training images once the held-out ones have
            chosen between them.
        memory_gib: What the features may take in memory.
        cache: Folder for features beyond that.
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
    memory_gib: float
    cache: Path
    facet: str
    folder: Path
    names: FileNames
    panels: int

    def scores(self, guesses: Sequence[str]) -> Iterator[Score]:
        """Train all heads on one pass over the training images, score them on one over the others.

        Raises:
            DataError: the labels hold too few classes.
        """
        features = self.features()
        heads = self.train(features)
        held_out = self.count_held_out(heads, features)
        if self.refit:
            heads = self._fit(features, self.split.every_entry(self.training_pass.views.count))
        reports, drawn = self.score(heads, held_out, self._details(heads, features, guesses))
        # First, so that no record stands there without them.
        self._draw(drawn, [report.chosen for report in reports])
        self._list_training_images()
        for report in reports:
            yield from report.scores()

    def features(self) -> TrainingFeatures:
        return self.training_pass.run(memory_gib=self.memory_gib, folder=self.cache)

    def train(self, features: TrainingFeatures) -> list[TrainedHeads]:
        """Train all heads, in groups of layers whose features fit into memory together."""
        entries = self.split.entries(self.training_pass.views.count)
        seen = set(features.labels[entries].unique().tolist()) - {IGNORED}
        if len(seen) < 2:
            names = [self.val_images.class_names[number] for number in seen]
            raise DataError(
                f"the training labels of {self.training_pass.images.name} hold "
                f"{names or 'no class'}, expected at least two classes"
            )
        return self._fit(features, entries)

    def count_held_out(
        self, heads: Sequence[TrainedHeads], features: TrainingFeatures
    ) -> Int64[np.ndarray, "sources values 3 classes"] | None:
        """Counts summed over the held-out images, from their cached features."""
        stream, total = self._stream(heads), None
        positions = sorted(self.split.held_out)
        for position in self._progress(positions, "held-out images", len(positions)):
            entry = position * self.training_pass.views.count
            of_entry = sent(features.of_entry(entry)[:, None], self.training.device)
            blocks = dict(zip(features.layers, of_entry, strict=True))
            sample = self.training_pass.images[self.split.indices[position]]
            image = self.scoring.prepare(sample)
            counts = stream.count_one(stream.predict(blocks, image), image.mask)
            total = counts if total is None else total + counts
        return None if total is None else total.cpu().numpy()

    def score(
        self,
        heads: Sequence[TrainedHeads],
        held_out: Int64[np.ndarray, "sources values 3 classes"] | None,
        details: dict[str, Any],
    ) -> tuple[list[SourceReport], list[Tensor]]:
        """Stream the scored images once through encoder and heads."""
        images, training_pass = self.val_images, self.training_pass
        items = read_ahead(
            images, range(len(images)), self.scoring.prepare, workers=training_pass.workers
        )
        per_image, drawn = self._stream(heads).count(
            training_pass.extractor,
            training_pass.facet,
            self._progress(items, "scored images", len(images)),
        )
        if not per_image.has_labels:
            raise DataError(f"{images.name} {images.split} has no labelled pixel")
        constant = [number for some in heads for number in some.constant_channels]
        reports = [
            SourceReport(
                layer=source[-1],
                facet=self.facet,
                hyperparameter=self.training.hyperparameter,
                values=self.training.values,
                constant=constant[index] / training_pass.extractor.dim / len(source),
                class_names=images.class_names,
                val=HeadScores(per_image, index),
                held_out=None if held_out is None else held_out[index],
                shared={**details, "layers": list(source)},
            )
            for index, source in enumerate(self.sources)
        ]
        return reports, drawn

    @property
    def _progress(self) -> Progress:
        return self.training_pass.progress

    def _fit(
        self, features: TrainingFeatures, entries: Int64[Tensor, " chosen"]
    ) -> list[TrainedHeads]:
        groups = batches(self.sources, self._sources_at_once(features))
        return [self.training.train(features, group, entries, self._progress) for group in groups]

    def _stream(self, heads: Sequence[TrainedHeads]) -> ScoredStream:
        return ScoredStream(
            heads=heads,
            scoring=self.scoring,
            classes=self.training.classes,
            batch_size=self.training_pass.batch_size,
            keep=self.panels,
        )

    def _sources_at_once(self, features: TrainingFeatures) -> int:
        if features.tier == "memory":
            return len(self.sources)
        source_bytes = features.layer_bytes() * len(self.sources[0])
        return max(1, int(self.memory_gib * 2**30 / source_bytes))

    def _details(
        self, heads: Sequence[TrainedHeads], features: TrainingFeatures, guesses: Sequence[str]
    ) -> dict[str, Any]:
        """What records say of the training, the same for all sources."""
        num_held_out, views = len(self.split.held_out), self.training_pass.views.count
        ignored = (features.labels[::views] == IGNORED).flatten(1).all(1)
        unfinished = [some.unfinished for some in heads if some.unfinished is not None]
        stalled = [some.stalled for some in heads if some.stalled is not None]
        return {
            "num_train_images": len(self.split.indices) - (0 if self.refit else num_held_out),
            "num_held_out_images": num_held_out,
            "train_ids_sha256": self.split.ids_sha256(self.training_pass.images),
            "all_ignored_train_images": int(ignored.sum()),
            "train_seconds": round(sum(some.seconds for some in heads), 3),
            "unconverged_heads": sum(unfinished) if unfinished else None,
            "stalled_heads": sum(stalled) if stalled else None,
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
        for index, predicted in enumerate(drawn):
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
