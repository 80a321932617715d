"""Every file becomes RGB or a `DataError` that names it; masks stay numbers."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.files.images import decode_image, read_image, read_indices
from ssl_bench.errors import DataError


def test_a_mask_of_one_bit_gives_zero_and_one(tmp_path):
    Image.new("1", (3, 2), 1).save(tmp_path / "one.png")

    stored = read_indices(tmp_path / "one.png")

    assert stored.dtype == np.uint8
    assert (stored == 1).all()


def test_what_is_no_file_or_no_image_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jpg does not exist"):
        read_image(tmp_path / "none.jpg")
    with pytest.raises(DataError, match="cannot be read"):
        read_image(tmp_path)
    (tmp_path / "noise.jpg").write_bytes(b"\x00\x01 nothing")
    with pytest.raises(DataError, match=r"noise\.jpg is not an image"):
        read_image(tmp_path / "noise.jpg")


def pil_pixels(content: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("size", [(48, 40), (1, 1), (17, 33), (250, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"progressive": True},
        {"subsampling": 0},
        {"subsampling": 1},
        {"quality": 20},
        {"restart_marker_blocks": 2},
        {"keep_rgb": True},
    ],
    ids=str,
)
def test_jpegs_of_all_kinds_have_the_pixels_that_pil_finds(mode, size, options):
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    more = {} if mode != "RGB" and "keep_rgb" in options else options
    Image.fromarray(noise).resize(size).convert(mode).save(buffer, "JPEG", **more)

    pixels = decode_image(buffer.getvalue(), "one.jpg")

    np.testing.assert_array_equal(pixels, pil_pixels(buffer.getvalue()))
    assert pixels.flags.writeable


def test_a_large_jpeg_is_refused_before_it_is_decoded(monkeypatch):
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7)).save(buffer, "JPEG")
    content = bytearray(buffer.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = b"\xff\xff\xff\xff"
    monkeypatch.delattr(cv2, "imdecode")

    with pytest.raises(DataError, match=r"big\.jpg has 65535 x 65535 pixels|big\.jpg is damaged"):
        decode_image(bytes(content), "big.jpg")


@pytest.mark.data
@pytest.mark.slow
def test_every_real_photograph_has_the_pixels_that_pil_finds(photos):
    paths = [path for path in sorted(photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]

    assert len(paths) > 3000
    for path in paths:
        np.testing.assert_array_equal(read_image(path), pil_pixels(path.read_bytes()), str(path))
