"""Which settings of a record differ from those of the protocol that it names."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from ssl_bench.composition.compose import as_plain, choices, compose_config
from ssl_bench.errors import ConfigurationError
from ssl_bench.results import Record

# The facet of a record says it already.
_SAID = frozenset({"layers_mode"})


def named_protocol(record: Record) -> str:
    """The protocol as tables print it, with the settings in which a run departed from it."""
    changed = changed_settings(record)
    words = [record.protocol, *(f"{name}={_short(value)}" for name, value in changed.items())]
    return ", ".join(words)


def changed_settings(record: Record) -> dict[str, Any]:
    """Settings of a record that are not its protocol's, as they were.

    Without those that the name of the protocol says already. Tasks and protocols that no file of
    `configs/` knows have none.
    """
    preset = _preset(record.task, record.protocol)
    return {
        name: value
        for name, value in sorted(record.settings.items())
        if name in preset
        and name not in _SAID
        and f"{name}=" not in record.protocol
        and _plain(value) != _plain(preset[name])
    }


@cache
def _preset(task: str, protocol: str) -> Mapping[str, Any]:
    group = f"probe/{task}_protocol"
    known = choices(group)
    if task not in choices("probe") or (known and protocol not in known):
        return {}
    overrides = [f"probe={task}", *([f"{group}={protocol}"] if known else [])]
    try:
        return as_plain(compose_config("probing", overrides))["probe"]
    except ConfigurationError:
        return {}


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=list)


def _short(value: Any) -> str:
    text = str(value).replace(" ", "")
    return text if len(text) <= 24 else f"{text[:21]}..."
