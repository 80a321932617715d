"""Linear heads for every (source of features, learning rate), trained side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from probes.features.statistics import Standardization
from probes.heads.losses import PixelLoss, PixelTargets
from probes.heads.optimizers import HeadOptimizer
from probes.heads.upsampled_logsumexp import PIECE_BYTES


class LinearHeads:
    """Heads over shared features, batched over (source, rate).

    A source is one layer, or several layers concatenated. The gradient is written by hand: the
    features need none, and the logits of a piece of the batch never leave the cache.
    """

    def __init__(
        self,
        standardization: Standardization,
        weight: Float[Tensor, "sources values classes dim"],
        bias: Float[Tensor, "sources values classes"],
    ):
        self.standardization = standardization
        self.weight = weight
        self.bias = bias

    def loss_and_gradients(
        self,
        features: Float[Tensor, "sources batch rows cols dim"],
        loss: PixelLoss,
        targets: PixelTargets,
    ) -> tuple[Float[Tensor, "sources values"], tuple[Tensor, Tensor]]:
        """Mean loss over the pixels of a batch that count; its gradients by weight and by bias."""
        # A batch whose pixels are all ignored has loss and gradient zero, not 0 / 0.
        share = 1 / targets.counted.sum().clamp(min=1)
        losses = torch.zeros_like(self.bias[..., 0])
        weight_gradient, bias_gradient = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        for sources, images in self._pieces(features):
            x = self._standardize(features[sources, images], sources)
            tokens = x.flatten(1, 3)  # sources tokens dim
            shape = (-1, self.bias.shape[-1], *x.shape[1:4])
            bias = self.bias[sources].flatten(1).unsqueeze(2)
            logits = torch.baddbmm(bias, self.weight[sources].flatten(1, 2), tokens.mT)
            sums, gradient = loss.loss_and_gradient(logits.view(shape), targets.of(images))
            losses[sources] += sums.view(-1, losses.shape[1])
            by_class = gradient.view(logits.shape)  # sources rates*classes tokens
            bias_gradient[sources].flatten(1).add_(by_class.sum(2))
            weight_gradient[sources].flatten(1, 2).baddbmm_(by_class, tokens)
        return losses * share, (weight_gradient * share, bias_gradient * share)

    def folded(
        self,
    ) -> tuple[
        Float[Tensor, "sources values classes dim"], Float[Tensor, "sources values classes"]
    ]:
        """Weight and bias of the heads for features that were not standardized."""
        mean, scale = (part[:, None, None] for part in self.standardization.parts())
        weight = self.weight * scale
        return weight, self.bias - (weight * mean).sum(-1)

    def _standardize(
        self, features: Float[Tensor, "some batch rows cols dim"], sources: slice
    ) -> Float[Tensor, "some batch rows cols dim"]:
        mean, scale = (part[sources, None, None, None] for part in self.standardization.parts())
        return (features.to(mean.dtype) - mean).mul_(scale)

    def _pieces(
        self, features: Float[Tensor, "sources batch rows cols dim"]
    ) -> Iterator[tuple[slice, slice]]:
        """Cut (source, image) so that the logits of one piece stay in the cache."""
        sources, batch, rows, cols, _ = features.shape
        head_bytes = rows * cols * self.bias[0].numel() * self.bias.element_size()
        pairs = max(1, PIECE_BYTES[features.device.type] // head_bytes)
        some, images = max(1, pairs // batch), min(batch, pairs)
        for source in range(0, sources, some):
            for image in range(0, batch, images):
                yield slice(source, source + some), slice(image, image + images)


class ParallelHeads(LinearHeads):
    """Heads that one optimizer moves together, each at its own rate."""

    def __init__(
        self,
        standardization: Standardization,
        *,
        classes: int,
        rates: Sequence[float],
        optimizer: HeadOptimizer,
        seed: int,
    ):
        sources, dim = standardization.mean.shape
        self.rates = torch.tensor(rates, device=standardization.mean.device)
        generator = torch.Generator().manual_seed(seed)
        # One draw for all cells: they differ by features and rate, not by luck.
        draw = torch.randn(classes, dim, generator=generator).mul_(0.01).to(self.rates.device)
        weight = draw.expand(sources, len(rates), -1, -1).clone()
        super().__init__(standardization, weight, weight.new_zeros(sources, len(rates), classes))
        self._optimizer = optimizer
        self._states: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._steps = 0

    def step(
        self,
        features: Float[Tensor, "sources batch rows cols dim"],
        loss: PixelLoss,
        targets: PixelTargets,
        *,
        rate_factor: float,
    ) -> Float[Tensor, "sources values"]:
        """One optimizer step of every head on one batch; gives their losses before it."""
        losses, gradients = self.loss_and_gradients(features, loss, targets)
        self._steps += 1
        rates = (self.rates * rate_factor)[:, None]
        for parameter, gradient, state, shaped in zip(
            (self.weight, self.bias),
            gradients,
            self._states,
            (rates[..., None], rates),
            strict=True,
        ):
            self._optimizer.update(parameter, gradient, state, shaped, self._steps)
        return losses

    def state(self) -> dict[str, Any]:
        """Everything that steps change, not copied."""
        return {
            "weight": self.weight,
            "bias": self.bias,
            "optimizer": self._states,
            "steps": self._steps,
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Be as heads of the same shape were when they gave this state."""
        device = self.weight.device
        self.weight, self.bias = state["weight"].to(device), state["bias"].to(device)
        weight, bias = (
            {name: part.to(device) for name, part in parts.items()} for parts in state["optimizer"]
        )
        self._states, self._steps = (weight, bias), state["steps"]
