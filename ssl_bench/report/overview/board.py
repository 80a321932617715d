"""The first table of a report: a row a checkpoint, a column a task and dataset."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.model import Panel, Point
from ssl_bench.report.overview.differing import Differing, Facts, differing
from ssl_bench.report.overview.headlines import headline_panels

_IN_HEADS = ("on", "facet", "protocol")
# For programs; the page of the checkpoint has it.
_NO_COLUMN = "modules sha256"


@dataclass(frozen=True)
class Column:
    """One measurement.

    Attributes:
        facts: What sets it apart from the other columns.
    """

    panel: Panel
    facts: tuple[str, ...]

    def at(self, checkpoint: Checkpoint) -> Point | None:
        """The best point, or where more is not better that of the last block."""
        line = self.panel.line(checkpoint)
        return (line.best or line.last) if line else None

    def where(self, checkpoint: Checkpoint) -> str:
        """At which block that is, or which several share it."""
        line = self.panel.line(checkpoint)
        return line.said_best if line else ""

    def unbeaten(self, checkpoint: Checkpoint) -> str:
        """The answers without a look at the images that its best block does not beat, in words."""
        point = self.at(checkpoint)
        found = [name for name, score in self.panel.baselines if point and point.value <= score]
        return f"not above {' and '.join(found)}" if found else ""


@dataclass(frozen=True)
class Board:
    """Checkpoints against headline metrics.

    Attributes:
        checkpoints: What they differ in, row by row.
        shared: What all columns share.
    """

    rows: tuple[Checkpoint, ...]
    checkpoints: Differing
    columns: tuple[Column, ...]
    shared: Facts

    @property
    def has_baselines(self) -> bool:
        """Whether a column has an answer beside it that looks at no image."""
        return any(column.panel.baselines for column in self.columns)


def board_of(panels: Sequence[Panel], checkpoints: Sequence[Checkpoint]) -> Board:
    """Of each task and dataset one column."""
    chosen = headline_panels(panels)
    facts = differing([[f for f in panel.facts if f[0] in _IN_HEADS] for panel in chosen])
    return Board(
        rows=tuple(checkpoints),
        checkpoints=differing(
            [[fact for fact in one.facts if fact[0] != _NO_COLUMN] for one in checkpoints]
        ),
        columns=tuple(Column(panel, facts.words(number)) for number, panel in enumerate(chosen)),
        shared=facts.shared,
    )
