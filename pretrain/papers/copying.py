"""Copying: a state space model reads a string and a mark, and says the string again.

Strings are random, drawn and never stored. A row of n letters is x_1 ... x_n | x_1 ... x_n . as
tokens 0 to letters - 1, then `|`, then `.`: 2n + 2 of them. Of what is read, all but the stop, only
what follows `|` has a target: n letters and the stop.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from pretrain.crops.plain import Generators, Samples, ViewMaker
from pretrain.objectives.objective import Generating, Learner, Measuring, Views
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Count, check_fields
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig, StateSpaceModel, build_encoder
from ssl_bench.models.encoder import IMAGENET_NORMALIZATION, Normalization
from ssl_bench.system.device import to_float64

# Beside the letters: `|` and `.`.
NUM_MARKS = 2
# The length of an epoch; each has strings of its own, so that none comes twice.
STRINGS_AN_EPOCH = 32_000
# Keeps the tested strings apart from the streams of pretrain/batches.py.
_TESTED = 4
# Rows of one pass.
_BATCH = 32

Letters = Int64[Tensor, "batch length"]
Rows = Int64[Tensor, "batch row"]


def rows_of(strings: Letters, letters: int) -> Rows:
    """The rows in which these strings, of so many different letters, are copied."""
    delimiter = strings.new_full((len(strings), 1), letters)
    return torch.cat([strings, delimiter, strings, delimiter + 1], 1)


def fixed_strings(length: int, letters: int, count: int) -> Letters:
    """The same in every run, whatever its seed."""
    generator = np.random.default_rng((_TESTED, length, letters))
    return torch.from_numpy(generator.integers(letters, size=(count, length)))


@dataclass(frozen=True)
class StringMaker(ViewMaker):
    """Draws a string for every sample, in the place of a crop of its image.

    Attributes:
        length: Letters of a string.
        letters: Different ones, equally likely.
    """

    length: int
    letters: int

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        del image_size, patch_size
        return ()

    def cut(self, samples: Samples, generators: Generators, sizes: Sequence[int]) -> Letters:
        del samples, sizes
        drawn = [generator.integers(self.letters, size=self.length) for generator in generators]
        return torch.from_numpy(np.stack(drawn))

    def finish(
        self, groups: Letters, device: torch.device, colours: Normalization = IMAGENET_NORMALIZATION
    ) -> tuple[Rows]:
        del colours
        return (rows_of(groups.to(device, non_blocking=True), self.letters),)


@dataclass(frozen=True)
class GeneratedStrings:
    """An epoch of strings, as far as a run asks its data who they are: places to be filled."""

    name = "copying"
    split = "train"
    class_names = tuple[str, ...]()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"string{number:05d}" for number in range(STRINGS_AN_EPOCH))

    def __len__(self) -> int:
        return STRINGS_AN_EPOCH

    def __getitem__(self, index: int) -> Sample:
        return Sample(f"string{index:05d}", np.zeros((1, 1, 3), np.uint8))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.name} {len(self)}".encode()).hexdigest()


class CopyingTest(Measuring):
    """Tests a model every few epochs and after the last step; it changes nothing.

    Each letter is asked for with the right ones before it, the most likely token is the answer,
    and the stop does not count.
    """

    costs_by = "objective.test_lengths, .test_strings and .test_epochs"

    def __init__(self, options: "Copying", model: StateSpaceModel, timeline: Timeline) -> None:
        self.options, self.model, self.timeline = options, model, timeline

    def measures(self, step: int) -> Mapping[str, float]:
        """What is due after the step of this number, counted from 1; in percent."""
        options, found = self.options, {}
        if self.timeline.is_due(options.test_epochs, step):
            for length in options.test_lengths:
                strings = fixed_strings(length, options.letters, options.test_strings)
                right = copied_letters(self.model, strings, options.letters)
                found[f"letters_{length}"], found[f"strings_{length}"] = accuracies(right)
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
    letters, strings = to_float64(right).mean(), to_float64(right.all(1)).mean()
    return 100 * float(letters), 100 * float(strings)


@dataclass(frozen=True)
class Copying(Generating):
    """Cross-entropy with the next token of a copy.

    Attributes:
        length: Letters of a string that is trained on.
        letters: Different ones; `model.num_tokens` is two more.
        test_lengths: Letters of the strings that are tested, each length on its own.
        test_strings: Of each length.
        test_epochs: Test after every so many epochs, and after the last step.

    Source: equation 3.36 of Trockman's thesis (2025), which takes the pipeline of
    https://arxiv.org/abs/2402.01032. There strings of many lengths fill rows of 220 tokens, each
    after a mark of its own and with the state of those before it; here a row is one string.
    """

    length: Count = 50
    letters: Count = 26
    test_lengths: Sequence[Count] = (50, 100, 300)
    test_strings: Count = 128
    test_epochs: Count = 1
    noun = "strings"

    def __post_init__(self) -> None:
        check_fields(self, "objective")
        # YAML gives lists; equal objectives shall be equal.
        object.__setattr__(self, "test_lengths", tuple(self.test_lengths))

    @property
    def crops(self) -> StringMaker:
        return StringMaker(self.length, self.letters)

    def images(self) -> GeneratedStrings:
        return GeneratedStrings()

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> "CopyingLearner":
        """A state space model at its start.

        Raises:
            ConfigurationError: it is another model, or its tokens are not those of the strings.
        """
        del timeline, class_names
        if not isinstance(model, StateSpaceConfig):
            raise ConfigurationError(
                "objective=copying expects a model that reads tokens, got a "
                f"{type(model).__name__.removesuffix('Config')}",
                hint=("model=mamba2", "or", "model=mamba1"),
            )
        if model.num_tokens != (num_tokens := self.letters + NUM_MARKS):
            raise ConfigurationError(
                f"objective.letters={self.letters} expects two tokens more, got model.num_tokens="
                f"{model.num_tokens}",
                hint=(f"model.num_tokens={num_tokens}",),
            )
        network = build_encoder(model, seed=seed)
        # Under the name by which optimizers know its blocks.
        return CopyingLearner(self, nn.Sequential(OrderedDict[str, nn.Module](backbone=network)))

    def observer(self, learner: "CopyingLearner", timeline: Timeline) -> CopyingTest:
        return CopyingTest(self, learner.student.backbone, timeline)


class CopyingLearner(Learner):
    """A model and its loss."""

    options: Copying

    def compilable(self) -> Iterable[nn.Module]:
        """None: a scan is a loop over tokens."""
        return ()

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss over copy and stop, and `train_letters`, right letters of the copy in percent."""
        del step
        (rows,) = views
        length = self.options.length
        logits = network(rows[:, :-1]).float()[:, length:]
        targets = rows[:, length + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        right = (logits.argmax(-1) == targets)[:, :-1]
        return loss, {"train_letters": 100 * right.float().mean()}
