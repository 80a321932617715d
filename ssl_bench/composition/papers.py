"""The files of `configs/papers`: published tables, and the runs that stand for their rows."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ssl_bench.errors import ConfigurationError

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
    """What a file says; `published` and `reproduce` read its tables.

    Attributes:
        name: Of the file, such as "cutting_the_skip".
        tables: As they stand there.
    """

    name: str
    title: str
    reference: str
    tables: tuple[Mapping[str, Any], ...] = ()
    experiments: Mapping[str, Experiment] = field(default_factory=dict)


@cache
def papers(folder: Path) -> tuple[Paper, ...]:
    """All papers of a folder of configurations, by name, read once.

    Raises:
        ConfigurationError: two runs share a name, or a file says what is not understood.
    """
    found = tuple(_read(file) for file in sorted((folder / "papers").glob("*.yaml")))
    names = [name for paper in found for name in paper.experiments]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"expected every run to have its own name, got {twice[0]} twice")
    return found


def experiments(folder: Path) -> dict[str, Experiment]:
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
