"""k-NN classification of one encoder on one dataset: features, votes, scores."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from probes.features.draws import Shots, over_draws
from probes.features.image import ImagePass, is_constant
from probes.features.shots import shots_of
from probes.features.split import TrainingSplit
from probes.features.stream import batches
from probes.knn.probe import KNN, TOPS, metrics
from ssl_bench.composition.presets import guesses_of
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import Share
from ssl_bench.metrics import LabelledFeatures, knn_ranks
from ssl_bench.results import Baseline

Cell = tuple[int, str]


@dataclass(frozen=True)
class KNNRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: KNN
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `KNN.run`."""
        probe, context = self.probe, self.context
        train, val = probe.training_images(context.dataset), probe.split(context.dataset)
        shots = self._shots(train)
        indices = shots.indices if shots else self._all_indices(train)
        image_pass = self._image_pass()
        at_once = image_pass.layers_at_once(len(indices) + len(val), probe.memory_gib)
        for layers in batches(sorted(context.layers), at_once):
            bank = image_pass.run(train, indices, layers)
            queries = image_pass.run(val, range(len(val)), layers)
            votes = (
                (cell, _Vote(queries.of(*cell), bank.of(*cell), len(val.class_names)))
                for cell in itertools.product(layers, probe.facets)
            )
            yield from self._of_shots(votes, shots) if shots else self._of_all(votes)

    def _of_all(self, votes: Iterable[tuple[Cell, "_Vote"]]) -> Iterator[Score]:
        for cell, vote in votes:
            yield from self._scores(cell, vote, self.probe.neighbours)

    def _of_shots(self, votes: Iterable[tuple[Cell, "_Vote"]], shots: Shots) -> Iterator[Score]:
        for cell, whole in votes:
            for count in shots_of(self.probe.shots):
                drawn = [whole.of(shots.of(n, count)) for n in range(self.probe.draws)]
                neighbours = self.probe.neighbours_of(count)
                found = [list(self._scores(cell, vote, neighbours)) for vote in drawn]
                yield from over_draws(found, count)

    def _shots(self, train: ImageSet) -> Shots | None:
        if self.probe.shots is None:
            return None
        most, draws = max(shots_of(self.probe.shots)), self.probe.draws
        return Shots.draw(train, most=most, draws=draws, seed=self.context.seed)

    def _all_indices(self, train: ImageSet) -> tuple[int, ...]:
        at_most, seed = self.probe.train_images, self.context.seed
        split = TrainingSplit.draw(train, at_most=at_most, holdout=0.0, seed=seed)
        self._require_enough(len(split.indices), train)
        return split.indices

    def _require_enough(self, num_images: int, train: ImageSet) -> None:
        if max(self.probe.neighbours) > num_images:
            fitting = [k for k in self.probe.neighbours if k <= num_images] or [num_images]
            raise ConfigurationError(
                f"probe.neighbours must be at most the {num_images} images of {train.name} "
                f"{train.split}, got {max(self.probe.neighbours)}; ask for it alone: "
                f"--task knn probe.neighbours=[{','.join(map(str, fitting))}]"
            )

    def _image_pass(self) -> ImagePass:
        return ImagePass(
            context=self.context,
            facets=self.probe.facets,
            image_size=self.probe.image_size,
            crop_share=self.probe.crop_share,
            batch_size=self.probe.batch_size,
            workers=self.probe.num_workers,
        )

    def _scores(self, cell: Cell, vote: "_Vote", neighbours: Sequence[int]) -> Iterator[Score]:
        ranks = vote.ranks(self.probe, neighbours, self.context.device)
        hits = torch.stack([ranks < top for top in TOPS], dim=1).flatten(0, 1)  # k, top
        tops = TOPS * len(neighbours)
        side = self.probe.image_size or min(self.context.encoder.native_size)
        seen = replace(self.probe, image_size=side)
        details = {
            "num_classes": vote.num_classes,
            "bank": len(vote.bank.labels),
            "constant_features": is_constant(vote.bank.features),
            "guesses": guesses_of(seen, seen.guesses),
        }
        shown = vote.queries.labels.bincount().tolist()
        shares = (Share(row.numpy()) for row in hits)
        for share, metric, top in zip(shares, metrics(neighbours), tops, strict=True):
            has_meaning = vote.num_classes >= top
            more: dict[str, Any] = {"undefined": "fewer than five classes"}
            if has_meaning:
                more = Baseline.most_frequent(shown, top).as_details()
            yield Score(
                layer=cell[0],
                facet=cell[1],
                metric=metric,
                value=share.value if has_meaning else math.nan,
                ci95=share.ci95() if has_meaning else None,
                num_images=hits.shape[1],
                details=details | more,
                per_image=share.hits,
            )


@dataclass(frozen=True, eq=False)
class _Vote:
    """What one block says of the images that are asked about and of those that answer."""

    queries: LabelledFeatures
    bank: LabelledFeatures
    num_classes: int

    def of(self, chosen: Int64[Tensor, " chosen"]) -> "_Vote":
        """A vote of some images of the bank."""
        some = LabelledFeatures(self.bank.features[chosen], self.bank.labels[chosen])
        return replace(self, bank=some)

    def ranks(
        self, probe: KNN, neighbours: Sequence[int], device: torch.device
    ) -> Int64[Tensor, "numbers queries"]:
        return knn_ranks(
            self.queries.to(device),
            self.bank.to(device),
            num_classes=self.num_classes,
            neighbours=neighbours,
            temperature=probe.temperature,
            engine=probe.engine,
        ).cpu()
