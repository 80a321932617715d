"""Read and write folders of results. A record stores one result.

A folder of results contains:

- `records/TASK/DATASET/*.json`: one record in each file. The per-image values of a record are in
  the `.npz` file with the same stem.
- `images/*.json`: the ids of a set of scored images, in the order of the per-image values.
- `records.parquet`: a file that `ResultStore.pack` writes. Each row has the content of one JSON
  file and of its `.npz` file. If a JSON file still exists, it is used instead of the row for this
  file.

Files are written atomically. To detect changes and losses, each record contains a digest of itself
and of its `.npz` file. Each row of the Parquet file contains a digest of its content, and the file
states the number of rows.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from ssl_bench.composition.choices import choices
from ssl_bench.errors import DataError, escape_braces, format_command
from ssl_bench.results import versions
from ssl_bench.results.record import (
    INFINITY_AS_JSON,
    MAX_FILE_BYTES,
    PerImage,
    Record,
    RecordedEncoder,
    RecordReader,
    ResultKey,
    describe_reading_error,
    find_encoder,
    numeric_digest,
    replace_settings,
    text_with_digest,
    unify_settings,
)
from ssl_bench.system.files import (
    IMAGE_IDS_GLOB,
    RECORDS_GLOB,
    read_untrusted,
    read_untrusted_folder,
    remove_orphans,
    remove_orphans_below,
    require_writable,
    wait_for_lock,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import print_message, to_plain_json
from ssl_bench.system.process import pause_garbage_collection, reraise_out_of_memory

if TYPE_CHECKING:
    import pandas

    from ssl_bench.results.packed import PackedRecord

PACKED_FILE = "records.parquet"
"""Name of the file of packed records."""

_MAX_NPZ_BYTES = 2**30
# Enough for three 8-byte counts for each of 2,700 classes.
_MAX_BYTES_PER_IMAGE = 2**16
_DAMAGED_ROW = f"edited or damaged: its row in {PACKED_FILE} does not match the row's digest"
_READING_ERRORS = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_MAX_LISTED = 5


class ResultStore:
    """A folder of results, to which several processes may write at the same time.

    A record is the stored result of one evaluation.

    Attributes:
        root: Path of the folder.
        num_records: Number of records, including unreadable and outdated records, that the last
            call of `records` or `encoders` found.
        unreadable: Paths of invalid records, each with the reason why the record is invalid.
        outdated: Records of older versions of the code, which the last call of `records` left out.
        damaged_files: `.npz` files of per-image values that do not match their records.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: dict[Path, str] = {}
        self.num_records = 0
        self.outdated: list[Record] = []
        self.damaged_files: list[Path] = []
        self._num_replaced = 0
        self._newest: Mapping[str, tuple[int, int]] = {}
        self._packed_rows: (
            tuple[object, Mapping[Path, PackedRecord], Mapping[Path, PackedRecord]] | None
        ) = None
        self._paths_by_digest: dict[tuple[Path, str], Mapping[str, Path]] = {}

    @classmethod
    def create(cls, root: Path) -> "ResultStore":
        """Open a folder of results for writing.

        The folder is created if it is missing. Temporary files of killed processes are deleted.
        """
        require_writable(root)
        root.mkdir(parents=True, exist_ok=True)
        for name in ("records", "images", "pictures"):
            remove_orphans_below(root / name)
        remove_orphans(root)
        return cls(root)

    def path(self, key: ResultKey) -> Path:
        """Return the path of the JSON file that stores a result. The file need not exist."""
        return self.root.joinpath("records", *key.relative_path())

    def per_image_path(self, key: ResultKey) -> Path:
        return self.path(key).with_suffix(".npz")

    def describe_path(self, record: Record) -> str:
        """Return the path of a record (a stored result) relative to the folder, for messages.

        If the record is stored in `records.parquet`, the prefix "records.parquet: " is added.
        """
        name = "/".join(("records", *record.relative_path()))
        return name if (self.root / name).exists() else f"{PACKED_FILE}: {name}"

    def load(self, key: ResultKey) -> Record | None:
        """Return the stored record of the result `key`, or None if no valid record is stored."""
        path, usual_path = self._find_path(key), self.path(key)
        if path is None and usual_path in self._unreadable_rows():
            self.unreadable[usual_path] = _DAMAGED_ROW
        record = None if path is None else self._read(path)
        if record is None or path == usual_path:
            return record
        return replace_settings(record, settings=key.settings)

    def has_per_image(self, key: ResultKey) -> bool:
        """Return whether the folder contains the per-image values of the result `key`."""
        path = self._find_path(key)
        if path is not None and path.is_file():
            return path.with_suffix(".npz").is_file()
        return path is not None and self._packed()[path].images is not None

    def _find_path(self, key: ResultKey) -> Path | None:
        """Return the path of the JSON file that stores a result, or None if none is stored.

        If the result is stored in `records.parquet`, return the path of the JSON file that its row
        replaces. A result from before version 0.2 is also found if a number in its settings was
        stored as 1 instead of 1.0.
        """
        path = self.path(key)
        if path.is_file() or path in self._packed():
            return path
        place = path.parent, key.checkpoint_sha256
        if place not in self._paths_by_digest:
            self._paths_by_digest[place] = self._list_by_digest(*place)
        return self._paths_by_digest[place].get(numeric_digest(key))

    def _list_by_digest(self, folder: Path, checkpoint_sha256: str) -> dict[str, Path]:
        """Return the paths of all records (stored results) of an encoder in a folder.

        The keys of the dictionary come from `numeric_digest`, which does not distinguish 1 and 1.0.
        """
        reader, paths = RecordReader(), {}
        packed = (path for path in self._packed() if path.parent == folder)
        for path in sorted({*folder.glob("*.json"), *packed}):
            try:
                content = self._read_content(path)
                # Parsing is slow, so skip files without the digest of the checkpoint.
                if checkpoint_sha256.encode() in content:
                    paths[numeric_digest(reader.parse(content, path))] = path
            # Ignore invalid files here, because `records` reports them.
            except (OSError, *_READING_ERRORS):
                continue
        return paths

    def find_older_versions(self, keys: Iterable[ResultKey]) -> list[ResultKey]:
        """Return the keys of stored results that older versions of the code computed.

        Args:
            keys: Keys of the newest version. A stored key is returned if it differs from one of
                `keys` only in version numbers.
        """
        return [
            older
            for key in keys
            for metric in range(1, key.metric_version + 1)
            for pipeline in range(1, key.pipeline_version + 1)
            if (metric, pipeline) != (key.metric_version, key.pipeline_version)
            and self._find_path(
                older := replace(key, metric_version=metric, pipeline_version=pipeline)
            )
        ]

    def save(self, record: Record, per_image: PerImage | None = None) -> Path:
        """Write a record (a result) and its per-image values, and return the record's path."""
        path, content = self.path(record.key()), record.as_json()
        if per_image is not None:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, per_image)
            content["per_image_sha256"] = hashlib.sha256(buffer.getvalue()).hexdigest()
            # Write the values before the record, so that a crash cannot leave a record without
            # its values.
            write_atomically(path.with_suffix(".npz"), lambda file: file.write(buffer.getvalue()))
        write_text_atomically(path, text_with_digest(content))
        return path

    def load_per_image(self, record: Record) -> PerImage | None:
        """Return the per-image values of a record (a stored result).

        The result is None if the values are missing or invalid. The path of an invalid file is
        added to `damaged_files`.
        """
        path = self.per_image_path(record)
        most = min(_MAX_BYTES_PER_IMAGE * record.num_images, _MAX_NPZ_BYTES)
        row = self._packed().get(path.with_suffix(".json"))
        try:
            if row is None or path.with_suffix(".json").is_file():
                content = read_untrusted(self.root, path, most)
            elif row.images is None:
                return None
            else:
                content = row.images
            if record.per_image_sha256 not in (None, hashlib.sha256(content).hexdigest()):
                raise ValueError("the content does not match the digest in the record")
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = archive.getinfo("arr_0.npy").file_size
                # A damaged file may state any size, so limit the memory.
                array = archive.open("arr_0.npy").read(size) if size <= most else b""
            per_image = np.load(io.BytesIO(array), allow_pickle=False)
            if per_image.dtype.kind in "biuf" and per_image.shape[:1] == (record.num_images,):
                return per_image
        except FileNotFoundError:
            return None
        # The zip and npy decoders may raise any class of exception if a file is damaged.
        except Exception as error:
            reraise_out_of_memory(error)
        self.damaged_files.append(path)
        return None

    def save_image_ids(self, fingerprint: str, ids: Sequence[str]) -> None:
        """Write the ids of a set of scored images to a file.

        Args:
            fingerprint: Digest that identifies the set of images.
            ids: Ids of the images, in the order of the per-image values.
        """
        write_text_atomically(self._image_ids_path(fingerprint), json.dumps(list(ids)) + "\n")

    def image_ids(self, fingerprint: str) -> tuple[str, ...] | None:
        """Return the ids of a set of scored images, or None if they cannot be read.

        Args:
            fingerprint: Digest that identifies the set of images.
        """
        try:
            return _parse_image_ids(self._read_content(self._image_ids_path(fingerprint)))
        except (OSError, *_READING_ERRORS):
            return None

    def _image_ids_path(self, fingerprint: str) -> Path:
        return self.root / "images" / f"{fingerprint[:16]}.json"

    def records(self, paths: Collection[str] | None = None) -> list[Record]:
        """Read the records (stored results) that are valid and up to date.

        Invalid records are added to `unreadable`, and records of older versions of the code are
        stored in `outdated`.

        Args:
            paths: Paths of the records to read, from the result of `encoders` (default: all
                records).

        Raises:
            DataError: There is no valid record. If the folder is a pretraining run, the message
                contains the last measurements of the run.
        """
        self.outdated = []
        if paths is None:
            to_read = {*self.root.glob(RECORDS_GLOB), *filter(self._is_record, self._packed())}
            self.unreadable = self._list_unreadable_rows()
            self.num_records = len(to_read | self.unreadable.keys())
        else:
            to_read = set(map(Path, paths))
        reader = RecordReader()
        with pause_garbage_collection():
            ordered = sorted(to_read, key=lambda path: path.parts)
            read = (self._read(path, reader) for path in ordered)
            records = unify_settings([record for record in read if record is not None])
        if not records:
            raise self._no_records_error()
        return self._leave_out_outdated(records)

    def encoders(self) -> dict[RecordedEncoder, list[str]]:
        """Return the encoders that have results, each with the paths of its records.

        A record is the stored result of one evaluation. This method is much faster than `records`,
        because only a few files are parsed completely. Parsed files that are invalid are added to
        `unreadable`.

        Raises:
            DataError: There is no valid record.
        """
        self.unreadable, self.num_records = self._list_unreadable_rows(), 0
        encoders: dict[RecordedEncoder, list[str]] = {}
        by_fields: dict[tuple[bytes, ...], RecordedEncoder] = {}
        to_parse = []
        with pause_garbage_collection():
            for path, content in self._scan():
                self.num_records += 1
                encoder = find_encoder(content, by_fields)
                if encoder is None:
                    to_parse.append(path)
                else:
                    encoders.setdefault(encoder, []).append(path)
        # An encoder with a single record may come from a damaged file, so that file is parsed.
        for encoder in [one for one, paths in encoders.items() if len(paths) == 1]:
            to_parse += encoders.pop(encoder)
        reader = RecordReader()
        for path in to_parse:
            if record := self._read(Path(path), reader):
                encoders.setdefault(record.encoder(), []).append(path)
        self.num_records += len(self._list_unreadable_rows())
        if not encoders:
            raise self._no_records_error()
        return encoders

    def _scan(self) -> Iterator[tuple[str, bytes]]:
        """Yield the path and the JSON content of each record (stored result).

        If a file cannot be read, its content is b"".
        """
        for folder in sorted(self.root.glob(RECORDS_GLOB.rpartition("/")[0])):
            yield from read_untrusted_folder(self.root, folder, ".json", MAX_FILE_BYTES)
        for path, row in self._packed().items():
            if self._is_record(path) and not path.exists():
                yield str(path), row.content

    def _list_unreadable_rows(self) -> dict[Path, str]:
        """Return the damaged rows of `records.parquet`, each with a text that states the problem.

        The keys are the paths of the JSON files that the rows replace. A row is left out if its
        JSON file still exists, because this file is read instead.
        """
        return {path: _DAMAGED_ROW for path in self._unreadable_rows() if not path.exists()}

    def _no_records_error(self) -> DataError:
        if self.unreadable:
            path = min(self.unreadable, key=lambda path: path.parts)
            return DataError(
                f"none of the {self.num_records} records in {self.root / 'records'} can be read, "
                f"for example {path} ({self.unreadable[path]}). Write new results to another "
                "folder",
                hint=("--out", "{folder}"),
            )
        words = ("ssl-bench", "probe", "--task", "all", "--checkpoint", "demo:skip")
        return _training_run_error(self.root) or DataError(
            f"no records in {self.root / 'records'}",
            hint=("--out", "{folder}", "or", *words, "--out", escape_braces(str(self.root))),
        )

    def _leave_out_outdated(self, records: Sequence[Record]) -> list[Record]:
        """Return the records (stored results) that the newest version of the code computed.

        Records of older versions are stored in `outdated`. Tables therefore never mix versions,
        even if records come from several machines.

        Raises:
            DataError: All records are outdated.
        """
        self._newest = newest = _newest_versions(records)
        current = [record for record in records if _versions(record) == newest[record.task]]
        if len(current) == len(records):
            return current
        self.outdated = [record for record in records if _versions(record) != newest[record.task]]
        keys = set(map(_drop_versions, current))
        self._num_replaced = sum(_drop_versions(record) in keys for record in self.outdated)
        if not current:
            raise DataError(
                f"all {len(records)} records in {self.root / 'records'} are outdated "
                f"({self._describe_outdated_versions()})",
                hint=self._recompute_command(),
            )
        return current

    def _describe_outdated_versions(self) -> str:
        reasons = {}
        for record in self.outdated:
            names = ("metric version", "pipeline version")
            versions_of_both = zip(names, _versions(record), self._newest[record.task], strict=True)
            reasons[record.task] = ", ".join(
                f"{name} {old}, now {new}" for name, old, new in versions_of_both if old != new
            )
        return "; ".join(f"{task}: {reason}" for task, reason in sorted(reasons.items()))

    def _recompute_command(self) -> list[str]:
        tasks = ",".join(sorted({record.task for record in self.outdated}))
        probe = ["ssl-bench", "probe", "--task", escape_braces(tasks)]
        return [*probe, "--checkpoint", "{checkpoint}", "--out", escape_braces(str(self.root))]

    def describe_left_out(self) -> list[str]:
        """Return messages about records (stored results) that the last call of `records` left out.

        There is at most one message about unreadable records and one about outdated records.
        """
        lines = []
        if self.unreadable:
            lines.append(
                f"{len(self.unreadable)} of {self.num_records} records cannot be shown: "
                f"{summarise_problems(self.unreadable)}. Run the probes again to replace them"
            )
        if count := len(self.outdated):
            records = f"{count} outdated record{'s' * (count > 1)}"
            # The command is only shown if it is needed, because it makes the line long.
            remedy = (
                "Newer records replace them"
                if self._num_replaced == count
                else f"Run `{format_command(self._recompute_command())}` to replace them"
            )
            lines.append(f"left out {records} ({self._describe_outdated_versions()}). {remedy}")
        return lines

    def pack(self) -> int:
        """Move all valid records, per-image values and image ids into one file, `records.parquet`.

        A record is the stored result of one evaluation. The separate files are deleted. If another
        process changes a file during this call, this file is kept.

        Returns:
            The number of records in the Parquet file.

        Raises:
            DataError: The records are too large for one file.
        """
        from ssl_bench.results.packed import MAX_PACKED_BYTES, PackedRecord, write_rows

        folder = os.open(self.root, os.O_RDONLY)
        try:
            # Only one process can pack at a time. Rows of earlier calls are kept.
            wait_for_lock(folder)
            rows = {**self._unreadable_rows(), **self._packed()}
            moved = list[tuple[Path, os.stat_result]]()
            reader = RecordReader()
            for path in sorted((*self.root.glob(IMAGE_IDS_GLOB), *self.root.glob(RECORDS_GLOB))):
                npz = path.with_suffix(".npz")
                files = (path, npz) if self._is_record(path) else (path,)
                try:
                    states = [(file, file.lstat()) for file in files if file.exists()]
                    content = read_untrusted(self.root, path, MAX_FILE_BYTES)
                    has_npz = len(states) > 1
                    images = read_untrusted(self.root, npz, _MAX_NPZ_BYTES) if has_npz else None
                    if self._is_record(path):
                        reader.parse(content, path)
                    else:
                        _parse_image_ids(content)
                # Invalid files are not moved, and `records` reports them.
                except (OSError, *_READING_ERRORS):
                    continue
                rows[path] = PackedRecord(content, images)
                moved += states
            size = sum(len(row.content) + len(row.images or b"") for row in rows.values())
            if size > MAX_PACKED_BYTES:
                raise DataError(
                    f"the records in {self.root} have {size:,} bytes, but at most "
                    f"{MAX_PACKED_BYTES:,} can be packed. Leave them as separate files"
                )
            write_atomically(
                self.root / PACKED_FILE, lambda file: write_rows(file, self.root, rows)
            )
            for path, state in moved:
                with suppress(FileNotFoundError):
                    now = path.lstat()
                    if (now.st_mtime_ns, now.st_ino) == (state.st_mtime_ns, state.st_ino):
                        path.unlink()
        finally:
            os.close(folder)
        return sum(map(self._is_record, rows))

    def _is_record(self, path: Path) -> bool:
        return path.parent != self.root / "images"

    def _read_content(self, path: Path, checked_folders: set[Path] | None = None) -> bytes:
        """Return the content of a JSON file in this folder.

        If the file does not exist, its content is taken from `records.parquet`. `checked_folders`
        is a cache of folders that were already checked for symbolic links.

        Raises:
            OSError: The file cannot be read.
        """
        row = self._packed().get(path)
        if row is None or path.exists():
            return read_untrusted(self.root, path, MAX_FILE_BYTES, checked_folders=checked_folders)
        return row.content

    def _packed(self) -> "Mapping[Path, PackedRecord]":
        """Return the valid rows of `records.parquet`, by the path of the JSON file they replace."""
        return self._load_rows()[0]

    def _unreadable_rows(self) -> "Mapping[Path, PackedRecord]":
        """Return the rows of `records.parquet` that do not match their digests.

        The keys are the paths of the JSON files that the rows replace.
        """
        return self._load_rows()[1]

    def _load_rows(self) -> "tuple[Mapping[Path, PackedRecord], Mapping[Path, PackedRecord]]":
        """Return the valid and the damaged rows of `records.parquet`, in two dictionaries.

        The keys are the paths of the JSON files that the rows replace. The result is cached until
        `records.parquet` changes.
        """
        path = self.root / PACKED_FILE
        try:
            status = path.stat()
        except FileNotFoundError:
            return {}, {}
        state = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self._packed_rows is None or self._packed_rows[0] != state:
            from ssl_bench.results.packed import read_rows

            self._packed_rows = state, *read_rows(self.root, path)
        return self._packed_rows[1:]

    def _read(self, path: Path, reader: RecordReader | None = None) -> Record | None:
        """Read the record (stored result) at a path.

        If the record is invalid, return None and add its path to `unreadable`.
        """
        reader = reader or RecordReader()
        try:
            return reader.parse(self._read_content(path, reader.checked_folders), path)
        except OSError as error:
            self.unreadable[path] = error.strerror or str(error)
        except _READING_ERRORS as error:
            self.unreadable[path] = describe_reading_error(error)
        return None


