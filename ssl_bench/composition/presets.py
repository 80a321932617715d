"""Protocols: named presets of a probe's values, and what a run changed from its preset."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

from ssl_bench.composition.choices import choices, config_folder
from ssl_bench.composition.compose import constructed, defaults, read_file
from ssl_bench.system.escaping import plain_json

_SETTING = re.compile(r"\$([a-z_]+)")


def protocols(task: str, probe: type) -> list[str]:
    """Names that `probe.protocol` takes: files of presets, or those in the type of the field.

    None of them where the field is any text.
    """
    kind = next((item.type for item in fields(probe) if item.name == "protocol"), None)
    named = [str(name) for name in get_args(kind)] if get_origin(kind) is Literal else []
    return choices(preset_group(task)) or named


def preset_group(task: str) -> str:
    """Folder of the presets of a task below `configs/`; most tasks have none."""
    return f"probe/{task}/protocol"


def changed_settings(probe: Any) -> dict[str, Any]:
    """Settings that are not those of the protocol that a probe names, as they are.

    A protocol without a file has the defaults of the class. One that nobody knows, and a probe
    that is no dataclass, have nothing to differ from.
    """
    if (values := usual_values(probe)) is None:
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


def usual_values(probe: Any) -> dict[str, Any] | None:
    """Values of all fields in the protocol that a probe names; None where nobody knows it."""
    known = choices(preset_group(probe.task))
    if not is_dataclass(type(probe)) or (known and probe.protocol not in known):
        return None
    said = preset_values(probe, probe.protocol) if known else {}
    return defaults(type(probe)) | {"protocol": probe.protocol} | said


def guesses_of(probe: Any, guesses: Sequence[str]) -> list[str]:
    """Guesses with the settings that a probe has in the place of `$NAME`, for its records.

    Without those that speak of a setting that there is not, as of epochs where none are trained.
    """
    values = {name: _said(value) for name, value in probe.settings().items()}
    applying = [g for g in guesses if all(name in values for name in _SETTING.findall(g))]
    return [_SETTING.sub(lambda found: values[found[1]], guess) for guess in applying]


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value))
    return f"{value:,}" if type(value) is int else str(value)


def preset_values(probe: Any, protocol: str) -> dict[str, Any]:
    """What the file of a protocol says."""
    file = config_folder() / preset_group(probe.task) / f"{protocol}.yaml"
    return constructed(read_file(file), "probe")
