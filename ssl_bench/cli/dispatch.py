"""From the words that are typed to the command that they name."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module

from ssl_bench.cli.mistakes import near_flag, require_known_words
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
    require_known_words(parser, commands, arguments)
    options, rest = parser.parse_known_args(_with_values_joined(arguments))
    for name in _PATHS:
        if (text := getattr(options, name, None)) is not None:
            setattr(options, name, str(expanded(text)))
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown:
        flags = [f for a in commands[options.command]._actions for f in a.option_strings]
        hint = near_flag(options.command, flags, unknown[0])
        raise ConfigurationError(f"unknown argument {unknown[0]!r}; {hint}")
    if overrides and options.command not in WITH_OVERRIDES:
        raise ConfigurationError(f"`ssl-bench {options.command}` takes no {overrides[0]!r}")
    overrides = _with_short_forms(options, overrides)
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
