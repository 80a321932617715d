"""From the numbers of a step, still on the device, to the log, the progress bar and the watch."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pretrain.logging.divergence import Watch
from pretrain.logging.jsonl import Journal, ProgressBar
from pretrain.runtime.distributed import Ranks

# A step's row starts with these, in this order.
_FIRST = ("step", "epoch", "loss")
_WISHES = ("stop", "save")


class StepLog:
    """Rows of the log, averaged over the processes.

    On a GPU a row is read one step late, so that the host never waits for the step it has just
    launched.

    Args:
        journal: Takes the rows; the first process has it, the others have none.
        done: Steps taken before.
        total: Planned steps.

    Attributes:
        stop: A process wants to stop; true in all processes after the same step.
        save: Likewise for saving.
    """

    def __init__(
        self, journal: Journal | None, *, done: int, total: int, ranks: Ranks, watch: Watch
    ) -> None:
        self._ranks, self._watch, self._journal = ranks, watch, journal
        self._bar = ProgressBar(total=total, done=done, quiet=not ranks.is_first)
        self._pending: deque[tuple[dict[str, Any], _Reading]] = deque()
        self._lag = 1 if ranks.device.type == "cuda" else 0
        self.say = self._bar.say
        self.stop = self.save = False

    def note(
        self, row: Mapping[str, Any], values: Mapping[str, Tensor], *, stop: bool, save: bool
    ) -> None:
        """Take in a step: what is known at once, and what the device still computes.

        `stop` and `save` are wishes of this process, which become everybody's.
        """
        device = self._ranks.device
        wishes = {
            name: torch.full((), float(wish), device=device)
            for name, wish in zip(_WISHES, (stop, save), strict=True)
        }
        self._pending.append((dict(row), _Reading({**values, **wishes}, self._ranks)))

    def settle(self, *, everything: bool = False) -> None:
        """Write down the rows that are ready, and note their wishes.

        Raises:
            ConfigurationError: the run no longer learns.
        """
        while len(self._pending) > (0 if everything else self._lag):
            row, reading = self._pending.popleft()
            row |= reading.get()
            self.stop |= row.pop("stop") > 0
            self.save |= row.pop("save") > 0
            row = {name: row[name] for name in _FIRST} | row
            if self._journal is not None:
                self._journal.write(row)
            self._bar.show(row)
            self._watch.check(row)

    def close(self) -> None:
        self._bar.close()
        if self._journal is not None:
            self._journal.close()


class _Reading:
    """Numbers on their way from the device."""

    def __init__(self, values: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._names = list(values)
        stacked = torch.stack([value.detach().float() for value in values.values()])
        self._numbers = ranks.mean(stacked)
        self._event = None
        if stacked.is_cuda:
            host = torch.empty(stacked.shape, pin_memory=True)
            self._numbers = host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> dict[str, float]:
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._numbers.tolist(), strict=True))
