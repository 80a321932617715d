"""Build probes from plain Python values, as the command line does."""

from typing import Any

from ssl_bench.composition.compose import TARGET, instantiate


def build_component(kind: type, **values: Any) -> Any:
    """Build an object of the class `kind` and check its fields as the command line does."""
    address = f"{kind.__module__}.{kind.__qualname__}"
    return instantiate({TARGET: address, **values}, "probe")
