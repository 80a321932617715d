"""Records of finished cells: one JSON file each, written whole or not at all."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ssl_bench.errors import DataError
from ssl_bench.results.contributions import WHOLE, most_bytes, read_array
from ssl_bench.results.ranges import shortened
from ssl_bench.results.reading import (
    MOST_BYTES,
    OUTDATED,
    RecordReader,
    place_of,
)
from ssl_bench.results.record import ENCODER, CellKey, PerImage, Record
from ssl_bench.results.run_folder import said_of_run
from ssl_bench.system.files import (
    open_within,
    read_within,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.memory import pass_on_memory, without_collections

_SHOWN = 5


class ResultStore:
    """A folder of records that many processes may write at once.

    Attributes:
        unreadable: Files that the last `records` passed over, and why.
        found: How many files it looked at.
        damaged: Files of images' contributions that do not fit their records.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: dict[Path, str] = {}
        self.found = 0
        self.damaged: list[Path] = []

    def path(self, key: CellKey) -> Path:
        """Where the record of a cell is.

        Raises:
            DataError: a name in it would lead elsewhere.
        """
        return self.root.joinpath("records", *place_of(key, key.digest()))

    def load(self, key: CellKey) -> Record | None:
        """The record of a finished cell, None when there is none or only half of one."""
        path = self.path(key)
        return self._read(path) if path.is_file() else None

    def outdated(self, key: CellKey) -> Path | None:
        """A record of this block, facet and metric that is of an earlier kind.

        Cost: opens all records of them, of whatever encoder.
        """
        for path in sorted(self.path(key).parent.glob(key.of_any_kind())):
            if self._tells_encoder(path):
                continue
            if self._read(path) is None and self.unreadable[path] == OUTDATED:
                return path
        return None

    def _tells_encoder(self, path: Path) -> bool:
        """Whether a file has the names that an earlier kind lacks; takes no parsing."""
        try:
            content = read_within(self.root, path, MOST_BYTES)
        except OSError:
            return False
        return all(f'"{name}":'.encode() in content for name in ENCODER)

    def save(self, record: Record, per_image: PerImage | None = None) -> Path:
        """Write a record and, beside it, what each image contributed to the value."""
        path = self.path(record.key())
        if per_image is not None:
            # First, so that a record never stands there without it.
            write_atomically(
                path.with_suffix(".npz"), lambda file: np.savez_compressed(file, per_image)
            )
        text = json.dumps(record.as_json(), indent=1, sort_keys=True, default=list)
        write_text_atomically(path, text + "\n")
        return path

    def per_image(self, record: Record) -> PerImage | None:
        """What each image contributed; None where nothing was kept, or it is `damaged`."""
        path = self.per_image_path(record)
        try:
            most = most_bytes(record)
            with open_within(self.root, path, most) as file:
                found = read_array(file, most)
            if found.dtype.kind in WHOLE and found.shape[:1] == (record.num_images,):
                return found
        except FileNotFoundError:
            return None
        # A damaged file makes the readers of zip and npy fail in any way.
        except Exception as error:
            pass_on_memory(error)
        self.damaged.append(path)
        return None

    def save_image_ids(self, fingerprint: str, ids: Sequence[str]) -> None:
        """Keep the ids behind a dataset's fingerprint, in the order of `per_image`."""
        write_text_atomically(self._ids_path(fingerprint), json.dumps(list(ids)) + "\n")

    def image_ids(self, fingerprint: str) -> tuple[str, ...] | None:
        """Ids of all images of a split; None where they were not kept."""
        try:
            ids = json.loads(read_within(self.root, self._ids_path(fingerprint), MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(ids, list) and all(isinstance(name, str) for name in ids)
        return tuple(ids) if whole else None

    def _ids_path(self, fingerprint: str) -> Path:
        return self.root / "images" / f"{fingerprint[:16]}.json"

    def per_image_path(self, record: Record) -> Path:
        """Where they are, if they were kept."""
        return self.path(record.key()).with_suffix(".npz")

    def records(self) -> list[Record]:
        """Every readable record; the others are in `unreadable`.

        Raises:
            DataError: there is no record at all; that of a run folder says what the run measured.
        """
        self.unreadable = {}
        paths = sorted((self.root / "records").glob("*/*/*.json"), key=lambda path: path.parts)
        self.found = len(paths)
        found = self._read_all(paths)
        if paths and not found:
            raise DataError(
                f"none of the {len(paths)} records in {self.root / 'records'} can be read, such as "
                f"{paths[0]} ({self.unreadable[paths[0]]}); run `ssl-bench probe --out {self.root}`"
            )
        if not found:
            raise DataError(
                said_of_run(self.root)
                or f"no records in {self.root / 'records'}; run `ssl-bench probe --out {self.root}`"
            )
        return found

    def said_unreadable(self) -> str:
        """One line on what the last `records` passed over, where it did."""
        count = f"{len(self.unreadable)} of {self.found} records cannot be shown"
        return f"{count}: {first_few(self.unreadable)}; the next probe computes what is missing"

    def _read_all(self, paths: Iterable[Path]) -> list[Record]:
        reader = RecordReader(self.root)
        with without_collections():
            found = [self._read(path, reader) for path in paths]
        return [record for record in found if record is not None]

    def _read(self, path: Path, reader: RecordReader | None = None) -> Record | None:
        try:
            return (reader or RecordReader(self.root)).read(path)
        except OSError as error:
            self.unreadable[path] = error.strerror or str(error)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self.unreadable[path] = shortened(error)
        return None


def first_few(reasons: Mapping[Path, str]) -> str:
    """Some files, each with what is wrong with it."""
    named = [f"{path}: {why}" for path, why in reasons.items()]
    more = [f"and {len(named) - _SHOWN} more"] if len(named) > _SHOWN else []
    return "; ".join([*named[:_SHOWN], *more])
