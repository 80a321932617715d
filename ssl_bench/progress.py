"""Progress with rate and time left on a terminal, silence elsewhere."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

from ssl_bench.escaping import printable

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
