"""List the names that users can choose: config files, entry points, and pretraining runs.

This module imports neither Hydra nor PyTorch, so that `--help` and shell completion stay fast.
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

from ssl_bench.composition.fields import format_value
from ssl_bench.errors import (
    BrokenFileError,
    ConfigurationError,
    broken_file_error,
    escape_braces,
    join_alternatives,
)
from ssl_bench.system.files import PACKAGE_FOLDER

MAX_NAME_LENGTH = 200
EXTENSIBLE_GROUPS = ("model", "probe", "dataset", "objective", "optimizer")
"""Groups of configurations to which other packages can add classes by entry points."""
PROBING_GROUPS = ("probe", "dataset")
RUN_GROUPS = ("model", "objective", "optimizer", "experiment")
"""Groups of config files that `ssl-bench pretrain` selects with words such as `model=timm`."""
_MAX_LISTED = 24
_FILE_GROUPS = ("model", "objective", "optimizer")
_RUN_KEYS = ("recipe", "images", "after", "set", "arms")
_RUN_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Experiment:
    """A pretraining run of a paper, which users choose with `experiment=NAME`.

    Attributes:
        name: Unique name of the run. It may equal the name of the recipe only if the run changes no
            settings.
        recipe: Name of the file of `configs/experiment` that contains the settings of the run.
        changes: Settings that differ from the recipe, by full key such as "model.depth". The keys
            "model", "objective" and "optimizer" choose a config file.
        images: Name of the training images, such as "imagenet1k".
        after: Name of another run, whose final weights are the initial weights of this run, or
            None.
    """

    name: str
    recipe: str
    changes: Mapping[str, Any]
    images: str
    after: str | None = None

    def to_config(self) -> dict[str, Any]:
        """Return the settings of the run as the content of a file in `configs/experiment`.

        The recipe becomes an entry of Hydra's list `defaults`. Settings with dotted keys become
        nested dictionaries.
        """
        files = {key: value for key, value in self.changes.items() if key in _FILE_GROUPS}
        config: dict[str, Any] = {
            "defaults": [self.recipe, *({f"override /{key}": files[key]} for key in files)]
        }
        for key, value in self.changes.items():
            if key not in files:
                *parents, name = key.split(".")
                owner = config
                for parent in parents:
                    owner = owner.setdefault(parent, {})
                owner[name] = value
        return config


@dataclass(frozen=True)
class Paper:
    """A paper with published tables and pretraining runs, read from a file of `configs/papers`.

    Attributes:
        name: File name without its suffix, such as "cutting_the_skip".
        title: Title of the paper.
        reference: Authors, venue and year.
        tables: Published tables as plain YAML values, which `tables/published.py` parses.
        experiments: Pretraining runs by name.
    """

    name: str
    title: str
    reference: str
    tables: tuple[Mapping[str, Any], ...] = ()
    experiments: Mapping[str, Experiment] = field(default_factory=dict)


def config_folder() -> Path:
    """Return the folder of configuration files.

    The folder is `configs` in a git checkout, and `ssl_bench/configs` in an installed wheel.
    """
    inside = PACKAGE_FOLDER / "configs"
    return inside if inside.is_dir() else PACKAGE_FOLDER.parent / "configs"


def choices(group: str) -> list[str]:
    """Return all names that users can choose in a group of configurations, sorted.

    For example, the group "probe" contains "knn". The names are those of config files and of entry
    points in installed packages. The group "experiment" also contains pretraining runs of papers.
    """
    runs = experiments() if group == "experiment" else ()
    return sorted({*config_names(group), *entry_points(group), *runs})


def config_names(group: str) -> list[str]:
    """Return the names of the YAML files in the folder `group` of `configs/`, without suffixes."""
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group in all installed packages, by name.

    An entry point is an object, such as a class, that a package declares in its metadata. In the
    metadata, the group "probe" is called "ssl_bench.probe".
    """
    points = _entry_points(tuple(sys.path), f"ssl_bench.{group}")
    return {point.name: point for point in points}


@cache
def _entry_points(path: tuple[str, ...], group: str) -> tuple[metadata.EntryPoint, ...]:
    return tuple(_all_entry_points(path).select(group=group))


@cache
def _all_entry_points(path: tuple[str, ...]) -> Any:
    # Reading the metadata of all installed packages is slow. `path` is only a key of the cache.
    del path
    return metadata.entry_points()


def load_entry_point(point: metadata.EntryPoint) -> Any:
    """Import the object that an entry point refers to.

    Raises:
        BrokenFileError: The module cannot be imported, or does not contain the object.
    """
    try:
        return point.load()
    # Importing another package can raise any exception.
    except Exception as error:
        reason = broken_file_error(error, [point.module.partition(".")[0]])
        if isinstance(error, AttributeError) and error.obj is sys.modules.get(point.module):
            # The module does not contain the object. The traceback ends in the standard library.
            reason = error
        package = point.dist.name if point.dist else point.module
        raise BrokenFileError(
            f"cannot load the entry point {point.name} = {point.value} of the package {package}: "
            f"{reason}"
        ) from error


