"""`ssl-bench completion`: a script that lets the shell complete commands, flags and names."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ssl_bench.cli.parser import build_parser
from ssl_bench.composition.choices import choices
from ssl_bench.errors import MachineError

_NAMED = ("task", "dataset", "target")
_FILES = ("checkpoint", "checkpoints", "uris", "figure", "manifest")
_FOLDERS = ("data_root", "into", "out", "slurm_logs")

# What is behind the last comma is completed, what is before it stays.
_COMPLETE_A_LIST = """\
_ssl_bench_list() {
  local typed="$1" head=""
  shift
  [[ "$typed" == *,* ]] && head="${typed%,*},"
  compgen -P "$head" -W "$*" -- "${typed##*,}"
}
_ssl_bench_target() {
  _ssl_bench_dataset "$1"
  compgen -d -- "$1"
}
"""


def command(options: argparse.Namespace) -> int:
    """Print the script for a shell, with the names of probes and datasets as they are now.

    Raises:
        MachineError: shtab is not installed.
    """
    parser, shell = build_parser(), options.shell
    try:
        import shtab
    except ImportError as error:
        raise MachineError("completion needs shtab; run: pip install shtab") from error
    names = {"task": [*choices("probe"), "all"], "dataset": choices("dataset")}
    for action in _actions(parser):
        # The attribute in which shtab looks for the name of a shell function.
        complete: Any = None
        if action.dest in _NAMED and shell == "bash":
            complete = {"bash": f"_ssl_bench_{action.dest}"}
        elif action.dest in names and shell == "fish":
            complete = {"fish": f"(__fish_complete_list , _ssl_bench_{action.dest})"}
        elif action.dest in _NAMED:
            action.choices = names.get(action.dest, names["dataset"])
        elif isinstance(meta := action.metavar, str) and "|" in meta and meta.islower():
            # Such as fail|skip.
            action.choices = meta.split("|")
        elif action.dest in _FILES:
            complete = shtab.FILE
        elif action.dest in _FOLDERS:
            complete = shtab.DIRECTORY
        if complete:
            action.complete = complete  # pyrefly: ignore[missing-attribute]
    print(shtab.complete(parser, shell=shell, preamble=_functions(shell, names)))
    return 0


def _functions(shell: str, names: Mapping[str, Sequence[str]]) -> str:
    """What offers names of tasks and datasets; shells without such functions get lists of them."""
    if shell == "bash":
        return _COMPLETE_A_LIST + "\n".join(
            f'_ssl_bench_{kind}() {{ _ssl_bench_list "$1" {" ".join(valid)}; }}'
            for kind, valid in names.items()
        )
    if shell == "fish":
        return "\n".join(
            f"function _ssl_bench_{kind}; printf '%s\\n' {' '.join(valid)}; end"
            for kind, valid in names.items()
        )
    return ""


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
