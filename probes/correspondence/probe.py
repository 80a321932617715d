"""Correspondence: does a patch find the same point in another image?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from ssl_bench.composition.fields import (
    Count,
    CountOrZero,
    Pixels,
    Positive,
    PositiveOrZero,
    PositiveShare,
    Temperature,
    Threads,
    Within,
    check_fields,
    require_some,
)
from ssl_bench.composition.presets import changed_settings
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets
from ssl_bench.system.naming import image_name

# From a third on, four corners that move inwards may enclose nothing convex.
Strength = Annotated[float, Within(0, 0.33)]
NumPoints = Annotated[int, Within(1, 65536)]
Warp = Literal["homography", "crop", "flip"]

_FACETS: tuple[Facet, ...] = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
# Alphas are in the names of the metrics.
_NOT_SETTINGS = frozenset(
    {"protocol", "facet", "alphas", "panels", "batch_size", "memory_gib", "num_workers"}
)
_SHOWN_ALPHA = 0.1


@dataclass(frozen=True)
class Correspondence(Probe):
    """PCK: the share of points whose nearest patch in another image lies near their true place.

    Attributes:
        protocol: "warps": the central square of each image and a warp of it, whose geometry is
            known; "spair": the annotated pairs of a dataset that has such.
        facet: What is compared, one or several of token, token_normed, key, query, value,
            attn_out, attn_skip, mlp_hidden, mlp_out, and submodules of a block.
        alphas: How far from its true place a point may be found, relative to the side of the view
            for warps and to the longer side of the object's box for annotated pairs.
        image_size: Side of both views in pixels, rounded to whole patches; without it the
            encoder's own.
        warp: For warps: "homography" moves the four corners on their own, "crop" enlarges a
            square, "flip" mirrors left and right.
        strength: For homography and crop: how far inwards corners move at most, relative to the
            side.
        num_points: For warps: how many points of an image are looked for.
        prediction: "cell" takes the middle of the most similar patch, "soft" a mean of patches
            around it, weighted by similarity.
        sigma: For soft: of a Gaussian around the most similar patch, in patches.
        temperature: For soft: similarities are divided by it.
        panels: How many pairs are drawn, from all over the set.
        memory_gib: For features of images that come in several pairs.

    Source: the soft prediction is `utils/keypoints.py` of https://github.com/visinf/INSID3
    (f1c9622a), whose cells begin where ours have their middle.
    """

    protocol: Literal["warps", "spair"] = "warps"
    facet: str | Sequence[str] = "token"
    alphas: Sequence[PositiveShare] = (0.01, 0.05, 0.1, 0.15)
    image_size: Pixels | None = None
    warp: Warp = "homography"
    strength: Strength = 0.25
    num_points: NumPoints = 256
    prediction: Literal["cell", "soft"] = "cell"
    sigma: Positive = 7.0
    temperature: Temperature = 0.04
    panels: CountOrZero = 6
    batch_size: Count = 16
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4

    task = "correspondence"
    rounds_size = True
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_some("probe.alphas", self.alphas)
        if len(set(self.metrics)) < len(self.metrics):
            raise ConfigurationError(
                f"probe.alphas must name each share once, got {list(self.alphas)}"
            )
        asked_facets(self.facet, _FACETS)

    @property
    def role(self) -> str:
        """Warps are made of any images."""
        return "images" if self.protocol == "warps" else "correspondence"

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, _FACETS)

    @property
    def facets(self) -> tuple[Facet, ...]:
        return self.asked_facets.names

    @property
    def metrics(self) -> tuple[str, ...]:
        """One an alpha, in their order."""
        return tuple(f"pck_{float(alpha)!r}" for alpha in self.alphas)

    @property
    def shown(self) -> int:
        """Which of the alphas says in a picture what is right."""
        known = [float(alpha) for alpha in self.alphas]
        return known.index(_SHOWN_ALPHA) if _SHOWN_ALPHA in known else len(known) - 1

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric)
            for layer in layers
            for facet in self.facets
            for metric in self.metrics
        ]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images() if self.protocol == "warps" else dataset.val()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted."""

    def settings(self) -> dict[str, Any]:
        left_out = set(_NOT_SETTINGS)
        if self.protocol != "warps":
            left_out |= {"warp", "strength", "num_points"}
        if self.warp == "flip":
            left_out.add("strength")
        if self.prediction == "cell":
            left_out |= {"sigma", "temperature"}
        values = {name: v for name, v in asdict(self).items() if name not in left_out}
        numbers = values.keys() & {"strength", "sigma", "temperature"}
        return values | {name: float(values[name]) for name in numbers}

    @property
    def folder(self) -> str:
        """Where pictures are, below those of an encoder: protocol and what differs."""
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        return "_".join([self.protocol, *changed])

    def picture(self, layer: int, facet: str, image_id: str) -> str:
        """Path of the picture of a pair, below those of an encoder."""
        return f"{self.folder}/block{layer:02d}_{facet}/{image_name(image_id)}"

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        return {
            self.picture(layer, facet, image_id): [layer]
            for layer in layers
            for facet in self.facets
            for image_id in sampled(images.ids, self.panels)
        }

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets; every image passes the encoder once.

        Of annotated pairs as long as the images of a category fit into `memory_gib`.

        Raises:
            DataError: a file cannot be read.
            CheckpointError: features are not finite.
        """
        from probes.correspondence.run import CorrespondenceRun

        yield from CorrespondenceRun(self, context).scores()
