"""How the heads of a classification are fitted: `probe.training=sgd` or `lbfgs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probes.heads.logistic import LogisticRegression
from probes.heads.sgd import floats
from ssl_bench.composition.fields import Count, Positive, Rate, check_fields, require_some

if TYPE_CHECKING:
    from probes.heads.sgd import Heads, HeadTraining


@dataclass(frozen=True)
class ImageRegression(LogisticRegression):
    """Logistic regressions of images, as far fitted as scikit-learn's are."""

    c_values: Sequence[Positive] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    batch_size: Count = 1024

    # That of scikit-learn's LogisticRegression.
    gradient_tolerance = 1e-4


@dataclass(frozen=True)
class Momentum:
    """Steps of SGD with momentum .9 and rates that fall to zero with a cosine.

    Attributes:
        learning_rates: All are trained; which one counts is chosen afterwards.
        batch_size: Images of a step.
    """

    learning_rates: Sequence[Rate] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
    epochs: Count = 100
    batch_size: Count = 1024

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_some("probe.training.learning_rates", self.learning_rates)

    def settings(self) -> dict[str, Any]:
        return {
            "optimizer": "sgd",
            "learning_rates": floats(self.learning_rates),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
        }

    def of_heads(self, heads: "Heads") -> "HeadTraining":
        from probes.heads.optimizers import SGD, Schedule
        from probes.heads.sgd import HeadTraining

        return HeadTraining(
            values=tuple(floats(self.learning_rates)),
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=SGD(weight_decay=0.0),
            schedule=Schedule("cosine", warmup=0.0),
            **vars(heads),
        )
