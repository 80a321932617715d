"""What a web server answers to the wish for a file, believed only where it fits what was asked."""

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ssl_bench.errors import MachineError

REACH_SECONDS = 4.0
STALL_SECONDS = 60.0
_SLOWEST = 1000  # bytes a second, over that time
_CHUNK = 2**18
_PAGES = ("text/html", "application/xhtml+xml")
# A file may change twice within a second, and clocks differ; RFC 7232 asks for a minute.
_SURE_SECONDS = 60


class NotFetched(MachineError):
    """A file that could not be had from where it is published."""


class Refused(NotFetched):
    """No answer, or none that is the file."""


class Unfit(Refused):
    """The part that is there cannot go on with this answer."""


@dataclass(frozen=True)
class Origin:
    """A version of a file; `version` is None where the server says nothing that proves it."""

    url: str
    size: int
    version: str | None


@dataclass(frozen=True)
class Wish:
    """A file from one of its bytes on.

    Attributes:
        size: Bytes of the file as published; None where only the server knows.
        start: How many bytes are there already.
        origin: That of which they are; None where a digest will tell.
    """

    url: str
    size: int | None
    start: int = 0
    origin: Origin | None = None


@dataclass(frozen=True)
class Answer:
    """The bytes of a file from `start` on."""

    start: int
    origin: Origin
    response: http.client.HTTPResponse

    def chunks(self) -> Iterator[bytes]:
        """What arrives until the end, until the connection breaks, or until nearly nothing does."""
        began, arrived = time.monotonic(), 0
        while True:
            try:
                chunk = self.response.read1(_CHUNK)
            except (OSError, ValueError, http.client.HTTPException):
                return
            if not chunk:
                return
            yield chunk
            arrived += len(chunk)
            # A socket's timeout begins anew with every byte.
            if (passed := time.monotonic() - began) > STALL_SECONDS:
                if arrived < _SLOWEST * passed:
                    return
                began, arrived = time.monotonic(), 0


@contextmanager
def ask(wish: Wish) -> Iterator[Answer]:
    """Open the answer to a wish.

    Raises:
        Unfit: it does not continue what is there.
        Refused: there is none in time, or it is not the file.
    """
    headers = {"Range": f"bytes={wish.start}-"} if wish.start else {}
    if wish.start and wish.origin is not None and wish.origin.version is not None:
        headers["If-Range"] = wish.origin.version
    found = _within(REACH_SECONDS, urllib.request.Request(wish.url, headers=headers))
    if isinstance(found, Refused):
        raise found
    if isinstance(found, urllib.error.HTTPError):
        if found.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise Unfit(f"{wish.url} has become shorter")
        raise Refused(f"{wish.url} answers {found.code} {found.reason}")
    if not isinstance(found, http.client.HTTPResponse):
        host = urllib.parse.urlsplit(wish.url).netloc
        raise Refused(f"{host} cannot be reached ({found})")
    with found:
        yield _understood(wish, found)


def _within(
    seconds: float, request: urllib.request.Request
) -> http.client.HTTPResponse | Exception | str:
    """The answer to a request, or why there is none."""
    answers: SimpleQueue[http.client.HTTPResponse | Exception] = SimpleQueue()

    def wait() -> None:
        try:
            answers.put(
                urllib.request.build_opener(_Redirects()).open(request, timeout=STALL_SECONDS)
            )
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.put(error)

    # In a thread: no timeout of a socket covers a name server that does not answer.
    Thread(target=wait, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return f"no answer within {seconds:g} s"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows them unless they give up encryption."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: Any,
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if new not in (old, "https"):
            raise Refused(f"{req.full_url} leads from {old} to {newurl}, which is refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _understood(wish: Wish, response: http.client.HTTPResponse) -> Answer:
    """The answer, once it is known to be one."""
    kind = response.headers.get_content_type()
    if kind in _PAGES:
        raise Refused(
            f"{wish.url} answers with a web page ({kind}) in place of the file, perhaps to log in"
        )
    packing = response.headers.get("Content-Encoding", "identity")
    if packing != "identity":
        raise Refused(f"{wish.url} answers with {packing} around the file")
    start, size = _extent(wish, response)
    if size is None:
        raise Refused(
            f"{wish.url} does not say how long it is, so that nobody could tell its end from a "
            "broken connection"
        )
    if wish.size not in (None, size):
        raise Refused(f"{wish.url} has {size} bytes, published were {wish.size}")
    answer = Answer(start, Origin(wish.url, size, _version(response)), response)
    if start and wish.origin is not None:
        _require_same(wish.origin, answer.origin)
    return answer


def _require_same(part: Origin, answer: Origin) -> None:
    # What continues a part may leave out its version.
    versions = {part.version, answer.version} - {None}
    if part.size != answer.size or len(versions) > 1:
        raise Unfit(f"{part.url} has changed since the first part of it came")


def _extent(wish: Wish, response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Where the answer begins in the file, and how long that is."""
    if response.status == http.HTTPStatus.OK:
        return 0, wish.size if response.length is None else response.length
    given = response.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", given)
    if response.status != http.HTTPStatus.PARTIAL_CONTENT or found is None:
        raise Unfit(f"{wish.url} answers {response.status} {response.reason} {given}".rstrip())
    first, last, size = map(int, found.groups())
    fits = (first, last) == (wish.start, size - 1) and wish.start > 0
    if not fits or response.length not in (None, size - first):
        raise Unfit(f"{wish.url} answers with {given} to the wish for bytes {wish.start}-")
    return first, size


def _version(response: http.client.HTTPResponse) -> str | None:
    """A strong ETag, or a date that is sure to be of one version alone."""
    tag, changed, now = (response.headers.get(key) for key in ("ETag", "Last-Modified", "Date"))
    if tag is not None:
        return tag if re.fullmatch(r'"[^"]*"', tag) else None
    try:
        age = parsedate_to_datetime(now or "") - parsedate_to_datetime(changed or "")
    # Naive and aware dates cannot be subtracted.
    except (ValueError, TypeError):
        return None
    return changed if age.total_seconds() >= _SURE_SECONDS else None
