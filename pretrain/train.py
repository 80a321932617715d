"""The training loop: build a run, take and log optimizer steps, save checkpoints, and stop.

A run writes these files:

- `config.yaml` is written before the first step, and again when unreadable images are left out.
- A row of `log.jsonl` is written after each step (on a GPU, one step later). If the encoder is
  evaluated after a step, the row also contains the metrics of the evaluation.
- `epochNNNN.safetensors` is written after the epochs NNNN that `train.keep_epochs` and
  `train.keep_every` select.
- A checkpoint is written every `train.checkpoint_minutes` minutes, every `train.checkpoint_epochs`
  epochs, and after the last step. `pretrain/checkpoints.py` describes the files of a checkpoint.

A run may end before its last step:

- After a first Ctrl-C, another signal, or `train.max_minutes` minutes, the run finishes the current
  step (on a GPU also the next step) and saves a checkpoint.
- After a second Ctrl-C, the current step and all unsaved steps are lost, but all queued checkpoints
  are written to the disk. After a third Ctrl-C, only the file that is being written is completed.
- After a `DataError` or `MachineError`, such as an unreadable image, a dead data worker or a full
  disk, the run saves all finished steps, if the disk allows it.
- After `OutOfMemory`, the loss of another process, or any other error, such as the
  `ConfigurationError` of a diverged run, no further checkpoint is saved. The last checkpoint
  remains.

`pretrain/resume.py` describes what may change before a run is resumed.

If several processes train together, all processes call the same functions in the same order. If a
single process left the training loop, the other processes would wait for this process forever. An
error from the data, the monitor, the log or a checkpoint is therefore stored until all processes
call `TrainingRanks.raise_on_all`, which raises the error in all processes. This happens before each
micro-batch and after the last step. An error of the step itself is raised at once.
"""

import math
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from pretrain import checkpoints, logging, trackers
from pretrain.batches import (
    BatchChunks,
    ChunkWithReplacements,
    decode_images,
    load_chunks,
    plan_workers,
)
from pretrain.distributed import (
    LostProcess,
    TrainingRanks,
    is_connection_error,
    lost_process_error,
)
from pretrain.fine_tuning import INIT_FROM_SHA256, find_initial_sha256, load_initial_weights
from pretrain.memory import OutOfMemory, out_of_memory_error
from pretrain.monitor import Evaluator
from pretrain.objectives.objective import GeneratingObjective, PeriodicEvaluation, Views
from pretrain.plan import Pretraining
from pretrain.resume import Progress, describe_run, load_trainer_state, restore_progress
from pretrain.signals import StopSignalHandler
from pretrain.step import Trainer
from ssl_bench.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    Preempted,
    SslBenchError,
    with_hint,
)
from ssl_bench.evaluation import describe_training_images
from ssl_bench.models import EncoderModule
from ssl_bench.models.loading.checkpoint import normalization_metadata
from ssl_bench.results import TrainingImages
from ssl_bench.system.device import has_fast_bfloat16
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.process import is_out_of_memory

_MAX_NAMES = 5
# A message reports the duration of the monitor if it exceeds this number of seconds and this share
# of the training time since the last measurement.
_MONITOR_SECONDS, _MONITOR_SHARE = 1.0, 0.1


