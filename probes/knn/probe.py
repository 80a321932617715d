"""k-NN classification: do images of one class lie together?"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from probes.features.shots import AskedShots, require_one_way_to_draw, shot_metric, shots_of
from ssl_bench.composition.fields import (
    Count,
    Engine,
    Pixels,
    PositiveOrZero,
    PositiveShare,
    Temperature,
    Threads,
    check_fields,
    require_some,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets

TOPS = (1, 5)
_FACETS: tuple[Facet, ...] = ("cls", "patch_mean", *INNER_FACETS)
_NOT_SETTINGS = frozenset(
    {"protocol", "facet", "batch_size", "memory_gib", "num_workers", "engine", "guesses"}
)
# Said by the metric, or without a meaning, where images of each class are drawn; and where not.
_NOT_OF_SHOTS = frozenset({"shots", "neighbours", "train_images"})
_ONLY_OF_SHOTS = frozenset({"shots", "draws"})


@dataclass(frozen=True)
class KNN(Probe):
    """Images take the class that their nearest training images vote for; nothing is trained.

    Attributes:
        neighbours: How many training images vote, one or several numbers.
        temperature: A neighbour's vote is exp(cosine similarity / temperature).
        facet: What stands for an image, one or several of "cls" and "patch_mean", its mean patch,
            both after the encoder's final norm, and of attn_out, attn_skip, mlp_hidden, mlp_out
            and submodules of a block, of which the mean patch is taken as it is.
        image_size: Side in pixels; without it the encoder's own.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        train_images: At most so many vote, drawn with the seed.
        shots: Images of each class that vote, one or several numbers n; neighbours are then those
            of `neighbours` below n, and n.
        draws: How often these are drawn; the scores are means over the draws.
        memory_gib: For the features; layers that do not fit wait for another pass.
        engine: What compares the images, "faiss" or "torch"; by default faiss for many images on a
            CPU, and torch else. The neighbours are the same.
        guesses: Where the preset differs from its authors'.

    Source: `eval_knn.py` of https://github.com/facebookresearch/dino, which looks at the last
    block alone.
    """

    protocol: Literal["dino", "dinov2"] = "dino"
    neighbours: Sequence[Count] = (10, 20, 100, 200)
    temperature: Temperature = 0.07
    facet: str | Sequence[str] = "cls"
    image_size: Pixels | None = None
    crop_share: PositiveShare = 0.875
    train_images: Count | None = None
    shots: AskedShots = None
    draws: Count = 5
    batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    engine: Engine = "auto"
    guesses: Sequence[str] = ()

    task = "knn"
    role = "classification"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_some("probe.neighbours", self.neighbours)
        asked_facets(self.facet, _FACETS)
        require_one_way_to_draw(self.shots, self.train_images)

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, _FACETS)

    @property
    def facets(self) -> tuple[str, ...]:
        return self.asked_facets.names

    def fitted_to_images(self, dataset: Dataset, typed: Collection[str]) -> Probe:
        """With as many neighbours as there are images to vote, unless somebody typed how many."""
        if "neighbours" in typed or self.shots is not None:
            return self
        images = len(self.training_images(dataset))
        count = min(images, self.train_images or images)
        fitting = [k for k in self.neighbours if k <= count] or [count]
        return self if len(fitting) == len(self.neighbours) else replace(self, neighbours=fitting)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric)
            for layer in sorted(layers)
            for facet in self.facets
            for metric in self._metrics()
        ]

    def _metrics(self) -> list[str]:
        if self.shots is None:
            return metrics(self.neighbours)
        return [
            shot_metric(metric, count)
            for count in shots_of(self.shots)
            for metric in metrics(self.neighbours_of(count))
        ]

    def neighbours_of(self, shots: int) -> tuple[int, ...]:
        """How many vote where so many images of each class are there."""
        return (*sorted(k for k in set(self.neighbours) if k < shots), shots)

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        unsaid = _NOT_SETTINGS | (_ONLY_OF_SHOTS if self.shots is None else _NOT_OF_SHOTS)
        return {name: value for name, value in asdict(self).items() if name not in unsaid}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers; a pass over the images serves as many as fit into `memory_gib`.

        An image is right in the top 5 if one of its nearest images is of its class and fewer than
        five classes have more votes: where fewer than five have any, these alone count. Top-5
        accuracy is NaN where there are fewer than five classes.

        Raises:
            ConfigurationError: more neighbours are asked for than there are training images, or
                the encoder has no [CLS] token.
            DataError: a class has fewer images than are drawn of it.
        """
        from probes.knn.run import KNNRun

        yield from KNNRun(self, context).scores()


def metrics(neighbours: Sequence[int]) -> list[str]:
    """Names of what is scored, in the order in which the run does it."""
    return [f"top{top}_k{k}" for k in neighbours for top in TOPS]
