"""Read image files as 8-bit RGB, and mask files as the numbers that they store."""

import io
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from jaxtyping import Integer, UInt8
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, features
from PIL.ExifTags import Base as Tag
from PIL.TiffImagePlugin import ImageFileDirectory_v2 as Directory

from ssl_bench.errors import DataError, UnreadableImageError
from ssl_bench.system.files import describe_substitute, read_regular
from ssl_bench.system.process import reraise_out_of_memory

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".avif", ".heic", ".heif", ".hif"),
)
"""Suffixes of the files that `read_image` decodes, in lower case."""

_MAX_PIXELS = 89_478_485
_16_BITS = 65535
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_MASK_MODES = frozenset({"1", "L", "P", "I;16", "I;16L", "I;16B", "I;16N", "I"})
# Pillow supports forty more formats, some of which start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
# Pillow calls a JPEG with further images, such as a depth map, an MPO.
_JPEG = frozenset({"JPEG", "MPO"})
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF = frozenset({b"avif", b"avis"})
_OPTIONAL_FORMATS = (
    ("HEIC", _HEIC, "pip install 'ssl-bench[heic]'"),
    ("AVIF", _AVIF, "pip install 'pillow>=11.3'"),
)
# Chunks of a PNG that may state an orientation.
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
_LOSSY_FORMATS = frozenset({*_JPEG, "AVIF", "HEIF"})
_LOSSY_NAMES = {"MPO": "JPEG", "HEIF": "HEIC", "WEBP": "lossy WebP", "TIFF": "lossy TIFF"}
_LOSSY_COMPRESSIONS = frozenset({"jpeg", "tiff_jpeg", "webp"})
_VOC_CLASSES = (*range(21), 255)


def read_image(
    path: Path, bits: int | None = None, *, apply_exif_orientation: bool = False
) -> UInt8[np.ndarray, "height width 3"]:
    """Read an image file as 8-bit RGB. Transparency is dropped.

    Args:
        path: The image file.
        bits: Number of bits that a 16-bit image uses, such as 12 for values up to 4095. It is
            required unless the header of the file states the range of values.
        apply_exif_orientation: Whether to apply the EXIF orientation. Use False for images with
            masks or boxes. In VOC, ADE20K and COCO, masks and boxes refer to the pixels as they are
            stored.

    Raises:
        DataError: The file is missing.
        UnreadableImageError: The file is empty, truncated or too large, does not contain exactly
            one image, or contains 16-bit values in an unknown range.
    """
    data = read_data_file(path)
    decode = decode_oriented if apply_exif_orientation else decode_image
    return decode(data, path, bits)


def decode_oriented(
    data: bytes, name: str | Path, bits: int | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """Decode the bytes of an image file to 8-bit RGB, and apply the EXIF orientation.

    Args:
        data: The bytes.
        name: Name of the file, for error messages.
        bits: Number of bits that a 16-bit image uses, such as 12 for values up to 4095. It is
            required unless the header states the range of values.

    Raises:
        UnreadableImageError: The image cannot be decoded.
    """
    pixels = decode_image(data, name, bits)
    orientation = _read_orientation(data)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    row_step = -1 if orientation in (3, 4, 7, 8) else 1
    column_step = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::row_step, ::column_step])


def file_orientation(path: Path) -> bytes:
    """Return the EXIF orientation of an image file as an ASCII digit from 1 to 8."""
    return b"%d" % _read_orientation(read_data_file(path))


def _read_orientation(data: bytes) -> int:
    # Pillow already rotates a TIFF when it decodes the pixels. A PNG is only searched for an
    # orientation if it has a suitable chunk, because Pillow would decode all of its pixels to find
    # one.
    if _is_tiff(data) or (data[1:4] == b"PNG" and not any(chunk in data for chunk in _PNG_EXIF)):
        return 1
    try:
        with Image.open(io.BytesIO(data), formats=_possible_formats(data)) as image:
            orientation = image.getexif().get(Tag.Orientation, 1)
    # A damaged file is reported when its pixels are decoded.
    except Exception as error:
        reraise_out_of_memory(error)
        return 1
    return orientation if orientation in range(2, 9) else 1


