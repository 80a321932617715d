"""One optimizer step as a list of named steps, and the same bits every time; no files, no clock."""

import math
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from pretrain.batches import derive_step_seed
from pretrain.distributed import TrainingRanks
from pretrain.objectives.objective import Learner, Views
from pretrain.optimizers.recipes import OptimizerRecipe, clip_gradients, parameter_groups
from pretrain.options import TrainOptions
from pretrain.resources import product_rate, training_flops
from pretrain.schedules import Cosine, Timeline
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.device import autocast, autocast_dtype

_REFERENCE_BATCH = 256
# cuBLAS reads it when it is first used; without it its products may be summed in any order.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Trainer:
    """A learner, its optimizer, and their schedules."""

    def __init__(
        self,
        learner: Learner,
        recipe: OptimizerRecipe,
        options: TrainOptions,
        timeline: Timeline,
        ranks: TrainingRanks,
    ) -> None:
        self.learner, self.options, self.ranks = learner, options, ranks
        learner.to(ranks.device)
        if options.compiles(ranks.device):
            for module in learner.compilable():
                module.compile(dynamic=False)
        # The crops' colours are compiled wherever they are changed on a GPU.
        self._stays_eager = ranks.device.type == "cuda" and not options.compiles(ranks.device)
        self.network = ranks.wrap(learner.student)
        named = learner.student.named_parameters()
        groups = parameter_groups(
            named, layer_decay=options.layer_decay, decay_tokens=options.decay_tokens
        )
        self.optimizer = recipe.build(groups)
        total = timeline.total_steps
        self._asked, self._top = recipe.lr, recipe.lr * options.batch / _REFERENCE_BATCH
        self.lr = options.rate(self._top, timeline)
        self.weight_decay = Cosine(options.weight_decay, options.final_weight_decay, total)
        device = ranks.device
        self._dtype = torch.bfloat16 if options.autocasts(device) else torch.float32
        self._product_rate = product_rate(device, autocast_dtype(device, self._dtype))
        self.flops = 0.0

    def take_step(self, step: int, parts: Iterable[Views]) -> dict[str, Tensor]:
        """Learn from one batch, given in as many parts as it is accumulated from.

        Where a value of the gradient is not finite, nothing is learned: weights, moments and
        statistics stay as they are. Nothing here waits for the device: what is reported are
        tensors on it.
        """
        torch.manual_seed(derive_step_seed(self.options.seed, step, self.ranks.rank))
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = self.lr(step) * group.get("lr_scale", 1.0)
        # Each is followed by one that is exempt.
        for decayed in groups[::2]:
            decayed["weight_decay"] = self.weight_decay(step)
        statistics = [buffer.clone() for buffer in self.learner.student.buffers()]
        try:
            eager = torch.compiler.set_stance("force_eager") if self._stays_eager else nullcontext()
            with eager:
                report = self._accumulate(step, parts)
        except BaseException:
            # A part that never came, or a device that is full: this step was not taken.
            self._restore(statistics, torch.tensor(True))
            raise
        # Tensor by tensor, or all of them together; reported is the norm over all before.
        most = self.options.max_grad_norm or math.inf
        parameters = self.learner.student.parameters()
        norms = clip_gradients(parameters, most, whole=self.options.global_norm)
        report["gradient_norm"] = norms.norm()
        lost = ~report["gradient_norm"].isfinite()
        self._restore(statistics, lost)
        self.learner.freeze_gradients(step)
        # As a scaler of gradients tells an optimizer to leave everything as it was.
        vars(self.optimizer).update(found_inf=lost.float(), grad_scale=None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learner.update_teacher(step, lost)
        return report

    def utilisation(self, seconds: float) -> float:
        """Percent of the rate of a large matrix product that a step of such a length reaches.

        At most 100, where the machine was busy when the product was timed.
        """
        return min(100.0, 100 * self.flops / (seconds * self._product_rate))

    def rise(self) -> str | None:
        """What to say where the learning rate would end above its top."""
        last = self.options.final_lr
        if self.options.schedule != "cosine" or self._top >= last:
            return None
        share = f"{self.options.batch}/{_REFERENCE_BATCH}"
        return (
            f"the learning rate rises from {self._top:.2g}, optimizer.lr={self._asked:g} times "
            f"{share}, to train.final_lr={last:g}; train.final_lr=0.0 lets it fall"
        )

    def values(self, step: int) -> dict[str, float]:
        """Everything that is scheduled, for the log."""
        rates = {"lr": self.lr(step), "weight_decay": self.weight_decay(step)}
        return rates | self.learner.values(step)

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _accumulate(self, step: int, parts: Iterable[Views]) -> dict[str, Tensor]:
        """Gradients of the mean loss over all parts; mean of what they report."""
        reports = []
        for number, views in enumerate(parts, start=1):
            if not self.flops:
                part = training_flops(self.learner, views, step)
                self.flops = self.options.accumulation * part
            # Gradients are averaged over processes only once, with the last part.
            waits = self.ranks.world_size > 1 and number < self.options.accumulation
            network: Any = self.network
            with network.no_sync() if waits else nullcontext():
                with autocast(self.ranks.device, self._dtype):
                    loss, report = self.learner.loss(self.network, views, step)
                (loss / self.options.accumulation).backward()
            reports.append({"loss": loss.detach(), **report})
        return {name: torch.stack([r[name] for r in reports]).mean() for name in reports[0]}

    def _restore(self, before: Iterable[Tensor], lost: Bool[Tensor, ""]) -> None:
        """Batch statistics of a step that learns nothing are not kept either."""
        for buffer, old in zip(self.learner.student.buffers(), before, strict=True):
            buffer.copy_(torch.where(lost.to(buffer.device), old, buffer))


@contextmanager
def deterministic(asked: bool) -> Generator[None]:
    """Compute only with what gives the same bits every time, and refuse what cannot.

    Two runs are then equal on devices of one kind with one version of torch. On a CPU they are
    without it.

    Raises:
        ConfigurationError: something in the run exists in no deterministic form.
    """
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        what = str(error).partition(" does not have")[0][:100]
        raise ConfigurationError(
            f"{what} has no deterministic form on this device", hint=("train.deterministic=false",)
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
