"""The commands that make a published table again, in an order in which they can be given."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssl_bench.composition.choices import require_choice
from ssl_bench.composition.papers import Experiment
from ssl_bench.errors import ConfigurationError
from ssl_bench.reproduce.papers import full_name, is_run, recipe_values, runs_of, split_address
from ssl_bench.results.record import SUPERVISED
from ssl_bench.tables.published import PublishedColumn, PublishedTable, published_tables

_IN_EPOCHS = ("train.warmup_epochs", "objective.teacher_temperature_epochs")
# Lies nowhere: the objective draws it.
_DRAWN = frozenset({"copying"})
_OF_PROBES = ("probe.", "dataset.")
_PLAIN = re.compile(r"[A-Za-z/._][\w/.-]*")


@dataclass(frozen=True)
class Asked:
    """What was typed beside the table.

    Attributes:
        runs: Folder of the run folders.
        out: Folder of the records.
        roots: Where images lie, by the name of a dataset or of images to train on.
        overrides: Those of probes and datasets reach the probes, all others every run.
        rows: Only these; all if there is none.
        datasets: Only these; all if there is none.
    """

    runs: Path
    out: Path
    roots: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    device: str | None = None
    rows: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()

    @property
    def of_runs(self) -> tuple[str, ...]:
        return tuple(word for word in self.overrides if not word.startswith(_OF_PROBES))

    @property
    def of_probes(self) -> tuple[str, ...]:
        return tuple(word for word in self.overrides if word.startswith(_OF_PROBES))

    def folder(self, run: str) -> Path:
        return self.runs / run

    def checkpoint(self, address: str) -> str:
        return str(self.folder(address)) if is_run(address) else address


@dataclass(frozen=True)
class Step:
    """One command, which skips what it finds finished.

    Attributes:
        run: The run that it makes or probes; None for published weights.
        needs: The run that must be finished before; None where there is none.
        words: `ssl-bench` with these.
        columns: Of the table, which it fills; none for a run.
        rows: Of the table, in which these columns are.
    """

    title: str
    run: str | None
    needs: str | None
    words: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        return not self.columns


@dataclass(frozen=True)
class Plan:
    """What is to be done for a table.

    Attributes:
        checkpoints: Address of the encoder of a row, by row.
        images: Names of all that must be at hand, images to train on first.
        unreached: Rows whose epoch the overrides leave out.
        without: Rows for which this suite has no run.
    """

    table: PublishedTable
    asked: Asked
    runs: tuple[Experiment, ...]
    steps: tuple[Step, ...]
    checkpoints: Mapping[str, str]
    images: tuple[str, ...]
    unreached: tuple[str, ...]
    without: tuple[str, ...]

    def require_roots(self) -> None:
        """Make sure that no run trains on toy scenes in place of the paper's images.

        Raises:
            ConfigurationError: it is not said where the images lie.
        """
        is_said = any(word.startswith("data.root=") for word in self.asked.overrides)
        missing = {run.images for run in self.runs} - set(self.asked.roots) - _DRAWN
        if missing and not is_said:
            name = min(missing)
            raise ConfigurationError(
                f"{full_name(self.table)} trains on {name}, expected a folder of it, got none; give"
                f" data.root=DIR or --data-root {name}=DIR"
            )


def plan_table(table: PublishedTable, asked: Asked) -> Plan:
    """The steps for a table; looks at no file.

    Raises:
        ConfigurationError: a row or a dataset that the table does not have.
    """
    rows = [require_choice("row", row, table.rows) for row in asked.rows] or list(table.rows)
    known = list(dict.fromkeys(column.dataset for column in table.columns))
    wanted = [require_choice("dataset", name, known) for name in asked.datasets] or known
    columns = [column for column in table.columns if column.task and column.dataset in wanted]
    ran = {row: table.runs[row] for row in rows if row in table.runs}
    late = [row for row in ran if not _is_reached(ran[row], asked.of_runs)]
    addresses = {row: address for row, address in ran.items() if row not in late}
    runs = [run for run in runs_of(table) if _is_wanted(run, runs_of(table), addresses)]
    probes = list(_probe_steps(addresses, columns, asked))
    datasets = [column.dataset for column in columns if column.task != SUPERVISED]
    return Plan(
        table=table,
        asked=asked,
        runs=tuple(runs),
        steps=(*(_run_step(run, table, columns, asked) for run in runs), *probes),
        checkpoints={row: asked.checkpoint(address) for row, address in addresses.items()},
        images=tuple(dict.fromkeys([*(run.images for run in runs), *datasets])),
        unreached=tuple(late),
        without=tuple(row for row in rows if row not in table.runs),
    )


def _is_wanted(run: Experiment, runs: Sequence[Experiment], addresses: Mapping[str, str]) -> bool:
    names = {split_address(address)[0] for address in filter(is_run, addresses.values())}
    first = {one.after for one in runs if one.name in names}
    return run.name in names | first


def _is_reached(address: str, overrides: Sequence[str]) -> bool:
    return not is_run(address) or _reaches(overrides, split_address(address)[1])


def _reaches(overrides: Sequence[str], epoch: int | None) -> bool:
    """Whether a run with these overrides may come to an epoch in its middle."""
    said = dict(word.split("=", 1) for word in overrides)
    epochs = said.get("train.epochs", "")
    is_shorter = epochs.isdecimal() and epoch is not None and int(epochs) < epoch
    return epoch is None or not ("train.max_steps" in said or is_shorter)


def _run_step(
    run: Experiment, table: PublishedTable, columns: Sequence[PublishedColumn], asked: Asked
) -> Step:
    own = [f"experiment={run.name}"]
    kept = _kept_epochs(run.name, table.paper, asked.of_runs)
    if kept:
        own.append(f"train.keep_epochs=[{','.join(map(str, kept))}]")
    own += _shortened(run, asked.of_runs)
    is_row = any(run.name == address for address in table.runs.values())
    if is_row and any(column.task == SUPERVISED for column in columns):
        own.append(f"monitor.results={_quoted(asked.out)}")
    if run.after is not None:
        own.append(f"init_from={_quoted(asked.folder(run.after))}")
    place = ["--out", str(asked.folder(run.name)), "--resume", *_where(run.images, asked)]
    return Step(
        title=f"pretrain {run.name}",
        run=run.name,
        needs=run.after,
        words=("pretrain", *own, *asked.of_runs, *place),
    )


def _shortened(run: Experiment, overrides: Sequence[str]) -> list[str]:
    """What lets a run of a few steps begin: schedules that it would not reach the end of.

    With null they are a share of the run.
    """
    said = {word.partition("=")[0] for word in overrides}
    if "train.max_steps" not in said:
        return []
    recipe = recipe_values(run.recipe)
    return [f"{key}=null" for key in _IN_EPOCHS if recipe.get(key) and key not in said]


def _kept_epochs(run: str, paper: str, overrides: Sequence[str]) -> list[int]:
    """Epochs of a run that any table of its paper asks for, so that one run serves all tables."""
    if any(word.startswith("train.keep_epochs=") for word in overrides):
        return []
    found = {
        epoch
        for table in published_tables()
        for name, epoch in map(split_address, filter(is_run, table.runs.values()))
        if table.paper == paper and name == run and epoch is not None
    }
    return sorted(epoch for epoch in found if _reaches(overrides, epoch))


def _probe_steps(
    addresses: Mapping[str, str], columns: Sequence[PublishedColumn], asked: Asked
) -> Iterator[Step]:
    for row, address in addresses.items():
        questions: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for column in columns:
            if column.task != SUPERVISED:
                question = (column.task, column.dataset, column.probe)
                questions.setdefault(question, []).append(column.name)
        run = split_address(address)[0] if is_run(address) else None
        for (task, dataset, overrides), names in questions.items():
            place = ["--checkpoint", asked.checkpoint(address), "--out", str(asked.out)]
            more = [*overrides, *asked.of_probes, *_where(dataset, asked)]
            yield Step(
                title=f"{' '.join([task, *overrides])} on {dataset}, {address}",
                run=run,
                needs=run,
                words=("probe", "--task", task, "--dataset", dataset, *place, *more),
                columns=tuple(names),
                rows=(row,),
            )


def _where(images: str, asked: Asked) -> list[str]:
    root = ["--data-root", asked.roots[images]] if images in asked.roots else []
    return [*root, *(["--device", asked.device] if asked.device else [])]


def _quoted(path: Path) -> str:
    """A path as a value, which may hold any character."""
    return str(path) if _PLAIN.fullmatch(str(path)) else "'" + str(path).replace("'", "\\'") + "'"
