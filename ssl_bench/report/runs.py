"""Draw the training logs of pretraining runs as curves over steps or epochs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ssl_bench.report.drawing import Chart, Curve, Point, draw_chart
from ssl_bench.report.panels import MAX_LINES
from ssl_bench.results import Record
from ssl_bench.system.files import read_digests, resolve_links
from ssl_bench.tables.run_logs import (
    NUM_ROWS,
    RunLog,
    find_run_folders,
    interval_ends,
    is_monitored,
    measure_unit,
    read_run_state,
    sort_measures,
)
from ssl_bench.tables.steps import MAX_POINTS, StepTable, format_logged, tabulate_logs
from ssl_bench.tables.styles import choose_styles

# Largest number of points for which a curve has a dot at each point.
_MAX_MARKERS = 30
_SHOWN_MEASURES = ("loss", "lr", "images_per_second")


class RunSummary(NamedTuple):
    """A pretraining run in the list of runs of a report.

    Attributes:
        number: Index in the list of runs.
        style: CSS classes of the run's curves. Curves of runs without skip connections are dashed.
        facts: Text on the progress of the run and on problems in its log, such as damaged lines.
    """

    number: int
    name: str
    style: str
    facts: str


class MeasurePanel(NamedTuple):
    """Chart and table of one logged measure for all runs.

    Attributes:
        measure: Name of the measure, such as "loss".
        table: The values of the chart, summarised in at most `NUM_ROWS` rows.
    """

    measure: str
    chart: Chart
    table: StepTable


class TrainingCurves(NamedTuple):
    """Charts of the training logs of runs.

    Attributes:
        lines: The runs that are drawn, at most `MAX_LINES`.
        num_runs: Number of all runs, including those that are not drawn.
        axis: Horizontal axis of the charts, "step" or "epoch".
        panels: Panels (charts) of the loss, the learning rate, the speed, and the measures of
            monitors, which evaluate the encoder during training.
        folded: Panels of all other measures, which are hidden until a reader unfolds them.
    """

    lines: Sequence[RunSummary]
    num_runs: int
    axis: str
    panels: Sequence[MeasurePanel]
    folded: Sequence[MeasurePanel]


def find_recorded_runs(records: Iterable[Record], folders: Iterable[Path]) -> list[Path]:
    """Return the folders of pretraining runs inside `folders` whose weights were probed.

    Weights have been probed if a record (stored score) contains their SHA-256.
    """
    recorded = {record.checkpoint_sha256 for record in records}
    found = dict[Path, Path]()
    for folder in folders:
        for run in find_run_folders(folder):
            digests = {
                digest
                for sidecar in run.glob("*.safetensors.sha256")
                for digest, _ in read_digests(sidecar)
            }
            if digests & recorded:
                found.setdefault(resolve_links(run), run)
    return list(found.values())


def draw_runs(logs: Sequence[RunLog]) -> TrainingCurves | None:
    """Draw one chart per logged measure, such as the loss, with one curve per pretraining run.

    Return None if there are no runs.
    """
    if not logs:
        return None
    drawn = logs[:MAX_LINES]
    lengths = {log.steps_per_epoch for log in drawn}
    # Compare runs with different numbers of steps per epoch by epochs.
    axis = "epoch" if len(lengths) > 1 and None not in lengths else "step"
    styles = choose_styles({log.name: log.is_skipless for log in drawn})
    lines = [
        RunSummary(number, log.name, styles[log.name].css, _describe_run(log))
        for number, log in enumerate(drawn)
    ]
    panels: dict[bool, list[MeasurePanel]] = {True: [], False: []}
    for measure in sort_measures(drawn):
        is_shown = measure in _SHOWN_MEASURES or is_monitored(measure, drawn)
        panels[is_shown].append(_draw_measure(measure, drawn, lines, axis))
    return TrainingCurves(lines, len(logs), axis, panels[True], panels[False])


def _describe_run(log: RunLog) -> str:
    """Return one line of text on the progress of a run and on problems in its log."""
    state = read_run_state(log.folder)
    words = [str(state) if state else f"{log.last_step:,} steps, no saved weights"]
    if log.steps_per_epoch:
        words.append(f"{log.steps_per_epoch:,.6g} steps per epoch")
    return ", ".join([*words, *log.problems])


def _draw_measure(
    measure: str, logs: Sequence[RunLog], lines: Sequence[RunSummary], axis: str
) -> MeasurePanel:
    unit = measure_unit(measure)
    label = f"{measure} ({unit})" if unit else measure
    series = [
        log.summarise_intervals(measure, interval_ends(log.last_step, MAX_POINTS))
        if measure in log.curves
        else {}
        for log in logs
    ]
    has_markers = max(map(len, series)) <= _MAX_MARKERS
    curves = []
    for log, line, means in zip(logs, lines, series, strict=True):
        if not means:
            continue
        length = log.steps_per_epoch if axis == "epoch" else None
        points = []
        for step, mean in means.items():
            x = step / (length or 1)
            tooltip = f"{log.name}, {axis} {x:g}: {format_logged(mean.value, unit)}"
            points.append(Point(x, *mean, tooltip))
        curves.append(Curve(log.name, line.style, line.number, points, has_markers=has_markers))
    return MeasurePanel(
        measure=measure,
        chart=draw_chart(curves, unit=unit, y_label=label, x_label=axis, has_round_ticks=True),
        table=tabulate_logs(logs, [measure], NUM_ROWS, title=measure),
    )