class Run:
    """A training run with its networks, data, log and checkpoints.

    Args:
        plan: Encoder, objective, optimizer, images and options of the run.
        out: The run folder, which the process of rank 0 has locked.
        stop_handler: Object that stores the signals which ask this process to stop.
    """

    def __init__(
        self, plan: Pretraining, out: Path, ranks: TrainingRanks, stop_handler: StopSignalHandler
    ) -> None:
        self.out, self.ranks, self.stop_handler = out, ranks, stop_handler
        self.saver = checkpoints.Saver(out) if ranks.is_main else None
        self.clock = logging.Clock()

        # Images and the length of the run.
        self.images = images = plan.images()
        self.plan = plan = plan.resolve_batch_size(len(images))
        self.timeline = plan.train.timeline(len(images))
        self.trained_on = ranks.compute_on_main(self._read_fingerprint)
        self.description = describe_run(plan, images, self.trained_on.fingerprint, self.timeline)

        # Crops of the batches.
        options, crops = plan.train, plan.objective.crops
        parts = options.accumulation * ranks.world_size
        if options.resolved_batch_size % parts:
            next_multiple = math.ceil(options.resolved_batch_size / parts) * parts
            processes = f" x {ranks.world_size} processes" if ranks.world_size > 1 else ""
            raise ConfigurationError(
                f"train.batch_size must be a multiple of {parts} (train.accumulation="
                f"{options.accumulation}{processes}), got {options.batch_size}",
                hint=(f"train.batch_size={next_multiple}",),
            )
        skips_unreadable = plan.data.on_bad_image == "skip"
        sizes = crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
        self.batches = BatchChunks(
            images=decode_images(images, skip=skips_unreadable) if plan.data.in_memory else images,
            cut=partial(crops.cut, sizes=sizes),
            batch_size=options.resolved_batch_size,
            seed=options.seed,
            num_micro_batches=options.accumulation,
            rank=ranks.rank,
            num_ranks=ranks.world_size,
            repeats=options.repeats,
            image_ids=images.ids if skips_unreadable else (),
        )
        num_workers = options.count_workers(ranks.device)
        self.workers = plan_workers(self.batches, num_workers, options.shared_memory_gib)

        # Encoder and heads, monitor, optimizer.
        learner = plan.objective.build(
            plan.encoder, self.timeline, seed=options.seed, class_names=images.class_names
        )
        self.evaluator: PeriodicEvaluation | None
        if isinstance(plan.objective, GeneratingObjective):
            self.evaluator = plan.objective.build_evaluator(learner, self.timeline)
        else:
            self.evaluator = plan.monitor.build_evaluator(learner, self.timeline, plan.data, images)
        self.trainer = Trainer(learner, plan.optimizer, options, self.timeline, ranks)

        self.progress = Progress()
        self.messages = [plan.data.describe_unreadable_images(images)] if ranks.is_main else []
        self._config: Mapping[str, Any] = {}
        self._reported_left_out = set[int]()
        self._error: Exception | None = None

    def _read_fingerprint(self) -> TrainingImages:
        # Reading all images may take minutes, and there is nothing to save yet.
        with self.stop_handler.raise_immediately():
            return describe_training_images(self.images)

    def start(self) -> None:
        """Prepare a new run. If `init_from` is set, load the weights of this checkpoint."""
        plan = self.plan
        if plan.init_from is not None:
            encoders = self.trainer.learner.encoders
            self.description[INIT_FROM_SHA256] = load_initial_weights(
                plan.init_from, encoders, plan.data.normalization
            )

    def resume(self, state: Mapping[str, Any], path: Path, *, extend: bool = False) -> None:
        """Prepare to continue the run: load the progress, the weights and the optimizer's state.

        Args:
            state: Saved state of the run, returned by `load_state`.
            path: File of the state.
            extend: Whether the run may be longer than the saved run.

        Raises:
            CheckpointError: The saved state is unusable.
            ConfigurationError: A setting or an image that affects the weights has changed.
        """
        address = self.plan.init_from
        if address is not None:
            self.description[INIT_FROM_SHA256] = find_initial_sha256(
                address, state["configuration"]
            )
        self.progress, messages = restore_progress(
            state,
            path,
            plan=self.plan,
            description=self.description,
            timeline=self.timeline,
            images=self.images,
            batches=self.batches,
            ranks=self.ranks,
            extend=extend,
        )
        load_trainer_state(self.trainer, state, path)
        if self.saver is not None:
            self.saver.saved_step = self.progress.step
        self.messages += messages

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write settings, extensions of the run, and ids of unreadable images to `config.yaml`."""
        train = {**config.get("train", {}), "batch_size": self.plan.train.batch_size}
        self._config = config = {**config, "train": train}
        lists = {
            "extensions": self.progress.extensions,
            "left_out": self._get_ids(self.progress.left_out),
        }
        present = {name: values for name, values in lists.items() if values}
        plain = yaml.safe_dump({**config, **present}, sort_keys=False)
        write_text_atomically(self.out / checkpoints.CONFIG, plain)

    def train(self) -> None:
        """Train until the last step, or until a signal, the time limit or an error ends the run.

        Raises:
            Preempted: A process received a signal other than Ctrl-C before the last step. The
                training state is saved.
            KeyboardInterrupt: Ctrl-C was pressed. After one Ctrl-C, the training state is saved.
                After a second Ctrl-C, only earlier checkpoints remain.
            SslBenchError: An error has occurred in this process or in another process of the run.
        """
        ranks, progress, total = self.ranks, self.progress, self.timeline.total_steps
        with ExitStack() as stack:
            self.log = log = stack.enter_context(closing(self._open_log()))
            if self.saver is not None:
                # At the end, wait until all files are written.
                stack.enter_context(closing(self.saver))
            for line in filter(None, (*self.messages, *self._describe_start())):
                log.say(line)
            try:
                with closing(self._read_micro_batches()) as micro_batches:
                    for step in range(progress.step, total):
                        row, metrics = self._take_step(step, micro_batches)
                        progress.step = step + 1
                        with self._postpone_errors():
                            row |= self._run_monitor()
                        # If one process should stop or save, `log.should_stop` or
                        # `log.should_save` becomes true in all processes after the same step.
                        log.add(row, metrics, stop=self._should_stop(), save=self._should_save())
                        with self._postpone_errors():
                            log.write_rows()
                            if self.saver is not None:
                                self.saver.check()
                            self._keep_encoder()
                            if log.should_save and not log.should_stop and progress.step < total:
                                self._save()
                        if log.should_stop:
                            break
                ranks.raise_on_all(self._error)
            except (OutOfMemory, LostProcess):
                # The weights may have changed in an unfinished step or while memory was tested.
                raise
            except (DataError, MachineError):
                # All processes wait for the files, because torchrun kills the remaining processes
                # when one process fails.
                with ranks.synchronize_errors():
                    self._save(wait=True)
                log.say(f"{self._describe_saved()}. Continue with --resume")
                raise
            with ranks.synchronize_errors():
                self._save(wait=True)
            self._end()

    def _open_log(self) -> logging.StepReporter:
        options, last_step = self.plan.train, self.progress.step
        journal = None
        if self.ranks.is_main:
            curves: list[trackers.Tracker] = []
            if options.tensorboard:
                curves.append(
                    trackers.TensorBoardLog(self.out / checkpoints.BOARD, last_step=last_step)
                )
            if options.wandb:
                folder = self.out / checkpoints.WANDB
                curves.append(
                    trackers.WandbLog(options.wandb, folder, self.description, last_step=last_step)
                )
            file = self.out / checkpoints.LOG
            journal = logging.LogFile(file, last_step=last_step, trackers=curves)
        diagnose = self.trainer.learner.diagnose
        return logging.StepReporter(
            journal,
            options,
            self.timeline,
            self.ranks,
            diagnose,
            done=last_step,
            started=self.clock.run_start,
        )

    def _describe_start(self) -> Iterator[str]:
        """Yield the messages to print before the first step."""
        if warning := self.trainer.describe_rising_lr():
            yield warning
        options = self.plan.train
        is_new, is_auto = self.progress.step == 0, options.precision == "auto"
        if is_new and is_auto and has_fast_bfloat16(self.ranks.device):
            line = "this CPU has bfloat16 instructions, which shorten a step"
            yield with_hint(line, hint=("train.precision=bfloat16",))
        steps, batch = self.timeline.total_steps, options.resolved_batch_size
        yield f"{len(self.images):,} {self.plan.objective.noun}, {steps:,} steps, batch {batch:,}"
        if self.workers.num_requested:
            yield str(self.workers)

    def _describe_saved(self) -> str:
        step = self.progress.step if self.saver is None else self.saver.saved_step
        return f"{step} of {self.timeline.total_steps} steps are saved in {self.out}"

    def _read_micro_batches(self) -> Generator[Any, None, None]:
        """Yield the cropped images of each micro-batch until the end of the run.

        If a process cannot read images, or has stored an error since the last micro-batch, all
        processes raise an error. Closing the generator ends the data workers.
        """
        per_step, device = self.plan.train.accumulation, self.ranks.device
        remaining = range(self.progress.step * per_step, self.timeline.total_steps * per_step)
        self.clock.restart()
        with closing(load_chunks(self.batches, self.workers, remaining, device)) as chunks:
            for _ in remaining:
                micro_batch, error = None, None
                try:
                    # Each chunk is read when it is needed, so that its shared memory is freed.
                    own = (self._read_chunk(chunks) for _ in range(self.workers.num_chunks))
                    if self.workers.num_chunks == 1:
                        micro_batch = next(own)
                    else:
                        micro_batch = self.plan.objective.crops.collate(own, device)
                except SslBenchError as met:
                    error = met
                self.ranks.raise_on_all(error or self._error)
                yield micro_batch

    def _read_chunk(self, chunks: Iterator[Any]) -> Any:
        """Return the next chunk (part) of a micro-batch.

        The indices of unreadable images that were replaced are added to `progress.left_out`.
        """
        with self.clock.count_waiting():
            chunk = next(chunks)
        if isinstance(chunk, SslBenchError):
            raise chunk
        if not isinstance(chunk, ChunkWithReplacements):
            return chunk
        progress = self.progress
        new = set(chunk.left_out) - progress.left_out
        was_used = self.batches.mark_used_images(progress.step)
        progress.never_used |= {index for index in new if not was_used[index]}
        progress.left_out |= new
        return chunk.crops

    def _take_step(
        self, step: int, micro_batches: Iterator[Any]
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """Train on one batch.

        Returns:
            The values of the log row that are known on the CPU, such as the learning rate, and the
            metrics, which the device may not have computed yet.
        """
        plan, trainer = self.plan, self.trainer
        views = map(self._finish_crops, islice(micro_batches, plan.train.accumulation))
        metrics = self._compute(step, views)
        seconds, waited = self.clock.end_step()
        row = {
            "step": step + 1,
            "epoch": self.timeline.get_epoch(step),
            **trainer.scheduled_values(step),
            # Images of all processes.
            "images_per_second": plan.train.resolved_batch_size / seconds,
            "data_wait": 100 * waited / seconds,
            "mfu": trainer.utilisation(seconds),
        }
        return row, metrics

    def _compute(self, step: int, views: Iterator[Views]) -> Mapping[str, Tensor]:
        try:
            return self.trainer.take_step(step, views)
        except Exception as error:
            # Reading the next micro-batch also raises errors of the data, the monitor and the log.
            if error is self._error or isinstance(error, SslBenchError):
                raise
            if not is_out_of_memory(error):
                if is_connection_error(error):
                    raise lost_process_error(error) from error
                raise
            reason = next(iter(str(error).splitlines()), "")
        # Outside of the except clause, because the exception keeps tensors of the step in memory.
        has_state = checkpoints.has_state(self.out)
        raise out_of_memory_error(reason, step, self.plan, self.trainer, has_state=has_state)

    def _finish_crops(self, micro_batch: Any) -> Views:
        """Augment and normalise cropped images on the device."""
        crops, data = self.plan.objective.crops, self.plan.data
        return crops.augment_on_device(micro_batch, self.ranks.device, data.normalization)

    @contextmanager
    def _postpone_errors(self) -> Generator[None]:
        """Inside a `with` block, store an error of this process instead of raising it.

        All processes raise the stored error together when they read the next micro-batch, or after
        the last step.
        """
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def _run_monitor(self) -> Mapping[str, float]:
        """Evaluate the encoder if an evaluation is due after this step, and return the metrics.

        Only the process of rank 0 evaluates the encoder. Return an empty mapping if no evaluation
        is due, or if this process does not have rank 0.
        """
        if self.evaluator is None or not self.ranks.is_main:
            return {}
        step, start = self.progress.step, time.monotonic()
        trained, measures = start - self.clock.training_start, self.evaluator.measure_if_due(step)
        if measures:
            # All metrics of a monitor are percentages, except the loss.
            values = "  ".join(
                f"{name} {value:.3f}" if name == "val_loss" else f"{name} {value:.1f} %"
                for name, value in measures.items()
            )
            self.log.say(f"step {step}/{self.timeline.total_steps}  {values}")
            seconds = time.monotonic() - start
            if seconds > max(_MONITOR_SECONDS, _MONITOR_SHARE * trained):
                self.log.say(
                    f"the monitor took {seconds:.0f} s, and the steps before it {trained:.0f} s. "
                    f"How long the monitor takes depends on {self.evaluator.cost_options}"
                )
            # The time of the monitor does not count as time of the next step.
            self.clock.restart()
        return measures

    def _should_stop(self) -> bool:
        return self.stop_handler.last_signal is not None or self._is_time_up()

    def _is_time_up(self) -> bool:
        minutes = self.plan.train.max_minutes
        return minutes is not None and time.monotonic() - self.clock.run_start >= 60 * minutes

    def _should_save(self) -> bool:
        options = self.plan.train
        is_old = time.monotonic() - self.clock.last_save >= 60 * options.checkpoint_minutes
        return is_old or self.timeline.is_interval_end(
            options.checkpoint_epochs, self.progress.step
        )

    def _keep_encoder(self) -> None:
        """Save the encoder to its own file if `keep_epochs` or `keep_every` selects this epoch."""
        if self.saver is None:
            return
        epoch, steps_left = divmod(self.progress.step, self.timeline.steps_per_epoch)
        if steps_left == 0 and self.plan.train.should_keep(epoch):
            # Check all rows first, because a row may show that the weights have diverged.
            self.log.write_rows(everything=True)
            self.saver.keep(epoch, *self._copy_encoder(), self.log.say)

    def _save(self, *, wait: bool = False) -> None:
        """Save the training state and the encoder.

        If the log shows that training has diverged, raise a ConfigurationError and save nothing.

        All processes must call this method together, because they exchange the indices of their
        unreadable images. The process of rank 0 copies the training state to CPU memory, and a
        background thread writes it. If `wait` is true, this method waits until the files are
        written. If `wait` is false, an error of the background thread is raised after a later
        training step.
        """
        log, progress = self.log, self.progress
        log.write_rows(everything=True)
        gathered = self.ranks.all_gather((progress.left_out, progress.never_used))
        progress.left_out, progress.never_used = (
            set[int]().union(*sets) for sets in zip(*gathered, strict=True)
        )
        if self.saver is not None:
            self._report_left_out()
            state = progress.state(
                self.description, self.images, self.batches, self.ranks.world_size
            )
            state |= self.trainer.state_dict()
            self.saver.save(state, *self._copy_encoder(), log.say)
            if wait:
                self.saver.wait()
        self.clock.last_save = time.monotonic()
        log.should_save = False

    def _report_left_out(self) -> None:
        """Print the ids of newly found unreadable images, and add these ids to `config.yaml`."""
        left_out = self.progress.left_out
        new = self._get_ids(left_out - self._reported_left_out)
        if new:
            names = ", ".join(new[:_MAX_NAMES]) + (", ..." if len(new) > _MAX_NAMES else "")
            self.log.say(
                f"left out as unreadable: {names}. So far, {len(left_out)} of {len(self.images)} "
                "images were left out, each replaced by the next readable image"
            )
            self.write_config(self._config)
            self._reported_left_out |= left_out

    def _copy_encoder(self) -> tuple[EncoderModule, dict[str, str]]:
        """Return a copy of the encoder in CPU memory, and the metadata of its file."""
        epoch = self.progress.step / self.timeline.steps_per_epoch
        metadata = {"step": str(self.progress.step), "epoch": f"{epoch:.2f}"}
        metadata |= normalization_metadata(self.plan.data.normalization)
        encoder = self.trainer.learner.encoder
        tensors = [*encoder.parameters(), *encoder.buffers()]
        return checkpoints.copy_to_host(encoder, tensors), metadata

    def _end(self) -> None:
        """Finish the run after its last step, or report why it stops early."""
        saved = self._describe_saved()
        if self.progress.step == self.timeline.total_steps:
            if self.saver is not None:
                self._finish()
        elif self.stop_handler.is_interrupt:
            self.log.say(f"interrupted: {saved}")
            raise KeyboardInterrupt
        elif self.stop_handler.last_signal is None and self._is_time_up():
            self.log.say(f"time limit reached: {saved}. Continue with --resume")
        else:
            # The signal was received by this process or by another one.
            error = Preempted(
                f"stopped by a signal: {saved}. Start the command again", hint=("--resume",)
            )
            error.is_raised_on_all_ranks = self.ranks.world_size > 1
            raise error

    def _finish(self) -> None:
        """Delete the second-to-last training state, which a finished run no longer needs.

        If `monitor.results` is set, the accuracy of a supervised run is stored in this folder.
        """
        checkpoints.remove_previous_state(self.out)
        results = self.plan.monitor.results
        if results is not None and isinstance(self.evaluator, Evaluator):
            paths = self.evaluator.save_records(
                Path(results),
                self.out / checkpoints.ENCODER,
                self.description,
                self.trained_on,
                self._get_ids(self.progress.left_out),
            )
            for path in paths:
                self.log.say(f"accuracy recorded in {path}")

    def _get_ids(self, indices: Collection[int]) -> list[str]:
        return [self.images.ids[index] for index in sorted(indices)]
