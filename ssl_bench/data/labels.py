"""From the numbers that a mask stores to classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from jaxtyping import Int16, Integer, UInt8

from ssl_bench.errors import DataError

_UNKNOWN = -1


@dataclass(frozen=True)
class LabelMap:
    """What each stored number of a mask means; any other number is an error.

    Attributes:
        classes: Stored number, 0 to 255, to class or `IGNORED`.
        hint: What to do about a number that is not in `classes`.
    """

    classes: Mapping[int, int]
    hint: str

    def apply(
        self, stored: Integer[np.ndarray, "height width"], path: Path
    ) -> UInt8[np.ndarray, "height width"]:
        """Turn stored numbers into classes; `path` is the file to name in an error.

        Raises:
            DataError: a number that has no class.
        """
        if stored.dtype != np.uint8 and not ((stored >= 0) & (stored < 256)).all():
            raise self._stranger(int(stored[(stored < 0) | (stored > 255)][0]), path)
        classes = self._table[stored]
        if classes.min() == _UNKNOWN:
            raise self._stranger(int(stored[classes == _UNKNOWN][0]), path)
        return classes.astype(np.uint8)

    @cached_property
    def _table(self) -> Int16[np.ndarray, "256"]:
        # Wider than uint8, in which "no class" could not be told from a class.
        table = np.full(256, _UNKNOWN, np.int16)
        table[list(self.classes)] = list(self.classes.values())
        return table

    def _stranger(self, value: int, path: Path) -> DataError:
        ordered = enumerate(sorted(self.classes))
        runs = [[n for _, n in run] for _, run in groupby(ordered, key=lambda one: one[1] - one[0])]
        known = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return DataError(f"{path} holds label {value}, expected {known}; {self.hint}")


def voc_colours() -> UInt8[np.ndarray, "256 3"]:
    """VOC's colours of classes 0 to 255: three bits a channel, the high ones first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    # A row for each bit of a channel, of which a number of 8 bits fills two and two thirds.
    rows = np.pad(bits, ((0, 0), (0, 16))).reshape(256, 8, 3)
    return np.packbits(rows, axis=1)[:, 0]
