"""What can be chosen by name: files of `configs/`, what other packages add to them, papers' runs.

`configs/papers` has the published tables, and the runs that stand for their rows.
"""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ssl_bench.composition.fields import shown
from ssl_bench.errors import ConfigurationError, escape_braces, join_alternatives
from ssl_bench.system.paths import PACKAGE

LONG = 200
EXTENSIBLE_GROUPS = ("probe", "dataset", "objective", "optimizer")
"""Groups that installed packages add to, by entry points of `ssl_bench.probe` and so on."""
_SHOWN = 24
_GROUPS = ("model", "objective", "optimizer")
_OF_A_RUN = ("recipe", "images", "after", "set", "arms")
_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Experiment:
    """A run that `experiment=NAME` composes: a recipe and what is different from it.

    Attributes:
        name: Unique among all papers and all files of `configs/experiment`.
        recipe: Name of a file of `configs/experiment`.
        changes: Values by full key, such as "model.depth"; of "model" or "optimizer" a file's name.
        images: Name of the images that it trains on, such as "imagenet1k".
        after: Name of the run whose weights it begins with.
    """

    name: str
    recipe: str
    changes: Mapping[str, Any]
    images: str
    after: str | None = None

    def node(self) -> dict[str, Any]:
        """What a file of `configs/experiment` of this name would hold."""
        chosen = {key: value for key, value in self.changes.items() if key in _GROUPS}
        defaults = [self.recipe, *({f"override /{key}": chosen[key]} for key in chosen)]
        values: dict[str, Any] = {}
        for key, value in self.changes.items():
            if key not in chosen:
                *path, last = key.split(".")
                inner = values
                for name in path:
                    inner = inner.setdefault(name, {})
                inner[last] = value
        return {"defaults": defaults, **values}


@dataclass(frozen=True)
class Paper:
    """What a file of `configs/papers` says; `published` and `reproduce` read its tables.

    Attributes:
        name: Of the file, such as "cutting_the_skip".
        tables: As they stand there.
    """

    name: str
    title: str
    reference: str
    tables: tuple[Mapping[str, Any], ...] = ()
    experiments: Mapping[str, Experiment] = field(default_factory=dict)


def config_folder() -> Path:
    """The YAML files: beside the packages in a checkout, inside `ssl_bench` in a wheel."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def choices(group: str) -> list[str]:
    """Names of the files of a group, such as "probe", and of what is added to it elsewhere.

    Other packages add probes, the papers' runs are experiments.
    """
    runs = experiments() if group == "experiment" else ()
    return sorted({*files(group), *entry_points(group), *runs})


def unknown_key_error(key: str, valid: Iterable[str]) -> ConfigurationError:
    """Return the error on a key that does not exist, with the keys like it."""
    return unknown_name_error(f"unknown key {shown(key)}", key, valid, hint=("{near}={value}",))


def unknown_name_error(
    message: str, name: str, valid: Iterable[str], *, hint: Sequence[str]
) -> ConfigurationError:
    """Return the error on a name that does not exist, with the names like it, else all of them.

    The hint is what to type, with "{near}" in place of a name that exists.
    """
    close, names = _close(name, sorted(valid))
    if close:
        ways = [[word.replace("{near}", escape_braces(near)) for word in hint] for near in close]
        return ConfigurationError(message, hint=join_alternatives(*ways))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ConfigurationError(f"{message}; valid: {', '.join(names[:_SHOWN])}{more}")


def _close(name: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Return up to three names like the one that came, and those worth a look if there are none."""
    # Nothing is like a text of thousands of characters, and finding that out takes long.
    asked = name[:LONG].lower()
    # A name that was cut short, such as VOC, or a key under another part, such as probe.limit.
    last = asked.rpartition(".")[2]
    keys = [one for one in names if "." in asked and one.rpartition(".")[2] == last]
    close = difflib.get_close_matches(name[:LONG], keys or names, n=3, cutoff=0.0 if keys else 0.5)
    if not close and len(asked) > 2:
        names = [one for one in names if asked in one.lower()] or names
    return close, names


