"""From a configuration to components; of nothing else than the classes of this suite.

A configuration names a class by its address, and building it runs its code. So a class is only
built if a file of `configs/` may name it: a dataclass that one of the three packages defines, or
what an installed package declares as an entry point of the group `ssl_bench.probe`,
`ssl_bench.dataset`, `ssl_bench.objective` or `ssl_bench.optimizer`.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module, metadata
from typing import Any

from ssl_bench.composition.fields import described, require, shown, takes_one_as_list
from ssl_bench.errors import BrokenFile, ConfigurationError
from ssl_bench.system.imports import PACKAGES, broken_file

TARGET = "_target_"
EXTENSIBLE = ("probe", "dataset", "objective", "optimizer")
# Keys by which Hydra calls things in other ways.
RESERVED = ("_args_", "_partial_", "_recursive_", "_convert_")


def constructed(value: Any, key: str) -> Any:
    """Plain values with every mapping that has a `_target_` replaced by what it constructs.

    Args:
        value: A mapping, a list or anything else, without references to other places.
        key: Where it stands in the configuration, such as "probe.crops".

    Raises:
        ConfigurationError: a class that must not be built, or arguments that it does not take.
    """
    if isinstance(value, list):
        return [constructed(item, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    parts = {str(name): constructed(item, _joined(key, name)) for name, item in value.items()}
    reserved = [name for name in RESERVED if name in parts]
    if reserved:
        raise ConfigurationError(f"{_joined(key, reserved[0])} is no key of a component")
    if TARGET not in parts:
        return parts
    kind = component_class(parts.pop(TARGET), _joined(key, TARGET))
    parts |= {
        item.name: [parts[item.name]]
        for item in fields(kind)
        if item.name in parts and takes_one_as_list(item.type, parts[item.name])
    }
    _check_arguments(kind, parts, key)
    return kind(**parts)


def component_class(address: Any, key: str) -> type:
    """The class at an address.

    Raises:
        ConfigurationError: it is no dataclass of this suite and no declared entry point.
        BrokenFile: its file cannot be imported.
    """
    package, name = str(address).partition(".")[0], str(address).rpartition(".")[2]
    if package in PACKAGES:
        found = _attribute(str(address))
        home = str(getattr(found, "__module__", "")).partition(".")[0]
        if isinstance(found, type) and is_dataclass(found) and home in PACKAGES:
            return found
    for point in (point for group in EXTENSIBLE for point in entry_points(group).values()):
        if str(address) == f"{point.module}.{point.attr}":
            return _loaded(point)
    raise ConfigurationError(
        f"{key}={shown(address)} is not built: {name!r} is neither a dataclass of "
        f"{', '.join(PACKAGES)} nor an entry point in a group such as ssl_bench.probe of an "
        "installed package; see docs/extending.md"
    )


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


def entry_point_call(point: metadata.EntryPoint) -> dict[str, Any]:
    """The configuration of a class of another package: its address alone, see `completed`.

    Raises:
        ConfigurationError: it is no dataclass, or a field has no default.
    """
    lacking = [
        item.name for item in fields(_loaded(point)) if item.init and _default(item) is MISSING
    ]
    if lacking:
        raise ConfigurationError(
            f"the entry point {point.name} = {point.value} needs a default for {lacking[0]}"
        )
    return {TARGET: f"{point.module}.{point.attr}"}


def completed(value: Any, key: str) -> Any:
    """Plain values in which every mapping with a `_target_` says all that its class takes.

    What it leaves out has the default of the class, so that whatever a class can be given can be
    overridden. Fields without a default stay out.

    Raises:
        ConfigurationError: a class that must not be built.
    """
    if isinstance(value, list):
        return [completed(item, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    said = {str(name): completed(item, _joined(key, name)) for name, item in value.items()}
    if TARGET not in said:
        return said
    kind = component_class(said[TARGET], _joined(key, TARGET))
    left = {name: value for name, value in defaults(kind).items() if name not in said}
    return said | {name: _plain(default) for name, default in left.items()}


def defaults(kind: type) -> dict[str, Any]:
    """What a dataclass has where nothing is said, by field; without fields that have no default."""
    values = {item.name: _default(item) for item in fields(kind) if item.init}
    return {name: value for name, value in values.items() if value is not MISSING}


def legal_values(value: Any, key: str = "") -> dict[str, tuple[str, str]]:
    """What every key below a `_target_` takes and means, by its full name.

    Such as "a number in [0, 1]" and the first sentence on it in the docstring of the class, if
    there is one.

    Raises:
        ConfigurationError: a class that must not be built.
    """
    if not isinstance(value, Mapping):
        return {}
    found = {}
    kinds, meanings = {}, {}
    if TARGET in value:
        kind = component_class(value[TARGET], _joined(key, TARGET))
        kinds = {item.name: item.type for item in fields(kind)}
        meanings = attributes(kind)
    for name, item in value.items():
        full = _joined(key, name)
        if name in kinds:
            is_choice = isinstance(item, Mapping) and TARGET in item
            takes = "" if is_choice else described(kinds[name])
            found[full] = takes, meanings.get(name, "")
        found |= legal_values(item, full)
    return found


def attributes(kind: type) -> dict[str, str]:
    """The first sentence on each attribute in the docstrings of a class and its bases."""
    found = {}
    for one in reversed(kind.__mro__):
        words = inspect.cleandoc(one.__dict__.get("__doc__") or "")
        section = re.split(r"^(?:Attributes|Args):\n", words, flags=re.MULTILINE)[-1]
        # An attribute begins after four blanks, what goes on after more.
        for text in re.split(r"^ {4}(?=\w)", section.partition("\n\n")[0], flags=re.MULTILINE)[1:]:
            name, _, meaning = " ".join(text.split()).partition(": ")
            found[name] = re.split(r"(?<=[\w)%`'\]]{2})\. ", meaning)[0].rstrip(".")
    return found


def _loaded(point: metadata.EntryPoint) -> type:
    try:
        found = point.load()
    # Whatever another package does while it is imported.
    except Exception as error:
        broken = broken_file(error, [point.module.partition(".")[0]])
        raise BrokenFile(
            f"the entry point {point.name} = {point.value}: {broken}, or uninstall "
            f"{point.dist.name if point.dist else point.module}"
        ) from error
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ConfigurationError(f"the entry point {point.name} = {point.value} is no dataclass")
    return found


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _plain(default: Any) -> Any:
    """A default as a file would say it; a dataclass as the call that makes it."""
    if is_dataclass(default):
        said = {item.name: getattr(default, item.name) for item in fields(default) if item.init}
        address = f"{type(default).__module__}.{type(default).__qualname__}"
        return {TARGET: address, **{name: _plain(item) for name, item in said.items()}}
    if isinstance(default, Mapping):
        return {str(name): _plain(item) for name, item in default.items()}
    # A list can be overridden where a tuple would be text.
    return [_plain(item) for item in default] if isinstance(default, tuple | list) else default


def _attribute(address: str) -> Any:
    """What stands at an address; None where nothing does.

    Raises:
        BrokenFile: the module is there and cannot be imported.
    """
    module, _, name = address.rpartition(".")
    try:
        return getattr(import_module(module), name, None) if module else None
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise broken_file(error) from error
    # Whatever a file does while it is imported.
    except Exception as error:
        raise broken_file(error) from error


def _check_arguments(kind: type, arguments: Mapping[str, Any], key: str) -> None:
    taken = [item for item in fields(kind) if item.init]
    names = [item.name for item in taken]
    for name in arguments:
        if name not in names:
            near = get_close_matches(name, names) or names
            raise ConfigurationError(
                f"unknown key {_joined(key, name)!r}; valid: {', '.join(near)}"
            )
    for item in taken:
        if item.name in arguments:
            require(_joined(key, item.name), item.type, arguments[item.name])
        elif _default(item) is MISSING:
            raise ConfigurationError(f"{_joined(key, item.name)} has no value")


def _joined(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
