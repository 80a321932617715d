"""Download published files, resume interrupted downloads, and check digests."""

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
from ssl_bench.system.output import bar_class

# Time limit in seconds for the first answer of a server. It is long enough for a slow connection.
# Without internet access, commands still fail within 5 s.
CONNECT_TIMEOUT = 3.0
# Time limit in seconds for each further part of a response, while a file is downloaded.
READ_TIMEOUT = 60.0
_CHUNK_BYTES = 2**18
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables of huggingface_hub that forbid internet access.

If one of these variables is set, ssl-bench requests nothing from any host."""


class DownloadError(MachineError):
    """Raised if a file cannot be downloaded."""


@dataclass(frozen=True)
class PublishedFile:
    """Address, digest and size of a file that can be downloaded from a public server.

    Attributes:
        url: Address of the file.
        digest: Published checksum in hexadecimal digits, or None if none is published.
        algorithm: Algorithm of the checksum.
        size: Published size in bytes, or None if it is not published.
    """

    url: str
    digest: str | None
    algorithm: Literal["md5", "sha256"] = "sha256"
    size: int | None = None

    def hexdigest(self, file: Path) -> str:
        with open_regular(file) as opened:
            return hashlib.file_digest(opened, self.algorithm).hexdigest()


Check = Callable[[Path], object]


def download(published: PublishedFile, path: Path, check: Check | None = None) -> Path:
    """Download a published file unless it already exists, and return its path.

    The bytes are written to `path` + ".part". The complete file is verified and then renamed to
    `path`. A file that already exists at `path` is also verified. An interrupted download is
    continued if a digest is published, and otherwise starts again. If several processes request the
    same file, one process downloads it while all others wait.

    Args:
        published: Address of the file, and its digest if one is published.
        path: Path to write the file to.
        check: Function that verifies a file without a published digest, and raises DataError if the
            content is wrong.

    Raises:
        DownloadError: The server is unreachable, the transfer was interrupted, or the received file
            is wrong. After a DownloadError, there is no file at `path`.
        MachineError: The file cannot be written.
        DataError: The file that exists at `path` is not the published file.
    """
    if path.exists():
        if (problem := _find_problem(published, path, check)) is not None:
            raise DataError(f"{path} {problem}. Delete it and run the command again")
        return path
    part = partial_path(path)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as file:
            wait_for_lock(file.fileno())
            # Another process may have downloaded the file in the meantime.
            if not path.exists():
                _append_missing(published, file)
                if (problem := _find_problem(published, part, check)) is not None:
                    file.truncate(0)
                    raise DownloadError(f"{published.url} {problem}, so the download was deleted")
                os.fsync(file.fileno())
                part.replace(path)
    except DownloadError as error:
        variable = offline_variable()
        remedy = "Run the command again" if variable is None else f"Unset {variable}"
        raise DownloadError(
            f"{error}. {remedy}, or download {published.url} on another machine and "
            f"copy it to {path}"
        ) from error
    except OSError as error:
        raise MachineError(
            f"cannot write {path} ({error.strerror or error}). Free some space or choose another "
            "folder"
        ) from error
    return path


def offline_variable() -> str | None:
    """Return the name of an environment variable that forbids internet access, or None."""
    enabled = ("1", "on", "yes", "true")
    return next((v for v in OFFLINE_VARIABLES if os.environ.get(v, "").lower() in enabled), None)


def partial_path(path: Path) -> Path:
    """Return the path of an incomplete download, which is `path` with the suffix ".part" added."""
    return path.with_name(f"{path.name}.part")


def open_url(request: urllib.request.Request) -> http.client.HTTPResponse:
    """Send a request and return the response.

    Raises:
        urllib.error.HTTPError: The server answers with an error.
        DownloadError: The server does not answer in time, or an environment variable forbids
            internet access.
    """
    if (variable := offline_variable()) is not None:
        raise DownloadError(f"{request.full_url} was not requested because {variable} is set")
    answers: SimpleQueue[http.client.HTTPResponse | Exception] = SimpleQueue()

    def wait() -> None:
        try:
            # `urlopen` always uses the proxies of its first call. A new opener reads them again.
            opener = urllib.request.build_opener()
            answers.put(opener.open(request, timeout=READ_TIMEOUT))
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.put(error)

    # A thread sends the request, because the timeout of a socket does not cover name resolution.
    Thread(target=wait, daemon=True).start()
    try:
        answer = answers.get(timeout=CONNECT_TIMEOUT)
    except Empty:
        answer = TimeoutError(f"no answer within {CONNECT_TIMEOUT:g} s")
    if isinstance(answer, urllib.error.HTTPError):
        raise answer
    if isinstance(answer, Exception):
        host = urllib.parse.urlsplit(request.full_url).netloc
        raise DownloadError(f"{host} cannot be reached ({answer})") from answer
    return answer


def _find_problem(published: PublishedFile, file: Path, check: Check | None) -> str | None:
    """Return a text that says why a file is not the published file, or None if it is.

    The text continues a sentence about the file, such as "cannot be read (Permission denied)". If
    no digest is published, `check` is called, which raises DataError for a wrong file.
    """
    try:
        if published.digest is not None:
            digest = published.hexdigest(file)
            if digest == published.digest:
                return None
            return f"has {published.algorithm} {digest}, expected {published.digest}"
        if check is not None:
            check(file)
    except DataError as error:
        return f"is not the expected file ({error})"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _append_missing(published: PublishedFile, file: BinaryIO) -> None:
    """Download the bytes that an incomplete file lacks, and append them to the file.

    The file is emptied and downloaded from the start if it is longer than the published file, or if
    the server cannot send a part of the file. A file without a published digest is also downloaded
    from the start, because the joined parts could not be verified.

    Raises:
        DownloadError: The server is unreachable or does not send the file, or the download stops
            too early. The received bytes are kept, unless the server rejects the requested range.
    """
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
        raise DownloadError(
            f"{published.url} returned the error {error.code} {error.reason}"
        ) from error
    with response:
        # Check this first, so that a login page does not overwrite a partial download.
        if response.headers.get_content_type() == "text/html":
            raise DownloadError(
                f"{published.url} returned a web page instead of the file, perhaps a login page"
            )
        if start and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = file.truncate(0)
        size = published.size
        if size is None and response.length is not None:
            size = start + response.length
        if size is None:
            raise DownloadError(
                f"the server does not state the size of {published.url}, so an incomplete download "
                "could not be detected"
            )
        name, position = published.url.rpartition("/")[2], start
        with bar_class()(
            desc=name, initial=start, total=size, unit="B", unit_scale=True, disable=None,
            leave=False,
        ) as bar:  # fmt: skip
            for chunk in _read_chunks(response):
                position += file.write(chunk)
                bar.update(len(chunk))
        file.flush()
        if position < size:
            raise DownloadError(
                f"the download of {published.url} was interrupted after {position} of {size} bytes"
            )


def _read_chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the received bytes in chunks until the response ends or the connection breaks."""
    with suppress(OSError, ValueError, http.client.HTTPException):
        while chunk := response.read1(_CHUNK_BYTES):
            yield chunk
