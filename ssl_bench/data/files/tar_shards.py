"""Read images from the tar files of a WebDataset in any order, without unpacking them.

All members of a tar file with the same key form a sample (an image with its class). The key is the
path up to the first dot of the file name. For example, `cat/07.jpg` and `cat/07.cls` are the image
and the class number of the sample `cat/07`. An index of each tar file lists the positions of its
images.

Source of the format: https://github.com/webdataset/webdataset
"""

import hashlib
import json
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from ssl_bench.data.files.fingerprints import (
    RACY_NS,
    FilePart,
    IdentifiedImages,
    ImageSetHashes,
    ReadOptions,
    file_state,
    identify_parts,
    map_in_threads,
    read_cache_file,
    write_cache_file,
)
from ssl_bench.data.files.images import IMAGE_SUFFIXES, decode_oriented
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError, DataError, MachineError
from ssl_bench.system.files import (
    cache_folder,
    describe_substitute,
    expand_path,
    list_files,
    open_regular,
)
from ssl_bench.system.output import print_message_once, show_progress

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Suffixes of tar files. Reading a compressed tar file raises an error that explains what to do."""
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"(\xb5/\xfd": "unzstd",
}
NO_LABEL, INVALID_LABEL = -1, -2
# WebDataset skips members whose file name starts with a dot or has no dot.
_MEMBER = re.compile(r"(?:\./)*((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_LABEL = re.compile(rb"\s*(\d{1,9})\s*")
_MAX_LABEL_BYTES = 64
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_MAX_SHARDS = 1_000_000
# A tar file ends with zeros: two blocks, and padding to the size of a record.
_BLOCK, _MAX_PADDING = 512, 2**20
# Increase the number when the format of cached indices changes.
_CACHE_HEADER = b"ssl-bench index of a tar file 2\n"


def find_shards(pattern: str | Path) -> list[Path]:
    """Return the tar files that match a path or pattern, sorted by path.

    Args:
        pattern: A tar file, a folder that contains tar files, or a pattern. In a pattern,
            `{000..099}` stands for numbers, `{a,b}` for alternatives, and `*`, `?` and `[0-9]` for
            characters.

    Raises:
        DataError: A tar file is missing, or the folder has no tar file.
        ConfigurationError: The pattern stands for more than a million tar files.
    """
    path = expand_path(pattern)
    if path.is_dir():
        shards = [path / name for name in list_files(path) if name.lower().endswith(SHARD_SUFFIXES)]
        if not shards:
            raise DataError(f"{path} has no tar file. Pass another folder")
        return sorted(shards)
    shards, missing = set[Path](), list[str]()
    names = list(islice(_expand_braces(str(path)), _MAX_SHARDS + 1))
    if len(names) > _MAX_SHARDS:
        raise ConfigurationError(
            f"{pattern} stands for more than {_MAX_SHARDS:,} tar files. Use a narrower pattern"
        )
    for name in map(Path, names):
        matches = [name] if name.is_file() else _glob(name)
        shards.update(matches)
        if not matches:
            missing.append(str(name))
    if missing and len(names) == 1:
        raise DataError(f"no tar file matches {pattern}. Correct the path")
    if missing:
        raise DataError(
            f"{len(missing)} of {len(names)} tar files are missing, such as {missing[0]}"
        )
    return sorted(shards)


def _glob(pattern: Path) -> list[Path]:
    # "**" is only valid as the whole name of a folder.
    with suppress(ValueError):
        below = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
        return [path for path in below if path.is_file()]
    return []


def _expand_braces(text: str) -> Iterator[str]:
    """Expand braces of a shell: `{000..099}` and `{a,b}`. Nested braces are not supported."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    options: Iterable[str] = match[1].split(",") if "," in match[1] else [match[0]]
    if numbers := _RANGE.fullmatch(match[1]):
        first, last = sorted(map(int, numbers.groups()))
        is_padded = any(number[0] == "0" and len(number) > 1 for number in numbers.groups())
        width = max(map(len, numbers.groups())) if is_padded else 1
        options = (f"{number:0{width}}" for number in range(first, last + 1))
    for option in options:
        for rest in _expand_braces(text[match.end() :]):
            yield text[: match.start()] + option + rest


class ShardIndex(NamedTuple):
    """List of the images in a tar file, with their positions.

    Attributes:
        names: Paths of the images in the tar file, sorted.
        members: Position and class of each image, as offset in bytes, size in bytes and class
            number. The class number is `NO_LABEL` (-1) if there is no `.cls` member, and
            `INVALID_LABEL` (-2) if this member does not contain a number.
        state: Size in bytes and modification time in nanoseconds of the tar file.
    """

    names: list[str]
    members: Int64[np.ndarray, "images 3"]
    state: tuple[int, int]


