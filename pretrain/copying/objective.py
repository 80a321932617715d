"""Copying: a state space model reads a string and a mark, and says the string again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pretrain.copying.strings import NUM_MARKS, GeneratedStrings, StringMaker
from pretrain.copying.tested import CopyingTest
from pretrain.objectives.objective import Independent, Views
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Count, check_fields
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig, StateSpaceModel, build_encoder


@dataclass(frozen=True)
class Copying:
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

    def __post_init__(self) -> None:
        check_fields(self, "objective")
        # YAML gives lists; equal objectives shall be equal.
        object.__setattr__(self, "test_lengths", tuple(self.test_lengths))

    @property
    def crops(self) -> StringMaker:
        return StringMaker(self.length, self.letters)

    def images(self) -> GeneratedStrings:
        """What stands for the images of other objectives."""
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
                f"{type(model).__name__.removesuffix('Config')}: take model=mamba2 or model=mamba1"
            )
        if model.num_tokens != self.letters + NUM_MARKS:
            raise ConfigurationError(
                f"objective.letters={self.letters} expects model.num_tokens="
                f"{self.letters + NUM_MARKS}, two marks more, got {model.num_tokens}"
            )
        network = build_encoder(model, seed=seed)
        assert isinstance(network, StateSpaceModel)
        return CopyingLearner(self, CopyingNetwork(network))

    def observer(self, learner: "CopyingLearner", timeline: Timeline) -> CopyingTest:
        """What tests the learner now and then."""
        return CopyingTest(
            learner.encoder,
            timeline,
            lengths=self.test_lengths,
            letters=self.letters,
            strings=self.test_strings,
            epochs=self.test_epochs,
        )


class CopyingNetwork(nn.Module):
    """The model under the name by which optimizers know its blocks."""

    def __init__(self, backbone: StateSpaceModel) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(
        self, tokens: Int64[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens choices"]:
        return self.backbone(tokens)


class CopyingLearner(Independent):
    """A network and its loss."""

    def __init__(self, options: Copying, student: CopyingNetwork) -> None:
        super().__init__()
        self.options, self.student = options, student

    @property
    def encoder(self) -> StateSpaceModel:
        return self.student.backbone

    @property
    def encoders(self) -> Sequence[StateSpaceModel]:
        return (self.encoder,)

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

    def diagnose(self, row: Mapping[str, Any]) -> str | None:
        """Nothing that the loss itself would not show."""
        del row
