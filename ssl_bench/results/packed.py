"""Read and write `records.parquet`, a single file that contains many records."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow
import pyarrow.parquet

from ssl_bench.errors import DataError
from ssl_bench.system.files import read_untrusted
from ssl_bench.system.process import reraise_out_of_memory

MAX_PACKED_BYTES = 2**30
_COLUMNS = ("file", "record", "images")
# Name of the column of row digests, and metadata key of the number of rows. Parquet files of older
# versions lack both.
_ROW_DIGEST, _NUM_ROWS = "sha256", b"ssl_bench_rows"


class PackedRecord(NamedTuple):
    """One row of `records.parquet`, which replaces the JSON file and `.npz` file of one record.

    A record is the stored result of one evaluation.

    Attributes:
        content: Content of the JSON file, which contains the record.
        images: Content of the `.npz` file, which contains per-image values, or None if the record
            has no such file.
        digest: SHA-256 of the JSON file's path, `content` and `images`, or None if an older version
            wrote the row.
    """

    content: bytes
    images: bytes | None
    digest: bytes | None = None


def read_rows(root: Path, path: Path) -> tuple[dict[Path, PackedRecord], dict[Path, PackedRecord]]:
    """Read the rows of a Parquet file of records, which are stored results.

    Args:
        root: Folder of results.
        path: Path of the Parquet file.

    Returns:
        A dictionary of the valid rows, and a dictionary of the damaged rows, which do not match
        their digests. The keys are the paths of the JSON files that the rows replace.

    Raises:
        DataError: The Parquet file cannot be read, or its number of rows differs from the number
            in its metadata.
    """
    try:
        content = pyarrow.BufferReader(read_untrusted(root, path, MAX_PACKED_BYTES))
        # `read_table` is not used, because it imports pandas.
        table = pyarrow.parquet.ParquetFile(content).read()
        columns = [table.column(name).to_pylist() for name in _COLUMNS]
        number, has_digests = str(table.num_rows).encode(), _ROW_DIGEST in table.column_names
        digests = table.column(_ROW_DIGEST).to_pylist() if has_digests else [None] * table.num_rows
        if (table.schema.metadata or {}).get(_NUM_ROWS, number) != number:
            raise ValueError(
                f"found {table.num_rows} rows, but the metadata states another number of rows"
            )
        valid, damaged = {}, {}
        for file, record, images, digest in zip(*columns, digests, strict=True):
            row = PackedRecord(record, images, digest)
            is_valid = not has_digests or digest == _row_digest(file, row)
            (valid if is_valid else damaged)[root.joinpath(*os.fsdecode(file).split("/"))] = row
    # The decoder may raise any class of exception. A damaged file can state a huge size, so
    # `ArrowMemoryError` does not prove that the machine is out of memory.
    except Exception as error:
        if not isinstance(error, pyarrow.ArrowMemoryError):
            reraise_out_of_memory(error)
        raise DataError(f"cannot read {path} ({error}). Restore a copy or remove it") from error
    return valid, damaged


def write_rows(file: BinaryIO, root: Path, rows: Mapping[Path, PackedRecord]) -> None:
    """Write a Parquet file of records, which are stored results.

    Args:
        file: The Parquet file, open for writing.
        root: Folder of results.
        rows: The rows, by the paths below `root` of the JSON files that they replace.
    """
    names = [os.fsencode(path.relative_to(root).as_posix()) for path in rows]
    digests = [
        # A damaged row keeps its stored digest, so that it is still recognised as damaged.
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
    pyarrow.parquet.write_table(table, file, compression="zstd")


def _row_digest(file: bytes, row: PackedRecord) -> bytes:
    parts = (file, row.content, b"" if row.images is None else b"." + row.images)
    # The parts are hashed separately, so that moving a byte to the next part changes the digest.
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
