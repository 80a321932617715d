"""Flags that are short forms of keys: what is typed often, said once, in the configuration."""

import argparse
from collections.abc import Mapping, Sequence

from ssl_bench.errors import ConfigurationError

_PROBING = {"limit": "data.limit", "seed": "seed"}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "features": {"limit": "data.limit"},
    "probe": _PROBING | {"pictures": "probe.panels"},
    "sweep": _PROBING,
    "pretrain": {
        "limit": "data.limit",
        "seed": "train.seed",
        "batch_size": "train.batch_size",
        "on_bad_image": "data.on_bad_image",
    },
}
"""What a flag is short for, by command; --batch-size of probes depends on the tasks."""


def with_short_forms(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The overrides behind those that flags are short for.

    Raises:
        ConfigurationError: a flag and an override say the same.
    """
    given = {override.partition("=")[0]: override for override in overrides}
    said = []
    for flag, key in _KEYS.get(options.command, {}).items():
        value = getattr(options, flag)
        if value is not None and key in given:
            word = flag.replace("_", "-")
            raise ConfigurationError(
                f"--{word} {value} is short for {key}={value}; leave it or {given[key]} out"
            )
        if value is not None:
            said.append(f"{key}={value}")
    return [*said, *overrides]
