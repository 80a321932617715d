"""Training a bank of heads on the features of a training set."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from probes.features.sources import LayerGroup
from probes.features.statistics import RunningStatistics
from probes.features.tiers.training import Read, TrainingFeatures
from probes.heads.kept import KeptState, Standing
from probes.heads.linear import ParallelHeads
from probes.heads.losses import PixelLoss
from probes.heads.optimizers import HeadOptimizer, Schedule
from ssl_bench.evaluation import Progress


@dataclass(frozen=True)
class Heads:
    """What every way to fit heads must know of them."""

    loss: PixelLoss
    standardize: bool
    classes: int
    seed: int
    device: torch.device


@runtime_checkable
class Training(Protocol):
    """A way to fit heads.

    Attributes:
        values: What the heads of one source differ by; one of them is chosen afterwards.
        hyperparameter: What these are.
    """

    @property
    def values(self) -> tuple[float, ...]: ...

    @property
    def hyperparameter(self) -> str: ...

    @property
    def classes(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def train(
        self,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        kept: KeptState | None = None,
    ) -> "TrainedHeads":
        """Fit one head for each source and value to the chosen entries; `kept` may hold a part."""
        ...


@dataclass(frozen=True)
class HeadTraining:
    """Hyperparameters of heads that are trained step by step; values are learning rates."""

    values: tuple[float, ...]
    epochs: int
    batch_size: int
    loss: PixelLoss
    optimizer: HeadOptimizer
    schedule: Schedule
    standardize: bool
    classes: int
    seed: int
    device: torch.device

    hyperparameter = "learning_rate"

    def train(
        self,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        kept: KeptState | None = None,
    ) -> "TrainedHeads":
        """Train one head for each source and rate on the chosen entries."""
        standing = Standing(kept)
        read = features.of_layers(layers_of(sources), self.device)
        found = self._statistics(read, entries, standing, progress)
        statistics = found.standardization(len(sources)).on(self.device)
        bank = ParallelHeads(
            statistics if self.standardize else statistics.identity(),
            classes=self.classes,
            rates=self.values,
            optimizer=self.optimizer,
            seed=self.seed,
        )
        if "bank" in standing.state:
            bank.go_on(standing.state["bank"])
        batches, done = self._batches(entries), standing.state.get("step", 0)
        name = f"heads of layers {sources[0][-1]} to {sources[-1][-1]}"
        shown = progress(read(batches[done:]), name, len(batches) - done)
        for step, batch in enumerate(shown, start=done):
            bank.step(
                joined(batch.features, len(sources)),
                self.loss,
                self.loss.targets(batch.labels, self.classes),
                rate_factor=self.schedule.factor(step, len(batches)),
            )
            standing.reached(step=step + 1, bank=bank.state())
        return TrainedHeads(
            tuple(sources),
            *bank.folded(),
            constant_channels=statistics.constant_channels(),
            seconds=standing.seconds(),
        )

    def _statistics(
        self, read: Read, entries: Int64[Tensor, " chosen"], standing: Standing, progress: Progress
    ) -> RunningStatistics:
        batches, done = entries.split(self.batch_size), standing.state.get("batches", 0)
        found = RunningStatistics.none(self.device)
        if done:
            found = RunningStatistics(**standing.state["statistics"]).on(self.device)
        shown = progress(read(batches[done:]), "mean and deviation", len(batches) - done)
        for number, batch in enumerate(shown, start=done + 1):
            found.add(batch.features)
            standing.reached(batches=number, statistics=found.state())
        return found

    def _batches(self, entries: Int64[Tensor, " chosen"]) -> list[Int64[Tensor, " some"]]:
        """Every entry once an epoch in a seeded order, the same for all heads; none is left out."""
        generator = torch.Generator().manual_seed(self.seed)
        return [
            entries[chosen]
            for _ in range(self.epochs)
            for chosen in torch.randperm(len(entries), generator=generator).split(self.batch_size)
        ]


@dataclass(frozen=True)
class TrainedHeads:
    """Heads for features as they come out of the encoder.

    Attributes:
        constant_channels: How many channels of each source say nothing: they do not vary.
        unfinished: Heads that stopped before they converged; None where that is not asked.
        stalled: Those of them that gained next to nothing any more.
    """

    sources: tuple[LayerGroup, ...]
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]
    constant_channels: tuple[int, ...]
    seconds: float
    unfinished: int | None = None
    stalled: int | None = None

    def on(self, device: torch.device) -> "TrainedHeads":
        weight, bias = self.weight.to(device), self.bias.to(device)
        return replace(self, weight=weight, bias=bias)

    def logits(
        self, index: int, features: Float[Tensor, "rows cols dim"]
    ) -> Float[Tensor, "values rows cols classes"]:
        """Logits of all rates of one source."""
        weight, bias = self.weight[index], self.bias[index]
        values = torch.addmm(bias.flatten(), features.flatten(0, 1), weight.flatten(0, 1).T)
        return values.view(*features.shape[:2], *bias.shape).permute(2, 0, 1, 3)


def layers_of(sources: Sequence[LayerGroup]) -> list[int]:
    """Those of all sources, one source after the other."""
    return [layer for source in sources for layer in source]


def joined(
    blocks: Float[Tensor, "layers batch rows cols dim"], num_sources: int
) -> Float[Tensor, "sources batch rows cols joined_dim"]:
    """Concatenate the channels of the layers of each source, which follow each other."""
    by_source = blocks.unflatten(0, (num_sources, -1))
    return by_source.movedim(1, -2).flatten(-2)
