"""From YAML files and overrides to components; below this file there is no DictConfig."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssl_bench.composition.components import (
    RESERVED,
    TARGET,
    completed,
    constructed,
    entry_point_call,
    entry_points,
    legal_values,
)
from ssl_bench.composition.fields import shown
from ssl_bench.composition.papers import Experiment, experiments
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.paths import PACKAGE

_LONG = 200
_SHOWN = 24


def config_folder() -> Path:
    """The YAML files: beside the packages in a checkout, inside `ssl_bench` in a wheel."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def choices(group: str) -> list[str]:
    """Names of the files of a group, such as "probe", and of what is added to it elsewhere.

    Other packages add probes, the papers' runs are experiments.
    """
    return sorted({*_files(group), *entry_points(group), *_runs_of_papers(group)})


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: names like the one that came, else all of them."""
    names = sorted(valid)
    # Nothing is like a text of thousands of characters, and finding that out takes long.
    close = difflib.get_close_matches(name[:_LONG], names, n=3, cutoff=0.5)
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


def compose_config(root: str, overrides: Sequence[str]) -> DictConfig:
    """Compose one root file of `configs/` with Hydra overrides.

    Args:
        root: Name of the file without suffix, "probing", "pretraining" or "data".
        overrides: Such as "probe=tokencut" or "train.epochs=3".

    Raises:
        ConfigurationError: unknown group choice, key or a value of the wrong type, in one line.
    """
    parsed = [_parsed(override) for override in overrides]
    for key, value in parsed:
        _check_choice(root, key, value)
    chosen = [(key, value) for key, value in parsed if _is_choice(key)]
    defaults = _defaults(config_folder(), root, tuple(f"{key}={value}" for key, value in chosen))
    config = deepcopy(defaults)
    for key, value in parsed:
        if not _is_choice(key):
            _set(config, key, value)
    _require_same_components(defaults, config)
    return config


def with_root(overrides: Sequence[str], root: str | None) -> list[str]:
    """The overrides behind one for the folder of the data, which may hold any character."""
    quoted = [] if root is None else ["data.root='" + root.replace("'", "\\'") + "'"]
    return [*quoted, *overrides]


def build(config: DictConfig) -> Any:
    """Construct the component a `_target_` names, with plain Python values.

    Raises:
        ConfigurationError: the component refuses a value.
    """
    return constructed(as_plain(config), str(config._get_full_key(None)))


def as_plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as JSON types.

    Raises:
        ConfigurationError: a value that a file refers to has none, such as `data.root=???`.
    """
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigurationError(_one_line(error)) from error
    return {str(key): value for key, value in dict(values).items()}  # type: ignore[arg-type]


def has_key(config: DictConfig, key: str) -> bool:
    return key in _flatten(config)


def keys(config: DictConfig) -> list[str]:
    """What can be overridden, such as "probe.epochs"."""
    return [key for key in _flatten(config) if not key.endswith("_target_")]


def key_lines(configs: Sequence[DictConfig]) -> list[str]:
    """Every key with its value and what it takes, one a line, as "train.seed=0  a whole ...".

    A line that several configurations have in common stands once.
    """
    return list(dict.fromkeys(line for config in configs for line in _key_lines(config)))


def _key_lines(config: DictConfig) -> list[str]:
    legal = legal_values(OmegaConf.to_container(config, resolve=False))
    said = {key: f"{key}={json.dumps(_flatten(config)[key])}" for key in keys(config)}
    width = min(max(map(len, said.values())), _LONG)
    return [f"{text:{width}}  {legal.get(key, '')}".rstrip() for key, text in said.items()]


@cache
def _defaults(folder: Path, root: str, groups: tuple[str, ...]) -> DictConfig:
    """What the files say, and the classes that they name where the files say nothing.

    Composed once, because it takes a tenth of a second each time.
    """
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            said = OmegaConf.to_container(compose(root, list(groups)), resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(_one_line(error)) from error
    whole = DictConfig(completed(said, ""))
    OmegaConf.set_struct(whole, True)
    return whole


def _files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]


