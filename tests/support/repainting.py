"""Files that change while their size and their time of change stay as they were."""

import os
import tarfile
import time
from pathlib import Path

from tests.support.faults import photo_folder


def settle() -> None:
    # The clock of files moves every four milliseconds.
    time.sleep(0.02)


def repaint(path: Path, old: bytes | None = None, new: bytes = b"") -> None:
    """Change bytes of a file in its place; its size and its time of change stay as they were."""
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


def tarred(root: Path) -> Path:
    photo_folder(root)
    with tarfile.open(root / "a.tar", "w") as archive:
        for path in sorted(root.glob("*.jpg")):
            archive.add(path, path.name)
            path.unlink()
    return root


def in_tar(root: Path) -> None:
    with tarfile.open(root / "a.tar") as archive:
        member = archive.getmember("2.jpg")
    content = (root / "a.tar").read_bytes()
    old = content[member.offset_data + member.size - 32 : member.offset_data + member.size]
    repaint(root / "a.tar", old, bytes(byte ^ 1 for byte in old))
