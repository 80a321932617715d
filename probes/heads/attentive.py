"""Train heads that pool the patches of an image with learned queries and classify the image.

Linear classification uses these heads if `probe.pool` is `attentive`.

Source: Efficient probing, https://github.com/billpsomas/efficient-probing (b8f4fb84).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from probes.features.tiers import TrainingFeatures
from probes.heads.sgd import HeadOptimizer, OptimizerState, Schedule, shuffled_batches, update_heads
from ssl_bench.composition.fields import Count, Rate, check_fields, require_nonempty
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import to_device

_EPSILON = 1e-6
_MOMENTUM = 0.1
_QUERY_DEVIATION = 0.02


@dataclass(frozen=True)
class AttentivePooling:
    """Training of attentive heads, which pool the patches of an image with learned queries.

    The heads are trained with the optimizer `LARS`. The authors of Efficient probing train for 90
    epochs of random crops, with batches of 4,096 images and learning rates of 0.1 to 1.5 times
    batch size / 256.

    Attributes:
        queries: Number of queries of each head, which must divide the encoder's number of channels.
            With 384 channels and 32 queries, for example, each query pools 12 channels.
        learning_rates: Peak learning rates. One head is trained for each rate, and one of these
            heads is selected afterwards.
        epochs: Number of passes over the training images.
        batch_size: Number of images per step. Pooled channels are normalised over these images.
    """

    queries: Count = 32
    learning_rates: Sequence[Rate] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    epochs: Count = 20
    batch_size: Count = 256

    def __post_init__(self) -> None:
        check_fields(self, "probe.pool")
        require_nonempty("probe.pool.learning_rates", self.learning_rates)

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the trained heads, as JSON types."""
        own = asdict(self) | {"learning_rates": list(self.learning_rates)}
        return {"pool": "attentive", "optimizer": "lars", **own}

    def require_divisible(self, dim: int) -> None:
        """Check that the number of queries divides `dim`, the number of channels of the encoder.

        Raises:
            ConfigurationError: The number of queries does not divide `dim`.
        """
        if dim % self.queries:
            divisors = [count for count in range(1, dim + 1) if dim % count == 0]
            nearest = min(divisors, key=lambda count: abs(count - self.queries))
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
    ) -> "TrainedAttentiveHeads":
        """Train one attentive head for each layer and learning rate.

        Args:
            features: Patch features of the training images.
            labels: Class of each training image.
            entries: Indices of the training images to use.
            classes: Number of classes.
            seed: Seed of the initial weights and of the order of the images.
            device: Device of the heads.
            progress: Function that shows a progress bar.
        """
        start, layers = time.monotonic(), features.layers
        # A smaller last batch is left out, because its batch normalisation would differ.
        num_batches = max(1, len(entries) // self.batch_size)
        by_epoch = shuffled_batches(entries, self.batch_size, epochs=self.epochs, seed=seed)
        batches = [*chain(*(epoch[:num_batches] for epoch in by_epoch))]
        # The published warm-up is 10 of 90 epochs.
        optimizer, schedule = LARS(), Schedule("cosine", warmup=1 / 9)
        heads, constant, states = None, (), [OptimizerState() for _ in range(4)]
        peak = torch.tensor(list(self.learning_rates), device=device)
        name = f"attentive heads of layers {layers[0]} to {layers[-1]}"
        items = progress(features.reader(layers, device)(batches), name, len(batches))
        for step, (batch, numbers) in enumerate(zip(items, batches, strict=True)):
            blocks = batch.features.flatten(2, 3)  # layers batch tokens dim
            if heads is None:
                by_channel = blocks.flatten(1, 2)  # layers batch*tokens dim
                varies = by_channel.amax(1) != by_channel.amin(1)
                constant = tuple((~varies).sum(1).tolist())
                heads = AttentiveHeads.initialize(
                    sources=len(blocks),
                    values=len(peak),
                    queries=self.queries,
                    dim=blocks.shape[-1],
                    classes=classes,
                    seed=seed,
                    device=device,
                )
            batch_labels = to_device(labels[numbers], device)
            # One layer at a time, to limit the memory.
            by_layer = [
                heads.loss_and_gradients(source, tokens.float(), batch_labels)[1]
                for source, tokens in enumerate(blocks)
            ]
            gradients = map(torch.stack, zip(*by_layer, strict=True))
            rates = peak * schedule.factor(step, len(batches))
            update_heads(optimizer, heads.parameters, gradients, states, rates, step + 1)
        assert heads is not None
        return TrainedAttentiveHeads(tuple(layers), heads, constant, time.monotonic() - start)


@dataclass(frozen=True)
class AttentiveHeads:
    """Attentive heads, one for each layer (source) and each learning rate (value).

    Each head has several learned queries. The patches are used as keys without a projection. The
    attention weights of a query are the softmax of its scaled dot products with the patches. Each
    query pools dim / queries output channels of the value projection. The pooled channels of all
    queries are batch-normalised without scale and shift, and classified by a linear layer.

    Attributes:
        query: The learned queries.
        value: Value projection without a bias. The first dim / queries rows belong to the first
            query, and so on.
        weight: Weight of the linear layer.
        bias: Bias of the linear layer.
        mean: Running mean of the pooled channels over training batches. It normalises the channels
            of images that are scored after the training.
        variance: Running variance of the pooled channels, used like `mean`.

    Source: `poolings/ep.py` and `probe_heads.py` of https://github.com/billpsomas/efficient-probing
    (b8f4fb84), with one attention head and `d_out=1`.
    """

    query: Float[Tensor, "sources values queries dim"]
    value: Float[Tensor, "sources values dim dim"]
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]
    mean: Float[Tensor, "sources values dim"]
    variance: Float[Tensor, "sources values dim"]

    @classmethod
    def initialize(
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
        """Return untrained heads for all sources (layers) and values (learning rates).

        All heads have the same random weights. `sources` and `values` are the numbers of layers and
        of learning rates.
        """
        generator, width = torch.Generator().manual_seed(seed), 1 / math.sqrt(dim)

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(*shape, generator=generator) - 1) * width

        def copy_to_heads(part: Tensor) -> Tensor:
            return part.to(device).expand(sources, values, *part.shape).clone()

        query = torch.randn(queries, dim, generator=generator) * _QUERY_DEVIATION
        parts = (query, uniform(dim, dim), uniform(classes, dim), uniform(classes))
        return cls(*map(copy_to_heads, (*parts, torch.zeros(dim), torch.ones(dim))))

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors that are trained: query, value, weight and bias."""
        return self.query, self.value, self.weight, self.bias

    def loss_and_gradients(
        self,
        source: int,
        tokens: Float[Tensor, "batch tokens dim"],
        labels: Int64[Tensor, " batch"],
    ) -> tuple[Float[Tensor, " values"], list[Tensor]]:
        """Return the mean cross-entropy of each head of a source (layer), and the gradients.

        The gradients are in the order of `self.parameters`. The pooled channels are normalised over
        the batch. This method also updates the running `mean` and `variance`.
        """
        leaves = [part[source].detach().requires_grad_() for part in self.parameters]
        query, value, weight, bias = leaves
        pooled = pool_tokens(tokens, query, value)
        batch_variance, batch_mean = torch.var_mean(pooled.detach(), 1, correction=1)
        self.mean[source].lerp_(batch_mean, _MOMENTUM)
        self.variance[source].lerp_(batch_variance, _MOMENTUM)
        deviation = (pooled.var(1, correction=0, keepdim=True) + _EPSILON).sqrt()
        normed = (pooled - pooled.mean(1, keepdim=True)) / deviation
        logits = torch.baddbmm(bias[:, None], normed, weight.mT)
        targets = labels.expand(len(logits), -1)
        losses = F.cross_entropy(logits.movedim(2, 1), targets, reduction="none").mean(1)
        # Heads share no parameters, so the gradient of the sum is the gradient of each loss.
        return losses.detach(), list(torch.autograd.grad(losses.sum(), leaves))

    def logits(
        self, source: int, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "values batch classes"]:
        """Return the logits of all trained heads of a source (layer).

        The pooled channels are normalised with the running mean and variance, not with those of the
        batch.
        """
        pooled = pool_tokens(tokens, self.query[source], self.value[source])
        deviation = (self.variance[source] + _EPSILON).sqrt()[:, None]
        normed = (pooled - self.mean[source][:, None]) / deviation
        return torch.baddbmm(self.bias[source][:, None], normed, self.weight[source].mT)


def pool_tokens(
    tokens: Float[Tensor, "batch tokens dim"],
    query: Float[Tensor, "values queries dim"],
    value: Float[Tensor, "values dim dim"],
) -> Float[Tensor, "values batch dim"]:
    """Pool the tokens of each image with the queries of each head, and concatenate the results.

    Pooling and the value projection are linear, so their order does not matter. Tokens are pooled
    first, because projecting all tokens would take longer.
    """
    values, queries, dim = query.shape
    scores = F.linear(tokens, query.flatten(0, 1) * dim**-0.5)  # batch tokens values*queries
    pooled = scores.softmax(1).mT @ tokens  # batch values*queries dim
    slices = value.view(values * queries, dim // queries, dim)
    parts = torch.bmm(pooled.transpose(0, 1), slices.mT)  # values*queries batch slice
    return parts.unflatten(0, (values, queries)).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class TrainedAttentiveHeads:
    """Trained attentive heads, and the layers whose patches they pool.

    Attributes:
        constant_channels: Number of channels of each layer that do not vary in the first batch.
        seconds: Time that the training took, in seconds.
    """

    layers: tuple[int, ...]
    heads: AttentiveHeads
    constant_channels: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class LARS(HeadOptimizer):
    """Optimizer with momentum that adapts the step size to the norm of each parameter.

    The gradient of a matrix, such as the weight of a head, is scaled until its norm is `trust`
    times the norm of the matrix. Gradients of vectors, such as the bias of a head, are not scaled.
    The first two axes of a parameter are sources (layers) and values (learning rates). Norms are
    computed separately for each head.

    Source: You et al., https://arxiv.org/abs/1708.03888, and `util/lars.py` of
    https://github.com/billpsomas/efficient-probing (b8f4fb84), without weight decay.
    """

    momentum: float = 0.9
    trust: float = 0.001

    def update(
        self, parameter: Tensor, gradient: Tensor, state: OptimizerState, rates: Tensor, step: int
    ) -> None:
        del step
        if parameter.ndim > 3:
            axes = tuple(range(2, parameter.ndim))
            norm, gradient_norm = (x.square().sum(axes, True).sqrt() for x in (parameter, gradient))
            is_nonzero = (norm > 0) & (gradient_norm > 0)
            gradient = gradient * torch.where(is_nonzero, self.trust * norm / gradient_norm, 1.0)
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(self.momentum).add_(gradient)
        parameter.sub_(rates * velocity)
