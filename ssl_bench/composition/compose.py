"""From YAML files and overrides to components; below this file there is no DictConfig.

A configuration names a class by its address, and building it runs its code. So a class is only
built if a file of `configs/` may name it: a dataclass that one of the three packages defines, or
what an installed package declares as an entry point of the group `ssl_bench.probe`,
`ssl_bench.dataset`, `ssl_bench.objective` or `ssl_bench.optimizer`.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssl_bench.composition.choices import (
    EXTENSIBLE_GROUPS,
    LONG,
    choices,
    config_folder,
    entry_points,
    experiments,
    files,
    unknown_key_error,
    unknown_name_error,
)
from ssl_bench.composition.fields import accepts_single_value, describe_type, require_type, shown
from ssl_bench.errors import (
    PACKAGES,
    BrokenFile,
    ConfigurationError,
    broken_file_error,
    escape_braces,
)
from ssl_bench.system.escaping import plain_json

TARGET = "_target_"
_SETTING = re.compile(r"\$([a-z_]+)")
# Keys by which Hydra calls things in other ways.
RESERVED = ("_args_", "_partial_", "_recursive_", "_convert_")
# What Hydra would compose about itself; a quarter of the time, and nothing of it is used.
_WITHOUT_HYDRA = [
    f"~hydra/{group}"
    for group in ("help", "hydra_help", "hydra_logging", "job_logging", "launcher", "sweeper")
]


def compose_config(root: str, overrides: Sequence[str]) -> DictConfig:
    """Compose one root file of `configs/` with Hydra overrides.

    Args:
        root: Name of the file without suffix, "probing", "pretraining" or "data".
        overrides: Such as "probe=tokencut" or "train.epochs=3".

    Raises:
        ConfigurationError: unknown group choice, key or a value of the wrong type, in one line.
    """
    parsed = [_parsed(override) for override in overrides]
    chosen = {key: value for key, value in parsed if _is_choice(key)}
    named = [(choice_group(key, chosen) or key, key, value) for key, value in parsed]
    for group, key, value in named:
        _check_choice(root, group, key, value)
    groups = [f"{group}={value}" for group, _, value in named if _is_choice(group)]
    config = deepcopy(_defaults(config_folder(), root, tuple(groups)))
    known = flatten_config(config)
    for group, key, value in named:
        if not _is_choice(group):
            _set(config, key, value, known)
            # Any other value leaves the keys as they are.
            known = flatten_config(config) if isinstance(value, Mapping) else known
    return config


def choice_group(key: str, chosen: Mapping[str, Any]) -> str | None:
    """The folder whose files are what a key can be; None where it takes values.

    Args:
        key: Such as "probe.loss".
        chosen: The files that are chosen of groups: with {"probe": "segmentation"} the folder is
            "probe/segmentation/loss".
    """
    group, _, field = key.partition(".")
    folder = f"{group}/{chosen.get(group)}/{field}"
    return folder if field and _is_choice(folder) else None


def add_data_root(overrides: Sequence[str], root: str | None) -> list[str]:
    """The overrides behind one for the folder of the data, which may hold any character."""
    quoted = [] if root is None else ["data.root='" + root.replace("'", "\\'") + "'"]
    return [*quoted, *overrides]


def build(config: DictConfig) -> Any:
    """Construct the component a `_target_` names, with plain Python values.

    Raises:
        ConfigurationError: the component refuses a value.
    """
    return instantiate(config_to_dict(config), config._get_full_key(None))


def config_to_dict(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as JSON types.

    Raises:
        ConfigurationError: a value that a file refers to has none, such as `data.root=???`.
    """
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigurationError(_one_line(error)) from error
    return {str(key): value for key, value in values.items()}


