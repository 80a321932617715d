"""Where the time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of each step, and how many of them were spent waiting for data."""

    def __init__(self) -> None:
        self._start = self._saved = self._lap = self._begun = time.monotonic()
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and those of them that were spent waiting."""
        now = time.monotonic()
        seconds, waited = now - self._lap, self._waited
        self._lap, self._waited = now, 0.0
        return max(seconds, 1e-9), waited

    def begin(self) -> None:
        """Start the first lap here; what came before was preparation, or a pause."""
        self._lap = self._begun = time.monotonic()

    @property
    def seconds_since_begin(self) -> float:
        """Since the training began, or went on after a pause."""
        return time.monotonic() - self._begun

    def mark_saved(self) -> None:
        self._saved = time.monotonic()

    @property
    def minutes_since_start(self) -> float:
        return (time.monotonic() - self._start) / 60

    @property
    def minutes_since_save(self) -> float:
        return (time.monotonic() - self._saved) / 60
