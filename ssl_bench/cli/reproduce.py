"""`ssl-bench reproduce`: the runs and probes of a published table, and ours beside it."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.cli.dispatch import run
from ssl_bench.composition.choices import choices, require_choice
from ssl_bench.errors import ConfigurationError
from ssl_bench.reproduce import (
    Asked,
    Plan,
    all_experiments,
    carry_out,
    listing,
    plan_table,
    shown_plan,
    table_beside,
    tables_of,
)
from ssl_bench.system.escaping import printable_lines, shell_words
from ssl_bench.system.paths import expanded
from ssl_bench.system.progress import say
from ssl_bench.tables.printing.sheets import default_format, render_tables
from ssl_bench.tables.published import published_tables


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List the tables, or show the plan of one; run or print its steps.

    Returns:
        The exit code of the first step that failed, else 0.
    """
    acts = [name for name in ("run", "print", "table") if getattr(options, name)]
    tables = list(published_tables()) if options.name is None else tables_of(options.name)
    if options.name is None or len(tables) > 1:
        if acts or overrides:
            raise ConfigurationError(
                f"expected one PAPER/TABLE, got {options.name or 'none'}, which is {len(tables)}; "
                "`ssl-bench reproduce` lists them"
            )
        print(listing(tables))
        return 0
    plan = plan_table(tables[0], _asked(options, overrides))
    if options.run:
        plan.require_roots()
    if options.print:
        print("\n".join(shell_words(["ssl-bench", *step.words]) for step in plan.steps))
    elif options.run:
        return _run(plan, debug=options.debug)
    elif options.table:
        _print_table(plan)
    else:
        print(printable_lines(shown_plan(plan).splitlines()))
    return 0


def _asked(options: argparse.Namespace, overrides: Sequence[str]) -> Asked:
    return Asked(
        runs=Path(options.runs),
        out=Path(options.out),
        roots=_roots(options.data_root),
        overrides=tuple(overrides),
        device=options.device,
        rows=tuple(options.row or ()),
        datasets=tuple(options.dataset.split(",") if options.dataset else ()),
    )


def _roots(text: str | None) -> dict[str, str]:
    """Where images lie, from NAME=DIR,NAME=DIR."""
    if text is None:
        return {}
    known = sorted({*choices("dataset"), *(one.images for one in all_experiments().values())})
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals and root for _, equals, root in pairs):
        raise ConfigurationError(
            f"expected --data-root NAME=DIR,NAME=DIR, got {text!r}; names: {', '.join(known)}"
        )
    return {
        require_choice("images", name.strip(), known): str(expanded(root))
        for name, _, root in pairs
    }


def _run(plan: Plan, *, debug: bool) -> int:
    outcomes = []
    for outcome in carry_out(plan, run, debug=debug):
        outcomes.append(outcome)
        said = f": {outcome.error}" if outcome.error else ""
        say(f"{outcome.state} {len(outcomes)} of {len(plan.steps)}, {outcome.step.title}{said}")
    counts = Counter(outcome.state for outcome in outcomes)
    say("")
    say(f"{counts['finished']} steps finished, {counts['failed']} failed")
    if counts["failed"]:
        say("the same command again goes on with what is not finished")
    _print_table(plan)
    return next((one.exit_code for one in outcomes if one.exit_code), 0)


def _print_table(plan: Plan) -> None:
    print(render_tables([table_beside(plan)], default_format()))
