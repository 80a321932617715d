"""Published files from the network: whole and with the published checksum, or not at all."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ssl_bench.errors import DataError, MachineError
from ssl_bench.network.answers import Answer, NotFetched, Origin, Refused, Unfit, Wish, ask
from ssl_bench.system.files import lock_when_free, write_text_atomically
from ssl_bench.system.progress import Bar


@dataclass(frozen=True)
class Published:
    """A file at an address, and the digest of its bytes.

    Attributes:
        digest: Hexadecimal; None where nobody publishes one, and the length that the server gives
            and what the file is for itself must do.
        size: Bytes; None where nobody publishes them.
    """

    url: str
    digest: str | None
    algorithm: Literal["md5", "sha256"] = "sha256"
    size: int | None = None

    def hexdigest(self, file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, self.algorithm).hexdigest()


Check = Callable[[Path], object]


def download(published: Published, path: Path, check: Check | None = None) -> Path:
    """The published file at `path`, fetched unless it is there.

    Bytes go to `path` + ".part", with which a later call goes on if they are of the same version
    at the same address or a digest will tell. They get their name when they are as many as was
    promised and their digest is the published one or, without one, `check` finds nothing. A file
    that is there has to pass the same. Processes that want the same file wait for the first.

    Args:
        published: Where it is, and what is known of it.
        path: Its name here.
        check: Raises DataError for a file that is not what its name says.

    Returns:
        `path`.

    Raises:
        NotFetched: the server cannot be reached or sends something else, the transfer broke off,
            or the digest is another; nothing is at `path` then.
        MachineError: it cannot be written.
        DataError: there is another file at `path`.
    """
    try:
        if not path.exists():
            _fetch(published, path, check)
        elif (fault := _fault(published, path, check)) is not None:
            raise DataError(f"{path} {fault}; delete it and type the command again")
    except OSError as error:
        if isinstance(error, MachineError):
            raise
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error
    return path


def part_of(path: Path) -> Path:
    """Where the bytes of a file are that is not complete."""
    return path.with_name(f"{path.name}.part")


def _fetch(published: Published, path: Path, check: Check | None) -> None:
    part = part_of(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        lock_when_free(file.fileno())
        if path.exists():
            return
        try:
            _complete(published, file, path)
            fault = _fault(published, part, check)
            if fault is not None:
                raise Unfit(f"{published.url} {fault}")
        except Refused as error:
            kept = "the part that came is kept"
            if isinstance(error, Unfit):
                # Emptied, not removed: another process may wait for this file.
                file.truncate(0)
                kept = "nothing was kept"
            raise NotFetched(
                f"{error}; {kept}, type the command again or fetch {published.url} elsewhere and "
                f"put it at {path}"
            ) from error
        os.fsync(file.fileno())
        part.replace(path)
        _note(path).unlink(missing_ok=True)


def _fault(published: Published, file: Path, check: Check | None) -> str | None:
    """What tells a file from the published one, if anything does."""
    if published.digest is not None:
        found = published.hexdigest(file)
        same = found == published.digest
        digests = f"{published.algorithm} {found}, published was {published.digest}"
        return None if same else f"has {digests}"
    try:
        if check is not None:
            check(file)
    except DataError as error:
        return f"is not what its name says: {error}"
    return None


def _complete(published: Published, file: BinaryIO, path: Path) -> None:
    """Append what the file lacks."""
    wish = _wish(published, _origin(path), file.seek(0, os.SEEK_END))
    if wish.start and wish.start == (wish.size or (wish.origin and wish.origin.size)):
        return
    with ask(wish) as answer:
        if not answer.start:
            file.truncate(0)
            note = json.dumps(asdict(answer.origin))
            write_text_atomically(_note(path), f"{note}\n")
        _append(answer, file, path, goes_on=_goes_on(published, answer.origin))


def _note(path: Path) -> Path:
    """Where it is written of what a part is a part."""
    return path.with_name(f"{path.name}.part.json")


def _origin(path: Path) -> Origin | None:
    try:
        found = Origin(**json.loads(_note(path).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = (type(found.url), type(found.size), type(found.version))
    return found if kinds in ((str, int, str), (str, int, type(None))) else None


def _goes_on(published: Published, origin: Origin | None) -> bool:
    """Whether a part of that origin is known, or will be, to be one of the published file."""
    if origin is None:
        return published.digest is not None
    return origin.url == published.url and bool(published.digest or origin.version)


def _wish(published: Published, origin: Origin | None, known: int) -> Wish:
    """All bytes behind those of the part, or just all."""
    size = published.size or (known if origin is None else origin.size)
    if not _goes_on(published, origin) or known > size:
        return Wish(published.url, published.size)
    return Wish(published.url, published.size, known, origin)


def _append(answer: Answer, file: BinaryIO, path: Path, *, goes_on: bool) -> None:
    at, size = answer.start, answer.origin.size
    with Bar(
        desc=path.name, initial=at, total=size, unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        for chunk in answer.chunks():
            at += len(chunk)
            if at > size:
                raise Unfit(f"{answer.origin.url} sends more than its {size} bytes")
            file.write(chunk)
            bar.update(len(chunk))
    file.flush()
    if at < size:
        anew = "go on from there" if goes_on else "begin anew, as nothing proves it unchanged"
        raise NotFetched(
            f"{answer.origin.url} broke off after {at} of {size} bytes; type the command again to "
            f"{anew}"
        )
