"""`ssl-bench reproduce`: list published tables, and print or run the commands for one table."""

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssl_bench.cli.parser import run_command
from ssl_bench.composition.choices import (
    Experiment,
    choices,
    config_folder,
    experiments,
    papers,
    require_choice,
    unknown_name_error,
)
from ssl_bench.composition.compose import flatten_config, read_file
from ssl_bench.data.sources import DATASET_INFOS
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, escape_braces
from ssl_bench.results.record import SUPERVISED, Record, encoder_id
from ssl_bench.results.store import ResultStore
from ssl_bench.system.endings import Outcome, run_and_catch
from ssl_bench.system.files import expand_path, read_digests
from ssl_bench.system.output import align_columns, escape_lines, print_message, quote_command
from ssl_bench.system.process import get_process_info
from ssl_bench.tables.paper import PaperTable, paper_table
from ssl_bench.tables.published import (
    RUN_TASK,
    PublishedColumn,
    PublishedTable,
    load_published_tables,
)
from ssl_bench.tables.run_logs import LOG, RunState, read_run_state
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
"""Download size of each training dataset in gigabytes.

The sizes are those of the archives of ILSVRC 2012 (training and validation images),
tiny-imagenet-200.zip, cifar-10-python.tar.gz, cifar-100-python.tar.gz, SVHN (train_32x32.mat and
test_32x32.mat) and MNIST (four files). The strings of the copying task are generated, so nothing is
downloaded for this task."""
_PROBE_PREFIXES = ("probe.", "dataset.")
_UNQUOTED_PATH = re.compile(r"[A-Za-z/._][\w/.-]*")


@dataclass(frozen=True)
class PlanOptions:
    """The user's options for reproducing a published table.

    Attributes:
        runs: Folder that contains the run folders.
        out: Results folder.
        roots: Folders of the datasets, by name of the dataset.
        overrides: KEY=VALUE settings. Keys that begin with "probe." or "dataset." apply to probes,
            and all other keys apply to training runs.
        rows: Names of the table rows to reproduce (default: all rows).
        datasets: Datasets to probe (default: all datasets).
        gpus: Number of GPUs that the printed commands use, or None for a single device.
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
    def run_overrides(self) -> list[str]:
        return [word for word in self.overrides if not word.startswith(_PROBE_PREFIXES)]

    @property
    def run_values(self) -> dict[str, str]:
        """Return the user's settings for training runs as a dictionary from config key to value."""
        return dict(word.split("=", 1) for word in self.run_overrides)

    @property
    def probe_overrides(self) -> list[str]:
        return [word for word in self.overrides if word.startswith(_PROBE_PREFIXES)]

    def checkpoint(self, address: str) -> str:
        return str(self.runs / address) if is_run(address) else address

    def list_location_flags(self, images: str) -> list[str]:
        """Return the flags `--data-root` and `--device` for a command that reads the images.

        Flags that the user did not set are left out. `images` is the name of a dataset.
        """
        root = ["--data-root", self.roots[images]] if images in self.roots else []
        return [*root, *(["--device", self.device] if self.device else [])]


@dataclass(frozen=True)
class Step:
    """One of the `ssl-bench` commands that reproduce a table: a training run or a probe.

    The command skips work that is already finished.

    Attributes:
        title: Short description for messages, such as "pretrain skipless".
        trained_run: Name of the run that the command trains, or None if the command is a probe.
        needed_run: Name of the run that must be finished before this step, or None.
        arguments: Arguments of `ssl-bench`.
        columns: Columns of the table that the command fills.
    """

    title: str
    trained_run: str | None
    needed_run: str | None
    arguments: tuple[str, ...]
    columns: tuple[PublishedColumn, ...] = ()

    @property
    def is_training(self) -> bool:
        return self.trained_run is not None


