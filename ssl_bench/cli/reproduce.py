"""`ssl-bench reproduce`: from a published table to its runs and probes, and ours beside it.

`plan_table` gives the commands of a table, in order, each of which can be given again; `shown_plan`
says what lies there already; `printed_lines` are for a shell, `carry_out` runs them here.
"""

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssl_bench.cli.parser import run as run_command
from ssl_bench.composition.choices import (
    Experiment,
    choices,
    config_folder,
    experiments,
    papers,
    require_choice,
    unknown_name_error,
)
from ssl_bench.composition.compose import read_file
from ssl_bench.data.sources import SOURCES
from ssl_bench.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    escape_braces,
    format_command,
)
from ssl_bench.results.record import SUPERVISED, Record, encoder_id
from ssl_bench.results.store import ResultStore
from ssl_bench.system.endings import Outcome, run_and_catch
from ssl_bench.system.escaping import align_columns, escape_lines, quote_command
from ssl_bench.system.files import read_digests
from ssl_bench.system.paths import expand_path
from ssl_bench.system.process import get_process_info
from ssl_bench.system.progress import say
from ssl_bench.tables.paper import PaperTable, paper_table
from ssl_bench.tables.published import (
    RUN,
    PublishedColumn,
    PublishedTable,
    load_published_tables,
)
from ssl_bench.tables.run_logs import RunState, read_run_state
from ssl_bench.tables.sheets import default_format, render_tables

