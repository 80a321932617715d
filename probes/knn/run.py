"""k-NN classification of one encoder on one dataset: features, votes, scores."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from probes.features.image import ImagePass, is_constant
from probes.features.split import TrainingSplit
from probes.features.stream import batches
from probes.knn.probe import KNN, TOPS
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import Share
from ssl_bench.metrics import LabelledFeatures, knn_ranks

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
        split = TrainingSplit.draw(
            train, at_most=probe.train_images, holdout=0.0, seed=context.seed
        )
        self._require_enough(len(split.indices), train)
        image_pass = self._image_pass()
        at_once = image_pass.layers_at_once(len(split.indices) + len(val), probe.memory_gib)
        for layers in batches(sorted(context.layers), at_once):
            bank = image_pass.run(train, split.indices, layers)
            queries = image_pass.run(val, range(len(val)), layers)
            for cells in batches(itertools.product(layers, probe.facets), context.ranks.count):
                votes = [
                    _Vote(queries.of(*cell), bank.of(*cell), len(val.class_names)) for cell in cells
                ]
                for cell, vote, ranks in zip(cells, votes, self._voted(votes), strict=True):
                    yield from self._scores(cell, vote, ranks)

    def _voted(self, votes: Sequence["_Vote"]) -> list[Int64[Tensor, "numbers queries"]]:
        """Ranks by vote; each process counts one."""
        own = votes[self.context.ranks.rank :][:1]
        counted = [vote.ranks(self.probe, self.context.device) for vote in own]
        return [ranks for some in self.context.ranks.gathered(counted) for ranks in some]

    def _require_enough(self, num_images: int, train: ImageSet) -> None:
        if max(self.probe.neighbours) > num_images:
            fitting = [k for k in self.probe.neighbours if k <= num_images] or [num_images]
            raise ConfigurationError(
                f"probe.neighbours must be at most the {num_images} images of {train.name} "
                f"{train.split}, got {max(self.probe.neighbours)}; add --task knn "
                f"probe.neighbours=[{','.join(map(str, fitting))}]"
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

    def _scores(
        self, cell: Cell, vote: "_Vote", ranks: Int64[Tensor, "numbers queries"]
    ) -> Iterator[Score]:
        hits = torch.stack([ranks < top for top in TOPS], dim=1).flatten(0, 1)  # k, top
        names = [(k, top) for k in self.probe.neighbours for top in TOPS]
        details = {
            "num_classes": vote.num_classes,
            "bank": len(vote.bank.labels),
            "constant_features": is_constant(vote.bank.features),
        }
        for share, (k, top) in zip((Share(row.numpy()) for row in hits), names, strict=True):
            has_meaning = vote.num_classes >= top
            yield Score(
                layer=cell[0],
                facet=cell[1],
                metric=f"top{top}_k{k}",
                value=share.value if has_meaning else math.nan,
                ci95=share.ci95() if has_meaning else None,
                num_images=hits.shape[1],
                details=details,
                per_image=share.hits,
            )


@dataclass(frozen=True, eq=False)
class _Vote:
    """What one block says of the images that are asked about and of those that answer."""

    queries: LabelledFeatures
    bank: LabelledFeatures
    num_classes: int

    def ranks(self, probe: KNN, device: torch.device) -> Int64[Tensor, "numbers queries"]:
        return knn_ranks(
            self.queries.to(device),
            self.bank.to(device),
            num_classes=self.num_classes,
            neighbours=probe.neighbours,
            temperature=probe.temperature,
            engine=probe.engine,
        ).cpu()
