"""Images in tar files, as WebDataset writes them, read in place and in any order.

A sample is all members of a tar file that share a key. The key is the path up to the first dot of
the file name: `cat/07.jpg` and `cat/07.cls` are the image and the class number of `cat/07`. An
index lists the offset of every image, so nothing is unpacked, and a sampler can draw any image.

Source of the format: https://github.com/webdataset/webdataset
"""

import hashlib
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from ssl_bench.data.files.fingerprints import (
    Part,
    ReadOptions,
    file_state,
    identify_parts,
    map_in_threads,
)
from ssl_bench.data.files.images import decode_upright
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError, DataError, MachineError
from ssl_bench.system.files import (
    cache_folder,
    expand_path,
    list_files,
    open_regular,
    open_trusted,
    write_atomically,
)
from ssl_bench.system.output import say_once, show_progress

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Suffixes of tar files. Compressed files are recognised only to be refused."""
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"(\xb5/\xfd": "unzstd",
}
NO_LABEL, INVALID_LABEL = -1, -2
_IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
# WebDataset skips members whose file name starts with a dot or has no dot.
_MEMBER = re.compile(r"(?:\./)*((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_LABEL = re.compile(rb"\s*(\d{1,9})\s*")
_MAX_LABEL_BYTES = 64
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_MAX_SHARDS = 1_000_000
# Zeros that a tar file ends with: two blocks, and padding to the size of a record.
_BLOCK, _MAX_PADDING = 512, 2**20
# Increase the number when the format of cached indices changes.
_CACHE_HEADER = b"ssl-bench index of a tar file 1\n"
# The coarsest file system counts time in steps of two seconds.
_RECENT_NS = 2 * 10**9


def find_shards(pattern: str | Path) -> list[Path]:
    """Return the tar files that a path names, in the order of their paths.

    Args:
        pattern: A tar file, a folder that contains tar files, or a pattern. In a pattern,
            `{000..099}` stands for numbers, `{a,b}` for alternatives, and `*`, `?` and `[0-9]` for
            characters.

    Raises:
        DataError: A tar file is missing, or there is none.
    """
    path = expand_path(pattern)
    if path.is_dir():
        shards = [path / name for name in list_files(path) if name.lower().endswith(SHARD_SUFFIXES)]
        if not shards:
            raise DataError(f"{path} has no tar file")
        return sorted(shards)
    shards, missing = set[Path](), list[str]()
    names = list(_expand_braces(str(path)))
    for name in map(Path, names):
        below = Path(name.anchor).glob(str(name.relative_to(name.anchor)))
        matches = [name] if name.is_file() else [match for match in below if match.is_file()]
        shards.update(matches)
        if not matches:
            missing.append(str(name))
    if missing:
        raise DataError(
            f"{len(missing)} of {len(names)} tar files are missing, the first is {missing[0]}"
            if len(names) > 1
            else f"no tar file matches {pattern}"
        )
    return sorted(shards)


def has_braces(text: str) -> bool:
    """Return whether a path is a pattern with braces."""
    return _BRACES.search(text) is not None


def _expand_braces(text: str) -> Iterator[str]:
    """Yield the texts that a shell makes of `{000..099}` and `{a,b}`, without nested braces."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    options = match[1].split(",") if "," in match[1] else [match[0]]
    if numbers := _RANGE.fullmatch(match[1]):
        first, last = sorted(map(int, numbers.groups()))
        if last - first >= _MAX_SHARDS:
            raise ConfigurationError(f"{match[0]} stands for more than {_MAX_SHARDS:,} tar files")
        is_padded = any(number[0] == "0" and len(number) > 1 for number in numbers.groups())
        width = max(map(len, numbers.groups())) if is_padded else 1
        options = [f"{number:0{width}}" for number in range(first, last + 1)]
    for option in options:
        for rest in _expand_braces(text[match.end() :]):
            yield text[: match.start()] + option + rest


class Member(NamedTuple):
    """An image in a tar file.

    Attributes:
        name: Path in the tar file.
        offset: Position of its first byte in the tar file.
        size: Number of bytes.
        label: Class number, `NO_LABEL` without a `.cls` member, or `INVALID_LABEL`.
    """

    name: str
    offset: int
    size: int
    label: int


