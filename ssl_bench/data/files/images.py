"""Files of pixels: photographs as RGB, masks as the numbers they store."""

import io
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from jaxtyping import Integer, UInt8
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, features
from PIL.TiffImagePlugin import ImageFileDirectory_v2 as Directory

from ssl_bench.errors import DataError, UnreadableImage
from ssl_bench.system.files import describe_substitute, read_regular
from ssl_bench.system.process import reraise_out_of_memory

MAX_PIXELS = 89_478_485
"""Larger files are refused before a pixel is decoded: a quarter of a gigabyte as RGB."""

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".avif", ".heic", ".heif", ".hif"),
)
"""Suffixes of the files that `read_image` decodes, in lower case."""

_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I"})
_16_BITS = 65535
# Pillow opens forty more, among them some that start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
# What it calls a JPEG, and one with further pictures behind it.
_JPEG = frozenset({"JPEG", "MPO"})
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF = frozenset({b"avif", b"avis"})
_DECODERS = (
    ("HEIC", _HEIC, "pip install 'ssl-bench[heic]'"),
    ("AVIF", _AVIF, "pip install 'pillow>=11.3'"),
)
_ORIENTATION = 0x0112
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
_INDEXED = frozenset({"1", "L", "P"}) | _SIXTEEN_BIT
_LOSSY_IN_TIFF = frozenset({"jpeg", "tiff_jpeg", "webp"})
_VOC_CLASSES = (*range(21), 255)
# Of two byte orders PIL knows 16 bits with zero for white in one alone; it turns neither.
TiffImagePlugin.OPEN_INFO.setdefault((b"MM", 0, (1,), 1, (16,), ()), ("I;16B", "I;16B"))
# Tags of a TIFF; a page of these parts is a smaller copy of another one, or a mask of it.
_PARTS = 0b101
_KIND, _BITS, _PHOTOMETRIC, _BANDS, _PLANES = 254, 258, 262, 277, 284
_EXTRA, _NUMBERS, _LARGEST, _LARGEST_OF_ANY = 338, 339, 281, 341
_WHITE_IS_ZERO = 0
_COLOURS = {_WHITE_IS_ZERO: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
_ALPHA = ((1,), (2,))
_STRIPS, _TILES, _BIG_MOTOROLA = 273, 324, b"MM\0+"
_SIGNED, _FLOATING, _APART = 2, (3, 5, 6), 2


def read_image(
    path: Path, bits: int | None = None, *, upright: bool = False
) -> UInt8[np.ndarray, "height width 3"]:
    """Read a photograph as 8-bit RGB, whatever its colour space.

    Transparency is dropped.

    Args:
        path: The file.
        bits: Number of bits that a 16-bit image uses, such as 12 for values up to 4095. It is
            required unless the header states the range of values.
        upright: Turn it as the camera notes in EXIF. Not where masks or boxes belong to it: those
            of VOC, ADE20K and COCO are drawn on the pixels as they are stored.

    Raises:
        DataError: the file is missing, empty, cut short, no image, several, or too large, or its
            values leave open what is white.
    """
    return decode_image(_bytes_of(path), path, bits, upright=upright)


def file_orientation(path: Path) -> bytes:
    """How the pixels of a file are to be turned, as EXIF's digit."""
    return b"%d" % _orientation_of(_bytes_of(path))


def _orientation_of(data: bytes) -> int:
    """EXIF's number, 2 to 8, where pixels as they are decoded are not upright; else 1."""
    # A TIFF is decoded upright; of a PNG all pixels would be decoded to look for it.
    if _is_tiff(data) or (data[1:4] == b"PNG" and not any(mark in data for mark in _PNG_EXIF)):
        return 1
    try:
        with Image.open(io.BytesIO(data), formats=_formats(data)) as image:
            found = image.getexif().get(_ORIENTATION, 1)
    # What damaged files make Pillow raise is anything; whoever decodes them says so.
    except Exception as error:
        reraise_out_of_memory(error)
        return 1
    return found if found in range(2, 9) else 1


def decode_image(
    data: bytes, name: str | Path, bits: int | None = None, *, upright: bool = False
) -> UInt8[np.ndarray, "height width 3"]:
    """Decode the bytes of a file as `read_image` does. Error messages contain `name`."""
    pixels = _decode_usual_jpeg(data, name)
    if pixels is None:
        pixels = _to_rgb(_decode(data, name), data, name, bits)
    orientation = _orientation_of(data) if upright else 1
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    right = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::down, ::right])


