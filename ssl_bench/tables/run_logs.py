"""Read the states and logs of pretraining runs, and shorten long logs for tables and curves."""

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import yaml
from jaxtyping import Float64, Int64

from ssl_bench.errors import DataError
from ssl_bench.system.files import expand_path, natural_sort_key, resolve_links
from ssl_bench.system.output import print_message, show_progress
from ssl_bench.tables.styles import lacks_skips

LOG = "log.jsonl"
NUM_ROWS = 20
"""Number of rows of a printed table over steps."""

_SECONDS_PER_DAY = 86_400.0
_LARGEST_STEP = 2**53
_PERCENTAGES = re.compile(r"((knn|val|train)_top|letters_|strings_)\d+|data_wait|mfu")


class RunState(NamedTuple):
    """Progress of a pretraining run.

    Attributes:
        step: Number of completed optimizer steps.
        is_finished: Whether the run has completed all of its epochs or steps.
    """

    step: int
    is_finished: bool

    def __str__(self) -> str:
        return f"{'finished' if self.is_finished else 'started'}, {self.step} steps"


def read_run_state(folder: Path) -> RunState | None:
    """Return the progress of a pretraining run, or None if the folder contains no readable run."""
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


class LoggedCurve(NamedTuple):
    """Values of one logged measure, such as the loss, at ascending steps of a pretraining run.

    A value is NaN if the log contains null or an infinite number at this step.
    """

    steps: Int64[np.ndarray, " values"]
    values: Float64[np.ndarray, " values"]