def index_shard(shard: Path) -> tuple[list[Member], tuple[int, int]]:
    """Return the images of a tar file by name, and the size and modification time of the file.

    The index is cached until the tar file changes.

    Raises:
        DataError: The file is no uncompressed tar file, is damaged or changes while it is read, or
            a sample has no image.
    """
    begin_ns, state = time.time_ns(), file_state(shard)
    key = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:32]
    cache = None
    try:
        cache = cache_folder(None) / "tars" / key
        if (stored := _load_index(cache)) and tuple(stored["state"]) == state:
            return [Member(*member) for member in stored["members"]], state[:2]
        members = _scan(shard)
        if file_state(shard) != state:
            raise DataError(f"{shard} changes while it is read; wait until it is complete")
        # A file that was written just now could change again without another time.
        if max(state[1:3]) < begin_ns - _RECENT_NS:
            body = json.dumps({"state": state, "members": members}).encode()
            content = _CACHE_HEADER + hashlib.sha256(body).digest() + body
            write_atomically(cache, lambda file: file.write(content))
    except MachineError as error:
        say_once(f"the index of tar files is not cached: {error}; XDG_CACHE_HOME=DIR moves it")
        members = _scan(shard)
    return members, state[:2]


def _load_index(cache: Path) -> dict[str, Any] | None:
    """Return a cached index, or None if it is missing or damaged."""
    start = len(_CACHE_HEADER) + hashlib.sha256().digest_size
    with suppress(OSError), open_trusted(cache) as file:
        content = file.read()
        body = content[start:]
        if content[:start] == _CACHE_HEADER + hashlib.sha256(body).digest():
            return json.loads(body)
    return None


def _scan(shard: Path) -> list[Member]:
    """Read the headers of a tar file."""
    try:
        with open_regular(shard) as file:
            return _images_in(file, shard)
    except DataError:
        raise
    # Damaged headers raise TarError, OSError, ValueError, OverflowError and others.
    except Exception as error:
        raise DataError(f"{shard} is not a tar file or is damaged ({error})") from error


def _images_in(file: BufferedReader, shard: Path) -> list[Member]:
    start = file.peek(8)
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{shard} is compressed, so its images cannot be read one by one; "
                f"decompress it: {command} {shard}"
            )
    images, labels, keys = dict[str, Member](), dict[str, int](), dict[str, str]()
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            match = _MEMBER.fullmatch(member.name)
            if match is None or member.isdir():
                continue
            key, extension = match[1], match[2].lower()
            keys.setdefault(key, member.name)
            if extension not in (*_IMAGE_EXTENSIONS, "cls"):
                continue
            if not member.isreg() or member.issparse() or member.size < 0:
                raise DataError(
                    f"{shard}/{member.name} is a link or sparse; write the tar file with "
                    "`tar --dereference --hard-dereference`"
                )
            if key in (labels if extension == "cls" else images):
                raise DataError(f"{shard} has two {extension} members of the sample {key}")
            if extension == "cls":
                file.seek(member.offset_data)
                label = _LABEL.fullmatch(file.read(min(member.size, _MAX_LABEL_BYTES)))
                labels[key] = int(label[1]) if label else INVALID_LABEL
            else:
                name = f"{key}.{match[2]}"
                images[key] = Member(name, member.offset_data, member.size, NO_LABEL)
        # tarfile also stops at a damaged header.
        file.seek(tar.offset)
    end = file.read(_MAX_PADDING)
    if len(end) < _BLOCK or any(end):
        raise DataError(f"{shard} is damaged or incomplete after byte {tar.offset:,}")
    if without := sorted(keys.keys() - images.keys()):
        raise DataError(
            f"{shard} has {len(without)} samples without an image, such as {keys[without[0]]}; "
            f"expected {without[0]}.jpg, .jpeg, .png or .webp"
        )
    members = (image._replace(label=labels.get(key, NO_LABEL)) for key, image in images.items())
    return sorted(members, key=lambda image: image.name)


