"""Pictures read straight out of tar and zip archives, of several parts or shards."""

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int64, UInt64

from ssl_bench.data.files.archive_index import PACKED_TAR, SUFFIXES, Archive, Member
from ssl_bench.data.files.digests import Part, Reading, identities
from ssl_bench.data.files.fingerprints import Known
from ssl_bench.data.files.images import decode_image
from ssl_bench.data.files.read_options import ReadOptions
from ssl_bench.data.layouts.class_folders import LabelledImages, labelled_by_folder
from ssl_bench.data.layouts.folder import SUFFIXES as PICTURES
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.system.paths import expanded
from ssl_bench.system.written import files_below

_CLASS, _LONGEST_CLASS = ".cls", 32
# The first archive in a path, and the folder inside it.
_PATH = re.compile(rf"(.*?(?:{'|'.join(map(re.escape, SUFFIXES))}))(?:/+(.*))?", re.I | re.S)


@dataclass(frozen=True)
class ArchiveImages:
    """An `ImageSet` that decodes a file in an archive when asked for it.

    Its ids, their order and its fingerprint are those of the unpacked folder.

    Attributes:
        places: Archive, offset, packed bytes, bytes, and whether deflated; image by image.
    """

    archives: tuple[Archive, ...]
    ids: tuple[str, ...]
    places: Int64[np.ndarray, "images 5"] = field(repr=False)
    options: ReadOptions = field(default_factory=ReadOptions)

    name = "archive"
    split = "all"
    class_names = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Decode one image.

        Raises:
            DataError: the archive or the image in it is damaged.
        """
        image_id, (archive, member) = self.ids[index], self._member(index)
        content = archive.read(member)
        name = f"{archive.path}/{image_id}"
        return Sample(image_id, decode_image(content, name, self.options.bits))

    def _member(self, index: int) -> tuple[Archive, Member]:
        number, offset, packed, size, is_deflated = self.places[index].tolist()
        member = Member(self.ids[index], offset, packed, size, bool(is_deflated))
        return self.archives[number], member

    def fingerprint(self) -> str:
        """Sha256 over ids and what the files hold, as that of a `FileImageSet`.

        Where archives are known by size and time it is one of its own.

        Raises:
            DataError: an archive is damaged.
        """
        return self._known.fingerprint

    def marks(self) -> UInt64[np.ndarray, " images"]:
        """Of each image a number, another one where what its file holds is."""
        return self._known.marks

    @cached_property
    def _known(self) -> Known:
        # In the order in which they lie there: a disk that has to seek takes ten times as long.
        order = np.lexsort((self.places[:, 1], self.places[:, 0])).tolist()
        first = self.archives[0].path
        reading = Reading(first.name, first.parent, len(self))
        parts = (self._part(index) for index in order)
        with closing(identities(parts, reading, self.options.fingerprint)) as identity:
            found = dict(zip(order, identity, strict=True))
        rows = ((image_id, found[index], "") for index, image_id in enumerate(self.ids))
        return self.options.known_by([], rows)

    def _part(self, index: int) -> Part:
        archive, member = self._member(index)
        # Apart from its name, which says nothing about the bytes.
        place, read = repr(member[1:]), partial(archive.read, member)
        return Part(archive.path, place, read, in_memory=archive.content is not None)

    def read_as(self, options: ReadOptions) -> "ArchiveImages":
        """The same images, their files read in another way."""
        return replace(self, options=options)


def is_archive(root: str) -> bool:
    """Whether a path names archives, or a folder that holds archives and nothing to look into."""
    folder = expanded(root)
    if not folder.is_dir():
        return all(_PATH.fullmatch(name) for name in _alternatives(root))
    found = False
    for name in map(str.lower, files_below(folder)):
        if name.endswith(PICTURES) or (name.endswith(SUFFIXES) and "/" in name):
            return False
        found |= name.endswith(SUFFIXES)
    return found


def open_archives(root: str, *, in_memory: bool = False) -> ArchiveImages:
    """Find the pictures in one archive or several, in the order of their ids.

    Args:
        root: An archive, a pattern such as `part_*.tar` or `shard-{000..009}.tar`, or a folder of
            archives. `/FOLDER` behind an archive or pattern takes only what lies below FOLDER
            inside, and ids begin there.
        in_memory: Keep the archives with their files as they are, which those that give no single
            file need.

    Raises:
        DataError: there is no such archive, one is damaged, they hold no picture, or one twice.
    """
    return _pictures_of(*_files(root, in_memory=in_memory), root)


def open_labelled_archives(root: str, *, in_memory: bool = False) -> LabelledImages:
    """Pictures of archives, and classes: the number in KEY.cls, or the first folder of the id.

    Raises:
        DataError: as `open_archives`, and without two classes or a class for every picture.
    """
    archives, files = _files(root, in_memory=in_memory)
    images = _pictures_of(archives, files, root)
    numbers = [(n, member) for n, member in files if member.name.lower().endswith(_CLASS)]
    class_names, labels = (
        _labels_beside(images, numbers) if numbers else labelled_by_folder(images.ids)
    )
    if len(class_names) < 2:
        raise DataError(
            f"{root} has the single class {', '.join(class_names)}; name the folder above the "
            f"classes, such as {root}/FOLDER"
        )
    return LabelledImages(images, class_names, labels)


def _files(root: str, *, in_memory: bool) -> tuple[tuple[Archive, ...], list[tuple[int, Member]]]:
    """Archives, and all that lies in them below the folder that counts."""
    located = _located(root)
    archives = tuple(_opened(path, in_memory=in_memory) for path, _ in located)
    files = [
        (number, member._replace(name=name))
        for number, (archive, (_, inside)) in enumerate(zip(archives, located, strict=True))
        for member in archive.members()
        if (name := _name_below(member.name, inside)) is not None
    ]
    return archives, files


def _pictures_of(
    archives: tuple[Archive, ...], files: Sequence[tuple[int, Member]], root: str
) -> ArchiveImages:
    # By id: which archive a picture lies in must change nothing.
    pictures = sorted((m.name, n, m) for n, m in files if m.name.lower().endswith(PICTURES))
    _require_sound(pictures, archives, root)
    places = [[n, m.offset, m.packed, m.size, m.is_deflated] for _, n, m in pictures]
    return ArchiveImages(archives, tuple(name for name, _, _ in pictures), np.array(places))


def _located(root: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Each archive with the folder inside it that counts."""
    folder = expanded(root)
    if folder.is_dir():
        children = (path for path in folder.iterdir() if path.name[0] != ".")
        return [(path, ()) for path in sorted(children) if path.name.lower().endswith(SUFFIXES)]
    located = []
    for name in _alternatives(root):
        match = _PATH.fullmatch(name)
        if match is None:
            raise DataError(f"{name} is no archive; known are {', '.join(SUFFIXES)}")
        inside = PurePosixPath(match[2] or "").parts
        located += [(path, inside) for path in _matching(expanded(match[1]))]
    return located


