"""Training a bank of heads on cached features."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor

from probes.feature_cache import TrainingFeatures, standardisation
from probes.head_bank import HeadBank, Standardisation
from probes.head_optimizers import HeadOptimizer, Schedule
from probes.pixel_losses import PixelLoss
from ssl_bench.evaluation import Progress

# The layers whose features, concatenated, one head sees.
Source = tuple[int, ...]


@dataclass(frozen=True)
class HeadTraining:
    """Hyperparameters of the heads."""

    rates: tuple[float, ...]
    epochs: int
    batch_size: int
    loss: PixelLoss
    optimizer: HeadOptimizer
    schedule: Schedule
    standardise: bool
    classes: int
    seed: int
    device: torch.device

    def train(
        self,
        features: TrainingFeatures,
        sources: Sequence[Source],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
    ) -> "TrainedHeads":
        """Train one head for each source and rate on the chosen entries of the cache."""
        start = time.monotonic()
        blocks = features.of_layers([layer for source in sources for layer in source])
        blocks = _near(blocks, self.device)
        bank = self._bank(blocks, sources, entries)
        batches = self._batches(entries)
        first, last = f"{sources[0][-1]}", f"{sources[-1][-1]}"
        shown = progress(range(len(batches)), f"heads of layers {first} to {last}", len(batches))
        for step in shown:
            chosen = batches[step]
            labels = features.labels[chosen].to(self.device, torch.uint8)
            bank.step(
                joined(take(blocks, chosen, self.device), len(sources)),
                self.loss,
                self.loss.targets(labels, self.classes),
                rate_factor=self.schedule.factor(step, len(batches)),
            )
        weight, bias = bank.folded()
        return TrainedHeads(tuple(sources), weight, bias, time.monotonic() - start)

    def _bank(
        self, blocks: Tensor, sources: Sequence[Source], entries: Int64[Tensor, " chosen"]
    ) -> HeadBank:
        layers, dim = blocks.shape[0], blocks.shape[-1]
        if self.standardise:
            by_layer = standardisation(blocks, entries)
        else:
            zeros = torch.zeros(layers, dim)
            by_layer = Standardisation(zeros, zeros + 1)
        shape = (len(sources), -1)
        return HeadBank(
            Standardisation(
                by_layer.mean.to(self.device).reshape(shape),
                by_layer.scale.to(self.device).reshape(shape),
            ),
            classes=self.classes,
            rates=self.rates,
            optimizer=self.optimizer,
            seed=self.seed,
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
    """Heads for features as they come out of the encoder."""

    sources: tuple[Source, ...]
    weight: Float[Tensor, "sources rates classes dim"]
    bias: Float[Tensor, "sources rates classes"]
    seconds: float

    def logits(
        self, index: int, features: Float[Tensor, "rows cols dim"]
    ) -> Float[Tensor, "rates rows cols classes"]:
        """Logits of all rates of one source."""
        weight, bias = self.weight[index], self.bias[index]
        values = torch.addmm(bias.flatten(), features.flatten(0, 1), weight.flatten(0, 1).T)
        return values.view(*features.shape[:2], *bias.shape).permute(2, 0, 1, 3)


def joined(
    blocks: Float[Tensor, "layers batch rows cols dim"], num_sources: int
) -> Float[Tensor, "sources batch rows cols joined_dim"]:
    """Concatenate the channels of the layers of each source, which follow each other."""
    by_source = blocks.unflatten(0, (num_sources, -1))
    return by_source.movedim(1, -2).flatten(-2)


def take(
    blocks: Float16[Tensor, "layers entries rows cols dim"],
    chosen: Int64[Tensor, " some"],
    device: torch.device,
) -> Float16[Tensor, "layers some rows cols dim"]:
    """Some entries, on the device of the heads."""
    return blocks.index_select(1, chosen.to(blocks.device)).to(device)


def _near(blocks: Tensor, device: torch.device) -> Tensor:
    """Move features into device memory if they take at most half of what is free there."""
    if device.type != "cuda":
        return blocks
    free, _ = torch.cuda.mem_get_info(device)
    return blocks.to(device) if 2 * blocks.nbytes <= free else blocks