def require_choice(kind: str, name: str, valid: Sequence[str], *, hint: Sequence[str] = ()) -> str:
    """Return a name that is one of the valid ones.

    The hint is as `unknown_name_error` takes it. Without one, the flag named like the kind of name
    is recommended.

    Raises:
        ConfigurationError: It is not; the hint names the nearest.
    """
    if kind == "dataset" and name not in valid and Path(name).is_dir():
        raise ConfigurationError(
            f"expected the name of a dataset, got the folder {shown(name)}",
            hint=("--dataset", "folder", "--data-root", escape_braces(name)),
        )
    dataset, equals, folder = name.partition("=")
    if kind == "dataset" and equals and dataset in valid:
        raise ConfigurationError(
            f"expected the name of a dataset, got {shown(name)}",
            hint=("--dataset", escape_braces(dataset), "--data-root", escape_braces(folder)),
        )
    if name not in valid:
        typed = hint or (f"--{kind.lstrip('-')}", "{near}")
        raise unknown_name_error(f"unknown {kind} {shown(name)}", name, valid, hint=typed)
    return name


def parse_names(kind: str, text: str, valid: list[str]) -> list[str]:
    """The names of a list with commas, or all of them.

    Raises:
        ConfigurationError: an unknown name.
    """
    if text == "all":
        return valid
    return [require_choice(kind, name.strip(), [*valid, "all"]) for name in text.split(",")]


def files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """What installed packages add to a group of `configs/`, by name."""
    return _entry_points(tuple(sys.path)).get(group, {}) if group in EXTENSIBLE_GROUPS else {}


@cache
def _entry_points(path: tuple[str, ...]) -> dict[str, dict[str, metadata.EntryPoint]]:
    """Those of all groups; kept, because every installed package is asked."""
    del path
    found = metadata.entry_points()
    return {
        group: {point.name: point for point in found.select(group=f"ssl_bench.{group}")}
        for group in EXTENSIBLE_GROUPS
    }


def papers(folder: Path | None = None) -> tuple[Paper, ...]:
    """All papers of a folder of configurations, by name, read once.

    Raises:
        ConfigurationError: two runs share a name, or a file says what is not understood.
    """
    return _papers(folder or config_folder())


@cache
def _papers(folder: Path) -> tuple[Paper, ...]:
    found = tuple(map(_read, sorted((folder / "papers").glob("*.yaml"))))
    names = [name for paper in found for name in paper.experiments]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"expected every run to have its own name, got {twice[0]} twice")
    return found


def experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """The runs of all papers by name, those that are recipes themselves among them."""
    return {name: run for paper in papers(folder) for name, run in paper.experiments.items()}


def _read(file: Path) -> Paper:
    said = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    known = {"title", "reference", "runs", "tables"}
    if not isinstance(said, dict) or set(said) - known:
        raise ConfigurationError(f"{file} expects the keys {', '.join(sorted(known))}")
    runs = [run for stem, one in (said.get("runs") or {}).items() for run in _runs(file, stem, one)]
    return Paper(
        name=file.stem,
        title=said["title"],
        reference=said["reference"],
        tables=tuple(said.get("tables") or ()),
        experiments={run.name: run for run in runs},
    )


def _runs(file: Path, stem: str, said: Mapping[str, Any]) -> Iterator[Experiment]:
    """What arms have in common, under the name of the stem, and each arm, under its own."""
    strange = [key for key in said if key not in _OF_A_RUN]
    if strange or not _NAME.fullmatch(stem):
        raise ConfigurationError(
            f"{file}: run {stem} expects the keys {', '.join(_OF_A_RUN)}, got {strange}"
        )
    arms: dict[str, Any] = {"": {}, **(said.get("arms") or {})}
    for arm, own in arms.items():
        yield Experiment(
            name=f"{stem}_{arm}" if arm else stem,
            recipe=said.get("recipe", stem),
            changes={
                **said.get("set", {}),
                **{key: value for key, value in own.items() if key != "after"},
            },
            images=said["images"],
            after=own.get("after", said.get("after")),
        )