def config_to_yaml(config: DictConfig) -> str:
    """The resolved configuration as a file of `configs/` would say all of it."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def has_key(config: DictConfig, key: str) -> bool:
    return key in flatten_config(config)


def keys(config: DictConfig) -> list[str]:
    """What can be overridden, such as "probe.training.epochs"."""
    said = flatten_config(config)
    found = [key for key in said if not key.endswith("_target_")]
    # What has no fields is a key itself: another can be chosen in its place.
    calls = [key.removesuffix("._target_") for key in said if key.endswith("._target_")]
    return found + [call for call in calls if not any(k.startswith(f"{call}.") for k in found)]


@cache
def _defaults(folder: Path, root: str, groups: tuple[str, ...]) -> DictConfig:
    """What the files say, and the classes that they name where the files say nothing.

    Composed once, because it takes a tenth of a second each time.
    """
    # A choice like "probe/segmentation/loss=histogram" puts a call in place of a field, but for
    # files that hold values of many fields, as that of a protocol does.
    parts = [choice.replace("=", "/") for choice in groups if choice.count("/") == 2]
    calls = {part: call for part in parts if TARGET in (call := read_file(folder / f"{part}.yaml"))}
    plain = [choice for choice in groups if choice.replace("=", "/") not in calls]
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(root, [*plain, *_WITHOUT_HYDRA])
            said: Any = OmegaConf.to_container(config, resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(_one_line(error)) from error
    for part, call in calls.items():
        group, _, field, _ = part.split("/")
        said[group][field] = call
    whole = DictConfig(fill_defaults(said, ""))
    OmegaConf.set_struct(whole, True)
    return whole


def read_file(file: Path) -> dict[str, Any]:
    """What one file of `configs/` says by itself."""
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    return config_to_dict(config)


@cache
def _groups(folder: Path) -> frozenset[str]:
    """Folders of `configs/` whose files are choices, such as "probe/segmentation/loss"."""
    below = (path.parent.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return frozenset(below) - {"."}


def _is_choice(key: str) -> bool:
    return key in _groups(config_folder())


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _parsed(override: str) -> tuple[str, Any]:
    """Key and value of an override, in Hydra's grammar without what sweeps over values."""
    key, equals, text = override.partition("=")
    if not equals:
        came = shown(override)
        raise ConfigurationError(f"expected KEY=VALUE, got {came}", hint=("ssl-bench", "keys"))
    # An environment variable would stand in records, where others read it.
    if "${" in text:
        raise ConfigurationError(
            f"{key[:LONG]} expects a value, got {shown(text)}, which refers to another place; "
            'write the value itself, as the shell does for "$NAME"'
        )
    try:
        parsed = _parser().parse_override(f"key={text}")
        if not parsed.is_sweep_override():
            return key, parsed.value()
    # Also a number of thousands of digits, or lists in a thousand lists.
    except (HydraException, ValueError, RecursionError):
        pass
    raise ConfigurationError(
        f"cannot read {shown(override)}; write lists as [1,2] and quote text: KEY=\"'a b'\""
    )


def _check_choice(root: str, group: str, key: str, value: Any) -> None:
    if not _is_choice(group):
        return
    if value not in (valid := choices(group)):
        message = f"unknown {key}={shown(value)} for {root}"
        raise unknown_name_error(
            message, str(value), valid, hint=(f"{escape_braces(key)}={{near}}",)
        )
    if value in files(group):
        return
    store = ConfigStore.instance().store
    if group == "experiment" and value in (runs := experiments()):
        store(group=group, name=value, node=runs[value].node(), package="_global_")
        return
    # Of another package, of which the configuration says the address alone: see `fill_defaults`.
    point = entry_points(group)[value]
    store(group=group, name=value, node={TARGET: f"{point.module}.{point.attr}"})


def _set(config: DictConfig, key: str, value: Any, known: Mapping[str, Any]) -> None:
    parents = {name.rsplit(".", depth)[0] for name in known for depth in range(name.count(".") + 1)}
    if key not in parents:
        raise unknown_key_error(key, keys(config))
    # The choice of a file alone decides what is built.
    if names := [name for name in _names_in({key: value}) if name in (TARGET, *RESERVED)]:
        raise ConfigurationError(
            f"{key} cannot take {', '.join(names)}, which name code to run; choose a file of "
            "configs/, or see docs/extending.md for classes of your own",
            hint=("ssl-bench", "keys"),
        )
    if key not in known and not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{key} is no value; override its keys", hint=("ssl-bench", "keys")
        )
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        raise ConfigurationError(
            f"{key} does not take {shown(value)}: {_one_line(error)}"
        ) from error


def _names_in(value: Any) -> Iterator[str]:
    """The parts of all keys in a value, however deep they lie."""
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from str(name).split(".")
        yield from _names_in(item)
    for item in value if isinstance(value, (list, tuple)) else ():
        yield from _names_in(item)


def get_value(config: DictConfig, key: str) -> Any:
    """What stands under a key such as `data.root`, as JSON types: a mapping too, where one came."""
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def flatten_config(config: DictConfig) -> dict[str, Any]:
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