def _runs_of_papers(group: str) -> dict[str, Experiment]:
    return experiments(config_folder()) if group == "experiment" else {}


@cache
def _groups(folder: Path) -> frozenset[str]:
    """Folders of `configs/` whose files are choices, such as "probe/segmentation_protocol"."""
    below = (path.parent.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return frozenset(below) - {"."}


def _is_choice(key: str) -> bool:
    return key in _groups(config_folder())


def _parsed(override: str) -> tuple[str, Any]:
    """Key and value of an override, in Hydra's grammar without what sweeps over values."""
    key, equals, text = override.partition("=")
    if not equals:
        came = shown(override)
        raise ConfigurationError(f"expected KEY=VALUE, got {came}; see `ssl-bench --help`")
    # An environment variable would stand in records, where others read it.
    if "${" in text:
        raise ConfigurationError(
            f"{key[:_LONG]} expects a value, got {shown(text)}, which refers to another place; "
            'write the value itself, as the shell does for "$NAME"'
        )
    try:
        parsed = OverridesParser.create().parse_override(f"key={text}")
        if not parsed.is_sweep_override():
            return key, parsed.value()
    # Also a number of thousands of digits, or lists in a thousand lists.
    except (HydraException, ValueError, RecursionError):
        pass
    raise ConfigurationError(
        f"cannot read {shown(override)}; write lists as [1,2] and quote text: KEY=\"'a b'\""
    )


def _check_choice(root: str, key: str, value: Any) -> None:
    if not _is_choice(key):
        return
    if value not in (valid := choices(key)):
        raise ConfigurationError(
            f"unknown {key}={shown(value)} for {root}; {nearest(str(value), valid)}"
        )
    if value in _files(key):
        return
    store = ConfigStore.instance().store
    if value in (runs := _runs_of_papers(key)):
        store(group=key, name=value, node=runs[value].node(), package="_global_")
    else:
        store(group=key, name=value, node=entry_point_call(entry_points(key)[value]))


def _set(config: DictConfig, key: str, value: Any) -> None:
    known = _flatten(config)
    parents = {name.rsplit(".", depth)[0] for name in known for depth in range(name.count(".") + 1)}
    if key not in known and key not in parents:
        raise ConfigurationError(f"unknown key {shown(key)}; {nearest(key, keys(config))}")
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        raise ConfigurationError(
            f"{key} does not take {shown(value)}: {_one_line(error)}"
        ) from error


def _require_same_components(defaults: DictConfig, config: DictConfig) -> None:
    """Refuse values that change what is built: the choice of a file alone decides that."""
    expected, came = (dict(_mappings(c)) for c in (defaults, config))
    for key in sorted(expected.keys() | came.keys()):
        if key not in came:
            raise ConfigurationError(
                f"{key} is no value; override its keys, such as {key}.KEY=VALUE"
            )
        if came[key] != expected.get(key, {}):
            names = ", ".join(came[key] or expected[key])
            raise ConfigurationError(
                f"{key} cannot take {names}, which name code to run; choose a file of configs/ "
                "such as probe=pca, or see docs/extending.md for classes of your own"
            )


def _mappings(config: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key of every mapping with those of its entries that say what is built."""

    def walk(key: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(value, dict):
            yield key, {name: value[name] for name in value if name in (TARGET, *RESERVED)}
        items = value.items() if isinstance(value, dict) else ()
        items = enumerate(value) if isinstance(value, list) else items
        for name, item in items:
            yield from walk(f"{key}.{name}" if key else str(name), item)

    return walk("", OmegaConf.to_container(config, resolve=False))


def _flatten(config: DictConfig) -> dict[str, Any]:
    """Dotted key -> value for every leaf; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), item)
        else:
            leaves[prefix] = value

    walk("", OmegaConf.to_container(config, resolve=False))
    return leaves


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
