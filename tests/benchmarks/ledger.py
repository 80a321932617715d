"""What finished runs reached, in a file that outlives their folders."""

import base64
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

Run = dict[str, Any]
"""What is kept of a finished run, as JSON."""


class Ledger:
    """Finished runs by name; several processes may add to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def runs(self) -> dict[str, Run]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def of(self, name: str, make: Callable[[], Run]) -> Run:
        """A finished run, made and written down if it is not there."""
        if name not in self.runs:
            self.put(name, make())
        return self.runs[name]

    def put(self, name: str, run: Run) -> None:
        """Write a run down, in the place of one of its name."""
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self.runs | {name: run}, indent=1) + "\n")
            unfinished.rename(self.path)


def packed(hits: Bool[np.ndarray, " images"]) -> dict[str, Any]:
    """Which images were right, a bit each."""
    return {"images": len(hits), "bits": base64.b64encode(np.packbits(hits).tobytes()).decode()}


def unpacked(hits: dict[str, Any]) -> Bool[np.ndarray, " images"]:
    """What `packed` was given."""
    content = np.frombuffer(base64.b64decode(hits["bits"]), np.uint8)
    return np.unpackbits(content, count=hits["images"]).astype(bool)
