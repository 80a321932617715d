"""Clustering of patches: training patches, k-means, clusters of the scored images, scores."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float16
from torch import Tensor

from probes.clustering.agreement import Matching
from probes.clustering.intervals import patch_intervals
from probes.clustering.kmeans import Centres, clustered
from probes.clustering.passes import Cell, PatchPasses
from probes.clustering.patch_labels import Meetings
from probes.clustering.probe import Clustering
from probes.clustering.run import scores_of
from probes.features.image import is_constant
from probes.features.stream import batches
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext, Score


@dataclass(frozen=True)
class PatchClusteringRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: Clustering
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `Clustering.run`."""
        context = self.context
        train, val = self.probe.training_images(context.dataset), self.probe.split(context.dataset)
        assert train is not None
        every = PatchPasses(self.probe, context, sorted(context.layers))
        chosen = every.chosen(train)
        self._require_enough(len(chosen), train, len(val.class_names))
        for layers in batches(every.layers, every.layers_at_once(len(chosen))):
            passes = PatchPasses(self.probe, context, layers)
            vectors = passes.vectors(train, chosen)
            cells = context.progress(passes.cells, "clustering", len(vectors))
            fits = {cell: self._fit(vectors.pop(cell), len(val.class_names)) for cell in cells}
            labels, clusters = passes.clusters(val, {c: fit.centres for c, fit in fits.items()})
            if not len(labels.pixels):
                raise DataError(f"{val.name} {val.split} has no labelled pixel")
            for cell, fit in fits.items():
                for times, found in zip(self.probe.numbers, clusters[cell], strict=True):
                    classes = len(val.class_names)
                    meetings = Meetings.of(labels, found, times * classes, classes)
                    yield from self._scores(cell, times, meetings, val, fit.details)

    def _require_enough(self, patches: int, train: ImageSet, classes: int) -> None:
        asked = max(self.probe.numbers) * classes
        if asked > patches:
            raise ConfigurationError(
                f"probe.clusters_per_class must give at most the {patches} clusters that patches "
                f"of {train.name} {train.split} can make, got {asked}; ask for fewer, or for more "
                "images or a larger probe.fit_patches"
            )

    def _fit(self, vectors: Float16[Tensor, "chosen dim"], classes: int) -> "_Fit":
        unit, probe = vectors.float(), self.probe
        fitted = [
            clustered(
                unit.numpy(),
                times * classes,
                restarts=probe.num_restarts,
                seed=self.context.seed,
            )
            for times in probe.numbers
        ]
        details = {"num_fit_patches": len(unit), "constant_features": is_constant(unit)}
        return _Fit(Centres.of(fitted, self.context.device), details)

    def _scores(
        self, cell: Cell, times: int, meetings: Meetings, images: ImageSet, known: dict[str, Any]
    ) -> Iterator[Score]:
        met = meetings.met
        ious = Matching.of(met).ious(met).tolist()
        by_class = {
            name: None if math.isnan(iou) else iou
            for name, iou in zip(images.class_names, ious, strict=True)
        }
        intervals = patch_intervals(met, meetings.by_image)
        details = known | {"iou_by_class": by_class}
        yield from scores_of(self.probe, cell, times, met, intervals, len(images), details)


@dataclass(frozen=True)
class _Fit:
    """K-means of one block, with each number of clusters.

    Attributes:
        details: What records say of it.
    """

    centres: Centres
    details: dict[str, Any]
