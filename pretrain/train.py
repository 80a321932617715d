"""A pretraining run: its configuration, its folder, and the loop."""

import hashlib
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.data import DataLoader

from pretrain.accuracy import Trained, record_accuracy
from pretrain.batches import Batches, Share, in_memory
from pretrain.board import Board, require_tensorboard
from pretrain.checkpoint import has_state, load_state, remove_states, save_state
from pretrain.clock import Clock
from pretrain.holding import Hold, held
from pretrain.journal import Journal
from pretrain.monitor import Monitor, described
from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import Objective
from pretrain.openings import OPENINGS, former_opening_steps, opening_steps
from pretrain.optimizers import AdamW, OptimizerRecipe
from pretrain.options import (
    DataOptions,
    TrainOptions,
    describe,
    differences,
    in_full,
)
from pretrain.ranks import Ranks, joined
from pretrain.report import Report
from pretrain.start import SHA256, require_apart, sha256_at_resume, start_from
from pretrain.stopping import StopRequest, leave_signals_to_the_parent, stop_requests
from pretrain.trainer import Trainer
from pretrain.watch import Watch
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError, MachineError, Preempted
from ssl_bench.evaluation import trained_on
from ssl_bench.fields import check_fields
from ssl_bench.files import remove_orphans, write_text_atomically
from ssl_bench.models import EncoderConfig, ViTConfig
from ssl_bench.models.checkpoint import save_encoder

ENCODER, CONFIG, LOG, BOARD = "last.safetensors", "config.yaml", "log.jsonl", "tensorboard"