def index_shard(shard: Path) -> ShardIndex:
    """List the images in a tar file. The list is cached until the tar file changes.

    Raises:
        DataError: The file is not an uncompressed tar file, is damaged, changes while it is read,
            or contains a sample without an image.
    """
    begin_ns, state = time.time_ns(), file_state(shard)
    names_and_members = _load_index(shard, state)
    if names_and_members is None:
        names_and_members = _scan(shard)
        if file_state(shard) != state:
            raise DataError(f"{shard} has changed while it was read. Wait until it is complete")
        # Do not cache the index of a file that has just been written. Another change within the
        # resolution of file times would not change the times, so the outdated index would be used.
        if max(state[1:3]) < begin_ns - RACY_NS:
            _save_index(shard, state, *names_and_members)
    return ShardIndex(*names_and_members, state[:2])


def _cache_file(shard: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()
    return cache_folder(None) / "tars" / digest[:32]


def _load_index(shard: Path, state: tuple[int, ...]) -> tuple[list[str], np.ndarray] | None:
    """Load the index of a tar file from the cache, or return None if it is missing or outdated.

    Args:
        shard: The tar file.
        state: Current size, times and inode of the tar file. A cached index with another state is
            outdated.

    Returns:
        Sorted names of the images, and the offset, size and class number of each image.
    """
    with suppress(MachineError):
        body = read_cache_file(_cache_file(shard), _CACHE_HEADER)
        stored = json.loads(body) if body is not None else {}
        if tuple(stored.get("state", ())) == state:
            return stored["names"], _to_array(stored["places"])
    return None


def _save_index(
    shard: Path, state: tuple[int, ...], names: list[str], members: Int64[np.ndarray, "images 3"]
) -> None:
    body = json.dumps({"state": state, "names": names, "places": members.tolist()}).encode()
    try:
        write_cache_file(_cache_file(shard), _CACHE_HEADER, body)
    except MachineError as error:
        print_message_once(
            f"cannot store the index of tar files for the next run: {error}. Set XDG_CACHE_HOME to "
            "another folder"
        )


def _to_array(members: Sequence[Sequence[int]]) -> Int64[np.ndarray, "images 3"]:
    return np.array(members, np.int64).reshape(-1, 3)


def _scan(shard: Path) -> tuple[list[str], Int64[np.ndarray, "images 3"]]:
    """Find the images in a tar file.

    Return the sorted names of the images, and the offset, size and class number of each image.
    """
    try:
        with open_regular(shard) as file:
            return _list_images(file, shard)
    except DataError:
        raise
    # Damaged headers raise TarError, OSError, ValueError, OverflowError and others.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{shard} is not a tar file or is damaged ({reason}). Copy it again"
        ) from error


def _list_images(
    file: BufferedReader, shard: Path
) -> tuple[list[str], Int64[np.ndarray, "images 3"]]:
    start = file.peek(64)[:64]
    if problem := describe_substitute(start):
        raise DataError(f"{shard} {problem}")
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{shard} is compressed, so its images cannot be read one by one. Decompress it: "
                f"{command} {shard}"
            )
    # Dictionaries by the key of a sample. Their values are the name, offset and size of its image,
    # its class number, and the name of its first member.
    images, labels, keys = dict[str, tuple[str, int, int]](), dict[str, int](), dict[str, str]()
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if member.size < 0:
                raise DataError(
                    f"{shard} is damaged: {member.name} has a negative size. Copy it again"
                )
            match = _MEMBER.fullmatch(member.name)
            if match is None or member.isdir():
                continue
            key, extension = match[1], f".{match[2].lower()}"
            keys.setdefault(key, member.name)
            if extension not in (".cls", *IMAGE_SUFFIXES):
                continue
            if not member.isreg() or member.issparse():
                raise DataError(
                    f"{shard}/{member.name} is a link or a sparse file. Create the tar file "
                    "from copies of the images"
                )
            if key in labels and extension == ".cls":
                raise DataError(f"{shard} has {member.name} twice. Remove one of them")
            if key in images and extension != ".cls":
                raise DataError(
                    f"{shard} has two images of one sample, {images[key][0]} and {member.name}. "
                    "Remove one of them"
                )
            if extension == ".cls":
                file.seek(member.offset_data)
                label = _LABEL.fullmatch(file.read(min(member.size, _MAX_LABEL_BYTES)))
                labels[key] = int(label[1]) if label else INVALID_LABEL
            else:
                images[key] = f"{key}.{match[2]}", member.offset_data, member.size
        # Check that the tar file is complete, which means that only zeros follow the last member.
        # The module tarfile reports neither a damaged header nor a file that was cut between two
        # members.
        file.seek(tar.offset)
    end = file.read(_MAX_PADDING)
    if len(end) < _BLOCK or any(end):
        raise DataError(
            f"{shard} is damaged or incomplete after byte {tar.offset:,}. Copy it again"
        )
    if incomplete := sorted(keys.keys() - images.keys()):
        key = incomplete[0]
        raise DataError(
            f"{shard} has {len(incomplete)} samples without an image, such as {keys[key]}. "
            f"Expected {key}.jpg or another image"
        )
    rows = sorted((*image, labels.get(key, NO_LABEL)) for key, image in images.items())
    return [name for name, *_ in rows], _to_array([place for _, *place in rows])


