"""Notices a run that no longer learns."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ssl_bench.errors import ConfigurationError


class Watch:
    """Counts sick steps in a row.

    Args:
        diagnose: Gives, for a row of the log, what is wrong and the remedy, or nothing.
        non_finite_patience: Steps without a finite loss and gradient that are tolerated.
        in_bfloat16: Whether products are computed in it.
        diagnosis_patience: Steps with a symptom that are tolerated.
        first_step: Symptoms before it are those of every beginning.
    """

    def __init__(
        self,
        diagnose: Callable[[Mapping[str, Any]], str | None],
        *,
        non_finite_patience: int,
        in_bfloat16: bool,
        diagnosis_patience: int,
        first_step: int,
    ) -> None:
        self._diagnose = diagnose
        self._non_finite_patience = non_finite_patience
        self._remedy = "a lower optimizer.lr"
        if in_bfloat16:
            self._remedy += " or train.precision=float32"
        self._diagnosis_patience = diagnosis_patience
        self._first_step = first_step
        self._non_finite = self._sick = 0

    def check(self, row: Mapping[str, Any]) -> None:
        """Look at the row of the next step.

        Raises:
            ConfigurationError: it was one too many.
        """
        if not all(math.isfinite(row[name]) for name in ("loss", "gradient_norm")):
            self._non_finite += 1
            if self._non_finite >= self._non_finite_patience:
                raise ConfigurationError(
                    f"loss or gradient was not finite for {self._non_finite} steps up to step "
                    f"{row['step']}; start anew in another --out with {self._remedy}"
                )
            return
        self._non_finite = 0
        hint = self._diagnose(row) if row["step"] > self._first_step else None
        self._sick = self._sick + 1 if hint else 0
        if hint and self._sick >= self._diagnosis_patience:
            raise ConfigurationError(
                f"stopped at step {row['step']}: {hint}, for a run in another --out"
            )
