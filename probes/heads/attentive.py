"""Heads that learn where to look: patches pooled by several queries, then a linear layer.

`probe.pool=attentive` of linear classification.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from probes.features.tiers import TrainingFeatures
from probes.heads.sgd import LARS, Schedule, State, seeded_batches
from ssl_bench.composition.fields import Count, Rate, check_fields, require_nonempty
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import to_device

_EPSILON = 1e-6
_MOMENTUM = 0.1
_QUERY_DEVIATION = 0.02


@dataclass(frozen=True)
class AttentiveHeads:
    """One head for each source, a block, and value, a learning rate, side by side.

    Each query looks at all patches by the softmax of its scaled products with them, which are not
    projected for that, and gives its own slice of the channels of the value projection of what it
    sees. The slices together are batch-normalised without a scale or shift and classified.

    Attributes:
        value: Projection of the channels, without a bias; its rows are cut in as many slices as
            there are queries.
        mean: Of the pooled channels over the training batches, for images that are scored.
        variance: Likewise.

    Source: `poolings/ep.py` and `probe_heads.py` of
    https://github.com/billpsomas/efficient-probing (b8f4fb84), with one head and `d_out` 1.
    """

    query: Float[Tensor, "sources values queries dim"]
    value: Float[Tensor, "sources values dim dim"]
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]
    mean: Float[Tensor, "sources values dim"]
    variance: Float[Tensor, "sources values dim"]

    @classmethod
    def drawn(
        cls,
        *,
        sources: int,
        values: int,
        queries: int,
        dim: int,
        classes: int,
        seed: int,
        device: torch.device | None = None,
    ) -> "AttentiveHeads":
        """New heads, drawn once for all on the CPU: they differ by features and rate alone."""
        generator, width = torch.Generator().manual_seed(seed), 1 / math.sqrt(dim)

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(*shape, generator=generator) - 1) * width

        def everywhere(one: Tensor) -> Tensor:
            return one.to(device).expand(sources, values, *one.shape).clone()

        query = torch.randn(queries, dim, generator=generator) * _QUERY_DEVIATION
        parts = (query, uniform(dim, dim), uniform(classes, dim), uniform(classes))
        return cls(*map(everywhere, (*parts, torch.zeros(dim), torch.ones(dim))))

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.value, self.weight, self.bias

    def loss_and_gradients(
        self,
        source: int,
        tokens: Float[Tensor, "batch tokens dim"],
        labels: Int64[Tensor, " batch"],
    ) -> tuple[Float[Tensor, " values"], list[Tensor]]:
        """Mean cross-entropy of each value, and its gradients by query, value, weight and bias.

        Normalised by the batch itself, whose mean and variance `mean` and `variance` then follow.
        """
        leaves = [part[source].detach().requires_grad_() for part in self.trained]
        query, value, weight, bias = leaves
        seen = pooled(tokens, query, value)
        batch_variance, batch_mean = torch.var_mean(seen.detach(), 1, correction=1)
        self.mean[source].lerp_(batch_mean, _MOMENTUM)
        self.variance[source].lerp_(batch_variance, _MOMENTUM)
        deviation = (seen.var(1, correction=0, keepdim=True) + _EPSILON).sqrt()
        normed = (seen - seen.mean(1, keepdim=True)) / deviation
        logits = torch.baddbmm(bias[:, None], normed, weight.mT)
        targets = labels.expand(len(logits), -1)
        losses = F.cross_entropy(logits.movedim(2, 1), targets, reduction="none").mean(1)
        # Heads share nothing, so the gradient of the sum is that of each.
        return losses.detach(), list(torch.autograd.grad(losses.sum(), leaves))

    def logits(
        self, source: int, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "values batch classes"]:
        """Of scored images, normalised as training left it."""
        seen = pooled(tokens, self.query[source], self.value[source])
        deviation = (self.variance[source] + _EPSILON).sqrt()[:, None]
        normed = (seen - self.mean[source][:, None]) / deviation
        return torch.baddbmm(self.bias[source][:, None], normed, self.weight[source].mT)


def pooled(
    tokens: Float[Tensor, "batch tokens dim"],
    query: Float[Tensor, "values queries dim"],
    value: Float[Tensor, "values dim dim"],
) -> Float[Tensor, "values batch dim"]:
    """What every query sees of each image, slices of channels one after the other.

    Patches are pooled first and projected then, which is the same, for both are linear, and needs
    no projected patches of every head: values * queries * (tokens + dim) numbers an image.
    """
    values, queries, dim = query.shape
    scores = F.linear(tokens, query.flatten(0, 1) * dim**-0.5)  # batch tokens values*queries
    seen = scores.softmax(1).mT @ tokens  # batch values*queries dim
    slices = value.view(values * queries, dim // queries, dim)
    parts = torch.bmm(seen.transpose(0, 1), slices.mT)  # values*queries batch slice
    return parts.unflatten(0, (values, queries)).transpose(1, 2).flatten(2)


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


@dataclass(frozen=True)
class AttentivePooling:
    """Every head pools the patches by queries that it learns, with steps of LARS.

    Attributes:
        queries: Each gives its slice of the channels, so they divide the width of the encoder.
        learning_rates: All are trained; which one counts is chosen afterwards.
        batch_size: Images of a step, over which pooled channels are normalised.

    Source: Efficient probing, https://github.com/billpsomas/efficient-probing (b8f4fb84), whose
    rates are .1 to 1.5 at this batch size, for 90 epochs of new crops.
    """

    queries: Count = 32
    learning_rates: Sequence[Rate] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    epochs: Count = 20
    batch_size: Count = 256

    def __post_init__(self) -> None:
        check_fields(self, "probe.pool")
        require_nonempty("probe.pool.learning_rates", self.learning_rates)

    def settings(self) -> dict[str, Any]:
        own = asdict(self) | {"learning_rates": list(self.learning_rates)}
        return {"pool": "attentive", "optimizer": "lars", **own}

    def require_divisible(self, dim: int) -> None:
        """Refuse an encoder whose channels the queries do not divide, by a ConfigurationError."""
        if dim % self.queries:
            fitting = [count for count in range(1, dim + 1) if dim % count == 0]
            nearest = min(fitting, key=lambda count: abs(count - self.queries))
            raise ConfigurationError(
                f"probe.pool.queries must divide the {dim} channels of this encoder, got "
                f"{self.queries}",
                hint=(f"probe.pool.queries={nearest}",),
            )

    def train(
        self,
        features: TrainingFeatures,
        labels: Int64[Tensor, " images"],
        entries: Int64[Tensor, " chosen"],
        *,
        classes: int,
        seed: int,
        device: torch.device,
        progress: Progress,
    ) -> TrainedAttentiveHeads:
        """Train one head for each layer and rate on the chosen entries.

        `labels` are those of every entry, chosen or not.
        """
        start, layers = time.monotonic(), features.layers
        # What is left over of an epoch is left out, because a small batch has other statistics.
        whole = max(1, len(entries) // self.batch_size)
        by_epoch = seeded_batches(entries, self.batch_size, epochs=self.epochs, seed=seed)
        batches = [some for epoch in by_epoch for some in epoch[:whole]]
        # As theirs: ten epochs of ninety.
        optimizer, schedule = LARS(), Schedule("cosine", warmup=1 / 9)
        bank, constant, states = None, (), [State() for _ in range(4)]
        peak = torch.tensor(list(self.learning_rates), device=device)
        name = f"attentive heads of layers {layers[0]} to {layers[-1]}"
        shown = progress(features.reader(layers, device)(batches), name, len(batches))
        for step, (batch, some) in enumerate(zip(shown, batches, strict=True)):
            blocks = batch.features.flatten(2, 3)  # layers batch tokens dim
            if bank is None:
                by_channel = blocks.flatten(1, 2)  # layers batch*tokens dim
                varies = by_channel.amax(1) != by_channel.amin(1)
                constant = tuple((~varies).sum(1).tolist())
                bank = AttentiveHeads.drawn(
                    sources=len(blocks),
                    values=len(peak),
                    queries=self.queries,
                    dim=blocks.shape[-1],
                    classes=classes,
                    seed=seed,
                    device=device,
                )
            true = to_device(labels[some], device)
            # Of all sources, one after the other, because of what a batch of one takes.
            found = [
                bank.loss_and_gradients(source, tokens.float(), true)[1]
                for source, tokens in enumerate(blocks)
            ]
            gradients = map(torch.stack, zip(*found, strict=True))
            rates = peak * schedule.factor(step, len(batches))
            for part, gradient, state in zip(bank.trained, gradients, states, strict=True):
                shaped = rates.view(-1, *[1] * (part.ndim - 2))
                optimizer.update(part, gradient, state, shaped, step + 1)
        assert bank is not None
        return TrainedAttentiveHeads(tuple(layers), bank, constant, time.monotonic() - start)
