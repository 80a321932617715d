"""Compose configurations with Hydra, and build components from them.

A configuration is a plain dictionary. OmegaConf objects are only used inside this module.

The key `_target_` contains the import path of a class. Building the class runs its code, so only
two kinds of classes are allowed. The first kind is a dataclass of `ssl_bench`, `probes` or
`pretrain`. The second kind is a dataclass that an installed package declares as an entry point of a
group such as `ssl_bench.probe`.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache, reduce
from importlib import import_module, metadata
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssl_bench.composition.choices import (
    EXTENSIBLE_GROUPS,
    MAX_NAME_LENGTH,
    choices,
    config_folder,
    config_names,
    entry_points,
    experiments,
    load_entry_point,
    unknown_key_error,
    unknown_name_error,
)
from ssl_bench.composition.fields import describe_type, format_value, require_type
from ssl_bench.errors import (
    PACKAGES,
    BrokenFileError,
    ConfigurationError,
    broken_file_error,
    escape_braces,
)
from ssl_bench.system.output import to_plain_json

TARGET = "_target_"
# Keys that have a special meaning in Hydra.
_RESERVED = (TARGET, "_args_", "_partial_", "_recursive_", "_convert_")
# Overrides that remove the settings of Hydra itself, which this suite does not use. They make
# composing a quarter faster.
_REMOVE_HYDRA = [
    f"~hydra/{group}"
    for group in ("help", "hydra_help", "hydra_logging", "job_logging", "launcher", "sweeper")
]
# Old import paths of classes that have been moved, with their current import paths.
_MOVED = {"pretrain.copying.objective.Copying": "pretrain.papers.copying.Copying"}
_SETTING = re.compile(r"\$([a-z_]+)")
_REFERENCE = re.compile(r"\$\{([a-z_.]+)\}")


def compose_config(root: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a configuration from a root file in `configs/`, and apply overrides.

    The order of the overrides does not matter. Overrides that choose a file, such as
    `probe=tokencut`, are applied before overrides that set a value, such as `probe.tau=0.3`.

    Args:
        root: Name of the root file without its suffix: "probing", "pretraining" or "data".
        overrides: KEY=VALUE texts in Hydra's grammar.

    Returns:
        A configuration with all keys. It includes the default values of the classes whose import
        paths are in keys `_target_`.

    Raises:
        ConfigurationError: An override has an unknown key, chooses an unknown file or has a syntax
            error. Values are only checked when the component is built.
    """
    parsed = [_parse_override(override) for override in overrides]
    chosen, files, settings = dict(parsed), dict[str, str](), []
    for key, value in parsed:
        group = choice_group(key, chosen) or key
        if _is_group(group):
            _require_file(root, group, key, value)
            files[group] = value
        else:
            settings.append((key, value))
    cached = _compose_files(config_folder(), root, tuple(files.items()))
    config = _map_leaves(cached, lambda leaf: leaf)
    for key, value in settings:
        _set_value(config, key, value)
    return _map_leaves(config, lambda leaf: _resolve_reference(leaf, config))


def choice_group(key: str, chosen: Mapping[str, Any]) -> str | None:
    """Return the folder of `configs/` in which a dotted key, such as "probe.loss", selects a file.

    For example, if `chosen` is {"probe": "segmentation"}, the key "probe.loss" selects a file in
    the folder "probe/segmentation/loss". If the key selects no file, such as "probe.tau", or has no
    dot, the result is None.

    Args:
        key: Config key.
        chosen: Chosen file of each group, such as the task for "probe".
    """
    owner, _, field = key.partition(".")
    group = f"{owner}/{chosen.get(owner)}/{field}"
    return group if field and _is_group(group) else None


def add_data_root(overrides: Sequence[str], root: str | None) -> list[str]:
    """Return KEY=VALUE overrides, preceded by one that sets the data folder `data.root` to `root`.

    If `root` is None, the overrides are returned unchanged.
    """
    quoted = [] if root is None else ["data.root='" + root.replace("'", "\\'") + "'"]
    return [*quoted, *overrides]


