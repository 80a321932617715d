"""Test that image files are decoded to RGB."""

import io
import itertools
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.files.images import decode_image, read_image
from ssl_bench.errors import DataError, UnreadableImageError

END = b"\xff\xd9"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "usual": ("RGB", {}),
    "grey": ("L", {}),
    "whole colours": ("RGB", {"subsampling": 0}),
    "half colours": ("RGB", {"subsampling": 1}),
    "coarse": ("RGB", {"quality": 20}),
    "rgb": ("RGB", {"keep_rgb": True}),
    "restarts": ("RGB", {"restart_marker_blocks": 2}),
    "progressive": ("RGB", {"progressive": True}),
    "progressive grey": ("L", {"progressive": True}),
    "progressive restarts": ("RGB", {"progressive": True, "restart_marker_blocks": 2}),
    "cmyk": ("CMYK", {}),
    "progressive cmyk": ("CMYK", {"progressive": True}),
}
# The last scan of the last kind contains only black ink. These images have none, so nothing is lost
# if this scan is cut.
every_kind = pytest.mark.parametrize("kind", list(KINDS)[:-1])


def jpeg(kind: str, width: int, height: int) -> bytes:
    mode, options = KINDS[kind]
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    memory = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).convert(mode).save(memory, "JPEG", **options)
    return memory.getvalue()


def pil_pixels(content: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(content)).convert("RGB"))


def test_missing_files_and_other_files_are_named(tmp_path):
    (tmp_path / "noise.jpg").write_bytes(b"\x00\x01 nothing")
    (tmp_path / "folder.jpg").mkdir()
    for name in ("none.jpg", "folder.jpg", "noise.jpg"):
        with pytest.raises(DataError, match=name):
            read_image(tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_jpegs_of_all_kinds_have_the_pixels_that_pil_finds(kind):
    for size in ((48, 40), (1, 1), (17, 33), (250, 3)):
        content = jpeg(kind, *size)
        pixels = decode_image(content, "one.jpg")
        np.testing.assert_array_equal(pixels, pil_pixels(content))
        assert pixels.flags.writeable


def test_a_large_jpeg_is_refused_before_it_is_decoded(monkeypatch):
    content = bytearray(jpeg("usual", 9, 7))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = b"\xff\xff\xff\xff"
    monkeypatch.delattr(cv2, "imdecode")

    with pytest.raises(DataError, match=r"big\.jpg has 65535 x 65535 pixels|big\.jpg is damaged"):
        decode_image(bytes(content), "big.jpg")


def with_sampling(content: bytes, *factors: int) -> bytes:
    """Change the chroma subsampling factors in the header of a JPEG file."""
    changed = bytearray(content)
    start = content.index(b"\xff\xc0") + 11
    changed[start : start + 9 : 3] = bytes(factors)
    return bytes(changed)


def test_a_jpeg_of_any_sampling_factors_is_decoded_or_refused():
    noise = jpeg("whole colours", 40, 33)
    # All blocks of a uniform image have the same code, so fewer blocks make a complete file, too.
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(buffer, "JPEG", subsampling=0)
    uniform = buffer.getvalue()
    factors = [columns << 4 | rows for columns in (1, 2, 3, 4) for rows in (1, 2, 3, 4)]
    decoded = []

    for luma, chroma, content in itertools.product(factors, factors, (noise, uniform)):
        changed = with_sampling(content, luma, chroma, chroma)
        try:
            pixels = decode_image(changed, "one.jpg")
        except UnreadableImageError:
            continue
        np.testing.assert_array_equal(pixels, pil_pixels(changed))
        decoded.append((luma, chroma))
    # 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:4:1.
    assert {(luma, 0x11) for luma in (0x11, 0x21, 0x22, 0x12, 0x41, 0x14)} <= set(decoded)


@every_kind
def test_a_cut_jpeg_with_an_end_marker_is_refused(kind):
    content = jpeg(kind, 24, 16)
    whole = decode_image(content, "one.jpg")
    start = content.rindex(b"\xff\xda")

    refused = 0
    # Cut only within the last scan, because nothing shows that a whole scan is missing.
    for cut in range(start + 2, len(content) - 2):
        try:
            pixels = decode_image(content[:cut] + END, "one.jpg")
        except UnreadableImageError:
            refused += 1
        else:
            np.testing.assert_array_equal(pixels, whole)
    assert refused > 0.9 * (len(content) - 2 - start)
    large = jpeg(kind, 300, 200)
    with pytest.raises(UnreadableImageError):
        decode_image(large[: int(0.99 * len(large))] + END, "one.jpg")


def test_a_wrong_restart_marker_is_refused():
    content = jpeg("usual", 300, 200)
    middle = (content.rindex(b"\xff\xda") + len(content)) // 2

    with pytest.raises(UnreadableImageError):
        decode_image(content[:middle] + b"\xff\xd3" + content[middle + 2 :], "one.jpg")


@every_kind
def test_bytes_around_the_end_marker_do_no_harm(kind):
    content = jpeg(kind, 40, 24)
    whole = decode_image(content, "one.jpg")

    for end in (END + b"more" + END, b"\xff" * 5 + END, bytes(20) + END, b"\xff\xd0" + END):
        np.testing.assert_array_equal(decode_image(content[:-2] + end, "one.jpg"), whole)


@pytest.mark.data
@pytest.mark.slow
def test_whole_photographs_equal_pil_and_truncated_ones_are_refused(photos):
    paths = [path for path in sorted(photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]

    assert len(paths) > 3000
    for path in paths[::5]:
        content = path.read_bytes()
        np.testing.assert_array_equal(read_image(path), pil_pixels(content), str(path))
        with pytest.raises(UnreadableImageError):
            decode_image(content[: len(content) // 2] + END, path)
