"""Records of finished cells: one JSON file each, written whole or not at all, or packed into one.

A folder of results holds `records/TASK/DATASET/*.json`, beside each what the images contributed
(.npz), and `images/` with their names. `records.parquet`, where it is there, holds the content of
such files, a row a record or list of names; of a cell that has a file too the file counts, and what
lies beside it.

A record holds a digest of itself and one of its .npz, a row one of all that is in it, and the
metadata of `records.parquet` the number of rows. So nothing is changed or lost unnoticed.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from ssl_bench.errors import DataError, escape_braces, format_command
from ssl_bench.results import versions
from ssl_bench.results.record import (
    ENCODER_FIELDS,
    INFINITY_AS_JSON,
    MOST_BYTES,
    OLD_FORMAT,
    PerImage,
    Record,
    RecordReader,
    ResultKey,
    numeric_digest,
    place_of,
    sealed_text,
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
# Not in files of older versions.
_ROW_DIGEST, _NUM_ROWS = "sha256", b"ssl_bench_rows"
_DAMAGED_ROW = "edited or damaged: not what its row was written with"
# Of what is packed, which is less as a file.
_MOST_PACKED = 2**30
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_SHOWN = 5


class _Row(NamedTuple):
    """The content of a JSON file, and of the .npz beside it.

    Attributes:
        digest: Of name and content, as `records.parquet` states it; None in older ones.
    """

    content: bytes
    images: bytes | None
    digest: bytes | None = None


_NOTHING = _Row(b"", None)


def _row_digest(file: bytes, row: _Row) -> bytes:
    """Return the digest of all that a row holds."""
    parts = (file, row.content, b"" if row.images is None else b"." + row.images)
    # Of each part alone first, so that no byte can move from one to another.
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


class ResultStore:
    """A folder of records that many processes may write at once.

    Attributes:
        unreadable: Files that the last `records` passed over, and why.
        found: How many files it looked at.
        outdated: Records that it left out because newer code computes other numbers.
        damaged: Files of images' contributions that do not fit their records.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: dict[Path, str] = {}
        self.found = 0
        self.outdated: list[Record] = []
        self.damaged: list[Path] = []
        self._num_replaced = 0
        self._newest: Mapping[str, tuple[int, int]] = {}
        self._rows: tuple[object, Mapping[Path, _Row], Mapping[Path, _Row]] | None = None
        self._by_number: dict[tuple[Path, str], Mapping[str, Path]] = {}

    def path(self, key: ResultKey) -> Path:
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
        place = place_of(record, record.digest)
        return self.root.joinpath("records", *place).with_suffix(".npz")

    def load(self, key: ResultKey) -> Record | None:
        """Return the record of a finished cell, None when there is none or only half of one.

        It may be one whose settings hold 1 where the key holds 1.0.
        """
        path, usual = self._found_path(key), self.path(key)
        if path is None and usual in self._damaged_rows():
            self.unreadable[usual] = _DAMAGED_ROW
        record = None if path is None else self._read(path)
        if record is None or path == usual:
            return record
        as_asked = replace(record, settings=key.settings)
        # The name of its file.
        vars(as_asked)["digest"] = record.digest
        return as_asked

    def keeps_images(self, key: ResultKey) -> bool:
        """Whether what each image contributed to the value of a cell is there."""
        path = self._found_path(key)
        if path is not None and path.is_file():
            return path.with_suffix(".npz").is_file()
        return path is not None and self._packed()[path].images is not None

    def _found_path(self, key: ResultKey) -> Path | None:
        """Return the place of the record of a cell, None where there is none."""
        path = self.path(key)
        if path.is_file() or path in self._packed():
            return path
        at = path.parent, key.checkpoint_sha256
        if at not in self._by_number:
            self._by_number[at] = self._paths_by_number(*at)
        return self._by_number[at].get(numeric_digest(key))

    def _paths_by_number(self, folder: Path, checkpoint: str) -> dict[str, Path]:
        """Return the places of the records of some weights by `numeric_digest`.

        Older versions kept whether 1 or 1.0 had been typed, in the names of files too.
        """
        reader, found = RecordReader(self.root), {}
        packed = (path for path in self._packed() if path.parent == folder)
        for path in sorted({*folder.glob("*.json"), *packed}):
            try:
                content = self._content(path)
                # Takes no parsing.
                if checkpoint.encode() in content:
                    found[numeric_digest(reader.record(content, path))] = path
            # It counts for nothing; `records` names it.
            except (OSError, *_UNREADABLE):
                continue
        return found

    def find_older_versions(self, keys: Iterable[ResultKey]) -> list[ResultKey]:
        """Return the keys of recorded cells that outdated code computed, of these cells."""
        return [
            older
            for key in keys
            for metric in range(1, key.metric_version + 1)
            for pipeline in range(1, key.pipeline_version + 1)
            if (metric, pipeline) != (key.metric_version, key.pipeline_version)
            and self._found_path(
                older := replace(key, metric_version=metric, pipeline_version=pipeline)
            )
        ]

    def find_old_format_record(self, key: ResultKey) -> Path | None:
        """A record of this block, facet and metric that is of an earlier kind.

        Cost: opens all records of them, of whatever encoder.
        """
        for path in sorted(self.path(key).parent.glob(key.of_any_kind())):
            try:
                content = read_within(self.root, path, MOST_BYTES)
            except OSError:
                content = b""
            # Without the names that an earlier kind lacks; takes no parsing.
            is_older = not all(f'"{name}":'.encode() in content for name in ENCODER_FIELDS)
            if is_older and self._read(path) is None and self.unreadable[path] == OLD_FORMAT:
                return path
        return None

    def save(self, record: Record, per_image: PerImage | None = None) -> Path:
        """Write a record and, beside it, what each image contributed to the value."""
        path, content = self.path(record.key()), record.as_json()
        if per_image is not None:
            written = io.BytesIO()
            np.savez_compressed(written, per_image)
            content["per_image_sha256"] = hashlib.sha256(written.getvalue()).hexdigest()
            # First, so that a record never stands there without it.
            write_atomically(path.with_suffix(".npz"), lambda file: file.write(written.getvalue()))
        write_text_atomically(path, sealed_text(content))
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
            stated = record.per_image_sha256
            if stated not in (None, hashlib.sha256(content).hexdigest()):
                raise ValueError("not what its record was written with")
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
            return _names_in(self._content(path))
        except (OSError, *_UNREADABLE):
            return None

    def _ids_path(self, fingerprint: str) -> Path:
        return self.root / "images" / f"{fingerprint[:16]}.json"

    def records(self) -> list[Record]:
        """Return every readable record of current code.

        The others are in `unreadable` and `outdated`. Two records of a cell whose settings were
        typed as 1 and as 1.0 are one, the later one.

        Raises:
            DataError: there is no record at all; that of a run folder says what the run measured.
        """
        damaged = (path for path in self._damaged_rows() if not path.exists())
        self.unreadable, self.outdated = dict.fromkeys(damaged, _DAMAGED_ROW), []
        packed = filter(self._is_record, self._packed())
        paths = {*self.root.glob(RECORDS), *packed}
        reader = RecordReader(self.root)
        with without_collections():
            ordered = sorted(paths, key=lambda path: path.parts)
            found = [record for path in ordered if (record := self._read(path, reader)) is not None]
        if reader.has_retyped:
            latest = {one.key(): one for one in sorted(found, key=lambda one: one.created)}
            found = [record for record in found if latest[record.key()] is record]
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
                hint=("--out", "{folder}", "or", *words, "--out", escape_braces(str(self.root))),
            )
        return self._current(found)

    def _current(self, found: Sequence[Record]) -> list[Record]:
        """Return the records that the newest code computed; the others join `outdated`.

        That is the installed code, or the code of other records of the task where these are newer
        or the task is not installed. So a table never mixes versions, also where the probe was
        installed elsewhere.

        Raises:
            DataError: All are outdated.
        """
        self._newest = newest = _newest_versions(found)
        current = [record for record in found if _versions(record) == newest[record.task]]
        if len(current) == len(found):
            return current
        self.outdated = [record for record in found if _versions(record) != newest[record.task]]
        cells = set(map(_without_versions, current))
        self._num_replaced = sum(_without_versions(record) in cells for record in self.outdated)
        if not current:
            raise DataError(
                f"all {len(found)} records in {self.root / 'records'} are outdated "
                f"({self._why_outdated()})",
                hint=self._words_to_renew(),
            )
        return current

    def _why_outdated(self) -> str:
        tasks = {}
        for record in self.outdated:
            names = ("metric version", "pipeline version")
            both = zip(names, _versions(record), self._newest[record.task], strict=True)
            tasks[record.task] = ", ".join(
                f"{name} {old}, now {new}" for name, old, new in both if old != new
            )
        return "; ".join(f"{task}: {reason}" for task, reason in sorted(tasks.items()))

    def _outdated_note(self) -> str:
        """Return a line on how many records are outdated, why, and what to type."""
        count = len(self.outdated)
        line = f"left out {count} outdated record{'s' * (count > 1)} ({self._why_outdated()})"
        if self._num_replaced == count:
            return f"{line}; newer ones replace them"
        return f"{line}; `{format_command(self._words_to_renew())}` computes them again"

    def _words_to_renew(self) -> list[str]:
        tasks = ",".join(sorted({record.task for record in self.outdated}))
        words = [
            "ssl-bench",
            "probe",
            "--task",
            escape_braces(tasks),
            "--checkpoint",
            "{checkpoint}",
        ]
        return [*words, "--out", escape_braces(str(self.root))]

    def notes(self) -> list[str]:
        """Return a line each on the unreadable and the outdated records that `records` left out."""
        lines = []
        if self.unreadable:
            count = f"{len(self.unreadable)} of {self.found} records cannot be shown"
            next_probe = "the next probe computes what is missing"
            lines.append(f"{count}: {summarise_problems(self.unreadable)}; {next_probe}")
        return [*lines, self._outdated_note()] if self.outdated else lines

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
            rows = {**self._damaged_rows(), **self._packed()}
            moved = list[tuple[Path, os.stat_result]]()
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
            names = [os.fsencode(path.relative_to(self.root).as_posix()) for path in rows]
            digests = [
                # Damaged rows keep the digest that they do not fit.
                row.digest or _row_digest(name, row)
                for name, row in zip(names, rows.values(), strict=True)
            ]
            table = pyarrow.table(
                {
                    "file": names,
                    "record": [row.content for row in rows.values()],
                    "images": [row.images for row in rows.values()],
                    _ROW_DIGEST: digests,
                },
                schema=pyarrow.schema(
                    [(name, pyarrow.binary()) for name in (*_COLUMNS, _ROW_DIGEST)],
                    {_NUM_ROWS: str(len(rows))},
                ),
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

    def _content(self, path: Path) -> bytes:
        """Return the content of a file of this folder, or of its row.

        Raises:
            OSError: There is neither.
        """
        row = self._packed().get(path)
        if row is None or path.exists():
            return read_within(self.root, path, MOST_BYTES)
        return row.content

    def _packed(self) -> Mapping[Path, _Row]:
        """Return the sound rows of `records.parquet` by the place of their files."""
        return self._read_rows()[0]

    def _damaged_rows(self) -> Mapping[Path, _Row]:
        """Return the rows of `records.parquet` that are not what was written."""
        return self._read_rows()[1]

    def _read_rows(self) -> tuple[Mapping[Path, _Row], Mapping[Path, _Row]]:
        """Return sound and damaged rows of `records.parquet`; it is read again where it changed.

        Raises:
            DataError: It cannot be read, or has lost rows.
        """
        path = self.root / PACKED
        try:
            found = path.stat()
        except FileNotFoundError:
            return {}, {}
        state = (found.st_mtime_ns, found.st_size, found.st_ino)
        if self._rows is None or self._rows[0] != state:
            self._rows = state, *_rows_of(self.root, path)
        return self._rows[1:]

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


def _rows_of(root: Path, path: Path) -> tuple[dict[Path, _Row], dict[Path, _Row]]:
    """Return the sound and the damaged rows of a file as `ResultStore.pack` writes it.

    Raises:
        DataError: It cannot be read, or has lost rows.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        content = pyarrow.BufferReader(read_within(root, path, _MOST_PACKED))
        # Not read_table, which imports pandas.
        table = pyarrow.parquet.ParquetFile(content).read()
        columns = [table.column(name).to_pylist() for name in _COLUMNS]
        number, has_digests = str(table.num_rows).encode(), _ROW_DIGEST in table.column_names
        digests = table.column(_ROW_DIGEST).to_pylist() if has_digests else [None] * table.num_rows
        if (table.schema.metadata or {}).get(_NUM_ROWS, number) != number:
            raise ValueError(f"it has lost or gained rows: {table.num_rows} are left")
        sound, damaged = {}, {}
        for file, *parts in zip(*columns, digests, strict=True):
            row, place = _Row(*parts), root.joinpath(*os.fsdecode(file).split("/"))
            is_sound = row.digest in ((None,) if not has_digests else (_row_digest(file, row),))
            (sound if is_sound else damaged)[place] = row
    # Whatever the decoder raises; a size that is damaged may ask for any memory.
    except Exception as error:
        if not isinstance(error, pyarrow.ArrowMemoryError):
            pass_on_memory(error)
        raise DataError(f"cannot read {path} ({error}); copy it again, or move it away") from error
    return sound, damaged


def _versions(record: Record) -> tuple[int, int]:
    return record.metric_version, record.pipeline_version


def _without_versions(record: Record) -> ResultKey:
    return replace(record.key(), metric_version=1, pipeline_version=1)


def _newest_versions(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """Return the newest versions of metric and pipeline of each task, here or in its records.

    Those that are installed count for installed probes alone: nothing is known of others.
    """
    newest: dict[str, tuple[int, int]] = {}
    for record in records:
        metric, pipeline = newest.get(record.task, (0, 0))
        newest[record.task] = (
            max(metric, record.metric_version),
            max(pipeline, record.pipeline_version),
        )
    for task, (metric, pipeline) in newest.items():
        if (installed := versions.installed_metric_version(task)) is not None:
            newest[task] = max(metric, installed), max(pipeline, versions.PIPELINE_VERSION)
    return newest


def _names_in(content: bytes) -> tuple[str, ...]:
    """The names of a split's images in the content of their file."""
    names = json.loads(content)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a list of names")
    return tuple(names)


def summarise_problems(reasons: Mapping[Path, str]) -> str:
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
        for line in store.notes():
            say(line)
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
                plain = plain_json(value, infinity=INFINITY_AS_JSON)
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
    command = ("ssl-bench", "probe", "--task", "all", "--checkpoint", escape_braces(str(folder)))
    has_encoder = model != "StateSpaceConfig"
    return DataError(
        f"{folder} is a run of {objective} and holds no records: {said}; every step is in {log}; "
        f"{'probe' if has_encoder else 'no probe takes'} its model",
        hint=(*command, "--out", "{folder}") if has_encoder else (),
    )