class StepSummary(NamedTuple):
    """Summary of a measure over consecutive steps.

    Attributes:
        value: The mean of the finite values, or the latest value of a measure that is not logged at
            every step. NaN if no value is finite.
        low: The mean minus one standard deviation. None for latest values, or if there are fewer
            than two finite values.
        high: The mean plus one standard deviation. None in the same cases as `low`.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RunLog:
    """The log of a pretraining run.

    Attributes:
        name: Name of the run folder, or its path if several folders have the same name.
        steps: The logged steps, in ascending order and without repetitions.
        steps_per_epoch: Number of steps in an epoch, or None if no epoch is complete.
        curves: The values of each measure, by its name, such as "loss".
        num_damaged: Number of lines that are not valid rows of a log.
        num_repeated: Number of rows that are replaced by a later row of the same step.
        is_skipless: Whether the run trains an encoder without skip connections.
    """

    name: str
    folder: Path
    steps: Int64[np.ndarray, " rows"]
    steps_per_epoch: float | None
    curves: Mapping[str, LoggedCurve]
    num_damaged: int
    num_repeated: int
    is_skipless: bool

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    @property
    def num_missing(self) -> int:
        """Number of steps without a row in the log, up to the last logged step."""
        return self.last_step - len(self.steps)

    @property
    def problems(self) -> list[str]:
        """Descriptions of problems in the log, such as "2 damaged lines skipped"."""
        non_finite = {
            name: int(np.isnan(curve.values).sum())
            for name, curve in self.curves.items()
            if self.logs_every_step(name)
        }
        counts = [
            (self.num_damaged, "damaged line", "skipped"),
            (self.num_repeated, "repeated row", "replaced by later ones"),
            (self.num_missing, "step", "missing"),
            *((count, f"{name} value", "not finite") for name, count in non_finite.items()),
        ]
        return [f"{n:,} {noun}{'s' * (n > 1)} {what}" for n, noun, what in counts if n]

    def logs_every_step(self, measure: str) -> bool:
        """Return whether every row of the log contains the measure with this name, such as "loss".

        Measures of monitors, which evaluate the encoder during training, are in some rows only.
        """
        return len(self.curves[measure].steps) == len(self.steps)

    def summarise_intervals(self, measure: str, ends: Sequence[int]) -> dict[int, StepSummary]:
        """For each interval of steps, return a summary of a measure, usually the mean.

        If a measure is logged at some steps only, intervals without a logged value are left out. If
        a measure is logged at every step, intervals without a logged value get NaN, so that a drawn
        line has a gap. Intervals after the last logged step are always left out.

        Args:
            measure: Name of the measure, such as "loss".
            ends: Last step of each interval, in ascending order. These steps are the keys of the
                result.
        """
        steps, values = self.curves[measure]
        is_dense = self.logs_every_step(measure)
        bounds = np.searchsorted(steps, ends, side="right")
        means, start = dict[int, StepSummary](), 0
        for end, bound in zip(ends, bounds.tolist(), strict=True):
            if start < bound:
                means[end] = _summarise(values[start:bound], is_dense=is_dense)
            elif is_dense and start < len(steps):
                means[end] = StepSummary(math.nan)
            start = bound
        return means


def _summarise(values: Float64[np.ndarray, " values"], *, is_dense: bool) -> StepSummary:
    if not is_dense:
        return StepSummary(float(values[-1]))
    finite = values[np.isfinite(values)]
    if len(finite) < 2:
        return StepSummary(float(finite[0]) if len(finite) else math.nan)
    mean, deviation = float(finite.mean()), float(finite.std())
    return StepSummary(mean, mean - deviation, mean + deviation)


def interval_ends(last_step: int, max_count: int) -> list[int]:
    """Divide steps 1 to `last_step` into intervals, and return the last step of each interval.

    There are at most `max_count` intervals, whose lengths differ by at most one step.
    """
    count = min(max_count, last_step)
    return [last_step * number // count for number in range(1, count + 1)]


def measure_unit(measure: str) -> str:
    """Return the unit of a logged measure: "%" for percentages, or "" for plain numbers."""
    return "%" if _PERCENTAGES.fullmatch(measure) else ""


def sort_measures(logs: Iterable[RunLog]) -> list[str]:
    """Return the names of all logged measures in the order in which they are shown.

    The loss comes first, followed by the measures of monitors, which evaluate the encoder during
    training. All others come last.
    """
    is_dense = dict[str, bool]()
    for log in logs:
        for name in log.curves:
            is_dense[name] = is_dense.get(name, False) or log.logs_every_step(name)
    return sorted(is_dense, key=lambda name: (name != "loss", is_dense[name], name))


def is_monitored(measure: str, logs: Iterable[RunLog]) -> bool:
    """Return whether a measure comes from a monitor, which evaluates the encoder during training.

    A measure comes from a monitor if none of the logs contains the measure at every step.
    """
    return not any(measure in log.curves and log.logs_every_step(measure) for log in logs)


def read_run_logs(addresses: Iterable[str | Path]) -> list[RunLog]:
    """Read the logs of pretraining runs.

    Each element of `addresses` is the folder of a run or a folder that contains such folders. Logs
    without any row are left out, and a message names these logs. For example, the log of a run that
    has just started has no row.

    Raises:
        DataError: A folder contains no run, or no log contains a row.
    """
    folders = dict[Path, None]()
    for address in addresses:
        folder = expand_path(address)
        inside = [folder] if (folder / LOG).is_file() else find_run_folders(folder)
        if not inside:
            raise DataError(
                f"{folder} contains no {LOG}, expected the folder of a run or a folder of runs"
            )
        folders |= dict.fromkeys(inside)
    names = [resolve_links(folder).name for folder in folders]
    logs, empty = [], []
    for folder, name in zip(show_progress(list(folders), "logs"), names, strict=True):
        log = _read_run_log(folder, name if names.count(name) == 1 else str(folder))
        if log is None:
            empty.append(folder / LOG)
        else:
            logs.append(log)
    if empty and not logs:
        raise DataError(
            f"{empty[0]} contains no row of a run, expected a JSON object with the key `step` in "
            "each line"
        )
    for path in empty:
        print_message(f"left out: {path} contains no row of a run")
    return logs


def find_run_folders(folder: Path) -> list[Path]:
    """Return the folders of pretraining runs that are directly inside `folder`.

    The folders are sorted by name, with `run2` before `run10`.
    """
    found = [path.parent for path in folder.glob(f"*/{LOG}") if path.is_file()]
    return sorted(found, key=lambda path: natural_sort_key(path.name))


def _read_run_log(folder: Path, name: str) -> RunLog | None:
    """Read the log of the run in `folder`, and give it the name `name`.

    Return None if no row of the log contains a measure, such as the loss.
    """
    steps, epochs = array("q"), array("q")
    columns: dict[str, tuple[array[int], array[float]]] = {}
    num_damaged = 0
    with (folder / LOG).open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                step, epoch = row.pop("step"), row.pop("epoch", 0)
                if not 0 < step < _LARGEST_STEP or not 0 <= epoch < _LARGEST_STEP:
                    raise ValueError
                numbers = [
                    (key, math.nan if value is None else float(value))
                    for key, value in row.items()
                    if value is None or type(value) in (int, float)
                ]
                steps.append(step)
                epochs.append(epoch)
            # A line may have any content, such as the first half of a row that is being written.
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                num_damaged += bool(line.strip())
                del steps[len(epochs) :]
                continue
            for key, number in numbers:
                at, column = columns.setdefault(key, (array("q"), array("d")))
                at.append(step)
                column.append(number)
    if not columns:
        return None
    known, epoch = _last_of_each_step(np.array(steps, np.int64), np.array(epochs))
    later = epoch >= 1
    length = float(((known[later] - 1) / epoch[later]).min()) if later.any() else None
    return RunLog(
        name=name,
        folder=folder,
        steps=known,
        steps_per_epoch=length or None,
        curves={
            key: LoggedCurve(*_last_of_each_step(np.array(at, np.int64), np.array(column)))
            for key, (at, column) in columns.items()
        },
        num_damaged=num_damaged,
        num_repeated=len(steps) - len(known),
        is_skipless=_is_skipless(folder, name),
    )


def _last_of_each_step(steps: Any, values: Any) -> tuple[Any, Any]:
    """Sort logged values by step, and keep only the last value of each step.

    `steps` and `values` are arrays in the order of the log file. Return the sorted steps and their
    values. Infinite values become NaN.
    """
    if values.dtype == np.float64:
        values[~np.isfinite(values)] = math.nan
    if (np.diff(steps) > 0).all():
        return steps, values
    unique, first = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][first]


def _is_skipless(folder: Path, name: str) -> bool:
    try:
        model = _read_config(folder)["model"]
        return lacks_skips(name, model)
    # The file may have any content, or none.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return lacks_skips(name, {})


class RunMeasure(NamedTuple):
    """A number that can be computed from the log of a pretraining run.

    Attributes:
        description: Text for the notes of a table.
        compute: Function that computes the number from the run's configuration and log.
        digits: Format specification of the number in a table, such as ".1f".
    """

    description: str
    compute: Callable[[Mapping[str, Any], RunLog], float]
    digits: str = ".1f"


def _copied_letters(config: Mapping[str, Any], log: RunLog) -> float:
    return float(log.curves[f"letters_{config['objective']['length']}"].values[-1])


def _training_days(config: Mapping[str, Any], log: RunLog) -> float:
    """Return the duration of all optimizer steps of a run in days, without evaluations."""
    if log.num_missing:
        raise ValueError("some steps are missing")
    rates = log.curves["images_per_second"].values
    return float((config["train"]["batch_size"] / rates).sum()) / _SECONDS_PER_DAY


def _loss_at(curve: str, percent: int) -> RunMeasure:
    """Return the definition of a measure: the loss of a run after `percent` % of its steps.

    `curve` is the name of the loss in the log. The value is the same as in the table of `ssl-bench
    table --over-steps`.
    """

    def compute(config: Mapping[str, Any], log: RunLog) -> float:
        del config
        ends = interval_ends(log.last_step, NUM_ROWS)
        means = log.summarise_intervals(curve, ends[: math.ceil(percent / 100 * len(ends))])
        return list(means.values())[-1].value

    what = "training loss up to" if curve == "loss" else "latest loss of the monitor up to"
    mean = ", mean over the last twentieth of the run" if curve == "loss" else ""
    return RunMeasure(f"{what} {percent} % of the steps{mean}", compute, "#.4g")


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
    **{
        f"{curve}_{percent}": _loss_at(curve, percent)
        for curve in ("loss", "val_loss")
        for percent in (25, 50, 75, 100)
    },
}
"""Numbers that can be computed from a training log, by metric name.

They fill those columns of published tables whose task is "run".
"""


def read_run_measure(metric: str, folder: Path) -> float | None:
    """Compute the measure `metric`, one of `RUN_MEASURES`, for the pretraining run in a folder.

    Return None if the run is unfinished, or if its log lacks the necessary values.
    """
    folder = expand_path(folder)
    state = read_run_state(folder)
    if state is None or not state.is_finished:
        return None
    try:
        log = _read_run_log(folder, folder.name)
        if log is None:
            return None
        value = float(RUN_MEASURES[metric].compute(_read_config(folder), log))
    # The files may have any content.
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None


def _read_config(folder: Path) -> Any:
    return yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