@dataclass(frozen=True)
class Plan:
    """The steps that reproduce a published table.

    Attributes:
        table: The published table.
        options: The user's options, such as the requested rows.
        runs: Training runs, in order.
        steps: All commands, in order.
        checkpoints: URI of each row's encoder, by row name.
        dataset_names: Names of all required datasets, with training datasets first.
        unreachable_rows: Rows that need an epoch after the end of the run, because the user
            shortened the run.
        rows_without_run: Rows for which no training run is defined.
    """

    table: PublishedTable
    options: PlanOptions
    runs: tuple[Experiment, ...]
    steps: tuple[Step, ...]
    checkpoints: Mapping[str, str]
    dataset_names: tuple[str, ...]
    unreachable_rows: tuple[str, ...]
    rows_without_run: tuple[str, ...]

    def require_roots(self) -> None:
        """Check that the user specified the folders of all training datasets.

        Without a folder, a run would train on generated toy images instead of the paper's images.
        Only the task of copying strings needs no folder, because the strings are generated.
        """
        missing = {run.images for run in self.runs} - set(self.options.roots) - {"copying"}
        if missing and "data.root" not in self.options.run_values:
            name = min(missing)
            raise ConfigurationError(
                f"{full_name(self.table)} needs the training images {name}, but their folder is "
                "not given",
                hint=(
                    "data.root={folder}",
                    "or",
                    "--data-root",
                    f"{escape_braces(name)}={{folder}}",
                ),
            )


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List published tables, or describe, print or run the commands that reproduce one table."""
    _require_single_process(options)
    tables = list(load_published_tables()) if options.name is None else find_tables(options.name)
    if options.name is None or len(tables) > 1:
        if options.run or options.print or options.table or overrides:
            raise ConfigurationError(
                "expected the name of one table (PAPER/TABLE) to reproduce, got "
                f"{options.name or 'none'} ({len(tables)} tables)",
                hint=("ssl-bench", "reproduce"),
            )
        print(format_listing(tables))
        return 0
    plan = plan_table(
        tables[0],
        PlanOptions(
            runs=Path(options.runs),
            out=Path(options.out),
            roots=_parse_roots(options.data_root),
            overrides=tuple(overrides),
            device=options.device,
            rows=tuple(options.row or ()),
            datasets=tuple(options.dataset.split(",") if options.dataset else ()),
            gpus=_parse_gpus(options),
        ),
    )
    if options.print:
        print("\n".join(shell_commands(plan)))
        return 0
    if not (options.run or options.table):
        print(escape_lines(format_plan(plan).splitlines()))
        return 0
    outcomes: list[Outcome] = []
    if options.run:
        plan.require_roots()
        for step, outcome in run_steps(plan, run_command, debug=options.debug):
            outcomes.append(outcome)
            print_message(outcome.line(f"{len(outcomes)} of {len(plan.steps)}", step.title))
        counts = Counter(outcome.state for outcome in outcomes)
        print_message("")
        print_message(f"{counts['finished']} steps finished, {counts['failed']} failed")
        if counts["failed"]:
            print_message("run the same command again to continue with the unfinished steps")
    print(render_tables([fill_table(plan)], default_format()))
    for command_line in _curve_commands(plan):
        print_message(f"to draw the curves: {command_line}")
    return next((outcome.exit_code for outcome in outcomes if outcome.exit_code), 0)


def _require_single_process(options: argparse.Namespace) -> None:
    count = get_process_info().world_size
    if count > 1:
        table = escape_braces(options.name) if options.name else "{table}"
        raise ConfigurationError(
            f"`ssl-bench reproduce` expects one process, got {count} (WORLD_SIZE). Start it "
            "without torchrun and run the printed commands",
            hint=("ssl-bench", "reproduce", table, "--print", f"--gpus={count}"),
        )


def _parse_gpus(options: argparse.Namespace) -> int | None:
    """Check `--gpus` and return the number of GPUs for printed commands, or None if not set."""
    if options.gpus is None:
        return None
    if options.gpus < 1:
        raise ConfigurationError(f"--gpus expects a number of at least 1, got {options.gpus}")
    if not options.print or options.device:
        table = escape_braces(options.name) if options.name else "{table}"
        conflict = "cannot be combined with --device" if options.print else "needs --print"
        raise ConfigurationError(
            f"--gpus {options.gpus} {conflict}, because --gpus only changes printed commands",
            hint=("ssl-bench", "reproduce", table, "--print", "--gpus={number}"),
        )
    return options.gpus


def _parse_roots(text: str | None) -> dict[str, str]:
    """Parse text such as "voc2012=/data/voc,ade20k=/data/ade", and return each dataset's folder."""
    if text is None:
        return {}
    known = sorted({*choices("dataset"), *(run.images for run in experiments().values())})
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals and root for _, equals, root in pairs):
        raise ConfigurationError(
            f"expected a folder for each dataset, got {text!r} (datasets: {', '.join(known)})",
            hint=("--data-root", "{dataset}={folder}"),
        )
    hint = ("--data-root", "{near}={folder}")
    return {
        require_choice("images", name.strip(), known, hint=hint): str(expand_path(root))
        for name, _, root in pairs
    }