def instantiate(value: Any, key: str) -> Any:
    """Plain values with every mapping that has a `_target_` replaced by what it constructs.

    Args:
        value: A mapping, a list or anything else, without references to other places.
        key: Where it stands in the configuration, such as "probe.crops".

    Raises:
        ConfigurationError: a class that must not be built, or arguments that it does not take.
    """
    if isinstance(value, list):
        return [instantiate(item, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    parts = {str(name): instantiate(item, _joined(key, name)) for name, item in value.items()}
    if TARGET not in parts:
        return parts
    kind = component_class(parts.pop(TARGET), _joined(key, TARGET))
    parts |= {
        item.name: [parts[item.name]]
        for item in fields(kind)
        if item.name in parts and accepts_single_value(item.type, parts[item.name])
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
    for point in (point for group in EXTENSIBLE_GROUPS for point in entry_points(group).values()):
        if str(address) == f"{point.module}.{point.attr}":
            return _loaded(point)
    raise ConfigurationError(
        f"{key}={shown(address)} is not built: {name!r} is neither a dataclass of "
        f"{', '.join(PACKAGES)} nor an entry point in a group such as ssl_bench.probe of an "
        "installed package; see docs/extending.md"
    )


def fill_defaults(value: Any, key: str) -> Any:
    """Plain values in which every mapping with a `_target_` says all that its class takes.

    What it leaves out has the default of the class, so that whatever a class can be given can be
    overridden. Fields without a default stay out.

    Raises:
        ConfigurationError: a class that must not be built.
    """
    if isinstance(value, list):
        return [fill_defaults(item, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    said = {str(name): fill_defaults(item, _joined(key, name)) for name, item in value.items()}
    if TARGET not in said:
        return said
    kind = component_class(said[TARGET], _joined(key, TARGET))
    left = {name: value for name, value in defaults(kind).items() if name not in said}
    return said | {name: _plain(default) for name, default in left.items()}


def defaults(kind: type) -> dict[str, Any]:
    """What a dataclass has where nothing is said, by field; without fields that have no default."""
    values = {item.name: get_default(item) for item in fields(kind) if item.init}
    return {name: value for name, value in values.items() if value is not MISSING}


def describe_keys(value: Any, key: str = "") -> dict[str, tuple[str, str]]:
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
            takes = "" if is_choice else describe_type(kinds[name])
            found[full] = takes, meanings.get(name, "")
        found |= describe_keys(item, full)
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


def protocols(task: str, probe: type) -> list[str]:
    """Names that `probe.protocol` takes: files of presets, or those in the type of the field.

    None of them where the field is any text.
    """
    kind = next((item.type for item in fields(probe) if item.name == "protocol"), None)
    named = [str(name) for name in get_args(kind)] if get_origin(kind) is Literal else []
    return choices(protocol_group(task)) or named


def protocol_group(task: str) -> str:
    """Folder of the presets of a task below `configs/`; most tasks have none."""
    return f"probe/{task}/protocol"


def changed_settings(probe: Any) -> dict[str, Any]:
    """Settings that are not those of the protocol that a probe names, as they are.

    A protocol without a file has the defaults of the class. One that nobody knows, and a probe
    that is no dataclass, have nothing to differ from.
    """
    if (values := load_protocol_values(probe)) is None:
        return {}
    usual = replace(probe, **values)
    # What only another choice has, such as C of L-BFGS, is compared with its own default.
    others = {name: getattr(usual, name) for name in defaults(type(probe))}
    for part in (getattr(probe, item.name) for item in fields(probe)):
        if is_dataclass(part):
            others |= defaults(type(part))
    settings = others | usual.settings()
    return {
        name: value
        for name, value in sorted(probe.settings().items())
        if plain_json(value) != plain_json(settings.get(name))
    }


def load_protocol_values(probe: Any) -> dict[str, Any] | None:
    """Values of all fields in the protocol that a probe names; None where nobody knows it."""
    known = choices(protocol_group(probe.task))
    if not is_dataclass(type(probe)) or (known and probe.protocol not in known):
        return None
    said = load_protocol_file(probe, probe.protocol) if known else {}
    return defaults(type(probe)) | {"protocol": probe.protocol} | said


def fill_in_guesses(probe: Any, guesses: Sequence[str]) -> list[str]:
    """Guesses with the settings that a probe has in the place of `$NAME`, for its records.

    Without those that speak of a setting that there is not, as of epochs where none are trained.
    """
    values = {name: _said(value) for name, value in probe.settings().items()}
    applying = [g for g in guesses if all(name in values for name in _SETTING.findall(g))]
    return [_SETTING.sub(lambda found: values[found[1]], guess) for guess in applying]


def _said(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value))
    return f"{value:,}" if type(value) is int else str(value)


def load_protocol_file(probe: Any, protocol: str) -> dict[str, Any]:
    """What the file of a protocol says."""
    file = config_folder() / protocol_group(probe.task) / f"{protocol}.yaml"
    return instantiate(read_file(file), "probe")


def _loaded(point: metadata.EntryPoint) -> type:
    try:
        found = point.load()
    # Whatever another package does while it is imported.
    except Exception as error:
        broken = broken_file_error(error, [point.module.partition(".")[0]])
        raise BrokenFile(
            f"the entry point {point.name} = {point.value}: {broken}, or uninstall "
            f"{point.dist.name if point.dist else point.module}"
        ) from error
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ConfigurationError(f"the entry point {point.name} = {point.value} is no dataclass")
    return found


def get_default(item: Field[Any]) -> Any:
    """What a field has where nothing is said; MISSING where it has to be."""
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
    return [_plain(item) for item in default] if isinstance(default, (tuple, list)) else default


def _attribute(address: str) -> Any:
    """What stands at an address; None where nothing does."""
    module, _, name = address.rpartition(".")
    try:
        return getattr(import_module(module), name, None) if module else None
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise broken_file_error(error) from error
    # Whatever a file does while it is imported.
    except Exception as error:
        raise broken_file_error(error) from error


def _check_arguments(kind: type, arguments: Mapping[str, Any], key: str) -> None:
    taken = [item for item in fields(kind) if item.init]
    names = [item.name for item in taken]
    for name in arguments:
        if name not in names:
            known = [_joined(key, one) for one in names]
            raise unknown_key_error(_joined(key, name), known)
    for item in taken:
        if item.name in arguments:
            require_type(_joined(key, item.name), item.type, arguments[item.name])
        elif get_default(item) is MISSING:
            raise ConfigurationError(f"{_joined(key, item.name)} has no value")


def _joined(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
