"""Compute the fingerprint of an image set, which is a SHA-256 of its images and annotations.

Each file is read once, and its SHA-256 is stored in the user's cache folder, in 64 bytes per file.
A stored SHA-256 is valid as long as the size, times and inode of the file stay the same. The
SHA-256 of a file that was written less than two seconds ago is not stored, because the times might
not show the next change.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt64

from ssl_bench.data.samples import Dataset, DatasetView, ImageSet, Sample
from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.files import cache_folder, open_trusted, write_atomically
from ssl_bench.system.output import print_message_once, show_progress

Item = TypeVar("Item")
Result = TypeVar("Result")

FingerprintKind = Literal["content", "stat"]
"""How files are identified: by their content, or only by their sizes and modification times."""

# Prefix of fingerprints of the kind "stat". It is valid in file names on all systems.
_STAT = "stat-"
_THREADS = 8
_CHUNKS_AHEAD = 1024
_MAX_CHUNK = 32
_SAVE_SECONDS = 60.0
_PATIENCE_SECONDS = 10.0
# Increase the number in this header if the meaning of cached keys or states changes.
_HEADER = b"ssl-bench sha256 of files 1\n"
# A cache entry consists of a hash of its name, a hash of the state of its files, and a digest.
_KEY_BYTES, _STATE_BYTES, _DIGEST_BYTES = 16, 16, 32
_ENTRY_BYTES = _KEY_BYTES + _STATE_BYTES + _DIGEST_BYTES
# Resolution of file times on the file system FAT, in nanoseconds. If a file was written more
# recently than this, it may change again without a change of its times.
RACY_NS = 2 * 10**9


def compute_fingerprint(rows: Iterable[Sequence[object]], kind: FingerprintKind = "content") -> str:
    """Return the fingerprint of an image set: the SHA-256 of all rows.

    Args:
        rows: Lists of JSON values about the images, such as [image id, SHA-256 of the file].
        kind: "content" if the rows contain hashes of files, or "stat" for sizes and modification
            times. With "stat", the fingerprint begins with "stat-".
    """
    digest = hashlib.sha256()
    for row in rows:
        # Rows are hashed as JSON, because a name may contain any separator.
        digest.update(json.dumps(row).encode() + b"\n")
    return (_STAT if kind == "stat" else "") + digest.hexdigest()


def extend_fingerprint(fingerprint: str, *rows: Sequence[object]) -> str:
    """Return the fingerprint of an image set that is derived from another image set.

    Args:
        fingerprint: Fingerprint (hash) of the other image set. A prefix "stat-" is kept.
        rows: Lists of JSON values that describe the difference between the sets, such as
            ["bits", 12].
    """
    return compute_fingerprint([[fingerprint], *rows], fingerprint_kind(fingerprint))


def fingerprint_kind(fingerprint: str) -> FingerprintKind:
    return "stat" if fingerprint.startswith(_STAT) else "content"


def abbreviate_fingerprint(fingerprint: str) -> str:
    """Return the first six digits of a fingerprint (hash of images), after any prefix "stat-"."""
    prefix = _STAT if fingerprint_kind(fingerprint) == "stat" else ""
    return fingerprint[: len(prefix) + 6]


@dataclass(frozen=True)
class ReadOptions:
    """Values of the config keys `data.fingerprint` and `data.bits`.

    Attributes:
        fingerprint: How files are identified: by their "content", or by "stat", which is their size
            and modification time.
        bits: Number of bits that 16-bit images use, such as 12 for values up to 4095. None if it is
            unknown. If the header of an image states the number, the header is used instead.
    """

    fingerprint: FingerprintKind = "content"
    bits: int | None = None

    def compute_fingerprint(self, rows: Iterable[Sequence[object]]) -> str:
        """Return the fingerprint of an image set: a hash of all rows.

        The fingerprint also depends on the option `bits`, because it changes the pixels of 16-bit
        images.

        Args:
            rows: Lists of JSON values about the images, such as [image id, SHA-256 of the file].
        """
        fingerprint = compute_fingerprint(rows, self.fingerprint)
        # With `bits=16`, images that are readable without this option have the same pixels.
        if self.bits in (None, 16):
            return fingerprint
        return extend_fingerprint(fingerprint, ["bits", self.bits])

    def hash_rows(
        self, first: Sequence[object], rows: Iterable[tuple[str, ...]]
    ) -> "ImageSetHashes":
        """Compute the fingerprint (hash) of an image set and a hash of each of its images.

        Args:
            first: JSON values that describe the whole set, such as the class of each number in
                masks.
            rows: One row for each image, with the image id and texts that identify the files of the
                image, its mask and its boxes, such as their SHA-256.
        """
        files: list[int] = []
        samples: list[int] = []
        bits = None if self.bits == 16 else self.bits

        def collect_hashes() -> Iterator[Sequence[object]]:
            yield first
            for row in rows:
                files.append(_to_number(row[1]))
                samples.append(_to_number(repr((first, row[1:], bits))))
                yield row

        fingerprint = self.compute_fingerprint(collect_hashes())
        return ImageSetHashes(fingerprint, np.array(files, np.uint64), np.array(samples, np.uint64))


class ImageSetHashes(NamedTuple):
    """Hashes that identify an image set and each of its images.

    Attributes:
        fingerprint: Hash of the whole set, in hexadecimal digits.
        files: Hash of the file of each image.
        samples: Hash of the file, mask and boxes of each image.
    """

    fingerprint: str
    files: UInt64[np.ndarray, " images"]
    samples: UInt64[np.ndarray, " images"]


class IdentifiedImages:
    """Base class of image sets whose images are files, or members of tar files.

    Attributes:
        folder: Folder that contains all files, directly or in subfolders.
        options: Options for reading and identifying the files.
    """

    folder: Path
    options: ReadOptions

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError

    def path(self, index: int) -> Path:
        """Return the path of the image at the given index.

        If the image is in a tar file, the path of the tar file is followed by the image's path in
        it.
        """
        raise NotImplementedError

    def files(self, index: int) -> tuple[Path, ...]:
        """Return the paths of an image's file and of the files of its mask and boxes."""
        raise NotImplementedError

    def content_sha256(self, index: int) -> str:
        """Return the SHA-256 of the content of an image's file, even with data.fingerprint=stat."""
        raise NotImplementedError

    @cached_property
    def _hashes(self) -> ImageSetHashes:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies the images and annotations of this image set.

        The SHA-256 depends on the order of the ids and the content of the files. Other inputs are
        `data.bits`, the use of EXIF orientations, and the mapping from numbers in masks to classes.
        With data.fingerprint=stat, the size and modification time of a file replace its content.
        The name and the folder of the set have no effect.

        Raises:
            DataError: A file cannot be read, or has changed since the set was opened.
        """
        return self._hashes.fingerprint

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Return the hash of each image's file."""
        return self._hashes.files

    def sample_hashes(self) -> list[str]:
        """Return a hash of each image with its mask and boxes, in hexadecimal digits."""
        return [f"{number:016x}" for number in self._hashes.samples.tolist()]