@dataclass(frozen=True, eq=False)
class TarImages(IdentifiedImages):
    """A set of images that are stored in tar files. The EXIF orientation of images is applied.

    The id of an image is `TAR/NAME`. TAR is the path of the tar file below `folder`, and NAME is
    the path of the image in the tar file.

    Attributes:
        folder: Folder that contains all tar files, directly or in subfolders.
        shards: The tar files.
        states: Size in bytes and modification time in nanoseconds of each tar file.
        members: Four numbers for each image: index of its tar file in `shards`, offset in bytes,
            size in bytes, and class number. The class number is -1 (`NO_LABEL`) if there is none,
            and -2 (`INVALID_LABEL`) if it is invalid.
        options: Options for reading and identifying the images.
    """

    name: str
    split: str
    folder: Path
    ids: tuple[str, ...]
    shards: tuple[Path, ...]
    states: tuple[tuple[int, int], ...]
    members: Int64[np.ndarray, "images 4"]
    class_names: tuple[str, ...] = ()
    options: ReadOptions = field(default_factory=ReadOptions)

    @classmethod
    def open(cls, shards: Sequence[Path], *, name: str, split: str) -> "TarImages":
        """Create an image set with all images of the given tar files.

        Args:
            shards: The tar files.
            name: Name of the dataset.
            split: Name of the split.

        Raises:
            DataError: A tar file is damaged or compressed, a sample has no image, or there are no
                images at all.
        """
        folder = Path(os.path.commonpath([shard.absolute().parent for shard in shards]))
        ids, states, members = list[str](), list[tuple[int, int]](), list[np.ndarray]()
        progress = show_progress(shards, f"index of {name} {split}", len(shards))
        with closing(map_in_threads(index_shard, progress)) as indices:
            for number, (shard, index) in enumerate(indices):
                states.append(index.state)
                prefix = shard.absolute().relative_to(folder).as_posix()
                ids += [f"{prefix}/{member}" for member in index.names]
                members.append(np.insert(index.members, 0, number, axis=1))
        if not ids:
            raise DataError(f"{folder} has no image in its {len(shards)} tar files. Pass others")
        rows = np.concatenate(members)
        return cls(name, split, folder, tuple(ids), tuple(shards), tuple(states), rows)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Decode an image.

        Raises:
            UnreadableImageError: The image is damaged.
            DataError: The tar file cannot be read or has changed.
        """
        image = decode_oriented(self._read(index), self.path(index), self.options.bits)
        return Sample(self.ids[index], image)

    def with_read_options(self, options: ReadOptions) -> "TarImages":
        """Return a copy of this image set that reads its images with the given options."""
        return replace(self, options=options)

    def select(self, name: str, indices: Sequence[int]) -> "TarImages":
        """Return a subset of the images, with a new name.

        Args:
            name: Name of the subset.
            indices: Indices of the subset's images in this image set.
        """
        ids = tuple(self.ids[index] for index in indices)
        return replace(self, name=name, ids=ids, members=self.members[list(indices)])

    def path(self, index: int) -> Path:
        return self.folder / self.ids[index]

    def files(self, index: int) -> tuple[Path, ...]:
        return (self.shards[int(self.members[index, 0])],)

    def content_sha256(self, index: int) -> str:
        return hashlib.sha256(self._read(index)).hexdigest()

    @cached_property
    def _hashes(self) -> ImageSetHashes:
        if self.options.fingerprint == "stat":
            digests = (
                f"{' '.join(map(str, self.states[shard]))} {offset} {size}"
                for shard, offset, size, _ in self.members.tolist()
            )
            return self.options.hash_rows([], zip(self.ids, digests, strict=True))
        parts = (
            FilePart(self.shards[shard], f"{offset} {size}", partial(self._read, index))
            for index, (shard, offset, size, _) in enumerate(self.members.tolist())
        )
        title = f"{self.name} {self.split}"
        hashing = identify_parts(parts, "content", title=title, folder=self.folder, total=len(self))
        with closing(hashing) as digests:
            return self.options.hash_rows([], zip(self.ids, digests, strict=True))

    def _read(self, index: int) -> bytes:
        number, offset, size, _ = self.members[index].tolist()
        shard = self.shards[number]
        try:
            with open_regular(shard) as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != self.states[number]:
                    raise DataError(
                        f"{shard} has changed since it was opened. Run the command again"
                    )
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise DataError(f"{shard} cannot be read ({error.strerror})") from error
