"""Take an optimizer step: compute and clip the gradients, and update the student and the teacher.

The result of a step depends only on the state (weights, moments and buffers), the views, the step
number, the seed and the rank of the process.
"""

import copy
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from pretrain.batches import derive_step_seed
from pretrain.distributed import TrainingRanks
from pretrain.objectives.objective import Learner, Views
from pretrain.optimizers.recipes import OptimizerRecipe, clip_gradients, parameter_groups
from pretrain.options import TrainOptions
from pretrain.resources import count_training_flops, measure_product_rate
from pretrain.schedules import CosineSchedule, Timeline
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.device import autocast, autocast_dtype
from ssl_bench.system.process import is_out_of_memory

# `optimizer.lr` is the learning rate for this batch size.
_REFERENCE_BATCH = 256
# cuBLAS reads this environment variable when it starts. Without it, cuBLAS may sum in another order
# in each run.
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Trainer:
    """A trainer that takes optimizer steps, with schedules for the learning rate and weight decay.

    Args:
        learner: The networks to train and their loss. The trainer moves the networks to the device
            of this process.
        recipe: Hyperparameters of the optimizer. The learning rate is given for a batch of 256
            images.
        options: Options of the run. The batch size must be set.

    Attributes:
        flops: Number of floating-point operations that this process computes in a step. The number
            is 0 before the first step.
    """

    def __init__(
        self,
        learner: Learner,
        recipe: OptimizerRecipe,
        options: TrainOptions,
        timeline: Timeline,
        ranks: TrainingRanks,
    ) -> None:
        self.learner, self.options, self.ranks = learner, options, ranks
        device, uses_compile = ranks.device, options.uses_compile(ranks.device)
        learner.to(device)
        if uses_compile:
            for module in learner.compilable():
                module.compile(dynamic=False)
        # On a GPU, the colour jitter of crops is compiled too, unless it is forced to be eager.
        self._forces_eager = device.type == "cuda" and not uses_compile
        self.network = ranks.wrap(learner.student)
        self._recipe = recipe
        self.optimizer = self._build_optimizer()
        self._top_lr = recipe.lr * options.resolved_batch_size / _REFERENCE_BATCH
        self.lr = options.lr_schedule(self._top_lr, timeline)
        self.weight_decay = CosineSchedule(
            options.weight_decay, options.final_weight_decay, timeline.total_steps
        )
        self._dtype = torch.bfloat16 if options.uses_bfloat16(device) else torch.float32
        self._product_rate = measure_product_rate(device, autocast_dtype(device, self._dtype))
        self.flops = 0.0

    def take_step(self, step: int, micro_batches: Iterable[Views]) -> dict[str, Tensor]:
        """Train on one batch.

        If the gradient is not finite, weights, moments and batch statistics do not change, but the
        step counts as completed. A teacher network moves towards its student even if a gradient is
        not finite. The CPU does not wait until the device has finished the step.

        Args:
            step: Number of the step, from 0.
            micro_batches: Views of the `train.accumulation` micro-batches of this process.

        Returns:
            Scalars for the log, on the device: the loss, the gradient norm before clipping, and the
            values that the objective reports, averaged over the micro-batches.
        """
        torch.manual_seed(derive_step_seed(self.options.seed, step, self.ranks.rank))
        self._set_rates(step)
        statistics = [buffer.clone() for buffer in self.learner.student.buffers()]
        try:
            with self._force_eager_if_configured():
                report = self._accumulate_gradients(step, micro_batches)
        except BaseException:
            # A micro-batch could not be read or computed, so this step changes nothing.
            self._restore_statistics(statistics, torch.tensor(True))
            raise
        norms = clip_gradients(
            self.learner.student.parameters(),
            self.options.max_grad_norm or math.inf,
            global_norm=self.options.global_norm,
        )
        report["gradient_norm"] = norms.norm()
        found_inf = ~report["gradient_norm"].isfinite()
        self._restore_statistics(statistics, found_inf)
        # As in the official DINO, the norms include the gradients that are removed here.
        self.learner.freeze_gradients(step)
        # SOAP and the fused optimizers of torch read these attributes, which are usually set by
        # GradScaler. If `found_inf` is 1, the step changes nothing.
        vars(self.optimizer).update(found_inf=found_inf.float(), grad_scale=None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learner.update_teacher(step, found_inf)
        return report

    def fits_in_memory(self, step: int, make_views: Callable[[], Views]) -> bool:
        """Test whether a step with micro-batches of a given size fits into the free memory.

        The test computes two steps with two micro-batches each, because gradients of an earlier
        micro-batch and moments of an earlier step need memory, too. On a CPU, the test also copies
        the training state, because saving a checkpoint needs memory for such a copy. The test
        changes the weights, so the run must end afterwards.

        If several processes train together, the test takes no optimizer step, because SOAP would
        wait for processes that do not run the test.

        Args:
            step: Number of the step that ran out of memory, from 0.
            make_views: Function that creates the views of a micro-batch on the device.
        """
        self.optimizer.zero_grad()
        # A step that ran out of memory may have created the moments of some parameters only.
        self.optimizer = self._build_optimizer()
        is_cuda, checkpoint = self.ranks.device.type == "cuda", {}
        if is_cuda:
            torch.cuda.empty_cache()
        try:
            with torch.compiler.set_stance("force_eager"):
                for _ in range(2):
                    for _ in range(2):
                        self._compute_gradients(self.learner.student, make_views(), step)
                    if self.ranks.world_size == 1:
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                    if not is_cuda:
                        checkpoint = copy.deepcopy(self.state_dict())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        del checkpoint
        return True

    def utilisation(self, seconds: float) -> float:
        """Return the model FLOPs utilisation (MFU) of a step in percent, for the log.

        The MFU is the FLOP/s of the step divided by the FLOP/s of a large matrix product. The
        returned value is limited to 100, which the MFU may exceed if the device was busy while the
        matrix product was timed.

        Args:
            seconds: Duration of the step.
        """
        return min(100.0, 100 * self.flops / (seconds * self._product_rate))

    def describe_rising_lr(self) -> str | None:
        """Return a warning if the learning rate would rise to `train.final_lr` instead of falling.

        With a cosine schedule, the learning rate rises if `optimizer.lr`, scaled by the batch size,
        is below `train.final_lr`.
        """
        last = self.options.final_lr
        if self.options.schedule != "cosine" or self._top_lr >= last:
            return None
        factor = f"{self.options.resolved_batch_size}/{_REFERENCE_BATCH}"
        return (
            f"the learning rate rises from {self._top_lr:.2g} (optimizer.lr={self._recipe.lr:g} x "
            f"{factor}) to train.final_lr={last:g}. To let it fall, use train.final_lr=0.0"
        )

    def scheduled_values(self, step: int) -> dict[str, float]:
        """Return the learning rate and all other scheduled values of a step, for the log."""
        rates = {"lr": self.lr(step), "weight_decay": self.weight_decay(step)}
        return rates | self.learner.scheduled_values(step)

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _build_optimizer(self) -> torch.optim.Optimizer:
        groups = parameter_groups(
            self.learner.student.named_parameters(),
            layer_decay=self.options.layer_decay,
            decay_tokens=self.options.decay_tokens,
        )
        return self._recipe.build(groups)

    def _set_rates(self, step: int) -> None:
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = self.lr(step) * group.get("lr_scale", 1.0)
        # `parameter_groups` alternates groups with weight decay and groups without it.
        decayed_groups = groups[::2]
        for group in decayed_groups:
            group["weight_decay"] = self.weight_decay(step)

    def _accumulate_gradients(self, step: int, micro_batches: Iterable[Views]) -> dict[str, Tensor]:
        """Add the gradients of the mean loss over all micro-batches to `Tensor.grad`.

        Returns:
            The loss and the other metrics for the log, averaged over the micro-batches.
        """
        reports = []
        for number, views in enumerate(micro_batches, start=1):
            if not self.flops:
                flops = count_training_flops(self.learner, views, step)
                self.flops = self.options.accumulation * flops
            # Processes average their gradients only once, after the last micro-batch.
            is_last = number == self.options.accumulation
            network: Any = self.network
            with nullcontext() if is_last or self.ranks.world_size == 1 else network.no_sync():
                reports.append(self._compute_gradients(network, views, step))
        return {name: torch.stack([r[name] for r in reports]).mean() for name in reports[0]}

    def _compute_gradients(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch to `Tensor.grad`, and return metrics for the log."""
        with autocast(self.ranks.device, self._dtype):
            loss, report = self.learner.loss(network, views, step)
        (loss / self.options.accumulation).backward()
        return {"loss": loss.detach(), **report}

    def _force_eager_if_configured(self) -> AbstractContextManager[object]:
        return torch.compiler.set_stance("force_eager") if self._forces_eager else nullcontext()

    def _restore_statistics(self, before: Iterable[Tensor], condition: Bool[Tensor, ""]) -> None:
        """Copy the earlier batch statistics `before` back to the student if `condition` is true."""
        for buffer, old in zip(self.learner.student.buffers(), before, strict=True):
            buffer.copy_(torch.where(condition.to(buffer.device), old, buffer))


@contextmanager
def use_deterministic_operations(is_required: bool) -> Generator[None]:
    """Allow only bitwise reproducible operations inside a `with` block if `is_required` is true.

    With reproducible operations, two runs give bitwise identical results on devices of the same
    kind with the same version of torch. On CPUs, results are reproducible even without this
    function.

    Args:
        is_required: Whether only reproducible operations are allowed. If false, this function has
            no effect.

    Raises:
        ConfigurationError: An operation of the run has no deterministic implementation.
    """
    if not is_required:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        operation = str(error).partition(" does not have")[0][:100]
        raise ConfigurationError(
            f"train.deterministic=true is not possible, because {operation} has no deterministic "
            "implementation on this device",
            hint=("train.deterministic=false",),
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
