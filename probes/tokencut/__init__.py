"""TokenCut and its relatives; the cut of any features is `discover`."""

from probes.tokencut.cuts import Cut, Discovery, PatchGrid, discover

__all__ = ["Cut", "Discovery", "PatchGrid", "discover"]
