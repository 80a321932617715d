"""Clustering: do classes come out when nobody says what they are?"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ssl_bench.composition.fields import (
    Count,
    Pixels,
    PositiveOrZero,
    PositiveShare,
    Threads,
    check_fields,
    require_some,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets

METRICS = ("nmi", "ari", "purity", "miou_matched")
_FACETS: tuple[Facet, ...] = ("cls", "patch_mean", *INNER_FACETS)
_NOT_SETTINGS = frozenset({"protocol", "facet", "batch_size", "memory_gib", "num_workers"})


@dataclass(frozen=True)
class Clustering:
    """K-means of the images that are scored, without their labels, beside their classes.

    Attributes:
        facet: What stands for an image, as for k-NN, brought to length 1.
        clusters_per_class: One or several numbers; 1 is as many clusters as classes.
        num_restarts: K-means begins so often, and the tightest clusters are taken.
        image_size: Side in pixels; without it the encoder's own.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        memory_gib: For the features; layers that do not fit wait for another pass.
    """

    protocol: Literal["images"] = "images"
    facet: str | Sequence[str] = "cls"
    clusters_per_class: Sequence[Count] = (1,)
    num_restarts: Count = 3
    image_size: Pixels | None = None
    crop_share: PositiveShare = 0.875
    batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4

    task = "clustering"
    role = "classification"

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_some("probe.clusters_per_class", self.clusters_per_class)
        asked_facets(self.facet, _FACETS)

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, _FACETS)

    @property
    def facets(self) -> tuple[Facet, ...]:
        return self.asked_facets.names

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric_name(metric, times))
            for layer in sorted(layers)
            for facet in self.facets
            for times in dict.fromkeys(self.clusters_per_class)
            for metric in METRICS
        ]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> None:
        """Clusters are those of the images that are scored."""

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers; a pass over the images serves as many as fit into `memory_gib`.

        Raises:
            ConfigurationError: more clusters are asked for than there are images, or the encoder
                has no [CLS] token.
        """
        from probes.clustering.run import ClusteringRun

        yield from ClusteringRun(self, context).scores()


def metric_name(metric: str, times: int) -> str:
    """With the number of clusters a class where that is not one."""
    return metric if times == 1 else f"{metric}_x{times}"
