"""A web server of this machine that knows ranges and can misbehave."""

import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from ssl_bench.data.downloads import Published


class WebServer(ThreadingHTTPServer):
    """Serves one file at every address.

    Attributes:
        ranges: The Range of each request so far, "" where it had none.
        cut_after: Bytes after which the connection breaks, once.
        delay: Seconds before it answers.
        knows_ranges: Else it sends the whole file always.
        gone: Nothing is found.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = b""
        self.ranges: list[str] = []
        self.cut_after: int | None = None
        self.delay = 0.0
        self.knows_ranges = True
        self.gone = False
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def publish(self, content: bytes, algorithm: Literal["md5", "sha256"] = "sha256") -> Published:
        self.content = content
        url = f"http://127.0.0.1:{self.server_port}/file.bin"
        return Published(url, hashlib.new(algorithm, content).hexdigest(), algorithm)


class _Handler(BaseHTTPRequestHandler):
    server: WebServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range", "")
        server.ranges.append(asked)
        time.sleep(server.delay)
        found = re.fullmatch(r"bytes=(\d+)-", asked) if server.knows_ranges else None
        start, total = int(found[1]) if found else 0, len(server.content)
        if server.gone:
            self.send_error(404)
            return
        if found and start >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.end_headers()
            return
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(total - start))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        end, server.cut_after = server.cut_after, None
        self.wfile.write(server.content[start : total if end is None else start + end])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
