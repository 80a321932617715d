"""Published files from the network: whole and with the published checksum, or not at all."""

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, Literal

from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.files import open_regular, wait_for_lock
from ssl_bench.system.progress import bar_class

# Long enough for a slow line, short enough that a machine without network answers within 5 s.
REACH_SECONDS = 3.0
STALL_SECONDS = 60.0
_CHUNK = 2**18
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Those of huggingface_hub that forbid the network. Here they hold for every host."""


class NotFetched(MachineError):
    """A file that could not be had from where it is published."""


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
        with open_regular(file) as opened:
            return hashlib.file_digest(opened, self.algorithm).hexdigest()


Check = Callable[[Path], object]


def download(published: Published, path: Path, check: Check | None = None) -> Path:
    """The published file at `path`, fetched unless it is there.

    Bytes go to `path` + ".part", with which a later call goes on where a digest will tell whether
    they fit. They get their name when their digest is the published one or, without one, `check`
    finds nothing. A file that is there has to pass the same. Processes that want the same file
    wait for the first.

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
    if path.exists():
        if (fault := _fault(published, path, check)) is not None:
            raise DataError(f"{path} {fault}; delete it and type the command again")
        return path
    part = part_of(path)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as file:
            wait_for_lock(file.fileno())
            # Another process may have fetched it meanwhile.
            if not path.exists():
                _complete(published, file)
                if (fault := _fault(published, part, check)) is not None:
                    file.truncate(0)
                    raise NotFetched(f"{published.url} {fault}; nothing was kept")
                os.fsync(file.fileno())
                part.replace(path)
    except NotFetched as error:
        raise NotFetched(
            f"{error}; type the command again, or fetch {published.url} elsewhere and put it at "
            f"{path}"
        ) from error
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error
    return path


def offline_variable() -> str | None:
    """Return the name of the environment variable that forbids the network, if one does."""
    switched_on = ("1", "on", "yes", "true")
    return next(
        (v for v in OFFLINE_VARIABLES if os.environ.get(v, "").lower() in switched_on), None
    )


def part_of(path: Path) -> Path:
    """Where the bytes of a file are that is not complete."""
    return path.with_name(f"{path.name}.part")


def open_url(request: urllib.request.Request) -> http.client.HTTPResponse:
    """The answer of a server.

    Raises:
        urllib.error.HTTPError: it says no.
        NotFetched: there is none in time, or the network must not be used.
    """
    if (variable := offline_variable()) is not None:
        raise NotFetched(f"{request.full_url} was not requested because {variable} is set")
    answers: SimpleQueue[http.client.HTTPResponse | Exception] = SimpleQueue()

    def wait() -> None:
        try:
            # Not urlopen, which remembers the proxies of its first call.
            opener = urllib.request.build_opener()
            answers.put(opener.open(request, timeout=STALL_SECONDS))
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.put(error)

    # In a thread: no timeout of a socket covers a name server that does not answer.
    Thread(target=wait, daemon=True).start()
    try:
        answer = answers.get(timeout=REACH_SECONDS)
    except Empty:
        answer = TimeoutError(f"no answer within {REACH_SECONDS:g} s")
    if isinstance(answer, urllib.error.HTTPError):
        raise answer
    if isinstance(answer, Exception):
        host = urllib.parse.urlsplit(request.full_url).netloc
        raise NotFetched(f"{host} cannot be reached ({answer})") from answer
    return answer


def _fault(published: Published, file: Path, check: Check | None) -> str | None:
    """What tells a file from the published one, if anything does."""
    try:
        if published.digest is not None:
            found = published.hexdigest(file)
            digests = f"{published.algorithm} {found}, published was {published.digest}"
            return None if found == published.digest else f"has {digests}"
        if check is not None:
            check(file)
    except DataError as error:
        return f"is not what its name says: {error}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _complete(published: Published, file: BinaryIO) -> None:
    """Append what the file lacks."""
    start = file.seek(0, os.SEEK_END)
    if start and start == published.size:
        return
    if published.digest is None or start > (published.size or start):
        start = file.truncate(0)
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        response = open_url(urllib.request.Request(published.url, headers=headers))
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            file.truncate(0)
        raise NotFetched(f"{published.url} answers {error.code} {error.reason}") from error
    with response:
        # Before the part is given up for it.
        if response.headers.get_content_type() == "text/html":
            raise NotFetched(f"{published.url} answers with a web page, perhaps to log in")
        if start and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = file.truncate(0)
        size = published.size
        if size is None and response.length is not None:
            size = start + response.length
        if size is None:
            raise NotFetched(f"{published.url} does not say how long it is")
        name, at = published.url.rpartition("/")[2], start
        with bar_class()(
            desc=name, initial=at, total=size, unit="B", unit_scale=True, disable=None, leave=False
        ) as bar:
            for chunk in _chunks(response):
                at += file.write(chunk)
                bar.update(len(chunk))
        file.flush()
        if at < size:
            raise NotFetched(f"{published.url} broke off after {at} of {size} bytes")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What arrives until the end, or until the connection breaks."""
    with suppress(OSError, ValueError, http.client.HTTPException):
        while chunk := response.read1(_CHUNK):
            yield chunk