def read_mask_colours(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    """Read a mask that has a colour for each class, refused where it was saved with loss."""
    data = _bytes_of(path)
    return _to_rgb(_decode_mask(data, path), data, path, bits=16)


def read_indices(path: Path, *, of_voc: bool = False) -> Integer[np.ndarray, "height width"]:
    """Read the numbers that a mask stores; a palette is never turned into colours.

    Args:
        path: The file.
        of_voc: A colour of VOC in its palette means VOC's class. Elsewhere it does so only beside
            the colour of VOC's rims, which nobody else has.

    Raises:
        DataError: as `read_image`, for a mask that was not saved without loss, one that holds
            colours instead of class numbers, and a palette in another order than VOC's.
    """
    return decode_indices(_bytes_of(path), path, of_voc=of_voc)


def decode_indices(
    data: bytes, name: str | Path, *, of_voc: bool = False
) -> Integer[np.ndarray, "height width"]:
    """Decode the bytes of a mask as `read_indices` does. Error messages contain `name`."""
    image = _decode_mask(data, name)
    if image.mode not in _INDEXED:
        raise DataError(
            f"{name} holds colours ({image.mode}) instead of one class number a pixel; "
            "take the masks as they were published"
        )
    if image.mode == "P":
        _require_order_of_voc(image, name, of_voc=of_voc)
    return _stored(image, data, name)


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; see docs/data.md for the layout") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); fetch it again") from error


def _decode_mask(data: bytes, name: str | Path) -> Image.Image:
    """The one way in of all masks."""
    image = _decode(data, name)
    kind = str(image.format)
    is_lossy = kind in _JPEG or (kind == "WEBP" and not _is_lossless_webp(data))
    if is_lossy or image.info.get("compression") in _LOSSY_IN_TIFF:
        kind = {"MPO": "JPEG", "WEBP": "lossy WebP", "TIFF": "TIFF of lossy parts"}.get(kind, kind)
        raise DataError(
            f"{name} is a {kind}, which changes numbers and colours at every edge; take the masks "
            "as they were published, or save them without loss, as PNG"
        )
    return image


def _is_lossless_webp(data: bytes) -> bool:
    place = 12
    while (kind := data[place : place + 4]) not in (b"VP8 ", b"VP8L", b"ANMF", b""):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8 + size + size % 2
    return kind == b"VP8L"


