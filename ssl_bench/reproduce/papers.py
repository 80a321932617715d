"""The tables that can be asked for, by the names PAPER and PAPER/TABLE."""

import difflib
from collections.abc import Sequence
from typing import Any

import yaml

from ssl_bench.composition.choices import config_folder
from ssl_bench.composition.papers import Experiment, Paper, experiments, papers
from ssl_bench.errors import ConfigurationError
from ssl_bench.tables.published import PublishedTable, published_tables


def all_papers() -> tuple[Paper, ...]:
    return papers(config_folder())


def all_experiments() -> dict[str, Experiment]:
    return experiments(config_folder())


def tables_of(name: str) -> list[PublishedTable]:
    """The table of a name such as "cutting_the_skip/table2", or all of a paper.

    Raises:
        ConfigurationError: there is none.
    """
    known = {full_name(table): table for table in published_tables()}
    found = [table for full, table in known.items() if name in (full, table.name, table.paper)]
    if found:
        return found
    names = [*known, *dict.fromkeys(table.paper for table in known.values())]
    close = difflib.get_close_matches(name[:200], names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "`ssl-bench reproduce` lists them"
    raise ConfigurationError(f"expected PAPER/TABLE or PAPER, got {name[:200]!r}; {hint}")


def full_name(table: PublishedTable) -> str:
    return f"{table.paper}/{table.name}"


def runs_of(table: PublishedTable) -> list[Experiment]:
    """The runs behind the rows of a table, each behind the one that it begins with."""
    known = all_experiments()
    found: dict[str, Experiment] = {}
    for address in filter(is_run, table.runs.values()):
        run = known[split_address(address)[0]]
        if run.after is not None:
            found.setdefault(run.after, known[run.after])
        found.setdefault(run.name, run)
    return list(found.values())


def recipe_values(name: str) -> dict[str, Any]:
    """What the file of a recipe says itself, by keys such as "train.epochs"."""
    text = (config_folder() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    said = yaml.load(text, yaml.CSafeLoader)
    return {
        f"{section}.{key}": value
        for section, values in said.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }


def split_address(address: str) -> tuple[str, int | None]:
    """Run and epoch of NAME or NAME@EPOCH."""
    name, _, epoch = address.partition("@")
    return name, int(epoch) if epoch else None


def is_run(address: str) -> bool:
    """Whether a row is a run of this suite; else it is weights that somebody published."""
    return ":" not in address


def listing(tables: Sequence[PublishedTable]) -> str:
    """Papers with their tables, a line each."""
    lines = []
    for paper in all_papers():
        own = [table for table in tables if table.paper == paper.name]
        if own:
            lines += ["", f"{paper.title} ({paper.reference})"]
            names = [full_name(table) for table in own]
            width = max(map(len, names))
            lines += [
                f"  {name:{width}}  {table.where}: {table.title}; {_extent(table)}"
                for name, table in zip(names, own, strict=True)
            ]
    return "\n".join(lines[1:])


def _extent(table: PublishedTable) -> str:
    if not table.runs:
        return f"{len(table.rows)} rows, no run is set down"
    runs = runs_of(table)
    if not runs:
        return f"{len(table.rows)} rows, published weights"
    here = "all" if len(table.runs) == len(table.rows) else f"{len(table.runs)} of them"
    return f"{len(table.rows)} rows, {here} by {len(runs)} runs"
