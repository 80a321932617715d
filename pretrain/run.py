"""The loop of a pretraining run, and what it reads and writes on its way.

Longer than other files: what a step reads, decides and leaves is one story, told in order.
"""

import hashlib
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from pretrain.accuracy import Trained, record_accuracy
from pretrain.description import LENGTH, describe, differences, in_full
from pretrain.logging.clock import Clock
from pretrain.logging.divergence import Watch
from pretrain.logging.jsonl import Curves, Journal
from pretrain.logging.report import StepLog
from pretrain.logging.tensorboard import Board
from pretrain.logging.weights_and_biases import WandbRun
from pretrain.monitor import Observer, described
from pretrain.openings import OPENINGS, former_opening_steps, opening_steps
from pretrain.plan import Plan
from pretrain.runtime.batches import Batches, Remaining, Share, Substituted, in_memory
from pretrain.runtime.distributed import TrainingRanks
from pretrain.runtime.fine_tuning import SHA256, init_from, sha256_at_resume
from pretrain.runtime.folder import BOARD, CONFIG, ENCODER, LOG, WANDB, SavedEncoder, Saver
from pretrain.runtime.lock import Hold
from pretrain.runtime.signals import StopRequest
from pretrain.runtime.state import remove_previous
from pretrain.runtime.workers import arriving, plan_workers
from pretrain.runtime.writer import copied_module
from pretrain.step import Trainer
from ssl_bench.data.files.fingerprints import marks_of
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    Preempted,
    SslBenchError,
)
from ssl_bench.evaluation import trained_on
from ssl_bench.models.loading.checkpoint import colours_metadata
from ssl_bench.system.files import write_text_atomically

# In the state of a run: a sha256 over the images that it has learned from, indices of those that it
# left out, and of those among them that it never learned from.
_LEARNED, _LEFT_OUT, _UNLEARNED = "learned_files", "left_out", "left_out_unlearned"
_FILES = "image_files"
_SHOWN = 5
# A monitor that takes longer than both, the second of the training before it, is mentioned.
_MONITOR_SECONDS, _MONITOR_SHARE = 1.0, 0.1