def find_tables(name: str) -> list[PublishedTable]:
    """Return the published tables that `name` identifies.

    The name "cutting_the_skip/table2" identifies one table, "table2" all tables with this name, and
    "cutting_the_skip" all tables of this paper.
    """
    known = {full_name(table): table for table in load_published_tables()}
    tables = [table for full, table in known.items() if name in (full, table.name, table.paper)]
    if tables:
        return tables
    names = [*known, *dict.fromkeys(table.paper for table in known.values())]
    message = f"expected PAPER/TABLE or PAPER, got {name[:200]!r}"
    raise unknown_name_error(message, name, names, hint=("ssl-bench", "reproduce", "{near}"))


def full_name(table: PublishedTable) -> str:
    return f"{table.paper}/{table.name}"


def is_run(address: str) -> bool:
    """Return whether `address` names a training run, such as "NAME" or "NAME@EPOCH".

    All other addresses of encoders in a table name published weights, such as "timm:NAME".
    """
    return ":" not in address


def split_address(address: str) -> tuple[str, int | None]:
    """Split NAME@EPOCH into the name of a run and the epoch. Without @EPOCH, the epoch is None."""
    name, _, epoch = address.partition("@")
    return name, int(epoch) if epoch else None


def list_runs(table: PublishedTable) -> list[Experiment]:
    """Return the training runs that reproduce a published table, in the order in which to run them.

    If run A starts from the weights of run B, then B comes before A.
    """
    known, runs = experiments(), dict[str, Experiment]()
    for address in filter(is_run, table.runs.values()):
        run = known[split_address(address)[0]]
        if run.after is not None:
            runs.setdefault(run.after, known[run.after])
        runs.setdefault(run.name, run)
    return list(runs.values())


def format_listing(tables: Sequence[PublishedTable]) -> str:
    """Return the title of each paper, followed by one line for each of its tables."""
    lines = []
    for paper in papers():
        own = [table for table in tables if table.paper == paper.name]
        width = max((len(full_name(table)) for table in own), default=0)
        lines += ["", f"{paper.title} ({paper.reference})"] if own else []
        for table in own:
            extent = "published weights" if table.runs else "no runs defined"
            if runs := list_runs(table):
                covered = "all" if len(table.runs) == len(table.rows) else f"{len(table.runs)}"
                extent = f"{covered} reproduced by {len(runs)} run{'s' * (len(runs) > 1)}"
            name = f"  {full_name(table):{width}}"
            lines.append(f"{name}  {table.where}: {table.title} ({len(table.rows)} rows, {extent})")
    return "\n".join(lines[1:])


def plan_table(table: PublishedTable, options: PlanOptions) -> Plan:
    """Return the commands that reproduce a published table.

    Run folders and stored scores are not read, so the plan also contains commands that were already
    run.
    """
    requested = [require_choice("row", row, table.rows) for row in options.rows] or table.rows
    known = list(dict.fromkeys(column.dataset for column in table.columns))
    datasets = [require_choice("dataset", name, known) for name in options.datasets] or known
    columns = [column for column in table.columns if column.task and column.dataset in datasets]
    # A column of differences also needs the row that is subtracted.
    needed = {*requested, *(column.reference for column in columns)}
    rows = [row for row in table.rows if row in needed]
    addresses = {row: table.runs[row] for row in rows if row in table.runs}
    unreachable = [
        row
        for row, address in addresses.items()
        if is_run(address) and not _can_reach(options, split_address(address)[1])
    ]
    for row in unreachable:
        del addresses[row]
    names = {split_address(address)[0] for address in filter(is_run, addresses.values())}
    names |= {run.after for run in list_runs(table) if run.name in names and run.after}
    runs = [run for run in list_runs(table) if run.name in names]
    probed = [column for column in columns if column.is_probed]
    dataset_names = [*(run.images for run in runs), *(column.dataset for column in probed)]
    return Plan(
        table=table,
        options=options,
        runs=tuple(runs),
        steps=(
            *(_training_step(run, table, columns, options) for run in runs),
            *(
                step
                for address in addresses.values()
                for step in _probe_steps(address, probed, options)
            ),
        ),
        checkpoints={row: options.checkpoint(address) for row, address in addresses.items()},
        dataset_names=tuple(dict.fromkeys(dataset_names)),
        unreachable_rows=tuple(unreachable),
        rows_without_run=tuple(row for row in rows if row not in table.runs),
    )


