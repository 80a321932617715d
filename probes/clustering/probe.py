"""Clustering: do classes come out when nobody says what they are?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
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
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets

METRICS = ("ami", "nmi", "ari", "purity", "miou_matched")
PATCH_METRICS = (*METRICS, "accuracy_matched")
MAJORITY = "miou_majority"
"""Of patches in more clusters than classes."""

_FACETS: Mapping[str, tuple[Facet, ...]] = MappingProxyType(
    {
        "images": ("cls", "patch_mean", *INNER_FACETS),
        "patches": ("token", "token_normed", "key", "query", "value", *INNER_FACETS),
    }
)
_NOT_SETTINGS = frozenset({"protocol", "facet", "batch_size", "memory_gib", "num_workers"})


@dataclass(frozen=True)
class Clustering(Probe):
    """K-means without labels, and how well its clusters agree with the classes.

    Attributes:
        protocol: "images": of images that have a class as a whole. "patches": of the patches of
            training images; each pixel of the scored ones is in the cluster of the patch over it.
        facet: What stands for an image, as for k-NN, or for a patch, as in correspondence; one or
            several, brought to length 1.
        clusters_per_class: One or several numbers; 1 is as many clusters as classes.
        num_restarts: K-means begins so often, and the tightest clusters are taken.
        fit_patches: For patches: so many training patches at most are clustered, drawn with the
            seed.
        image_size: Side in pixels; of images the encoder's own without it, of patches 512.
        crop_share: For images: side of the central square that is looked at, relative to the
            shorter side.
        memory_gib: For the features; layers that do not fit wait for another pass.
    """

    protocol: Literal["images", "patches"] = "images"
    facet: str | Sequence[str] = "cls"
    clusters_per_class: Sequence[Count] = (1,)
    num_restarts: Count = 3
    fit_patches: Count = 20_000
    image_size: Pixels | None = None
    crop_share: PositiveShare = 0.875
    batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4

    task = "clustering"
    protocols_by_role = MappingProxyType({"classification": "images", "segmentation": "patches"})

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_some("probe.clusters_per_class", self.clusters_per_class)
        asked_facets(self.facet, _FACETS[self.protocol])

    @property
    def role(self) -> str:
        return "classification" if self.protocol == "images" else "segmentation"

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, _FACETS[self.protocol])

    @property
    def facets(self) -> tuple[Facet, ...]:
        return self.asked_facets.names

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of clusters a class, each once."""
        return tuple(dict.fromkeys(self.clusters_per_class))

    def metrics(self, times: int) -> tuple[str, ...]:
        """What is scored with so many clusters a class."""
        if self.protocol == "images":
            return METRICS
        return PATCH_METRICS if times == 1 else (*PATCH_METRICS, MAJORITY)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric_name(metric, times))
            for layer in sorted(layers)
            for facet in self.facets
            for times in self.numbers
            for metric in self.metrics(times)
        ]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """Whole images are clustered where they are scored."""
        return None if self.protocol == "images" else dataset.train()

    def settings(self) -> dict[str, Any]:
        unused = "fit_patches" if self.protocol == "images" else "crop_share"
        left_out = {*_NOT_SETTINGS, unused}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers; a pass over the images serves as many as fit into `memory_gib`.

        Raises:
            ConfigurationError: more clusters are asked for than there are images or patches, or
                the encoder has no [CLS] token.
            DataError: no scored image has a labelled pixel.
        """
        if self.protocol == "patches":
            from probes.clustering.patches import PatchClusteringRun

            yield from PatchClusteringRun(self, context).scores()
        else:
            from probes.clustering.run import ClusteringRun

            yield from ClusteringRun(self, context).scores()


def metric_name(metric: str, times: int) -> str:
    """With the number of clusters a class where that is not one."""
    return metric if times == 1 else f"{metric}_x{times}"
