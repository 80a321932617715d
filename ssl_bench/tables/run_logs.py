"""Read run folders: how far a run came, and what its log measures for a published table."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import yaml

from ssl_bench.system.paths import expand_path

_DAY = 86_400.0


class RunState(NamedTuple):
    """How far a run came: optimizer steps taken, and whether these were all."""

    step: int
    is_finished: bool

    def __str__(self) -> str:
        return f"{'finished' if self.is_finished else 'begun'}, {self.step} steps"


def read_run_state(folder: Path) -> RunState | None:
    """Return what the weights and the configuration of a run folder say; None without a run."""
    try:
        with safetensors.safe_open(folder / "last.safetensors", "numpy") as file:
            said = file.metadata()
        train = _configuration(folder)["train"]
        step, epoch = int(said["step"]), float(said["epoch"])
        most = train["max_steps"]
        is_finished = epoch >= train["epochs"] or (most is not None and step >= most)
    # Somebody's own files may hold anything.
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError, yaml.YAMLError):
        return None
    return RunState(step, is_finished)


class RunMeasure(NamedTuple):
    """A number that a run itself measures.

    Attributes:
        words: What it is, as a note below a table says it.
        compute: From the configuration and the rows of the log, step by step.
        digits: Format of the number in a table.
    """

    words: str
    compute: Callable[[Mapping[str, Any], Iterator[Mapping[str, Any]]], float]
    digits: str = ".1f"


def _copied_letters(config: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> float:
    """Return the last `letters_N` of the log, where N is the trained length."""
    name = f"letters_{config['objective']['length']}"
    return [row[name] for row in rows if name in row][-1]


def _training_days(config: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> float:
    """Return the time of all steps in days, without that of the monitor."""
    batch = config["train"]["batch_size"]
    return sum(batch / row["images_per_second"] for row in rows) / _DAY


RUN_MEASURES = {
    "letters": RunMeasure(
        "percent of right letters in strings of the trained length, at the last test of the run",
        _copied_letters,
    ),
    "training_days": RunMeasure(
        "days of all steps that the run took, on whatever hardware it had", _training_days, ".3g"
    ),
}
"""What a published column of the task "run" may hold, by metric."""


def measured_by_run(metric: str, folder: Path) -> float | None:
    """Return a number of `RUN_MEASURES` from a run folder.

    None for a folder without a finished run, and for a log that lacks the number.
    """
    folder = expand_path(folder)
    state = read_run_state(folder)
    if state is None or not state.is_finished:
        return None
    try:
        value = float(RUN_MEASURES[metric].compute(_configuration(folder), _rows(folder)))
    # As above.
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None


def _configuration(folder: Path) -> Any:
    return yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def _rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    with (folder / "log.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)