@dataclass(frozen=True)
class Pretraining:
    """An encoder, what it learns for, with which optimizer, from which images, for how long.

    Attributes:
        start_from: Address of a checkpoint, as `load_encoder` takes it, whose weights the encoder
            starts with; random ones without.
    """

    model: EncoderConfig = field(default_factory=ViTConfig)
    objective: Objective = field(default_factory=Dino)
    optimizer: OptimizerRecipe = field(default_factory=AdamW)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    monitor: Monitor = field(default_factory=Monitor)
    start_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")

    @property
    def encoder(self) -> EncoderConfig:
        """The model at the size of the large crops."""
        return replace(self.model, image_size=self.data.image_size or self.model.image_size)

    def run(
        self,
        out: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        device: torch.device | str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Train, and leave encoder, configuration, log and training state in `out`.

        `resume` goes on with the run that is there, if there is one; `overwrite` forgets it.
        `config` is what `config.yaml` will say, by default this object in plain types. Without a
        `device`, a GPU if there is one. Started by torchrun, all its processes share the work.

        Returns:
            Path of the encoder's weights.

        Raises:
            ConfigurationError: `out` holds a run, another one than this, or one that is going on;
                `start_from` is of another architecture; training diverged.
            CheckpointError: `start_from` or the state of the run cannot be read.
            Preempted: SIGTERM or SIGUSR1 came, and everything is saved.
            KeyboardInterrupt: likewise for SIGINT.
            MachineError: a folder cannot be written, or TensorBoard is asked for and missing.
        """
        if self.train.tensorboard:
            require_tensorboard()
        if self.start_from is not None:
            require_apart(self.start_from, out)
        name = device or ("cuda" if torch.cuda.is_available() else "cpu")
        with ExitStack() as stack:
            request = stack.enter_context(stop_requests())
            ranks = stack.enter_context(joined(torch.device(name)))
            on_cuda = ranks.device.type == "cuda"
            stack.enter_context(torch.random.fork_rng([ranks.device] if on_cuda else []))
            hold = None
            if ranks.is_first:
                hold = stack.enter_context(held(out))
                claim(out, resume=resume, overwrite=overwrite)
            ranks.wait()
            run = Run(self, out, ranks, request, hold)
            if resume and has_state(out):
                run.restore()
            else:
                run.begin()
            if ranks.is_first:
                plain = yaml.safe_dump(dict(config or describe(self)), sort_keys=False)
                write_text_atomically(out / CONFIG, plain)
            run.go()
        return out / ENCODER


class Run:
    """A pretraining on its way: the loop, and what it reads and writes."""

    def __init__(
        self,
        plan: Pretraining,
        out: Path,
        ranks: Ranks,
        request: StopRequest,
        hold: Hold | None,
    ) -> None:
        self.plan, self.out, self.ranks, self.request = plan, out, ranks, request
        self.hold = hold
        self.clock = Clock()
        images = plan.data.open()
        self.timeline = plan.train.timeline(len(images))
        with request.at_once():
            self.trained_on = ranks.from_first(lambda: trained_on(images))
        which = {"images": _digest(images), "image_files": self.trained_on.fingerprint}
        self.description = describe(plan) | which
        self.description[OPENINGS] = opening_steps(self.description, self.timeline)
        self.batches = _batches(plan, images, ranks)
        learner = plan.objective.build(
            plan.encoder, self.timeline, seed=plan.train.seed, class_names=images.class_names
        )
        self.observer = plan.monitor.open(
            learner, self.timeline, data_root=plan.data.root, class_names=images.class_names
        )
        self.trainer = Trainer(learner, plan.optimizer, plan.train, self.timeline, ranks)
        self.step = 0

    def begin(self) -> None:
        """Take the weights of another run, where the plan says so."""
        if self.plan.start_from is not None:
            encoders = self.trainer.learner.encoders
            self.description[SHA256] = start_from(self.plan.start_from, encoders)

    def restore(self) -> None:
        """Go back to the last state that was saved.

        Raises:
            ConfigurationError: it is of a run with another configuration.
            CheckpointError: it is damaged, and the one before too.
        """
        state, path = load_state(self.out, self.ranks.device)
        # Older states say nothing of the files, nor of options that came later.
        older = {"image_files": self.description["image_files"], **state["configuration"]}
        if self.plan.start_from is not None:
            self.description[SHA256] = sha256_at_resume(self.plan.start_from, older)
        older = in_full(older, self.plan)
        older.setdefault(OPENINGS, former_opening_steps(older, self.timeline))
        if changed := differences(older, self.description):
            raise ConfigurationError(
                f"{path} is of a run with another configuration ({'; '.join(changed)}); "
                "put it back, or start anew in another folder"
            )
        self.trainer.load_state_dict(state)
        self.step = state["step"]

    def go(self) -> None:
        """Train from the current step to the last, or until something asks to stop."""
        total, options = self.timeline.total_steps, self.plan.train
        watch = Watch(
            self.trainer.learner.symptom,
            non_finite_patience=options.non_finite_patience,
            symptom_patience=options.collapse_patience,
            first_step=options.warmup_steps(self.timeline),
        )
        report = Report(self._journal(), done=self.step, total=total, ranks=self.ranks, watch=watch)
        with closing(report):
            if self.step:
                report.say(f"going on after step {self.step} of {total}")
            try:
                self._loop(report)
            except DataError:
                self.save(report)
                raise
            self.save(report)
            if self.step < total:
                self._leave(report)
            else:
                self._record_accuracy(report)

    def _journal(self) -> Journal | None:
        if not self.ranks.is_first:
            return None
        board = None
        if self.plan.train.tensorboard:
            board = Board(self.out / BOARD, last_step=self.step)
        return Journal(self.out / LOG, last_step=self.step, board=board)

    def save(self, report: Report) -> None:
        """Write training state and encoder, once all steps so far are known to be sound."""
        report.settle(everything=True)
        if self.hold is not None:
            self.hold.require()
            state = {"step": self.step, "configuration": self.description}
            state |= self.trainer.state_dict()
            # A broken one would push out the last good one.
            if _is_finite(state["learner"]):
                save_state(self.out, state)
                epoch = self.step / self.timeline.steps_per_epoch
                metadata = {"step": str(self.step), "epoch": f"{epoch:.2f}"}
                save_encoder(self.out / ENCODER, self.trainer.learner.encoder, metadata)
            else:
                report.say(f"step {self.step}: weights are not finite, the checkpoint is kept")
        self.clock.mark_saved()
        report.save = False

    def _loop(self, report: Report) -> None:
        """Take steps until the last, or until a process wants to stop."""
        with closing(self._groups()) as groups:
            while self.step < self.timeline.total_steps and not report.stop:
                if report.save:
                    self.save(report)
                self._take_step(groups, report)

    def _take_step(self, groups: Iterator[Any], report: Report) -> None:
        crops, device = self.plan.objective.crops, self.ranks.device
        cut = islice(groups, self.plan.train.accumulation)
        parts = (crops.finish(group, device) for group in cut)
        values = self.trainer.take_step(self.step, parts)
        row = self._row()
        self.step += 1
        try:
            row |= self._measures(report)
        finally:
            # An image that cannot be read must not cost the row of a step that was taken.
            report.note(row, values, stop=self._wants_to_stop(), save=self._wants_to_save())
        report.settle()

    def _measures(self, report: Report) -> dict[str, float]:
        """What the monitor finds after this step, if it is its turn; one process measures."""
        if self.observer is None or not self.ranks.is_first:
            return {}
        measures = self.observer.measures(self.step)
        if measures:
            report.say(f"step {self.step}/{self.timeline.total_steps}  {described(measures)}")
            # The time it took is not that of the next step.
            self.clock.begin()
        return measures

    def _groups(self) -> Generator[Any, None, None]:
        """Crops of all parts that are still to come; closing it ends the data workers."""
        num_parts, device = self.plan.train.accumulation, self.ranks.device
        remaining = range(self.step * num_parts, self.timeline.total_steps * num_parts)
        loader = DataLoader(
            self.batches,
            batch_size=None,
            sampler=remaining,
            num_workers=self.plan.train.workers(device),
            pin_memory=device.type == "cuda",
            worker_init_fn=leave_signals_to_the_parent,
            # It draws a number when iterated, which must not come out of the global generator.
            generator=torch.Generator(),
        )
        arriving = iter(loader)
        self.clock.begin()
        try:
            for _ in remaining:
                with self.clock.waiting():
                    part = _next_part(arriving)
                if isinstance(part, DataError):
                    raise part
                yield part
        finally:
            # A traceback may keep this frame alive, and with it the workers.
            del arriving

    def _row(self) -> dict[str, Any]:
        """What the log says of the step just taken, apart from what the device computes."""
        seconds, waited = self.clock.lap()
        return {
            "step": self.step + 1,
            "epoch": self.timeline.epoch(self.step),
            **self.trainer.values(self.step),
            "images_per_second": self.plan.train.batch_size / seconds,
            "data_wait": 100 * waited / seconds,
            "mfu": self.trainer.utilisation(seconds),
        }

    def _record_accuracy(self, report: Report) -> None:
        results = self.plan.monitor.results
        if results is None or self.observer is None or not self.ranks.is_first:
            return
        weights = self.out / ENCODER
        training = Trained(self.description, self.trained_on)
        if path := record_accuracy(Path(results), self.observer, weights, training):
            report.say(f"accuracy recorded in {path}")

    def _wants_to_stop(self) -> bool:
        return self.request.received is not None or self._time_is_up()

    def _time_is_up(self) -> bool:
        minutes = self.plan.train.max_minutes
        return minutes is not None and self.clock.minutes_since_start >= minutes

    def _wants_to_save(self) -> bool:
        epochs = self.plan.train.checkpoint_epochs
        if epochs and self.step % (epochs * self.timeline.steps_per_epoch) == 0:
            return True
        return self.clock.minutes_since_save >= self.plan.train.checkpoint_minutes

    def _leave(self, report: Report) -> None:
        where = f"after step {self.step} of {self.timeline.total_steps}, saved in {self.out}"
        if self.request.is_interrupt:
            report.say(f"interrupted {where}; go on with --resume")
            raise KeyboardInterrupt
        if not self.request.is_preemption and self._time_is_up():
            report.say(f"time is up {where}; go on with --resume")
            return
        raise Preempted(f"asked to stop {where}; submit again with --resume")


def claim(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Make sure that only this run writes into a folder.

    Raises:
        ConfigurationError: another run is there, and neither of the options says what to do.
    """
    files = [out / name for name in (CONFIG, LOG, ENCODER, f"{ENCODER}.sha256")]
    is_taken = has_state(out) or any(path.exists() for path in files)
    if is_taken and not (resume or overwrite):
        raise ConfigurationError(
            f"{out} already holds a run; go on with --resume, forget it with --overwrite, or "
            "choose another --out"
        )
    remove_orphans(out, idle_seconds=0.0)
    if overwrite and not resume:
        remove_states(out)
        for path in files:
            path.unlink(missing_ok=True)


def _batches(plan: Pretraining, images: ImageSet, ranks: Ranks) -> Batches:
    options, crops = plan.train, plan.objective.crops
    pieces = options.accumulation * ranks.count
    if options.batch_size % pieces:
        raise ConfigurationError(
            f"train.batch_size must be a multiple of {pieces} (train.accumulation x processes), "
            f"got {options.batch_size}"
        )
    sizes = crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
    return Batches(
        images=in_memory(images) if plan.data.decodes_once else images,
        cut=partial(crops.cut, sizes=sizes),
        share=Share(options.batch_size, options.accumulation, ranks.rank, ranks.count),
        seed=options.seed,
        repeats=options.repeats,
    )


def _next_part(arriving: Iterator[Any]) -> Any:
    try:
        return next(arriving)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise MachineError(
            f"a data worker died ({str(error).splitlines()[0]}); memory or /dev/shm may be too "
            "small: try train.num_workers=0"
        ) from error


def _is_finite(weights: Mapping[str, Any]) -> bool:
    return all(bool(value.isfinite().all()) for value in weights.values())


def _digest(images: ImageSet) -> str:
    """Which images these are, wherever they lie: hexadecimal sha256 of their ids and classes."""
    names = "\n".join((*images.ids, *images.class_names))
    return hashlib.sha256(os.fsencode(names)).hexdigest()
