"""Features and labels on disk.

Features are float16 with a checksum an entry, and a header says what they are of, by which a later
run finds them. Labels are in a file without a name, gone when the process is.
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float16, UInt8, UInt32
from torch import Tensor

from ssl_bench.errors import MachineError
from ssl_bench.system.files import remove_orphans, unfinished

_CHECKSUM = np.dtype("<u4")
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class DamagedFeatures(MachineError):
    """A file does not hold the bytes that were written to it."""


@dataclass(frozen=True)
class FeatureFile:
    """Features by layer and entry, found again only by a run whose header is the same.

    The values come first, then a CRC-32 of each entry of each layer, the header, and a CRC-32 of
    these two. That is one file, so that whoever of several writers comes last leaves all of his.

    Attributes:
        folder: Where it lies; safe to delete at any time.
        header: Everything the values depend on, as plain JSON types.
        shape: Layers, entries, rows, columns, width.
    """

    folder: Path
    header: Mapping[str, Any]
    shape: tuple[int, ...]

    def open(self) -> "FeatureReader | None":
        """The features if they were written completely, else None.

        Raises:
            DamagedFeatures: the file has another size, header or checksums than were written.
        """
        expected = len(self._tail(np.zeros(self.shape[:2], _CHECKSUM)))
        try:
            file = self.path.open("rb")
            file.seek(self._data_bytes())
            tail = file.read(expected + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DamagedFeatures(f"{self.path} cannot be read ({error.strerror})") from error
        checksums = np.frombuffer(tail, _CHECKSUM, min(prod(self.shape[:2]), len(tail) // 4))
        if len(tail) != expected or tail != self._tail(checksums):
            raise DamagedFeatures(f"{self.path} is not as it was written")
        return FeatureReader(self, file, checksums.reshape(self.shape[:2]))

    @contextmanager
    def writing(self) -> Iterator["FeatureWriter"]:
        """Takes features; the file has its name once the block ends without an error.

        Raises:
            MachineError: the disk lacks the room.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_orphans(self.folder)
            with unfinished(self.path) as file:
                writer = FeatureWriter(self, file, np.zeros(self.shape[:2], _CHECKSUM))
                _allocate(file, self._data_bytes() + len(self._tail(writer.checksums)))
                yield writer
                file.seek(self._data_bytes())
                file.write(self._tail(writer.checksums))
        except MachineError:
            raise
        except OSError as error:
            raise MachineError(
                f"cannot keep {self._data_bytes() / 2**30:.1f} GiB of features in {self.folder} "
                f"({error.strerror or error}); choose another folder with probe.cache=DIR, or take "
                "probe.tier=stream"
            ) from error

    @property
    def path(self) -> Path:
        return self.folder / f"{hashlib.sha256(self._header_bytes()).hexdigest()[:16]}.features"

    @property
    def entry_shape(self) -> tuple[int, ...]:
        return self.shape[2:]

    def place(self, layer: int, entry: int) -> int:
        """Of the first byte of a layer of an entry; all layers of one lie side by side."""
        return 2 * prod(self.entry_shape) * (entry * self.shape[0] + layer)

    def _tail(self, checksums: UInt32[np.ndarray, "..."]) -> bytes:
        content = checksums.tobytes() + self._header_bytes()
        return content + np.array(crc32(content), _CHECKSUM).tobytes()

    def _header_bytes(self) -> bytes:
        return json.dumps({**self.header, "shape": self.shape}, indent=1, sort_keys=True).encode()

    def _data_bytes(self) -> int:
        return 2 * prod(self.shape)


@dataclass(frozen=True)
class FeatureWriter:
    """Checksums are of what is given, not of what the disk made of it."""

    format: FeatureFile
    file: BinaryIO
    checksums: UInt32[np.ndarray, "layers entries"]

    def put(
        self, layer: int, entries: Sequence[int], features: Float16[Tensor, "some rows cols dim"]
    ) -> None:
        """Keep some entries of the layer of that index.

        Raises:
            OSError: the disk is full.
        """
        for entry, values in zip(entries, features.contiguous().numpy(), strict=True):
            self.checksums[layer, entry] = crc32(values)
            self.file.seek(self.format.place(layer, entry))
            self.file.write(values)


@dataclass(frozen=True)
class FeatureReader:
    """Copies into memory what is then compared: mapped pages could be other ones when used."""

    format: FeatureFile
    file: BufferedReader
    checksums: UInt32[np.ndarray, "layers entries"]

    def read(self, layer: int, entry: int, into: Float16[np.ndarray, "rows cols dim"]) -> None:
        """Fill an array with an entry of the layer of that index.

        Raises:
            DamagedFeatures: the file gives other bytes than were written.
        """
        try:
            self.file.seek(self.format.place(layer, entry))
            count = self.file.readinto(into.data)
        except OSError as error:
            raise DamagedFeatures(
                f"{self.format.path} cannot be read ({error.strerror})"
            ) from error
        if count != into.nbytes or crc32(into.data) != self.checksums[layer, entry]:
            raise DamagedFeatures(f"{self.format.path} gives other features than were written")


def _allocate(file: IO[bytes], size: int) -> None:
    """Take the room on the disk now, so that a full one is not found after hours.

    Where the file system cannot do so, writing itself tells.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise


def label_file(folder: Path, shape: tuple[int, int, int]) -> UInt8[Tensor, "entries height width"]:
    """Labels of all entries, in a file that is gone when nobody has them any more.

    Raises:
        MachineError: the folder takes no file, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Room that is missing later, behind mapped memory, would end the process.
            _allocate(file, prod(shape))
            return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=shape))
    except OSError as error:
        raise MachineError(
            f"cannot keep labels in {folder} ({error.strerror or error}); choose another "
            "folder with probe.cache=DIR"
        ) from error
