"""What the user is told on stderr: lines, and on a terminal progress with rate and time left."""

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

from ssl_bench.system.escaping import printable

T = TypeVar("T")


def show_progress(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Give back the items unchanged while a bar on stderr shows rate and time left."""
    bar = tqdm(
        items,
        desc=printable(description),
        total=total,
        disable=None,
        dynamic_ncols=True,
        leave=False,
    )
    return iter(bar)


def say(line: str) -> None:
    """Tell the user on stderr, beside bars; stdout is for tables."""
    with tqdm.external_write_mode(file=sys.stderr):
        print(printable(line), file=sys.stderr, flush=True)
