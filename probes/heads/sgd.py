"""Train linear heads by optimizer steps, for many blocks and learning rates at once.

A *source* is one layer, or several layers whose channels are concatenated. One head is trained for
each pair of a source and a learning rate. All heads start from the same weights and are trained on
the same batches, so they differ only in their features and their learning rate.

`StepTraining.train` contains the training loop. The other classes of this file are parts of the
training: heads, standardisation of channels, optimizers and the learning rate schedule. The module
probes/heads/logistic.py instead trains such heads by logistic regression until they converge.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from probes.features.journal import Journal
from probes.features.tiers import FeatureBatch, TrainingFeatures
from probes.features.training_images import LayerGroup
from probes.heads.losses import PIECE_BYTES, PixelLoss, PixelTargets
from ssl_bench.composition.fields import Count, Rate, check_fields, require_nonempty
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import float64_device, to_float64

_MAX_IMAGES = 16
_DROP_AT, _DROP_TO = 0.8, 0.1

OptimizerState = dict[str, Tensor]


@dataclass(frozen=True)
class HeadSpec:
    """Properties of heads that are independent of the training method.

    Attributes:
        loss: Training loss.
        standardize: Whether each channel is standardised over the training patches.
        classes: Number of classes.
        seed: Seed of the initial weights and of the order of the batches.
        device: Device of the heads.
    """

    loss: PixelLoss
    standardize: bool
    classes: int
    seed: int
    device: torch.device

    def targets(self, batch: FeatureBatch) -> PixelTargets:
        """Convert the labels of a batch to the tensors that are needed to compute the loss."""
        rows, cols = batch.features.shape[2:4]
        return self.loss.targets(batch.labels, self.classes, (rows, cols))


class Training:
    """The base class of training methods for heads, such as logistic regression.

    Subclasses are dataclasses. The fields of a subclass are the config keys below `probe.training`.

    Attributes:
        hyperparameter: Name of the hyperparameter, such as "learning_rate". Several heads are
            trained on the same features, one for each value of the hyperparameter. The values are
            in the field with the plural of this name, such as `learning_rates`.
        batch_size: Number of images per batch.
    """

    hyperparameter: ClassVar[str]
    batch_size: Any

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_nonempty(f"probe.training.{self.hyperparameter}s", self.values)

    @property
    def values(self) -> tuple[float, ...]:
        """Return the values of the hyperparameter. One head is trained for each value."""
        return tuple(getattr(self, f"{self.hyperparameter}s"))

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the trained heads, as JSON types."""
        raise NotImplementedError

    def train(
        self,
        spec: HeadSpec,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        journal: Journal | None = None,
    ) -> "TrainedHeads":
        """Train one head for each source (group of layers) and hyperparameter value.

        Args:
            spec: Properties of the heads, such as the number of classes.
            features: Features and labels of the training images.
            sources: Groups of layers. The heads of a group receive the concatenated features of its
                layers.
            entries: Indices of the training views to use. A view is a crop of an image.
            progress: Function that shows a progress bar.
            journal: File with unfinished work. If it contains the state of an interrupted training,
                a subclass may continue from it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TrainedHeads:
    """Trained linear heads, which can be applied to features without standardising them.

    Attributes:
        sources: Groups of layers. A head receives the concatenated features of one group.
        weight: Weights of the heads, one for each source and hyperparameter value.
        bias: Biases of the heads.
        constant_channels: Number of channels of each source that do not vary. Heads that were
            trained on standardised features ignore these channels.
        seconds: Time that the training took in seconds, including interrupted runs.
        unconverged: Number of heads of each source that did not converge. None if the training
            method has no test of convergence.
        stalled: Number of unconverged heads of each source that stopped early, because further
            steps improved neither their loss nor its gradient. None if there is no test of
            convergence.
    """

    sources: tuple[LayerGroup, ...]
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]
    constant_channels: Sequence[int]
    seconds: float
    unconverged: Sequence[int] | None = None
    stalled: Sequence[int] | None = None

    def to(self, device: torch.device) -> "TrainedHeads":
        """Return a copy of these heads whose tensors are on the given device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def convergence(self, index: int) -> dict[str, int | None]:
        """Return the numbers of unconverged and of stalled heads of a source (group of layers).

        A stalled head stopped early, because further steps did not improve it. The numbers are
        stored as details with the scores of the source. `index` is the index of the source.
        """
        counts = {"unconverged_heads": self.unconverged, "stalled_heads": self.stalled}
        return {name: None if each is None else each[index] for name, each in counts.items()}

    def logits(
        self, index: int, features: Float[Tensor, "rows cols dim"]
    ) -> Float[Tensor, "values rows cols classes"]:
        """Return the logits of an image from all heads of one source (group of layers).

        `index` is the index of the source. `features` are the features of the image's patches.
        """
        weight, bias = self.weight[index], self.bias[index]
        logits = torch.addmm(bias.flatten(), features.flatten(0, 1), weight.flatten(0, 1).T)
        return logits.view(*features.shape[:2], *bias.shape).permute(2, 0, 1, 3)


