"""What a run tells: `log.jsonl`, one object a step, and curves for programs; a bar for people.

And where its time goes, and whether it still learns.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import torch
from torch import Tensor

from pretrain.distributed import TrainingRanks
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from ssl_bench.errors import ConfigurationError, MachineError, join_alternatives
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.output import bar_class, escape_unprintable, format_duration

# A step's row starts with these, in this order.
_FIRST = ("step", "epoch", "loss")
_SECONDS_BETWEEN_LINES = 20.0
# The time left is known after so many steps; what makes it shorter is said of more than so long.
_TOLD, _HOUR = 3, 3600.0
_LONG = 3 * _HOUR
_RUN_ID = "run-id.txt"


class Journal:
    """`log.jsonl`, one row a step; rows after `last_step` are of work that was lost, and go.

    `curves` are written and closed along.
    """

    def __init__(
        self, path: Path, *, last_step: int, curves: Sequence["Board | WandbRun"] = ()
    ) -> None:
        self.path, self._curves, kept = path, curves, []
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            try:
                row = json.loads(line.decode())
            except ValueError:
                # Half of a row, or what else came into the file.
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if isinstance(step, int) and step <= last_step:
                kept.append(f"{line.decode()}\n")
        write_text_atomically(path, "".join(kept))
        self._file: TextIO = path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; a number that is not finite becomes null."""
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        try:
            self._file.write(json.dumps(plain) + "\n")
        except OSError as error:
            raise MachineError(f"cannot write {self.path}: {error.strerror}; free space") from error
        for curves in self._curves:
            curves.write(plain)

    def close(self) -> None:
        self._file.close()
        for curves in self._curves:
            curves.close()


