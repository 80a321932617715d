"""Logs of JSON, one object a line: a header, then lines with a CRC-32 of their content each."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_bench.system.progress import say_once

_CHECKSUM = "crc32"


def checked_line(content: Mapping[str, Any]) -> str:
    """Return the line of an object, without its end."""
    return json.dumps({**content, _CHECKSUM: _checksum(content)})


def read_checked_lines(content: bytes, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a log and the content of its lines; a message counts damaged lines.

    A last line without an end is passed over: somebody is writing it, or was killed meanwhile.
    """
    header, *lines = content.decode(errors="replace").split("\n")[:-1] or ["{}"]
    read = [_verified(line) for line in lines]
    found = [one for one in read if one is not None]
    if damaged := len(read) - len(found):
        say_once(f"{path}: {damaged} of {len(read)} lines are damaged and left out")
    return _parsed(header) or {}, found


def _verified(line: str) -> dict[str, Any] | None:
    content = _parsed(line)
    if content is None or content.pop(_CHECKSUM, None) != _checksum(content):
        return None
    return content


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())
