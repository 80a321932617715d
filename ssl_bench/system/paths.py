"""Paths that users enter, and valid file names for models, datasets and images."""

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
"""Folder of the package `ssl_bench`. In a git checkout, its parent is the root of the checkout."""


def expand_path(text: str | Path) -> Path:
    """Return a path that a user entered, with `~` replaced by the home folder.

    Raises:
        ConfigurationError: The text is not a valid path, or the user in `~USER` does not exist.
    """
    if not is_valid_path(text):
        raise ConfigurationError(
            f"invalid path {str(text)[:100]!r}, expected names of 1 to {_MAX_NAME_BYTES} bytes. "
            "The first name may be ~ or ~USER"
        )
    return Path(text).expanduser()


def is_valid_path(text: str | Path) -> bool:
    """Return whether a text can be the path of a file.

    An empty text is no path, because scripts often pass an unset variable by mistake.
    """
    try:
        path = os.fsencode(Path(text).expanduser())
    # The home folder does not exist, or the text contains a surrogate that cannot be encoded.
    except (RuntimeError, ValueError):
        return False
    is_short = len(path) <= _MAX_PATH_BYTES
    has_short_names = all(len(name) <= _MAX_NAME_BYTES for name in path.split(b"/"))
    return bool(str(text)) and b"\0" not in path and is_short and has_short_names


def resolve_links(path: Path) -> Path:
    """Resolve a path as `Path.resolve` does, but also accept a link that points to itself."""
    return Path(os.path.realpath(path))


def cache_folder(configured: str | Path | None) -> Path:
    """Return the configured cache folder, or else `ssl-bench` in XDG_CACHE_HOME or `~/.cache`.

    Raises:
        MachineError: XDG_CACHE_HOME is not set and the user has no home folder.
    """
    if configured is not None:
        return expand_path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "ssl-bench"
    except RuntimeError as error:
        raise MachineError(
            f"the user has no folder for caches ({error}). Set XDG_CACHE_HOME to a folder"
        ) from error


def file_name(text: str, *, added: int = 0, distinct: bool = False) -> str:
    """Return a valid file name for a text. If the text is already valid, return it unchanged.

    "/" becomes "_". If the name would be hidden or too long, it is changed and ends with "~" and 16
    digits of the text's SHA-256. These digits are also added to a text that already ends in this
    way. A changed name therefore never equals the name of another text.

    Args:
        text: Text of any length.
        added: Number of bytes that the caller adds before and after the name.
        distinct: Also add the digits if the text contains "/". Any two different texts then have
            different names.
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
    # Do not cut in the middle of a UTF-8 character.
    while length < len(plain) and plain[length] & 0xC0 == 0x80:
        length -= 1
    return f"{os.fsdecode(plain[:length])}~{digest}"


def natural_sort_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts numbers in names by value: `run@10` comes before `run@100`."""
    # The parts alternate between text and number. A number may have more digits than `int` accepts,
    # so numbers are compared by their length and then by their digits.
    parts = re.split(r"([0-9]+)", name)
    keys = [(0, part) for part in parts]
    numbers = (part.lstrip("0") for part in parts[1::2])
    keys[1::2] = [(len(number), number) for number in numbers]
    return keys, name


def figure_file_name(image_id: str, *, before: str = "") -> str:
    """Return the name of the PNG file for an image. Different ids have different names."""
    added = len(before) + len(".png")
    return f"{before}{file_name(image_id, added=added, distinct=True)}.png"


def figure_title(name: str) -> str:
    """Remove the digest from the file name of a figure without suffix. Titles may be equal."""
    return name[: -1 - _DIGEST_DIGITS] if _ENDS_IN_DIGEST.fullmatch(name) else name


def figures_folder(encoder_folder: str, fingerprint: str) -> str:
    """Return the name of the folder for the figures of an encoder and a set of images.

    If an image changes, the fingerprint changes too, so old and new figures are never mixed.
    """
    return f"{encoder_folder}-{short_fingerprint(fingerprint)}"


def encoder_folder(model: str, encoder_id: str) -> str:
    """Return the prefix of the names of all figure folders of an encoder."""
    return f"{encoder_folder_prefix(model)}-{encoder_id[:_SHORT_DIGITS]}"


def encoder_folder_prefix(model: str) -> str:
    """Return the part of `encoder_folder` that only depends on the name of the model."""
    return file_name(model, added=2 * (1 + _SHORT_DIGITS))


def short_fingerprint(fingerprint: str) -> str:
    """Return the first eight digits of a fingerprint, without a prefix such as "stat-"."""
    return fingerprint.rpartition("-")[2][:_SHORT_DIGITS]