class ProgressBar:
    """A bar on a terminal, a line now and then elsewhere, nothing where `quiet`."""

    def __init__(self, *, total: int, done: int, quiet: bool, minutes: float | None = None) -> None:
        self._quiet = quiet
        terminal = sys.stderr.isatty() and not quiet
        self._bar = bar_class()(total=total, initial=done, unit="step", disable=not terminal)
        self._total, self._first = total, done
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._start = self._last_line = time.monotonic()
        # After the first step, which takes longer than others.
        self._warm: float | None = None

    def show(self, row: Mapping[str, Any]) -> None:
        """Say where the run stands after the step of this row."""
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
        speed = row["images_per_second"]
        facts = (
            f"loss {loss}  {speed:.{0 if speed >= 10 else 1}f} images/s  "
            f"data wait {row['data_wait']:.0f} %  mfu {row['mfu']:.1f} %"
        )
        self._bar.update()
        self._bar.set_postfix_str(facts, refresh=False)
        now, step = time.monotonic(), row["step"]
        done = step - self._first
        self._warm = self._warm or now
        seconds = (now - self._warm) / (done - 1) if done > 1 else now - self._start
        left = min((self._total - step) * seconds, self._seconds - (now - self._start))
        if step == _TOLD and left > _LONG:
            self.say(
                f"about {format_duration(left)} left on this machine; train.max_steps="
                f"{max(int(_HOUR / seconds), 1)} takes about an hour, and less take train.epochs, "
                "data.limit, data.image_size or a smaller model=, such as vit_tiny_skip"
            )
        early = done == _TOLD and left > _SECONDS_BETWEEN_LINES
        is_due = early or step == self._total or now - self._last_line >= _SECONDS_BETWEEN_LINES
        if self._bar.disable and not self._quiet and is_due:
            self._last_line = now
            where = f"step {step}/{self._total}  epoch {row['epoch']}"
            self.say(f"{where}  {facts}  {self._bar.format_interval(left)} left")

    def say(self, line: str) -> None:
        if not self._quiet:
            self._bar.write(escape_unprintable(line), file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class Clock:
    """Where the time of a run goes: seconds of each step, and those spent waiting for data.

    Attributes:
        started: When the run did, as `time.monotonic` has it.
        saved: When its last checkpoint was taken.
        begun: When the training began, or went on after a pause.
    """

    def __init__(self) -> None:
        self.started = self.saved = self.begun = self._lap = time.monotonic()
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time inside as waiting."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and those of them that were spent waiting."""
        now = time.monotonic()
        seconds, waited = now - self._lap, self._waited
        self._lap, self._waited = now, 0.0
        return max(seconds, 1e-9), waited

    def begin(self) -> None:
        """Start the first lap here; what came before was preparation, or a pause."""
        self._lap = self.begun = time.monotonic()


class StepLog:
    """From the numbers of a step, still on the device, to the log, the progress bar, and a stop.

    Rows are averaged over the processes. On a GPU a row is read one step late, so that the host
    never waits for the step it has just launched.

    Args:
        journal: Takes the rows; the first process has it, the others have none.
        options: Of the run.
        timeline: Of the run.
        diagnose: Returns what is wrong for a row of the log, if anything.
        done: Steps taken before.

    Attributes:
        stop: A process wants to stop; true in all processes after the same step.
        save: A process wants to save; true in all processes after the same step.
    """

    def __init__(
        self,
        journal: Journal | None,
        options: TrainOptions,
        timeline: Timeline,
        ranks: TrainingRanks,
        diagnose: Callable[[Mapping[str, Any]], ConfigurationError | None],
        *,
        done: int,
    ) -> None:
        self._journal, self._options, self._ranks = journal, options, ranks
        self._diagnose, self._first_step = diagnose, options.warmup_steps(timeline)
        self._bar = ProgressBar(
            total=timeline.total_steps,
            done=done,
            quiet=not ranks.is_first,
            minutes=options.max_minutes,
        )
        self._pending: deque[tuple[dict[str, Any], list[str], Tensor, Any]] = deque()
        self._lag = 1 if ranks.device.type == "cuda" else 0
        self._non_finite = self._sick = 0
        self.say = self._bar.say
        self.stop = self.save = False

    def note(
        self, row: Mapping[str, Any], values: Mapping[str, Tensor], *, stop: bool, save: bool
    ) -> None:
        """Take in a step: what is known at once, and what the device still computes.

        `stop` and `save` are wishes of this process, which become everybody's.
        """
        numbers = torch.stack([value.detach().float() for value in values.values()])
        # Filled on the device: copying them there would wait for it.
        wishes = [numbers.new_full((1,), float(wish)) for wish in (stop, save)]
        numbers, arrived = self._ranks.mean(torch.cat([numbers, *wishes])), None
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending.append((dict(row), list(values), numbers, arrived))

    def settle(self, *, everything: bool = False) -> None:
        """Write down the rows that are ready, and note their wishes.

        Raises:
            ConfigurationError: the run no longer learns.
        """
        while len(self._pending) > (0 if everything else self._lag):
            row, names, numbers, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            *values, stop, save = numbers.tolist()
            self.stop, self.save = self.stop or stop > 0, self.save or save > 0
            row |= dict(zip(names, values, strict=True))
            row = {name: row[name] for name in _FIRST} | row
            if self._journal is not None:
                self._journal.write(row)
            self._bar.show(row)
            self._check(row)

    def _check(self, row: Mapping[str, Any]) -> None:
        """Notice a run that no longer learns: count sick steps in a row."""
        options = self._options
        if not all(math.isfinite(row[name]) for name in ("loss", "gradient_norm")):
            self._non_finite += 1
            if self._non_finite >= options.non_finite_patience:
                precision = ()
                if options.uses_bfloat16(self._ranks.device):
                    precision = ("train.precision=float32",)
                raise ConfigurationError(
                    f"loss or gradient was not finite for {self._non_finite} steps up to step "
                    f"{row['step']}; start anew in another folder",
                    hint=("--out", "{folder}", "optimizer.lr={lower_rate}", *precision),
                )
            return
        self._non_finite = 0
        # Symptoms before it are those of every beginning.
        symptom = self._diagnose(row) if row["step"] > self._first_step else None
        self._sick = self._sick + 1 if symptom else 0
        if symptom and self._sick >= options.collapse_patience:
            raise ConfigurationError(
                f"stopped at step {row['step']}: {symptom.args[0]}; start anew in another folder",
                hint=join_alternatives(symptom.hint, ("--out", "{folder}")),
            )

    def close(self) -> None:
        self._bar.close()
        if self._journal is not None:
            self._journal.close()


class Board:
    """The rows as curves of TensorBoard; those after `last_step`, of lost work, are hidden."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        self._writer = require_tensorboard()(str(folder), purge_step=last_step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


def require_tensorboard() -> type[Any]:
    """The class that writes a board."""
    try:
        # Not for everybody: the package is an extra, and slow to import.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MachineError(
            "train.tensorboard=true needs the package tensorboard, which is not installed; "
            "pip install 'ssl-bench[track]', or leave it out",
            hint=("train.tensorboard=false",),
        ) from error
    return SummaryWriter


class WandbRun:
    """The rows as a run of Weights & Biases; a resumed pretraining goes on with the run it began.

    W&B takes no step twice: rows are drawn over their own "step", on which the repeated steps of
    work that was lost lie beside the lost ones. Without a network `WANDB_MODE=offline` keeps all
    of it in the folder.

    Args:
        project: Name of the project, made where there is none.
        folder: What W&B keeps, and the id of the run.
        config: What the run is.
        last_step: Of the work that is not lost; 0 begins a run of its own.

    Raises:
        MachineError: wandb is not installed, or its service refuses.
    """

    def __init__(
        self, project: str, folder: Path, config: Mapping[str, Any], *, last_step: int
    ) -> None:
        wandb = require_wandb()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _RUN_ID
        if last_step == 0 or not file.is_file():
            write_text_atomically(file, f"{uuid4().hex[:12]}\n")
        try:
            self._run = wandb.init(
                project=project,
                id=file.read_text().strip(),
                name=folder.parent.name,
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        # Of what it raises for want of a network or a key, no class is promised.
        except Exception as error:
            raise MachineError(
                f"Weights & Biases does not begin a run ({error}); log in with `wandb login`, set "
                "WANDB_MODE=offline, or go without",
                hint=("train.wandb=null",),
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None})

    def close(self) -> None:
        self._run.finish()


def require_wandb() -> Any:
    """The package of Weights & Biases."""
    try:
        # Not for everybody, and no extra: it brings two dozen packages along.
        import wandb
    except ImportError as error:
        raise MachineError(
            "train.wandb=PROJECT needs the package wandb, which is not installed; "
            "pip install wandb, or leave it out",
            hint=("train.wandb=null",),
        ) from error
    return wandb
