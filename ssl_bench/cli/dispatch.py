"""From the words that are typed to the command that they name."""

import argparse
import difflib
from collections.abc import Sequence
from importlib import import_module

from ssl_bench.cli.parser import WITH_OVERRIDES, build_parser
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.paths import expanded

_PATHS = ("out", "runs", "into", "figure", "manifest", "slurm_logs")


def run(arguments: Sequence[str]) -> int:
    """Read the arguments and run their command; returns its exit code.

    Raises:
        SslBenchError: the arguments or what they ask for are wrong.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(_with_values_joined(arguments))
    for name in _PATHS:
        if (text := getattr(options, name, None)) is not None:
            setattr(options, name, str(expanded(text)))
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown:
        flags = [flag for flag in _flags(parser, options.command) if flag != "-h"]
        close = difflib.get_close_matches(unknown[0], flags, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"flags: {', '.join(flags)}"
        raise ConfigurationError(f"unknown argument {unknown[0]!r}; {hint}")
    if overrides and options.command not in WITH_OVERRIDES:
        raise ConfigurationError(f"`ssl-bench {options.command}` takes no {overrides[0]!r}")
    # Imported here because torch alone takes seconds and `--help` needs none of it.
    return import_module(f"ssl_bench.cli.{options.command}").command(options, overrides)


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


def _flags(parser: argparse.ArgumentParser, command: str) -> list[str]:
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [flag for a in subparsers.choices[command]._actions for flag in a.option_strings]