def decode_image(
    data: bytes, name: str | Path, bits: int | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """Decode the bytes of an image file to 8-bit RGB, without applying the EXIF orientation.

    Args:
        data: The bytes.
        name: Name of the file, for error messages.
        bits: Number of bits that a 16-bit image uses, such as 12 for values up to 4095. It is
            required unless the header states the range of values.

    Raises:
        UnreadableImageError: The image cannot be decoded.
    """
    with _add_name_to_errors(name):
        pixels = _decode_jpeg(data)
        return _to_rgb(_open(data, name), data, name, bits) if pixels is None else pixels


def read_mask_colours(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    """Read a mask file with one colour per class. Return the mask as 8-bit RGB.

    Raises:
        DataError: The file cannot be read, or was saved with a lossy compression.
    """
    data = read_data_file(path)
    with _add_name_to_errors(path):
        return _to_rgb(_open_mask(data, path), data, path, bits=16)


def read_integer_image(
    path: Path, *, has_voc_palette: bool = False, content: str = "one class number per pixel"
) -> Integer[np.ndarray, "height width"]:
    """Read the numbers that a mask file stores. The colour palette of the file is not applied.

    Args:
        path: The mask file.
        has_voc_palette: Whether the mask belongs to PASCAL VOC, so that its palette is compared
            with VOC's palette. If False, the palettes are only compared if the mask contains VOC's
            colour of object borders, which no other dataset uses.
        content: Expected content of the file, for error messages.

    Raises:
        DataError: The file cannot be read, was saved with a lossy compression, stores colours
            instead of numbers, or has VOC's palette in another order.
    """
    data = read_data_file(path)
    return decode_integer_image(data, path, has_voc_palette=has_voc_palette, content=content)


def decode_integer_image(
    data: bytes,
    name: str | Path,
    *,
    has_voc_palette: bool = False,
    content: str = "one class number per pixel",
) -> Integer[np.ndarray, "height width"]:
    """Decode the bytes of a mask file to the numbers that it stores.

    Args:
        data: The bytes.
        name: Name of the file, for error messages.
        has_voc_palette: Whether the mask belongs to PASCAL VOC, so that its palette is compared
            with VOC's palette. If False, the palettes are only compared if the mask contains VOC's
            colour of object borders.
        content: Expected content of the file, for error messages.

    Raises:
        DataError: The file cannot be decoded, was saved with a lossy compression, stores colours
            instead of numbers, or has VOC's palette in another order.
    """
    with _add_name_to_errors(name):
        image = _open_mask(data, name)
        if image.mode not in _MASK_MODES:
            raise DataError(
                f"{name} stores colours ({image.mode}), expected {content}. Use the files as "
                "published"
            )
        if image.mode == "P":
            _check_voc_palette(image, name, has_voc_palette=has_voc_palette)
        return _stored_numbers(image, data, name)


def read_data_file(path: Path) -> bytes:
    """Return the content of a file. Raise DataError if the file is missing or cannot be read."""
    try:
        return read_regular(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. See docs/data.md for the layout") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


@contextmanager
def _add_name_to_errors(name: str | Path) -> Generator[None]:
    """Convert exceptions of image decoders in a `with` block to `UnreadableImageError`.

    For damaged files, decoders raise OSError, ValueError, SyntaxError, struct.error and others. The
    message of the new exception contains `name`, the name of the file.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reraise_out_of_memory(error)
        raise UnreadableImageError(
            f"{name} is damaged or cut short ({error}). Copy or download it again"
        ) from error


def _decode_jpeg(data: bytes) -> UInt8[np.ndarray, "height width 3"] | None:
    """Decode a grey or RGB JPEG to the same pixels as Pillow, but faster.

    Return None for a file that Pillow must decode, such as a PNG or a JPEG with CMYK colours.

    Raises:
        ValueError: The file is truncated. Pillow and OpenCV would fill the missing pixels.
    """
    try:
        height, width, colour_space, _ = simplejpeg.decode_jpeg_header(data)
    # simplejpeg raises KeyError for an unknown chroma subsampling, such as 4:4:1.
    except Exception as error:
        reraise_out_of_memory(error)
        return None
    if int(height) * int(width) > _MAX_PIXELS:
        return None
    is_cmyk = colour_space in ("CMYK", "YCCK")
    mode = "CMYK" if is_cmyk else "RGB"
    try:
        pixels = simplejpeg.decode_jpeg(data, mode, strict=True)
    except ValueError as error:
        # Some cameras and websites write additional bytes after the last pixel. This is no damage.
        if "extraneous bytes before marker 0xd9" not in str(error):
            raise
        pixels = simplejpeg.decode_jpeg(data, mode, strict=False)
    # For CMYK, simplejpeg was only used to check that the image is complete. Pillow must decode it,
    # because it converts the colours.
    return None if is_cmyk else pixels


def _open(data: bytes, name: str | Path) -> Image.Image:
    """Decode an image file with Pillow.

    Raises:
        UnreadableImageError: The file has too many pixels, an unsupported format, or more than one
            image.
    """
    if _is_tiff(data) and (kind := _describe_unsupported_tiff(data)):
        raise _not_one_image_error(name, kind)
    try:
        image = Image.open(io.BytesIO(data), formats=_possible_formats(data))
    except UnidentifiedImageError as error:
        raise _unidentified_image_error(data, name) from error
    with image:
        if image.width * image.height > _MAX_PIXELS:
            raise UnreadableImageError(
                f"{name} has {image.width} x {image.height} pixels, expected at most {_MAX_PIXELS}."
                " Shrink it"
            )
        # `_describe_unsupported_tiff` has already counted the pages of a TIFF. In a JPEG or HEIC,
        # the further frames may be a thumbnail or a depth map.
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format not in _JPEG | {"TIFF", "HEIF"}:
            raise _not_one_image_error(name, f"a {image.format} of {frames} frames")
        image.load()
        return image


def _unidentified_image_error(data: bytes, name: str | Path) -> UnreadableImageError:
    if _is_tiff(data) and {Tag.StripOffsets, Tag.TileOffsets} & set(page := _tiff_pages(data)[0]):
        bits, bands = _bits_per_sample(page), page.get(Tag.SamplesPerPixel, 1)
        return _not_one_image_error(name, f"a TIFF of {bits} bits and {bands} band(s)")
    for kind, brands, remedy in _OPTIONAL_FORMATS:
        if _read_brand(data) in brands and _possible_formats(data) is _FORMATS:
            return UnreadableImageError(f"{name} is {kind} and needs {remedy}", remedy)
    problem = describe_substitute(data[:64]) or "is not an image. Download it again"
    return UnreadableImageError(f"{name} {problem}")


def _not_one_image_error(name: str | Path, kind: str) -> UnreadableImageError:
    return UnreadableImageError(
        f"{name} is {kind}, expected one grey or RGB image with 8 or 16 bits per sample. Convert "
        "it, for example to PNG"
    )


def _possible_formats(data: bytes) -> tuple[str, ...]:
    """Return the names of the formats in which Pillow may try to decode an image file.

    The names are Pillow's, such as "PNG". HEIC and AVIF files are recognised by their header.
    """
    brand = _read_brand(data)
    if brand in _HEIC and _register_heif():
        return ("HEIF",)
    return ("AVIF",) if brand in _AVIF and features.check("avif") else _FORMATS


def _read_brand(data: bytes) -> bytes:
    """Return the brand of a HEIC or AVIF file, or b"" for other files.

    The brand is a code for the format in the header of the file, such as b"avif".
    """
    brand = data[8:12] if data[4:8] == b"ftyp" else b""
    # The brands mif1 and msf1 are general. A list of more specific brands follows them.
    is_avif = brand in (b"mif1", b"msf1") and b"avif" in data[16:64]
    return b"avif" if is_avif else brand


def _register_heif() -> bool:
    """Add support for HEIC to Pillow. Return False if pillow-heif is not installed."""
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
        return True
    return False


def _to_rgb(
    image: Image.Image, data: bytes, name: str | Path, bits: int | None
) -> UInt8[np.ndarray, "height width 3"]:
    # For 16-bit CMYK, Pillow keeps the upper 8 bits. Such files use all 16 bits, so this is
    # correct.
    if image.mode not in ("CMYK", "LAB") and _largest_sample(image, data) > 255:
        image = _scale_to_8_bits(image, data, name, bits)
    if image.mode not in _MODES:
        raise UnreadableImageError(f"{name} has the colour mode {image.mode}. Save it as RGB")
    if image.mode == "P":
        # The direct conversion to RGB warns if the palette has transparent colours.
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _scale_to_8_bits(
    image: Image.Image, data: bytes, name: str | Path, bits: int | None
) -> Image.Image:
    """Scale pixel values of 9 to 16 bits so that white becomes 255.

    The value of white is the largest value that the header allows, such as 4095. The header of a
    16-bit image usually does not state how many bits the image uses. For such an image, white is
    2**bits - 1.

    Raises:
        UnreadableImageError: The value of white is unknown, or a pixel has a larger value.
    """
    allowed, is_colour = _largest_sample(image, data), len(image.getbands()) > 1
    if image.format == "PPM" and allowed < _16_BITS:
        # Pillow has scaled colours to 8 bits, and grey values to 16 bits.
        return image if is_colour else _divide(np.asarray(image), _16_BITS)
    # The PNG specification requires that samples use all 16 bits if the chunk sBIT is present.
    has_sbit = image.format == "PNG" and b"sBIT" in data[: data.find(b"IDAT")]
    is_stated = allowed < _16_BITS or has_sbit
    white = allowed if is_stated else None
    if white is None and bits is not None:
        white = 2**bits - 1
    if is_colour and white == _16_BITS:
        # Pillow has dropped the lower 8 bits, so the image has 8 bits already.
        return image
    samples = np.asarray(image)
    if is_colour:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if decoded is None or decoded.dtype != np.uint16 or decoded.ndim < 3:
            raise UnreadableImageError(
                f"{name} has 16-bit colours in an unsupported form. Save it as PNG"
            )
        samples = decoded[..., 2::-1]
    lowest, largest = int(samples.min()), int(samples.max())
    remedy = f"data.bits={min(16, max(8, largest.bit_length()))}"
    if white is None:
        raise UnreadableImageError(
            f"{name} is a 16-bit image with values up to {largest}, and its header does not say "
            "which value is white",
            remedy,
            hint=(remedy, "or", "data.bits=16"),
        )
    if lowest < 0 or largest > white:
        can_be_set = not is_stated and 0 <= lowest <= largest <= _16_BITS
        raise UnreadableImageError(
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
    """Return the largest pixel value that the header of an image file allows.

    For example, the largest value of a 4-bit PNG is 15. For more than 16 bits, 65,535 is returned.
    """
    if image.format == "PNG":
        return 2 ** data[24] - 1
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return min(_16_BITS, _largest_tiff_sample(image.tag_v2))
    if image.format == "PPM" and image.mode != "1":
        # The header contains width, height and the largest sample, after blanks and comments.
        match = re.match(rb"P[2356]" + 3 * rb"(?:\s|#[^\r\n]*+)++(\d+)", data)
        assert match, "Pillow has decoded the image"
        return int(match[3])
    return 255


def _open_mask(data: bytes, name: str | Path) -> Image.Image:
    image = _open(data, name)
    kind = str(image.format)
    is_lossy_webp = kind == "WEBP" and not _is_lossless_webp(data)
    has_lossy_parts = image.info.get("compression") in _LOSSY_COMPRESSIONS
    if kind in _LOSSY_FORMATS or is_lossy_webp or has_lossy_parts:
        kind = _LOSSY_NAMES.get(kind, kind)
        raise DataError(
            f"{name} has the format {kind}, whose compression changes numbers and colours at edges."
            " Use the masks as published, or save them without loss, for example as PNG"
        )
    return image


def _is_lossless_webp(data: bytes) -> bool:
    start = 12
    while (chunk := data[start : start + 4]) not in (b"VP8 ", b"VP8L", b"ANMF", b""):
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        start += 8 + size + size % 2
    return chunk == b"VP8L"


def _stored_numbers(
    image: Image.Image, data: bytes, name: str | Path
) -> Integer[np.ndarray, "height width"]:
    """Return the numbers that a mask file stores.

    For some formats, Pillow scales the numbers to 8 or 16 bits. This scaling is undone.
    """
    # If zero is white in a TIFF, some programs invert its numbers and others do not.
    if _is_inverted(image):
        raise DataError(
            f"{name} is a TIFF in which zero is white, so its class numbers may be inverted. Save "
            "the mask as PNG"
        )
    if image.mode in ("1", "P"):
        return np.array(image).astype(np.uint8)
    largest, scaled_to = _largest_sample(image, data), 255 if image.mode == "L" else _16_BITS
    if image.format == "PPM" or largest < 255:
        return (np.asarray(image).astype(np.int64) * largest + scaled_to // 2) // scaled_to
    return np.array(image)


def read_palette(path: Path) -> dict[tuple[int, int, int], int]:
    """Return the index of each RGB colour in the palette of a mask file.

    Colours that occur twice are left out. For a file without a palette or with a damaged header,
    the result is empty. Only the header is decoded.
    """
    try:
        with Image.open(io.BytesIO(read_data_file(path)), formats=_FORMATS) as image:
            palette = image.palette.palette if image.mode == "P" and image.palette else b""
    except DataError:
        raise
    # Pillow raises errors of many types for damaged files. `read_integer_image` reports them.
    except Exception as error:
        reraise_out_of_memory(error)
        return {}
    colours = [(*palette[i : i + 3],) for i in range(0, len(palette) - 2, 3)]
    counts = Counter(colours)
    return {(r, g, b): n for n, (r, g, b) in enumerate(colours) if counts[r, g, b] == 1}


def voc_colours() -> UInt8[np.ndarray, "256 3"]:
    """Return PASCAL VOC's colour palette: the RGB colour for each number from 0 to 255."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    # Bit k of a number is bit 7 - k // 3 of channel k % 3. In this array, each row contains one bit
    # of each of the three channels.
    rows = np.pad(bits, ((0, 0), (0, 16))).reshape(256, 8, 3)
    return np.packbits(rows, axis=1)[:, 0]


def _check_voc_palette(image: Image.Image, name: str | Path, *, has_voc_palette: bool) -> None:
    """Raise DataError if a mask stores a colour of VOC's palette under a different number.

    Some image editors sort or compress palettes. The visible colours stay the same, but the stored
    class numbers change.

    Args:
        image: The mask.
        name: Name of the file, for the error message.
        has_voc_palette: Whether the mask belongs to PASCAL VOC. If False, the palette is only
            checked if the mask contains VOC's colour of object borders.
    """
    palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    voc = voc_colours()
    # The end of a palette is filled with black, so only the first entry of each colour counts.
    first_entries = set(np.unique(palette, axis=0, return_index=True)[1].tolist())
    numbers = [n for n in np.unique(np.asarray(image)).tolist() if n in first_entries]
    meanings = {
        number: voc_class
        for number in numbers
        for voc_class in _VOC_CLASSES
        if (palette[number] == voc[voc_class]).all()
    }
    moved = [number for number, voc_class in meanings.items() if number != voc_class]
    if moved and (has_voc_palette or 255 in meanings.values()):
        number = moved[0]
        raise DataError(
            f"{name} stores {number} for the colour {palette[number].tolist()}, expected "
            f"{meanings[number]} as in VOC's palette. A tool has changed the order of the palette. "
            "Use the masks as published"
        )


# TIFF files.

# Pillow cannot read big-endian 16-bit samples in which zero is white.
TiffImagePlugin.OPEN_INFO.setdefault((b"MM", 0, (1,), 1, (16,), ()), ("I;16B", "I;16B"))
_BIG_ENDIAN_BIGTIFF = b"MM\0+"
# Bits of NewSubfileType: the page is a thumbnail or a transparency mask of another page.
_SECONDARY_PAGE = 0b101
_WHITE_IS_ZERO = 0
_NUM_COLOURS = {_WHITE_IS_ZERO: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
_ALPHA = ((1,), (2,))
_SIGNED, _FLOATING, _SEPARATE_PLANES = 2, (3, 5, 6), 2


def _is_tiff(data: bytes) -> bool:
    return data.startswith(tuple(TiffImagePlugin.PREFIXES))


def _describe_unsupported_tiff(data: bytes) -> str | None:
    """Return a description of a TIFF that cannot be read as one image, or None for other TIFFs.

    For example, the description is "a TIFF of 3 pages". A TIFF with one additional band, such as
    transparency, is supported.
    """
    if data.startswith(_BIG_ENDIAN_BIGTIFF):
        return "a big-endian BigTIFF"
    pages = _tiff_pages(data)
    images = [page for page in pages if not page.get(Tag.NewSubfileType, 0) & _SECONDARY_PAGE]
    if len(images) > 1:
        return f"a TIFF of {len(images)} pages"
    page = (images or pages)[0]
    bands, bits = page.get(Tag.SamplesPerPixel, 1), _bits_per_sample(page)
    sample_formats = page.get(Tag.SampleFormat, (1,))
    photometric = page.get(Tag.PhotometricInterpretation, _WHITE_IS_ZERO)
    if photometric not in _NUM_COLOURS:
        return f"a TIFF with the photometric interpretation {photometric}"
    has_alpha = page.get(Tag.ExtraSamples) in _ALPHA
    if bands > _NUM_COLOURS[photometric] + 1 or (bands == 2 and not has_alpha):
        return f"a TIFF of {bands} bands"
    if any(sample_format in _FLOATING for sample_format in sample_formats):
        return f"a TIFF with {bits}-bit floating-point numbers"
    if _SIGNED in sample_formats and bits == 8:
        return "a TIFF with signed 8-bit numbers"
    if bits == 16 and bands > 1 and page.get(Tag.PlanarConfiguration) == _SEPARATE_PLANES:
        return f"a 16-bit TIFF with its {bands} bands in separate planes"
    return None


def _largest_tiff_sample(page: Mapping[int, Any]) -> int:
    """Return the largest pixel value that the tags of a TIFF allow."""
    tags = (Tag.MaxSampleValue, Tag.SMaxSampleValue)
    values = [int(np.max(page[tag])) for tag in tags if tag in page]
    # Only trust a value of the form 2^n - 1. Other values are the largest sample of this image
    # instead of the largest sample that is allowed.
    limits = [value for value in values if value > 255 and value & (value + 1) == 0]
    return min([2 ** _bits_per_sample(page) - 1, *limits])


def _is_inverted(image: Image.Image) -> bool:
    """Return whether an image file stores white as 0. Only a TIFF can state this."""
    return isinstance(image, TiffImagePlugin.TiffImageFile) and (
        image.tag_v2.get(Tag.PhotometricInterpretation, _WHITE_IS_ZERO) == _WHITE_IS_ZERO
    )


def _bits_per_sample(page: Mapping[int, Any]) -> int:
    return max(page.get(Tag.BitsPerSample, (1,)))


def _tiff_pages(data: bytes) -> list[Directory]:
    """Return the tags of each page of a TIFF, including pages that Pillow cannot decode."""
    # The header of a BigTIFF has 16 bytes.
    file, header = io.BytesIO(data), data[: 16 if data[2] == 43 else 8]
    pages, offsets = [Directory(header)], set[int]()
    while (offset := pages[-1].next) and offset not in offsets:
        offsets.add(offset)
        file.seek(offset)
        pages.append(Directory(header))
        pages[-1].load(file)
    return pages[1:]