def with_read_options(images: ImageSet, options: ReadOptions) -> ImageSet:
    """Return a copy of an image set that reads its files with the given options.

    An image set that does not support these options is returned unchanged.
    """
    method = getattr(images, "with_read_options", None)
    return method(options) if method else images


def dataset_with_read_options(dataset: Dataset, options: ReadOptions) -> DatasetView:
    """Return a dataset whose image sets read their files with the given options."""
    return DatasetView(dataset, lambda _, images: with_read_options(images, options))


def file_hashes(images: ImageSet) -> UInt64[np.ndarray, " images"]:
    """Return the hash of each image's file.

    If the image set has no hashes of its files, all images get the same hash, which depends on the
    whole set.
    """
    method = getattr(images, "file_hashes", None)
    return method() if method else np.full(len(images), _to_number(images.fingerprint()), np.uint64)


def sample_hashes(images: ImageSet) -> list[str]:
    """Return a text for each image that changes if the image, its mask or its boxes change.

    The text is a hash of the content if the image set can compute such a hash. Otherwise, or with
    data.fingerprint=stat, the text contains the hash of the whole set and the image id.
    """
    fingerprint = images.fingerprint()
    method = getattr(images, "sample_hashes", None)
    if method and fingerprint_kind(fingerprint) == "content":
        return method()
    return [f"{fingerprint} {image_id}" for image_id in images.ids]