@dataclass(frozen=True, eq=False)
class TarImages:
    """An `ImageSet` over the images in tar files, which are turned upright as EXIF says.

    The id of an image is the path of its tar file, relative to `folder`, and its name in there.

    Attributes:
        folder: Folder above all tar files.
        shards: The tar files.
        states: Size in bytes and modification time in nanoseconds of each tar file.
        places: For each image the number of its tar file, its offset and size in bytes, and its
            class number, or a negative number without one.
        options: How files are identified and read.
    """

    name: str
    split: str
    folder: Path
    ids: tuple[str, ...]
    shards: tuple[Path, ...]
    states: tuple[tuple[int, int], ...]
    places: Int64[np.ndarray, "images 4"]
    class_names: tuple[str, ...] = ()
    options: ReadOptions = field(default_factory=ReadOptions)

    @classmethod
    def open(cls, shards: Sequence[Path], *, name: str, split: str) -> "TarImages":
        """List the images of tar files.

        Raises:
            DataError: As in `index_shard`, or there is no image.
        """
        folder = Path(os.path.commonpath([shard.absolute().parent for shard in shards]))
        ids, states, rows = list[str](), list[tuple[int, int]](), list[tuple[int, ...]]()
        progress = show_progress(shards, f"index of {name} {split}", len(shards))
        with closing(map_in_threads(index_shard, progress)) as indices:
            for number, (shard, (members, state)) in enumerate(indices):
                states.append(state)
                prefix = shard.absolute().relative_to(folder).as_posix()
                ids += [f"{prefix}/{member.name}" for member in members]
                rows += [(number, *member[1:]) for member in members]
        if not ids:
            raise DataError(f"{folder} has no image in its {len(shards)} tar files")
        places = np.array(rows, np.int64)
        return cls(name, split, folder, tuple(ids), tuple(shards), tuple(states), places)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Decode an image.

        Raises:
            UnreadableImage: The image is damaged.
            DataError: The tar file cannot be read or has changed.
        """
        image_id, options = self.ids[index], self.options
        data = self._read(index)
        image = decode_upright(data, self.folder / image_id, options.bits)
        return Sample(image_id, image)

    def with_read_options(self, options: ReadOptions) -> "TarImages":
        """Return the same images with other options."""
        return replace(self, options=options)

    def select(self, name: str, kept: Sequence[int]) -> "TarImages":
        """Return the images with these indices under another name."""
        ids = tuple(self.ids[index] for index in kept)
        return replace(self, name=name, ids=ids, places=self.places[list(kept)])

    def fingerprint(self) -> str:
        """Return a SHA-256 over the ids and the bytes of the images, or over sizes and times.

        Raises:
            DataError: A tar file cannot be read or has changed.
        """
        return self._identity[0]

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Return a number for each image that depends on its bytes."""
        return self._identity[1]

    def sample_hashes(self) -> list[str]:
        """Return the identity of each image, whatever else the set contains."""
        return [f"{entry:016x}" for entry in self._identity[2].tolist()]

    @cached_property
    def _identity(self) -> tuple[str, UInt64[np.ndarray, " images"], UInt64[np.ndarray, " images"]]:
        if self.options.fingerprint == "stat":
            # A tar file is stated once, not once for each of its images.
            digests = (
                f"{' '.join(map(str, self.states[shard]))} {offset} {size}"
                for shard, offset, size, _ in self.places.tolist()
            )
            return self.options.hash_rows([], zip(self.ids, digests, strict=True))
        parts = (
            Part(self.shards[shard], self.ids[index], partial(self._read, index))
            for index, shard in enumerate(self.places[:, 0].tolist())
        )
        title = f"{self.name} {self.split}"
        found = identify_parts(parts, "content", title=title, folder=self.folder, total=len(self))
        with closing(found) as digests:
            return self.options.hash_rows([], zip(self.ids, digests, strict=True))

    def _read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        number, offset, size, _ = self.places[index].tolist()
        shard = self.shards[number]
        try:
            with open_regular(shard) as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != self.states[number]:
                    raise DataError(f"{shard} has changed since it was opened; start again")
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise DataError(f"{shard} cannot be read ({error.strerror})") from error