def _decode(data: bytes, name: str | Path) -> Image.Image:
    try:
        if _is_tiff(data) and (other := _other_tiff(data)):
            raise _not_one_picture(name, other)
        with Image.open(io.BytesIO(data), formats=_formats(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UnreadableImage(
                    f"{name} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; "
                    "shrink it"
                )
            # Of a TIFF they were pages; a JPEG of a telephone has a small copy or a depth behind.
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format not in _JPEG | {"TIFF", "HEIF"}:
                raise _not_one_picture(name, f"a {image.format} of {frames} frames")
            image.load()
            return image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        if _is_tiff(data) and (kind := _unknown_tiff(data)):
            raise _not_one_picture(name, kind) from error
        for kind, brands, remedy in _DECODERS:
            if _brand(data) in brands and _formats(data) is _FORMATS:
                raise UnreadableImage(f"{name} is {kind} and needs {remedy}", remedy) from error
        problem = describe_substitute(data[:64]) or "is not an image; download it again"
        raise UnreadableImage(f"{name} {problem}") from error
    # Damaged files make the decoders raise OSError, SyntaxError, struct.error, IndexError ...
    except Exception as error:
        reraise_out_of_memory(error)
        raise UnreadableImage(
            f"{name} is damaged or cut short ({error}); fetch it again"
        ) from error


def _formats(data: bytes) -> tuple[str, ...]:
    """Of Pillow's formats those that a file may have; HEIC and AVIF where they can be read."""
    brand = _brand(data)
    if brand in _HEIC and _has_heif():
        return ("HEIF",)
    return ("AVIF",) if brand in _AVIF and features.check("avif") else _FORMATS


def _brand(data: bytes) -> bytes:
    """What a file of boxes, as HEIC and AVIF are, says it is."""
    brand = data[8:12] if data[4:8] == b"ftyp" else b""
    # A general name; those that it is compatible with tell more.
    is_avif = brand in (b"mif1", b"msf1") and b"avif" in data[16:64]
    return b"avif" if is_avif else brand


def _has_heif() -> bool:
    """Whether pillow-heif is there, which adds the format."""
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
        return True
    return False


def _decode_usual_jpeg(data: bytes, name: str | Path) -> UInt8[np.ndarray, "height width 3"] | None:
    """Grey or colour JPEG, equal to PIL's in every bit; None for everything else.

    Raises:
        UnreadableImage: pixels of it are missing, which PIL and OpenCV make up.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    # It raises KeyError for chroma subsampling that it does not know, such as 4:4:1.
    except Exception as error:
        reraise_out_of_memory(error)
        return None
    if int(height) * int(width) > MAX_PIXELS:
        return None
    for_print = colours in ("CMYK", "YCCK")
    wanted = "CMYK" if for_print else "RGB"
    try:
        try:
            pixels = simplejpeg.decode_jpeg(data, wanted, strict=True)
        except ValueError as error:
            # Cameras and websites leave bytes behind the last pixel.
            if "extraneous bytes before marker 0xd9" not in str(error):
                raise
            pixels = simplejpeg.decode_jpeg(data, wanted, strict=False)
    except ValueError as error:
        raise UnreadableImage(
            f"{name} is damaged or cut short ({error}); fetch it again"
        ) from error
    return None if for_print else pixels


def _not_one_picture(name: str | Path, what: str) -> UnreadableImage:
    return UnreadableImage(
        f"{name} is {what}, expected one picture, grey or RGB, of 8 or 16 bits; save what is to be "
        "seen of it so, as PNG"
    )


def _to_rgb(
    image: Image.Image, data: bytes, name: str | Path, bits: int | None
) -> UInt8[np.ndarray, "height width 3"]:
    if _largest_sample(image, data) > 255:
        image = _scale_to_8_bits(image, data, name, bits)
    if image.mode not in _EIGHT_BIT:
        raise UnreadableImage(f"{name} has the colour mode {image.mode}; save it as RGB")
    if image.mode == "P":
        # The direct conversion to RGB warns if the palette has transparent colours.
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _scale_to_8_bits(
    image: Image.Image, data: bytes, name: str | Path, bits: int | None
) -> Image.Image:
    """Scale samples of 9 to 16 bits so that white becomes 255.

    White is the largest sample that the header allows. A header that only gives 16 bits does not
    say whether all of them are used, so white is 2**bits - 1 there.
    """
    white: int | None = _largest_sample(image, data)
    is_colour = len(image.getbands()) > 1
    if image.format == "PPM" and white < _16_BITS:
        # Pillow has scaled the samples to 8 bits for colour and to 16 bits for grey.
        return image if is_colour else _divide(np.asarray(image), _16_BITS)
    is_stated = white < _16_BITS or b"sBIT" in data[: data.find(b"IDAT")]
    if not is_stated:
        white = None if bits is None else 2**bits - 1
    if is_colour and white == _16_BITS:
        # Pillow has dropped the lower 8 bits.
        return image
    samples = np.asarray(image)
    if is_colour:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if decoded is None or decoded.dtype != np.uint16 or decoded.ndim < 3:
            raise UnreadableImage(f"{name} has colours of 16 bits in a rare form; save it as PNG")
        samples = decoded[..., 2::-1]
    lowest, largest = int(samples.min()), int(samples.max())
    remedy = f"data.bits={min(16, max(8, largest.bit_length()))}"
    if white is None:
        raise UnreadableImage(
            f"{name} is a 16-bit image with values up to {largest}, and its header does not say "
            "which value is white",
            remedy,
            hint=(remedy, "or", "data.bits=16"),
        )
    if lowest < 0 or largest > white:
        can_be_set = not is_stated and 0 <= lowest <= largest <= _16_BITS
        raise UnreadableImage(
            f"{name} has values from {lowest} to {largest}, expected 0 to {white}",
            remedy if can_be_set else "",
            hint=(remedy,) if can_be_set else (),
        )
    if _is_inverted(image):
        samples = white - samples.astype(np.int64)
    return _divide(samples, white)


def _divide(samples: Integer[np.ndarray, "..."], white: int) -> Image.Image:
    return Image.fromarray((samples.astype(np.int64) * 255 // white).astype(np.uint8))


def _largest_sample(image: Image.Image, data: bytes) -> int:
    """Return the largest sample that the header of a file allows, at most 65,535."""
    if image.format == "PNG":
        return 2 ** data[24] - 1
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return min(_16_BITS, _largest_of_tiff(image))
    if image.format == "PPM" and image.mode != "1":
        return int(re.sub(rb"#[^\r\n]*", b"", data[:1000]).split(None, 4)[3])
    return 255


def _stored(
    image: Image.Image, data: bytes, name: str | Path
) -> Integer[np.ndarray, "height width"]:
    """The numbers of a mask as the file has them, which PIL spreads where they use few bits."""
    if image.mode not in ("1", "P") and _is_inverted(image):
        raise DataError(f"{name} is a TIFF with zero for white; save the mask as PNG")
    values = np.array(image)
    if image.mode in ("1", "P"):
        return values.astype(np.uint8)
    full, spread = _largest_sample(image, data), 255 if image.mode == "L" else _16_BITS
    if image.format == "PPM" or full < 255:
        return (values.astype(np.int64) * full + spread // 2) // spread
    return values


def read_palette(path: Path) -> dict[tuple[int, int, int], int]:
    """Return the number of each colour that occurs once in a palette. Other files have none.

    Only the header is decoded. A file without a header has no palette either.
    """
    try:
        with Image.open(io.BytesIO(_bytes_of(path)), formats=_FORMATS) as image:
            palette = image.palette.palette if image.mode == "P" and image.palette else b""
    except DataError:
        raise
    # Damaged files make Pillow raise anything. `read_indices` reports them.
    except Exception as error:
        reraise_out_of_memory(error)
        return {}
    colours = [(*palette[i : i + 3],) for i in range(0, len(palette) - 2, 3)]
    counts = Counter(colours)
    return {(r, g, b): n for n, (r, g, b) in enumerate(colours) if counts[r, g, b] == 1}


def voc_colours() -> UInt8[np.ndarray, "256 3"]:
    """VOC's colours of classes 0 to 255: three bits a channel, the high ones first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    # A row for each bit of a channel, of which a number of 8 bits fills two and two thirds.
    rows = np.pad(bits, ((0, 0), (0, 16))).reshape(256, 8, 3)
    return np.packbits(rows, axis=1)[:, 0]


def _require_order_of_voc(image: Image.Image, name: str | Path, *, of_voc: bool) -> None:
    used = np.unique(np.asarray(image))
    palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    voc = voc_colours()
    # Once: palettes are filled with black behind what they use.
    first = set(np.unique(palette, axis=0, return_index=True)[1].tolist())
    colours = {int(number): palette[number] for number in used if number in first}
    meant = {
        number: named
        for number, colour in colours.items()
        for named in _VOC_CLASSES
        if (colour == voc[named]).all()
    }
    wrong = [number for number, named in meant.items() if number != named]
    if wrong and (of_voc or 255 in meant.values()):
        number = wrong[0]
        raise DataError(
            f"{name} stores {number} where its palette has VOC's colour of {meant[number]}, "
            f"{colours[number].tolist()}: somebody put the palette in another order; take the "
            "masks as they were published"
        )


def _is_tiff(data: bytes) -> bool:
    return data.startswith(tuple(TiffImagePlugin.PREFIXES))


def _other_tiff(data: bytes) -> str | None:
    """What a TIFF is that is no picture of one, three or four bands; None where it is.

    One more band than there are colours is transparency, and dropped as such.
    """
    if data.startswith(_BIG_MOTOROLA):
        return "a BigTIFF with high bytes first"
    pages = _tiff_pages(data)
    whole = [page for page in pages if not page.get(_KIND, 0) & _PARTS]
    if len(whole) > 1:
        return f"a TIFF of {len(whole)} pages"
    page = (whole or pages)[0]
    bands, bits, numbers = page.get(_BANDS, 1), _tiff_bits(page), page.get(_NUMBERS, (1,))
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


def _unknown_tiff(data: bytes) -> str | None:
    """What a TIFF is that is whole and cannot be decoded all the same."""
    page = _tiff_pages(data)[0]
    if not {_STRIPS, _TILES} & set(page):
        return None
    return f"a TIFF of {_tiff_bits(page)} bits and {page.get(_BANDS, 1)} band(s)"


def _largest_of_tiff(image: TiffImagePlugin.TiffImageFile) -> int:
    """The largest number that a sample can be, which tags may say to be less than fits its bits."""
    page = image.tag_v2
    stated = [page[tag] for tag in (_LARGEST, _LARGEST_OF_ANY) if tag in page]
    found = {int(max(one if isinstance(one, tuple) else (one,))) for one in stated}
    # Any other number is the largest that happens to be in the picture.
    limits = [one for one in found if one > 255 and one & (one + 1) == 0]
    return min([2 ** _tiff_bits(page) - 1, *limits])


def _is_inverted(image: Image.Image) -> bool:
    """Whether zero is white in a TIFF."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    return image.tag_v2.get(_PHOTOMETRIC, _WHITE_IS_ZERO) == _WHITE_IS_ZERO


def _tiff_bits(page: Mapping[int, Any]) -> int:
    """Bits of a sample; the most of all bands."""
    return max(page.get(_BITS, (1,)))


def _tiff_pages(data: bytes) -> list[Directory]:
    # 16 bytes where it is a BigTIFF.
    file, header = io.BytesIO(data), data[: 16 if data[2] == 43 else 8]
    pages, seen = [Directory(header)], set[int]()
    while (place := pages[-1].next) and place not in seen:
        seen.add(place)
        file.seek(place)
        pages.append(Directory(header))
        pages[-1].load(file)
    return pages[1:]