def _to_number(identity: str) -> int:
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8])


class FilePart(NamedTuple):
    """A file, or a part of it that is hashed separately, such as an image in a tar file.

    Attributes:
        file: Path of the file.
        name: Name of the part, or "" for the whole file.
        read: Function that returns the bytes of the part, or None for the whole file.
    """

    file: Path
    name: str = ""
    read: Callable[[], bytes] | None = None


def identify_parts(
    parts: Iterable[FilePart], kind: FingerprintKind, *, title: str, folder: Path, total: int
) -> Generator[str, None, None]:
    """Yield the SHA-256 of each file or part of a file, and cache it on disk.

    If `kind` is "stat", the size and modification time of the file are yielded instead. If the
    generator is closed or interrupted, the hashes computed so far are still cached.

    Args:
        parts: The files, or parts of files.
        kind: Whether files are identified by their "content", or by "stat", which is their size and
            modification time.
        title: Name of the image set, for messages.
        folder: Folder or file of the image set. Its hashes are stored in one cache file.
        total: Number of parts, for the progress bar.

    Raises:
        DataError: A file cannot be read, or changes while it is read.
    """
    # Small sets have small chunks, so that no thread gets all of the large files.
    chunk_size = min(_MAX_CHUNK, 1 + total // 256)
    if kind == "stat":
        states = map_in_threads(lambda part: file_state(part.file), parts, chunk_size=chunk_size)
        yield from (f"{size} {mtime_ns}" for _, (size, mtime_ns, *_) in states)
        return
    cache, start = DigestCache(folder), time.monotonic()
    last_save = start

    def digest(part: FilePart) -> bytes:
        name = f"{part.file.absolute()}\0{part.name}"
        return cache.get_or_compute(name, [part.file], partial(_read, part))

    try:
        # The threads end before the cache is saved, so the cache contains all digests.
        with closing(map_in_threads(digest, parts, chunk_size=chunk_size)) as digests:
            for _, part_digest in show_progress(digests, f"sha256 of {title}", total):
                now = time.monotonic()
                if now - start > _PATIENCE_SECONDS:
                    print_message_once(
                        f"reading {total:,} files of {title} to compute their SHA-256, which is "
                        "stored for the next run. With data.fingerprint=stat, only the sizes and "
                        "modification times of the files are used"
                    )
                # Save regularly, because the process may be killed.
                if now - last_save > _SAVE_SECONDS:
                    cache.save()
                    last_save = now
                yield part_digest.hex()
    finally:
        cache.save()


def cached_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, and cache it until the file changes.

    Raises:
        DataError: The file cannot be read, or changes while it is read.
    """
    return next(identify_parts([FilePart(path)], "content", title=path.name, folder=path, total=1))


def _read(part: FilePart) -> bytes:
    if part.read is not None:
        return hashlib.sha256(part.read()).digest()
    try:
        with part.file.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _file_error(part.file, error) from error


def file_state(path: Path) -> tuple[int, int, int, int]:
    """Return four numbers that show whether the content of a file has changed.

    If the content changes, at least one of the numbers changes, unless the file is written twice
    within two seconds. The device number is not used, because a network folder may have a different
    one on each machine.

    Returns:
        Size in bytes, modification time (mtime) in nanoseconds, change time (ctime) in nanoseconds,
        and inode. The ctime is needed because programs can set the mtime, but not the ctime.

    Raises:
        DataError: The path is missing, a broken link, or not a regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _file_error(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file. Move it out of the folder")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _file_error(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror})")


class DigestCache:
    """Cache on disk for digests (hashes) of files.

    A digest becomes invalid if the size, times or inode of one of the hashed files change. A
    damaged cache file is ignored. Threads may share an instance. If several processes write the
    same cache file, some digests may be lost and are computed again later.

    Args:
        subject: Folder or file to which the digests belong. Each subject has its own cache file.
    """

    def __init__(self, subject: Path) -> None:
        self._path: Path | None = None
        try:
            name = _hash_text(str(subject.absolute()), _KEY_BYTES).hex()
            self._path = cache_folder(None) / "digests" / name
        except MachineError as error:
            _report_unsaved(str(error))
        self._entries = {} if self._path is None else _load_entries(self._path)
        self._new: dict[bytes, bytes] = {}
        self._lock = Lock()

    def get_or_compute(
        self, name: str, files: Sequence[Path], compute: Callable[[], bytes]
    ) -> bytes:
        """Return a digest (hash) from the cache. If no valid digest is stored, compute it.

        Args:
            name: Name under which the digest is cached.
            files: Files on which the digest depends. A change of any file makes the digest invalid.
            compute: Function that computes the digest.

        Raises:
            DataError: A file is not a regular file, or changes during `compute`.
        """
        start, before = time.time_ns(), [file_state(path) for path in files]
        key, state = (
            _hash_text(name, _KEY_BYTES),
            _hash_text(" ".join(map(str, before)), _STATE_BYTES),
        )
        entry = self._entries.get(key, b"")
        if entry[:_STATE_BYTES] == state:
            return entry[_STATE_BYTES:]
        digest = compute()
        after = [file_state(path) for path in files]
        for path, old, new in zip(files, before, after, strict=True):
            if old[:2] != new[:2]:
                raise DataError(f"{path} has changed while it was read. Wait until it is complete")
        # Only store the digest if any later change of a file is certain to change its state.
        last_change_ns = max(time_ns for _, *times, _ in before for time_ns in times)
        if after == before and last_change_ns < start - RACY_NS:
            with self._lock:
                self._new[key] = state + digest
        return digest

    def save(self) -> None:
        """Add the new digests to the cache file, or print a message once if this is impossible."""
        with self._lock:
            new, self._new = self._new, {}
        if not new or self._path is None:
            return
        # Load the file again, because other processes may have written it.
        body = b"".join(k + v for k, v in (_load_entries(self._path) | new).items())
        try:
            write_cache_file(self._path, _HEADER, body)
        except MachineError as error:
            _report_unsaved(f"{self._path.parent} cannot be written ({error.__cause__})")


def _load_entries(path: Path) -> dict[bytes, bytes]:
    body = read_cache_file(path, _HEADER) or b""
    starts = range(0, len(body), _ENTRY_BYTES)
    return {body[i : i + _KEY_BYTES]: body[i + _KEY_BYTES : i + _ENTRY_BYTES] for i in starts}


def read_cache_file(path: Path, header: bytes) -> bytes | None:
    """Return the content of a cache file, without its header and checksum.

    Return None if the file is missing, has another header, or does not match its checksum.
    """
    with suppress(OSError), open_trusted(path) as file:
        content = file.read()
        body = content[len(header) + _DIGEST_BYTES :]
        if content.startswith(header + hashlib.sha256(body).digest()):
            return body
    return None


def write_cache_file(path: Path, header: bytes, body: bytes) -> None:
    """Write a header, a checksum of the body, and the body to a cache file.

    An existing file is replaced atomically, so other processes never read a partial file.
    """
    content = header + hashlib.sha256(body).digest() + body
    write_atomically(path, lambda file: file.write(content))


def _hash_text(text: str, size: int) -> bytes:
    return hashlib.sha256(os.fsencode(text)).digest()[:size]


def _report_unsaved(reason: str) -> None:
    print_message_once(
        f"cannot store the SHA-256 of files for the next run: {reason}. Set XDG_CACHE_HOME to "
        "another folder"
    )


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], *, chunk_size: int = 1
) -> Generator[tuple[Item, Result], None, None]:
    """Call a function for each item in parallel threads.

    Yield pairs of an item and its result, in the order of the items. If the generator is closed, it
    waits for running calls and starts no new ones.

    Args:
        function: The function. Several threads call it at the same time.
        items: The items. They are taken from the iterable shortly before they are needed.
        chunk_size: Number of items that a thread takes at once. A larger number is faster if the
            calls are short.
    """
    stop = Event()

    def apply_to_chunk(chunk: list[Item]) -> list[tuple[Item, Result]]:
        return [(item, function(item)) for item in chunk if not stop.is_set()]

    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, chunk_size)), [])
    pool = ThreadPoolExecutor(_THREADS)
    try:
        # Without groups, the pool would queue all chunks of a large set at once.
        while group := list(islice(chunks, _CHUNKS_AHEAD)):
            for pairs in pool.map(apply_to_chunk, group):
                yield from pairs
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
