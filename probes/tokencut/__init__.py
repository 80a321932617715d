"""Discover objects with TokenCut, LOST and MaskCut.

`discover` applies TokenCut to the features of one image.
"""

from probes.tokencut.cuts import Cut, Discovery, PatchGrid, discover

__all__ = ["Cut", "Discovery", "PatchGrid", "discover"]
