"""`ssl-bench completion`: a script that lets the shell complete commands, flags and names."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ssl_bench.cli.parser import build_parser
from ssl_bench.composition.choices import choices
from ssl_bench.errors import MachineError

_NAMED = ("task", "dataset", "target")
_FILES = ("checkpoint", "checkpoints", "uris", "figure", "into", "manifest")
_FOLDERS = ("data_root", "out", "slurm_logs")

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


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the script for a shell."""
    del overrides
    print(completion_script(build_parser(), options.shell))
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell, with the names of probes and datasets as they are now.

    The parser is changed: it can no longer read lists with commas.

    Raises:
        MachineError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise MachineError("completion needs shtab; run: pip install shtab") from error
    names = {"task": [*choices("probe"), "all"], "dataset": choices("dataset")}
    for action in _actions(parser):
        if action.dest in _NAMED and shell == "bash":
            _complete_by(action, {"bash": f"_ssl_bench_{action.dest}"})
        elif action.dest in names and shell == "fish":
            _complete_by(action, {"fish": f"(__fish_complete_list , _ssl_bench_{action.dest})"})
        elif action.dest in _NAMED:
            action.choices = names.get(action.dest, names["dataset"])
        elif words := _words_of(action):
            action.choices = words
        elif action.dest in _FILES:
            _complete_by(action, shtab.FILE)
        elif action.dest in _FOLDERS:
            _complete_by(action, shtab.DIRECTORY)
    functions = _FUNCTIONS.get(shell, _no_functions)(names)
    return shtab.complete(parser, shell=shell, preamble=functions)


def _words_of(action: argparse.Action) -> list[str]:
    """What may stand behind a flag whose metavar lists it, such as fail|skip."""
    words = action.metavar
    if isinstance(words, str) and "|" in words and words.islower():
        return words.split("|")
    return []


def _complete_by(action: argparse.Action, function: Mapping[Any, Any]) -> None:
    # The attribute in which shtab looks for the name of a shell function.
    action.complete = function  # type: ignore[attr-defined]


def _functions(names: Mapping[str, Sequence[str]]) -> str:
    lines = [
        f'_ssl_bench_{kind}() {{ _ssl_bench_list "$1" {" ".join(valid)}; }}'
        for kind, valid in names.items()
    ]
    return "\n".join([_COMPLETE_A_LIST, *lines])


def _fish_functions(names: Mapping[str, Sequence[str]]) -> str:
    lines = [
        f"function _ssl_bench_{kind}; printf '%s\\n' {' '.join(valid)}; end"
        for kind, valid in names.items()
    ]
    return "\n".join(lines)


def _no_functions(names: Mapping[str, Sequence[str]]) -> str:
    del names
    return ""


_FUNCTIONS = {"bash": _functions, "fish": _fish_functions}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