@dataclass(frozen=True)
class StepTraining(Training):
    """Training of heads for a fixed number of optimizer steps, with one head per learning rate.

    Attributes:
        learning_rates: Peak learning rates. One of the heads is selected after the training.
        epochs: Number of passes over the training images.
        batch_size: Number of images per step.
    """

    learning_rates: Sequence[Rate]
    epochs: Count
    batch_size: Count

    hyperparameter = "learning_rate"

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "learning_rates": list(self.learning_rates)}

    def optimizer_and_schedule(self) -> tuple["HeadOptimizer", "Schedule"]:
        """Return the optimizer of the heads and the schedule of their learning rates."""
        raise NotImplementedError

    def train(
        self,
        spec: HeadSpec,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        journal: Journal | None = None,
    ) -> TrainedHeads:
        """Train one head for each source (group of layers) and learning rate.

        Args:
            spec: Properties of the heads, such as the number of classes.
            features: Features and labels of the training images.
            sources: Groups of layers. The heads of a group receive the concatenated features of its
                layers.
            entries: Indices of the training views to use. A view is a crop of an image.
            progress: Function that shows a progress bar.
            journal: File with unfinished work. If it contains the state of an interrupted training,
                this training is continued.
        """
        state = journal.entries[-1] if journal and journal.entries else {}
        start = time.monotonic() - state.get("seconds", 0.0)
        read = features.reader([*chain(*sources)], spec.device)

        # Measure mean and deviation of all channels in one pass.
        batches, done = entries.split(self.batch_size), state.get("batches", 0)
        statistics = RunningStatistics.start(spec.device, state.get("statistics"))
        items = progress(read(batches[done:]), "mean and deviation", len(batches) - done)
        for number, batch in enumerate(items, start=done + 1):
            statistics.add(batch.features)
            if journal and journal.is_due():
                seconds, measured = time.monotonic() - start, vars(statistics)
                journal.replace({"seconds": seconds, "batches": number, "statistics": measured})
        standardization = statistics.standardization(len(sources), spec.device)

        # Train all heads on the same shuffled batches.
        optimizer, schedule = self.optimizer_and_schedule()
        heads = LinearHeads.initialize(
            standardization if spec.standardize else standardization.identity(),
            num_values=len(self.values),
            classes=spec.classes,
            seed=spec.seed,
        )
        states, done = [OptimizerState(), OptimizerState()], state.get("step", 0)
        if done:
            heads.weight, heads.bias = (part.to(spec.device) for part in state["parameters"])
            states = [{k: v.to(spec.device) for k, v in old.items()} for old in state["optimizer"]]
        peak = torch.tensor(self.values, device=spec.device)
        by_epoch = shuffled_batches(entries, self.batch_size, epochs=self.epochs, seed=spec.seed)
        steps = [*chain(*by_epoch)]
        name = f"heads of layers {sources[0][-1]} to {sources[-1][-1]}"
        for step, batch in enumerate(progress(read(steps[done:]), name, len(steps) - done), done):
            x = concatenate_layers(batch.features, len(sources))
            _, gradients = heads.loss_and_gradients(x, spec.loss, spec.targets(batch))
            rates = peak * schedule.factor(step, len(steps))
            update_heads(optimizer, heads.parameters, gradients, states, rates, step + 1)
            if journal and journal.is_due():
                journal.replace(
                    {
                        "seconds": time.monotonic() - start,
                        "batches": len(batches),
                        "statistics": vars(statistics),
                        "step": step + 1,
                        "parameters": list(heads.parameters),
                        "optimizer": states,
                    }
                )
        return TrainedHeads(
            tuple(sources),
            *heads.fold_standardization(),
            constant_channels=standardization.constant_channels(),
            seconds=time.monotonic() - start,
        )


