"""TokenCut and its relatives; the cut of any features is `discover`."""

from typing import TYPE_CHECKING, Any

from probes.tokencut.options import Cut, PatchGrid

if TYPE_CHECKING:
    from probes.tokencut.cuts import Discovery, discover

__all__ = ["Cut", "Discovery", "PatchGrid", "discover"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: what describes the probe needs no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from probes.tokencut import cuts

    return getattr(cuts, name)