TRAINING_GB = {
    "imagenet1k": 154.6,
    "tiny_imagenet": 0.25,
    "cifar10": 0.17,
    "cifar100": 0.17,
    "svhn": 0.25,
    "mnist": 0.012,
    "copying": 0.0,
}
"""Gigabytes of the published archives that runs train on: the training and validation images of
ILSVRC 2012 (147.9 and 6.7), tiny-imagenet-200.zip, cifar-10-python.tar.gz, cifar-100-python.tar.gz,
SVHN's train_32x32.mat and test_32x32.mat, MNIST's four files. What is copied lies nowhere."""
_OF_PROBES = ("probe.", "dataset.")
_PLAIN = re.compile(r"[A-Za-z/._][\w/.-]*")


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List the tables, or show the plan of one; run or print its steps.

    Returns:
        The exit code of the first step that failed, else 0.
    """
    acts = [name for name in ("run", "print", "table") if getattr(options, name)]
    _require_one_process(options)
    tables = list(load_published_tables()) if options.name is None else tables_of(options.name)
    if options.name is None or len(tables) > 1:
        if acts or overrides:
            raise ConfigurationError(
                f"expected one PAPER/TABLE, got {options.name or 'none'}, which is {len(tables)}",
                hint=("ssl-bench", "reproduce"),
            )
        print(listing(tables))
        return 0
    asked = Asked(
        runs=Path(options.runs),
        out=Path(options.out),
        roots=_roots(options.data_root),
        overrides=tuple(overrides),
        device=options.device,
        rows=tuple(options.row or ()),
        datasets=tuple(options.dataset.split(",") if options.dataset else ()),
        gpus=_gpus(options),
    )
    plan = plan_table(tables[0], asked)
    if options.print:
        print("\n".join(printed_lines(plan)))
        return 0
    if not (options.run or options.table):
        print(escape_lines(shown_plan(plan).splitlines()))
        return 0
    outcomes: list[Outcome] = []
    if options.run:
        plan.require_roots()
        for step, outcome in carry_out(plan, run_command, debug=options.debug):
            outcomes.append(outcome)
            say(outcome.line(f"{len(outcomes)} of {len(plan.steps)}", step.title))
        counts = Counter(outcome.state for outcome in outcomes)
        say("")
        say(f"{counts['finished']} steps finished, {counts['failed']} failed")
        if counts["failed"]:
            say("the same command again goes on with what is not finished")
    print(render_tables([table_beside(plan)], default_format()))
    return next((one.exit_code for one in outcomes if one.exit_code), 0)


def _require_one_process(options: argparse.Namespace) -> None:
    """Refuse to carry out one plan in several processes.

    Raises:
        ConfigurationError: torchrun started others beside this one.
    """
    count = get_process_info().world_size
    if count > 1:
        table = escape_braces(options.name) if options.name else "{table}"
        hint = ("ssl-bench", "reproduce", table, "--print", f"--gpus={count}")
        raise ConfigurationError(
            f"`ssl-bench reproduce` expects one process, got {count} (WORLD_SIZE); start it "
            f"without torchrun and run the lines that it prints: {format_command(hint)}",
            hint=hint,
        )


def _gpus(options: argparse.Namespace) -> int | None:
    """Return for how many GPUs lines are printed.

    Raises:
        ConfigurationError: No such number, or nothing is printed, or for another device.
    """
    if options.gpus is None:
        return None
    if options.gpus < 1:
        raise ConfigurationError(f"--gpus expects a number from 1 on, got {options.gpus}")
    if not options.print or options.device:
        instead = "--print" if not options.print else "no --device"
        table = escape_braces(options.name) if options.name else "{table}"
        hint = ("ssl-bench", "reproduce", table, "--print", "--gpus={number}")
        raise ConfigurationError(
            f"--gpus {options.gpus} goes with {instead}: it prints lines that use so many GPUs; "
            f"pipe them to a shell: {format_command(hint)} | sh",
            hint=hint,
        )
    return options.gpus


def _roots(text: str | None) -> dict[str, str]:
    """Where images lie, from NAME=DIR,NAME=DIR."""
    if text is None:
        return {}
    known = sorted({*choices("dataset"), *(one.images for one in experiments().values())})
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals and root for _, equals, root in pairs):
        raise ConfigurationError(
            f"expected a folder for each dataset, got {text!r}; names: {', '.join(known)}",
            hint=("--data-root", "{dataset}={folder}"),
        )
    hint = ("--data-root", "{near}={folder}")
    return {
        require_choice("images", name.strip(), known, hint=hint): str(expand_path(root))
        for name, _, root in pairs
    }


def tables_of(name: str) -> list[PublishedTable]:
    """The table of a name such as "cutting_the_skip/table2", or all of a paper.

    Raises:
        ConfigurationError: there is none.
    """
    known = {full_name(table): table for table in load_published_tables()}
    found = [table for full, table in known.items() if name in (full, table.name, table.paper)]
    if found:
        return found
    names = [*known, *dict.fromkeys(table.paper for table in known.values())]
    message = f"expected PAPER/TABLE or PAPER, got {name[:200]!r}"
    raise unknown_name_error(message, name, names, hint=("ssl-bench", "reproduce", "{near}"))


def full_name(table: PublishedTable) -> str:
    return f"{table.paper}/{table.name}"


def is_run(address: str) -> bool:
    """Whether a row is a run of this suite; else it is weights that somebody published."""
    return ":" not in address


def split_address(address: str) -> tuple[str, int | None]:
    """Run and epoch of NAME or NAME@EPOCH."""
    name, _, epoch = address.partition("@")
    return name, int(epoch) if epoch else None


def runs_of(table: PublishedTable) -> list[Experiment]:
    """The runs behind the rows of a table, each behind the one that it begins with."""
    known, found = experiments(), dict[str, Experiment]()
    for address in filter(is_run, table.runs.values()):
        run = known[split_address(address)[0]]
        if run.after is not None:
            found.setdefault(run.after, known[run.after])
        found.setdefault(run.name, run)
    return list(found.values())


def listing(tables: Sequence[PublishedTable]) -> str:
    """Papers with their tables, a line each."""
    lines = []
    for paper in papers():
        own = [table for table in tables if table.paper == paper.name]
        width = max((len(full_name(table)) for table in own), default=0)
        lines += ["", f"{paper.title} ({paper.reference})"] if own else []
        for one in own:
            here = "all" if len(one.runs) == len(one.rows) else f"{len(one.runs)} of them"
            extent = "published weights" if one.runs else "no run is set down"
            if runs := runs_of(one):
                extent = f"{here} by {len(runs)} runs"
            where = f"  {full_name(one):{width}}  {one.where}: {one.title}"
            lines.append(f"{where}; {len(one.rows)} rows, {extent}")
    return "\n".join(lines[1:])


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
        gpus: Of this machine, which the printed lines use; None for one device.
    """

    runs: Path
    out: Path
    roots: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    device: str | None = None
    rows: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    gpus: int | None = None

    @property
    def of_runs(self) -> list[str]:
        return [word for word in self.overrides if not word.startswith(_OF_PROBES)]

    def checkpoint(self, address: str) -> str:
        return str(self.runs / address) if is_run(address) else address

    @property
    def of_runs_by_key(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.of_runs)

    def where(self, images: str) -> list[str]:
        """Flags for where images lie and what computes."""
        root = ["--data-root", self.roots[images]] if images in self.roots else []
        return [*root, *(["--device", self.device] if self.device else [])]