def shuffled_batches(
    entries: Int64[Tensor, " chosen"], size: int, *, epochs: int, seed: int
) -> list[list[Int64[Tensor, " batch"]]]:
    """Divide training examples into batches, in a new random order for each epoch.

    `entries` are the indices of the examples, and `size` is the number of examples in a batch. The
    last batch of an epoch may be smaller. `seed` determines the orders.
    """
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(entries), generator=generator) for _ in range(epochs)]
    return [[entries[chosen] for chosen in order.split(size)] for order in orders]


def concatenate_layers(
    blocks: Float[Tensor, "layers batch rows cols dim"], num_sources: int
) -> Float[Tensor, "sources batch rows cols source_dim"]:
    """Concatenate the channels of the layers of each source (group of layers).

    `blocks` contains the layers of the first source, then those of the second, and so on. All
    sources must have the same number of layers.
    """
    by_source = blocks.unflatten(0, (num_sources, -1))
    return by_source.movedim(1, -2).flatten(-2)


@dataclass(frozen=True)
class Standardization:
    """Mean and scale of each channel for standardising features.

    A head receives (features - mean) * scale. The scale is 0 for channels that do not vary.
    """

    mean: Float[Tensor, "sources dim"]
    scale: Float[Tensor, "sources dim"]

    def identity(self) -> "Standardization":
        """Return a standardisation that leaves features unchanged: a mean of 0 and a scale of 1."""
        return Standardization(torch.zeros_like(self.scale), torch.ones_like(self.scale))

    def select(self, source: int) -> "Standardization":
        """Return the mean and scale of the channels of a single source (group of layers)."""
        return Standardization(self.mean[source, None], self.scale[source, None])

    def constant_channels(self) -> tuple[int, ...]:
        """For each source (group of layers), return the number of channels that do not vary."""
        return tuple((self.scale == 0).sum(1).tolist())


