"""Training a bank of heads on cached features."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from probes.features.cache import standardization
from probes.features.sources import LayerGroup
from probes.features.standardization import Standardization
from probes.features.training import TrainingFeatures
from probes.heads.linear import ParallelHeads
from probes.heads.losses import PixelLoss
from probes.heads.optimizers import HeadOptimizer, Schedule
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import free_memory
from ssl_bench.system.transfers import sent


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
    ) -> "TrainedHeads":
        """Fit one head for each source and rate to the chosen entries of the cache."""
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
    ) -> "TrainedHeads":
        """Train one head for each source and rate on the chosen entries of the cache."""
        start = time.monotonic()
        blocks = near_blocks(features, sources, self.device)
        statistics = source_statistics(blocks, sources, entries, self.device)
        bank = ParallelHeads(
            statistics if self.standardize else statistics.identity(),
            classes=self.classes,
            rates=self.values,
            optimizer=self.optimizer,
            seed=self.seed,
        )
        batches = self._batches(entries)
        first, last = f"{sources[0][-1]}", f"{sources[-1][-1]}"
        shown = progress(range(len(batches)), f"heads of layers {first} to {last}", len(batches))
        for step in shown:
            chosen = batches[step]
            labels = sent(features.labels[chosen], self.device)
            bank.step(
                joined(take(blocks, chosen, self.device), len(sources)),
                self.loss,
                self.loss.targets(labels, self.classes),
                rate_factor=self.schedule.factor(step, len(batches)),
            )
        return TrainedHeads(
            tuple(sources),
            *bank.folded(),
            constant_channels=statistics.constant_channels(),
            seconds=time.monotonic() - start,
        )

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

    def logits(
        self, index: int, features: Float[Tensor, "rows cols dim"]
    ) -> Float[Tensor, "values rows cols classes"]:
        """Logits of all rates of one source."""
        weight, bias = self.weight[index], self.bias[index]
        values = torch.addmm(bias.flatten(), features.flatten(0, 1), weight.flatten(0, 1).T)
        return values.view(*features.shape[:2], *bias.shape).permute(2, 0, 1, 3)


def source_statistics(
    blocks: Float[Tensor, "layers entries rows cols dim"],
    sources: Sequence[LayerGroup],
    entries: Int64[Tensor, " chosen"],
    device: torch.device,
) -> Standardization:
    by_layer = standardization(blocks, entries)
    mean, scale = (
        part.to(device).reshape(len(sources), -1) for part in (by_layer.mean, by_layer.scale)
    )
    return Standardization(mean, scale)


def joined(
    blocks: Float[Tensor, "layers batch rows cols dim"], num_sources: int
) -> Float[Tensor, "sources batch rows cols joined_dim"]:
    """Concatenate the channels of the layers of each source, which follow each other."""
    by_source = blocks.unflatten(0, (num_sources, -1))
    return by_source.movedim(1, -2).flatten(-2)


def take(
    blocks: Float[Tensor, "layers entries rows cols dim"],
    chosen: Int64[Tensor, " some"],
    device: torch.device,
) -> Float[Tensor, "layers some rows cols dim"]:
    """Some entries, on the device of the heads."""
    return sent(blocks.index_select(1, sent(chosen, blocks.device)), device)


def near_blocks(
    features: TrainingFeatures, sources: Sequence[LayerGroup], device: torch.device
) -> Float[Tensor, "layers entries rows cols dim"]:
    """The layers of all sources, in device memory if they take half of what is free or less."""
    blocks = features.of_layers([layer for source in sources for layer in source])
    if device.type != "cuda":
        return blocks
    return blocks.to(device) if 2 * blocks.nbytes <= free_memory(device) else blocks
