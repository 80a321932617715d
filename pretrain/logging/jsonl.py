"""What a run tells: one JSON object a step for programs, a progress bar for people."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from ssl_bench.errors import MachineError
from ssl_bench.system.escaping import printable
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.progress import Bar, in_words

_SECONDS_BETWEEN_LINES = 20.0
# The time left is known after so many steps; what makes it shorter is said of more than so long.
_TOLD, _HOUR = 3, 3600.0
_LONG = 3 * _HOUR


@runtime_checkable
class Curves(Protocol):
    """Somewhere else that rows are shown, such as TensorBoard."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Show the numbers of a row at its step; None where one was not finite."""
        ...

    def close(self) -> None: ...


class Journal:
    """`log.jsonl`, one row a step; rows after `last_step` are of work that was lost, and go.

    `curves` are written and closed along.
    """

    def __init__(self, path: Path, *, last_step: int, curves: Sequence[Curves] = ()) -> None:
        self.path, self._curves = path, curves
        write_text_atomically(path, "".join(_kept_lines(path, last_step)))
        self._file: TextIO = path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; a number that is not finite becomes null."""
        plain = {key: value if _is_plain(value) else None for key, value in row.items()}
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
        self._bar = Bar(total=total, initial=done, unit="step", disable=not terminal)
        self._total, self._first = total, done
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._start = self._last_line = time.monotonic()
        # After the first step, which takes longer than others.
        self._warm: float | None = None

    def show(self, row: Mapping[str, Any]) -> None:
        """Say where the run stands after the step of this row."""
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
        facts = (
            f"loss {loss}  {row['images_per_second']:.0f} images/s  "
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
                f"about {in_words(left)} left on this machine; train.max_steps="
                f"{max(int(_HOUR / seconds), 1)} takes about an hour, and less take train.epochs, "
                "data.limit, data.image_size or a smaller model=, such as vit_tiny_skip"
            )
        early = done == _TOLD and left > _SECONDS_BETWEEN_LINES
        is_due = early or now - self._last_line >= _SECONDS_BETWEEN_LINES
        if not self._bar.disable or self._quiet or not is_due:
            return
        self._last_line = now
        where = f"step {step}/{self._total}  epoch {row['epoch']}"
        self.say(f"{where}  {facts}  {Bar.format_interval(left)} left")

    def say(self, line: str) -> None:
        if not self._quiet:
            Bar.write(printable(line), file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def _kept_lines(path: Path, last_step: int) -> Iterator[str]:
    content = path.read_bytes() if path.is_file() else b""
    for line in content.split(b"\n"):
        step = _step_of(line)
        if step is not None and step <= last_step:
            yield line.decode() + "\n"


def _step_of(line: bytes) -> int | None:
    """The step of a row; None for half of one, or whatever else came into the file."""
    try:
        row = json.loads(line.decode())
    # Bytes that are no text are values that are none; brackets may lie within brackets.
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else None


def _is_plain(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
