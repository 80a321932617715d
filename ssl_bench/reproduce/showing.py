"""A plan as text: what will be run, what it needs, and what lies there already."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ssl_bench.reproduce.costs import said_gigabytes
from ssl_bench.reproduce.papers import full_name
from ssl_bench.reproduce.plan import Plan, Step
from ssl_bench.reproduce.state import RunState, recorded, records_of, run_state
from ssl_bench.results.record import SUPERVISED, Record


def shown_plan(plan: Plan) -> str:
    """The plan in full; reads run folders and records, and writes nothing."""
    table = plan.table
    blocks = [f"{full_name(table)}: {table.title} ({table.source})"]
    if plan.runs:
        blocks.append(_aligned([("run", "there"), *_run_rows(plan)]))
    if probes := [step for step in plan.steps if not step.is_run]:
        blocks.append(_aligned([("probe", "checkpoint", "scores recorded"), *_rows(plan, probes)]))
    return "\n\n".join([*blocks, "\n".join(_notes(plan))])


def _run_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for run in plan.runs:
        state = run_state(plan.asked.folder(run.name))
        yield run.name, "-" if state is None else f"{state}"


def _rows(plan: Plan, probes: Sequence[Step]) -> Iterator[tuple[str, ...]]:
    records = recorded(plan.asked.out)
    for step in probes:
        address = Path(step.words[step.words.index("--checkpoint") + 1])
        what, _, _ = step.title.rpartition(", ")
        yield what, str(address), str(len(_cells(plan, step, records_of(address, records))))


def _cells(plan: Plan, step: Step, records: Sequence[Record]) -> list[Record]:
    """The records that answer the questions of a step."""
    columns = [column for column in plan.table.columns if column.name in step.columns]
    return [r for r in records if any(column.is_measured_by(r) for column in columns)]


def _notes(plan: Plan) -> Iterator[str]:
    states = {run.name: run_state(plan.asked.folder(run.name)) for run in plan.runs}
    if plan.runs:
        left = [run for run in plan.runs if not _is_finished(states[run.name])]
        yield f"{len(plan.runs)} runs, {len(left)} not finished"
    yield f"images: {said_gigabytes(plan.images)}"
    supervised = [c.dataset for c in plan.table.columns if c.task == SUPERVISED]
    if supervised and plan.runs:
        yield f"a record is named after the folder of the images, so call that {supervised[0]}"
    if plan.unreached:
        rows = ", ".join(map(repr, plan.unreached))
        yield f"left out, because the runs end before their epoch: {rows}"
    if plan.without:
        yield f"no run is set down for: {', '.join(map(repr, plan.without))}"
    strange = [column.name for column in plan.table.columns if not column.task]
    if strange:
        yield f"no probe of this suite for: {', '.join(strange)}"
    if plan.table.doubts:
        yield f"doubtful: {plan.table.doubts}"
    if plan.steps:
        yield "--print shows the commands, --run runs them here"


def _is_finished(state: RunState | None) -> bool:
    return state is not None and state.is_finished


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
