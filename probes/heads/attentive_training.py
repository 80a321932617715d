"""Training a bank of attentive heads on the patches of a training set."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from probes.features.tiers.training import TrainingFeatures
from probes.heads.attentive import AttentiveHeads
from probes.heads.kept import Standing
from probes.heads.optimizers import HeadOptimizer, Schedule
from ssl_bench.evaluation import Progress
from ssl_bench.system.transfers import sent


@dataclass(frozen=True)
class AttentiveTraining:
    """Hyperparameters of attentive heads; their values are learning rates."""

    values: tuple[float, ...]
    queries: int
    epochs: int
    batch_size: int
    optimizer: HeadOptimizer
    schedule: Schedule
    classes: int
    seed: int
    device: torch.device

    hyperparameter = "learning_rate"

    def train(
        self,
        features: TrainingFeatures,
        labels: Int64[Tensor, " images"],
        layers: Sequence[int],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
    ) -> "TrainedAttentiveHeads":
        """Train one head for each layer and rate on the chosen entries.

        `labels` are those of every entry, chosen or not.
        """
        standing, batches = Standing(None), self._batches(entries)
        bank, constant, states = None, (), [{}, {}, {}, {}]
        read = features.of_layers(layers, self.device)
        peak = torch.tensor(self.values, device=self.device)
        name = f"attentive heads of layers {layers[0]} to {layers[-1]}"
        shown = progress(read(batches), name, len(batches))
        for step, (batch, some) in enumerate(zip(shown, batches, strict=True)):
            blocks = batch.features.flatten(2, 3)  # layers batch tokens dim
            if bank is None:
                bank, constant = self._drawn(blocks), _constant_channels(blocks)
            gradients = self._gradients(bank, blocks, sent(labels[some], self.device))
            rates = peak * self.schedule.factor(step, len(batches))
            for part, gradient, state in zip(bank.trained, gradients, states, strict=True):
                shaped = rates.view(-1, *[1] * (part.ndim - 2))
                self.optimizer.update(part, gradient, state, shaped, step + 1)
        assert bank is not None
        return TrainedAttentiveHeads(tuple(layers), bank, constant, standing.seconds())

    def _drawn(self, blocks: Tensor) -> AttentiveHeads:
        return AttentiveHeads.drawn(
            sources=len(blocks),
            values=len(self.values),
            queries=self.queries,
            dim=blocks.shape[-1],
            classes=self.classes,
            seed=self.seed,
        ).on(self.device)

    def _gradients(
        self, bank: AttentiveHeads, blocks: Tensor, labels: Int64[Tensor, " batch"]
    ) -> list[Tensor]:
        """Of all sources, one after the other, because of what a batch of one takes."""
        found = []
        for source, tokens in enumerate(blocks):
            _, gradients = bank.loss_and_gradients(source, tokens.float(), labels)
            found.append(gradients)
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def _batches(self, entries: Int64[Tensor, " chosen"]) -> list[Int64[Tensor, " some"]]:
        """Whole batches in a seeded order, the same for all heads.

        What is left over of an epoch is left out, because a small batch has other statistics.
        """
        generator, size = torch.Generator().manual_seed(self.seed), self.batch_size
        whole = max(1, len(entries) // size)
        return [
            entries[chosen]
            for _ in range(self.epochs)
            for chosen in torch.randperm(len(entries), generator=generator).split(size)[:whole]
        ]


@dataclass(frozen=True)
class TrainedAttentiveHeads:
    """Heads of some layers.

    Attributes:
        constant_channels: How many channels of each layer did not vary in the first batch.
    """

    layers: tuple[int, ...]
    heads: AttentiveHeads
    constant_channels: tuple[int, ...]
    seconds: float


def _constant_channels(blocks: Tensor) -> tuple[int, ...]:
    by_channel = blocks.flatten(1, 2)  # layers batch*tokens dim
    return tuple((by_channel.amax(1) == by_channel.amin(1)).sum(1).tolist())
