"""Build components from plain values, checking the values as the command line does."""

from typing import Any

from ssl_bench.composition.compose import TARGET, instantiate


def configured(kind: type, **values: Any) -> Any:
    """Build a component of the class `kind` from plain values, as the command line does."""
    address = f"{kind.__module__}.{kind.__qualname__}"
    return instantiate({TARGET: address, **values}, "probe")