@dataclass
class RunningStatistics:
    """Running mean and variance of the channels of each layer, in float64.

    All images have the same number of patches. The variance of a channel is therefore the mean
    variance within the images plus the variance of the image means.

    Attributes:
        num_images: Number of images that have been added.
        mean: Mean of the image means.
        between: Sum of the squared differences between the image means and `mean`.
        within: Sum of the variances within the images.

    Source of the variance of the image means: Chan, Golub and LeVeque, "Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances" (1979).
    """

    num_images: int
    mean: Float64[Tensor, "layers dim"]
    between: Float64[Tensor, "layers dim"]
    within: Float64[Tensor, "layers dim"]

    @classmethod
    def start(
        cls, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> "RunningStatistics":
        """Return empty statistics, or those that an interrupted run has saved in `state`."""
        zero = torch.zeros(1, 1, dtype=torch.float64)
        state = state or {"num_images": 0, "mean": zero, "between": zero, "within": zero}
        device = float64_device(device)
        parts = (state[name].to(device) for name in ("mean", "between", "within"))
        return cls(state["num_images"], *parts)

    def add(self, features: Float[Tensor, "layers batch rows cols dim"]) -> None:
        """Update the running mean and variance with the features of a batch of images."""
        for part in features.split(_MAX_IMAGES, 1):
            # The square of a float32 feature may exceed the range of float32.
            values = part.float() if part.dtype == torch.float16 else to_float64(part)
            moments = torch.var_mean(values.flatten(2, 3), 2, correction=0)
            variances, means = map(to_float64, moments)  # layers images dim
            added, mean = means.shape[1], means.mean(1)
            total, distance = self.num_images + added, mean - self.mean
            around = (means - mean[:, None]).square().sum(1)
            scatter = distance.square() * (self.num_images * added / total)
            self.between = self.between + around + scatter
            self.mean = self.mean + distance * (added / total)
            self.within = self.within + variances.sum(1)
            self.num_images = total

    def standardization(self, num_sources: int, device: torch.device) -> Standardization:
        """Return the mean and scale of each channel, grouped by source (group of layers).

        The statistics begin with the layers of the first source, followed by the layers of the
        second source, and so on.
        """
        deviation = ((self.within + self.between) / self.num_images).sqrt()
        # A smaller deviation is a rounding error of float16 features, which a division would
        # amplify.
        varies = deviation > 1e-4 * self.mean.abs()
        scale = torch.where(varies, 1 / deviation, 0)
        parts = (part.float().reshape(num_sources, -1).to(device) for part in (self.mean, scale))
        return Standardization(*parts)


@dataclass(eq=False)
class LinearHeads:
    """Linear heads, one for each source (group of layers) and hyperparameter value.

    All heads are trained on the same batches. Gradients are computed without autograd, so that the
    logits of all heads are never in memory at the same time. `standardization` is applied to the
    features before the heads.
    """

    standardization: Standardization
    weight: Float[Tensor, "sources values classes dim"]
    bias: Float[Tensor, "sources values classes"]

    @classmethod
    def initialize(
        cls, standardization: Standardization, *, num_values: int, classes: int, seed: int
    ) -> "LinearHeads":
        """Return untrained heads, which all have the same random weights and zero biases.

        `num_values` is the number of hyperparameter values. `seed` determines the weights.
        """
        sources, dim = standardization.mean.shape
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(classes, dim, generator=generator).mul_(0.01)
        weight = weight.to(standardization.mean.device).expand(sources, num_values, -1, -1).clone()
        return cls(standardization, weight, weight.new_zeros(sources, num_values, classes))

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        """Return the tensors that are trained: weight and bias."""
        return self.weight, self.bias

    def loss_and_gradients(
        self,
        features: Float[Tensor, "sources batch rows cols dim"],
        loss: PixelLoss,
        targets: PixelTargets,
    ) -> tuple[Float[Tensor, "sources values"], tuple[Tensor, Tensor]]:
        """Return the mean loss of each head over the labelled pixels, and the gradients.

        The gradients are in the order of `self.parameters`. Loss and gradients are zero for a batch
        without labels. `targets` are the labels of the batch.
        """
        share = 1 / targets.pixel_weights.sum().clamp(min=1)
        losses = torch.zeros_like(self.bias[..., 0])
        weight_gradient, bias_gradient = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        for sources, images in self._pieces(features):
            mean, scale = self._mean_and_scale(sources)
            x = (features[sources, images].to(mean.dtype) - mean[:, None]).mul_(scale[:, None])
            tokens = x.flatten(1, 3)  # sources tokens dim
            shape = (-1, self.bias.shape[-1], *x.shape[1:4])  # heads classes batch rows cols
            bias = self.bias[sources].flatten(1).unsqueeze(2)
            logits = torch.baddbmm(bias, self.weight[sources].flatten(1, 2), tokens.mT)
            sums, gradient = loss.loss_and_gradient(logits.view(shape), targets.select(images))
            losses[sources] += sums.view(-1, losses.shape[1])
            by_class = gradient.view(logits.shape)  # sources values*classes tokens
            bias_gradient[sources].flatten(1).add_(by_class.sum(2))
            weight_gradient[sources].flatten(1, 2).baddbmm_(by_class, tokens)
        return losses * share, (weight_gradient * share, bias_gradient * share)

    def fold_standardization(
        self,
    ) -> tuple[
        Float[Tensor, "sources values classes dim"], Float[Tensor, "sources values classes"]
    ]:
        """Return the weights and biases of equivalent heads for unstandardised features."""
        mean, scale = self._mean_and_scale(slice(None))
        weight = self.weight * scale
        return weight, self.bias - (weight * mean).sum(-1)

    def _mean_and_scale(
        self, sources: slice
    ) -> tuple[Float[Tensor, "sources 1 1 dim"], Float[Tensor, "sources 1 1 dim"]]:
        parts = self.standardization
        return parts.mean[sources, None, None], parts.scale[sources, None, None]

    def _pieces(
        self, features: Float[Tensor, "sources batch rows cols dim"]
    ) -> Iterator[tuple[slice, slice]]:
        """Split the computation into pieces whose logits fit into the CPU's cache.

        Each piece consists of a slice of the sources (groups of layers) and a slice of the images.
        """
        sources, batch, rows, cols, _ = features.shape
        image_bytes = rows * cols * self.bias[0].numel() * self.bias.element_size()
        pairs = max(1, PIECE_BYTES[features.device.type] // image_bytes)
        num_sources, num_images = max(1, pairs // batch), min(batch, pairs)
        for source in range(0, sources, num_sources):
            for image in range(0, batch, num_images):
                yield slice(source, source + num_sources), slice(image, image + num_images)


class HeadOptimizer:
    """The base class of optimizers that update the parameters of all heads at once."""

    def update(
        self, parameter: Tensor, gradient: Tensor, state: OptimizerState, rates: Tensor, step: int
    ) -> None:
        """Update a parameter of all heads in place.

        Args:
            parameter: The parameter.
            gradient: Gradient of the loss with respect to the parameter.
            state: Values that are kept between steps, such as the momentum.
            rates: Learning rates, which are broadcast to the shape of the parameter.
            step: Number of this step, starting at 1.
        """
        raise NotImplementedError


def update_heads(
    optimizer: HeadOptimizer,
    parameters: Sequence[Tensor],
    gradients: Iterable[Tensor],
    states: Sequence[OptimizerState],
    rates: Float[Tensor, " values"],
    step: int,
) -> None:
    """Update the parameters of all heads in place. Each head has its own learning rate.

    Args:
        optimizer: The optimizer.
        parameters: Parameters. The first two axes of each are sources (groups of layers) and
            learning rates.
        gradients: Gradient of each parameter.
        states: Values that the optimizer keeps between steps, for each parameter.
        rates: The learning rates.
        step: Number of this step, starting at 1.
    """
    for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
        shaped_rates = rates.view(-1, *[1] * (parameter.ndim - 2))
        optimizer.update(parameter, gradient, state, shaped_rates, step)


@dataclass(frozen=True)
class HeadAdamW(HeadOptimizer):
    """Adam with decoupled weight decay (AdamW).

    The operations are in the same order as in `torch.optim.AdamW`.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def update(
        self, parameter: Tensor, gradient: Tensor, state: OptimizerState, rates: Tensor, step: int
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
class SGD(HeadOptimizer):
    """Stochastic gradient descent with momentum, as in `torch.optim.SGD` without dampening."""

    weight_decay: float = 1e-4
    momentum: float = 0.9

    def update(
        self, parameter: Tensor, gradient: Tensor, state: OptimizerState, rates: Tensor, step: int
    ) -> None:
        del step
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(self.momentum).add_(gradient).add_(parameter, alpha=self.weight_decay)
        parameter.sub_(rates * velocity)


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: linear warm-up to the peak, then one of four shapes.

    Attributes:
        shape: Learning rate after the warm-up. "cosine" and "linear" decrease to zero. "constant"
            stays at the peak. "drop" stays at the peak for 80 % of the remaining steps, and then at
            a tenth of the peak.
        warmup: Fraction of the steps that belong to the warm-up.
    """

    shape: str = "cosine"
    warmup: float = 0.05

    def factor(self, step: int, num_steps: int) -> float:
        """Return the learning rate at a step, divided by the peak learning rate.

        Steps are counted from 0. `num_steps` is the number of steps of the whole training.
        """
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
