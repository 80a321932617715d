"""A pretraining run: what it is made of, and its loop.

`Pretraining` says what a run is and begins one. `Run` is the loop: what a step reads, when
something is saved, logged or stopped, and what is left. What a step computes: `pretrain/step.py`.
"""

import hashlib
import os
import signal
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils.data import default_convert

from pretrain import checkpoints, logging, trackers
from pretrain.batches import (
    BatchChunks,
    ChunkWithReplacements,
    decode_images,
    load_chunks,
    plan_workers,
)
from pretrain.description import LENGTH, describe, differences, in_full
from pretrain.distributed import TrainingRanks, join_ranks
from pretrain.fine_tuning import (
    INIT_FROM_SHA256,
    find_initial_sha256,
    load_initial_weights,
    require_other_folder,
)
from pretrain.lock import Hold, held
from pretrain.monitor import Evaluator, Monitor
from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import Generating, Learner, Measuring, Objective
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe, Soap
from pretrain.options import DataOptions, TrainOptions
from pretrain.resources import Needs, fitted_batch, flops_and_kept_bytes, kept_bytes
from pretrain.schedules import count_phase_steps
from pretrain.step import Trainer, deterministic
from ssl_bench.composition.fields import check_fields
from ssl_bench.data.files.fingerprints import file_hashes
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    Preempted,
    SslBenchError,
    join_alternatives,
)
from ssl_bench.evaluation import describe_training_images
from ssl_bench.models import EncoderConfig, EncoderModule, ViTConfig
from ssl_bench.models.loading.checkpoint import normalization_metadata
from ssl_bench.system.device import choose_device
from ssl_bench.system.endings import STOP_SIGNALS, handle_signals
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.output import format_size, say
from ssl_bench.system.process import reraise_out_of_memory

# Weights' worth of moments, and of SOAP's statistics and bases in a ViT, that an optimizer holds.
_ADAMW_HOLDS, _SOAP_HOLDS = 2, 10
# In the state of a run: a sha256 over the images that it has learned from, indices of those that it
# left out, and of those among them that it never learned from.
_LEARNED, _LEFT_OUT, _UNLEARNED = "learned_files", "left_out", "left_out_unlearned"
# In its description: a sha256 over the images, and what the warm-ups come to.
_FILES, _WARMUPS = "image_files", "opening_steps"
_NAMED_AT_MOST, _LONGEST_REASON = 5, 300
# A monitor that takes longer than both, the second of the training before it, is mentioned.
_MONITOR_SECONDS, _MONITOR_SHARE = 1.0, 0.1


