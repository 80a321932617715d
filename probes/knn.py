"""k-NN classification: do images of one class lie together? Nothing is trained."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from probes.features.image import ImagePass, is_constant
from probes.features.split import (
    ShotCounts,
    Shots,
    TrainingSplit,
    reject_train_images_with_shots,
    shot_counts,
)
from probes.features.stream import batches
from probes.top_k import TOP_K, average_over_draws, shot_metric_name, top_k_score
from ssl_bench.composition.compose import fill_in_guesses
from ssl_bench.composition.fields import (
    Count,
    Engine,
    Pixels,
    PositiveFraction,
    PositiveOrZero,
    Temperature,
    Threads,
    require_nonempty,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS
from ssl_bench.metrics import LabelledFeatures
from ssl_bench.neighbours import knn_ranks, unit_vectors, zero_vectors_warning


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
    crop_share: PositiveFraction = 0.875
    train_images: Count | None = None
    shots: ShotCounts = None
    draws: Count = 5
    batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    engine: Engine = "auto"
    guesses: Sequence[str] = ()

    task = "knn"
    known_facets = ("cls", "patch_mean", *INNER_FACETS)
    role = "classification"
    keeps_images = True
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size", "memory_gib", "engine")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.neighbours", self.neighbours)
        reject_train_images_with_shots(self.shots, self.train_images)

    def settings(self) -> dict[str, Any]:
        # Of shots the metric says their number and that of the neighbours.
        unsaid = (
            ("shots", "draws") if self.shots is None else ("shots", "neighbours", "train_images")
        )
        return {name: value for name, value in super().settings().items() if name not in unsaid}

    def adapt_to_images(self, dataset: Dataset, typed: Collection[str]) -> Probe:
        """With as many neighbours as there are images to vote, unless somebody typed how many."""
        if "neighbours" in typed or self.shots is not None:
            return self
        images = len(self.training_images(dataset))
        count = min(images, self.train_images or images)
        fitting = [k for k in self.neighbours if k <= count] or [count]
        same = fitting == list(self.neighbours)
        return self if same else replace(self, neighbours=fitting)

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        names = metrics(self.neighbours)
        if self.shots is not None:
            names = [
                shot_metric_name(metric, count)
                for count in shot_counts(self.shots)
                for metric in metrics(self.neighbours_of(count))
            ]
        return list(itertools.product(sorted(layers), self.facets, names))

    def neighbours_of(self, shots: int) -> tuple[int, ...]:
        """How many vote where so many images of each class are there."""
        return (*sorted(k for k in set(self.neighbours) if k < shots), shots)

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
        train, val = self.training_images(context.dataset), self.split(context.dataset)
        counts = shot_counts(self.shots)
        shots = None
        if counts:
            shots = Shots.draw(train, per_class=max(counts), draws=self.draws, seed=context.seed)
        indices = shots.indices if shots else self._voting(train, context.seed)
        image_pass = ImagePass(self, context, self.batch_size)
        at_once = image_pass.layers_per_pass(len(indices) + len(val), self.memory_gib)
        for layers in batches(sorted(context.layers), at_once):
            bank = image_pass.run(train, indices, layers)
            queries = image_pass.run(val, range(len(val)), layers)
            for cell in itertools.product(layers, self.facets):
                asked, voting = queries.select(*cell), bank.select(*cell)
                classes = len(val.class_names)
                if shots is None:
                    yield from self._vote(context, cell, asked, voting, classes, self.neighbours)
                    continue
                for count in counts:
                    by_draw, some = list[list[Score]](), self.neighbours_of(count)
                    for draw in range(self.draws):
                        rows = shots.select(draw, count)
                        drawn = LabelledFeatures(voting.features[rows], voting.labels[rows])
                        by_draw.append(list(self._vote(context, cell, asked, drawn, classes, some)))
                    yield from average_over_draws(by_draw, count)

    def _voting(self, train: ImageSet, seed: int) -> tuple[int, ...]:
        """Indices of the training images that vote."""
        split = TrainingSplit.draw(train, max_images=self.train_images, holdout=0.0, seed=seed)
        count = len(split.indices)
        if max(self.neighbours) > count:
            fitting = [k for k in self.neighbours if k <= count] or [count]
            neighbours = ",".join(map(str, fitting))
            raise ConfigurationError(
                f"probe.neighbours must be at most the {count} images of {train.name} "
                f"{train.split}, got {max(self.neighbours)}; ask for fewer, alone",
                hint=("--task", "knn", f"probe.neighbours=[{neighbours}]"),
            )
        return split.indices

    def _vote(
        self,
        context: ProbeContext,
        cell: tuple[int, str],
        queries: LabelledFeatures,
        bank: LabelledFeatures,
        num_classes: int,
        neighbours: Sequence[int],
    ) -> Iterator[Score]:
        """The scores of one block and facet by the votes of the images of a bank."""
        ranks = knn_ranks(
            queries.to(context.device),
            bank.to(context.device),
            num_classes=num_classes,
            neighbours=neighbours,
            temperature=self.temperature,
            engine=self.engine,
        ).cpu()
        seen = replace(self, image_size=self.resize.square_side(context.encoder.native_size))
        unit = unit_vectors(bank.features)
        details: dict[str, Any] = {
            "num_classes": num_classes,
            "bank": len(bank.labels),
            "constant_features": is_constant(unit),
            "guesses": fill_in_guesses(seen, seen.guesses),
        }
        if warnings := zero_vectors_warning(unit):
            details["warnings"] = warnings
        for metric, (of_k, top) in zip(
            metrics(neighbours), itertools.product(ranks, TOP_K), strict=True
        ):
            yield top_k_score(
                cell,
                metric,
                of_k < top,
                queries.labels,
                top=top,
                num_classes=num_classes,
                details=details,
            )


def metrics(neighbours: Sequence[int]) -> list[str]:
    """Names of what is scored, in the order in which the run does it."""
    return [f"top{top}_k{k}" for k in neighbours for top in TOP_K]
