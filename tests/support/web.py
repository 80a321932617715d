"""A local web server that can imitate failures."""

import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from ssl_bench.network import PublishedFile


class WebServer(ThreadingHTTPServer):
    """A local web server that returns the same file for every address."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = b""
        self.ranges: list[str] = []  # Range header of each request, or ""
        self.cut_after: int | None = None  # bytes after which the next response breaks off
        # Seconds before each response, and before each block of 1000 bytes.
        self.delay = self.pause = 0.0
        self.knows_ranges = True  # whether Range headers are respected
        # Whether each response has the status 404, and whether it has no Content-Length.
        self.gone = self.chunked = False
        self.headers: dict[str, str | None] = {}  # additional headers; None removes a header
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def publish(
        self, content: bytes, algorithm: Literal["md5", "sha256"] = "sha256"
    ) -> PublishedFile:
        self.content = content
        digest = hashlib.new(algorithm, content).hexdigest()
        return PublishedFile(self.url, digest, algorithm, len(content))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class _Handler(BaseHTTPRequestHandler):
    server: WebServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def do_GET(self) -> None:
        server, requested = self.server, self.headers.get("Range", "")
        server.ranges.append(requested)
        time.sleep(server.delay)
        if server.gone:
            self.send_error(404)
            return
        match = re.fullmatch(r"bytes=(\d+)-", requested) if server.knows_ranges else None
        self._answer(int(match[1]) if match else None)

    def _answer(self, first: int | None) -> None:
        server, start, total = self.server, first or 0, len(self.server.content)
        headers: dict[str, str | None] = {"Content-Length": str(total - start)}
        status = 200 if first is None else 206
        if first is not None:
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        if first is not None and start >= total:
            status = 416
            headers = {"Content-Range": f"bytes */{total}"}
        if server.chunked:
            headers = {**headers, "Content-Length": None, "Transfer-Encoding": "chunked"}
        self.send_response_only(status)
        for name, value in {**headers, **server.headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if status in (200, 206):
            self._send(server.content[start:])

    def _send(self, content: bytes) -> None:
        cut, self.server.cut_after = self.server.cut_after, None
        content = content if cut is None else content[:cut]
        size = 1000 if self.server.pause else 2**16
        try:
            for start in range(0, len(content), size):
                time.sleep(self.server.pause)
                self._write(content[start : start + size])
            if self.server.chunked and cut is None:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            # The client has closed the connection.
            self.close_connection = True

    def _write(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.server.chunked else piece)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
