"""Geometry: how do the features of a data set lie, whatever its images show?"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from ssl_bench.composition.fields import (
    Count,
    Items,
    Pixels,
    Positive,
    PositiveShare,
    ShareSpan,
    Threads,
    Within,
    check_fields,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets

IMAGE_METRICS = ("rankme", "alpha_req", "effective_rank", "lidar", "alignment", "uniformity")
TOKEN_METRICS = ("outlier_share", "cls_patch_cosine", "register_patch_cosine", "position_r2")
_FACETS: tuple[Facet, ...] = ("cls", "patch_mean", *INNER_FACETS)
_NOT_SETTINGS = frozenset({"protocol", "facet", "batch_size", "num_workers"})


@dataclass(frozen=True)
class Geometry(Probe):
    """Ranks, spectra and likeness of the vectors of images, and habits of their patch tokens.

    Attributes:
        facet: What stands for an image, as for k-NN: "cls", "patch_mean", or of what is inside of
            a block the mean patch. Patch tokens are those that the block gives.
        image_size: Side in pixels; without it the encoder's own.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        view_images: So many images, drawn with the seed, are also looked at in random views, for
            LiDAR and alignment.
        views: Of each of them: random crops, half of them mirrored.
        view_area: Least and largest area of a crop, relative to the image.
        lidar_delta: Added to the diagonal of the covariance of views.
        alpha_ranks: First and last eigenvalue that alpha-ReQ is fitted to.
        pair_images: All pairs of so many images, drawn with the seed, make uniformity.
        outlier_factor: A patch is an outlier if it is longer than so many times the median of its
            image.
    """

    protocol: Literal["ssl_bench"] = "ssl_bench"
    facet: str | Sequence[str] = ("cls", "patch_mean")
    image_size: Pixels | None = None
    crop_share: PositiveShare = 0.875
    view_images: Count = 100
    views: Annotated[int, Within(2, 1000)] = 10
    view_area: ShareSpan = (0.5, 1.0)
    lidar_delta: Positive = 1e-4
    alpha_ranks: Annotated[Sequence[Count], Items(2, 2)] = (11, 100)
    pair_images: Count = 2000
    outlier_factor: Positive = 4.0
    batch_size: Count = 32
    num_workers: Threads = 4

    task = "geometry"
    role = "images"

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        asked_facets(self.facet, _FACETS)
        for name in ("view_area", "alpha_ranks"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigurationError(
                    f"probe.{name} expects the smaller number first, got [{low},{high}]"
                )

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, _FACETS)

    @property
    def facets(self) -> tuple[Facet, ...]:
        return self.asked_facets.names

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric)
            for layer in sorted(layers)
            for facet, metrics in self._metrics()
            for metric in metrics
        ]

    def _metrics(self) -> list[tuple[str, tuple[str, ...]]]:
        return [*((facet, IMAGE_METRICS) for facet in self.facets), ("token", TOKEN_METRICS)]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted to other images than those that are scored."""

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers from one pass over the images and one over views of some of them.

        What an encoder or a data set cannot tell is NaN, and the details say why.

        Raises:
            UnfitEncoder: the encoder has no [CLS] token, and "cls" is asked for.
        """
        from probes.geometry.run import GeometryRun

        yield from GeometryRun(self, context).scores()
