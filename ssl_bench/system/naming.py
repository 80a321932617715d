"""Names from outside, of images, datasets and models, as parts of the names of our files."""

import os
import re
from hashlib import sha256

# Of a name in any usual file system, in bytes.
_LONGEST = 255
_DIGITS = 16
_ENDS_LIKE_OURS = re.compile(rf".*~[0-9a-f]{{{_DIGITS}}}", re.DOTALL)
_SHA_DIGITS = 8


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
    is_fine = len(plain) + added <= _LONGEST and "\0" not in text and not is_hidden
    is_shared = _ENDS_LIKE_OURS.fullmatch(text) or (distinct and "/" in text)
    if is_fine and not is_shared:
        return os.fsdecode(plain)
    digest = sha256(os.fsencode(text)).hexdigest()[:_DIGITS]
    if is_hidden:
        plain = b"_" + plain
    count = max(0, _LONGEST - added - 1 - _DIGITS)
    while count < len(plain) and plain[count] & 0xC0 == 0x80:
        # Not within a character.
        count -= 1
    return f"{os.fsdecode(plain[:count])}~{digest}"


def in_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Key that sorts names as people count: `run@10` before `run@100`, and that after `run@50`."""
    parts = re.split(r"([0-9]+)", name)
    # Texts and numbers by turns. A number is known by its length first, for it may be any.
    numbers = (part.lstrip("0") for part in parts[1::2])
    keys = [(0, part) for part in parts]
    keys[1::2] = [(len(number), number) for number in numbers]
    return keys, name


def image_name(image_id: str, *, before: str = "") -> str:
    """File name of the picture of an image: no two ids, which may hold folders, share one."""
    added = len(before) + len(".png")
    return f"{before}{file_name(image_id, added=added, distinct=True)}.png"


def image_title(name: str) -> str:
    """For readers, what `image_name` gave without its ending; two images may share it."""
    return name[: -1 - _DIGITS] if _ENDS_LIKE_OURS.fullmatch(name) else name


def encoder_name(model: str) -> str:
    """The first part of `encoder_folder`."""
    return file_name(model, added=2 * (1 + _SHA_DIGITS))


def encoder_folder(model: str, encoder_id: str) -> str:
    """How the folders for the pictures of an encoder begin."""
    return f"{encoder_name(model)}-{encoder_id[:_SHA_DIGITS]}"


def pictures_folder(encoder: str, fingerprint: str) -> str:
    """Name of the folder for the pictures of an encoder and of the images with a fingerprint.

    Of other images, or of the same after one was replaced, the pictures are elsewhere.

    Args:
        encoder: Its `encoder_folder`.
        fingerprint: Of the images, with or without a mark.
    """
    return f"{encoder}-{image_digits(fingerprint)}"


def image_digits(fingerprint: str) -> str:
    """What names of folders hold of a fingerprint."""
    return fingerprint.rpartition("-")[2][:_SHA_DIGITS]
