"""Where the features of a training set are: in memory, on disk, or computed whenever asked for."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssl_bench.system.memory import free_host_memory

Tier = Literal["memory", "disk", "stream"]
AskedTier = Literal["auto", "memory", "disk", "stream"]
GIB = 2**30


@dataclass(frozen=True)
class Room:
    """What features may take.

    Attributes:
        tier: "auto": memory if they fit there, else disk if they fit there, else stream.
        memory_gib: Without it half of what is free.
        disk_gib: Likewise.
        folder: On that disk.
    """

    tier: AskedTier
    memory_gib: float | None
    disk_gib: float | None
    folder: Path

    def choose(self, features: int, labels: int, is_kept: Callable[[], bool]) -> Tier:
        """The tier for so many bytes; features that a file holds already take no more room."""
        if self.tier != "auto":
            return self.tier
        if features + labels <= self.memory:
            return "memory"
        return "disk" if features + labels <= self.disk or is_kept() else "stream"

    @property
    def memory(self) -> float:
        return free_host_memory() / 2 if self.memory_gib is None else self.memory_gib * GIB

    @property
    def disk(self) -> float:
        return self._free_disk() / 2 if self.disk_gib is None else self.disk_gib * GIB

    def said(self, tier: Tier, features: int) -> str:
        """What is told before anything is computed."""
        memory, disk = (f"{room / GIB:.1f} GiB" for room in (self.memory, self.disk))
        return (
            f"features: {features / GIB:.1f} GiB, tier {tier} (may take {memory} of memory, "
            f"{disk} of {self.folder})"
        )

    def _free_disk(self) -> int:
        there = self.folder.absolute()
        while not there.is_dir() and there != there.parent:
            there = there.parent
        return shutil.disk_usage(there).free