def config_to_yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False)


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to a dictionary with dotted keys, such as "probe.tau".

    An empty mapping is not flattened and remains the value of its key.
    """
    values = {}
    for name, item in config.items():
        key = _join(prefix, name)
        values |= flatten_config(item, key) if isinstance(item, dict) and item else {key: item}
    return values


def has_key(config: Mapping[str, Any], key: str) -> bool:
    return key in flatten_config(config)


def list_keys(config: Mapping[str, Any]) -> list[str]:
    """Return all keys whose value a user can set, such as "probe.training.epochs"."""
    names = flatten_config(config)
    keys = [key for key in names if not key.endswith(TARGET)]
    # A class without fields has no keys below it, but its own key can choose another file.
    owners = [key.removesuffix(f".{TARGET}") for key in names if key.endswith(f".{TARGET}")]
    return keys + [owner for owner in owners if not any(k.startswith(f"{owner}.") for k in keys)]


def read_file(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file of `configs/`.

    The files in its list `defaults` are not merged, although Hydra would merge them.
    """
    values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    return values


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _parse_override(override: str) -> tuple[str, Any]:
    """Parse an override KEY=VALUE in Hydra's grammar, and return the key and the value.

    Sweeps over several values are not allowed.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigurationError(
            f"expected KEY=VALUE, got {format_value(override)}", hint=("ssl-bench", "keys")
        )
    # "${" can insert an environment variable, which may be secret. Its value would be stored with
    # the results, which users publish. "???" stands for a missing value.
    if "${" in text or text == "???":
        raise ConfigurationError(
            f"{key[:MAX_NAME_LENGTH]} needs a value instead of the placeholder {format_value(text)}"
        )
    value = _parse_value(override, text)
    if reserved := [name for name in _all_names({key: value}) if name in _RESERVED]:
        raise ConfigurationError(
            f"{key[:MAX_NAME_LENGTH]} cannot set {', '.join(reserved)}, because this value selects "
            "code to run. To add a class of your own, follow docs/extending.md",
            hint=("ssl-bench", "keys"),
        )
    return key, value


def _parse_value(override: str, text: str) -> Any:
    try:
        parsed = _override_parser().parse_override(f"key={text}")
        if not parsed.is_sweep_override():
            return parsed.value()
    # A number with thousands of digits raises ValueError. A thousand nested lists raise
    # RecursionError.
    except (HydraException, ValueError, RecursionError):
        pass
    # The grammar reserves braces, brackets and "~", but a path may contain them.
    if override.partition("=")[0].rpartition(".")[2] == "root":
        return text
    raise ConfigurationError(
        f"cannot read {format_value(override)} (write a list as [1,2], and text with spaces or "
        "commas as KEY=\"'a b'\")"
    )


@cache
def _override_parser() -> OverridesParser:
    return OverridesParser.create()


def _all_names(value: Any) -> Iterator[str]:
    """Yield all names in the keys of nested mappings and lists.

    A dotted key contains several names. For example, "probe.tau" contains "probe" and "tau".
    """
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from str(name).split(".")
        yield from _all_names(item)
    for item in value if isinstance(value, (list, tuple)) else ():
        yield from _all_names(item)


def _is_group(key: str) -> bool:
    return key in _groups(config_folder())


@cache
def _groups(folder: Path) -> frozenset[str]:
    """Return the subfolders of `configs/` with YAML files, such as "probe/segmentation/loss"."""
    groups = (path.parent.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return frozenset(groups) - {"."}


def _require_file(root: str, group: str, key: str, name: Any) -> None:
    """Check that a user can choose `name` in a group of config files, or else raise an error.

    Entry points and the pretraining runs of papers have no file in `configs/`. If `name` has no
    file, it is registered with Hydra, so that Hydra can merge its values.

    Args:
        root: Name of the root file, such as "probing", for the error message.
        group: Folder of `configs/` that contains the valid files, such as "probe".
        key: Config key that chooses the file, for the error message.
        name: The chosen name.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if name not in (known := choices(group)):
        message = f"unknown {key}={format_value(name)} for {root}"
        hint = (f"{escape_braces(key)}={{near}}",)
        raise unknown_name_error(message, str(name), known, hint=hint)
    if name in config_names(group):
        return
    store = ConfigStore.instance().store
    if group == "experiment" and name in (runs := experiments()):
        store(group=group, name=name, node=runs[name].to_config(), package="_global_")
        return
    point = entry_points(group)[name]
    store(group=group, name=name, node={TARGET: f"{point.module}.{point.attr}"})


