"""Build components as the command line does, which checks values first."""

from typing import Any

from ssl_bench.composition.compose import TARGET, instantiate


def configured(kind: type, **values: Any) -> Any:
    """Return the component that the command line builds from the given values."""
    address = f"{kind.__module__}.{kind.__qualname__}"
    return instantiate({TARGET: address, **values}, "probe")
