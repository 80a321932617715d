"""Define a pretraining run: encoder, objective, optimizer, images and options."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pretrain import checkpoints, trackers
from pretrain.description import describe
from pretrain.distributed import init_distributed
from pretrain.fine_tuning import require_other_folder
from pretrain.lock import lock_folder
from pretrain.monitor import Monitor
from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import GeneratingObjective, Objective
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe
from pretrain.options import DataOptions, TrainOptions
from pretrain.signals import record_stop_signals
from pretrain.step import use_deterministic_operations
from ssl_bench.composition.fields import check_fields
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, ViTConfig
from ssl_bench.system.device import choose_device
from ssl_bench.system.output import format_size, print_message


@dataclass(frozen=True)
class Pretraining:
    """The complete configuration of a pretraining run. The method `run` starts training.

    Attributes:
        model: The encoder. If `data.image_size` is set, it replaces the image size of the model.
        objective: The training objective, such as DINO, with its hyperparameters.
        optimizer: The optimizer and its hyperparameters.
        data: The training images.
        train: Length, speed and numerics of the training.
        monitor: Evaluation of the encoder during the run. By default, the encoder is not evaluated.
        init_from: Address of a checkpoint with the encoder's initial weights, in a form that
            `load_encoder` accepts. By default, the initial weights are random.
    """

    model: EncoderConfig = field(default_factory=ViTConfig)
    objective: Objective = field(default_factory=Dino)
    optimizer: OptimizerRecipe = field(default_factory=AdamW)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    monitor: Monitor = field(default_factory=Monitor)
    init_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")
        if isinstance(self.objective, GeneratingObjective):
            for name, options in (("data", self.data), ("monitor", self.monitor)):
                if options != type(options)():
                    raise ConfigurationError(
                        f"{name}.* and --data-root apply only to training on images, but this "
                        "objective generates its own training data. Remove these options"
                    )
        elif not self.model.reads_images:
            raise ConfigurationError(
                f"model {self.model.kind} reads tokens, expected a model that reads images",
                hint=("objective=copying", "or", "model=vit_small_skip"),
            )
        elif self.data.labels is None:
            data = replace(self.data, labels=isinstance(self.objective, Supervised))
            object.__setattr__(self, "data", data)

    @property
    def encoder(self) -> EncoderConfig:
        """Return the configuration of the encoder, with the image size that the run uses."""
        if not self.model.reads_images:
            return self.model
        return replace(self.model, image_size=self.data.image_size or self.model.image_size)

    def images(self) -> ImageSet:
        """Return the training samples: images, or generated strings for some objectives.

        Raises:
            DataError: There are no images.
            ConfigurationError: The images have no labels, and the objective needs labels.
        """
        if isinstance(self.objective, GeneratingObjective):
            return self.objective.images()
        return self.data.find_images()

    def resolve_batch_size(self, num_images: int) -> "Pretraining":
        """Return a copy of this configuration, with a default batch size if none has been set.

        Args:
            num_images: Number of training images.
        """
        return replace(self, train=self.train.resolve_batch_size(num_images))

    def outline(
        self, out: Path, *, may_exist: bool = False, device: torch.device | str | None = None
    ) -> list[str]:
        """Describe the run in a few lines for `--dry-run`, without training or writing files.

        Args:
            out: Folder of the run.
            may_exist: Whether `out` may already contain a run, which the command would resume or
                overwrite.
            device: Device of the run, which must be available.

        Raises:
            ConfigurationError: `out` already contains a run, or the batch size exceeds the number
                of images.
            DataError: There are no images.
            MachineError: The device is not available.
        """
        choose_device(None if device is None else str(device))
        if not may_exist:
            checkpoints.require_no_run(out)
        images = self.images()
        train = self.train.resolve_batch_size(len(images))
        timeline, noun = train.timeline(len(images)), self.objective.noun
        epochs = timeline.total_steps / timeline.steps_per_epoch
        objective, optimizer = (type(part).__name__ for part in (self.objective, self.optimizer))
        lines = [
            f"run folder {out}",
            f"{noun:10} {len(images):,} of {images.name} {images.split}",
            f"encoder    {self.encoder.summary()}",
            f"objective  {objective}",
            f"optimizer  {optimizer}",
            f"steps      {timeline.total_steps:,} of {train.resolved_batch_size:,} {noun}, "
            f"{epochs:.4g} epochs",
        ]
        if unreadable := self.data.describe_unreadable_images(images):
            lines.append(f"unreadable {unreadable}")
        return lines

    def run(
        self,
        out: Path,
        *,
        resume: bool = False,
        must_resume: bool = False,
        extend: bool = False,
        overwrite: bool = False,
        device: torch.device | str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Train the encoder, and save encoder, configuration, log and training state in `out`.

        If torchrun has started several processes, these processes share every batch. If one process
        fails, all processes end.

        Args:
            out: Folder of the run.
            resume: Continue the run in `out`, or start a run if `out` contains none.
            must_resume: Continue the run in `out`, and raise an error if `out` contains no run.
            extend: Continue the run in `out`, which must exist, with more `train.epochs` or
                `train.max_steps`. After the extension, the schedules have the same values as in a
                run that was planned with the new length.
            overwrite: Delete the files of the run in `out`, and start a new run. All other files in
                `out` are kept, including the folders of TensorBoard and Weights & Biases.
            device: Device to train on. The default is a GPU if there is one.
            config: Content of `config.yaml`. By default, `describe` derives the content from this
                configuration.

        Returns:
            Path of the encoder's weights.

        Raises:
            ConfigurationError: `out` contains a run that is in progress, that differs from this
                run, or that must not be replaced. The error is also raised if `out` contains no run
                to resume, `init_from` has another architecture, or training has diverged.
            CheckpointError: `init_from` or the saved state cannot be read.
            DataError: An image cannot be read. The training state is saved.
            Preempted: SIGTERM, SIGHUP or SIGUSR1 was received. The training state is saved.
            KeyboardInterrupt: Ctrl-C was pressed. After one Ctrl-C during training, the training
                state is saved. After a second Ctrl-C, only earlier checkpoints remain.
            MachineError: Memory ran out, a file cannot be written, another process was lost, or
                TensorBoard or Weights & Biases is required and not installed.
        """
        # The module of the training loop imports this one.
        from pretrain.train import Run

        if self.train.tensorboard:
            trackers.require_tensorboard()
        if self.train.wandb is not None:
            trackers.require_wandb()
        if self.init_from is not None:
            require_other_folder(self.init_from, out)
        continues = resume or must_resume or extend
        with ExitStack() as stack:
            # From here on, a signal no longer ends the process but requests a stop.
            stop_handler = stack.enter_context(record_stop_signals())
            timeout = timedelta(minutes=self.train.timeout_minutes)
            chosen = choose_device(None if device is None else str(device))
            ranks = stack.enter_context(init_distributed(chosen, timeout))
            stack.enter_context(use_deterministic_operations(self.train.deterministic))
            # At the end, restore the random generators of the caller.
            gpus = [chosen] if chosen.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(gpus))

            with ranks.synchronize_errors():
                if ranks.is_main:
                    stack.enter_context(lock_folder(out))
                    if (must_resume or extend) and not checkpoints.has_state(out):
                        raise ConfigurationError(
                            f"{out} contains no run to resume", hint=("--out", "{run}")
                        )
                    checkpoints.prepare_folder(out, resume=continues, overwrite=overwrite)
            with ranks.synchronize_errors():
                saved = None
                if continues and checkpoints.has_state(out):
                    saved = checkpoints.load_state(out, chosen)
                plan = self
                if saved and self.train.batch_size is None:
                    # Older versions chose the default by the memory of the machine.
                    batch = saved[0]["configuration"]["train"]["batch_size"]
                    plan = replace(self, train=replace(self.train, batch_size=batch))
                run = Run(plan, out, ranks, stop_handler)
                if saved:
                    run.resume(*saved, extend=extend)
                else:
                    if continues:
                        run.messages.append(f"{out} contains no run to resume, starting one")
                    run.start()
                # The state takes as much memory as the run itself.
                del saved
                if ranks.is_main:
                    run.write_config(config or describe(self))
                    print_message(f"run folder {out}")
            run.train()
        return out / checkpoints.ENCODER

    def describe_next_step(self, out: Path) -> str:
        """Return a line that recommends what to do with the encoder of the run in `out`."""
        if isinstance(self.objective, GeneratingObjective):
            return f"test scores: see the last line of {out / checkpoints.LOG}"
        line = f"next: ssl-bench probe --task all --checkpoint {out}"
        state = out / checkpoints.STATE
        if not state.is_file():
            return line
        size = format_size(state.stat().st_size)
        return f"{line}. Only --resume and --extend need {state} ({size})"