@cache
def _compose_files(folder: Path, root: str, files: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Merge a root file of `configs/` with the chosen files, and add default values of all classes.

    The result is cached, because Hydra takes 0.1 seconds.

    Args:
        folder: The folder `configs/`.
        root: Name of the root file, such as "probing".
        files: Chosen files, as pairs of a folder and a name such as ("probe", "tokencut").
    """
    # A file that contains a class, such as probe/segmentation/loss/histogram.yaml, must replace the
    # whole field `loss`. Hydra would merge it with the `loss` of the protocol (a preset), so the
    # file is inserted after Hydra has merged all other files.
    nested = {
        group: read_file(folder / group / f"{name}.yaml") for group, name in files if "/" in group
    }
    replacing = {group: content for group, content in nested.items() if TARGET in content}
    merged = [f"{group}={name}" for group, name in files if group not in replacing]
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = compose(root, [*merged, *_REMOVE_HYDRA])
        values: Any = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    for group, content in replacing.items():
        owner, _, field = group.split("/")
        values[owner][field] = content
    return fill_defaults(values, "")


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dictionaries and lists in which `change` has replaced each leaf."""
    if isinstance(value, dict):
        return {name: _map_leaves(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_map_leaves(item, change) for item in value]
    return change(value)


def _resolve_reference(leaf: Any, config: Mapping[str, Any]) -> Any:
    """Return the value of the key to which a leaf such as "${data.root}" refers.

    A leaf without a reference is returned unchanged. OmegaConf supports more kinds of references,
    but takes milliseconds for each configuration.

    Raises:
        ConfigurationError: The leaf contains another kind of reference, such as "${data.root}/a".
    """
    if not isinstance(leaf, str) or "${" not in leaf:
        return leaf
    reference = _REFERENCE.fullmatch(leaf)
    if reference is None:
        raise ConfigurationError(
            f"a configuration file contains {leaf}, expected only a key, such as ${{data.root}}"
        )
    return reduce(getitem, reference[1].split("."), config)


def _set_value(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key of a configuration in place.

    If the value is a mapping, only the keys that it contains are set.
    """
    *parents, name = key.split(".")
    owner: Any = config
    for parent in parents:
        owner = owner.get(parent) if isinstance(owner, dict) else None
    if not isinstance(owner, dict) or name not in owner:
        raise unknown_key_error(key, list_keys(config))
    if isinstance(owner[name], dict) and isinstance(value, Mapping):
        for inner, item in value.items():
            _set_value(config, f"{key}.{inner}", item)
    elif isinstance(owner[name], dict) and owner[name]:
        raise ConfigurationError(
            f"{key} is a group of keys, so you cannot set its value", hint=("ssl-bench", "keys")
        )
    else:
        owner[name] = value


def build(config: Mapping[str, Any], part: str = "") -> Any:
    """Create the objects that a configuration describes, such as a probe.

    Args:
        config: The configuration, as `compose_config` returns it.
        part: Key of the object to create, such as "probe". If it is "", return a dictionary with
            the values of all keys.
    """
    return instantiate(config[part] if part else config, part)


def instantiate(value: Any, key: str) -> Any:
    """Replace each mapping that has a key `_target_` by an instance of a class.

    `_target_` contains the import path of the class. All other keys of the mapping are arguments of
    the class. All other values are returned unchanged.

    Args:
        value: A configuration or a part of it, without references such as ${data.root}.
        key: Config key of the value, for error messages.
    """
    if isinstance(value, list):
        return [instantiate(item, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    arguments = {str(name): instantiate(item, _join(key, name)) for name, item in value.items()}
    if TARGET not in arguments:
        return arguments
    cls = import_component(arguments.pop(TARGET), _join(key, TARGET))
    parameters = {item.name: item for item in fields(cls) if item.init}
    for name in arguments:
        if name not in parameters:
            known = [_join(key, parameter) for parameter in parameters]
            raise unknown_key_error(_join(key, name), known)
    for name, item in parameters.items():
        if name in arguments:
            arguments[name] = require_type(_join(key, name), item.type, arguments[name])
        elif get_default(item) is MISSING:
            raise ConfigurationError(
                f"expected a value for {_join(key, name)}, which has no default value"
            )
    return cls(**arguments)


def import_component(import_path: Any, key: str) -> type:
    """Import a class that a configuration may use, from its import path.

    Args:
        import_path: Import path, such as "probes.knn.KNN". It must belong to a dataclass of this
            repository or to an entry point of an installed package.
        key: Config key of the import path, for error messages.

    Raises:
        ConfigurationError: The class is not allowed.
        BrokenFileError: The class cannot be imported, or an entry point is no dataclass.
    """
    import_path = _MOVED.get(str(import_path), import_path)
    package, name = str(import_path).partition(".")[0], str(import_path).rpartition(".")[2]
    if package in PACKAGES:
        cls = _import_attribute(str(import_path))
        home = str(getattr(cls, "__module__", "")).partition(".")[0]
        if isinstance(cls, type) and is_dataclass(cls) and home in PACKAGES:
            return cls
    for point in (point for group in EXTENSIBLE_GROUPS for point in entry_points(group).values()):
        if str(import_path) == f"{point.module}.{point.attr}":
            return _load_component(point)
    raise ConfigurationError(
        f"{key}={format_value(import_path)} is not allowed: {name!r} is neither a dataclass of "
        f"{', '.join(PACKAGES)} nor an entry point of an installed package (docs/extending.md)"
    )


def _import_attribute(import_path: str) -> Any:
    """Import an object such as "probes.knn.KNN", or return None if it does not exist."""
    module, _, name = import_path.rpartition(".")
    try:
        return getattr(import_module(module), name, None) if module else None
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise broken_file_error(error) from error
    # Importing a file can raise any exception.
    except Exception as error:
        raise broken_file_error(error) from error


def _load_component(point: metadata.EntryPoint) -> type:
    cls = load_entry_point(point)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise BrokenFileError(
            f"the entry point {point.name} = {point.value} must be a dataclass. Correct or "
            "uninstall its package"
        )
    return cls


def fill_defaults(value: Any, key: str) -> Any:
    """Return a configuration in which mappings with a key `_target_` have all default values.

    `_target_` contains the import path of a class. The default values of the class are added, so
    that users can override all of its fields.

    Args:
        value: A configuration or a part of it, which is not modified.
        key: Config key of the value, for error messages.
    """
    if isinstance(value, list):
        return [fill_defaults(item, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    values = {str(name): fill_defaults(item, _join(key, name)) for name, item in value.items()}
    if TARGET not in values:
        return values
    cls = import_component(values[TARGET], _join(key, TARGET))
    missing = {name: item for name, item in defaults(cls).items() if name not in values}
    return values | {name: _to_plain(default) for name, default in missing.items()}


def defaults(cls: type) -> dict[str, Any]:
    """Return the default value of each field that has one, by the name of the field."""
    values = {item.name: get_default(item) for item in fields(cls) if item.init}
    return {name: value for name, value in values.items() if value is not MISSING}


def get_default(item: Field[Any]) -> Any:
    """Return the default value of a field, or `MISSING` if it has none."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def _to_plain(default: Any) -> Any:
    """Convert a default value to YAML types.

    A dataclass instance becomes a mapping with the import path of its class in `_target_`.
    """
    if is_dataclass(default):
        values = {item.name: getattr(default, item.name) for item in fields(default) if item.init}
        import_path = f"{type(default).__module__}.{type(default).__qualname__}"
        return {TARGET: import_path, **{name: _to_plain(item) for name, item in values.items()}}
    if isinstance(default, Mapping):
        return {str(name): _to_plain(item) for name, item in default.items()}
    return [_to_plain(item) for item in default] if isinstance(default, (tuple, list)) else default


def describe_keys(config: Any, key: str = "") -> dict[str, tuple[str, str]]:
    """Describe the allowed values and the meaning of each key of a configuration.

    Only keys that set a field of a class are included.

    Args:
        config: A configuration or a part of it.
        key: Config key of this part, or "" for the whole configuration.

    Returns:
        Two texts for each full key, such as "probe.tau". A text may be empty. The first text states
        the allowed values, such as "a number in [0, 1]". The second text is the first sentence
        about the field in the docstring of its class.
    """
    if not isinstance(config, Mapping):
        return {}
    types, meanings, described = {}, {}, {}
    if TARGET in config:
        cls = import_component(config[TARGET], _join(key, TARGET))
        types = {item.name: item.type for item in fields(cls)}
        meanings = attribute_docs(cls)
    for name, item in config.items():
        full = _join(key, name)
        if name in types:
            is_component = isinstance(item, Mapping) and TARGET in item
            expected = "" if is_component else describe_type(types[name])
            described[full] = expected, meanings.get(name, "")
        described |= describe_keys(item, full)
    return described


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the first sentence about each attribute of a class, from its docstring.

    The docstrings of base classes are read too. Only the section "Attributes" or "Args" is used. If
    several classes describe an attribute, the text of the subclass is returned.
    """
    docs = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        section = re.split(r"^(?:Attributes|Args):\n", text, flags=re.MULTILINE)[-1]
        # The first line of an attribute is indented by four spaces, and further lines by more.
        entries = re.split(r"^ {4}(?=\w)", section.partition("\n\n")[0], flags=re.MULTILINE)
        for entry in entries[1:]:
            name, _, meaning = " ".join(entry.split()).partition(": ")
            docs[name] = re.split(r"""(?<=[\w)%`'"\]]{2})\. """, meaning)[0].rstrip(".")
    return docs


def list_protocols(task: str, probe: type) -> list[str]:
    """Return the names that `probe.protocol` accepts, or an empty list if it accepts any text.

    A protocol is a named preset of settings. Most tasks with several protocols have one file per
    protocol. If not, the names are read from the type of the probe's field `protocol`.

    Args:
        task: Name of the task.
        probe: Class of the probe.
    """
    annotation = next((item.type for item in fields(probe) if item.name == "protocol"), None)
    names = get_args(annotation) if get_origin(annotation) is Literal else ()
    return choices(protocol_group(task)) or [str(name) for name in names]


def protocol_group(task: str) -> str:
    """Return the subfolder of `configs/` that contains the protocol files of a task.

    A protocol file contains a preset of settings. Tasks without protocol files have no such folder.
    """
    return f"probe/{task}/protocol"


def changed_settings(probe: Any) -> dict[str, Any]:
    """Return the settings of a probe that differ from its protocol, a named preset of settings.

    A field that the protocol does not set is compared with its default value. The result is empty
    if the protocol is unknown or if the probe is not a dataclass.
    """
    if (values := load_protocol_values(probe)) is None:
        return {}
    protocol = replace(probe, **values)
    # A component of the probe may have a setting that no component of the protocol has, such as the
    # parameter C of L-BFGS. Such a setting is compared with its default value.
    expected = {name: getattr(protocol, name) for name in defaults(type(probe))}
    for part in (getattr(probe, item.name) for item in fields(probe)):
        if is_dataclass(part):
            expected |= defaults(type(part))
    expected |= protocol.settings()
    return {
        name: value
        for name, value in sorted(probe.settings().items())
        if to_plain_json(value) != to_plain_json(expected.get(name))
    }


def load_protocol_values(probe: Any) -> dict[str, Any] | None:
    """Return the field values of a probe in its protocol, a named preset of settings.

    Fields that the protocol does not set have their default values. Settings of the user are
    ignored. The result is None if the protocol is unknown or if the probe is not a dataclass.
    """
    known = choices(protocol_group(probe.task))
    if not is_dataclass(type(probe)) or (known and probe.protocol not in known):
        return None
    values = load_protocol_file(probe, probe.protocol) if known else {}
    return defaults(type(probe)) | {"protocol": probe.protocol} | values


def load_protocol_file(probe: Any, protocol: str) -> dict[str, Any]:
    """Return the values of the fields that a protocol file (a preset of settings) sets.

    A mapping with a key `_target_`, which contains the import path of a class, becomes an instance
    of this class.

    Args:
        probe: The probe, whose task determines the folder of the file.
        protocol: Name of the protocol.
    """
    file = config_folder() / protocol_group(probe.task) / f"{protocol}.yaml"
    return instantiate(read_file(file), "probe")


def fill_in_guesses(probe: Any, guesses: Sequence[str]) -> list[str]:
    """Replace names such as "$epochs" in texts by the values of a probe's settings.

    For example, "$epochs epochs over these crops" becomes "10 epochs over these crops". Each text
    states our assumption about a detail that the authors of a published protocol do not state. A
    text is left out if it contains a setting that the probe does not have.

    Args:
        probe: The probe.
        guesses: Texts that may contain names such as "$epochs".
    """
    values = {name: _format_setting(value) for name, value in probe.settings().items()}
    applicable = [
        guess for guess in guesses if all(name in values for name in _SETTING.findall(guess))
    ]
    return [_SETTING.sub(lambda match: values[match[1]], guess) for guess in applicable]


def _format_setting(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_setting, value))
    return f"{value:,}" if type(value) is int else str(value)
