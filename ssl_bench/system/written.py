"""Folders that this program wrote, known by a mark or what is in them; walks without them."""

import os
from collections.abc import Iterator
from pathlib import Path

from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.progress import say_once

REPORT = ".ssl-bench-report"
_MARK = ".ssl-bench-written"
_STORED = ("records.parquet", "records/*/*/*.json", f"images/{'[0-9a-f]' * 16}.json")


def mark_as_written(folder: Path) -> None:
    """Leave word in a folder, made if need be, that its pictures are no data.

    Raises:
        MachineError: it cannot be written.
    """
    if not (folder / _MARK).exists():
        write_text_atomically(folder / _MARK, "ssl-bench wrote this and reads no data from it\n")


def is_written(folder: Path) -> bool:
    """Whether this program wrote the pictures in a folder."""
    if any((folder / mark).is_file() for mark in (_MARK, REPORT)):
        return True
    # Of versions that left no mark.
    return folder.name == "pictures" and any(
        next(folder.parent.glob(pattern), None) is not None for pattern in _STORED
    )


def files_below(root: Path) -> Iterator[str]:
    """Paths of all files below a folder, those of each folder before those of the folders in it.

    Hidden ones are passed over, and what this program wrote there: pictures beside records,
    reports, generated scenes. A line says so. Links to other folders are followed. `root` itself
    is taken at its word.
    """
    seen: set[str] = set()
    written: list[Path] = []
    for name, children, names in os.walk(root, followlinks=True):
        folder, real = Path(name), os.path.realpath(name)
        # A link to a folder further up would never end.
        if real in seen:
            children.clear()
        elif folder != root and is_written(folder):
            written.append(folder)
            children.clear()
        else:
            below = folder.relative_to(root)
            children[:] = sorted(child for child in children if child[0] != ".")
            yield from ((below / name).as_posix() for name in names if name[0] != ".")
        seen.add(real)
    if written:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        say_once(f"left out, because ssl-bench wrote it: {written[0]}{more}")
