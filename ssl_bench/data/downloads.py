"""Published files from the network: whole and with the published checksum, or not at all."""

import fcntl
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, Literal

from tqdm import tqdm

from ssl_bench.errors import MachineError

REACH_SECONDS = 4.0
_STALL_SECONDS = 60.0
_CHUNK = 2**18


@dataclass(frozen=True)
class Published:
    """A file at an address, and the digest of its bytes.

    Attributes:
        digest: Hexadecimal; None where nobody publishes one, and only the length is checked.
    """

    url: str
    digest: str | None
    algorithm: Literal["md5", "sha256"] = "sha256"

    def hexdigest(self, file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, self.algorithm).hexdigest()


def download(published: Published, path: Path) -> Path:
    """The published file at `path`, fetched unless it is there.

    Bytes go to `path` + ".part", with which a later call goes on, and get their name when their
    digest is the published one. Processes that want the same file wait for the first.

    Returns:
        `path`.

    Raises:
        MachineError: the server cannot be reached, the transfer broke off, the digest is another,
            or the disk is full; nothing is at `path` then.
    """
    if path.exists():
        return path
    part = path.with_name(f"{path.name}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists():
                return path
            _complete(published, file, path)
            _require_digest(published, file, part)
            os.fsync(file.fileno())
            part.replace(path)
    except OSError as error:
        if isinstance(error, MachineError):
            raise
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error
    return path


def _complete(published: Published, file: BinaryIO, path: Path) -> None:
    """Append what the file lacks."""
    known = file.seek(0, os.SEEK_END)
    with _response(published.url, known, path) as response:
        if response is None:
            return
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            known = file.seek(0)
            file.truncate()
        total = known + int(response.headers["Content-Length"] or 0)
        with tqdm(
            desc=path.name, initial=known, total=total or None, unit="B", unit_scale=True,
            disable=None, leave=False,
        ) as bar:  # fmt: skip
            for chunk in _chunks(response):
                file.write(chunk)
                bar.update(len(chunk))
        file.flush()
        if file.tell() < total:
            raise MachineError(
                f"{published.url} broke off after {file.tell()} of {total} bytes; "
                "type the command again to go on from there"
            )


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What arrives until the end or until the connection breaks."""
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException):
            return
        if not chunk:
            return
        yield chunk


@contextmanager
def _response(url: str, known: int, path: Path) -> Iterator[http.client.HTTPResponse | None]:
    """The server's answer from byte `known` on; None if there is nothing behind it."""
    headers = {"Range": f"bytes={known}-"} if known else {}
    answer = _within(REACH_SECONDS, urllib.request.Request(url, headers=headers))
    if isinstance(answer, urllib.error.HTTPError):
        behind = answer.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        if behind and _total_of(answer) == known:
            yield None
            return
        # A part that is longer than the file is no part of it.
        reason = f"answers {answer.code} {answer.reason}" if not behind else "has become shorter"
        if behind:
            os.truncate(path.with_name(f"{path.name}.part"), 0)
        raise MachineError(f"{url} {reason}; type the command again, or {_by_hand(url, path)}")
    if not isinstance(answer, http.client.HTTPResponse):
        host = urllib.parse.urlsplit(url).netloc
        raise MachineError(f"{host} cannot be reached ({answer}); {_by_hand(url, path)}")
    with answer:
        yield answer


def _total_of(error: urllib.error.HTTPError) -> int | None:
    found = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _within(
    seconds: float, request: urllib.request.Request
) -> http.client.HTTPResponse | Exception | str:
    """The answer to a request, or why there is none."""
    answers: SimpleQueue[http.client.HTTPResponse | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=_STALL_SECONDS))
        except (OSError, http.client.HTTPException) as error:
            answers.put(error)

    # In a thread: no timeout of a socket covers a name server that does not answer.
    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return f"no answer within {seconds:g} s"


def _require_digest(published: Published, file: BinaryIO, part: Path) -> None:
    if published.digest is None:
        return
    found = published.hexdigest(part)
    if found != published.digest:
        # Emptied, not removed: another process may wait for this file.
        file.truncate(0)
        raise MachineError(
            f"{published.url} has {published.algorithm} {found}, published was "
            f"{published.digest}; nothing was kept, type the command again"
        )


def _by_hand(url: str, path: Path) -> str:
    return f"fetch {url} elsewhere and put it at {path}"
