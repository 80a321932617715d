"""Messages and progress on stderr. Progress is a bar on a terminal and a list of lines in a log."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sized
from functools import cache
from typing import Any, TypeVar

from ssl_bench.system.escaping import escape_unprintable
from ssl_bench.system.process import is_main_process

T = TypeVar("T")
_FIRST_LINE_SECONDS, _MAX_SECONDS_BETWEEN_LINES = 20.0, 600.0


def say(line: str) -> None:
    """Print a message on stderr without breaking a progress bar, if this process has rank 0."""
    if not is_main_process():
        return
    with bar_class().external_write_mode(file=sys.stderr):
        print(escape_unprintable(line), file=sys.stderr, flush=True)


@cache
def say_once(line: str) -> None:
    """Print a message as `say` does. If it is repeated in the same process, do nothing."""
    say(line)


def show_progress(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Yield the items, and show on stderr how many are finished and how much time is left.

    A terminal shows a bar. A log gets a line after 20 seconds, then each time the elapsed time has
    doubled, and at least every ten minutes. Only the process of rank 0 shows its progress.

    `total` is the number of items. The default is `len(items)`, or unknown without a length.
    """
    if not is_main_process():
        return items
    if total is None and isinstance(items, Sized):
        total = len(items)
    return (_show_bar if sys.stderr.isatty() else _log_progress)(items, description, total)


def _show_bar(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    text = escape_unprintable(description)
    with bar_class()(desc=text, total=total, dynamic_ncols=True, leave=False) as bar:
        for item in items:
            yield item
            bar.update()


@cache
def bar_class() -> Any:
    """Return a subclass of tqdm's progress bar with two changes.

    The remaining time is computed without the first item, which takes longer because data and
    models must be loaded. Each process has its own lock. Forked processes of tqdm share a lock, so
    all of them would wait forever if one of them were killed while it prints.
    """
    # Imported here because the import takes as long as everything else that `--help` does.
    from tqdm import tqdm

    class Bar(tqdm):  # pyrefly: ignore[implicit-any-type-argument]
        first_seconds: float | None = None

        def update(self, n: float | None = 1) -> bool | None:
            if self.first_seconds is None:
                self.first_seconds = super().format_dict["elapsed"]
            return super().update(n)

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            values = super().format_dict
            if self.first_seconds is not None and not self.disable:
                seconds = values["elapsed"] - self.first_seconds
                later_items = self.n - self.initial - 1
                if later_items > 0 and seconds > 0:
                    values["rate"] = later_items / seconds
            return values

    # The thread that holds the lock during a fork does not exist in the child.
    os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))
    return Bar


def _log_progress(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    start = time.monotonic()
    next_line, first_seconds = _FIRST_LINE_SECONDS, 0.0
    for count, item in enumerate(items, 1):
        yield item
        elapsed = time.monotonic() - start
        if count == 1:
            first_seconds = elapsed
        if elapsed >= next_line:
            next_line = elapsed + min(elapsed, _MAX_SECONDS_BETWEEN_LINES)
            say(f"{description}: {_format_progress(count, total, elapsed, first_seconds)}")


def _format_progress(count: int, total: int | None, elapsed: float, first_seconds: float) -> str:
    if not total:
        return f"{count} in {format_duration(elapsed)}"
    if count == 1 < total:
        return f"{count} of {total} in {format_duration(elapsed)}"
    seconds_left = (total - count) * (elapsed - first_seconds) / max(count - 1, 1)
    left = f"about {format_duration(seconds_left)}" if seconds_left >= 1 else "less than a second"
    return f"{count} of {total}, {left} left"


def format_duration(seconds: float) -> str:
    """Format a duration as "40 s", "12 min" or "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(size: int) -> str:
    """Format a number of bytes as "12.3 MB" or "1.2 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.1f} MB"
