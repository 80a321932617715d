"""Linear heads for every (source of features, learning rate), trained side by side.

A source is one layer, or several layers concatenated. In this order: optimizers and rates, the
scale of the channels, the bank of heads, how it is trained, and what is left: weights for features
as the encoder gives them.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from probes.features.journal import Journal
from probes.features.split import LayerGroup
from probes.features.tiers import FeatureBatch, TrainingFeatures
from probes.heads.losses import PIECE_BYTES, PixelLoss, PixelTargets
from ssl_bench.composition.fields import Count, Rate, check_fields, require_nonempty
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import float64_device, to_float64

_AT_ONCE = 16
_DROP_AT, _DROP_TO = 0.8, 0.1

State = dict[str, Tensor]


# `update` moves a parameter in place; `rates` broadcasts over it, steps count from one. One step
# moves all heads, each at a rate of its own.


@dataclass(frozen=True)
class HeadAdamW:
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, in the order of operations of
    `torch.optim.AdamW`.
    """

    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, rates: Tensor, step: int
    ) -> None:
        beta1, beta2 = self.betas
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (second / (1 - beta2**step)).sqrt_().add_(self.epsilon)
        parameter.mul_(1 - rates * self.weight_decay)
        parameter.sub_(rates / (1 - beta1**step) * first / deviation)


@dataclass(frozen=True)
class SGD:
    """Momentum without dampening, as `torch.optim.SGD`."""

    weight_decay: float = 1e-4
    momentum: float = 0.9

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, rates: Tensor, step: int
    ) -> None:
        del step
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(self.momentum).add_(gradient).add_(parameter, alpha=self.weight_decay)
        parameter.sub_(rates * velocity)


@dataclass(frozen=True)
class LARS:
    """Momentum on gradients that are brought to a share of the length of what they move.

    For parameters whose first two axes are sources and rates: each head has lengths of its own. A
    vector of a head, such as its bias, moves by its gradient as it is.

    Source: You et al., https://arxiv.org/abs/1708.03888, as `util/lars.py` of
    https://github.com/billpsomas/efficient-probing (b8f4fb84) has it, without weight decay.
    """

    momentum: float = 0.9
    trust: float = 0.001

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, rates: Tensor, step: int
    ) -> None:
        del step
        if parameter.ndim > 3:
            axes = tuple(range(2, parameter.ndim))
            length, change = (one.square().sum(axes, True).sqrt() for one in (parameter, gradient))
            known = (length > 0) & (change > 0)
            gradient = gradient * torch.where(known, self.trust * length / change, 1.0)
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(self.momentum).add_(gradient)
        parameter.sub_(rates * velocity)


HeadOptimizer = HeadAdamW | SGD | LARS


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a share of its peak: linear warm-up, then one of four shapes.

    Attributes:
        shape: "cosine" and "linear" fall to zero, "constant" stays, "drop" stays until four fifths
            of the steps behind the warm-up are done, and is a tenth then.
        warmup: Share of the steps.
    """

    shape: str = "cosine"
    warmup: float = 0.05

    def factor(self, step: int, num_steps: int) -> float:
        warmup_steps = self.warmup * num_steps
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / (num_steps - warmup_steps)
        shapes = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "drop": 1.0 if done < _DROP_AT else _DROP_TO,
        }
        return shapes.get(self.shape, 1.0)


def seeded_batches(
    entries: Int64[Tensor, " chosen"], size: int, *, epochs: int, seed: int
) -> list[list[Int64[Tensor, " some"]]]:
    """The batches of each epoch in a seeded order, the same for all heads; none is left out."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(entries), generator=generator) for _ in range(epochs)]
    return [[entries[chosen] for chosen in order.split(size)] for order in orders]


@dataclass(frozen=True)
class Standardization:
    """Shift and scale of each channel that come before a head; zero and one do nothing."""

    mean: Float[Tensor, "sources dim"]
    scale: Float[Tensor, "sources dim"]

    def identity(self) -> "Standardization":
        """One that leaves the features as they are."""
        return Standardization(torch.zeros_like(self.scale), torch.ones_like(self.scale))

    def constant_channels(self) -> tuple[int, ...]:
        """How many channels of each source do not vary."""
        return tuple((self.scale == 0).sum(1).tolist())


