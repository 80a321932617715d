"""Files of pixels: photographs as RGB, masks as the numbers they store."""

from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt8
from PIL import Image, UnidentifiedImageError

from ssl_bench.errors import DataError

MAX_PIXELS = 89_478_485
"""Larger files are refused before a pixel is decoded: a quarter of a gigabyte as RGB."""

_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I"})
_INDEXED = frozenset({"1", "L", "P"}) | _SIXTEEN_BIT


def read_image(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    """Read a photograph as 8-bit RGB, whatever its colour space.

    Transparency is dropped. The rotation that a camera notes in EXIF is not applied: the masks
    and boxes of VOC, ADE20K and COCO are drawn on the pixels as they are stored.

    Raises:
        DataError: the file is missing, empty, cut short, no image, or too large.
    """
    image = _decode(path)
    if image.mode in _SIXTEEN_BIT:
        image = _squeezed_to_eight_bits(image, path)
    if image.mode not in _EIGHT_BIT:
        raise DataError(f"{path} has the colour mode {image.mode}; save it as RGB")
    if image.mode == "P":
        image = image.convert("RGBA")  # straight to RGB warns where the palette is transparent
    return np.array(image.convert("RGB"))


def read_indices(path: Path) -> Integer[np.ndarray, "height width"]:
    """Read the numbers that a mask stores; a palette is never turned into colours.

    Raises:
        DataError: as `read_image`, and for a mask that holds colours instead of class numbers.
    """
    image = _decode(path)
    if image.mode not in _INDEXED:
        raise DataError(
            f"{path} holds colours ({image.mode}) instead of one class number a pixel; "
            "take the masks as they were published"
        )
    indices = np.array(image)
    return indices.astype(np.uint8) if indices.dtype == np.bool_ else indices


def _decode(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            _refuse_large(image, path)
            image.load()
            return image
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; see docs/data.md for the layout") from error
    except (UnidentifiedImageError, IsADirectoryError, PermissionError) as error:
        raise DataError(f"{path} {_what_else(path)}; fetch it again") from error
    # Damaged files make the decoders raise OSError, SyntaxError, struct.error, IndexError ...
    except Exception as error:
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again") from error


def _refuse_large(image: Image.Image, path: Path) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"{path} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; shrink it"
        )


def _what_else(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not start:
        return "is empty"
    if start.startswith(b"<"):
        return "is a text file, perhaps a web page in place of the download"
    return "is not an image"


def _squeezed_to_eight_bits(image: Image.Image, path: Path) -> Image.Image:
    # PIL would clip at 255 instead, which turns nearly every 16-bit picture white.
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError(f"{path} holds values outside 0..65535; save it with 8 or 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8))