def summarise_problems(reasons: Mapping[Path, str]) -> str:
    """Return a text that lists up to five files with their problems, and the number of other files.

    Args:
        reasons: Text that describes the problem of each file, by path.
    """
    listed = [f"{path}: {reason}" for path, reason in reasons.items()]
    more = [f"and {len(listed) - _MAX_LISTED} more"] if len(listed) > _MAX_LISTED else []
    return "; ".join([*listed[:_MAX_LISTED], *more])


def to_pandas(records: Sequence[Record] | Path | str) -> "pandas.DataFrame":
    """Return a data frame with one row for each record and one column for each of its fields.

    A record is the stored result of one evaluation. The field `ci95` becomes the columns `low_95`
    and `high_95`, in the unit of `value`. `mean` and `std` become one column for each RGB channel.
    Mappings, such as `settings`, become JSON text. Each column therefore has a single type and can
    be written to Parquet. The column `encoder_id` is added.

    Args:
        records: A list of records, or the path of a folder of results, such as "results".

    Raises:
        DataError: The folder contains no valid record.
    """
    # Imported here because importing pandas is slow.
    import pandas

    if isinstance(records, Path | str):
        store = ResultStore(Path(records))
        records = store.records()
        for line in store.describe_left_out():
            print_message(line)
    rows = []
    for record in records:
        row: dict[str, Any] = {}
        for item in fields(Record):
            name, value = item.name, getattr(record, item.name)
            if name == "ci95":
                row["low_95"], row["high_95"] = value or (None, None)
            elif name in ("mean", "std"):
                row |= {f"{name}_{channel}": v for channel, v in zip("rgb", value, strict=True)}
            elif isinstance(value, Mapping):
                plain = to_plain_json(value, infinity=INFINITY_AS_JSON)
                row[name] = json.dumps(plain, sort_keys=True, default=list)
            else:
                row[name] = value
        rows.append(row | {"encoder_id": record.encoder_id})
    return pandas.DataFrame(rows)


