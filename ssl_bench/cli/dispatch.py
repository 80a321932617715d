"""From the words that are typed to the command that they name, or to what may have been meant."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from ssl_bench.cli.parser import WITH_OVERRIDES, build_parser
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.paths import expanded

_PATHS = ("out", "runs", "into", "figure", "manifest", "slurm_logs")
_PROBING = {"limit": "data.limit", "seed": "seed"}
_SHORT: Mapping[str, Mapping[str, str]] = {
    "features": {"limit": "data.limit"},
    "probe": _PROBING | {"pictures": "probe.panels"},
    "sweep": _PROBING,
    "pretrain": {
        "limit": "data.limit",
        "seed": "train.seed",
        "batch_size": "train.batch_size",
        "on_bad_image": "data.on_bad_image",
    },
}
"""What a flag is short for, by command; --batch-size of probes depends on the tasks."""


def run(arguments: Sequence[str]) -> int:
    """Read the arguments and run their command; returns its exit code.

    Raises:
        SslBenchError: the arguments or what they ask for are wrong.
    """
    parser = build_parser()
    commands = dict(
        next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    )
    _require_known_words(parser, commands, arguments)
    options, rest = parser.parse_known_args(_with_values_joined(arguments))
    for name in _PATHS:
        if (text := getattr(options, name, None)) is not None:
            setattr(options, name, str(expanded(text)))
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown:
        hint = _near_flag(_flags(commands[options.command]), unknown[0])
        raise ConfigurationError(f"unknown argument {unknown[0]!r}; {hint}")
    if overrides and options.command not in WITH_OVERRIDES:
        raise ConfigurationError(f"`ssl-bench {options.command}` takes no {overrides[0]!r}")
    overrides = _with_short_forms(options, overrides)
    # Imported here because torch alone takes seconds and `--help` needs none of it.
    return import_module(f"ssl_bench.cli.{options.command}").command(options, overrides)


def _require_known_words(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    words: Sequence[str],
) -> None:
    """Refuse a command or a flag that there is not, before something else is found missing."""
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None:
        return
    if words[0].startswith("-") and any(word in commands for word in words):
        raise ConfigurationError(f"the command comes first: ssl-bench COMMAND {words[0]} ...")
    if command not in commands:
        close = difflib.get_close_matches(command[:100], commands, n=1)
        listed = f"commands: {', '.join(commands)}; `ssl-bench --help` has examples"
        hint = f"did you mean `ssl-bench {close[0]}`?" if close else listed
        raise ConfigurationError(f"unknown command {command!r}; {hint}")
    known = [*_flags(commands[command]), *_flags(parser)]
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and not any(one.startswith(flag) for one in known):
            hint = _near_flag(_flags(commands[command]), flag)
            raise ConfigurationError(f"unknown argument {word!r}; {hint}")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag != "-h"]


def _near_flag(flags: Sequence[str], word: str) -> str:
    """What may have been meant by a word that is none of the flags of a command."""
    root = next((flag for flag in ("--data-root", "--out") if flag in flags), None)
    if root and not word.startswith("-") and Path(word).is_dir():
        return f"a folder is given as {root} {word}"
    name, names = word[:100].lstrip("-").replace("_", "-"), [flag.lstrip("-") for flag in flags]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.65):
        return f"did you mean --{close[0]}?"
    return f"flags: {', '.join(flags)}; what has none is KEY=VALUE, which `ssl-bench keys` lists"


def _with_values_joined(arguments: Sequence[str]) -> list[str]:
    """`--layer -1,0` as one word, because argparse takes -1,0 for a flag.

    And `--checkpoint A B C` as three, as a shell leaves `--checkpoint runs/x/epoch*`.
    """
    joined: list[str] = []
    for word in arguments:
        last = joined[-1] if joined else ""
        if last in ("--layer", "--checkpoint"):
            joined[-1] = f"{last}={word}"
        elif last.startswith("--checkpoint=") and not ("=" in word or word.startswith("-")):
            joined.append(f"--checkpoint={word}")
        else:
            joined.append(word)
    return joined


def _with_short_forms(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The overrides behind those that flags are short for."""
    given = {override.partition("=")[0]: override for override in overrides}
    said = []
    for flag, key in _SHORT.get(options.command, {}).items():
        value = getattr(options, flag)
        if value is not None and key in given:
            word = flag.replace("_", "-")
            raise ConfigurationError(
                f"--{word} {value} is short for {key}={value}; leave it or {given[key]} out"
            )
        if value is not None:
            said.append(f"{key}={value}")
    return [*said, *overrides]