@dataclass
class RunningStatistics:
    """What is known of the channels of each layer so far, in float64.

    Images have equally many patches, so the variance of a channel is the mean of those within the
    images plus that between their means. Those between are gathered as by Chan, Golub and LeVeque,
    "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

    Attributes:
        mean: Of the means of the images.
        between: Sum of the squared distances of these from it.
        within: Sum of the variances within the images.
    """

    images: int
    mean: Float64[Tensor, "layers dim"]
    between: Float64[Tensor, "layers dim"]
    within: Float64[Tensor, "layers dim"]

    @classmethod
    def none(cls, device: torch.device) -> "RunningStatistics":
        zero = torch.zeros(1, 1, dtype=torch.float64, device=float64_device(device))
        return cls(0, zero, zero, zero)

    def add(self, features: Float[Tensor, "layers some rows cols dim"]) -> None:
        for part in features.split(_AT_ONCE, 1):
            # What is not float16 may have squares beyond float32.
            values = part.float() if part.dtype == torch.float16 else to_float64(part)
            found = torch.var_mean(values.flatten(2, 3), 2, correction=0)
            variances, means = map(to_float64, found)  # layers some dim
            some, mean = means.shape[1], means.mean(1)
            total, distance = self.images + some, mean - self.mean
            around = (means - mean[:, None]).square().sum(1)
            self.between = self.between + around + distance.square() * (self.images * some / total)
            self.mean = self.mean + distance * (some / total)
            self.within = self.within + variances.sum(1)
            self.images = total

    def standardization(self, sources: int, device: torch.device) -> Standardization:
        """What brings the channels of the sources, whose layers follow each other, to one scale."""
        deviation = ((self.within + self.between) / self.images).sqrt()
        # A channel that does not vary in float16 says nothing; dividing would blow up its rounding.
        varies = deviation > 1e-4 * self.mean.abs()
        scale = torch.where(varies, 1 / deviation, 0)
        parts = (part.float().reshape(sources, -1).to(device) for part in (self.mean, scale))
        return Standardization(*parts)


@dataclass(eq=False)
class LinearHeads:
    """Heads over shared features, batched over (source, rate).

    The gradient is written by hand: the features need none, and the logits of a piece of the batch
    never leave the cache.
    """

    standardization: Standardization
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]

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
            mean, scale = self._scale(sources)
            x = (features[sources, images].to(mean.dtype) - mean[:, None]).mul_(scale[:, None])
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
        mean, scale = self._scale(slice(None))
        weight = self.weight * scale
        return weight, self.bias - (weight * mean).sum(-1)

    def _scale(self, sources: slice) -> tuple[Tensor, Tensor]:
        """Mean and scale of the channels of some sources, to be broadcast over two axes."""
        parts = self.standardization
        return parts.mean[sources, None, None], parts.scale[sources, None, None]

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


@dataclass(frozen=True)
class HeadSpec:
    """What every way to fit heads must know of them."""

    loss: PixelLoss
    standardize: bool
    classes: int
    seed: int
    device: torch.device

    def targets(self, batch: FeatureBatch) -> PixelTargets:
        """The labels of a batch as the loss takes them."""
        rows, cols = batch.features.shape[2:4]
        return self.loss.targets(batch.labels, self.classes, (rows, cols))