def _versions(record: Record) -> tuple[int, int]:
    return record.metric_version, record.pipeline_version


def _drop_versions(record: Record) -> ResultKey:
    return replace(record.key(), metric_version=1, pipeline_version=1)


def _newest_versions(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """Return the newest versions of each task's code, as (`metric_version`, `pipeline_version`).

    Each number is the largest one in the records (stored results) and in the installed code.
    """
    newest: dict[str, tuple[int, int]] = {}
    for record in records:
        metric, pipeline = newest.get(record.task, (0, 0))
        newest[record.task] = (
            max(metric, record.metric_version),
            max(pipeline, record.pipeline_version),
        )
    for task in newest.keys() & {*choices("probe")}:
        metric, pipeline = newest[task]
        installed = versions.metric_version(task)
        newest[task] = max(metric, installed), max(pipeline, versions.PIPELINE_VERSION)
    return newest


def _parse_image_ids(content: bytes) -> tuple[str, ...]:
    ids = json.loads(content)
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise ValueError("expected a list of ids")
    return tuple(ids)


def _training_run_error(folder: Path) -> DataError | None:
    """Return the error for a folder that is a pretraining run, or None for any other folder.

    The message contains the loss in the last row of the training log. The message also contains
    values that only the last row has, such as a validation accuracy.
    """
    log = folder / "log.jsonl"
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
        config = yaml.load(text, yaml.CSafeLoader)
        objective = str(config["objective"]["_target_"]).rpartition(".")[2]
        reads_images = "patch_size" in config["model"]
        lines = log.read_text(encoding="utf-8").splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        names = ["loss", *(name for name in last if name not in first and name != "loss")]
        measured = [f"{name} {last[name]:.4g}" for name in names if last.get(name) is not None]
        progress = ", ".join([f"step {int(last['step'])}", *measured])
    # Files with these names may have any content, because other programs may have written them.
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, yaml.YAMLError):
        return None
    message = (
        f"{folder} is a training run ({objective}, {progress}) without records. Its training log "
        f"is {log}"
    )
    if not reads_images:
        return DataError(f"{message}. Probes do not support its model")
    command = ("ssl-bench", "probe", "--task", "all", "--checkpoint", escape_braces(str(folder)))
    return DataError(message, hint=(*command, "--out", "{folder}"))
