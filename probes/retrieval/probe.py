"""Dense retrieval: label the patches of an image by those of the training set most like them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from probes.features.sources import asked_patches
from ssl_bench.composition.fields import (
    Count,
    Engine,
    Pixels,
    PositiveOrZero,
    Temperature,
    Threads,
    check_fields,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import AskedFacets, Facet

METRICS = ("miou", "pixel_accuracy")
_NOT_SETTINGS = frozenset({"protocol", "facet", "memory_gib", "num_workers", "engine", "guesses"})


@dataclass(frozen=True)
class Retrieval(Probe):
    """Patches take the labels of their nearest neighbours; nothing is trained.

    Attributes:
        protocol: The preset these values come from; records carry it.
        neighbours: How many patches of the memory vote for a patch.
        temperature: Of the softmax over their cosine similarities.
        memory_patches: Patches of the training set that are remembered, drawn with the seed.
        facet: What of a patch is compared: token, key, query, value, attn_out, attn_skip,
            mlp_hidden, mlp_out, or a submodule of a block.
        norm: "final": patches after the encoder's last norm. "none": the block's output.
        crops: "whole" or "resized" training images, as in linear segmentation.
        batch_size: Images that pass the encoder together.
        score_size: Masks are reduced to this size before scoring; the original size if None.
        memory_gib: For the memories; layers that do not fit wait for another pass.
        engine: What compares the patches, "faiss" or "torch"; by default faiss for many on a
            CPU, and torch else.

    Source: Balazevic et al., "Towards In-Context Scene Understanding",
    https://arxiv.org/abs/2306.01667. Ignored pixels are left out of the label histograms, where
    https://github.com/vpariza/open-hummingbird-eval counts them as class 0.
    """

    protocol: str = "ssl_bench"
    neighbours: Count = 30
    temperature: Temperature = 0.02
    memory_patches: Count = 100_000
    image_size: Pixels = 512
    facet: str = "token"
    norm: Literal["none", "final"] = "none"
    crops: Literal["whole", "resized"] = "whole"
    views: Count = 1
    train_images: Count | None = None
    score_size: Pixels | None = None
    batch_size: Count = 16
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    engine: Engine = "auto"
    guesses: Sequence[str] = ()

    task = "retrieval"
    role = "segmentation"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        asked_patches(self.facet, self.norm)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.scored_facet, m) for layer in sorted(layers) for m in METRICS]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_patches(self.facet, self.norm)

    @property
    def scored_facet(self) -> Facet:
        """As records have it."""
        return self.asked_facets.names[0]

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers, as many at once as their memories fit into `memory_gib`.

        Raises:
            ConfigurationError: more neighbours are asked for than there are patches.
            DataError: no training patch has a label.
        """
        from probes.retrieval.run import RetrievalRun

        yield from RetrievalRun(self, context).scores()
