"""How the heads of a classification are fitted: `probe.training=sgd` or `lbfgs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from probes.heads.logistic import LogisticTraining
from probes.heads.optimizers import SGD, Schedule
from probes.heads.sgd import Heads, HeadTraining, Training
from ssl_bench.composition.fields import Count, Positive, Rate, check_fields, require_some

# That of scikit-learn's LogisticRegression.
_TOLERANCE = 1e-4


@runtime_checkable
class HeadFitting(Protocol):
    """A way to fit heads; `settings` are what records say of it."""

    def settings(self) -> dict[str, Any]: ...

    def of_heads(self, heads: Heads) -> Training: ...


@dataclass(frozen=True)
class LogisticRegression:
    """Logistic regressions, each fitted to its end by L-BFGS.

    Attributes:
        c_values: C of scikit-learn's: weight of the loss against the penalty. All are fitted;
            which one counts is chosen afterwards.
        batch_size: Images that are looked at together; the result does not depend on it.
    """

    c_values: Sequence[Positive] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    max_iterations: Count = 1000
    batch_size: Count = 1024

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_some("probe.training.c_values", self.c_values)

    def settings(self) -> dict[str, Any]:
        return {
            "optimizer": "lbfgs",
            "c_values": [float(c) for c in self.c_values],
            "max_iterations": self.max_iterations,
        }

    def of_heads(self, heads: Heads) -> LogisticTraining:
        return LogisticTraining(
            values=tuple(float(c) for c in self.c_values),
            max_iterations=self.max_iterations,
            batch_size=self.batch_size,
            gradient_tolerance=_TOLERANCE,
            **vars(heads),
        )


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
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "epochs": self.epochs,
            "batch_size": self.batch_size,
        }

    def of_heads(self, heads: Heads) -> HeadTraining:
        return HeadTraining(
            values=tuple(float(rate) for rate in self.learning_rates),
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=SGD(weight_decay=0.0),
            schedule=Schedule("cosine", warmup=0.0),
            **vars(heads),
        )
