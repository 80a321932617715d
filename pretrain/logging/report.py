"""From the numbers of a step, still on the device, to the log, the progress bar and the watch."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.logging.divergence import Watch
from pretrain.logging.jsonl import Journal, ProgressBar
from pretrain.runtime.distributed import TrainingRanks

# A step's row starts with these, in this order.
_FIRST = ("step", "epoch", "loss")


class StepLog:
    """Rows of the log, averaged over the processes.

    On a GPU a row is read one step late, so that the host never waits for the step it has just
    launched.

    Args:
        journal: Takes the rows; the first process has it, the others have none.
        done: Steps taken before.
        total: Planned steps.
        minutes: After which it stops at the latest.

    Attributes:
        stop: A process wants to stop; true in all processes after the same step.
        save: A process wants to save; true in all processes after the same step.
    """

    def __init__(
        self,
        journal: Journal | None,
        *,
        done: int,
        total: int,
        ranks: TrainingRanks,
        watch: Watch,
        minutes: float | None = None,
    ) -> None:
        self._ranks, self._watch, self._journal = ranks, watch, journal
        self._bar = ProgressBar(total=total, done=done, quiet=not ranks.is_first, minutes=minutes)
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
        self._pending.append((dict(row), _Reading(values, (stop, save), self._ranks)))

    def settle(self, *, everything: bool = False) -> None:
        """Write down the rows that are ready, and note their wishes.

        Raises:
            ConfigurationError: the run no longer learns.
        """
        while len(self._pending) > (0 if everything else self._lag):
            row, reading = self._pending.popleft()
            numbers, (stop, save) = reading.get()
            self.stop, self.save = self.stop or stop, self.save or save
            row |= numbers
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
    """Numbers on their way from the device, and beside them what any process wishes."""

    def __init__(
        self, values: Mapping[str, Tensor], wishes: Sequence[bool], ranks: TrainingRanks
    ) -> None:
        self._names = list(values)
        numbers = torch.stack([value.detach().float() for value in values.values()])
        # Filled on the device: copying them there would wait for it.
        wished = [numbers.new_full((1,), float(wish)) for wish in wishes]
        stacked = torch.cat([numbers, *wished])
        self._numbers = ranks.mean(stacked)
        self._event = None
        if stacked.is_cuda:
            host = torch.empty(stacked.shape, pin_memory=True)
            self._numbers = host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> tuple[dict[str, float], list[bool]]:
        if self._event is not None:
            self._event.synchronize()
        numbers, count = self._numbers.tolist(), len(self._names)
        values = dict(zip(self._names, numbers[:count], strict=True))
        return values, [share > 0 for share in numbers[count:]]
