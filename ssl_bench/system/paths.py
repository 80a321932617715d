"""Paths that users write, and names of our files for what is named outside.

`expand_path` is the one door for the first: `~` is expanded, and what can be no path is refused.
"""

import os
import re
from hashlib import sha256
from pathlib import Path

from ssl_bench.errors import ConfigurationError, MachineError

LEGAL = "a path"
_LEGAL_NAMES = "a path of names up to 255 bytes, of which ~ or ~USER may be the first"
# Of a name in any usual file system, in bytes.
_LONGEST_NAME = 255
_LONGEST = 4095
_DIGITS = 16
_ENDS_LIKE_OURS = re.compile(rf".*~[0-9a-f]{{{_DIGITS}}}", re.DOTALL)
_SHA_DIGITS = 8

PACKAGE = Path(__file__).parents[1]
"""Where `ssl_bench` is installed; beside it lies the rest of a checkout."""


def expand_path(text: str | Path) -> Path:
    """A path with the home folder in place of `~`.

    Raises:
        ConfigurationError: no such user, or nothing that the system takes for a path.
    """
    if not is_valid_path(text):
        raise ConfigurationError(f"expected {_LEGAL_NAMES}, got {str(text)[:100]!r}")
    return Path(text).expanduser()


def is_valid_path(text: str | Path) -> bool:
    """Whether the system can be asked for it; an empty text is often an unset variable."""
    try:
        path = os.fsencode(Path(text).expanduser())
    # No home folder; or a text that no name of a file can be.
    except (RuntimeError, ValueError):
        return False
    names = path.split(b"/")
    is_short = len(path) <= _LONGEST and all(len(name) <= _LONGEST_NAME for name in names)
    return bool(str(text)) and b"\0" not in path and is_short


def resolve_links(path: Path) -> Path:
    """A path without links; unlike `Path.resolve`, also of a link that leads to itself."""
    return Path(os.path.realpath(path))


def cache_folder(configured: str | Path | None) -> Path:
    """The configured folder, else this program's own below the user's cache (XDG).

    Raises:
        MachineError: neither the environment nor the system names one.
    """
    if configured is not None:
        return expand_path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "ssl-bench"
    except RuntimeError as error:
        raise MachineError(f"no folder for a cache ({error}); set XDG_CACHE_HOME=DIR") from error


def file_name(text: str, *, added: int = 0, distinct: bool = False) -> str:
    """The name of a file or folder for something that is named outside.

    It is the text itself wherever that can be, with `_` for `/`. What is too long, hidden, or ends
    as a shortened name does, ends in `~` and sixteen digits of the sha256 of the text, so that no
    two texts share a name because one was shortened.

    Args:
        text: Of any length.
        added: Bytes of what will stand before and behind it.
        distinct: No two texts share a name at all: one with `/` ends in these digits too.
    """
    plain = os.fsencode(re.sub(r"[/\0]", "_", text))
    is_hidden = plain.startswith(b".") or not plain
    is_fine = len(plain) + added <= _LONGEST_NAME and "\0" not in text and not is_hidden
    is_shared = _ENDS_LIKE_OURS.fullmatch(text) or (distinct and "/" in text)
    if is_fine and not is_shared:
        return os.fsdecode(plain)
    digest = sha256(os.fsencode(text)).hexdigest()[:_DIGITS]
    if is_hidden:
        plain = b"_" + plain
    count = max(0, _LONGEST_NAME - added - 1 - _DIGITS)
    while count < len(plain) and plain[count] & 0xC0 == 0x80:
        # Not within a character.
        count -= 1
    return f"{os.fsdecode(plain[:count])}~{digest}"


def natural_sort_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Key that sorts names as people count: `run@10` before `run@100`, and that after `run@50`."""
    parts = re.split(r"([0-9]+)", name)
    # Texts and numbers by turns. A number is known by its length first, for it may be any.
    numbers = (part.lstrip("0") for part in parts[1::2])
    keys = [(0, part) for part in parts]
    keys[1::2] = [(len(number), number) for number in numbers]
    return keys, name


def figure_file_name(image_id: str, *, before: str = "") -> str:
    """File name of the picture of an image: no two ids, which may hold folders, share one."""
    added = len(before) + len(".png")
    return f"{before}{file_name(image_id, added=added, distinct=True)}.png"


def figure_title(name: str) -> str:
    """For readers, what `figure_file_name` gave without its ending; two images may share it."""
    return name[: -1 - _DIGITS] if _ENDS_LIKE_OURS.fullmatch(name) else name


def encoder_folder_prefix(model: str) -> str:
    """The first part of `encoder_folder`."""
    return file_name(model, added=2 * (1 + _SHA_DIGITS))


def encoder_folder(model: str, encoder_id: str) -> str:
    """How the folders for the pictures of an encoder begin."""
    return f"{encoder_folder_prefix(model)}-{encoder_id[:_SHA_DIGITS]}"


def figures_folder(encoder: str, fingerprint: str) -> str:
    """Name of the folder for the pictures of an encoder and of the images with a fingerprint.

    Of other images, or of the same after one was replaced, the pictures are elsewhere.

    Args:
        encoder: Its `encoder_folder`.
        fingerprint: Of the images, with or without a mark.
    """
    return f"{encoder}-{short_fingerprint(fingerprint)}"


def short_fingerprint(fingerprint: str) -> str:
    """What names of folders hold of a fingerprint."""
    return fingerprint.rpartition("-")[2][:_SHA_DIGITS]
