"""k-NN classification: are images of the same class close to each other in each block?

The nearest training images of each scored image vote for its class. Nothing is trained.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from probes.features.image import ImagePass, is_constant
from probes.features.stream import batched
from probes.features.training_images import (
    ShotCounts,
    Shots,
    TrainingSplit,
    reject_train_images_with_shots,
    shot_counts,
)
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
from ssl_bench.neighbours import LabelledFeatures, knn_ranks, unit_vectors, zero_vectors_warning


@dataclass(frozen=True)
class KNN(Probe):
    """A k-NN classifier: the nearest training images of an image vote for its class.

    Attributes:
        protocol: Name of the preset: "dino", or "dinov2" with an input of 224 x 224 pixels.
        neighbours: Number k of nearest training images that vote, or a list of numbers.
        temperature: Each vote has the weight exp(cosine similarity / temperature).
        facet: Feature that represents an image, or a list of such features. "cls" is the [CLS]
            token, and "patch_mean" is the mean of the patches. Both features are taken after the
            encoder's final norm. For attn_out, attn_skip, mlp_hidden, mlp_out and submodules of a
            block, the feature is the mean of the patches, without a norm.
        image_size: Side of the square input in pixels (default: the encoder's native size).
        crop_share: Side of the central square crop, relative to the shorter side of the image.
        train_images: Maximum number of training images that vote, drawn at random. By default all
            training images vote.
        shots: Number n of training images of each class that vote, or a list of such numbers. The
            values of k are then n and all values of `neighbours` below n.
        draws: Number of times that the training images are drawn at random if `shots` is set.
            Scores are means over the draws.
        memory_gib: Memory limit for the features in GiB. If the features of all layers exceed it,
            the encoder processes the images several times.
        engine: Search engine: "faiss" or "torch". "auto" uses faiss for many images on a CPU.
            The two engines find the same neighbours.
        guesses: Notes that are stored with the results, on differences from the code of the
            preset's authors.

    Source: `eval_knn.py` of https://github.com/facebookresearch/dino, which scores only the last
    block.
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
    has_per_image_values = True
    excluded_from_timing = ("neighbours",)
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size", "memory_gib", "engine")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.neighbours", self.neighbours)
        reject_train_images_with_shots(self.shots, self.train_images)

    def settings(self) -> dict[str, Any]:
        # With shots, the name of the metric contains the number of shots and k.
        unused = (
            ("shots", "draws") if self.shots is None else ("shots", "neighbours", "train_images")
        )
        return {name: value for name, value in super().settings().items() if name not in unused}

    def adapt_to_dataset(self, dataset: Dataset, chosen_fields: Collection[str]) -> Probe:
        """Return a copy without default values of `neighbours` that are too large for the dataset.

        A value is too large if it exceeds the number of training images. `chosen_fields` contains
        the names of the settings that the user has set. If the user has set `neighbours`, no value
        is removed.
        """
        if "neighbours" in chosen_fields or self.shots is not None:
            return self
        images = len(self.training_images(dataset))
        neighbours = self._limit_neighbours(min(images, self.train_images or images))
        is_unchanged = neighbours == list(self.neighbours)
        return self if is_unchanged else replace(self, neighbours=neighbours)

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = _metric_names(self.neighbours)
        if self.shots is not None:
            metrics = [
                shot_metric_name(metric, shots)
                for shots in shot_counts(self.shots)
                for metric in _metric_names(self._shot_neighbours(shots))
            ]
        return list(itertools.product(sorted(layers), self.facets, metrics))

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Classify the scored images by k-NN on each layer, and yield the accuracies.

        The layers are divided into groups whose features fit into memory, and the images are
        encoded once for each group.

        The true class of an image is among the top 5 if this class has votes and fewer than five
        classes have more votes. The top-5 accuracy is NaN if there are fewer than five classes.

        Raises:
            ConfigurationError: A value of `neighbours` exceeds the number of training images, or
                the encoder has no [CLS] token.
            DataError: A class has fewer training images than `shots`.
        """
        train, val = self.training_images(context.dataset), self.scored_images(context.dataset)
        counts = shot_counts(self.shots)
        shots = None
        if counts:
            shots = Shots.draw(train, per_class=max(counts), draws=self.draws, seed=context.seed)
        indices = shots.indices if shots else self._draw_train_images(train, context.seed)
        image_pass = ImagePass(self, context, self.batch_size)
        layers_per_pass = image_pass.layers_per_pass(len(indices) + len(val), self.memory_gib)
        for layers in batched(sorted(context.layers), layers_per_pass):
            train_features = image_pass.run(train, indices, layers)
            val_features = image_pass.run(val, range(len(val)), layers)
            for layer, facet in itertools.product(layers, self.facets):
                memory_bank = train_features.select(layer, facet)
                queries = val_features.select(layer, facet)
                vote = partial(self._vote, context, layer, facet, queries, len(val.class_names))
                if shots is None:
                    yield from vote(memory_bank, self.neighbours)
                    continue
                for count in counts:
                    by_draw = []
                    for draw in range(self.draws):
                        rows = shots.select(draw, count)
                        by_draw.append(
                            list(vote(memory_bank.take(rows), self._shot_neighbours(count)))
                        )
                    yield from average_over_draws(by_draw, count)

    def _limit_neighbours(self, num_images: int) -> list[int]:
        """Return the values of `neighbours` that do not exceed `num_images`.

        If all values exceed `num_images`, return `num_images` as the only value.
        """
        return [k for k in self.neighbours if k <= num_images] or [num_images]

    def _shot_neighbours(self, shots: int) -> tuple[int, ...]:
        """Return the values of k (number of nearest neighbours) for a number of shots.

        `shots` is the number of training images of each class. The values are `shots` itself, and
        all values of the setting `neighbours` below `shots`.
        """
        return (*sorted(k for k in set(self.neighbours) if k < shots), shots)

    def _draw_train_images(self, train: ImageSet, seed: int) -> tuple[int, ...]:
        """Draw random training images that vote for classes, and return their indices.

        Raises:
            ConfigurationError: There are fewer training images than neighbours that should vote.
        """
        split = TrainingSplit.draw(train, max_images=self.train_images, holdout=0.0, seed=seed)
        num_images = len(split.indices)
        if max(self.neighbours) > num_images:
            neighbours = ",".join(map(str, self._limit_neighbours(num_images)))
            raise ConfigurationError(
                f"probe.neighbours must be at most {num_images}, the number of images "
                f"that are used from {train.name} {train.split}, got {max(self.neighbours)}",
                hint=("--task", "knn", f"probe.neighbours=[{neighbours}]"),
            )
        return split.indices

    def _vote(
        self,
        context: ProbeContext,
        layer: int,
        facet: str,
        queries: LabelledFeatures,
        num_classes: int,
        memory_bank: LabelledFeatures,
        neighbours: Sequence[int],
    ) -> Iterator[Score]:
        """Classify images by votes of their nearest training images, and yield the accuracies.

        `queries` contains the scored images, and `memory_bank` the training images. Each number of
        voting images in `neighbours` has its own accuracies.
        """
        ranks = knn_ranks(
            queries.to(context.device),
            memory_bank.to(context.device),
            num_classes=num_classes,
            neighbours=neighbours,
            temperature=self.temperature,
            engine=self.engine,
        ).cpu()
        # The texts of the guesses state the input size, which may be the encoder's native size.
        sized = replace(self, image_size=self.resize.square_side(context.encoder.native_size))
        unit = unit_vectors(memory_bank.features)
        details: dict[str, Any] = {
            "num_classes": num_classes,
            "bank": len(memory_bank.labels),
            "constant_features": is_constant(unit),
            "guesses": fill_in_guesses(sized, sized.guesses),
        }
        if warnings := zero_vectors_warning(unit):
            details["warnings"] = warnings
        rank_and_top = itertools.product(ranks, TOP_K)
        for metric, (rank, top) in zip(_metric_names(neighbours), rank_and_top, strict=True):
            yield top_k_score(
                layer,
                facet,
                metric,
                rank < top,
                queries.labels,
                top=top,
                num_classes=num_classes,
                details=details,
            )


def _metric_names(neighbours: Sequence[int]) -> list[str]:
    """Return the names of the metrics for each number of neighbours, such as "top1_k10"."""
    return [f"top{top}_k{k}" for k in neighbours for top in TOP_K]
