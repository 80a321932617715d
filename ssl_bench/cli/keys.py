"""`ssl-bench keys`: every KEY=VALUE with what it takes and its default."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from omegaconf import DictConfig

from ssl_bench.composition.choices import choices, nearest, require_choice
from ssl_bench.composition.compose import compose_config
from ssl_bench.composition.compose import keys as keys_of
from ssl_bench.composition.key_lines import key_lines
from ssl_bench.errors import ConfigurationError
from ssl_bench.planning import SHARED, probing_config
from ssl_bench.system.progress import say

_RUN = ("model", "objective", "optimizer", "experiment")
_PROBING = ("probe", "dataset")
_GROUPS = (*_PROBING, *_RUN)
_MOST_LISTED = 50
_COMMANDS = {
    "probe": "`ssl-bench probe` and `sweep`",
    "dataset": "`ssl-bench probe`, `sweep`, `features` and `data check`",
}
_ALL = "all of one run; also train, data or monitor alone"


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a line for each key of what is named, or what can be named."""
    if options.target is None:
        print("\n".join(_listing()))
    else:
        lines = _lines(options.target, overrides)
        say(f"keys of {_COMMANDS.get(options.target.partition('.')[0], '`ssl-bench pretrain`')}")
        print("\n".join(_fitted(lines) if sys.stdout.isatty() else lines))
    return 0


def _fitted(lines: Sequence[str]) -> list[str]:
    """What is wider than the terminal goes on in the next line, behind some blanks."""
    width = max(40, shutil.get_terminal_size().columns)
    found = []
    for line in lines:
        text, _, words = line.partition("  ")
        short = line if len(line) <= width else f"{text}  {words.strip()}"
        found += textwrap.wrap(short, width, subsequent_indent="    ", break_on_hyphens=False)
    return found


def _listing() -> list[str]:
    lines = [f"pretrain         {_ALL}"]
    for group in _GROUPS:
        names = choices(group)
        many = f"{len(names)} of them: ssl-bench keys {group}"
        lines += _wrapped(f"{group}.NAME", many if len(names) > _MOST_LISTED else ", ".join(names))
    return [*lines, "`ssl-bench keys probe.tokencut` lists the keys of one, with what they take"]


def _wrapped(head: str, words: str) -> list[str]:
    found = textwrap.wrap(words, 100, break_on_hyphens=False)
    return [f"{before:<16} {part}" for before, part in zip_longest([head], found, fillvalue="")]


def _lines(target: str, overrides: Sequence[str]) -> list[str]:
    """The keys that a name like "probe.tokencut", "train" or "train.epochs" stands for.

    Raises:
        ConfigurationError: nothing is called so.
    """
    group, _, rest = target.partition(".")
    if group in _PROBING and rest:
        name, _, field = rest.partition(".")
        return _of_probing(group, name, field, overrides)
    if group in _RUN and rest.partition(".")[0] in choices(group):
        name, _, field = rest.partition(".")
        config = compose_config("pretraining", [f"{group}={name}", *overrides])
        return _within(config, () if group == "experiment" else (_joined(group, field),))
    if target == "experiment":
        return _wrapped("experiment.NAME", ", ".join(choices(target)))
    if group == "experiment":
        require_choice(group, rest.partition(".")[0], choices(group))
    if group in _PROBING:
        raise ConfigurationError(f"name one: {', '.join(f'{group}.{n}' for n in choices(group))}")
    config = compose_config("pretraining", overrides)
    return _within(config, () if target == "pretrain" else (target,))


def _of_probing(group: str, name: str, field: str, overrides: Sequence[str]) -> list[str]:
    require_choice("task" if group == "probe" else group, name, choices(group))
    if group == "dataset":
        config = compose_config("data", [f"dataset={name}", *overrides])
        return _within(config, (_joined("dataset", field), *([] if field else ["data"])))
    config = probing_config(name, "toy", overrides)
    shared = [] if field else ["data", "seed", "corrupt", "dtype"]
    return _within(config, (_joined("probe", field), *shared))


def _joined(group: str, field: str) -> str:
    return f"{group}.{field}" if field else group


def _within(config: DictConfig, within: Sequence[str]) -> list[str]:
    lines = key_lines(config, within, SHARED)
    if not lines:
        named = {f"{one}.{within[0]}" for one in _GROUPS if within[0] in choices(one)}
        if named:
            raise ConfigurationError(f"did you mean `ssl-bench keys {' or '.join(sorted(named))}`?")
        known = {key.rsplit(".", depth)[0] for key in keys_of(config) for depth in (0, 1)}
        hint = nearest(within[0], {"pretrain", "probe", "dataset", *_RUN, *known})
        raise ConfigurationError(f"no key is called {within[0]!r}; {hint}")
    return lines