@dataclass(frozen=True)
class Step:
    """One command, which skips what it finds finished.

    Attributes:
        run: The run that it makes or probes; None for published weights.
        needs: The run that must be finished before; None where there is none.
        words: `ssl-bench` with these.
        columns: Of the table, which it fills.
    """

    title: str
    run: str | None
    needs: str | None
    words: tuple[str, ...]
    columns: tuple[PublishedColumn, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.words[0] == "pretrain"


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
        missing = {run.images for run in self.runs} - set(self.asked.roots) - {"copying"}
        if missing and not is_said:
            name = min(missing)
            raise ConfigurationError(
                f"{full_name(self.table)} trains on {name}, expected a folder of it, got none",
                hint=(
                    "data.root={folder}",
                    "or",
                    "--data-root",
                    f"{escape_braces(name)}={{folder}}",
                ),
            )


def plan_table(table: PublishedTable, asked: Asked) -> Plan:
    """The steps for a table; looks at no file.

    Raises:
        ConfigurationError: a row or a dataset that the table does not have.
    """
    typed = [require_choice("row", row, table.rows) for row in asked.rows] or list(table.rows)
    known = list(dict.fromkeys(column.dataset for column in table.columns))
    wanted = [require_choice("dataset", name, known) for name in asked.datasets] or known
    columns = [column for column in table.columns if column.task and column.dataset in wanted]
    # A difference needs the row that it is taken from.
    needed = {*typed, *(column.reference for column in columns)}
    rows = [row for row in table.rows if row in needed]
    ran = {row: table.runs[row] for row in rows if row in table.runs}
    late = [r for r, a in ran.items() if is_run(a) and not _reaches(asked, split_address(a)[1])]
    addresses = {row: address for row, address in ran.items() if row not in late}
    names = {split_address(address)[0] for address in filter(is_run, addresses.values())}
    names |= {run.after for run in runs_of(table) if run.name in names and run.after}
    runs = [run for run in runs_of(table) if run.name in names]
    probed = [column for column in columns if column.is_probed]
    return Plan(
        table=table,
        asked=asked,
        runs=tuple(runs),
        steps=(
            *(_run_step(run, table, columns, asked) for run in runs),
            *(step for one in addresses.values() for step in _probe_steps(one, probed, asked)),
        ),
        checkpoints={row: asked.checkpoint(address) for row, address in addresses.items()},
        images=tuple(dict.fromkeys([*(run.images for run in runs), *(c.dataset for c in probed)])),
        unreached=tuple(late),
        without=tuple(row for row in rows if row not in table.runs),
    )


def _reaches(asked: Asked, epoch: int | None) -> bool:
    """Whether a run with the asked overrides may come to an epoch in its middle."""
    said = asked.of_runs_by_key
    epochs = said.get("train.epochs", "")
    is_shorter = epochs.isdecimal() and epoch is not None and int(epochs) < epoch
    return epoch is None or not ("train.max_steps" in said or is_shorter)


def lengths_in_epochs(run: Experiment) -> dict[str, float]:
    """Return the keys that a run sets to a length in epochs, such as "train.warmup_epochs".

    A recipe writes lengths as decimal fractions (`10.0`), and numbers of whole epochs, such as how
    often something is measured, without (`5`).
    """
    values = _by_full_key(read_file(config_folder() / "experiment" / f"{run.recipe}.yaml"))
    values |= run.changes
    return {
        key: value
        for key, value in values.items()
        if key.endswith("_epochs") and isinstance(value, float)
    }


def _by_full_key(node: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{above}{name}"
        found |= _by_full_key(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def _shortened(run: Experiment, asked: Asked) -> list[str]:
    """Return overrides of the lengths in epochs that a short run would not reach the end of.

    With null each is a share of the run.
    """
    said = asked.of_runs_by_key
    epochs = said.get("train.epochs", "")
    most = int(epochs) if epochs.isdecimal() else None
    return [
        f"{key}=null"
        for key, length in lengths_in_epochs(run).items()
        if key not in said
        and length > 0
        and ("train.max_steps" in said or (most is not None and length >= most))
    ]


def _run_step(
    run: Experiment, table: PublishedTable, columns: Sequence[PublishedColumn], asked: Asked
) -> Step:
    own = [f"experiment={run.name}"]
    # Of all tables of its paper, so that one run serves them all.
    kept = {
        split_address(address)[1]
        for other in load_published_tables()
        if other.paper == table.paper
        for address in other.runs.values()
        if address.startswith(f"{run.name}@")
    }
    kept = {epoch for epoch in kept if epoch is not None and _reaches(asked, epoch)}
    if kept and "train.keep_epochs" not in asked.of_runs_by_key:
        own.append(f"train.keep_epochs=[{','.join(map(str, sorted(kept)))}]")
    own += _shortened(run, asked)
    is_row = run.name in table.runs.values()
    filled = tuple(c for c in columns if is_row and c.task in (SUPERVISED, RUN))
    if any(column.task == SUPERVISED for column in filled):
        own.append(f"monitor.results={_quoted(asked.out)}")
    if run.after is not None:
        own.append(f"init_from={_quoted(asked.runs / run.after)}")
    place = ["--out", str(asked.runs / run.name), "--resume", *asked.where(run.images)]
    words = ("pretrain", *own, *asked.of_runs, *place)
    return Step(f"pretrain {run.name}", run.name, run.after, words, filled)


def _probe_steps(address: str, columns: Sequence[PublishedColumn], asked: Asked) -> Iterator[Step]:
    questions: dict[tuple[str, ...], list[PublishedColumn]] = {}
    for column in columns:
        questions.setdefault(
            (column.task, *_dataset(column), *_question(column, asked)), []
        ).append(column)
    run = split_address(address)[0] if is_run(address) else None
    of_probes = [word for word in asked.overrides if word.startswith(_OF_PROBES)]
    for filled in questions.values():
        first = filled[0]
        question = _question(first, asked)
        place = ["--checkpoint", asked.checkpoint(address), "--out", str(asked.out)]
        more = [*question, *of_probes, *asked.where(first.dataset)]
        yield Step(
            title=f"{' '.join([first.task, *question])} on {first.dataset}, {address}",
            run=run,
            needs=run,
            words=("probe", "--task", first.task, *_dataset(first), *place, *more),
            columns=tuple(filled),
        )


def _dataset(column: PublishedColumn) -> list[str]:
    """Return the words that choose the images of a column, under the name that records have."""
    if not column.layout:
        return ["--dataset", column.dataset]
    return ["--dataset", column.layout, f"dataset.name={column.dataset}"]


def _question(column: PublishedColumn, asked: Asked) -> list[str]:
    """Return the words that ask a probe a column's question, of a run with the asked blocks."""
    depth = asked.of_runs_by_key.get("model.depth", "")
    block = column.block(int(depth) if depth.isdecimal() and int(depth) else None)
    return [*([] if block is None else ["--layer", str(block)]), *column.probe]


def _quoted(path: Path) -> str:
    """A path as a value, which may hold any character."""
    return str(path) if _PLAIN.fullmatch(str(path)) else "'" + str(path).replace("'", "\\'") + "'"


def printed_lines(plan: Plan) -> Iterator[str]:
    """Give the commands of a plan for a shell, in order.

    For several GPUs each training uses all of them, and probes take one each, in turn.
    """
    gpus, probes = plan.asked.gpus, itertools.count()
    for step in plan.steps:
        words = ["ssl-bench", *step.words]
        if gpus and step.is_run:
            words = ["torchrun", f"--nproc-per-node={gpus}", "-m", "ssl_bench", *step.words]
        elif gpus:
            words += ["--device", f"cuda:{next(probes) % gpus}"]
        yield quote_command(words)


def _recorded(out: Path) -> list[Record]:
    """All records of a folder, none where there are none."""
    store = ResultStore(out)
    try:
        found = store.records()
    except DataError:
        return []
    for line in store.notes():
        say(line)
    return found


def shown_plan(plan: Plan) -> str:
    """The plan in full; reads run folders and records, and writes nothing."""
    blocks = [f"{full_name(plan.table)}: {plan.table.title} ({plan.table.source})"]
    states = {run.name: read_run_state(plan.asked.runs / run.name) for run in plan.runs}
    if states:
        rows = [(name, str(state or "-")) for name, state in states.items()]
        blocks.append(align_columns([("run", "there"), *rows]))
    if probes := [step for step in plan.steps if not step.is_run]:
        records = _recorded(plan.asked.out)
        rows = [_probe_row(step, records) for step in probes]
        blocks.append(align_columns([("probe", "checkpoint", "scores recorded"), *rows]))
    return "\n\n".join([*blocks, "\n".join(_notes(plan, states))])


def _probe_row(step: Step, records: Sequence[Record]) -> tuple[str, str, str]:
    """What is asked, of which encoder, and how many scores of it there are.

    The encoder at RUN or RUN@EPOCH is known by the digest beside its weights.
    """
    address = Path(step.words[step.words.index("--checkpoint") + 1])
    name, epoch = split_address(address.name)
    weights = "last.safetensors" if epoch is None else f"epoch{epoch:04}.safetensors"
    known = {digest for digest, _ in read_digests(address.with_name(name) / f"{weights}.sha256")}
    own = [record for record in records if record.checkpoint_sha256 in known]
    count = sum(any(column.is_measured_by(record) for column in step.columns) for record in own)
    return step.title.rpartition(", ")[0], str(address), str(count)


def _notes(plan: Plan, states: Mapping[str, RunState | None]) -> Iterator[str]:
    if states:
        left = [state for state in states.values() if state is None or not state.is_finished]
        yield f"{len(states)} runs, {len(left)} not finished"
    sizes = dict.fromkeys(plan.images, 0.0)
    sizes |= {name: SOURCES[name].size / 1e9 for name in plan.images if name in SOURCES}
    sizes |= {name: size for name, size in TRAINING_GB.items() if name in sizes}
    # Nobody knows of one's own.
    words = [
        f"{name} {f'{size:.2g} GB' if size or name in TRAINING_GB else '?'}"
        for name, size in sizes.items()
    ]
    total = f"{', '.join(words)}; {sum(sizes.values()):.3g} GB to download"
    yield f"images: {total if words else 'none'}"
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


def carry_out(
    plan: Plan, execute: Callable[[Sequence[str]], int], *, debug: bool
) -> Iterator[tuple[Step, Outcome]]:
    """Run the steps one after the other in this process; `debug` raises the first error.

    What fails stops those steps alone that need it. `execute` runs `ssl-bench` with words and gives
    its exit code.

    Raises:
        Preempted, KeyboardInterrupt: a run was asked to stop, and everything is saved.
    """
    failed: set[str] = set()
    for number, step in enumerate(plan.steps, 1):
        say("")
        say(f"step {number} of {len(plan.steps)}: {step.title}")
        if step.needs in failed:
            outcome = Outcome(0.0, 1, f"{step.needs}, which it needs, is not finished")
        else:
            say(f"$ ssl-bench {quote_command(step.words)}")
            outcome = run_and_catch(
                lambda words=step.words: execute(words), step.words[0], debug=debug
            )
        if step.is_run and step.run:
            state = None if outcome.exit_code else read_run_state(plan.asked.runs / step.run)
            if not outcome.exit_code and (state is None or not state.is_finished):
                late = "its time was up before its end; the same command goes on with it"
                outcome = replace(outcome, exit_code=1, error=late)
            if outcome.exit_code:
                failed.add(step.run)
        yield step, outcome


def table_beside(plan: Plan) -> PaperTable:
    """Return the published table with records of the plan's encoders and measures of its runs."""
    from ssl_bench.models import identify_encoder

    records, encoders, runs = _recorded(plan.asked.out), {}, {}
    known = {record.encoder_id for record in records}
    for row, address in plan.checkpoints.items():
        if is_run(plan.table.runs[row]):
            runs[row] = Path(address)
        try:
            encoders[row] = encoder_id(identify_encoder(address).identity())
        # There is none yet.
        except CheckpointError:
            continue
    return paper_table(
        plan.table,
        records,
        ResultStore(plan.asked.out),
        encoders={row: one for row, one in encoders.items() if one in known},
        runs=runs,
    )
