"""Test that images and masks of every format are read correctly or refused."""

import io
import itertools
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, features

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import ReadOptions, with_read_options
from ssl_bench.data.files.images import (
    read_image,
    read_integer_image,
    read_mask_colours,
    voc_colours,
)
from ssl_bench.data.files.readable import describe_unreadable, find_read_errors, suggest_skipping
from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco_stuff import CocoStuff
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError, UnreadableImageError
from tests.support.faults import (
    class_folders,
    encoded,
    expect_error,
    make_pretrain_args,
    make_probe_args,
    mask,
    paired_folders,
    photo_folder,
    png_of,
    records,
    save_mask,
    voc,
)
from tests.support.spair import spair

GREY = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
COLOURS = np.stack([GREY, GREY[::-1], GREY.T], -1)
GREY_RGB = np.stack([GREY] * 3, -1)
MAX_SAMPLE, S_MAX_SAMPLE = 281, 341


def stretch(pixels: np.ndarray, bits: int) -> np.ndarray:
    # Round up, so that reading the image restores the 8-bit values.
    return -(-pixels.astype(np.int64) * (2**bits - 1) // 255).astype(np.uint16)


def tif(pixels: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def png(pixels: np.ndarray, bits: int = 16, *chunks: tuple[bytes, bytes]) -> bytes:
    kind = {1: 0, 2: 4, 3: 2}[pixels.shape[2] if pixels.ndim == 3 else 1]
    rows = [row.astype(">u2").tobytes() for row in pixels]
    if bits < 8:
        digits = np.unpackbits(pixels[..., None], axis=-1)[..., 8 - bits :]
        rows = [np.packbits(row).tobytes() for row in digits]
    header = struct.pack(">IIBBBBB", *pixels.shape[1::-1], bits, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return png_of((b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b""))


def pnm(pixels: np.ndarray, largest: int = 65535) -> bytes:
    header = f"P{5 if pixels.ndim == 2 else 6}\n# 9 9 9\n8 8\n{largest}\n"
    return header.encode() + pixels.astype(">u2" if largest > 255 else np.uint8).tobytes()


def write_file(content: bytes, name: str = "one.png") -> Path:
    path = Path(name)
    path.write_bytes(content)
    return path


FILES: dict[str, Callable[[np.ndarray], bytes]] = {
    "grey png": lambda values: png(values[..., 0]),
    "png": png,
    "grey tif": lambda values: tif(values[..., 0]),
    "big-endian tif": lambda values: tif(values[..., 0], byteorder=">"),
    "tif": lambda values: tif(values, photometric="rgb"),
    "32-bit grey tif": lambda values: tif(values[..., 0].astype(np.uint32)),
    "signed tif": lambda values: tif(values[..., 0].astype(np.int16)),
    "pgm": lambda values: pnm(values[..., 0]),
    "ppm": pnm,
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("bits", [10, 14, 15, 16])
def test_16_bit_images_need_the_number_of_used_bits(workdir, kind, bits):
    if (kind, bits) == ("signed tif", 16):
        pytest.skip("has 15 bits")
    path = write_file(FILES[kind](stretch(COLOURS, bits)))
    expected = COLOURS if kind in ("png", "tif", "ppm") else GREY_RGB

    with pytest.raises(UnreadableImageError, match=r"one\.png") as caught:
        read_image(path)
    assert caught.value.hint[0].startswith("data.bits=")
    assert "data.bits=16" in caught.value.hint
    # The advice to leave images out does not replace the other advice.
    hint = (*caught.value.hint, "or", "--on-bad-image", "skip")
    assert suggest_skipping(caught.value).hint == hint
    read = read_image(path, bits).astype(int)
    # Pillow drops the lower 8 bits of 16-bit colours.
    assert np.abs(read - expected).max() <= (bits == 16 and kind in ("png", "tif"))
    if bits == 10:
        assert read_image(path, 16).max() < 64


def test_grey_with_transparency_and_cmyk_have_16_bits_too(workdir):
    grey = stretch(GREY, 12)
    path = write_file(png(np.stack([grey, np.full_like(grey, 65535)], -1)))
    with pytest.raises(UnreadableImageError):
        read_image(path)
    assert np.array_equal(read_image(path, 16)[..., 0], grey >> 8)

    inks = np.stack([stretch(GREY, 16)] * 4, -1)
    shallow = Image.fromarray((inks >> 8).astype(np.uint8), "CMYK")
    path = write_file(tif(inks, photometric="separated"), "one.tif")
    assert np.array_equal(read_image(path), np.array(shallow.convert("RGB")))


def deep_class_folders(root: Path, bits: int) -> Path:
    for path in class_folders(root).rglob("*.jpg"):
        pixels = read_image(path)
        path.unlink()
        content = (
            encoded("PNG", Image.fromarray(pixels)) if bits == 8 else png(stretch(pixels, bits))
        )
        path.with_suffix(".png").write_bytes(content)
    return root


@pytest.mark.slow
def test_every_command_asks_for_the_bits_and_then_uses_them(workdir, capsys):
    deep = deep_class_folders(workdir / "deep", 12)
    words = make_probe_args("knn", "class_folders", deep)
    checking = ["data", "check", "class_folders", "--data-root", str(deep)]

    for command in (words, make_pretrain_args(deep, "run", "train.max_minutes=0.0"), checking):
        assert "data.bits=12" in expect_error(capsys, command, 3)
        assert main([*command, "data.bits=12", *["--overwrite"][: command[0] == "pretrain"]]) == 0
    assert "data.bits" in expect_error(capsys, [*checking, "data.bits=17"], 2)
    assert main([*words, "data.bits=16", "--out", "dark"]) == 0
    usual = deep_class_folders(workdir / "usual", 8)
    assert main(make_probe_args("knn", "class_folders", usual, "--out", "usual")) == 0

    values = {out: [r.value for r in records(out)] for out in ("results", "usual")}
    assert values["results"] == values["usual"]
    (read, dark) = ({r.dataset_fingerprint for r in records(out)} for out in ("results", "dark"))
    assert read.isdisjoint(dark)


def test_single_images_of_unknown_range_in_a_folder_are_skipped(workdir, capsys):
    photos = photo_folder(workdir / "mixed")
    (photos / "scan.png").write_bytes(png(GREY.astype(np.uint16) * 257, 16, (b"sBIT", b"\x10")))
    (photos / "cells.png").write_bytes(png(stretch(GREY, 12)))
    words = make_probe_args("pca", "folder", photos)

    assert main(words) == 0
    assert "1 needs data.bits=12: cells.png" in capsys.readouterr().err
    assert main([*words, "data.bits=12"]) == 0
    assert "using 6 images of folder" in capsys.readouterr().err


def test_an_image_that_is_readable_with_bits_is_not_taken_as_readable_without(workdir, monkeypatch):
    monkeypatch.setattr("ssl_bench.data.files.fingerprints.RACY_NS", -(10**18))
    (workdir / "deep").mkdir()
    write_file(png(stretch(GREY, 12)), "deep/one.png")
    images = ImageFolder("deep").images()
    for bits in (12, None, 12):
        (error,) = find_read_errors(with_read_options(images, ReadOptions(bits=bits)), {})
        assert (error is None) == (bits == 12)


def test_unreadable_images_are_counted_for_each_remedy(workdir):
    errors = [UnreadableImageError("-", remedy) for remedy in ("", "", "pip", *[""] * 5)]
    images = ImageFolder(photo_folder(workdir / "eight", 8)).images()
    unreadable, needy = describe_unreadable(images, errors)
    assert unreadable.startswith("7 ")
    assert unreadable.endswith("0.jpg, 1.jpg, 3.jpg, 4.jpg, 5.jpg and 2 more")
    assert needy == "1 needs pip: 2.jpg"


def test_the_range_that_a_file_states_is_used(workdir):
    deep = stretch(GREY, 12)
    tag = [(MAX_SAMPLE, 3, 1, 4095, True)]
    others = [(S_MAX_SAMPLE, 3, 1, 4095, True)]
    in_three = [(MAX_SAMPLE, 3, 3, (4095,) * 3, True)]

    for content in (tif(deep, extratags=tag), tif(deep, extratags=others), pnm(deep, 4095)):
        for bits in (None, 10, 16):
            assert np.array_equal(read_image(write_file(content), bits), GREY_RGB)
    commented = pnm(deep, 4095).replace(b"# 9 9 9", b"#" + b" 9" * 1000)
    assert np.array_equal(read_image(write_file(commented)), GREY_RGB)
    coloured = tif(stretch(COLOURS, 12), photometric="rgb", extratags=in_three)
    assert np.array_equal(read_image(write_file(coloured)), COLOURS)
    # With this chunk, PNG requires that values use all 16 bits.
    shifted = png(deep << 4, 16, (b"sBIT", b"\x0c"))
    assert np.abs(read_image(write_file(shifted)).astype(int) - GREY_RGB).max() <= 1


def test_the_largest_value_of_one_image_is_no_range(workdir):
    for largest in (3000, 65535, 4094):
        content = tif(stretch(GREY, 12), extratags=[(MAX_SAMPLE, 3, 1, largest, True)])
        with pytest.raises(UnreadableImageError) as caught:
            read_image(write_file(content))
        assert "data.bits=12" in caught.value.hint


def test_values_beyond_the_range_are_refused(workdir):
    path = write_file(png(stretch(GREY, 14)))
    with pytest.raises(UnreadableImageError) as caught:
        read_image(path, 12)
    assert caught.value.hint == (caught.value.remedy,) == ("data.bits=14",)
    # Fewer than 8 bits cannot be set.
    with pytest.raises(UnreadableImageError) as caught:
        read_image(write_file(png(stretch(GREY, 12) >> 8)))
    assert caught.value.hint == ("data.bits=8", "or", "data.bits=16")

    path = write_file(tif(stretch(GREY, 14), extratags=[(MAX_SAMPLE, 3, 1, 1023, True)]))
    with pytest.raises(UnreadableImageError, match="1023") as caught:
        read_image(path)
    assert (caught.value.hint, caught.value.remedy) == ((), "")
    # Masks use all bits.
    deep = write_file(png(COLOURS.astype(np.uint16) * 257))
    assert np.array_equal(read_mask_colours(deep), COLOURS)


def test_every_fingerprint_depends_on_the_bits(tmp_path):
    sets = [
        ImageFolder(class_folders(tmp_path / "classes")).images(),
        ClassFolders(tmp_path / "classes").val(),
        Voc(voc(tmp_path / "voc").parents[1]).train(),
        Spair71k(spair(tmp_path / "spair")).val(),
    ]

    for images in sets:
        plain, ten, twelve, whole = (
            with_read_options(images, ReadOptions(bits=bits)).fingerprint()
            for bits in (None, 10, 12, 16)
        )
        assert plain == whole == images.fingerprint()
        assert len({plain, ten, twelve}) == 3


def test_zero_is_white_in_a_tiff_that_says_so(workdir):
    grey = np.stack([255 - GREY] * 3, -1)
    for order, compression in itertools.product("<>", (None, "zlib")):
        options = {"photometric": "miniswhite", "byteorder": order, "compression": compression}
        for bits in (16, 12):
            path = write_file(tif(stretch(GREY, bits), **options))
            assert np.abs(read_image(path, bits).astype(int) - grey).max() <= 1
        assert np.array_equal(read_image(write_file(tif(GREY, **options))), grey)
    ones = read_image(write_file(tif(GREY > 99, photometric="miniswhite")))
    assert np.array_equal(ones[..., 0], np.where(GREY > 99, 0, 255))
    for numbers in (GREY % 3, GREY > 99):
        with pytest.raises(DataError, match="zero is white"):
            read_integer_image(write_file(tif(numbers, photometric="miniswhite")))


def bands(count: int, kind: str = "uint8", photometric: str = "minisblack") -> bytes:
    pixels = np.stack([GREY] * count, -1).astype(kind)
    return tif(pixels, photometric=photometric, planarconfig="contig")


UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "2 bands": (bands(2), "2 bands"),
    "5 bands, 3 of them colours": (bands(5, photometric="rgb"), "5 bands"),
    "13 16-bit bands": (bands(13, "uint16"), "13 bands"),
    "13 floating-point bands": (bands(13, "float32"), "13 bands"),
    "planes": (tif(np.stack([GREY] * 5), planarconfig="separate", photometric="minisblack"),
               "5 bands"),
    "pages": (tif(np.stack([GREY] * 3), photometric="minisblack"), "3 pages"),
    "pages in a BigTIFF": (tif(np.stack([GREY] * 3), photometric="minisblack", bigtiff=True),
                           "3 pages"),
    "pages of ImageJ": (tif(np.stack([GREY] * 4), imagej=True), "4 pages"),
    "floating-point": (tif(GREY.astype("float64")), "64-bit floating-point numbers"),
    "signed": (tif(GREY.astype("int8") - 9), "signed 8-bit numbers"),
    "16-bit planes": (tif(stretch(COLOURS, 16).transpose(2, 0, 1).copy(), photometric="rgb",
                          planarconfig="separate"), "separate planes"),
}  # fmt: skip


def test_a_tiff_that_is_not_one_image_is_described(workdir, capfd):
    for content, description in UNSUPPORTED.values():
        with pytest.raises(UnreadableImageError, match=description):
            read_image(write_file(content, "one.tif"))
    assert capfd.readouterr().err == ""


def test_animations_are_refused_and_single_frames_are_read(workdir):
    first, *others = (Image.new("RGB", (9, 9), (red, 0, 0)) for red in (250, 120, 0))
    for kind in ("GIF", "WEBP", "PNG"):
        buffer = io.BytesIO()
        first.save(buffer, kind, save_all=True, append_images=others)
        with pytest.raises(UnreadableImageError, match=f"one.jpg is a {kind} of 3 frames"):
            read_image(write_file(buffer.getvalue(), "one.jpg"))
        assert read_image(write_file(encoded(kind, first))).shape == (9, 9, 3)


def test_photographs_with_a_thumbnail_are_read(workdir):
    first, small = (Image.new("RGB", (size, size), (size, 0, 0)) for size in (32, 8))
    for progressive in (False, True):
        buffer = io.BytesIO()
        append: dict[str, Any] = {"save_all": True, "append_images": [small]}
        first.save(buffer, "MPO", **append, progressive=progressive)
        assert read_image(write_file(buffer.getvalue())).shape == (32, 32, 3)
    with tifffile.TiffWriter(path := workdir / "one.tif") as file:
        file.write(GREY)
        file.write(GREY[::2, ::2].copy(), subfiletype=1)
    assert np.array_equal(read_image(path)[..., 0], GREY)


@pytest.mark.filterwarnings("error")
def test_images_of_every_colour_mode_become_rgb(tmp_path):
    red, grey = (200, 10, 30), (77, 77, 77)
    image = Image.new("RGB", (8, 9), red)
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    clear = palette.copy()
    clear.info["transparency"] = bytes(256)
    modes = {
        "a_palette.png": (palette, red),
        "b_clear_palette.png": (clear, red),
        "c_rgba.png": (Image.merge("RGBA", (*image.split(), Image.new("L", (8, 9), 7))), red),
        "d_grey.png": (Image.new("L", (8, 9), 77), grey),
        "e_grey_alpha.png": (Image.new("LA", (8, 9), (77, 0)), grey),
        "f_one_bit.png": (Image.new("1", (8, 9), 1), (255, 255, 255)),
        "g_cmyk.tif": (Image.new("CMYK", (8, 9), (0, 255, 255, 0)), (255, 0, 0)),
        # By hand: 32768 // 257.
        "h_sixteen.png": (Image.fromarray(np.full((9, 8), 32768, np.uint16)), (127, 127, 127)),
    }
    for name, (one, _) in modes.items():
        one.save(tmp_path / name)
    images = with_read_options(ImageFolder(tmp_path).images(), ReadOptions(bits=16))

    for index, (name, (_, expected)) in enumerate(modes.items()):
        pixels = images[index].image
        assert (pixels.shape, pixels.dtype, pixels.flags.writeable) == ((9, 8, 3), np.uint8, True)
        assert (pixels == expected).all(), name


LOSSY: dict[str, tuple[str, dict[str, Any]]] = {
    "JPEG": ("JPEG", {}),
    "lossy WebP": ("WEBP", {}),
    "lossy TIFF": ("TIFF", {"compression": "jpeg"}),
    "AVIF": ("AVIF", {}),
    "HEIC": ("HEIF", {}),
}


@pytest.mark.parametrize("name", LOSSY)
def test_masks_with_lossy_compression_are_refused(workdir, name):
    kind, options = LOSSY[name]
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif kind == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow cannot read AVIF")
    for mode, read in (("L", read_integer_image), ("RGB", read_mask_colours)):
        buffer = io.BytesIO()
        Image.fromarray(mask()).convert(mode).save(buffer, kind, **options)
        with pytest.raises(DataError, match=rf"\.png has the format {name}\b"):
            read(write_file(buffer.getvalue(), "mask.png"))


# Chunks of an odd size are followed by a zero.
@pytest.mark.parametrize("profile", [b"", b"odd"])
def test_colour_masks_in_lossless_webp_are_read(workdir, profile):
    buffer = io.BytesIO()
    Image.fromarray(COLOURS).save(buffer, "WEBP", lossless=True, icc_profile=profile)
    assert np.array_equal(read_mask_colours(write_file(buffer.getvalue())), COLOURS)


@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_masks_of_every_layout_must_be_lossless(tmp_path, kind):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow cannot read AVIF")
    content = encoded(kind, Image.fromarray(mask()))
    for path in voc(tmp_path / "voc").glob("SegmentationClass/*"):
        path.write_bytes(content)
    own = paired_folders(tmp_path / "own", {"train": "0", "val": "1"}, content=content)
    names = {"training": "0", "validation": "1"}
    ade = paired_folders(tmp_path / "ade", names, masks="annotations", content=content)
    names = {"train2017": "0", "val2017": "1"}
    coco = paired_folders(tmp_path / "coco", names, masks="stuffthingmaps", content=content)
    named: dict[str, Any] = {"class_names": ["one", "two", "three"]}

    for dataset in (
        Voc(tmp_path / "voc"),
        Ade20k(ade),
        CocoStuff(coco),
        ImageMaskFolders(own, **named),
        ImageMaskFolders(own, **named, colours=[[0, 0, 0], [8, 8, 8], [9, 9, 9]]),
    ):
        for images in (dataset.train(), dataset.val()):
            with pytest.raises(DataError, match=rf"\.png has the format {kind}"):
                images[0]


def reorder_palette(indices: np.ndarray, order: list[int]) -> Image.Image:
    positions = {number: position for position, number in enumerate(order)}
    image = Image.fromarray(np.vectorize(positions.__getitem__)(indices).astype(np.uint8))
    image.putpalette(voc_colours()[order].ravel().tolist())
    return image


@pytest.mark.parametrize("has_borders", [True, False])
@pytest.mark.parametrize("order", [[0, 8, 255], [0, 255, 8], [8, 255, 0], [255, 0, 8, 20]])
def test_a_voc_palette_in_another_order_is_noticed(workdir, capsys, has_borders, order):
    path = voc(workdir) / "SegmentationClass/t2.png"
    indices = mask() if has_borders else np.where(mask() == 255, 0, mask())
    changed = reorder_palette(indices, order)
    changed.save(path)
    # A viewer shows the same colours for the changed mask.
    assert np.array_equal(np.asarray(changed.convert("RGB")), voc_colours()[indices])

    command = ["data", "check", "voc2012", "--data-root", ".", "--subset"]
    message = expect_error(capsys, command, 3)

    assert "SegmentationClass/t2.png" in message
    assert "palette" in message
    # In other datasets, a VOC palette is recognised by the colour of the borders.
    if has_borders:
        with pytest.raises(DataError, match="palette"):
            read_integer_image(path)


def test_other_palettes_do_not_change_the_numbers_of_a_mask(tmp_path):
    path, whole = tmp_path / "mask.png", Image.fromarray(mask())
    ramp = np.arange(256).repeat(3).reshape(256, 3)
    random = np.random.default_rng(0).integers(1, 255, (256, 3))
    # Maroon and green are the colours of VOC's first and second class.
    green = np.where(np.arange(256)[:, None] == 8, [0, 128, 0], random)
    for palette in (voc_colours(), ramp, random, np.zeros((256, 3), int), green):
        whole.putpalette(palette.ravel().tolist())
        whole.save(path)
        for has_voc_palette in (False,) if palette is green else (True, False):
            assert np.array_equal(read_integer_image(path, has_voc_palette=has_voc_palette), mask())
    save_mask(path, mask())
    assert np.array_equal(read_integer_image(path), mask())
    assert np.array_equal(read_integer_image(path, has_voc_palette=True), mask())


def test_masks_of_few_bits_hold_the_numbers_they_store(workdir):
    numbers = (np.arange(64).reshape(8, 8) % 20).astype(np.uint8)
    for content, largest in (
        *((png(numbers % 2**bits, bits), 2**bits - 1) for bits in (1, 2, 4)),
        *((pnm(numbers, most), 19) for most in (20, 150, 255, 300, 65535)),
    ):
        found = read_integer_image(write_file(content))
        assert found.max() == largest
        assert np.array_equal(found, numbers % (largest + 1))


def test_masks_of_0_and_255_require_the_meaning_of_255(workdir, capsys):
    binary = Image.fromarray(np.where(mask() == 8, 255, 0).astype(np.uint8))
    paired_folders(workdir, {"train": "01", "val": "01"}, content=encoded("PNG", binary))
    words = make_probe_args(
        "retrieval", "paired_folders", workdir, "dataset.class_names=[bg,thing]"
    )

    assert "0.png stores 0 and 255" in expect_error(capsys, words, 3)

    words += ["dataset.numbers=[0,255]", "dataset.ignored=[]", "data.allow_overlap=true"]
    assert main(words) == 0
    assert records()[0].num_images == 2
    data = ImageMaskFolders(workdir, class_names=["bg", "thing"], ignored=[255])
    stored = data.val()[0].mask
    assert stored is not None
    assert set(np.unique(stored)) == {0, 255}
