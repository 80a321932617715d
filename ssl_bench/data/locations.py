"""Where a dataset lies, and where made files may."""

import os
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.paths import expanded

_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")


def find_root(
    root: str | Path | None,
    *,
    name: str,
    inside: Sequence[str],
    landmarks: Sequence[str],
    tree: str,
) -> Path:
    """The folder of a dataset: the given one, or one of those that may be `inside` it.

    The first is taken that holds at least one of the `landmarks`; `tree` tells the user, on one
    line, what should be there.

    Raises:
        DataError: nothing was given, or no candidate holds a landmark.
    """
    expected = f"expected {tree}; docs/data.md says where to get it"
    if root is None:
        raise DataError(f"{name} needs its folder, --data-root DIR: {expected}")
    given = given_folder(root)
    for folder in (given, *(given / part for part in inside)):
        if any((folder / landmark).is_dir() for landmark in landmarks):
            return folder
    problem = "does not hold" if given.is_dir() else "is not a folder with"
    raise DataError(f"{given} {problem} {name}: {expected}")


def given_folder(root: str | Path) -> Path:
    """The path of a dataset as it was typed.

    Raises:
        DataError: it is that of an archive.
    """
    path = expanded(root)
    if path.name.lower().endswith(_ARCHIVES) and not path.is_dir():
        command = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
        raise DataError(f"expected a folder, got the archive {path}; unpack it: {command} {path}")
    return path


def first_folder(candidates: Sequence[Path]) -> Path:
    """The first of several usual places that exists.

    Raises:
        DataError: none does.
    """
    for folder in candidates:
        if folder.is_dir():
            return folder
    names = " or ".join(str(folder) for folder in candidates)
    raise DataError(f"expected the folder {names}; docs/data.md shows the layout")


def cache_folder(configured: str | Path | None) -> Path:
    """The configured folder, else this program's own below the user's cache (XDG).

    Raises:
        MachineError: neither the environment nor the system names one.
    """
    if configured is not None:
        return expanded(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "ssl-bench"
    except RuntimeError as error:
        raise MachineError(f"no folder for a cache ({error}); set XDG_CACHE_HOME=DIR") from error
