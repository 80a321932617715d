"""Records of finished cells: one JSON file each, written whole or not at all, or packed into one.

A folder of results holds `records/TASK/DATASET/*.json`, beside each what the images contributed
(.npz), and `images/` with their names. `records.parquet`, where it is there, holds the content of
such files, a row a record or list of names; of a cell that has a file too the file counts, and what
lies beside it.
"""

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from ssl_bench.errors import DataError
from ssl_bench.results.record import (
    ENCODER,
    INFINITE,
    MOST_BYTES,
    OUTDATED,
    CellKey,
    PerImage,
    Record,
    RecordReader,
    place_of,
    shortened,
)
from ssl_bench.system.escaping import plain_json
from ssl_bench.system.files import (
    NAMES,
    RECORDS,
    lock_when_free,
    read_within,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.memory import pass_on_memory, without_collections
from ssl_bench.system.progress import say

if TYPE_CHECKING:
    import pandas

PACKED = "records.parquet"
# Of what all images contributed, and one: three counts of eight bytes for each of 2,700 classes.
_MOST_NPZ, _IMAGE_BYTES = 2**30, 2**16
_COLUMNS = ("file", "record", "images")
# Of what is packed, which is less as a file.
_MOST_PACKED = 2**30
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_SHOWN = 5


class _Row(NamedTuple):
    """The content of a JSON file, and of the .npz beside it."""

    content: bytes
    images: bytes | None


_NOTHING = _Row(b"", None)


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
        self._rows: tuple[object, Mapping[Path, _Row]] | None = None

    def path(self, key: CellKey) -> Path:
        """Where the record of a cell is.

        Raises:
            DataError: a name in it would lead elsewhere.
        """
        return self.root.joinpath("records", *place_of(key, key.digest()))

    def place(self, record: Record) -> str:
        """Where a record is read from, for readers; of a packed one the file that holds it too."""
        name = "/".join(("records", *place_of(record, record.digest)))
        return name if (self.root / name).exists() else f"{PACKED}: {name}"

    def per_image_path(self, record: Record) -> Path:
        """Where they are, if they were kept."""
        return self.path(record.key()).with_suffix(".npz")

    def load(self, key: CellKey) -> Record | None:
        """The record of a finished cell, None when there is none or only half of one."""
        path = self.path(key)
        return self._read(path) if path.is_file() or path in self._packed() else None

    def keeps_images(self, key: CellKey) -> bool:
        """Whether what each image contributed to the value of a cell is there."""
        path = self.path(key)
        if path.is_file():
            return path.with_suffix(".npz").is_file()
        return self._packed().get(path, _NOTHING).images is not None

    def outdated(self, key: CellKey) -> Path | None:
        """A record of this block, facet and metric that is of an earlier kind.

        Cost: opens all records of them, of whatever encoder.
        """
        for path in sorted(self.path(key).parent.glob(key.of_any_kind())):
            try:
                content = read_within(self.root, path, MOST_BYTES)
            except OSError:
                content = b""
            # Without the names that an earlier kind lacks; takes no parsing.
            is_older = not all(f'"{name}":'.encode() in content for name in ENCODER)
            if is_older and self._read(path) is None and self.unreadable[path] == OUTDATED:
                return path
        return None

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
        path, most = self.per_image_path(record), min(_IMAGE_BYTES * record.num_images, _MOST_NPZ)
        row = self._packed().get(path.with_suffix(".json"), _NOTHING)
        try:
            if row is _NOTHING or path.with_suffix(".json").is_file():
                content = read_within(self.root, path, most)
            elif row.images is None:
                return None
            else:
                content = row.images
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = archive.getinfo("arr_0.npy").file_size
                # It may claim anything, and without a number all is inflated and cut after that.
                array = archive.open("arr_0.npy").read(size) if size <= most else b""
            found = np.load(io.BytesIO(array), allow_pickle=False)
            if found.dtype.kind in "biuf" and found.shape[:1] == (record.num_images,):
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
        path = self._ids_path(fingerprint)
        try:
            if (row := self._packed().get(path)) and not path.exists():
                return _names_in(row.content)
            return _names_in(read_within(self.root, path, MOST_BYTES))
        except (OSError, *_UNREADABLE):
            return None

    def _ids_path(self, fingerprint: str) -> Path:
        return self.root / "images" / f"{fingerprint[:16]}.json"

    def records(self) -> list[Record]:
        """Every readable record; the others are in `unreadable`.

        Raises:
            DataError: there is no record at all; that of a run folder says what the run measured.
        """
        self.unreadable = {}
        packed = filter(self._is_record, self._packed())
        paths = {*self.root.glob(RECORDS), *packed}
        reader = RecordReader(self.root)
        with without_collections():
            ordered = sorted(paths, key=lambda path: path.parts)
            found = [record for path in ordered if (record := self._read(path, reader)) is not None]
        self.found = len(paths | self.unreadable.keys())
        if self.unreadable and not found:
            path = min(self.unreadable, key=lambda path: path.parts)
            raise DataError(
                f"none of the {self.found} records in {self.root / 'records'} can be read, such as "
                f"{path} ({self.unreadable[path]}); probe again, into another folder",
                hint=("--out", "{folder}"),
            )
        if not found:
            words = ("ssl-bench", "probe", "--task", "all", "--checkpoint", "demo:skip")
            raise _error_of_run(self.root) or DataError(
                f"no records in {self.root / 'records'}",
                hint=("--out", "{folder}", "or", *words, "--out", str(self.root)),
            )
        return found

    def said_unreadable(self) -> str:
        """One line on what the last `records` passed over, where it did."""
        count = f"{len(self.unreadable)} of {self.found} records cannot be shown"
        return f"{count}: {first_few(self.unreadable)}; the next probe computes what is missing"

    def pack(self) -> int:
        """Move records that can be read, names and shares of images to `records.parquet`.

        A file that another process writes in the meantime stays beside it, and counts.

        Returns:
            How many records it holds now.

        Raises:
            DataError: they are too large for one file.
        """
        import pyarrow
        import pyarrow.parquet

        folder = os.open(self.root, os.O_RDONLY)
        try:
            # One at a time: what another one packed is among the rows.
            lock_when_free(folder)
            rows, moved = dict(self._packed()), list[tuple[Path, os.stat_result]]()
            reader = RecordReader(self.root)
            for path in sorted((*self.root.glob(NAMES), *self.root.glob(RECORDS))):
                npz = path.with_suffix(".npz")
                files = (path, npz) if self._is_record(path) else (path,)
                try:
                    seen = [(file, file.lstat()) for file in files if file.exists()]
                    content = read_within(self.root, path, MOST_BYTES)
                    images = read_within(self.root, npz, _MOST_NPZ) if len(seen) > 1 else None
                    if self._is_record(path):
                        reader.record(content, path)
                    else:
                        _names_in(content)
                # What cannot be read stays where it is; `records` names it.
                except (OSError, *_UNREADABLE):
                    continue
                rows[path] = _Row(content, images)
                moved += seen
            size = sum(len(row.content) + len(row.images or b"") for row in rows.values())
            if size > _MOST_PACKED:
                raise DataError(
                    f"the records in {self.root} have {size:,} bytes, expected at most "
                    f"{_MOST_PACKED:,} to pack; leave them as they are, or in several folders"
                )
            table = pyarrow.table(
                {
                    "file": [path.relative_to(self.root).as_posix().encode() for path in rows],
                    "record": [row.content for row in rows.values()],
                    "images": [row.images for row in rows.values()],
                },
                schema=pyarrow.schema([(name, pyarrow.binary()) for name in _COLUMNS]),
            )
            write_atomically(
                self.root / PACKED,
                lambda file: pyarrow.parquet.write_table(table, file, compression="zstd"),
            )
            for path, before in moved:
                with suppress(FileNotFoundError):
                    now = path.lstat()
                    if (now.st_mtime_ns, now.st_ino) == (before.st_mtime_ns, before.st_ino):
                        path.unlink()
        finally:
            os.close(folder)
        return sum(map(self._is_record, rows))

    def _is_record(self, path: Path) -> bool:
        return path.parent != self.root / "images"

    def _packed(self) -> Mapping[Path, "_Row"]:
        """Rows of `records.parquet` by the place of their files; read again where it changed."""
        path = self.root / PACKED
        try:
            found = path.stat()
        except FileNotFoundError:
            return {}
        state = (found.st_mtime_ns, found.st_size, found.st_ino)
        if self._rows is None or self._rows[0] != state:
            import pyarrow
            import pyarrow.parquet

            try:
                content = pyarrow.BufferReader(read_within(self.root, path, _MOST_PACKED))
                # Not read_table, which imports pandas.
                table = pyarrow.parquet.ParquetFile(content).read()
                columns = [table.column(name).to_pylist() for name in _COLUMNS]
                rows = {
                    self.root.joinpath(*file.decode().split("/")): _Row(record, images)
                    for file, record, images in zip(*columns, strict=True)
                }
            except (
                OSError,
                ValueError,
                KeyError,
                AttributeError,
                TypeError,
                RuntimeError,
            ) as error:
                raise DataError(
                    f"cannot read {path} ({error}); copy it again, or move it away"
                ) from error
            self._rows = state, rows
        return self._rows[1]

    def _read(self, path: Path, reader: RecordReader | None = None) -> Record | None:
        reader = reader or RecordReader(self.root)
        try:
            if (row := self._packed().get(path)) and not path.exists():
                return reader.record(row.content, path)
            return reader.read(path)
        except OSError as error:
            self.unreadable[path] = error.strerror or str(error)
        except _UNREADABLE as error:
            self.unreadable[path] = shortened(error)
        return None


def _names_in(content: bytes) -> tuple[str, ...]:
    """The names of a split's images in the content of their file."""
    names = json.loads(content)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a list of names")
    return tuple(names)


def first_few(reasons: Mapping[Path, str]) -> str:
    """Some files, each with what is wrong with it."""
    named = [f"{path}: {why}" for path, why in reasons.items()]
    more = [f"and {len(named) - _SHOWN} more"] if len(named) > _SHOWN else []
    return "; ".join([*named[:_SHOWN], *more])


def to_pandas(records: Sequence[Record] | Path | str) -> "pandas.DataFrame":
    """One row a record, whose columns are its fields.

    `ci95` is `low_95` and `high_95`, in the unit of `value`; mean and deviation are three columns
    each; what has names of its own, such as `settings`, is JSON, so that every column has one type
    and can be written as Parquet.

    Args:
        records: Or the folder of results that holds them, such as "results".

    Raises:
        DataError: there is no record in that folder.
    """
    # Here, because it is slow to import.
    import pandas

    if isinstance(records, Path | str):
        store = ResultStore(Path(records))
        records = store.records()
        if store.unreadable:
            say(store.said_unreadable())
    rows = []
    for record in records:
        row: dict[str, Any] = {}
        for item in fields(Record):
            name, value = item.name, getattr(record, item.name)
            if name == "ci95":
                row["low_95"], row["high_95"] = value or (None, None)
            elif name in ("mean", "std"):
                row |= {f"{name}_{colour}": v for colour, v in zip("rgb", value, strict=True)}
            elif isinstance(value, Mapping):
                plain = plain_json(value, infinity=INFINITE)
                row[name] = json.dumps(plain, sort_keys=True, default=list)
            else:
                row[name] = value
        rows.append(row | {"encoder_id": record.encoder_id})
    return pandas.DataFrame(rows)


def _error_of_run(folder: Path) -> DataError | None:
    """Return the error on a run folder, with what its last step measured; None for other folders.

    What a run measures of itself, such as the letters that it copies, is in its log alone: numbers
    of the last row that the first one lacks.
    """
    log = folder / "log.jsonl"
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
        config = yaml.load(text, yaml.CSafeLoader)
        objective, model = (
            str(config[name]["_target_"]).rpartition(".")[2] for name in ("objective", "model")
        )
        lines = log.read_text(encoding="utf-8").splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        names = ["loss", *(name for name in last if name not in first and name != "loss")]
        measured = [f"{name} {last[name]:.4g}" for name in names if last.get(name) is not None]
        said = ", ".join([f"step {int(last['step'])}", *measured])
    # Somebody's own files may hold anything.
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, yaml.YAMLError):
        return None
    command = ("ssl-bench", "probe", "--task", "all", "--checkpoint", str(folder))
    has_encoder = model != "StateSpaceConfig"
    return DataError(
        f"{folder} is a run of {objective} and holds no records: {said}; every step is in {log}; "
        f"{'probe' if has_encoder else 'no probe takes'} its model",
        hint=(*command, "--out", "{folder}") if has_encoder else (),
    )
