"""Every key of a configuration with its value and what it takes, one a line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ssl_bench.composition.choices import LONG, choices, config_folder, files
from ssl_bench.composition.components import TARGET, completed, component_class, legal_values
from ssl_bench.composition.compose import choice_group, flattened, read_file
from ssl_bench.composition.fields import described

_NONE: Mapping[str, Any] = {}


def key_lines(
    config: DictConfig, within: Sequence[str] = (), shared: Mapping[str, Any] = _NONE
) -> list[str]:
    """Lines such as "train.seed=0  a whole number in [0, 4294967295]".

    Args:
        config: What was composed.
        within: Only these keys and those below them, such as "train"; all without any.
        shared: What the keys take that are no field of a component, as `fields` has it.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    legal, shown = legal_values(plain), {}
    legal |= {key: described(kind) for key, kind in shared.items()}
    for key, value in flattened(config).items():
        owner, _, last = key.rpartition(".")
        group, name = _named(plain, owner if last == TARGET else key, value)
        if group:
            named = owner if last == TARGET else key
            shown[named], legal[named] = name, " or ".join(choices(group))
        elif last != TARGET:
            shown[key] = json.dumps(value)
    said = {
        key: f"{key}={value}"
        for key, value in shown.items()
        if not within or any(f"{key}.".startswith(f"{one}.") for one in within)
    }
    width = min(max(map(len, said.values()), default=0), LONG)
    return [f"{text:{width}}  {legal.get(key, '')}".rstrip() for key, text in said.items()]


def _named(plain: Mapping[str, Any], key: str, value: Any) -> tuple[str | None, str]:
    """The folder whose files a key can be, and which of them it is; None where it takes values."""
    top, _, field = key.partition(".")
    parts = plain.get(top)
    if not (isinstance(parts, Mapping) and TARGET in parts):
        return None, ""
    kind = component_class(parts[TARGET], top)
    group = choice_group(key, {top: getattr(kind, "task", None)})
    if group is None:
        return None, ""
    call = parts[field]
    return group, _name_in(group, call) if isinstance(call, Mapping) else str(value)


def _name_in(group: str, call: Mapping[str, Any]) -> str:
    """The file that makes a component, or the first of its class where values differ."""
    known = {name: read_file(config_folder() / group / f"{name}.yaml") for name in files(group)}
    equal = sorted(name for name, said in known.items() if completed(said, "") == call)
    alike = sorted(name for name, said in known.items() if said[TARGET] == call[TARGET])
    return [*equal, *alike][0]
