"""From YAML files and overrides to components; below this file there is no DictConfig."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssl_bench.errors import ConfigurationError


def config_folder() -> Path:
    """The YAML files: beside the packages in a checkout, inside `ssl_bench` in a wheel."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"


def choices(group: str) -> list[str]:
    """Names of the files of a group, such as "probe" or "dataset"."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: names like the one that came, else all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"valid: {', '.join(names)}"


def require_choice(kind: str, name: str, valid: Sequence[str]) -> str:
    """Give back a name that is one of the valid ones.

    Raises:
        ConfigurationError: it is not; the message names the nearest.
    """
    if name not in valid:
        raise ConfigurationError(f"unknown {kind} {name!r}; {nearest(name, valid)}")
    return name


def compose_config(root: str, overrides: Sequence[str]) -> DictConfig:
    """Compose one root file of `configs/` with Hydra overrides.

    Args:
        root: Name of the file without suffix, "probing" or "pretraining".
        overrides: Such as "probe=tokencut" or "train.epochs=3".

    Raises:
        ConfigurationError: unknown group choice, key or a value of the wrong type, in one line.
    """
    for override in overrides:
        _check_choice(root, override)
    is_choice = [_is_choice(override) for override in overrides]
    groups = [o for o, choice in zip(overrides, is_choice, strict=True) if choice]
    values = [o for o, choice in zip(overrides, is_choice, strict=True) if not choice]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        defaults = _defaults(config_folder(), root, tuple(groups))
        for override in values:
            _check_key(override, defaults)
        config = _compose(root, [*groups, *values]) if values else deepcopy(defaults)
    for override in values:
        _check_type(override, defaults, config)
    return config


def build(config: DictConfig) -> Any:
    """Construct the component a `_target_` names, with plain Python values.

    Raises:
        ConfigurationError: the component refuses a value.
    """
    try:
        return instantiate(config, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        # Hydra's `++KEY=VALUE` can name an argument that the component does not have.
        if isinstance(cause, ValueError) or "unexpected keyword argument" in str(cause):
            raise ConfigurationError(_one_line(cause)) from error
        raise
    except OmegaConfBaseException as error:
        raise ConfigurationError(_one_line(error)) from error


def as_plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as JSON types."""
    return {
        str(key): value
        for key, value in dict(OmegaConf.to_container(config, resolve=True)).items()  # type: ignore[arg-type]
    }


def has_key(config: DictConfig, key: str) -> bool:
    return key in _flatten(config)


def keys(config: DictConfig) -> list[str]:
    """What can be overridden, such as "probe.epochs"."""
    return [key for key in _flatten(config) if not key.endswith("_target_")]


@cache
def _defaults(folder: Path, root: str, groups: tuple[str, ...]) -> DictConfig:
    """What the files say; composed once, because it takes a tenth of a second each time."""
    del folder
    return _compose(root, groups)


def _compose(root: str, overrides: Sequence[str]) -> DictConfig:
    try:
        return compose(root, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(_one_line(error)) from error


def _is_choice(override: str) -> bool:
    group = override.partition("=")[0].lstrip("+~").partition("@")[0]
    # No file has a longer name, and asking for one is an error of the system.
    return len(group) < 200 and (config_folder() / group).is_dir()


def _check_choice(root: str, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigurationError(f"expected KEY=VALUE, got {override!r}; see `ssl-bench --help`")
    try:
        OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigurationError(
            f"cannot read {override!r}; write lists as [1,2] and quote text: KEY=\"'a b'\""
        ) from error
    if _is_choice(override) and value not in (valid := choices(key.partition("@")[0])):
        raise ConfigurationError(f"unknown {key}={value} for {root}; {nearest(value, valid)}")


def _check_key(override: str, defaults: DictConfig) -> None:
    key = override.partition("=")[0]
    known = _flatten(defaults)
    parents = {name.rsplit(".", depth)[0] for name in known for depth in range(name.count(".") + 1)}
    if key.startswith("+") or key in known or key in parents or _below_open_mapping(key, known):
        return
    raise ConfigurationError(f"unknown key {key!r}; {nearest(key, known)}")


def _below_open_mapping(key: str, known: Mapping[str, Any]) -> bool:
    """Whether a parent of the key is an empty mapping, which takes any key."""
    parent = key.rpartition(".")[0]
    return known.get(parent) == {}


def _check_type(override: str, defaults: DictConfig, config: DictConfig) -> None:
    key = override.partition("=")[0]
    expected, came = _flatten(defaults).get(key), _flatten(config).get(key)
    if expected is None or came is None or _same_kind(expected, came):
        return
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}.get(
        type(expected), "a list such as [1,2]"
    )
    raise ConfigurationError(f"{key} expects {kind} (default {expected}), got {came!r}")


def _same_kind(expected: Any, came: Any) -> bool:
    if isinstance(expected, bool) or isinstance(came, bool):
        return isinstance(expected, bool) and isinstance(came, bool)
    if isinstance(expected, float):
        return isinstance(came, (int, float))
    if isinstance(expected, str):
        # One name or several, such as the facets of tokencut.
        return all(isinstance(item, str) for item in (came if isinstance(came, list) else [came]))
    if isinstance(expected, list):
        return isinstance(came, list) and all(_same_kind(expected[0], c) for c in came if expected)
    return isinstance(came, type(expected))


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
