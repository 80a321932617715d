"""Log the steps of a run, show its progress, time the steps, and stop runs that do not learn."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, TextIO

import torch
from torch import Tensor

from pretrain.distributed import TrainingRanks
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.trackers import Tracker
from ssl_bench.errors import ConfigurationError, MachineError, join_alternatives
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.output import bar_class, escape_unprintable, format_duration

# First keys of a row in the log, in this order.
_FIRST_KEYS = ("step", "epoch", "loss")
_SECONDS_BETWEEN_LINES = 20.0
# After this number of steps, the remaining time can be estimated.
_STEPS_BEFORE_ESTIMATE = 3
# The second half of this number of steps measures how long steps wait for data. During the first
# half, data workers start.
_STEPS_BEFORE_WAITING = 50
# A message recommends options that shorten waiting for data. It appears if waiting takes more than
# this percentage of the time and the run takes more than this number of seconds.
_MUCH_WAITING, _FEW_MINUTES = 10.0, 300.0
_HOUR = 3600.0
# A message explains how to shorten a run that takes more than this number of seconds.
_LONG = 3 * _HOUR


class StepReporter:
    """A reporter that logs the metrics of each training step, and stops runs that do not learn.

    The logged metrics are averaged over all processes. On a GPU, the metrics of a step are read
    after the next step has been launched, so that the CPU does not wait for the newest step.

    Args:
        log: Log of the run in the process of rank 0, and None in all other processes.
        diagnose: Function that returns an error if a row of the log shows that the run does not
            learn, and None otherwise.
        done: Number of steps that the run completed before it was resumed.
        started: Start time of the command, as a value of `time.monotonic`.

    Attributes:
        should_stop: Whether at least one process wants to stop the run. All processes change this
            value after the same step.
        should_save: Whether at least one process wants to save a checkpoint. All processes change
            this value after the same step.
    """

    def __init__(
        self,
        log: "LogFile | None",
        options: TrainOptions,
        timeline: Timeline,
        ranks: TrainingRanks,
        diagnose: Callable[[Mapping[str, Any]], ConfigurationError | None],
        *,
        done: int,
        started: float,
    ) -> None:
        self._log, self._options, self._ranks = log, options, ranks
        self._diagnose, self._warmup_steps = diagnose, options.warmup_steps(timeline)
        max_minutes = math.inf if options.max_minutes is None else options.max_minutes
        self._bar = ProgressBar(
            total=timeline.total_steps,
            done=done,
            quiet=not ranks.is_main,
            stop_time=started + 60 * max_minutes,
        )
        # For each step: the row, the names of the metrics, their values, and the CUDA event after
        # which the values are in CPU memory.
        self._pending: deque[tuple[dict[str, Any], list[str], Tensor, Any]] = deque()
        self._delay = 1 if ranks.device.type == "cuda" else 0
        self._num_non_finite = self._num_not_learning = 0
        self.say = self._bar.say
        self.should_stop = self.should_save = False

    def add(
        self, row: Mapping[str, Any], metrics: Mapping[str, Tensor], *, stop: bool, save: bool
    ) -> None:
        """Queue the metrics of a step, so that `write_rows` can write them to the log.

        Args:
            row: Values that are known on the CPU, such as the learning rate.
            metrics: Metrics of the step, as scalar tensors on the device.
            stop: Whether this process wants to stop the run.
            save: Whether this process wants to save a checkpoint.
        """
        values = torch.stack([value.detach().float() for value in metrics.values()])
        # `new_full` creates the flags on the device. Copying them there would wait for the device.
        flags = [values.new_full((1,), float(flag)) for flag in (stop, save)]
        values, arrival = self._ranks.average(torch.cat([values, *flags])), None
        if values.is_cuda:
            on_cpu = torch.empty(values.shape, pin_memory=True)
            values = on_cpu.copy_(values, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record()
        self._pending.append((dict(row), list(metrics), values, arrival))

    def write_rows(self, *, everything: bool = False) -> None:
        """Write queued rows to the log, and update `should_stop` and `should_save`.

        On a GPU, the row of the newest step stays in the queue, because the GPU may not have
        computed its metrics yet.

        Args:
            everything: Whether to write all queued rows, even if the CPU must wait for the newest
                step on a GPU.

        Raises:
            ConfigurationError: The run no longer learns.
            MachineError: The log cannot be written.
        """
        while len(self._pending) > (0 if everything else self._delay):
            row, names, values, arrival = self._pending.popleft()
            if arrival is not None:
                arrival.synchronize()
            *metrics, stop, save = values.tolist()
            self.should_stop = self.should_stop or stop > 0
            self.should_save = self.should_save or save > 0
            row |= dict(zip(names, metrics, strict=True))
            row = {key: row[key] for key in _FIRST_KEYS} | row
            if self._log is not None:
                self._log.write(row)
            self._bar.show(row)
            self._require_learning(row)

    def _require_learning(self, row: Mapping[str, Any]) -> None:
        """Raise a ConfigurationError if the run has not learned for too many consecutive steps.

        The error is raised after `train.non_finite_patience` consecutive steps whose loss or
        gradient is not finite. After the warm-up, it is also raised after `train.collapse_patience`
        consecutive steps in which `diagnose` finds a problem.
        """
        options = self._options
        if not all(math.isfinite(row[name]) for name in ("loss", "gradient_norm")):
            self._num_non_finite += 1
            if self._num_non_finite >= options.non_finite_patience:
                precision = ()
                if options.uses_bfloat16(self._ranks.device):
                    precision = ("train.precision=float32",)
                raise ConfigurationError(
                    f"the loss or gradient was not finite in {self._num_non_finite} consecutive "
                    f"steps up to step {row['step']}. Start a new run in another folder",
                    hint=("--out", "{folder}", "optimizer.lr={lower_rate}", *precision),
                )
            return
        self._num_non_finite = 0
        # During the warm-up, every run looks like one that does not learn.
        problem = self._diagnose(row) if row["step"] > self._warmup_steps else None
        self._num_not_learning = self._num_not_learning + 1 if problem else 0
        if problem and self._num_not_learning >= options.collapse_patience:
            raise ConfigurationError(
                f"stopped at step {row['step']}: {problem.args[0]}. Start a new run in another "
                "folder",
                hint=join_alternatives(problem.hint, ("--out", "{folder}")),
            )

    def close(self) -> None:
        self._bar.close()
        if self._log is not None:
            self._log.close()


class LogFile:
    """A log that appends one JSON object per step to `log.jsonl`, and sends metrics to trackers.

    Args:
        path: Path of `log.jsonl`. Rows of an interrupted run up to step `last_step` are kept.
        last_step: Number of steps in the checkpoint that the run continues from. Rows of later
            steps are deleted, because the run repeats these steps.
        trackers: Trackers, such as TensorBoard, that receive every row and are closed together with
            the log.
    """

    def __init__(self, path: Path, *, last_step: int, trackers: Sequence[Tracker] = ()) -> None:
        self.path, self._trackers = path, trackers
        kept = []
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            try:
                row = json.loads(line.decode())
            except ValueError:
                # The line is incomplete or was not written by this class.
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if isinstance(step, int) and step <= last_step:
                kept.append(f"{line.decode()}\n")
        write_text_atomically(path, "".join(kept))
        self._file: TextIO = path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of metrics. Numbers that are not finite are stored as null.

        Raises:
            MachineError: The file cannot be written.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        try:
            self._file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise MachineError(
                f"cannot write {self.path}: {error.strerror}. Free some space on this disk"
            ) from error
        numbers = {key: value for key, value in finite.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(numbers)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


class ProgressBar:
    """A progress bar in a terminal, or occasional lines of text if the output is not a terminal.

    Args:
        done: Number of steps that the run completed before it was resumed.
        stop_time: Time limit at which the run stops, as a value of `time.monotonic`.
    """

    def __init__(self, *, total: int, done: int, quiet: bool, stop_time: float) -> None:
        self._quiet = quiet
        is_terminal = sys.stderr.isatty() and not quiet
        self._bar = bar_class()(total=total, initial=done, unit="step", disable=not is_terminal)
        self._total, self._done_before, self._stop_time = total, done, stop_time
        self._start = self._last_line = time.monotonic()
        self._first_step_end: float | None = None
        self._waits: list[float] = []

    def show(self, row: Mapping[str, Any]) -> None:
        """Show the loss, speed and remaining time of the run, given the log row of a step."""
        speed = row["images_per_second"]
        metrics = (
            f"loss {row['loss']:.3f}  {speed:.{0 if speed >= 10 else 1}f} images/s  "
            f"data wait {row['data_wait']:.0f} %  mfu {row['mfu']:.1f} %"
        )
        self._bar.update()
        self._bar.set_postfix_str(metrics, refresh=False)

        now, step = time.monotonic(), row["step"]
        done = step - self._done_before
        # The first step takes longer than the others, so it is left out of the estimate.
        self._first_step_end = self._first_step_end or now
        seconds = (now - self._first_step_end) / (done - 1) if done > 1 else now - self._start
        left = max(0.0, min((self._total - step) * seconds, self._stop_time - now))
        # A resumed run must keep its settings, so only a new run gets this advice.
        if step == _STEPS_BEFORE_ESTIMATE and left > _LONG:
            self.say(
                f"the run will take about {format_duration(left)} on this machine. With "
                f"train.max_steps={max(int(_HOUR / seconds), 1)} it would take about an hour. "
                "Smaller values of train.epochs, data.limit or data.image_size, or a smaller model "
                "such as model=vit_tiny_skip, also shorten it"
            )
        if _STEPS_BEFORE_WAITING // 2 < done <= _STEPS_BEFORE_WAITING:
            self._waits.append(row["data_wait"])
        if done == _STEPS_BEFORE_WAITING and left > _FEW_MINUTES:
            waiting = mean(self._waits)
            if waiting > _MUCH_WAITING:
                self.say(
                    f"{waiting:.0f} % of the time is spent waiting for data. What may help: a "
                    "larger train.num_workers, smaller images (`ssl-bench data shrink DIR --out "
                    "COPIES`), data.in_memory=true, or train.repeats=2"
                )
        is_early = done == _STEPS_BEFORE_ESTIMATE and left > _SECONDS_BETWEEN_LINES
        is_due = is_early or step == self._total or now - self._last_line >= _SECONDS_BETWEEN_LINES
        if self._bar.disable and not self._quiet and is_due:
            self._last_line = now
            position = f"step {step}/{self._total}  epoch {row['epoch']}"
            self.say(f"{position}  {metrics}  {self._bar.format_interval(left)} left")

    def say(self, line: str) -> None:
        """Print a line above the progress bar, so that the bar stays at the bottom."""
        if not self._quiet:
            self._bar.write(escape_unprintable(line), file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class Clock:
    """A clock that measures the duration of each step and the time spent waiting for data.

    The attributes of a clock are values of `time.monotonic`.

    Attributes:
        run_start: Time at which this command started or resumed the run.
        training_start: Time at which training started, or continued after an evaluation.
    """

    def __init__(self) -> None:
        self.run_start = self.last_save = self.training_start = self._step_start = time.monotonic()
        self._waited = 0.0

    @contextmanager
    def count_waiting(self) -> Generator[None]:
        """Count the duration of a `with` block as time spent waiting for data."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def end_step(self) -> tuple[float, float]:
        """End the timing of the current step.

        Returns:
            The seconds since the end of the previous step, and how many of these seconds were spent
            waiting for data.
        """
        now = time.monotonic()
        seconds, waited = now - self._step_start, self._waited
        self._step_start, self._waited = now, 0.0
        return max(seconds, 1e-9), waited

    def restart(self) -> None:
        """Start timing the next step, so that the time before this call is not counted."""
        self._step_start = self.training_start = time.monotonic()