def unknown_key_error(key: str, valid: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown configuration key.

    The hint of the error suggests up to three similar keys, or else a command that lists all keys.

    Args:
        key: The unknown key.
        valid: All valid keys.
    """
    message, known = f"unknown key {format_value(key)}", sorted(valid)
    if not _nearest_names(key, known):
        return ConfigurationError(message, hint=("ssl-bench", "keys"))
    return unknown_name_error(message, key, known, hint=("{near}={value}",))


def unknown_name_error(
    message: str, name: str, valid: Iterable[str], *, hint: Sequence[str]
) -> ConfigurationError:
    """Return the error for an unknown name, with a hint that suggests what to type instead.

    If no valid name is similar, the error has no hint, and its message lists the valid names.

    Args:
        message: What is wrong.
        name: The unknown name.
        valid: All valid names.
        hint: Words to type, such as ("--task", "{near}"). Up to three similar valid names replace
            "{near}".
    """
    names = sorted(valid)
    if nearest := _nearest_names(name, names):
        ways = [[word.replace("{near}", escape_braces(near)) for word in hint] for near in nearest]
        return ConfigurationError(message, hint=join_alternatives(*ways))
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ConfigurationError(f"{message} (valid: {', '.join(names[:_MAX_LISTED])}{more})")


def _nearest_names(name: str, names: Sequence[str]) -> list[str]:
    """Return up to three of `names` that are similar to `name`. The most similar name is first."""
    # Cut long names, because the time of difflib grows with the square of the length.
    name = name[:MAX_NAME_LENGTH].lower()
    # Compare the last parts of keys first, so that probe.limt is more similar to data.limit than to
    # probe.tau.
    last_parts = {known: known.rpartition(".")[2] for known in names}
    similar = difflib.get_close_matches(name.rpartition(".")[2], {*last_parts.values()}, cutoff=0.5)
    similar = similar[:1] if "." in name else similar
    candidates = [known for known in names if last_parts[known] in similar]
    return difflib.get_close_matches(name, candidates, cutoff=0.0)


def require_choice(kind: str, name: str, valid: Sequence[str], *, hint: Sequence[str] = ()) -> str:
    """Return a name if it is valid, or else raise ConfigurationError.

    Args:
        kind: What the name stands for, such as "dataset", for the error message.
        name: The name to check.
        valid: All valid names.
        hint: Words that the error suggests to type, such as ("--task", "{near}"). Similar valid
            names replace "{near}". By default, the flag is `--KIND`.
    """
    if name in valid:
        return name
    if kind == "dataset" and Path(name).is_dir():
        raise ConfigurationError(
            f"expected the name of a dataset, got the folder {format_value(name)}",
            hint=("--dataset", "folder", "--data-root", escape_braces(name)),
        )
    typed = hint or (f"--{kind.lstrip('-')}", "{near}")
    raise unknown_name_error(f"unknown {kind} {format_value(name)}", name, valid, hint=typed)


def parse_names(kind: str, text: str, valid: list[str]) -> list[str]:
    """Split a comma-separated list of names, and check each name. "all" stands for all names.

    Args:
        kind: What a name stands for, such as "task", for error messages.
        text: The list, such as "knn,tokencut".
        valid: All valid names.
    """
    if text.strip() == "all":
        return valid
    names = [name.strip() for name in text.split(",")]
    allowed = [*valid, "all"] if len(names) == 1 else valid
    return [require_choice(kind, name, allowed) for name in names]


def papers(folder: Path | None = None) -> tuple[Paper, ...]:
    """Return the papers that YAML files in the subfolder `papers` describe, sorted by file name.

    Args:
        folder: Folder of configurations (default: `configs`).
    """
    return _papers(folder or config_folder())


@cache
def _papers(folder: Path) -> tuple[Paper, ...]:
    found = tuple(map(_read_paper, sorted((folder / "papers").glob("*.yaml"))))
    names = [name for paper in found for name in paper.experiments]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"two pretraining runs of {folder / 'papers'} have the name {repeated[0]}. Rename one"
        )
    return found


def experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """Return the pretraining runs of all papers, by the name of the run.

    Args:
        folder: Folder of configurations (default: `configs`).
    """
    return {name: run for paper in papers(folder) for name, run in paper.experiments.items()}


def _read_paper(file: Path) -> Paper:
    content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    known = {"title", "reference", "runs", "tables"}
    if not isinstance(content, dict) or set(content) - known:
        raise ConfigurationError(
            f"{file} must be a YAML mapping with no keys other than {', '.join(sorted(known))}"
        )
    runs = [
        run
        for stem, values in (content.get("runs") or {}).items()
        for run in _read_runs(file, stem, values)
    ]
    return Paper(
        name=file.stem,
        title=content["title"],
        reference=content["reference"],
        tables=tuple(content.get("tables") or ()),
        experiments={run.name: run for run in runs},
    )


def _read_runs(file: Path, stem: str, values: Mapping[str, Any]) -> Iterator[Experiment]:
    """Yield one of a paper's pretraining runs, then the runs that change some of its settings.

    Args:
        file: File of the paper, for error messages.
        stem: Name of the run, such as "vit". Names of the other runs begin with it, such as
            "vit_relu".
        values: Content of the paper's file for this run. The key `arms` contains the other runs: it
            maps the end of a name, such as "relu", to the settings that this run changes.
    """
    if not _RUN_NAME.fullmatch(stem):
        raise ConfigurationError(
            f"{file}: expected a run name of lower-case letters, digits and _, got {stem}"
        )
    if unknown := [key for key in values if key not in _RUN_KEYS]:
        raise ConfigurationError(
            f"{file}: the run {stem} has the unknown keys {', '.join(map(str, unknown))}, expected "
            f"only {', '.join(_RUN_KEYS)}"
        )
    arms: dict[str, Any] = {"": {}, **(values.get("arms") or {})}
    for arm, changes in arms.items():
        yield Experiment(
            name=f"{stem}_{arm}" if arm else stem,
            recipe=values.get("recipe", stem),
            changes={
                **values.get("set", {}),
                **{key: value for key, value in changes.items() if key != "after"},
            },
            images=values["images"],
            after=changes.get("after", values.get("after")),
        )
