"""What the rows of a table differ in, to be columns, and what they share, to be said once."""

from collections.abc import Sequence
from dataclasses import dataclass

Facts = Sequence[tuple[str, str]]
"""Names and values; those of one row have different names."""

_PLAIN = ("metric", "on", "facet")


@dataclass(frozen=True)
class Differing:
    """Facts of some rows, taken apart.

    Attributes:
        names: Those in which the rows differ, some of them by not having it.
        rows: Their values, row by row, empty where a row has none.
        shared: Names and values that all rows have.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[str, str], ...]

    def row(self, number: int) -> tuple[tuple[str, str], ...]:
        """Names and values of a row in which rows differ."""
        return tuple(zip(self.names, self.rows[number], strict=True))

    def words(self, number: int) -> tuple[str, ...]:
        """Values of a row that explain themselves, others with their names."""
        return tuple(
            value if name in _PLAIN else f"{name} {value}"
            for name, value in self.row(number)
            if value
        )


def differing(rows: Sequence[Facts]) -> Differing:
    """Take the facts of rows apart, in the order in which their names come up."""
    known = [dict(row) for row in rows]
    names = list(dict.fromkeys(name for row in known for name in row))
    differ = [name for name in names if len({row.get(name) for row in known}) > 1]
    return Differing(
        names=tuple(differ),
        rows=tuple(tuple(row.get(name, "") for name in differ) for row in known),
        shared=tuple((name, known[0][name]) for name in names if name not in differ),
    )
