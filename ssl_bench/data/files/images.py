"""Files of pixels: photographs as RGB, masks as the numbers they store."""

import io
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Integer, UInt8
from PIL import Image, UnidentifiedImageError

from ssl_bench.data.files.jpeg import open_ended, parse_jpeg, with_noise
from ssl_bench.errors import DataError, UnreadableImage
from ssl_bench.system.files import read_regular
from ssl_bench.system.memory import pass_on_memory

MAX_PIXELS = 89_478_485
"""Larger files are refused before a pixel is decoded: a quarter of a gigabyte as RGB."""

_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I"})
# Pillow opens forty more, among them some that start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
# What it calls a JPEG, and one with further pictures behind it.
_JPEG = frozenset({"JPEG", "MPO"})
_INDEXED = frozenset({"1", "L", "P"}) | _SIXTEEN_BIT


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
        return read_regular(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; see docs/data.md for the layout") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); fetch it again") from error


def _decode(data: bytes, name: str | Path) -> Image.Image:
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _refuse_large(image, name)
            image.load()
            if image.format in _JPEG:
                _require_all_pixels(image, data)
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


def _require_all_pixels(image: Image.Image, data: bytes) -> None:
    """Refuse a JPEG of an unusual kind, progressive for example, that ends early: decodes twice."""
    jpeg = parse_jpeg(data)
    fault = "its end marker is missing" if jpeg is None else jpeg.fault()
    if jpeg is not None and fault is None:
        with Image.open(io.BytesIO(with_noise(data, jpeg)), formats=("JPEG",)) as other:
            if other.tobytes() == image.tobytes():
                return
        fault = "its pixels end before its end marker"
    raise ValueError(fault)


def _decode_usual_jpeg(data: bytes) -> UInt8[np.ndarray, "height width 3"] | None:
    """Grey or colour JPEG by OpenCV: faster than PIL, and equal in every bit.

    Both call libjpeg-turbo. None for everything else, and for what is not whole, where PIL says
    why.
    """
    jpeg = parse_jpeg(data)
    if jpeg is None or not jpeg.is_usual or jpeg.height * jpeg.width > MAX_PIXELS:
        return None
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    found = [
        cv2.imdecode(np.frombuffer(content, np.uint8), flags) for content in open_ended(data, jpeg)
    ]
    first = found[0]
    is_whole = first is not None and all(
        other is not None and np.array_equal(first, other) for other in found[1:]
    )
    return first if is_whole else None


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
