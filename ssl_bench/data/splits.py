"""Names of splits, and shares of them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import read_regular

_GRAMMAR = re.compile(r"([^:%]+)(?::(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)%)?")


@dataclass(frozen=True)
class Split:
    """A split, or a share of it: `train2017`, `train2017:0-75%`.

    Attributes:
        name: What the dataset calls it.
        start: Percent of the sorted ids at which the share begins.
        stop: Percent at which it ends, exclusive.
    """

    name: str
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(100)

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Read `NAME` or `NAME:a-b%`.

        Raises:
            ConfigurationError: the text is neither.
        """
        match = _GRAMMAR.fullmatch(text)
        if match is not None:
            name, start, stop = match.groups()
            split = cls(name, Fraction(start or 0), Fraction(stop or 100))
            if split.start < split.stop <= 100:
                return split
        raise ConfigurationError(
            f"expected a split such as train or train:0-75% (0 <= a < b <= 100), got {text!r}"
        )

    def cut(self, ids: Collection[str]) -> tuple[str, ...]:
        """The sorted ids of this share. Shares that meet neither overlap nor leave a gap."""
        first, last = (int(len(ids) * share / 100) for share in (self.start, self.stop))
        return tuple(sorted(ids)[first:last])


def require_disjoint(train: str, val: str) -> None:
    """Refuse to score on what a head was fitted to.

    Raises:
        ConfigurationError: both are shares of one split and have images in common.
    """
    one, other = Split.parse(train), Split.parse(val)
    if one.name == other.name and max(one.start, other.start) < min(one.stop, other.stop):
        raise ConfigurationError(
            f"train_split={train} and val_split={val} share images; "
            f"take for example {one.name}:0-75% and {one.name}:75-100%"
        )


def read_list(path: Path) -> list[str]:
    """The ids in a list file: one a line, perhaps a path, perhaps with more columns after it.

    Raises:
        DataError: there is no such list; the others beside it are named.
    """
    if not path.is_file():
        raise absent_split(path.stem, [f.stem for f in path.parent.glob("*.txt")], path.parent)
    lines = read_lines(path)
    return [PurePosixPath(line.split()[0]).stem for line in lines if line.strip()]


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text; a `DataError` where it cannot be read or is none."""
    try:
        return read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a text file ({error}); fetch it again") from error


def absent_split(
    name: str, present: Sequence[str], where: Path, whole: Sequence[str] | None = None
) -> DataError:
    """The error for a split that is not there, with the overrides that do without it.

    Args:
        name: Of the split.
        present: Splits that are there.
        where: The folder or list that holds them.
        whole: Those that can be cut in two; all if None.
    """
    if not present:
        return DataError(f"{where} has no split {name}, nor any other; see docs/data.md")
    # VOC has 60 lists for single classes beside the few that are meant: those have short names.
    nearest = sorted(present, key=lambda other: (len(other), other))[:5]
    ordered = nearest if whole is None else sorted(whole)
    first = next((other for other in ordered if other.startswith("train")), ordered[0])
    return DataError(
        f"{where} has no split {name}, but {', '.join(nearest)}; see docs/data.md, or cut one in "
        f"two: dataset.train_split={first}:0-75% dataset.val_split={first}:75-100%"
    )
