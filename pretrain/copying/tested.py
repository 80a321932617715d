"""How well strings of several lengths are copied: letters, and strings without a mistake."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pretrain.copying.strings import Letters, fixed_strings, rows_of
from pretrain.schedules import Timeline
from ssl_bench.models import StateSpaceModel
from ssl_bench.system.device import in_float64

# Rows of one pass.
_BATCH = 32


def letters_name(length: int) -> str:
    """In the log, for the share of letters that are right."""
    return f"letters_{length}"


def strings_name(length: int) -> str:
    """In the log, for the share of strings without a mistake."""
    return f"strings_{length}"


class CopyingTest:
    """Tests a model every few epochs and after the last step; it changes nothing.

    Each letter is asked for with the right ones before it, the most likely token is the answer,
    and the stop does not count.
    """

    costs_by = "objective.test_lengths, .test_strings and .test_epochs"

    def __init__(
        self,
        model: StateSpaceModel,
        timeline: Timeline,
        *,
        lengths: Sequence[int],
        letters: int,
        strings: int,
        epochs: int,
    ) -> None:
        self.model, self.timeline, self.letters, self.epochs = model, timeline, letters, epochs
        self.strings = {length: fixed_strings(length, letters, strings) for length in lengths}

    def measures(self, step: int) -> Mapping[str, float]:
        """What is due after the step of this number, counted from 1; in percent."""
        due = step % (self.epochs * self.timeline.steps_per_epoch) == 0
        if not due and step != self.timeline.total_steps:
            return {}
        found = {}
        for length, strings in self.strings.items():
            right = copied_letters(self.model, strings, self.letters)
            found[letters_name(length)], found[strings_name(length)] = accuracies(right)
        return found


@torch.no_grad()
def copied_letters(
    model: StateSpaceModel, strings: Letters, letters: int
) -> Bool[Tensor, "batch length"]:
    """Which letters of each string the model says at their places."""
    device, length = model.embedding.weight.device, strings.shape[1]
    right = []
    for batch in strings.split(_BATCH):
        rows = rows_of(batch.to(device), letters)
        answers = model.forward(rows[:, :-1])[:, length:-1].argmax(-1)
        right.append(answers == rows[:, length + 1 : -1])
    return torch.cat(right)


def accuracies(right: Bool[Tensor, "batch length"]) -> tuple[float, float]:
    """Percent of all letters, and of the strings of which every letter is right."""
    shares: Sequence[Float[Tensor, ""]] = (
        in_float64(right).mean(),
        in_float64(right.all(1)).mean(),
    )
    letters, strings = (100 * float(share) for share in shares)
    return letters, strings
