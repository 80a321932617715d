"""Check whether the fingerprint of a dataset changes."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from ssl_bench.data.samples import ImageSet


def settle() -> None:
    # Timestamps advance every 4 ms. A file written next must get a later one.
    time.sleep(0.02)


def repaint(path: Path, old: bytes | None = None, new: bytes = b"") -> None:
    """Change the content of a file but keep its size and modification time."""
    settle()
    status, content = path.stat(), path.read_bytes()
    if old is None:
        old = content[-16:]
        new = bytes(byte ^ 1 for byte in old)
    assert content.count(old) >= 1
    assert len(old) == len(new)
    with path.open("r+b") as file:
        file.write(content.replace(old, new))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert after.st_ino == status.st_ino
    settle()


def assert_fingerprint_depends_on(
    open_images: Callable[[], ImageSet], *changes: Callable[[], object]
) -> None:
    """Check that each change of a dataset leads to a different fingerprint."""
    found = [open_images().fingerprint() for _ in range(2)]
    for change in changes:
        change()
        found.append(open_images().fingerprint())
    assert found[0] == found[1]
    assert len(set(found)) == len(changes) + 1
