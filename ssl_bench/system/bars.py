"""Bars of progress, whose lock no other process can hold."""

import os
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

from tqdm import tqdm

from ssl_bench.system.progress import usual_duration


class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
    """A bar of tqdm whose lock no other process can hold.

    tqdm shares its own with processes that are forked: one that is killed while it writes would
    keep all others from writing for ever.

    Attributes:
        durations: Of the last items in seconds, whose median gives the time that is left; the mean
            of tqdm would go on with the first, which waited for what is loaded once.
    """

    durations: Sequence[float] = ()

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """What is shown."""
        shown = super().format_dict
        if len(self.durations) > 1 and (usual := usual_duration(self.durations)) > 0:
            shown["rate"] = 1 / usual
        return shown


# One of its own for each process; a thread that holds it at a fork is not there to let it go.
os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))
