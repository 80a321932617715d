"""What can be chosen by name: files of `configs/`, and what other packages add to them."""

import difflib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from ssl_bench.composition.fields import shown
from ssl_bench.composition.papers import Experiment, experiments
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.paths import PACKAGE

LONG = 200
EXTENSIBLE = ("probe", "dataset", "objective", "optimizer")
"""Groups that installed packages add to, by entry points of `ssl_bench.probe` and so on."""
_SHOWN = 24


def config_folder() -> Path:
    """The YAML files: beside the packages in a checkout, inside `ssl_bench` in a wheel."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def choices(group: str) -> list[str]:
    """Names of the files of a group, such as "probe", and of what is added to it elsewhere.

    Other packages add probes, the papers' runs are experiments.
    """
    return sorted({*files(group), *entry_points(group), *runs_of_papers(group)})


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: names like the one that came, else all of them."""
    names = sorted(valid)
    # Nothing is like a text of thousands of characters, and finding that out takes long.
    asked = name[:LONG].lower()
    # A name that was cut short, such as VOC, or a key under another part, such as probe.limit.
    last = asked.rpartition(".")[2]
    keys = [one for one in names if "." in asked and one.rpartition(".")[2] == last]
    close = difflib.get_close_matches(name[:LONG], keys or names, n=3, cutoff=0.0 if keys else 0.5)
    if not close and len(asked) > 2:
        names = [one for one in names if asked in one.lower()] or names
    if close:
        return f"did you mean {', '.join(close)}?"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"valid: {', '.join(names[:_SHOWN])}{more}"


def require_choice(kind: str, name: str, valid: Sequence[str]) -> str:
    """Give back a name that is one of the valid ones.

    Raises:
        ConfigurationError: it is not; the message names the nearest.
    """
    if name not in valid:
        raise ConfigurationError(f"unknown {kind} {shown(name)}; {nearest(name, valid)}")
    return name


def asked_names(kind: str, text: str, valid: list[str]) -> list[str]:
    """The names of a list with commas, or all of them.

    Raises:
        ConfigurationError: an unknown name.
    """
    if text == "all":
        return valid
    return [require_choice(kind, name.strip(), [*valid, "all"]) for name in text.split(",")]


def files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]


def runs_of_papers(group: str) -> dict[str, Experiment]:
    return experiments(config_folder()) if group == "experiment" else {}


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """What installed packages add to a group of `configs/`, by name."""
    return _entry_points(tuple(sys.path)).get(group, {}) if group in EXTENSIBLE else {}


@cache
def _entry_points(path: tuple[str, ...]) -> dict[str, dict[str, metadata.EntryPoint]]:
    """Those of all groups; kept, because every installed package is asked."""
    del path
    found = metadata.entry_points()
    return {
        group: {point.name: point for point in found.select(group=f"ssl_bench.{group}")}
        for group in EXTENSIBLE
    }
