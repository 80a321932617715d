"""What the user is told on stderr: lines, and on a terminal progress with rate and time left."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence, Sized
from functools import cache
from typing import Any, TypeVar

from ssl_bench.system.escaping import escape_unprintable
from ssl_bench.system.process import is_main_process

T = TypeVar("T")
_FIRST_SECONDS, _LATEST_SECONDS = 20.0, 600.0
_REMEMBERED = 1000


def show_progress(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Give back the items unchanged while stderr shows how far they are and what time is left.

    On a terminal that is a bar. Elsewhere, in a log, it is a line after 20 seconds, then whenever
    the time has doubled, and every ten minutes at the latest. Of several processes the first alone
    shows its own.
    """
    if not is_main_process():
        return items
    if total is None and isinstance(items, Sized):
        total = len(items)
    if not sys.stderr.isatty():
        return _logged(items, description, total)
    durations = deque[float](maxlen=_REMEMBERED)
    bar = bar_class()(
        _timed(items, durations),
        desc=escape_unprintable(description),
        total=total,
        disable=None,
        dynamic_ncols=True,
        leave=False,
    )
    bar.durations = durations
    return iter(bar)


@cache
def bar_class() -> Any:
    """Tqdm's bar, with a lock that no other process can hold, and the time left of the usual item.

    tqdm shares its own with processes that are forked: one that is killed while it writes would
    keep all others from writing for ever. Its time left, from the mean, would go on with the first
    item, which waited for what is loaded once; here `durations` are those of the last items.
    """
    # Where it is needed: tqdm takes as long to import as `--help` does for all the rest.
    from tqdm import tqdm

    class Bar(tqdm):  # pyrefly: ignore[implicit-any-type-argument]
        durations: Sequence[float] = ()

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            shown = super().format_dict
            if len(self.durations) > 1 and (usual := typical_duration(self.durations)) > 0:
                shown["rate"] = 1 / usual
            return shown

    # One of its own for each process; a thread that holds it at a fork is not there to let it go.
    os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))
    return Bar


def _timed(items: Iterable[T], durations: deque[float]) -> Iterator[T]:
    last = time.monotonic()
    for item in items:
        yield item
        now = time.monotonic()
        durations.append(now - last)
        last = now


def _logged(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    start = last = time.monotonic()
    wait, durations = _FIRST_SECONDS, deque[float](maxlen=_REMEMBERED)
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        durations.append(now - last)
        last, passed = now, now - start
        if passed >= wait:
            wait = passed + min(passed, _LATEST_SECONDS)
            say(_line(description, done, total, passed, durations))


def _line(
    description: str, done: int, total: int | None, seconds: float, durations: Sequence[float]
) -> str:
    if not total:
        return f"{description}: {done} in {format_duration(seconds)}"
    if done == 1 < total:
        # It waited for what is loaded once.
        return f"{description}: {done} of {total} in {format_duration(seconds)}"
    left = typical_duration(durations) * (total - done)
    about = f"about {format_duration(left)}" if left >= 1 else "less than a second"
    return f"{description}: {done} of {total}, {about} left"


def typical_duration(durations: Sequence[float]) -> float:
    """Seconds of the median item, whose batch came as a whole if others followed it at once.

    Of the first batch, whose images come at once before all of them are waited for, the mean.
    """
    longest = max(durations)
    if 2 * longest > sum(durations) and longest > durations[0]:
        return sum(durations) / len(durations)
    # The longest may have waited for what is loaded once.
    second = sorted(durations)[-2:][0]
    batches: list[list[float]] = []
    for duration in durations:
        if not batches or duration > second / 10:
            batches.append([])
        batches[-1].append(duration)
    each = sorted(sum(batch) / len(batch) for batch in batches for _ in batch)
    return each[(len(each) - 1) // 2]


def format_duration(seconds: float) -> str:
    """Such as "40 s", "12 min" or "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(size: int) -> str:
    """Such as "12.3 MB", of bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.1f} MB"


def say(line: str) -> None:
    """Tell the user on stderr, beside bars; stdout is for tables. The first process alone does."""
    if not is_main_process():
        return
    with bar_class().external_write_mode(file=sys.stderr):
        print(escape_unprintable(line), file=sys.stderr, flush=True)


@cache
def say_once(line: str) -> None:
    """As `say`, the first time in a process alone."""
    say(line)
