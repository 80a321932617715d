"""A pretraining run: its configuration, its folder, and its processes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pretrain.description import describe
from pretrain.logging.tensorboard import require_tensorboard
from pretrain.logging.weights_and_biases import require_wandb
from pretrain.objectives.objective import Generating
from pretrain.plan import Plan
from pretrain.run import Run
from pretrain.runtime.determinism import deterministic
from pretrain.runtime.distributed import TrainingRanks, training_together
from pretrain.runtime.fine_tuning import require_apart
from pretrain.runtime.folder import ENCODER, LOG, claim, require_free
from pretrain.runtime.lock import held
from pretrain.runtime.signals import stop_requests
from pretrain.runtime.state import STATE, has_state, load_state
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig
from ssl_bench.system.device import choose_device
from ssl_bench.system.progress import size_in_words


@dataclass(frozen=True)
class Pretraining(Plan):
    """A plan that can be carried out."""

    def outline(
        self, out: Path, *, goes_on: bool = False, device: torch.device | str | None = None
    ) -> list[str]:
        """What a run would do, in a few lines; nothing is computed or written.

        Args:
            out: Folder of the run.
            goes_on: It is resumed or begun anew, so that `out` may hold one.
            device: Without one, a GPU if there is one.

        Raises:
            ConfigurationError: `out` holds a run, or a batch is larger than the data.
            DataError: there are no images.
        """
        if not goes_on:
            require_free(out)
        images = self.images()
        ranks = TrainingRanks(device=choose_device(device and str(device)))
        plan, why, _ = self.with_batch(images, ranks)
        timeline, batch, noun = plan.train.timeline(len(images)), plan.train.batch, self.noun
        epochs = timeline.total_steps / timeline.steps_per_epoch
        return [
            f"run folder {out}",
            f"{noun:10} {len(images):,} of {images.name} {images.split}",
            f"encoder    {_sizes(self.encoder)}",
            f"learning   {_word(self.objective)} with {_word(self.optimizer)}",
            f"steps      {timeline.total_steps:,} of {batch:,} {noun}, {epochs:.4g} epochs",
            *([f"batch      {batch:,} fits: {why}"] if why else []),
        ]

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
        """Train, and leave encoder, configuration, log and training state in `out`.

        Started by torchrun, all its processes share the work, and end together.

        Args:
            out: Folder of the run.
            resume: Go on with the run that is there, if there is one.
            must_resume: Go on with it; there has to be one.
            extend: Go on with it, for more `train.epochs` or `train.max_steps` than it had:
                schedules are drawn over the new length from here on.
            overwrite: Forget what is there.
            device: Without one, a GPU if there is one.
            config: What `config.yaml` will say, by default this object in plain types.

        Returns:
            Path of the encoder's weights.

        Raises:
            ConfigurationError: `out` holds a run, another one than this, or one that is going on,
                or holds none that could be resumed; `init_from` is of another architecture;
                training diverged.
            CheckpointError: `init_from` or the state of the run cannot be read.
            DataError: an image cannot be read; everything is saved.
            Preempted: SIGTERM, SIGHUP or SIGUSR1 came, and everything is saved.
            KeyboardInterrupt: SIGINT came, and everything is saved.
            MachineError: a folder cannot be written, or TensorBoard or
                Weights & Biases is asked for and missing.
        """
        if self.train.tensorboard:
            require_tensorboard()
        if self.train.wandb is not None:
            require_wandb()
        if self.init_from is not None:
            require_apart(self.init_from, out)
        with ExitStack() as stack:
            request = stack.enter_context(stop_requests())
            timeout = timedelta(minutes=self.train.timeout_minutes)
            ranks = stack.enter_context(
                training_together(choose_device(device and str(device)), timeout)
            )
            stack.enter_context(deterministic(self.train.deterministic))
            on_cuda = ranks.device.type == "cuda"
            stack.enter_context(torch.random.fork_rng([ranks.device] if on_cuda else []))
            hold = None
            goes_on = resume or must_resume or extend
            with ranks.together():
                if ranks.is_first:
                    hold = stack.enter_context(held(out))
                    if (must_resume or extend) and not has_state(out):
                        raise ConfigurationError(f"nothing to resume in {out}; give --out of a run")
                    claim(out, resume=goes_on, overwrite=overwrite)
            with ranks.together():
                found = load_state(out, ranks.device) if goes_on and has_state(out) else None
                run = Run(self._recorded(*found) if found else self, out, ranks, request, hold)
                if found:
                    run.restore(*found, extend=extend)
                else:
                    run.begin(instead=goes_on)
                # As large as the run itself.
                del found
                if ranks.is_first:
                    run.write_config(config or describe(self))
            run.go()
        return out / ENCODER

    def _recorded(self, state: Mapping[str, Any], _: Path) -> "Pretraining":
        """A batch that nobody types is that of the run which goes on, whatever would fit here."""
        batch = self.train.batch_size or state["configuration"]["train"]["batch_size"]
        return replace(self, train=replace(self.train, batch_size=batch))

    def what_next(self, out: Path) -> str:
        """What to do with a finished run, in a line."""
        if isinstance(self.objective, Generating):
            return f"tested: see the last line of {out / LOG}"
        line, state = f"next: ssl-bench probe --task all --checkpoint {out}", out / STATE
        if not state.is_file():
            return line
        size = size_in_words(state.stat().st_size)
        return f"{line}; the {size} of {state} are for --resume and --extend alone"


def _sizes(encoder: EncoderConfig) -> str:
    blocks = f"{encoder.depth} blocks of width {encoder.dim}"
    if isinstance(encoder, StateSpaceConfig):
        return f"{blocks}, {encoder.version} with {encoder.num_states} states"
    side = encoder.image_size
    return f"{blocks}, patches of {encoder.patch_size} pixels, images of {side} x {side}"


def _word(component: object) -> str:
    return type(component).__name__
