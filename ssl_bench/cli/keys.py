"""`ssl-bench keys`: list KEY=VALUE options with their legal values, defaults and meaning."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from ssl_bench.composition.choices import PROBING_GROUPS, RUN_GROUPS, choices
from ssl_bench.system.output import print_message

_MAX_LISTED = 50
_COMMANDS = {
    "probe": "`ssl-bench probe` and `sweep`",
    "dataset": "`ssl-bench probe`, `sweep`, `features` and `data check`",
}


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print one line for each config key in a part of the configuration (the target).

    For example, the target "probe.tokencut" has all keys of the probe `tokencut`. Without a target,
    list the possible targets.
    """
    if options.target is None:
        print("\n".join(_list_targets()))
        return 0
    if options.target == "experiment":
        print("\n".join(_list_names("experiment.NAME", choices("experiment"))))
        return 0
    # Import it only here, because describing keys imports torch, which takes seconds.
    from ssl_bench.cli.key_descriptions import describe_target

    lines = describe_target(options.target, overrides)
    group = options.target.partition(".")[0]
    print_message(f"keys of {_COMMANDS.get(group, '`ssl-bench pretrain`')}")
    print("\n".join(_wrap_lines(lines) if sys.stdout.isatty() else lines))
    return 0


def _wrap_lines(lines: Sequence[str]) -> list[str]:
    """Wrap lines that are wider than the terminal, and remove their alignment spaces."""
    width = max(40, shutil.get_terminal_size().columns)
    wrapped = []
    for line in lines:
        text, _, description = line.partition("  ")
        unpadded = line if len(line) <= width else f"{text}  {description.strip()}"
        wrapped += textwrap.wrap(unpadded, width, subsequent_indent="    ", break_on_hyphens=False)
    return wrapped


def _list_targets() -> list[str]:
    lines = [
        "pretrain         all keys of a run (train, data or monitor: only the keys of this group)"
    ]
    for group in (*PROBING_GROUPS, *RUN_GROUPS):
        names = choices(group)
        count = f"{len(names)} names, run `ssl-bench keys {group}` to list them"
        lines += _list_names(f"{group}.NAME", count if len(names) > _MAX_LISTED else names)
    return [*lines, "Run `ssl-bench keys probe.tokencut` to list the keys of one target."]


def _list_names(label: str, names: str | Sequence[str]) -> list[str]:
    text = names if isinstance(names, str) else ", ".join(names)
    wrapped = textwrap.wrap(text, 100, break_on_hyphens=False)
    return [f"{start:<16} {line}" for start, line in zip_longest([label], wrapped, fillvalue="")]
