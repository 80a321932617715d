"""Every file becomes RGB or a `DataError` that names it; masks stay numbers."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ssl_bench.data.files.images import MAX_PIXELS, decode_image, read_image, read_indices
from ssl_bench.errors import DataError

RED, GREY = (250, 10, 20), (7, 7, 7)


def saved(folder: Path, image: Image.Image, suffix: str = ".png", **options: Any) -> Path:
    path = folder / f"one{suffix}"
    image.save(path, **options)
    return path


def palette_image(indices: np.ndarray, *, transparency: bytes | None = None) -> Image.Image:
    image = Image.fromarray(indices.astype(np.uint8))
    image.putpalette([*GREY, *RED])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


@pytest.mark.parametrize(
    ("image", "suffix", "expected"),
    [
        (Image.new("L", (3, 2), 7), ".png", GREY),
        (Image.new("1", (3, 2), 1), ".png", (255, 255, 255)),
        (Image.new("LA", (3, 2), (7, 0)), ".png", GREY),
        (Image.new("RGBA", (3, 2), (*RED, 0)), ".png", RED),
        (Image.new("CMYK", (3, 2), (0, 255, 255, 0)), ".tif", (255, 0, 0)),
        (palette_image(np.ones((2, 3))), ".png", RED),
        (palette_image(np.ones((2, 3)), transparency=b"\x00\x80"), ".png", RED),
    ],
    ids=["grey", "one bit", "grey with alpha", "alpha", "cmyk", "palette", "clear palette"],
)
@pytest.mark.filterwarnings("error")
def test_every_colour_mode_becomes_rgb(tmp_path, image, suffix, expected):
    pixels = read_image(saved(tmp_path, image, suffix))

    assert pixels.shape == (2, 3, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == expected).all()


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    values = np.array([[0, 256], [32768, 65535]], np.uint16)

    pixels = read_image(saved(tmp_path, Image.fromarray(values)))

    # By hand: value // 257.
    assert pixels[..., 0].tolist() == [[0, 0], [127, 255]]
    assert (pixels == pixels[..., :1]).all()


def test_floating_point_pixels_are_refused(tmp_path):
    image = Image.fromarray(np.full((2, 2), 0.5, np.float32))

    with pytest.raises(DataError, match=r"one\.tif is a TIFF of floating-point numbers"):
        read_image(saved(tmp_path, image, ".tif"))


def test_the_rotation_in_exif_is_not_applied(tmp_path):
    image = Image.new("RGB", (3, 2), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to view"

    assert read_image(saved(tmp_path, image, ".jpg", exif=exif)).shape == (2, 3, 3)


def test_the_pixels_can_be_written_to(tmp_path):
    assert read_image(saved(tmp_path, Image.new("RGB", (3, 2)))).flags.writeable


def test_indices_of_a_palette_mask_are_never_colours(tmp_path):
    indices = np.array([[0, 1], [1, 0], [0, 0]])

    stored = read_indices(saved(tmp_path, palette_image(indices)))

    assert stored.tolist() == indices.tolist()


def test_a_mask_of_one_bit_gives_zero_and_one(tmp_path):
    stored = read_indices(saved(tmp_path, Image.new("1", (3, 2), 1)))

    assert stored.dtype == np.uint8
    assert (stored == 1).all()


def test_a_mask_of_colours_is_refused(tmp_path):
    path = saved(tmp_path, Image.new("RGB", (3, 2), RED))

    with pytest.raises(DataError, match=r"one\.png holds colours \(RGB\)"):
        read_indices(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><p>404", "web page"),
        (b"\x00\x01 nothing", "is not an image"),
    ],
    ids=["empty", "html", "noise"],
)
def test_what_is_no_image_is_named(tmp_path, content, complaint):
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)

    with pytest.raises(DataError, match=complaint) as caught:
        read_image(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jpg does not exist"):
        read_image(tmp_path / "none.jpg")
    with pytest.raises(DataError, match="cannot be read"):
        read_image(tmp_path)


@pytest.mark.parametrize("kept", [0.5, 0.99, -2])
def test_a_jpeg_that_is_cut_short_is_refused(tmp_path, kept):
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    path = saved(tmp_path, Image.fromarray(noise), ".jpg")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if kept > 0 else int(kept)])

    with pytest.raises(DataError, match=r"one\.jpg is damaged or cut short"):
        read_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    side = int(MAX_PIXELS**0.5) + 1
    path = saved(tmp_path, Image.new("1", (side, side)))
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))

    with pytest.raises(DataError, match=f"{side} x {side} pixels"):
        read_image(path)


def encoded(kind: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    memory = io.BytesIO()
    Image.fromarray(noise).save(memory, kind)
    return memory.getvalue()


DAMAGED = st.tuples(
    st.sampled_from([encoded("JPEG"), encoded("PNG"), encoded("GIF"), encoded("TIFF")]),
    st.integers(0, 2000),
    st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 255)), max_size=6),
)


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damaged=DAMAGED)
def test_damage_ends_in_pixels_or_a_data_error(tmp_path, damaged):
    content, length, flips = damaged
    altered = bytearray(content)
    for position, value in flips:
        altered[position % len(altered)] = value
    path = tmp_path / "damaged"
    path.write_bytes(bytes(altered[:length]))

    with suppress(DataError):
        assert read_image(path).ndim == 3


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
    if mode != "RGB" and "keep_rgb" in options:
        pytest.skip("an option for RGB only")
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(size).convert(mode).save(buffer, "JPEG", **options)

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


@pytest.mark.data
def test_real_photographs_are_read_as_stored(photos):
    path = photos / "VOCdevkit/VOC2012/JPEGImages/2011_000003.jpg"

    pixels = read_image(path)

    assert pixels.shape == (338, 500, 3)
    assert np.array_equal(pixels, np.asarray(Image.open(path)))