def _max_epochs(options: PlanOptions) -> int | None:
    epochs = options.run_values.get("train.epochs", "")
    return int(epochs) if epochs.isdecimal() else None


def _can_reach(options: PlanOptions, epoch: int | None) -> bool:
    """Return whether a training run with the user's settings is long enough to reach `epoch`.

    If `train.max_steps` is set, the run is assumed to be too short. The epoch None stands for the
    end of the run, which is always reached.
    """
    if epoch is None:
        return True
    epochs = _max_epochs(options)
    return "train.max_steps" not in options.run_values and (epochs is None or epochs >= epoch)


def _training_step(
    run: Experiment, table: PublishedTable, columns: Sequence[PublishedColumn], options: PlanOptions
) -> Step:
    settings = [f"experiment={run.name}"]
    # The run saves all epochs that tables of the paper need, so that one run serves all tables.
    epochs = {
        epoch
        for other in load_published_tables()
        if other.paper == table.paper
        for name, epoch in map(split_address, filter(is_run, other.runs.values()))
        if name == run.name and epoch is not None and _can_reach(options, epoch)
    }
    if epochs and "train.keep_epochs" not in options.run_values:
        settings.append(f"train.keep_epochs=[{','.join(map(str, sorted(epochs)))}]")
    settings += _shorten_lengths(run, options)
    is_row = run.name in table.runs.values()
    filled = tuple(c for c in columns if is_row and c.task in (SUPERVISED, RUN_TASK))
    if any(column.task == SUPERVISED for column in filled):
        settings.append(f"monitor.results={_quote(options.out)}")
    if run.after is not None:
        settings.append(f"init_from={_quote(options.runs / run.after)}")
    flags = [
        "--out",
        str(options.runs / run.name),
        "--resume",
        *options.list_location_flags(run.images),
    ]
    arguments = ("pretrain", *settings, *options.run_overrides, *flags)
    return Step(f"pretrain {run.name}", run.name, run.after, arguments, filled)


def _shorten_lengths(run: Experiment, options: PlanOptions) -> list[str]:
    """Return settings KEY=null for schedules that are too long for a shortened run.

    For example, a warm-up of 10.0 epochs is too long for a run with `train.epochs=5`. With
    `KEY=null`, the length of a schedule is a fraction of the run. Lengths of schedules are decimal
    numbers in recipes (`10.0`). Integers (`5`) are intervals between measurements, and are not
    changed.
    """
    recipe = read_file(config_folder() / "experiment" / f"{run.recipe}.yaml")
    values = {**flatten_config(recipe), **run.changes}
    has_max_steps, epochs = "train.max_steps" in options.run_values, _max_epochs(options)
    return [
        f"{key}=null"
        for key, length in values.items()
        if key.endswith("_epochs") and isinstance(length, float) and length > 0
        if key not in options.run_values
        if has_max_steps or (epochs is not None and length >= epochs)
    ]


def _probe_steps(
    address: str, columns: Sequence[PublishedColumn], options: PlanOptions
) -> Iterator[Step]:
    """Yield the probe commands that measure the given columns of a table for one encoder.

    Columns of the table that need the same settings share a command.

    Args:
        address: Address of the encoder: a training run as "NAME" or "NAME@EPOCH", or published
            weights such as "timm:NAME".
        columns: Columns of the published table that probes can measure.
        options: The user's options.
    """
    groups: dict[tuple[str, ...], list[PublishedColumn]] = {}
    for column in columns:
        key = (column.task, *_dataset_words(column), *_probe_words(column, options))
        groups.setdefault(key, []).append(column)
    run = split_address(address)[0] if is_run(address) else None
    for filled in groups.values():
        first = filled[0]
        settings = _probe_words(first, options)
        flags = ["--checkpoint", options.checkpoint(address), "--out", str(options.out)]
        rest = [*settings, *options.probe_overrides, *options.list_location_flags(first.dataset)]
        yield Step(
            title=f"{' '.join([first.task, *settings])} on {first.dataset}, {address}",
            trained_run=None,
            needed_run=run,
            arguments=("probe", "--task", first.task, *_dataset_words(first), *flags, *rest),
            columns=tuple(filled),
        )


