"""Read the state of a pretraining run, and the measures in its log, from its folder."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import yaml

from ssl_bench.system.files import expand_path

_SECONDS_PER_DAY = 86_400.0


class RunState(NamedTuple):
    """State of a run, where `step` is the number of completed optimizer steps."""

    step: int
    is_finished: bool

    def __str__(self) -> str:
        return f"{'finished' if self.is_finished else 'started'}, {self.step} steps"


def read_run_state(folder: Path) -> RunState | None:
    """Return the state of a run, or None if the folder contains no readable run."""
    try:
        with safetensors.safe_open(folder / "last.safetensors", "numpy") as file:
            metadata = file.metadata()
        train = _read_config(folder)["train"]
        step, epoch = int(metadata["step"]), float(metadata["epoch"])
        max_steps = train["max_steps"]
        is_finished = epoch >= train["epochs"] or (max_steps is not None and step >= max_steps)
    # The files may have any content.
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError, yaml.YAMLError):
        return None
    return RunState(step, is_finished)


class RunMeasure(NamedTuple):
    """A number that is computed from the log of a pretraining run.

    Attributes:
        description: Text for the notes of a table.
        compute: Function of the configuration of the run and of the rows of the log, in the order
            of the steps.
        digits: Format specification of the number in a table.
    """

    description: str
    compute: Callable[[Mapping[str, Any], Iterator[Mapping[str, Any]]], float]
    digits: str = ".1f"


def _copied_letters(config: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> float:
    name = f"letters_{config['objective']['length']}"
    return [row[name] for row in rows if name in row][-1]


def _training_days(config: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> float:
    """Return the duration of all optimizer steps in days, without the monitor."""
    batch = config["train"]["batch_size"]
    return sum(batch / row["images_per_second"] for row in rows) / _SECONDS_PER_DAY


RUN_MEASURES = {
    "letters": RunMeasure(
        "percentage of correct letters in strings of the trained length, at the last test of the "
        "run",
        _copied_letters,
    ),
    "training_days": RunMeasure(
        "duration of all steps of the run in days, on the hardware of the run",
        _training_days,
        ".3g",
    ),
}
"""Measures by metric name. They fill columns of published tables with the task "run"."""


def read_run_measure(metric: str, folder: Path) -> float | None:
    """Return a measure of `RUN_MEASURES`, or None if the run is not finished or logs no value."""
    folder = expand_path(folder)
    state = read_run_state(folder)
    if state is None or not state.is_finished:
        return None
    try:
        value = float(RUN_MEASURES[metric].compute(_read_config(folder), _read_log(folder)))
    # The files may have any content.
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None


def _read_config(folder: Path) -> Any:
    return yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def _read_log(folder: Path) -> Iterator[Mapping[str, Any]]:
    with (folder / "log.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)
