"""The copying task: a state space model reads a random string and then repeats it.

The strings are drawn at random during training and are not stored on the disk. A string of n
letters becomes a row of 2 n + 2 tokens, `x_1 ... x_n | x_1 ... x_n .`, with the delimiter `|` and
the stop `.`. With k different letters, the tokens 0 to k - 1 are letters, token k is the delimiter,
and token k + 1 is the stop. The model reads all tokens of a row except the stop token. The loss
covers only the predictions after the delimiter.
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
from pretrain.objectives.objective import GeneratingObjective, Learner, PeriodicEvaluation, Views
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Count, check_fields
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig, StateSpaceModel, build_encoder
from ssl_bench.models.encoder import IMAGENET_NORMALIZATION, Normalization
from ssl_bench.system.device import to_float64, upload

# Number of tokens besides the letters: `|` and `.`.
NUM_MARKS = 2
# Number of strings in an epoch. Each epoch has its own strings.
STRINGS_PER_EPOCH = 32_000
# First number of each seed for test strings. pretrain/batches.py uses other first numbers.
_TEST = 4
# Number of rows that the model reads at once in a test.
_BATCH = 32

Letters = Int64[Tensor, "batch length"]
Rows = Int64[Tensor, "batch row"]


@dataclass(frozen=True)
class Copying(GeneratingObjective):
    """Objective of the copying task: the cross-entropy of next tokens in copied random strings.

    Attributes:
        length: Number of letters in a training string.
        letters: Number of different letters. The option `model.num_tokens` must be this number plus
            two, for the delimiter and the stop token.
        test_lengths: Numbers of letters in test strings. Each length is tested separately.
        test_strings: Number of test strings of each length.
        test_epochs: Number of epochs between two tests. There is also a test after the last step.

    Source: equation 3.36 of Trockman's thesis (2025), which uses the data pipeline of
    https://arxiv.org/abs/2402.01032. In the pipeline of arXiv:2402.01032, a row of 220 tokens
    contains several strings, each with its own delimiter, and the model keeps its state between
    strings. Here, each training sequence contains a single string.
    """

    length: Count = 50
    letters: Count = 26
    test_lengths: Sequence[Count] = (50, 100, 300)
    test_strings: Count = 128
    test_epochs: Count = 1
    noun = "strings"

    def __post_init__(self) -> None:
        check_fields(self, "objective")
        # YAML files give lists. A tuple makes equal objectives compare as equal.
        object.__setattr__(self, "test_lengths", tuple(self.test_lengths))

    @property
    def crops(self) -> "StringMaker":
        return StringMaker(self.length, self.letters)

    def images(self) -> "GeneratedStrings":
        """Return a placeholder image for each string. `StringMaker` draws the strings."""
        return GeneratedStrings()

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> "CopyingLearner":
        """Build a learner with a state space model.

        Raises:
            ConfigurationError: The model is not a state space model, or has the wrong number of
                tokens.
        """
        del timeline, class_names
        if not isinstance(model, StateSpaceConfig):
            raise ConfigurationError(
                "objective=copying trains a state space model, but model is a "
                f"{type(model).__name__.removesuffix('Config')}",
                hint=("model=mamba2", "or", "model=mamba1"),
            )
        if model.num_tokens != (num_tokens := self.letters + NUM_MARKS):
            raise ConfigurationError(
                f"for {self.letters} letters (objective.letters), the model must have {num_tokens} "
                f"tokens, got model.num_tokens={model.num_tokens}",
                hint=(f"model.num_tokens={num_tokens}",),
            )
        network = build_encoder(model, seed=seed)
        # Optimizers recognise the blocks of the encoder by the name "backbone".
        return CopyingLearner(self, nn.Sequential(OrderedDict[str, nn.Module](backbone=network)))

    def build_evaluator(self, learner: "CopyingLearner", timeline: Timeline) -> "CopyingTest":
        """Return an object that tests the model every few epochs, always on the same strings."""
        return CopyingTest(self, learner.student.backbone, timeline)


class CopyingLearner(Learner):
    """A state space model and the loss of the copying task."""

    options: Copying

    def compilable(self) -> Iterable[nn.Module]:
        """Return no module, because `torch.compile` would unroll the loop over tokens."""
        return ()

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the mean cross-entropy of all tokens after the delimiter.

        Args:
            network: The student network, possibly wrapped for training on several devices.
            views: One tensor, which contains a row of tokens for each string (see `make_rows`).
            step: Ignored.

        Returns:
            The loss, and the percentage of correct letters, which is logged as `train_letters`.
        """
        del step
        (rows,) = views
        length = self.options.length
        logits = network(rows[:, :-1]).float()[:, length:]
        targets = rows[:, length + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        is_correct = (logits.argmax(-1) == targets)[:, :-1]
        return loss, {"train_letters": 100 * is_correct.float().mean()}


@dataclass(frozen=True)
class StringMaker(ViewMaker):
    """A view maker that draws random strings instead of cropping images.

    Attributes:
        letters: Number of different letters, which are equally likely.
    """

    length: int
    letters: int

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """Return an empty tuple, because strings have no image size."""
        del image_size, patch_size
        return ()

    def cut(self, samples: Samples, generators: Generators, sizes: Sequence[int]) -> Letters:
        """Draw one random string for each generator. Letters are represented by numbers from 0.

        The arguments `samples` and `sizes` are not used.
        """
        del samples, sizes
        strings = [generator.integers(self.letters, size=self.length) for generator in generators]
        return torch.from_numpy(np.stack(strings))

    def augment_on_device(
        self,
        micro_batch: Letters,
        device: torch.device,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Rows]:
        """Return one tensor on the device, with a row of tokens for each string."""
        del normalization
        return (make_rows(upload(micro_batch, device), self.letters),)


@dataclass(frozen=True)
class GeneratedStrings:
    """An image set for an objective that generates strings instead of reading images.

    For each string of an epoch, the set contains an id and an image that is a single black pixel.
    """

    name = "copying"
    split = "train"
    class_names = tuple[str, ...]()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"string{number:05d}" for number in range(STRINGS_PER_EPOCH))

    def __len__(self) -> int:
        return STRINGS_PER_EPOCH

    def __getitem__(self, index: int) -> Sample:
        return Sample(f"string{index:05d}", np.zeros((1, 1, 3), np.uint8))

    def fingerprint(self) -> str:
        """Return a constant SHA-256, because the seed and the options determine all strings."""
        return hashlib.sha256(f"{self.name} {len(self)}".encode()).hexdigest()


