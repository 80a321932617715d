"""Lists of images in text files: which image each line names."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from unicodedata import normalize

from ssl_bench.data.files.file_sets import Files
from ssl_bench.data.files.images import IMAGE_SUFFIXES
from ssl_bench.data.splits import absent_split, read_lines

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


def read_list(path: Path) -> list[str]:
    """Return the lines of a list without blank lines.

    Raises:
        DataError: The list does not exist. The error names the other lists in its folder.
    """
    if not path.is_file():
        raise absent_split(
            path.stem, [file.stem for file in path.parent.glob("*.txt")], path.parent
        )
    return [line.strip() for line in read_lines(path) if line.strip()]


def find_image_ids(lines: Sequence[str], files: Files) -> list[str]:
    """Return the id of the image that each line of a list names.

    A line is an id, a file name or a path. Numbers, paths or other columns may follow it. Names may
    contain blanks and dots, so the longest name with an existing file is used. A name in another
    Unicode form than its file also matches.

    Args:
        lines: The lines of a list.
        files: The image files. If none of them fits a line, the whole line becomes the id, and the
            image is later reported as missing.
    """
    # The name may end in "_left" if the suffix is "_left.png".
    endings = (files.suffix, "", PurePosixPath(files.suffix).stem)

    @cache
    def names_in(folder: str) -> dict[str, str]:
        """Return the file names in a folder by themselves and by their composed Unicode form."""
        names: list[str] = []
        with suppress(OSError), os.scandir(files.folder / folder) as entries:
            names = [entry.name for entry in entries]
        return {
            **{normalize("NFC", name): name for name in names},
            **{name: name for name in names},
        }

    @cache
    def find_folder(path: str) -> str | None:
        return find_file(*path.rpartition("/")[::2]) if path else ""

    def find_file(folder: str, name: str) -> str | None:
        parent = find_folder(folder)
        names = {} if parent is None else names_in(parent)
        actual = names.get(name) or names.get(normalize("NFC", name))
        return f"{parent}/{actual}" if parent and actual else actual

    def find_id(line: str) -> str:
        # Most published lists have such lines, and nothing has to be looked up.
        if _PLAIN_NAME.fullmatch(line) and not line.endswith(endings[2]):
            return line
        for folder, name in _possible_names(line, files.suffix):
            if find_folder(folder) is None:
                continue
            stems = [name.removesuffix(ending) for ending in endings]
            stems += [name.rpartition(".")[0]] if name.lower().endswith(IMAGE_SUFFIXES) else []
            for stem in stems:
                if path := find_file(folder, stem + files.suffix):
                    return path.removesuffix(files.suffix)
        return line.removesuffix(files.suffix)

    return [find_id(line) for line in lines]


def _possible_names(line: str, suffix: str) -> Iterator[tuple[str, str]]:
    """Yield the folders and names that a line may mean, longer ones first."""
    for path in _without_columns(line, suffix):
        *folders, name = [part for part in path.split("/") if part not in ("", ".", "..")] or [""]
        for start in range(len(folders) + 1):
            # A blank in a folder may separate two columns, so that folder is not removed.
            if start and re.search(r"\s", folders[start - 1]):
                break
            yield "/".join(folders[start:]), name


def _without_columns(line: str, suffix: str) -> Iterator[str]:
    """Yield a line, and then its beginnings that may be the first columns, longest first."""
    yield line
    for blank in reversed(list(re.finditer(r"\s+", line))):
        name, columns = line[: blank.start()], line[blank.end() :].split()
        is_file = name.lower().endswith((suffix.lower(), *IMAGE_SUFFIXES))
        if is_file or all("/" in column or _NUMBER.fullmatch(column) for column in columns):
            yield name