def _matching(pattern: Path) -> list[Path]:
    """Files that a path with * and ? stands for."""
    start = Path(pattern.anchor or ".")
    inner = str(pattern.relative_to(pattern.anchor))
    paths = [pattern] if pattern.is_file() else sorted(start.glob(inner))
    if not paths:
        raise DataError(f"{pattern} does not exist; expected an archive or a pattern for some")
    return paths


def _alternatives(pattern: str) -> list[str]:
    """What a pattern with {a,b} or {000..009} stands for."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    values = braces[1].split(",")
    if span is not None:
        numbers = range(int(span[1]), int(span[2]) + 1)
        values = [f"{number:0{len(span[1])}}" for number in numbers]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [name for value in values for name in _alternatives(before + value + after)]


def _opened(path: Path, *, in_memory: bool) -> Archive:
    if in_memory:
        return Archive.in_memory(path)
    if path.name.lower().endswith(PACKED_TAR):
        raise DataError(
            f"{path} is compressed as a whole, so that no picture can be read alone; keep it in "
            "memory with data.in_memory=true, or unpack it with gunzip"
        )
    return Archive(path)


def _name_below(name: str, inside: tuple[str, ...]) -> str | None:
    """The path below a folder; None if it is elsewhere or hidden."""
    parts = PurePosixPath(name).parts
    if parts[: len(inside)] != inside or any(p[0] == "." and p != ".." for p in parts):
        return None
    return "/".join(parts[len(inside) :]).replace("//", "/", 1)


def _require_sound(
    pictures: Sequence[tuple[str, int, Member]], archives: Sequence[Archive], root: str
) -> None:
    if not pictures:
        raise DataError(f"{root} holds no picture; known are {', '.join(PICTURES)}")
    for name, number, member in pictures:
        if member.is_link:
            raise DataError(
                f"{archives[number].path} holds only a link for {name}; pack the files themselves "
                "(tar --dereference --hard-dereference)"
            )
    for (name, one, _), (other_name, other, _) in pairwise(pictures):
        if name == other_name:
            first, second = archives[one].path, archives[other].path
            places = f"{first} holds" if one == other else f"{first} and {second} hold"
            raise DataError(f"{places} {name} twice; give every picture a name of its own")


def _labels_beside(
    images: ArchiveImages, files: Sequence[tuple[int, Member]]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Class names and labels from files that hold the number of a class, as in webdataset."""
    numbers = {_key(m.name): _class_number(images.archives[n], m) for n, m in files}
    found = [numbers.get(_key(image_id)) for image_id in images.ids]
    if None in found:
        image_id = images.ids[found.index(None)]
        raise DataError(f"{image_id} has no {_key(image_id)}{_CLASS} beside it; pack it too")
    present = sorted({number for number in found if number is not None})
    places = {number: place for place, number in enumerate(present)}
    return tuple(map(str, present)), tuple(places[n] for n in found if n is not None)


def _key(name: str) -> str:
    """A name up to the first dot of its last part, which siblings have in common."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.split('.')[0]}"


def _class_number(archive: Archive, member: Member) -> int:
    content = b"" if member.size > _LONGEST_CLASS else archive.read(member).strip()
    if not content.isdigit():
        raise DataError(
            f"{archive.path}/{member.name} holds {content[:20]!r}, expected the number of a class"
        )
    return int(content)
