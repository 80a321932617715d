"""Clustering of one encoder's features on one dataset: features, k-means, scores."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int64

from probes.clustering.agreement import (
    Matching,
    Met,
    Scores,
    ari,
    meetings,
    nmi,
    purity,
    without_a_look,
    without_each,
)
from probes.clustering.kmeans import clustered
from probes.clustering.probe import Clustering, metric_name
from probes.features.image import ImagePass, is_constant
from probes.features.stream import batches
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import Interval, Jackknife

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
        matching = Matching.of(met)
        used = {"num_clusters": len(met), "empty_clusters": int((met.sum(1) == 0).sum())}
        ways: dict[str, Callable[[Met], Scores]] = {
            "nmi": nmi,
            "ari": ari,
            "purity": purity,
            "miou_matched": matching.miou,
        }
        baselines = without_a_look(met)
        for metric, score in ways.items():
            baseline = baselines[metric].as_details() if metric in baselines else {}
            value = float(score(met))
            estimate = Jackknife(value, without_each(met, clusters, classes, score))
            is_share = metric != "ari"
            yield Score(
                layer=cell[0],
                facet=cell[1],
                metric=metric_name(metric, times),
                value=value,
                ci95=_interval(estimate, (0.0, 100.0) if is_share else (-1.0, 1.0)),
                num_images=len(unit),
                details=details | used | baseline,
                unit="%" if is_share else "",
            )

    def _clusters(
        self, unit: Float[np.ndarray, "images dim"], count: int
    ) -> Int64[np.ndarray, " images"]:
        restarts, seed = self.probe.num_restarts, self.context.seed
        fitted = clustered(unit, count, restarts=restarts, seed=seed)
        return np.asarray(fitted.labels_, np.int64)


def _interval(estimate: Jackknife, ends: Interval) -> Interval | None:
    """Student's t, within what a score can be."""
    if math.isnan(estimate.value) or math.isnan(estimate.margin):
        return None
    low, high = ends
    return (
        max(low, estimate.value - estimate.margin),
        min(high, estimate.value + estimate.margin),
    )
