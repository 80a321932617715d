"""A list of what a dataset's files hold, and what has changed since it was written.

The list is that of `sha256sum`: `DIGEST  PATH` a line, readable by `sha256sum --check` where no
name holds a backslash or a line break.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ssl_bench.data.files.digests import in_threads
from ssl_bench.errors import DataError
from ssl_bench.system.files import read_regular, sha256_of, write_text_atomically
from ssl_bench.system.paths import real
from ssl_bench.system.progress import show_progress

MANIFEST = "SHA256SUMS"
# Between them `*` marks what sha256sum read as binary; `find` puts `./` before every name.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


@dataclass(frozen=True)
class Differences:
    """Names of files that are not what the manifest says; all sorted."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def is_damage(self) -> bool:
        """Whether a listed file is not as it was; files that came later are no damage."""
        return bool(self.changed or self.missing)


def write_manifest(root: Path, manifest: Path) -> int:
    """List the sha256 of every file below a folder; hidden files and the list itself are left out.

    Returns:
        How many files were listed.

    Raises:
        DataError: there is no such folder, no file in it, or a file cannot be read.
        MachineError: the list cannot be written.
    """
    names = _files(root, manifest)
    if not names:
        raise DataError(f"{root} holds no file; name the folder of a dataset")
    lines = []
    for name, digest in _digests(root, names):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"{digest}  {escaped}\n")
    write_text_atomically(manifest, "".join(lines))
    return len(names)


def check_manifest(root: Path, manifest: Path) -> Differences:
    """Compare the files below a folder with their list.

    Raises:
        DataError: the folder or the list is missing, the list is damaged, or a file is unreadable.
    """
    expected = read_manifest(manifest)
    present = _files(root, manifest)
    both = [name for name in present if name in expected]
    digests = _digests(root, both)
    return Differences(
        changed=tuple(name for name, digest in digests if digest != expected[name]),
        missing=tuple(sorted(expected.keys() - set(present))),
        added=tuple(name for name in present if name not in expected),
    )


def read_manifest(manifest: Path) -> Mapping[str, str]:
    """Path to sha256.

    Raises:
        DataError: it cannot be read, or a line is not `DIGEST  PATH`.
    """
    try:
        lines = read_regular(manifest).decode(errors="surrogateescape").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {manifest} ({error.strerror}); write it anew") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None and line:
            raise DataError(f"{manifest} line {number} is not `SHA256  PATH`; write it anew")
        if match is not None:
            name = re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], match[2])
            found[name] = match[1]
    if not found:
        raise DataError(f"{manifest} lists no file; write it anew")
    return found


def _files(root: Path, manifest: Path) -> list[str]:
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; name the folder of a dataset")
    own = real(manifest)
    found = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if child[0] != "."]
        paths = (Path(folder) / name for name in names if name[0] != ".")
        found += [p.relative_to(root).as_posix() for p in paths if real(p) != own]
    return sorted(found)


def _digests(root: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    def digest(name: str) -> str:
        try:
            return sha256_of(root / name)
        except OSError as error:
            raise DataError(f"{root / name} cannot be read ({error.strerror})") from error

    return in_threads(digest, show_progress(names, f"reading {root.name}"))
