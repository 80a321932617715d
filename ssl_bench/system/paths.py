"""Paths that users type, and file names for models, datasets and images of any name."""

import os
import re
from hashlib import sha256
from pathlib import Path

from ssl_bench.errors import ConfigurationError, MachineError

# Limits of common file systems, in bytes.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
_DIGEST_DIGITS = 16
_ENDS_IN_DIGEST = re.compile(rf".*~[0-9a-f]{{{_DIGEST_DIGITS}}}", re.DOTALL)
_SHORT_DIGITS = 8

PACKAGE = Path(__file__).parents[1]
"""Folder of the installed package `ssl_bench`; its parent is the checkout, if there is one."""


def expand_path(text: str | Path) -> Path:
    """Return a path that a user typed, with `~` replaced by the home folder.

    Raises:
        ConfigurationError: There is no such user, or the text is not a valid path.
    """
    if not is_valid_path(text):
        raise ConfigurationError(
            f"invalid path {str(text)[:100]!r}, expected names of 1 to {_MAX_NAME_BYTES} bytes, "
            "of which the first may be ~ or ~USER"
        )
    return Path(text).expanduser()


def is_valid_path(text: str | Path) -> bool:
    """Return whether a text can be the path of a file.

    An empty text is not, because it is often an unset variable of a script.
    """
    try:
        path = os.fsencode(Path(text).expanduser())
    # There is no such home folder, or a lone surrogate cannot be encoded.
    except (RuntimeError, ValueError):
        return False
    is_short = len(path) <= _MAX_PATH_BYTES
    is_short = is_short and all(len(name) <= _MAX_NAME_BYTES for name in path.split(b"/"))
    return bool(str(text)) and b"\0" not in path and is_short


def resolve_links(path: Path) -> Path:
    """Return the absolute path without links.

    Unlike `Path.resolve`, this also works for a link that leads to itself.
    """
    return Path(os.path.realpath(path))


def cache_folder(configured: str | Path | None) -> Path:
    """Return the configured cache folder, by default `ssl-bench` in the user's cache (XDG).

    Raises:
        MachineError: There is no home folder and XDG_CACHE_HOME is not set.
    """
    if configured is not None:
        return expand_path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "ssl-bench"
    except RuntimeError as error:
        raise MachineError(
            f"no folder for the cache ({error}). Set XDG_CACHE_HOME to a folder"
        ) from error


def file_name(text: str, *, added: int = 0, distinct: bool = False) -> str:
    """Return a valid file name for a text, which is the text itself wherever possible.

    "/" becomes "_". A name that would be hidden or too long ends in "~" and 16 digits of the text's
    sha256. So does a text that already looks like such a name. Therefore no two texts share a name
    because one of them was shortened.

    Args:
        text: Text of any length, such as the name of a model.
        added: Bytes that the caller adds before and after the name.
        distinct: Add the digits to every text with "/" as well, so that no two texts share a name.
    """
    plain = os.fsencode(re.sub(r"[/\0]", "_", text))
    is_hidden = plain.startswith(b".") or not plain
    is_valid = len(plain) + added <= _MAX_NAME_BYTES and "\0" not in text and not is_hidden
    is_ambiguous = _ENDS_IN_DIGEST.fullmatch(text) or (distinct and "/" in text)
    if is_valid and not is_ambiguous:
        return os.fsdecode(plain)
    digest = sha256(os.fsencode(text)).hexdigest()[:_DIGEST_DIGITS]
    if is_hidden:
        plain = b"_" + plain
    length = max(0, _MAX_NAME_BYTES - added - 1 - _DIGEST_DIGITS)
    # Do not cut within a character of UTF-8.
    while length < len(plain) and plain[length] & 0xC0 == 0x80:
        length -= 1
    return f"{os.fsdecode(plain[:length])}~{digest}"


def natural_sort_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts numbers in names by value: `run@10` comes before `run@100`."""
    # Texts and numbers alternate. A number may have more digits than `int` accepts, so it is
    # compared by its length and then by its digits.
    parts = re.split(r"([0-9]+)", name)
    keys = [(0, part) for part in parts]
    numbers = (part.lstrip("0") for part in parts[1::2])
    keys[1::2] = [(len(number), number) for number in numbers]
    return keys, name


def figure_file_name(image_id: str, *, before: str = "") -> str:
    """Return the name of the PNG file for an image, which is different for each id.

    Args:
        image_id: Id of the image, which may contain folders.
        before: Text at the start of the name.
    """
    added = len(before) + len(".png")
    return f"{before}{file_name(image_id, added=added, distinct=True)}.png"


def figure_title(name: str) -> str:
    """Return a title for readers: the stem of a `figure_file_name` without its digest.

    Two images may share a title.
    """
    return name[: -1 - _DIGEST_DIGITS] if _ENDS_IN_DIGEST.fullmatch(name) else name


def figures_folder(encoder_folder: str, fingerprint: str) -> str:
    """Return the name of the folder for the figures of an encoder and a set of images.

    A changed image changes the fingerprint, so figures of different images have different folders.

    Args:
        encoder_folder: The name that `encoder_folder` returns.
        fingerprint: Fingerprint of the images, with or without a prefix such as "stat-".
    """
    return f"{encoder_folder}-{short_fingerprint(fingerprint)}"


def encoder_folder(model: str, encoder_id: str) -> str:
    """Return how the names of all folders for the figures of an encoder start."""
    return f"{encoder_folder_prefix(model)}-{encoder_id[:_SHORT_DIGITS]}"


def encoder_folder_prefix(model: str) -> str:
    """Return the part of `encoder_folder` that depends on the name of the model."""
    return file_name(model, added=2 * (1 + _SHORT_DIGITS))


def short_fingerprint(fingerprint: str) -> str:
    """Return the digits of a fingerprint that occur in folder names."""
    return fingerprint.rpartition("-")[2][:_SHORT_DIGITS]
