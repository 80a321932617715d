"""Initialisers of blocks: options, which are read without torch, and what draws."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssl_bench.models.initialisers.blocks import mimetic_, skipless_

__all__ = ["mimetic_", "skipless_"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ssl_bench.models.initialisers import blocks

    return getattr(blocks, name)