def _dataset_words(column: PublishedColumn) -> list[str]:
    if not column.layout:
        return ["--dataset", column.dataset]
    return ["--dataset", column.layout, f"dataset.name={column.dataset}"]


def _probe_words(column: PublishedColumn, options: PlanOptions) -> list[str]:
    depth = options.run_values.get("model.depth", "")
    block = column.block(int(depth) if depth.isdecimal() and int(depth) else None)
    return [*([] if block is None else ["--layer", str(block)]), *column.probe]


def _quote(path: Path) -> str:
    """Return a path as the value of a KEY=VALUE setting, in quotes if they are necessary."""
    text = str(path)
    return text if _UNQUOTED_PATH.fullmatch(text) else "'" + text.replace("'", "\\'") + "'"


def shell_commands(plan: Plan) -> Iterator[str]:
    """Yield the lines of a shell script that runs the commands of a plan.

    If the user set `--gpus`, training runs use all GPUs. Each probe uses one GPU, and successive
    probes use different GPUs in turn.
    """
    gpus, probes = plan.options.gpus, itertools.count()
    for step in plan.steps:
        words = ["ssl-bench", *step.arguments]
        if gpus and step.is_training:
            words = ["torchrun", f"--nproc-per-node={gpus}", "-m", "ssl_bench", *step.arguments]
        elif gpus:
            words += ["--device", f"cuda:{next(probes) % gpus}"]
        yield quote_command(words)


def format_plan(plan: Plan) -> str:
    """Describe the plan for a table as text, including which runs and scores already exist."""
    blocks = [f"{full_name(plan.table)}: {plan.table.title} ({plan.table.source})"]
    states = {run.name: read_run_state(plan.options.runs / run.name) for run in plan.runs}
    if states:
        rows = [(name, str(state or "-")) for name, state in states.items()]
        blocks.append(align_columns([("run", "state"), *rows]))
    if probes := [step for step in plan.steps if not step.is_training]:
        records = _load_records(plan.options.out)
        rows = [_probe_row(step, records) for step in probes]
        blocks.append(align_columns([("probe", "checkpoint", "records"), *rows]))
    return "\n\n".join([*blocks, "\n".join(_plan_notes(plan, states))])


def _load_records(out: Path) -> list[Record]:
    """Return the records (stored scores) in a results folder, or an empty list if none exist."""
    store = ResultStore(out)
    try:
        records = store.records()
    except DataError:
        return []
    for line in store.describe_left_out():
        print_message(line)
    return records


def _probe_row(step: Step, records: Sequence[Record]) -> tuple[str, str, str]:
    """Return a row about a probe command: title, checkpoint and number of existing records.

    A record (stored score) is counted if it belongs to the checkpoint and to one of the table
    columns that the command fills.
    """
    # Recognise the records of an encoder by the digest in the .sha256 file next to its weights.
    address = Path(step.arguments[step.arguments.index("--checkpoint") + 1])
    name, epoch = split_address(address.name)
    weights = "last.safetensors" if epoch is None else f"epoch{epoch:04}.safetensors"
    sidecar = address.with_name(name) / f"{weights}.sha256"
    digests = {digest for digest, _ in read_digests(sidecar)}
    count = sum(
        any(column.is_measured_by(record) for column in step.columns)
        for record in records
        if record.checkpoint_sha256 in digests
    )
    return step.title.rpartition(", ")[0], str(address), str(count)


def _plan_notes(plan: Plan, states: Mapping[str, RunState | None]) -> Iterator[str]:
    if states:
        unfinished = [s for s in states.values() if s is None or not s.is_finished]
        yield f"{len(states)} runs, {len(unfinished)} not finished"
    if plan.dataset_names:
        yield f"datasets: {_format_sizes(plan.dataset_names)}"
    supervised = [c.dataset for c in plan.table.columns if c.task == SUPERVISED]
    if supervised and plan.runs:
        yield (
            f"the folder of the training images must have the name {supervised[0]!r}, because "
            "records use this name"
        )
    skipped = {
        "the runs end before their epoch": plan.unreachable_rows,
        "no run is defined for them": plan.rows_without_run,
    }
    for reason, rows in skipped.items():
        if rows:
            yield f"rows skipped, because {reason}: {', '.join(map(repr, rows))}"
    if unmeasured := [column.name for column in plan.table.columns if not column.task]:
        yield f"columns that no probe measures: {', '.join(unmeasured)}"
    if plan.table.doubts:
        yield f"doubtful values: {plan.table.doubts}"
    for command_line in _curve_commands(plan):
        yield f"to draw the curves after the runs: {command_line}"
    if plan.steps:
        yield "use --print to print the commands, or --run to run them"


