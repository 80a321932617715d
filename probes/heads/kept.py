"""What long work has reached, in a file that is there as long as the work is not of use."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ssl_bench.system.files import write_atomically
from ssl_bench.system.memory import pass_on_memory


@dataclass
class KeptState:
    """State of work that may be killed, written now and then.

    Attributes:
        path: Named after everything that the work depends on; safe to delete at any time.
        minutes: Between two writings.
        say: Gets a line where work goes on or its file is damaged.
    """

    path: Path
    minutes: float
    say: Callable[[str], None]
    _written: float = field(default_factory=time.monotonic, init=False, repr=False)

    @cached_property
    def found(self) -> Mapping[str, Any]:
        """What an earlier process wrote last, on the CPU; nothing if there is no such file."""
        if not self.path.is_file():
            return {}
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        # Whatever the bytes are, torch or zipfile says so with an error of its own.
        except Exception as error:
            pass_on_memory(error)
            self.say(f"{self.path} is damaged; what it held is computed from the beginning")
            return {}
        self.say(f"going on from {self.path}")
        return state

    def is_due(self) -> bool:
        return time.monotonic() - self._written >= 60 * self.minutes

    def write(self, state: Mapping[str, Any]) -> None:
        """Keep a state of tensors and plain values.

        Raises:
            MachineError: the folder cannot be written or the disk is full.
        """
        write_atomically(self.path, lambda file: torch.save(dict(state), file))
        self._written = time.monotonic()
