"""Change files without changing their size or modification time, and compare fingerprints."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from ssl_bench.data.samples import ImageSet


def settle() -> None:
    """Wait until new files get a later timestamp. The clock of files advances every 4 ms."""
    time.sleep(0.02)


def repaint(path: Path, old: bytes | None = None, new: bytes = b"") -> None:
    """Change some bytes of a file without changing its size or modification time.

    By default, the last 16 bytes are changed.
    """
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
    """Check that a fingerprint is reproducible, and that it differs after each change of the data.

    Args:
        open_images: Function that opens the images again.
        changes: Functions that change the data. They are called one after the other.
    """
    found = [open_images().fingerprint() for _ in range(2)]
    for change in changes:
        change()
        found.append(open_images().fingerprint())
    assert found[0] == found[1]
    assert len(set(found)) == len(changes) + 1