def _curve_commands(plan: Plan) -> Iterator[str]:
    """Yield the commands that draw our results as curves.

    Curves only exist for tables that contain training losses, or scores at more than two epochs of
    a run.
    """
    if any(column.metric.endswith("loss_100") for column in plan.table.columns):
        places = [plan.options.runs / run.name for run in plan.runs]
        folders = [str(place) for place in places if (place / LOG).is_file()] or map(str, places)
        metrics = {column.metric.rpartition("_")[0] for column in plan.table.columns}
        words = ["--over-steps", *folders, "--metric", ",".join(sorted(metrics))]
        yield quote_command(["ssl-bench", "table", *words, "--figure", "curves.png"])
    epochs = {split_address(address)[1] for address in plan.table.runs.values() if is_run(address)}
    if len(epochs) > 2:
        probed = [column for column in plan.table.columns if column.is_probed]
        selection = {
            "--task": dict.fromkeys(column.task for column in probed),
            "--metric": dict.fromkeys(column.metric for column in probed),
        }
        words = [word for flag, names in selection.items() for word in (flag, ",".join(names))]
        words = ["--over-epochs", *words, "--out", str(plan.options.out)]
        yield quote_command(["ssl-bench", "table", *words, "--figure", "curves.png"])


def _format_sizes(dataset_names: Sequence[str]) -> str:
    """Return text with the download size of each dataset and the total size, in GB.

    Unknown sizes are shown as "?".
    """
    sizes = {
        name: DATASET_INFOS[name].size / 1e9 for name in dataset_names if name in DATASET_INFOS
    }
    sizes |= {name: size for name, size in TRAINING_GB.items() if name in dataset_names}
    words = [
        f"{name} {sizes[name]:.3g} GB" if sizes.get(name) or name in TRAINING_GB else f"{name} ?"
        for name in dataset_names
    ]
    return f"{', '.join(words)} ({sum(sizes.values()):.3g} GB to download)"


def run_steps(
    plan: Plan, execute: Callable[[Sequence[str]], int], *, debug: bool
) -> Iterator[tuple[Step, Outcome]]:
    """Run the steps of a plan one after the other, and yield each step with its outcome.

    If a training run fails, the steps that need this run are skipped, and all other steps are still
    run.

    Args:
        plan: The plan for a published table.
        execute: Function that runs `ssl-bench` with the given arguments and returns its exit code.
        debug: Whether to raise the first error instead of reporting it.
    """
    failed: set[str] = set()
    for number, step in enumerate(plan.steps, 1):
        print_message("")
        print_message(f"step {number} of {len(plan.steps)}: {step.title}")
        if step.needed_run in failed:
            outcome = Outcome(0.0, 1, f"needs {step.needed_run}, which is not finished")
        else:
            print_message(f"$ ssl-bench {quote_command(step.arguments)}")
            outcome = run_and_catch(
                lambda arguments=step.arguments: execute(arguments), step.arguments[0], debug=debug
            )
        if step.trained_run is not None:
            if not outcome.exit_code:
                state = read_run_state(plan.options.runs / step.trained_run)
                if state is None or not state.is_finished:
                    error = "stopped before its end, run the same command again to continue"
                    outcome = replace(outcome, exit_code=1, error=error)
            if outcome.exit_code:
                failed.add(step.trained_run)
        yield step, outcome


def fill_table(plan: Plan) -> PaperTable:
    """Return the published table of a plan, with our values next to the published ones.

    Our values come from records (stored scores) and from training logs.
    """
    # Import it only here, because making a plan does not need torch.
    from ssl_bench.models import identify_encoder

    records, encoders, runs = _load_records(plan.options.out), {}, {}
    recorded = {record.encoder_id for record in records}
    for row, address in plan.checkpoints.items():
        if is_run(plan.table.runs[row]):
            runs[row] = Path(address)
        try:
            encoder = encoder_id(identify_encoder(address).identity())
        except CheckpointError:
            # The run has not saved an encoder yet.
            continue
        if encoder in recorded:
            encoders[row] = encoder
    store = ResultStore(plan.options.out)
    return paper_table(plan.table, records, store, encoders=encoders, runs=runs)