@dataclass(frozen=True)
class Pretraining:
    """An encoder, what it learns for, with which optimizer, from which images, for how long.

    Attributes:
        init_from: Address of a checkpoint, as `load_encoder` takes it, whose weights the encoder
            starts with; random ones without.
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
        if isinstance(self.objective, Generating):
            for name, options in (("data", self.data), ("monitor", self.monitor)):
                if options != type(options)():
                    raise ConfigurationError(
                        f"{name}.* and --data-root are about images, and this objective makes what "
                        "it learns from; leave them out"
                    )
        elif not self.model.reads_images:
            raise ConfigurationError(
                f"model {self.model.kind} reads tokens, expected a model that reads images",
                hint=("objective=copying", "or", "model=vit_small_skip"),
            )
        elif self.data.labels is None:
            labelled = replace(self.data, labels=isinstance(self.objective, Supervised))
            object.__setattr__(self, "data", labelled)

    @property
    def encoder(self) -> EncoderConfig:
        """The model at the size of the large crops."""
        if not self.model.reads_images:
            return self.model
        return replace(self.model, image_size=self.data.image_size or self.model.image_size)

    def images(self) -> ImageSet:
        """What is learned from.

        Raises:
            DataError: there are no images.
            ConfigurationError: they cannot be kept or labelled as asked.
        """
        if isinstance(self.objective, Generating):
            return self.objective.images()
        return self.data.open()

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
            checkpoints.require_free(out)
        images = self.images()
        ranks = TrainingRanks(device=choose_device(None if device is None else str(device)))
        plan, why, _ = self.with_batch(images, ranks)
        timeline, batch = plan.train.timeline(len(images)), plan.train.batch
        noun = self.objective.noun
        epochs = timeline.total_steps / timeline.steps_per_epoch
        objective, optimizer = (type(part).__name__ for part in (self.objective, self.optimizer))
        return [
            f"run folder {out}",
            f"{noun:10} {len(images):,} of {images.name} {images.split}",
            f"encoder    {self.encoder.summary()}",
            f"learning   {objective} with {optimizer}",
            f"steps      {timeline.total_steps:,} of {batch:,} {noun}, {epochs:.4g} epochs",
            *([f"batch      {batch:,} fits: {why}"] if why else []),
            *([f"missing    {missing}"] if (missing := self.data.unreadable(images)) else []),
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
            trackers.require_tensorboard()
        if self.train.wandb is not None:
            trackers.require_wandb()
        if self.init_from is not None:
            require_other_folder(self.init_from, out)
        with ExitStack() as stack:
            request = stack.enter_context(stop_requests())
            timeout = timedelta(minutes=self.train.timeout_minutes)
            ranks = stack.enter_context(
                join_ranks(choose_device(None if device is None else str(device)), timeout)
            )
            stack.enter_context(deterministic(self.train.deterministic))
            on_cuda = ranks.device.type == "cuda"
            stack.enter_context(torch.random.fork_rng([ranks.device] if on_cuda else []))
            hold = None
            goes_on = resume or must_resume or extend
            with ranks.fail_together():
                if ranks.is_main:
                    hold = stack.enter_context(held(out))
                    if (must_resume or extend) and not checkpoints.has_state(out):
                        raise ConfigurationError(
                            f"nothing to resume in {out}; name the folder of a run",
                            hint=("--out", "{run}"),
                        )
                    checkpoints.claim(out, resume=goes_on, overwrite=overwrite)
            with ranks.fail_together():
                found = None
                if goes_on and checkpoints.has_state(out):
                    found = checkpoints.load_state(out, ranks.device)
                plan = self
                if found and self.train.batch_size is None:
                    # It is that of the run which goes on, whatever would fit here.
                    batch = found[0]["configuration"]["train"]["batch_size"]
                    plan = replace(self, train=replace(self.train, batch_size=batch))
                run = Run(plan, out, ranks, request, hold)
                if found:
                    run.restore(*found, extend=extend)
                else:
                    run.begin(instead=goes_on)
                # As large as the run itself.
                del found
                if ranks.is_main:
                    run.write_config(config or describe(self))
                    say(f"run folder {out}")
            run.go()
        return out / checkpoints.ENCODER

    def what_next(self, out: Path) -> str:
        """What to do with a finished run, in a line."""
        if isinstance(self.objective, Generating):
            return f"tested: see the last line of {out / checkpoints.LOG}"
        line = f"next: ssl-bench probe --task all --checkpoint {out}"
        state = out / checkpoints.STATE
        if not state.is_file():
            return line
        size = format_size(state.stat().st_size)
        return f"{line}; the {size} of {state} are for --resume and --extend alone"

    def with_batch(
        self, images: ImageSet, ranks: TrainingRanks
    ) -> tuple["Pretraining", str, Needs | None]:
        """The plan with a batch that fits, why it is that, and its needs, where none was typed."""
        train, count = self.train, len(images)
        if train.batch_size is not None:
            return self, "", None

        def fitted() -> tuple[int, str, Needs]:
            # No batch is larger, and so no schedule shorter.
            timeline = replace(train, batch_size=max(1, count // 4)).timeline(count)
            learner = self.objective.build(
                self.encoder, timeline, seed=train.seed, class_names=images.class_names
            )
            needs, parts = self.needs(learner), train.accumulation
            batch = fitted_batch(count, needs, ranks.device, ranks=ranks.world_size, parts=parts)
            return *batch, needs

        batch, why, needs = ranks.compute_on_main(fitted)
        return replace(self, train=replace(train, batch_size=batch)), why, needs

    def needs(self, learner: Learner) -> Needs:
        """What a step needs, counted on blank images without computing anything."""
        crops = self.objective.crops
        sizes = crops.sizes(self.encoder.image_size, self.encoder.patch_size)
        blank = Sample("blank", np.zeros((8, 8, 3), np.uint8), label=0)
        cut = default_convert(crops.cut([blank], [np.random.default_rng(0)], sizes))
        with torch.random.fork_rng(devices=[]):
            one = crops.finish(cut, torch.device("cpu"), self.data.colours)

        def repeated(view: Tensor, images: int) -> Tensor:
            if not view.ndim:
                return view
            return view.new_empty((images * len(view), *view.shape[1:]), device="meta")

        two, three = ([repeated(view, number) for view in one] for number in (2, 3))
        flops, kept = flops_and_kept_bytes(learner, two, 0)
        image_bytes = kept_bytes(learner, three, 0) - kept
        # Of prototypes the forward pass keeps the gradient, of other weights what is there anyway.
        weights = sum(weight.nbytes for weight in learner.student.parameters())
        whole = sum(tensor.nbytes for tensor in (*learner.parameters(), *learner.buffers()))
        holds = _SOAP_HOLDS if isinstance(self.optimizer, Soap) else _ADAMW_HOLDS
        saved = whole + holds * weights
        return Needs(flops / 2, image_bytes, 2 * saved + weights)


class StopRequest:
    """Which signal came, if any; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._stops_at_once = False

    @property
    def is_interrupt(self) -> bool:
        return self.received is signal.SIGINT

    def receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.is_interrupt and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if self._stops_at_once:
            self._stop()

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Stop in the middle of what is done here: it has nothing to save.

        Raises:
            KeyboardInterrupt: at a SIGINT.
            Preempted: at another signal.
        """
        if self.received is not None:
            self._stop()
        self._stops_at_once = True
        try:
            yield
        finally:
            self._stops_at_once = False

    def _stop(self) -> NoReturn:
        if self.is_interrupt:
            raise KeyboardInterrupt
        raise Preempted("asked to stop before the first step; start it again")


@contextmanager
def stop_requests() -> Generator[StopRequest]:
    """Collect signals that ask to stop instead of dying of them."""
    request = StopRequest()
    with handle_signals((*STOP_SIGNALS, "SIGINT"), request.receive):
        yield request


class Run:
    """A pretraining on its way: the loop, and what it reads and writes."""

    def __init__(
        self,
        plan: Pretraining,
        out: Path,
        ranks: TrainingRanks,
        request: StopRequest,
        hold: Hold | None,
    ) -> None:
        self.out, self.ranks, self.request = out, ranks, request
        self.saver = checkpoints.Saver(out, hold) if hold is not None else None
        self.clock = logging.Clock()
        self.images = images = plan.images()
        plan, self._why, needs = plan.with_batch(images, ranks)
        self.plan = plan
        self.timeline = plan.train.timeline(len(images))
        self.trained_on = ranks.compute_on_main(
            request.at_once()(partial(describe_training_images, images))
        )
        # Which images these are, wherever they lie, and what is in them.
        names = "\n".join((*images.ids, *images.class_names))
        which = hashlib.sha256(os.fsencode(names)).hexdigest()
        self.description = describe(plan)
        self.description |= {"images": which, _FILES: self.trained_on.fingerprint}
        self.description[_WARMUPS] = count_phase_steps(self.description, self.timeline)
        options, crops = plan.train, plan.objective.crops
        parts = options.accumulation * ranks.world_size
        if options.batch % parts:
            raise ConfigurationError(
                f"train.batch_size must be a multiple of {parts} (train.accumulation x processes), "
                f"got {options.batch}"
            )
        skip = plan.data.on_bad_image == "skip"
        sizes = crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
        self.batches = BatchChunks(
            images=decode_images(images, skip=skip) if plan.data.in_memory else images,
            cut=partial(crops.cut, sizes=sizes),
            batch_size=options.batch,
            seed=options.seed,
            num_micro_batches=options.accumulation,
            rank=ranks.rank,
            num_ranks=ranks.world_size,
            repeats=options.repeats,
            image_ids=images.ids if skip else (),
        )
        asked = options.workers(ranks.device)
        self.workers = plan_workers(self.batches, asked, options.shared_memory_gib)
        learner = plan.objective.build(
            plan.encoder, self.timeline, seed=options.seed, class_names=images.class_names
        )
        self.needs = needs or plan.needs(learner)
        self.observer: Measuring | None
        if isinstance(plan.objective, Generating):
            self.observer = plan.objective.observer(learner, self.timeline)
        else:
            self.observer = plan.monitor.build_evaluator(learner, self.timeline, plan.data, images)
        self.trainer = Trainer(learner, plan.optimizer, options, self.timeline, ranks)
        self.trainer.flops = self.needs.flops * options.batch / ranks.world_size
        self.step = 0
        self.extensions: list[dict[str, int]] = []
        self.left_out, self._unlearned, self._told = set[int](), set[int](), set[int]()
        self._config: Mapping[str, Any] = {}
        self._news = [plan.data.unreadable(images)] if ranks.is_main else []
        self._fault: Exception | None = None

    def begin(self, *, instead: bool = False) -> None:
        """Take the weights of another run, where the plan says so; `instead` of going on."""
        if instead:
            self._news.append(f"nothing to resume in {self.out}, starting")
        if self.plan.init_from is not None:
            encoders = self.trainer.learner.encoders
            colours = self.plan.data.colours
            self.description[INIT_FROM_SHA256] = load_initial_weights(
                self.plan.init_from, encoders, colours
            )

    def restore(self, state: Mapping[str, Any], path: Path, *, extend: bool = False) -> None:
        """Go back to a state that was saved in a file, to go on for longer if `extend` says so.

        Raises:
            ConfigurationError: it is of a run with another configuration, or has learned from
                images that are others now.
        """
        older = state["configuration"]
        if self.plan.init_from is not None:
            self.description[INIT_FROM_SHA256] = find_initial_sha256(self.plan.init_from, older)
        before = in_full(older, self.plan)
        # Epochs that are kept may be of the longer run alone.
        lengths = {name: before["train"][name] for name in ("epochs", "max_steps")}
        former = replace(self.plan.train, keep_epochs=None, **lengths)
        old, new = former.timeline(len(self.images)).total_steps, self.timeline.total_steps
        changed = differences(before, self.description)
        longer = [change for change in changed if change.startswith((*LENGTH, f"{_WARMUPS}."))]
        if extend:
            changed = [change for change in changed if change not in longer]
        if [change.startswith(f"{_FILES}:") for change in changed] == [True]:
            learned = partial(self._learned, state["step"], state[_UNLEARNED])
            if self.ranks.compute_on_main(learned) == state[_LEARNED]:
                changed = []
                news = "images that this run has not learned from are others than before"
                self._news.append(news)
        if changed:
            # Digests and steps follow from what was typed, where that is another.
            follows = ("images:", f"{_FILES}:", f"{_WARMUPS}.")
            typed = [change for change in changed if not change.startswith(follows)]
            goes_on = ("--extend",) if not extend and new > old and changed == longer else ()
            raise ConfigurationError(
                f"{path} is of a run with another configuration ({'; '.join(typed or changed)}); "
                "type the words of the first command again (their values are in "
                f"{self.out / checkpoints.CONFIG})",
                hint=join_alternatives(goes_on, ("--resume",), ("--out", "{folder}")),
            )

        def unreadable_now() -> set[int]:
            found = set[int]()
            for index in state[_LEFT_OUT]:
                try:
                    self.images[index]
                except DataError:
                    found.add(index)
            return found

        unreadable = self.ranks.compute_on_main(unreadable_now)
        self.left_out, self._unlearned = unreadable, unreadable & {*state[_UNLEARNED]}
        self.extensions = state["extensions"]
        news = f"going on after step {state['step']} of {new}"
        # What was stopped after it had been extended is submitted again by the same words.
        if extend and (longer or not self.extensions):
            if new <= old:
                raise ConfigurationError(
                    f"--extend expects more than the {old} steps of the run in {self.out}, got "
                    f"{new}",
                    hint=("train.epochs={larger}", "or", "train.max_steps={larger}"),
                )
            self.extensions.append({"step": state["step"], "from_steps": old, "to_steps": new})
            news += f" instead of {old}"
        try:
            self.trainer.load_state_dict(state)
        except (KeyError, RuntimeError, ValueError) as error:
            reraise_out_of_memory(error)
            why = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
            raise checkpoints.unfit(path, f"does not fit its run ({why})") from error
        self.step = state["step"]
        self._news.append(news)

    def _learned(self, step: int, unlearned: Collection[int]) -> str:
        """Sha256 over what those images hold that so many steps have learned from."""
        learned = self.batches.mark_used_images(step)
        learned[[*unlearned]] = False
        return hashlib.sha256(file_hashes(self.images)[learned].tobytes()).hexdigest()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Leave what was asked for, how often it was extended and which images it lacks."""
        train = {**config.get("train", {}), "batch_size": self.plan.train.batch_size}
        self._config = config = {**config, "train": train}
        more = {"extensions": self.extensions, _LEFT_OUT: self._names(self.left_out)}
        more = {name: values for name, values in more.items() if values}
        plain = yaml.safe_dump({**config, **more}, sort_keys=False)
        write_text_atomically(self.out / checkpoints.CONFIG, plain)

    def go(self) -> None:
        """Train from the current step to the last, or until something asks to stop."""
        total, options = self.timeline.total_steps, self.plan.train
        journal = None
        if self.ranks.is_main:
            curves: list[trackers.Tracker] = []
            if options.tensorboard:
                curves.append(
                    trackers.TensorBoardLog(self.out / checkpoints.BOARD, last_step=self.step)
                )
            if options.wandb:
                folder, what = self.out / checkpoints.WANDB, self.description
                run = trackers.WandbLog(options.wandb, folder, what, last_step=self.step)
                curves.append(run)
            log = self.out / checkpoints.LOG
            journal = logging.LogFile(log, last_step=self.step, trackers=curves)
        diagnose = self.trainer.learner.diagnose
        self.report = report = logging.StepReporter(
            journal,
            options,
            self.timeline,
            self.ranks,
            diagnose,
            done=self.step,
            started=self.clock.run_start,
        )
        where = f"of {total}, saved in {self.out}"
        with ExitStack() as stack:
            stack.enter_context(closing(report))
            if self.saver is not None:
                stack.enter_context(closing(self.saver))
            for line in filter(None, (*self._news, *self._outlook())):
                report.say(line)
            try:
                with closing(self._parts()) as parts:
                    while self.step < total and not report.should_stop:
                        self._take_step(parts)
                self.ranks.raise_on_all(self._fault)
            except (DataError, MachineError):
                # Nobody leaves before it is done: torchrun ends those that are left.
                with self.ranks.fail_together():
                    self._save(wait=True)
                report.say(f"after step {self.step} {where}; go on with --resume")
                raise
            with self.ranks.fail_together():
                self._save(wait=True)
            if self.step == total:
                if self.saver is not None:
                    self._finish()
                return
            where = f"after step {self.step} {where}"
            if self.request.is_interrupt:
                report.say(f"interrupted {where}")
                raise KeyboardInterrupt
            if self.request.received is None and self._time_is_up():
                report.say(f"time is up {where}; go on with --resume")
                return
            error = Preempted(f"asked to stop {where}; start the command again", hint=("--resume",))
            error.is_raised_on_all_ranks = self.ranks.world_size > 1
            raise error

    def _outlook(self) -> Iterator[str]:
        """What is to come, in a few lines."""
        if rise := self.trainer.rise():
            yield rise
        options = self.plan.train
        at_once = options.batch // (options.accumulation * self.ranks.world_size)
        line = f"{len(self.images):,} {self.plan.objective.noun}, {self.timeline.total_steps:,} "
        line += f"steps of {options.batch:,}, "
        line += f"about {max(self.needs.gib(at_once), 0.1):.1f} GiB of memory"
        yield f"{line}; train.batch_size={options.batch} fits: {self._why}" if self._why else line
        if self.workers.num_requested:
            yield str(self.workers)

    def _parts(self) -> Generator[Any, None, None]:
        """Crops of all parts that are still to come; closing it ends the data workers."""
        num_parts, device = self.plan.train.accumulation, self.ranks.device
        remaining = range(self.step * num_parts, self.timeline.total_steps * num_parts)
        self.clock.restart()
        with closing(load_chunks(self.batches, self.workers, remaining, device)) as pieces:
            for _ in remaining:
                part, error = None, None
                try:
                    # Each piece is taken as soon as it is there.
                    coming = (self._next_piece(pieces) for _ in range(self.workers.num_chunks))
                    if self.workers.num_chunks == 1:
                        part = next(coming)
                    else:
                        part = self.plan.objective.crops.join(coming, device)
                except SslBenchError as met:
                    error = met
                self.ranks.raise_on_all(error or self._fault)
                yield part

    def _next_piece(self, pieces: Iterator[Any]) -> Any:
        with self.clock.count_waiting():
            piece = next(pieces)
        if isinstance(piece, SslBenchError):
            raise piece
        if isinstance(piece, ChunkWithReplacements):
            new = set(piece.left_out) - self.left_out
            self._unlearned |= {i for i in new if not self.batches.mark_used_images(self.step)[i]}
            self.left_out |= new
            return piece.crops
        return piece

    def _take_step(self, parts: Iterator[Any]) -> None:
        """Learn from one batch; measure, log, keep and save what is due after it."""
        plan, device, timeline, report = self.plan, self.ranks.device, self.timeline, self.report
        cut = islice(parts, plan.train.accumulation)
        views = (plan.objective.crops.finish(group, device, plan.data.colours) for group in cut)
        values = self.trainer.take_step(self.step, views)
        seconds, waited = self.clock.end_step()
        row = {
            "step": self.step + 1,
            "epoch": timeline.get_epoch(self.step),
            **self.trainer.values(self.step),
            "images_per_second": plan.train.batch / seconds,
            "data_wait": 100 * waited / seconds,
            "mfu": self.trainer.utilisation(seconds),
        }
        self.step += 1
        try:
            row |= self._measures()
        except Exception as error:
            self._fault = error
        is_late = time.monotonic() - self.clock.last_save >= 60 * plan.train.checkpoint_minutes
        saves = is_late or timeline.is_interval_end(plan.train.checkpoint_epochs, self.step)
        wants_to_stop = self.request.received is not None or self._time_is_up()
        # What could not be measured must not cost the row of a step that was taken.
        report.add(row, values, stop=wants_to_stop, save=saves)
        try:
            report.write_rows()
            if self.saver is not None:
                self.saver.check()
                epoch, steps_more = divmod(self.step, timeline.steps_per_epoch)
                if steps_more == 0 and plan.train.keeps(epoch):
                    report.write_rows(everything=True)
                    self.saver.keep(epoch, *self._encoder(), report.say)
            if report.should_save and not report.should_stop and self.step < timeline.total_steps:
                self._save()
        except Exception as error:
            self._fault = self._fault or error

    def _measures(self) -> Mapping[str, float]:
        """What the monitor finds after this step, if it is its turn; one process measures."""
        if self.observer is None or not self.ranks.is_main:
            return {}
        start = time.monotonic()
        trained, measures = start - self.clock.training_start, self.observer.measures(self.step)
        if measures:
            found = "  ".join(
                f"{name} {value:.3f}" if name.endswith("loss") else f"{name} {value:.1f} %"
                for name, value in measures.items()
            )
            self.report.say(f"step {self.step}/{self.timeline.total_steps}  {found}")
            took = time.monotonic() - start
            if took > max(_MONITOR_SECONDS, _MONITOR_SHARE * trained):
                self.report.say(
                    f"the monitor took {took:.0f} s after {trained:.0f} s of training; "
                    f"{self.observer.costs_by} say how long"
                )
            # The time it took is not that of the next step.
            self.clock.restart()
        return measures

    def _time_is_up(self) -> bool:
        minutes = self.plan.train.max_minutes
        return minutes is not None and time.monotonic() - self.clock.run_start >= 60 * minutes

    def _save(self, *, wait: bool = False) -> None:
        """Leave training state and encoder, once all steps so far are known to be sound.

        Waits for their copy alone, unless told; what goes wrong with the files, a later step is
        told.
        """
        report = self.report
        report.write_rows(everything=True)
        found = self.ranks.gather((self.left_out, self._unlearned))
        self.left_out, self._unlearned = (
            set[int]().union(*sets) for sets in zip(*found, strict=True)
        )
        if self.saver is not None:
            if new := self._names(self.left_out - self._told):
                more = ", ..." if len(new) > _NAMED_AT_MOST else ""
                names = ", ".join(new[:_NAMED_AT_MOST]) + more
                total = f"{len(self.left_out)} of {len(self.images)} images"
                report.say(
                    f"left out as unreadable: {names}; {total} so far, the next one for each"
                )
                self.write_config(self._config)
                self._told |= self.left_out
            state = {
                "step": self.step,
                "configuration": self.description,
                "extensions": self.extensions,
                _LEFT_OUT: sorted(self.left_out),
                _UNLEARNED: sorted(self._unlearned),
                _LEARNED: self._learned(self.step, self._unlearned),
                **self.trainer.state_dict(),
            }
            self.saver.save(state, *self._encoder(), report.say)
            if wait:
                self.saver.wait()
        self.clock.last_save = time.monotonic()
        report.should_save = False

    def _encoder(self) -> tuple[EncoderModule, dict[str, str]]:
        """A copy of the encoder worth keeping, and what its file says of it."""
        epoch = self.step / self.timeline.steps_per_epoch
        metadata = {"step": str(self.step), "epoch": f"{epoch:.2f}"}
        metadata |= normalization_metadata(self.plan.data.colours)
        encoder = self.trainer.learner.encoder
        tensors = [*encoder.parameters(), *encoder.buffers()]
        return checkpoints.copied(encoder, tensors), metadata

    def _finish(self) -> None:
        checkpoints.remove_previous(self.out)
        results = self.plan.monitor.results
        if results is not None and isinstance(self.observer, Evaluator):
            encoder, left_out = self.out / checkpoints.ENCODER, self._names(self.left_out)
            for path in self.observer.save_records(
                Path(results), encoder, self.description, self.trained_on, left_out
            ):
                self.report.say(f"accuracy recorded in {path}")

    def _names(self, indices: Collection[int]) -> list[str]:
        return [self.images.ids[index] for index in sorted(indices)]
