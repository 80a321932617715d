"""What stands for an image: `probe.pool=fixed` or `attentive`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probes.heads.sgd import floats
from ssl_bench.composition.fields import Count, Rate, check_fields, require_some

if TYPE_CHECKING:
    import torch

    from probes.heads.attentive import AttentiveTraining

ATTENTIVE_FACET = "patch_attentive"
"""As records have it: the patches after the final norm, pooled where a head learned to look."""


@dataclass(frozen=True)
class FixedPooling:
    """What `probe.facet` says, the same for all heads; `probe.training` fits these."""

    def settings(self) -> dict[str, Any]:
        """Nothing that the facet and the training do not say."""
        return {}


@dataclass(frozen=True)
class AttentivePooling:
    """Every head pools the patches by queries that it learns, with steps of LARS.

    Attributes:
        queries: Each gives its slice of the channels, so they divide the width of the encoder.
        learning_rates: All are trained; which one counts is chosen afterwards.
        batch_size: Images of a step, over which pooled channels are normalised.

    Source: Efficient probing, https://github.com/billpsomas/efficient-probing (b8f4fb84), whose
    rates are .1 to 1.5 at this batch size, for 90 epochs of new crops.
    """

    queries: Count = 32
    learning_rates: Sequence[Rate] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    epochs: Count = 20
    batch_size: Count = 256

    def __post_init__(self) -> None:
        check_fields(self, "probe.pool")
        require_some("probe.pool.learning_rates", self.learning_rates)

    def settings(self) -> dict[str, Any]:
        return {
            "pool": "attentive",
            "queries": self.queries,
            "optimizer": "lars",
            "learning_rates": floats(self.learning_rates),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
        }

    def training(self, *, classes: int, seed: int, device: "torch.device") -> "AttentiveTraining":
        from probes.heads.attentive import AttentiveTraining
        from probes.heads.optimizers import LARS, Schedule

        return AttentiveTraining(
            values=tuple(floats(self.learning_rates)),
            queries=self.queries,
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=LARS(),
            # As theirs: ten epochs of ninety.
            schedule=Schedule("cosine", warmup=1 / 9),
            classes=classes,
            seed=seed,
            device=device,
        )
