"""Features on disk: memory-mapped float16 beside a header that says what they are of."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float16
from torch import Tensor

from ssl_bench.errors import MachineError
from ssl_bench.files import write_text_atomically


@dataclass(frozen=True)
class FeatureFile:
    """One array of features, found again only by a run whose header is the same.

    Attributes:
        folder: Where it lies; safe to delete at any time.
        header: Everything the values depend on, as plain JSON types.
    """

    folder: Path
    header: Mapping[str, Any]
    shape: tuple[int, ...]

    def load(self) -> Float16[Tensor, "layers entries rows cols dim"] | None:
        """The features if they are complete and of the same header, else None."""
        try:
            complete = json.loads(self._header_path.read_text()) == self._full_header()
        except (OSError, ValueError):
            return None
        if not complete or self._path.stat().st_size != self._bytes():
            return None
        # Copy-on-write: torch refuses to share memory that cannot be written.
        return torch.from_numpy(np.memmap(self._path, np.float16, "c", shape=self.shape))

    @contextmanager
    def writing(self) -> Iterator[Float16[Tensor, "layers entries rows cols dim"]]:
        """Features to be filled; they count as complete once the block ends without an error.

        Raises:
            MachineError: the disk lacks the room.
        """
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._require_room()
            mapped = np.memmap(unfinished, np.float16, "w+", shape=self.shape)
            yield torch.from_numpy(mapped)
            mapped.flush()
            unfinished.replace(self._path)
            write_text_atomically(self._header_path, json.dumps(self._full_header(), indent=1))
        except MachineError:
            raise
        except OSError as error:
            raise MachineError(
                f"cannot keep features in {self.folder} ({error.strerror or error}); choose "
                "another folder with probe.cache=DIR"
            ) from error
        finally:
            with suppress(OSError):
                unfinished.unlink()

    def _require_room(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < self._bytes():
            raise MachineError(
                f"the features take {self._bytes() / 2**30:.1f} GiB and {self.folder} has "
                f"{free / 2**30:.1f} GiB free; raise probe.memory_gib, choose another folder with "
                "probe.cache=DIR, or ask for fewer layers"
            )

    def _bytes(self) -> int:
        return 2 * prod(self.shape)

    def _full_header(self) -> dict[str, Any]:
        return {**self.header, "shape": list(self.shape)}

    @property
    def _path(self) -> Path:
        text = json.dumps(self._full_header(), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.float16"

    @property
    def _header_path(self) -> Path:
        return self._path.with_suffix(".json")
