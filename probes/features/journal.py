"""Save finished parts of a long computation in a file, so that a killed run can continue."""

import base64
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ssl_bench.errors import MachineError
from ssl_bench.system.files import open_regular, open_trusted, write_atomically

_CHECKSUM = "crc32"
_TENSOR = frozenset({"dtype", "shape", "base64"})


class Journal:
    """A file with one JSON line for each finished part of a computation.

    An interrupted computation can read the file and continue with the first missing part.

    The first line of the file is the header, which states the settings of the computation. The file
    name contains a digest of the header, so a run with other settings uses another file. Each
    further line is an entry with a checksum. Damaged and incomplete lines are ignored. The file may
    be deleted at any time.

    Args:
        folder: Folder of the file.
        name: Beginning of the file name.
        header: All settings that the entries depend on, as JSON types.
        say: Function that prints a message when a run continues from the file or cannot use it.
        minutes: Minimum time between two writes in minutes. With 0, each entry is written
            immediately.
        is_cache: Whether the file is in a cache folder. Such a file is read only if no other user
            could have written it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        header: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        minutes: float = 0.0,
        is_cache: bool = False,
    ) -> None:
        self._header = json.dumps(header, sort_keys=True)
        digest = hashlib.sha256(self._header.encode(errors="surrogateescape")).hexdigest()
        self.path = folder / f"{name}_{digest[:12]}.jsonl"
        self._say, self._seconds, self._is_cache = say, 60 * minutes, is_cache
        self._unwritten = list[Mapping[str, Any]]()
        self._written_at = time.monotonic()
        self._has_written = False

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """Return the entries that earlier runs, such as a killed run, wrote to the file.

        Tensors are in CPU memory.
        """
        try:
            entries = self.read(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._say(f"{self.path} is not used ({error.strerror}). Starting from the beginning")
            if self._is_cache:
                # New entries would otherwise be appended to a file that no run reads.
                with suppress(OSError):
                    self.path.unlink()
            return []
        if entries:
            self._say(f"continuing from {self.path}")
        return entries

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Return the valid entries of a journal file, without checking the header.

        Raises:
            OSError: The file cannot be read.
        """
        open_file: Callable[[Path], BufferedReader] = (
            open_trusted if self._is_cache else open_regular
        )
        with open_file(path) as file:
            lines = file.read().split(b"\n")[1:-1]
        entries = [entry for line in lines if (entry := _parse(line)) is not None]
        if damaged := len(lines) - len(entries):
            self._say(f"{path}: {damaged} of {len(lines)} lines are damaged and ignored")
        return entries

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last write for another write.

        The minimum time is the argument `minutes` of the constructor.
        """
        return time.monotonic() - self._written_at >= self._seconds

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add an entry to the journal. If `is_due` returns true, write all unwritten entries.

        Args:
            entry: Dictionary of JSON types and tensors. Do not modify it afterwards,
                because it may be written later.

        Raises:
            MachineError: The file cannot be written.
        """
        self._unwritten.append(entry)
        if self.is_due():
            self.flush()

    def flush(self) -> None:
        """Write all appended entries to the journal file.

        Raises:
            MachineError: The file cannot be written.
        """
        if not self._unwritten:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                if not self._has_written:
                    _remove_unfinished_line(file)
                is_new = not file.seek(0, os.SEEK_END)
                lines = [*([self._header] if is_new else []), *map(_format, self._unwritten)]
                file.write("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            raise MachineError(
                f"cannot write {self.path}: {error.strerror or error}. Free space on the disk or "
                "choose another folder"
            ) from error
        self._unwritten, self._written_at = [], time.monotonic()
        self._has_written = True

    def replace(self, entry: Mapping[str, Any]) -> None:
        """Replace all entries of the journal file with a single entry.

        If the process is killed during this call, the old file remains.

        Raises:
            MachineError: The file cannot be written.
        """
        content = f"{self._header}\n{_format(entry)}\n".encode()
        write_atomically(self.path, lambda file: file.write(content))
        self._unwritten, self._written_at = [], time.monotonic()

    def remove(self) -> None:
        """Delete the journal file, because the computation is complete."""
        self._unwritten = []
        self.path.unlink(missing_ok=True)


def _remove_unfinished_line(file: BinaryIO) -> None:
    """Remove the last line if a killed process wrote only part of it."""
    file.seek(0)
    content = file.read()
    if not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)


def _format(entry: Mapping[str, Any]) -> str:
    """Return an entry of a journal as one line of JSON, with a checksum as its last item."""
    text = json.dumps(dict(entry), default=_encode)
    return f'{text[:-1]}, "{_CHECKSUM}": {zlib.crc32(text.encode())}}}'


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line of a journal file, or None if the line is damaged."""
    try:
        content = json.loads(line)
        checksum = content.pop(_CHECKSUM)
        if checksum == zlib.crc32(json.dumps(content).encode()):
            return _decode(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None


def _encode(value: Any) -> Any:
    """Convert a tensor to JSON types. `json.dumps` calls this for values that it cannot convert.

    Raises:
        TypeError: The value is not a tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} is neither a tensor nor a JSON type")
    values = value.detach().cpu().contiguous()
    content = base64.b64encode(values.flatten().view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(values.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(values.shape), "base64": content}


def _decode(value: Any) -> Any:
    """Convert the output of `_encode` back to tensors, also inside dictionaries and lists."""
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != _TENSOR:
        return {name: _decode(item) for name, item in value.items()}
    content = bytearray(base64.b64decode(value["base64"]))
    dtype = getattr(torch, value["dtype"])
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