class Training:
    """A way to fit heads, as a configuration names it: a frozen dataclass of this class.

    Attributes:
        hyperparameter: What the heads of one source differ by; its values are in the field of its
            plural, and one of them is chosen afterwards.
        batch_size: Images that are looked at together.
    """

    hyperparameter: ClassVar[str]
    batch_size: Any

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_nonempty(f"probe.training.{self.hyperparameter}s", self.values)

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, f"{self.hyperparameter}s"))

    def settings(self) -> dict[str, Any]:
        """What records say of it."""
        raise NotImplementedError

    def train(
        self,
        heads: HeadSpec,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        journal: Journal | None = None,
    ) -> "TrainedHeads":
        """Train one head per source and value of the hyperparameter, on the chosen entries.

        If `journal` is given, an interrupted training continues from its last entry.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class StepTraining(Training):
    """Heads that are trained step by step; values are learning rates.

    Attributes:
        learning_rates: All are trained; which one counts is chosen afterwards.
        batch_size: Images of a step.
    """

    learning_rates: Sequence[Rate]
    epochs: Count
    batch_size: Count

    hyperparameter = "learning_rate"

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "learning_rates": list(self.learning_rates)}

    def optimizer_and_schedule(self) -> tuple[HeadOptimizer, Schedule]:
        """What moves the heads, and at which share of the rates."""
        raise NotImplementedError

    def train(
        self,
        heads: HeadSpec,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        journal: Journal | None = None,
    ) -> "TrainedHeads":
        """Train one head per source and learning rate. The last entry of `journal` is continued."""
        state = journal.entries[-1] if journal and journal.entries else {}
        start = time.monotonic() - state.get("seconds", 0.0)
        read = features.reader([*chain(*sources)], heads.device)

        in_order, done = entries.split(self.batch_size), state.get("batches", 0)
        found = RunningStatistics.none(heads.device)
        if done:
            place, known = float64_device(heads.device), state["statistics"]
            parts = (known[name].to(place) for name in ("mean", "between", "within"))
            found = RunningStatistics(known["images"], *parts)
        shown = progress(read(in_order[done:]), "mean and deviation", len(in_order) - done)
        for number, batch in enumerate(shown, start=done + 1):
            found.add(batch.features)
            if journal and journal.is_due():
                seconds = time.monotonic() - start
                journal.replace({"seconds": seconds, "batches": number, "statistics": vars(found)})
        statistics = found.standardization(len(sources), heads.device)

        optimizer, schedule = self.optimizer_and_schedule()
        bank = ParallelHeads(
            statistics if heads.standardize else statistics.identity(),
            classes=heads.classes,
            rates=self.values,
            optimizer=optimizer,
            seed=heads.seed,
        )
        if "bank" in state:
            bank.go_on(state["bank"])
        by_epoch = seeded_batches(entries, self.batch_size, epochs=self.epochs, seed=heads.seed)
        batches, done = [some for epoch in by_epoch for some in epoch], state.get("step", 0)
        name = f"heads of layers {sources[0][-1]} to {sources[-1][-1]}"
        shown = progress(read(batches[done:]), name, len(batches) - done)
        for step, batch in enumerate(shown, start=done):
            x = joined(batch.features, len(sources))
            factor = schedule.factor(step, len(batches))
            bank.step(x, heads.loss, heads.targets(batch), rate_factor=factor)
            if journal and journal.is_due():
                journal.replace(
                    {
                        "seconds": time.monotonic() - start,
                        "batches": len(in_order),
                        "statistics": vars(found),
                        "step": step + 1,
                        "bank": bank.state(),
                    }
                )
        return TrainedHeads(
            tuple(sources),
            *bank.folded(),
            constant_channels=statistics.constant_channels(),
            seconds=time.monotonic() - start,
        )


@dataclass(frozen=True)
class TrainedHeads:
    """Heads for features as they come out of the encoder.

    Attributes:
        constant_channels: How many channels of each source say nothing: they do not vary.
        unfinished: By source the number of heads that stopped before they converged; None where
            nothing is known of that.
        stalled: As `unfinished`, those of them that gained next to nothing any more.
    """

    sources: tuple[LayerGroup, ...]
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]
    constant_channels: Sequence[int]
    seconds: float
    unfinished: Sequence[int] | None = None
    stalled: Sequence[int] | None = None

    def to(self, device: torch.device) -> "TrainedHeads":
        weight, bias = self.weight.to(device), self.bias.to(device)
        return replace(self, weight=weight, bias=bias)

    def convergence(self, index: int) -> dict[str, int | None]:
        """Return what records say of how far the heads of one source were fitted."""
        counts = {"unconverged_heads": self.unfinished, "stalled_heads": self.stalled}
        return {name: None if each is None else each[index] for name, each in counts.items()}

    def logits(
        self, index: int, features: Float[Tensor, "rows cols dim"]
    ) -> Float[Tensor, "values rows cols classes"]:
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
