"""Files of pixels: photographs as RGB, masks as the numbers they store."""

import io
import struct
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Integer, UInt8
from PIL import Image, UnidentifiedImageError

from ssl_bench.errors import DataError, UnreadableImage
from ssl_bench.memory import pass_on_memory

MAX_PIXELS = 89_478_485
"""Larger files are refused before a pixel is decoded: a quarter of a gigabyte as RGB."""

_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I"})
_INDEXED = frozenset({"1", "L", "P"}) | _SIXTEEN_BIT
# Markers of JPEG: where the pixels begin; baseline, extended and progressive frames; tables,
# restarts, applications and comments.
_START_OF_SCAN = 0xDA
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_HARMLESS = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})


def read_image(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    """Read a photograph as 8-bit RGB, whatever its colour space.

    Transparency is dropped. The rotation that a camera notes in EXIF is not applied: the masks
    and boxes of VOC, ADE20K and COCO are drawn on the pixels as they are stored.

    Raises:
        DataError: the file is missing, empty, cut short, no image, or too large.
    """
    return decode_image(_bytes_of(path), path)


def decode_image(data: bytes, name: str | Path) -> UInt8[np.ndarray, "height width 3"]:
    """Decode a photograph as `read_image` does; `name` is what messages call it.

    Raises:
        DataError: it is empty, cut short, no image, or too large.
    """
    pixels = _decode_usual_jpeg(data)
    if pixels is not None:
        return pixels
    image = _decode(data, name)
    if image.mode in _SIXTEEN_BIT:
        image = _squeezed_to_eight_bits(image, name)
    if image.mode not in _EIGHT_BIT:
        raise DataError(f"{name} has the colour mode {image.mode}; save it as RGB")
    if image.mode == "P":
        image = image.convert("RGBA")  # straight to RGB warns where the palette is transparent
    return np.array(image.convert("RGB"))


def read_indices(path: Path) -> Integer[np.ndarray, "height width"]:
    """Read the numbers that a mask stores; a palette is never turned into colours.

    Raises:
        DataError: as `read_image`, and for a mask that holds colours instead of class numbers.
    """
    image = _decode(_bytes_of(path), path)
    if image.mode not in _INDEXED:
        raise DataError(
            f"{path} holds colours ({image.mode}) instead of one class number a pixel; "
            "take the masks as they were published"
        )
    indices = np.array(image)
    return indices.astype(np.uint8) if indices.dtype == np.bool_ else indices


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; see docs/data.md for the layout") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); fetch it again") from error


def _decode(data: bytes, name: str | Path) -> Image.Image:
    try:
        with Image.open(io.BytesIO(data)) as image:
            _refuse_large(image, name)
            image.load()
            return image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"{name} {_what_else(data)}; fetch it again") from error
    # Damaged files make the decoders raise OSError, SyntaxError, struct.error, IndexError ...
    except Exception as error:
        pass_on_memory(error)
        raise UnreadableImage(
            f"{name} is damaged or cut short ({error}); fetch it again"
        ) from error


def _decode_usual_jpeg(data: bytes) -> UInt8[np.ndarray, "height width 3"] | None:
    """Grey or colour JPEG by OpenCV: faster than PIL, and equal in every bit.

    Both call libjpeg-turbo; only damage behind the last pixel, which PIL refuses, is not seen.
    None for everything else, and for what cannot be decoded, where PIL says why.
    """
    size = _usual_jpeg_size(data)
    if size is None or size[0] * size[1] > MAX_PIXELS:
        return None
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(data, np.uint8), flags)


def _usual_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of an 8-bit JPEG with one or three channels and a faultless header."""
    at, size = 2 if data[:2] == b"\xff\xd8" else len(data), None
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        length, precision, height, width, channels = struct.unpack_from(">HBHHB", data, at + 2)
        if marker == _START_OF_SCAN:
            return size
        if marker in _FRAMES and size is None and precision == 8 and channels in (1, 3):
            size = (height, width)
        elif marker not in _HARMLESS:
            return None
        at += 2 + length
    return None


def _refuse_large(image: Image.Image, name: str | Path) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise UnreadableImage(
            f"{name} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; shrink it"
        )


def _what_else(data: bytes) -> str:
    start = data[:64].lstrip()
    if not start:
        return "is empty"
    if start.startswith(b"<"):
        return "is a text file, perhaps a web page in place of the download"
    return "is not an image"


def _squeezed_to_eight_bits(image: Image.Image, name: str | Path) -> Image.Image:
    # PIL would clip at 255 instead, which turns nearly every 16-bit picture white.
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError(f"{name} holds values outside 0..65535; save it with 8 or 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8))
