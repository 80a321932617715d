"""What a TIFF says that it holds, which PIL asks only in part."""

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image, TiffImagePlugin
from PIL.TiffImagePlugin import ImageFileDirectory_v2 as Directory

# Of two byte orders PIL knows 16 bits with zero for white in one alone; it turns neither.
TiffImagePlugin.OPEN_INFO.setdefault((b"MM", 0, (1,), 1, (16,), ()), ("I;16B", "I;16B"))

_PARTS = 0b101  # a smaller copy of another page, or a mask of it
_KIND, _BITS, _PHOTOMETRIC, _BANDS, _PLANES = 254, 258, 262, 277, 284
_EXTRA, _NUMBERS, _LARGEST, _LARGEST_OF_ANY = 338, 339, 281, 341
_WHITE_IS_ZERO = 0
_COLOURS = {_WHITE_IS_ZERO: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
_ALPHA = ((1,), (2,))
_STRIPS, _TILES, _BIG_MOTOROLA = 273, 324, b"MM\0+"
_SIGNED, _FLOATING, _APART = 2, (3, 5, 6), 2


def is_tiff(data: bytes) -> bool:
    return data.startswith(tuple(TiffImagePlugin.PREFIXES))


def what_else(data: bytes) -> str | None:
    """What a TIFF is that is no picture of one, three or four bands; None where it is.

    One more band than there are colours is transparency, and dropped as such.
    """
    if data.startswith(_BIG_MOTOROLA):
        return "a BigTIFF with high bytes first"
    pages = _pages(data)
    whole = [page for page in pages if not page.get(_KIND, 0) & _PARTS]
    if len(whole) > 1:
        return f"a TIFF of {len(whole)} pages"
    page = (whole or pages)[0]
    bands, bits, numbers = page.get(_BANDS, 1), _bits(page), page.get(_NUMBERS, (1,))
    photometric = page.get(_PHOTOMETRIC, _WHITE_IS_ZERO)
    if photometric not in _COLOURS:
        return f"a TIFF of the photometric interpretation {photometric}"
    if bands > _COLOURS[photometric] + 1 or (bands == 2 and page.get(_EXTRA) not in _ALPHA):
        return f"a TIFF of {bands} bands"
    if any(number in _FLOATING for number in numbers):
        return f"a TIFF of floating-point numbers of {bits} bits"
    if _SIGNED in numbers and bits == 8:
        return "a TIFF of signed numbers of 8 bits"
    if bits == 16 and bands > 1 and page.get(_PLANES) == _APART:
        return f"a TIFF of 16 bits with its {bands} bands apart"
    return None


def unknown(data: bytes) -> str | None:
    """What a TIFF is that is whole and cannot be decoded all the same."""
    page = _pages(data)[0]
    if not {_STRIPS, _TILES} & set(page):
        return None
    return f"a TIFF of {_bits(page)} bits and {page.get(_BANDS, 1)} band(s)"


def largest_of(image: TiffImagePlugin.TiffImageFile) -> int:
    """The largest number that a sample can be, which tags may say to be less than fits its bits."""
    page = image.tag_v2
    stated = [page[tag] for tag in (_LARGEST, _LARGEST_OF_ANY) if tag in page]
    found = {int(max(one if isinstance(one, tuple) else (one,))) for one in stated}
    # Any other number is the largest that happens to be in the picture.
    limits = [one for one in found if one > 255 and one & (one + 1) == 0]
    return min([2 ** _bits(page) - 1, *limits])


def is_inverted(image: Image.Image) -> bool:
    """Whether zero is white in a TIFF."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    return image.tag_v2.get(_PHOTOMETRIC, _WHITE_IS_ZERO) == _WHITE_IS_ZERO


def _bits(page: Mapping[int, Any]) -> int:
    """Bits of a sample; the most of all bands."""
    return max(page.get(_BITS, (1,)))


def _pages(data: bytes) -> list[Directory]:
    # 16 bytes where it is a BigTIFF.
    file, header = io.BytesIO(data), data[: 16 if data[2] == 43 else 8]
    pages, seen = [Directory(header)], set[int]()
    while (place := pages[-1].next) and place not in seen:
        seen.add(place)
        file.seek(place)
        pages.append(Directory(header))
        pages[-1].load(file)
    return pages[1:]