class Run:
    """A pretraining on its way: the loop, and what it reads and writes."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        ranks: TrainingRanks,
        request: StopRequest,
        hold: Hold | None,
    ) -> None:
        self.out, self.ranks, self.request = out, ranks, request
        self.saver = Saver(out, hold) if hold is not None else None
        self.clock = Clock()
        self.images = images = plan.images()
        plan, self._why, needs = plan.with_batch(images, ranks)
        self.plan = plan
        self.timeline = plan.train.timeline(len(images))
        self.trained_on = ranks.from_first(request.at_once()(partial(trained_on, images)))
        which = {"images": _digest(images), _FILES: self.trained_on.fingerprint}
        self.description = describe(plan) | which
        self.description[OPENINGS] = opening_steps(self.description, self.timeline)
        self.batches = _batches(plan, images, ranks)
        asked = plan.train.workers(ranks.device)
        self.workers = plan_workers(self.batches, asked, plan.train.shared_memory_gib)
        learner = plan.objective.build(
            plan.encoder, self.timeline, seed=plan.train.seed, class_names=images.class_names
        )
        self.needs = needs or plan.needs(learner)
        self.observer = plan.observer(learner, self.timeline, images)
        self.trainer = Trainer(learner, plan.optimizer, plan.train, self.timeline, ranks)
        self.trainer.flops = self.needs.flops * plan.train.batch / ranks.count
        self.step = 0
        self.extensions: list[dict[str, int]] = []
        self.left_out, self._unlearned, self._told = set[int](), set[int](), set[int]()
        self._config: Mapping[str, Any] = {}
        self._news: list[str] = []
        self._fault: Exception | None = None

    def begin(self, *, instead: bool = False) -> None:
        """Take the weights of another run, where the plan says so; `instead` of going on."""
        if instead:
            self._news.append(f"nothing to resume in {self.out}, starting")
        if self.plan.init_from is not None:
            encoders = self.trainer.learner.encoders
            colours = self.plan.data.colours
            self.description[SHA256] = init_from(self.plan.init_from, encoders, colours)

    def restore(self, state: Mapping[str, Any], path: Path, *, extend: bool = False) -> None:
        """Go back to a state that was saved in a file, to go on for longer if `extend` says so.

        Raises:
            ConfigurationError: it is of a run with another configuration, or has learned from
                images that are others now.
        """
        # Older states say nothing of the files, nor of options that came later.
        older = {_FILES: self.description[_FILES], **state["configuration"]}
        if self.plan.init_from is not None:
            self.description[SHA256] = sha256_at_resume(self.plan.init_from, older)
        before = in_full(older, self.plan)
        before.setdefault(OPENINGS, former_opening_steps(before, self.timeline))
        changed = differences(before, self.description)
        lengths = [change for change in changed if change.startswith((*LENGTH, f"{OPENINGS}."))]
        if extend:
            changed = [change for change in changed if change not in lengths]
        is_of_files = [change.startswith(f"{_FILES}:") for change in changed] == [True]
        if is_of_files and self.ranks.from_first(partial(self._learned_the_same, state)):
            changed = []
            self._news.append("images that this run has not learned from are others than before")
        if changed:
            is_longer = not extend and self.timeline.total_steps > self._steps_of(before["train"])
            raise ConfigurationError(
                f"{path} is of a run with another configuration ({'; '.join(changed)}); put it "
                f"back, {'go on for longer with --extend, ' if is_longer else ''}or start anew in "
                "another folder"
            )
        self.extensions = state.get("extensions", [])
        unreadable = self.ranks.from_first(partial(self._unreadable, state.get(_LEFT_OUT, ())))
        self.left_out, self._unlearned = unreadable, unreadable & {*state.get(_UNLEARNED, ())}
        # What was stopped after it had been extended is submitted again by the same words.
        extends = extend and bool(lengths or not self.extensions)
        if extends:
            self._extend(state["step"], before["train"])
        self.trainer.load_state_dict(state)
        self.step = state["step"]
        longer = f" instead of {self.extensions[-1]['from_steps']}" if extends else ""
        self._news.append(f"going on after step {self.step} of {self.timeline.total_steps}{longer}")

    def _learned(self, step: int, unlearned: Collection[int]) -> str:
        """Sha256 over what those images hold that so many steps have learned from."""
        learned = self.batches.seen(step)
        learned[[*unlearned]] = False
        return hashlib.sha256(marks_of(self.images)[learned].tobytes()).hexdigest()

    def _learned_the_same(self, state: Mapping[str, Any]) -> bool:
        # States of older versions do not say it, and nothing equals that.
        return state.get(_LEARNED) == self._learned(state["step"], state.get(_UNLEARNED, ()))

    def _unreadable(self, left_out: Collection[int]) -> set[int]:
        """Those of the images that still cannot be read."""
        return {index for index in left_out if not _is_readable(self.images, index)}

    def _names(self, indices: Collection[int]) -> list[str]:
        return [self.images.ids[index] for index in sorted(indices)]

    def _steps_of(self, before: Mapping[str, Any]) -> int:
        """Steps of the run as it was, from the description of its `TrainOptions`."""
        lengths = {name.partition(".")[2]: before[name.partition(".")[2]] for name in LENGTH}
        # Epochs that are kept may be of the longer run alone.
        options = replace(self.plan.train, keep_epochs=None, **lengths)
        return options.timeline(len(self.images)).total_steps

    def _extend(self, step: int, before: Mapping[str, Any]) -> None:
        old, new = self._steps_of(before), self.timeline.total_steps
        if new <= old:
            raise ConfigurationError(
                f"--extend expects more than the {old} steps of the run in {self.out}, got {new}; "
                "raise train.epochs or train.max_steps"
            )
        self.extensions.append({"step": step, "from_steps": old, "to_steps": new})

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Leave what was asked for, how often it was extended and which images it lacks."""
        train = {**config.get("train", {}), "batch_size": self.plan.train.batch_size}
        self._config = config = {**config, "train": train}
        more = {"extensions": self.extensions, _LEFT_OUT: self._names(self.left_out)}
        more = {name: values for name, values in more.items() if values}
        plain = yaml.safe_dump({**config, **more}, sort_keys=False)
        write_text_atomically(self.out / CONFIG, plain)

    def go(self) -> None:
        """Train from the current step to the last, or until something asks to stop."""
        total, options = self.timeline.total_steps, self.plan.train
        watch = Watch(
            self.trainer.learner.diagnose,
            non_finite_patience=options.non_finite_patience,
            in_bfloat16=options.autocasts(self.ranks.device),
            diagnosis_patience=options.collapse_patience,
            first_step=options.warmup_steps(self.timeline),
        )
        report = StepLog(
            self._journal(),
            done=self.step,
            total=total,
            ranks=self.ranks,
            watch=watch,
            minutes=options.max_minutes,
        )
        with ExitStack() as stack:
            stack.enter_context(closing(report))
            if self.saver is not None:
                stack.enter_context(closing(self.saver))
            if rise := self.trainer.rise():
                self._news.append(rise)
            for line in self._news:
                report.say(line)
            report.say(self._outlook())
            if self.workers.asked:
                report.say(str(self.workers))
            try:
                self._loop(report)
            except (DataError, MachineError):
                # Nobody leaves before it is done: torchrun ends those that are left.
                with self.ranks.together():
                    self._save_and_wait(report)
                report.say(f"{self._where()}; go on with --resume")
                raise
            with self.ranks.together():
                self._save_and_wait(report)
            if self.step < total:
                self._leave(report)
            else:
                if self.saver is not None:
                    remove_previous(self.out)
                self._record_accuracy(report)

    def _outlook(self) -> str:
        """What is to come, in a line."""
        options, noun = self.plan.train, self.plan.noun
        at_once = options.batch // (options.accumulation * self.ranks.count)
        line = f"{len(self.images):,} {noun}, {self.timeline.total_steps:,} steps of "
        line += f"{options.batch:,}, about {max(self.needs.gib(at_once), 0.1):.1f} GiB of memory"
        return f"{line}; train.batch_size={options.batch} fits: {self._why}" if self._why else line

    def _journal(self) -> Journal | None:
        if not self.ranks.is_first:
            return None
        curves: list[Curves] = []
        if self.plan.train.tensorboard:
            curves.append(Board(self.out / BOARD, last_step=self.step))
        if project := self.plan.train.wandb:
            folder = self.out / WANDB
            curves.append(WandbRun(project, folder, self.description, last_step=self.step))
        return Journal(self.out / LOG, last_step=self.step, curves=curves)

    def save(self, report: StepLog) -> None:
        """Leave training state and encoder, once all steps so far are known to be sound.

        Waits for their copy alone; what goes wrong with the files, a later step is told.
        """
        report.settle(everything=True)
        found = self.ranks.gathered((self.left_out, self._unlearned))
        self.left_out, self._unlearned = (
            set[int]().union(*sets) for sets in zip(*found, strict=True)
        )
        if self.saver is not None:
            self._tell_left_out(report)
            state = {"step": self.step, "configuration": self.description}
            state |= {"extensions": self.extensions, _LEFT_OUT: sorted(self.left_out)}
            state[_UNLEARNED] = sorted(self._unlearned)
            state[_LEARNED] = self._learned(self.step, self._unlearned)
            self.saver.save(state | self.trainer.state_dict(), self._encoder(), report.say)
        self.clock.mark_saved()
        report.save = False

    def _tell_left_out(self, report: StepLog) -> None:
        """Say and write down which images were left out since the last time."""
        if new := self._names(self.left_out - self._told):
            names = ", ".join(new[:_SHOWN]) + (", ..." if len(new) > _SHOWN else "")
            total = f"{len(self.left_out)} of {len(self.images)} images"
            report.say(f"left out as unreadable: {names}; {total} so far, the next one for each")
            self.write_config(self._config)
        self._told |= self.left_out

    def _save_and_wait(self, report: StepLog) -> None:
        self.save(report)
        if self.saver is not None:
            self.saver.wait()

    def _encoder(self) -> SavedEncoder:
        """The encoder worth keeping, as it is now."""
        epoch = self.step / self.timeline.steps_per_epoch
        metadata = {"step": str(self.step), "epoch": f"{epoch:.2f}"}
        metadata |= colours_metadata(self.plan.data.colours)
        return SavedEncoder(copied_module(self.trainer.learner.encoder), metadata)

    def _loop(self, report: StepLog) -> None:
        """Take steps until the last, or until a process wants to stop or cannot go on."""
        with closing(self._groups()) as groups:
            while self.step < self.timeline.total_steps and not report.stop:
                self._take_step(groups, report)
        self._agree()

    def _agree(self, error: Exception | None = None) -> None:
        """End all processes with what one of them could not do since the last time."""
        self.ranks.agree(error or self._fault)

    def _take_step(self, groups: Iterator[Any], report: StepLog) -> None:
        crops, device = self.plan.objective.crops, self.ranks.device
        cut = islice(groups, self.plan.train.accumulation)
        parts = (crops.finish(group, device, self.plan.data.colours) for group in cut)
        values = self.trainer.take_step(self.step, parts)
        row = self._row()
        self.step += 1
        try:
            row |= self._measures(report)
        except Exception as error:
            self._fault = error
        # What could not be measured must not cost the row of a step that was taken.
        report.note(row, values, stop=self._wants_to_stop(), save=self._wants_to_save())
        try:
            self._settle(report)
        except Exception as error:
            self._fault = self._fault or error

    def _settle(self, report: StepLog) -> None:
        """Write what is due after a step."""
        report.settle()
        if self.saver is not None:
            self.saver.check()
        self._keep(report)
        if report.save and not report.stop and self.step < self.timeline.total_steps:
            self.save(report)

    def _keep(self, report: StepLog) -> None:
        """Leave the encoder of an epoch that is to be kept, when the epoch is over."""
        epoch, steps_more = divmod(self.step, self.timeline.steps_per_epoch)
        if steps_more or not self.plan.train.keeps(epoch) or self.saver is None:
            return
        report.settle(everything=True)
        self.saver.keep(epoch, self._encoder(), report.say)

    def _measures(self, report: StepLog) -> Mapping[str, float]:
        """What the monitor finds after this step, if it is its turn; one process measures."""
        if self.observer is None or not self.ranks.is_first:
            return {}
        trained = self.clock.seconds_since_begin
        measures = self.observer.measures(self.step)
        if measures:
            report.say(f"step {self.step}/{self.timeline.total_steps}  {described(measures)}")
            took = self.clock.seconds_since_begin - trained
            if took > max(_MONITOR_SECONDS, _MONITOR_SHARE * trained):
                report.say(
                    f"the monitor took {took:.0f} s after {trained:.0f} s of training; "
                    f"{self.observer.costs_by} say how long"
                )
            # The time it took is not that of the next step.
            self.clock.begin()
        return measures

    def _groups(self) -> Generator[Any, None, None]:
        """Crops of all parts that are still to come; closing it ends the data workers."""
        num_parts, device = self.plan.train.accumulation, self.ranks.device
        remaining = range(self.step * num_parts, self.timeline.total_steps * num_parts)
        self.clock.begin()
        with closing(arriving(self.batches, self.workers, remaining, device)) as pieces:
            for _ in remaining:
                part, error = None, None
                try:
                    part = self._next_part(pieces)
                except SslBenchError as met:
                    error = met
                self._agree(error)
                yield part

    def _next_part(self, pieces: Iterator[Any]) -> Any:
        """The crops of a part, of which each piece is taken as soon as it is there."""
        coming = (self._next_piece(pieces) for _ in range(self.workers.pieces))
        if self.workers.pieces == 1:
            return next(coming)
        return self.plan.objective.crops.join(coming, self.ranks.device)

    def _next_piece(self, pieces: Iterator[Any]) -> Any:
        with self.clock.waiting():
            piece = next(pieces)
        if isinstance(piece, SslBenchError):
            raise piece
        if isinstance(piece, Remaining):
            new = set(piece.left_out) - self.left_out
            self._unlearned |= {i for i in new if not self.batches.seen(self.step)[i]}
            self.left_out |= new
            return piece.crops
        return piece

    def _row(self) -> dict[str, Any]:
        """What the log says of the step just taken, apart from what the device computes."""
        seconds, waited = self.clock.lap()
        return {
            "step": self.step + 1,
            "epoch": self.timeline.epoch(self.step),
            **self.trainer.values(self.step),
            "images_per_second": self.plan.train.batch / seconds,
            "data_wait": 100 * waited / seconds,
            "mfu": self.trainer.utilisation(seconds),
        }

    def _record_accuracy(self, report: StepLog) -> None:
        results = self.plan.monitor.results
        if results is None or not self.ranks.is_first:
            return
        assert isinstance(self.observer, Observer)
        weights = self.out / ENCODER
        training = Trained(self.description, self.trained_on, self._names(self.left_out))
        for path in record_accuracy(Path(results), self.observer, weights, training):
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

    def _leave(self, report: StepLog) -> None:
        where = self._where()
        if self.request.is_interrupt:
            report.say(f"interrupted {where}; go on with --resume")
            raise KeyboardInterrupt
        if not self.request.is_preemption and self._time_is_up():
            report.say(f"time is up {where}; go on with --resume")
            return
        error = Preempted(f"asked to stop {where}; submit again with --resume")
        error.is_shared = self.ranks.count > 1
        raise error

    def _where(self) -> str:
        return f"after step {self.step} of {self.timeline.total_steps}, saved in {self.out}"


def _batches(plan: Plan, images: ImageSet, ranks: TrainingRanks) -> Batches:
    options, crops = plan.train, plan.objective.crops
    pieces = options.accumulation * ranks.count
    if options.batch % pieces:
        raise ConfigurationError(
            f"train.batch_size must be a multiple of {pieces} (train.accumulation x processes), "
            f"got {options.batch}"
        )
    sizes = crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
    skips = plan.data.on_bad_image == "skip"
    samples = Substituted(images) if skips else images
    return Batches(
        images=in_memory(samples) if plan.data.in_memory else samples,
        cut=partial(crops.cut, sizes=sizes),
        share=Share(options.batch, options.accumulation, ranks.rank, ranks.count),
        seed=options.seed,
        repeats=options.repeats,
        ids=images.ids if skips else (),
    )


def _is_readable(images: ImageSet, index: int) -> bool:
    try:
        images[index]
    except DataError:
        return False
    return True


def _digest(images: ImageSet) -> str:
    """Which images these are, wherever they lie: hexadecimal sha256 of their ids and classes."""
    names = "\n".join((*images.ids, *images.class_names))
    return hashlib.sha256(os.fsencode(names)).hexdigest()
