"""Ways to fit heads, as a configuration names them; each makes a `Training` of what it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ssl_bench.composition.fields import Count, Positive, check_fields, require_some

if TYPE_CHECKING:
    from probes.heads.logistic import LogisticTraining
    from probes.heads.sgd import Heads, Training


@runtime_checkable
class HeadFitting(Protocol):
    """How heads are fitted."""

    def settings(self) -> dict[str, Any]:
        """What records say of it."""
        ...

    def of_heads(self, heads: "Heads") -> "Training": ...


@dataclass(frozen=True)
class LogisticRegression:
    """Logistic regressions, each fitted to its end by L-BFGS.

    Attributes:
        c_values: C of scikit-learn's: weight of the loss against the penalty. All are fitted;
            which one counts is chosen afterwards.
        batch_size: Images that are looked at together; the result does not depend on it.
        gradient_tolerance: A head has converged where no entry of the mean loss's gradient exceeds
            it.
    """

    c_values: Sequence[Positive]
    max_iterations: Count = 1000
    batch_size: Count = 16

    gradient_tolerance: ClassVar[float] = 1e-6

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_some("probe.training.c_values", self.c_values)

    def settings(self) -> dict[str, Any]:
        return {
            "optimizer": "lbfgs",
            "c_values": floats(self.c_values),
            "max_iterations": self.max_iterations,
        }

    def of_heads(self, heads: "Heads") -> "LogisticTraining":
        from probes.heads.logistic import LogisticTraining

        return LogisticTraining(
            values=tuple(floats(self.c_values)),
            max_iterations=self.max_iterations,
            batch_size=self.batch_size,
            gradient_tolerance=self.gradient_tolerance,
            **vars(heads),
        )


def floats(grid: Sequence[float]) -> list[float]:
    """1 and 1.0 of a grid alike."""
    return [float(value) for value in grid]
