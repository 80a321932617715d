"""Components as a configuration makes them, which refuses a value before Python sees it."""

from typing import Any

from ssl_bench.composition.compose import TARGET, constructed


def configured(kind: type, **values: Any) -> Any:
    """The component that the command line makes of these values."""
    address = f"{kind.__module__}.{kind.__qualname__}"
    return constructed({TARGET: address, **values}, "probe")