class CopyingTest(PeriodicEvaluation):
    """A test of how well a model copies fixed strings, repeated every few epochs.

    The test is also run after the last training step. The model predicts each letter of the copy
    from the correct preceding tokens. The most likely token counts as the prediction. The
    prediction of the stop token is not scored.
    """

    cost_options = "objective.test_lengths, .test_strings and .test_epochs"

    def __init__(self, options: Copying, model: StateSpaceModel, timeline: Timeline) -> None:
        self.options, self.model, self.timeline = options, model, timeline

    def measure_if_due(self, step: int) -> Mapping[str, float]:
        """Test how well the model copies strings, if a test is due after this step.

        Args:
            step: Number of optimizer steps that the run has completed.

        Returns:
            Two percentages for each string length. For length 50, `letters_50` is the percentage of
            correct letters, and `strings_50` is the percentage of strings without a wrong letter.
            The mapping is empty if no test is due after this step.
        """
        options, percentages = self.options, {}
        if self.timeline.is_due(options.test_epochs, step):
            for length in options.test_lengths:
                tests = draw_test_strings(length, options.letters, options.test_strings)
                is_correct = find_correct_letters(self.model, tests, options.letters)
                letters, strings = compute_accuracies(is_correct)
                percentages |= {f"letters_{length}": letters, f"strings_{length}": strings}
        return percentages


def make_rows(strings: Letters, letters: int) -> Rows:
    """Return one row of tokens for each string.

    A row consists of the string, the delimiter, the string again, and the stop token.

    Args:
        strings: Strings whose letters are numbers from 0.
        letters: Number of different letters. The token of the delimiter has the same number.
    """
    delimiter = strings.new_full((len(strings), 1), letters)
    return torch.cat([strings, delimiter, strings, delimiter + 1], 1)


def draw_test_strings(length: int, letters: int, count: int) -> Letters:
    """Return `count` random strings of `length` letters, which are the same in all runs.

    `letters` is the number of different letters.
    """
    generator = np.random.default_rng((_TEST, length, letters))
    return torch.from_numpy(generator.integers(letters, size=(count, length)))


@torch.no_grad()
def find_correct_letters(
    model: StateSpaceModel, strings: Letters, letters: int
) -> Bool[Tensor, "batch length"]:
    """Return for each letter of each string whether the model copies it correctly.

    Args:
        model: The state space model.
        strings: Test strings, with letters as numbers from 0.
        letters: Number of different letters.
    """
    device, length = model.embedding.weight.device, strings.shape[1]
    is_correct = []
    for batch in strings.split(_BATCH):
        rows = make_rows(batch.to(device), letters)
        predictions = model.forward(rows[:, :-1])[:, length:-1].argmax(-1)
        is_correct.append(predictions == rows[:, length + 1 : -1])
    return torch.cat(is_correct)


def compute_accuracies(is_correct: Bool[Tensor, "batch length"]) -> tuple[float, float]:
    """Return the percentage of correct letters and the percentage of entirely correct strings."""
    letters, strings = to_float64(is_correct).mean(), to_float64(is_correct.all(1)).mean()
    return 100 * float(letters), 100 * float(strings)
