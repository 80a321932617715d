"""Components as a configuration makes them, which refuses a value before Python sees it."""

from typing import Any

from ssl_bench.composition.compose import TARGET, instantiate


def configured(kind: type, **values: Any) -> Any:
    """The component that the command line makes of these values."""
    address = f"{kind.__module__}.{kind.__qualname__}"
    return instantiate({TARGET: address, **values}, "probe")
