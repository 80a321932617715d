"""`ssl-bench completion`: print a shell script that completes commands, flags and names."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ssl_bench.cli.parser import build_parser
from ssl_bench.composition.choices import choices
from ssl_bench.errors import MachineError

_LIST_ARGUMENTS = ("task", "dataset", "target")
_FILE_ARGUMENTS = ("checkpoint", "checkpoints", "uris", "figure", "manifest")
_FOLDER_ARGUMENTS = ("data_root", "into", "out", "over_steps", "run_folders", "slurm_logs")

# In a comma-separated list, complete only the last element and keep the others.
_BASH_FUNCTIONS = """\
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
    """Print a shell script that completes commands, flags, and names of probes and datasets."""
    parser, shell = build_parser(), options.shell
    try:
        import shtab
    except ImportError as error:
        raise MachineError("completion needs shtab. Run: pip install shtab") from error
    names = {"task": [*choices("probe"), "all"], "dataset": choices("dataset")}
    for action in _list_actions(parser):
        # shtab reads the name of a shell function from the attribute `complete`.
        complete: Any = None
        metavar = action.metavar
        if action.dest in _LIST_ARGUMENTS and shell == "bash":
            complete = {"bash": f"_ssl_bench_{action.dest}"}
        elif action.dest in names and shell == "fish":
            complete = {"fish": f"(__fish_complete_list , _ssl_bench_{action.dest})"}
        elif action.dest in _LIST_ARGUMENTS:
            action.choices = names.get(action.dest, names["dataset"])
        elif isinstance(metavar, str) and "|" in metavar and metavar.islower():
            # The metavar lists the choices, for example "fail|skip".
            action.choices = metavar.split("|")
        elif action.dest in _FILE_ARGUMENTS:
            complete = shtab.FILE
        elif action.dest in _FOLDER_ARGUMENTS:
            complete = shtab.DIRECTORY
        if complete:
            action.complete = complete  # pyrefly: ignore[missing-attribute]
    print(shtab.complete(parser, shell=shell, preamble=_shell_functions(shell, names)))
    return 0


def _shell_functions(shell: str, names: Mapping[str, Sequence[str]]) -> str:
    """Return the code of shell functions that list tasks and datasets for the completion script.

    Only bash and fish need such functions. For other shells, the code is empty. `names` contains
    the names to complete, for the keys "task" and "dataset".
    """
    if shell == "bash":
        return _BASH_FUNCTIONS + "\n".join(
            f'_ssl_bench_{kind}() {{ _ssl_bench_list "$1" {" ".join(valid)}; }}'
            for kind, valid in names.items()
        )
    if shell == "fish":
        return "\n".join(
            f"function _ssl_bench_{kind}; printf '%s\\n' {' '.join(valid)}; end"
            for kind, valid in names.items()
        )
    return ""


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_actions(command)
        else:
            yield action
