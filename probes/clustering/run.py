"""Clustering of one encoder's features on one dataset: features, k-means, scores."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int64

from probes.clustering.agreement import SCORES, Met, meetings, of_random_clusters
from probes.clustering.intervals import few_images_warning, image_intervals
from probes.clustering.kmeans import clustered
from probes.clustering.probe import Clustering, metric_name
from probes.features.image import ImagePass, is_constant
from probes.features.stream import batches
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import Interval

Cell = tuple[int, str]


@dataclass(frozen=True)
class ClusteringRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: Clustering
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `Clustering.run`."""
        probe, context = self.probe, self.context
        images = probe.split(context.dataset)
        self._require_enough(images)
        image_pass = ImagePass(
            context=context,
            facets=probe.facets,
            image_size=probe.image_size,
            crop_share=probe.crop_share,
            batch_size=probe.batch_size,
            workers=probe.num_workers,
        )
        at_once = image_pass.layers_at_once(len(images), probe.memory_gib)
        for layers in batches(sorted(context.layers), at_once):
            found = image_pass.run(images, range(len(images)), layers)
            cells = list(itertools.product(layers, probe.facets))
            for cell in context.progress(cells, "clustering", len(cells)):
                labelled = found.of(*cell)
                unit = F.normalize(labelled.features, dim=1).double().numpy()
                details = {"constant_features": is_constant(labelled.features)}
                for times in probe.numbers:
                    yield from self._scores(
                        cell, times, unit, labelled.labels.numpy(), len(images.class_names), details
                    )

    def _require_enough(self, images: ImageSet) -> None:
        asked = max(self.probe.clusters_per_class) * len(images.class_names)
        if asked > len(images):
            raise ConfigurationError(
                f"probe.clusters_per_class must give at most the {len(images)} clusters that "
                f"images of {images.name} {images.split} can make, got {asked}; ask for fewer, or "
                "for more images"
            )

    def _scores(
        self,
        cell: Cell,
        times: int,
        unit: Float[np.ndarray, "images dim"],
        classes: Int64[np.ndarray, " images"],
        num_classes: int,
        details: dict[str, Any],
    ) -> Iterator[Score]:
        clusters = self._clusters(unit, times * num_classes)
        met = meetings(clusters, classes, times * num_classes, num_classes)
        yield from scores_of(self.probe, cell, times, met, image_intervals(met), len(unit), details)

    def _clusters(
        self, unit: Float[np.ndarray, "images dim"], count: int
    ) -> Int64[np.ndarray, " images"]:
        restarts, seed = self.probe.num_restarts, self.context.seed
        fitted = clustered(unit, count, restarts=restarts, seed=seed)
        return np.asarray(fitted.labels_, np.int64)


def scores_of(
    probe: Clustering,
    cell: Cell,
    times: int,
    met: Met,
    intervals: Mapping[str, Interval | None],
    num_images: int,
    details: Mapping[str, Any],
) -> Iterator[Score]:
    """All metrics of one block and facet in so many clusters a class; some have an interval."""
    baselines = of_random_clusters(met, probe.metrics(times))
    counted = {
        "num_clusters": len(met),
        "empty_clusters": int((met.sum(1) == 0).sum()),
        "warnings": few_images_warning(met, num_images),
    }
    for metric in probe.metrics(times):
        baseline = baselines[metric].as_details() if metric in baselines else {}
        yield Score(
            layer=cell[0],
            facet=cell[1],
            metric=metric_name(metric, times),
            value=float(SCORES[metric](met)),
            ci95=intervals.get(metric),
            num_images=num_images,
            details={**details, **counted, **baseline},
            unit="" if metric == "ari" else "%",
        )
