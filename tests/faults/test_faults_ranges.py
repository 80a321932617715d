"""Rows 80 and 81 of the catalogue of faults: ranges and pages of pictures, numbers of masks."""

import io
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
from ssl_bench.data.files.images import read_image, read_indices, voc_colours
from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco_stuff import CocoStuff
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError, UnreadableImage
from tests.support.faults import (
    class_folders,
    encoded,
    fails,
    mask,
    paired_folders,
    photo_folder,
    png_of,
    pretraining,
    probing,
    records,
    save_mask,
    voc,
)
from tests.support.spair import spair

GREY = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
COLOURS = np.stack([GREY, GREY[::-1], GREY.T], -1)
MAX_SAMPLE, S_MAX_SAMPLE = 281, 341


def stretched(pixels: np.ndarray, bits: int) -> np.ndarray:
    """As many bits as 16 hold, which come to the same pixels again."""
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


FILES: dict[str, Callable[[np.ndarray], bytes]] = {
    "grey png": lambda values: png(values[..., 0]),
    "png": png,
    "grey tif": lambda values: tif(values[..., 0]),
    "tif of Motorola": lambda values: tif(values[..., 0], byteorder=">"),
    "tif": lambda values: tif(values, photometric="rgb"),
    "grey tif of 32 bits": lambda values: tif(values[..., 0].astype(np.uint32)),
    "tif of signed": lambda values: tif(values[..., 0].astype(np.int16)),
    "pgm": lambda values: pnm(values[..., 0]),
    "ppm": pnm,
}


def put(content: bytes, name: str = "one.png") -> Path:
    path = Path(name)
    path.write_bytes(content)
    return path


def deep_class_folders(root: Path, bits: int) -> Path:
    """The same pictures with 8 and with more bits."""
    for path in class_folders(root).rglob("*.jpg"):
        pixels = read_image(path)
        path.unlink()
        content = (
            encoded("PNG", Image.fromarray(pixels)) if bits == 8 else png(stretched(pixels, bits))
        )
        path.with_suffix(".png").write_bytes(content)
    return root


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 15, 16])
def test_fault_80_images_of_16_bits_need_a_key(place, kind, bits):
    if (kind, bits) == ("tif of signed", 16):
        pytest.skip("has 15 bits")
    path = put(FILES[kind](stretched(COLOURS, bits)))
    expected = COLOURS if kind in ("png", "tif", "ppm") else np.stack([GREY] * 3, -1)

    with pytest.raises(UnreadableImage, match=r"one\.png") as caught:
        read_image(path)
    assert caught.value.hint[0].startswith("data.bits=")
    assert "data.bits=16" in caught.value.hint
    read = read_image(path, bits).astype(int)
    # Pillow drops the lower 8 bits of 16-bit colours.
    assert np.abs(read - expected).max() <= (bits == 16 and kind in ("png", "tif"))
    if bits < 14:
        assert read_image(path, 16).max() < 64


def test_fault_80_grey_with_transparency_needs_the_key_too(place):
    grey = stretched(GREY, 12)
    path = put(png(np.stack([grey, np.full_like(grey, 65535)], -1)))

    with pytest.raises(UnreadableImage):
        read_image(path)
    assert np.array_equal(read_image(path, 16)[..., 0], grey >> 8)


def test_fault_80_cmyk_uses_all_16_bits(place):
    inks = np.stack([stretched(GREY, 16)] * 4, -1)
    path = put(tif(inks, photometric="separated"), "one.tif")

    shallow = Image.fromarray((inks >> 8).astype(np.uint8), "CMYK")
    assert np.array_equal(read_image(path), np.array(shallow.convert("RGB")))


def test_fault_80_16_bit_images_are_never_black_by_mistake(place, capsys):
    deep = deep_class_folders(place / "deep", 12)
    words = probing("knn", "class_folders", deep)
    checking = ["data", "check", "class_folders", "--data-root", str(deep)]

    for command in (words, pretraining(deep, "run")):
        said = fails(capsys, command, 3)
        assert ".png is a 16-bit image" in said
        assert "data.bits=12" in said
    assert main(checking) == 3
    for command in (words, pretraining(deep, "other"), checking):
        assert main([*command, "data.bits=12"]) == 0
    assert "data.bits" in fails(capsys, [*checking, "data.bits=17"], 2)
    assert main([*words, "data.bits=16", "--out", "dark"]) == 0
    usual = deep_class_folders(place / "usual", 8)
    assert main(probing("knn", "class_folders", usual, "--out", "usual")) == 0

    values = {out: [r.value for r in records(out)] for out in ("results", "usual", "dark")}
    assert values["results"] == values["usual"]
    (read, dark) = ({r.dataset_fingerprint for r in records(out)} for out in ("results", "dark"))
    assert read.isdisjoint(dark)


def test_fault_80_one_picture_of_fewer_bits_does_not_stop_a_folder(place, capsys):
    photos = photo_folder(place / "mixed")
    (photos / "scan.png").write_bytes(png(GREY.astype(np.uint16) * 257, 16, (b"sBIT", b"\x10")))
    (photos / "cells.png").write_bytes(png(stretched(GREY, 12)))
    words = probing("pca", "folder", photos)

    assert main(words) == 0
    said = "1 needs data.bits=12: cells.png"
    assert said in capsys.readouterr().err
    assert main([*words, "data.bits=12"]) == 0
    assert "using 6 images of folder" in capsys.readouterr().err


def test_fault_80_what_a_file_states_is_taken(place):
    deep = stretched(GREY, 12)
    grey = np.stack([GREY] * 3, -1)
    tag = [(MAX_SAMPLE, 3, 1, 4095, True)]
    others = [(S_MAX_SAMPLE, 3, 1, 4095, True)]
    in_three = [(MAX_SAMPLE, 3, 3, (4095,) * 3, True)]

    for content in (tif(deep, extratags=tag), tif(deep, extratags=others), pnm(deep, 4095)):
        for bits in (None, 10, 16):
            assert np.array_equal(read_image(put(content), bits), grey)
    commented = pnm(deep, 4095).replace(b"# 9 9 9", b"#" + b" 9" * 1000)
    assert np.array_equal(read_image(put(commented)), grey)
    coloured = tif(stretched(COLOURS, 12), photometric="rgb", extratags=in_three)
    assert np.array_equal(read_image(put(coloured)), COLOURS)
    # Such values are shifted up, as PNG says.
    shifted = png(deep << 4, 16, (b"sBIT", b"\x0c"))
    assert np.abs(read_image(put(shifted)).astype(int) - grey).max() <= 1


@pytest.mark.parametrize("largest", [3000, 65535, 4094])
def test_fault_80_the_largest_of_a_picture_is_no_range(place, largest):
    content = tif(stretched(GREY, 12), extratags=[(MAX_SAMPLE, 3, 1, largest, True)])

    with pytest.raises(UnreadableImage) as caught:
        read_image(put(content))
    assert "data.bits=12" in caught.value.hint


def test_fault_80_more_than_was_said_is_refused(place):
    path = put(png(stretched(GREY, 14)))
    with pytest.raises(UnreadableImage) as caught:
        read_image(path, 12)
    assert caught.value.hint == ("data.bits=14",)

    path = put(tif(stretched(GREY, 14), extratags=[(MAX_SAMPLE, 3, 1, 1023, True)]))
    with pytest.raises(UnreadableImage, match="expected 0 to 1023") as caught:
        read_image(path)
    assert caught.value.hint == ()


def test_fault_80_the_range_is_part_of_every_fingerprint(tmp_path):
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


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_fault_80_zero_is_white_where_a_tiff_says_so(place, order, compression):
    options = {"photometric": "miniswhite", "byteorder": order, "compression": compression}
    grey = np.stack([255 - GREY] * 3, -1)

    for bits in (16, 12):
        path = put(tif(stretched(GREY, bits), **options))
        assert np.abs(read_image(path, bits).astype(int) - grey).max() <= 1
    assert np.array_equal(read_image(put(tif(GREY, **options))), grey)
    ones = read_image(put(tif(GREY > 99, photometric="miniswhite")))
    assert np.array_equal(ones[..., 0], np.where(GREY > 99, 0, 255))


def bands(count: int, kind: str = "uint8", photometric: str = "minisblack") -> bytes:
    pixels = np.stack([GREY] * count, -1).astype(kind)
    return tif(pixels, photometric=photometric, planarconfig="contig")


OTHERS: dict[str, tuple[bytes, str]] = {
    "2 bands": (bands(2), "a TIFF of 2 bands"),
    "5 bands": (bands(5), "a TIFF of 5 bands"),
    "5 bands, 3 of them colours": (bands(5, photometric="rgb"), "a TIFF of 5 bands"),
    "13 bands": (bands(13), "a TIFF of 13 bands"),
    "13 deep bands": (bands(13, "uint16"), "a TIFF of 13 bands"),
    "13 floating bands": (bands(13, "float32"), "a TIFF of 13 bands"),
    "planes": (tif(np.stack([GREY] * 5), planarconfig="separate", photometric="minisblack"),
               "a TIFF of 5 bands"),
    "stack": (tif(np.stack([GREY] * 3), photometric="minisblack"), "a TIFF of 3 pages"),
    "big stack": (tif(np.stack([GREY] * 3), photometric="minisblack", bigtiff=True),
                  "a TIFF of 3 pages"),
    "stack of ImageJ": (tif(np.stack([GREY] * 4), imagej=True), "a TIFF of 4 pages"),
    "floating": (tif(GREY.astype("float64")), "floating-point numbers of 64 bits"),
    "signed": (tif(GREY.astype("int8") - 9), "signed numbers of 8 bits"),
    "deep planes": (tif(stretched(COLOURS, 16).transpose(2, 0, 1).copy(), photometric="rgb",
                        planarconfig="separate"), "16 bits with its 3 bands in separate"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_fault_80_what_is_no_picture_is_called_by_what_it_is(place, capfd, other):
    content, called = OTHERS[other]

    with pytest.raises(UnreadableImage, match=called) as caught:
        read_image(put(content, "one.tif"))

    assert "not an image" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_fault_80_animations_are_refused_and_single_frames_read(place, kind):
    first, *others = (Image.new("RGB", (9, 9), (red, 0, 0)) for red in (250, 120, 0))
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=others)

    with pytest.raises(UnreadableImage, match=f"one.jpg is a {kind} of 3 frames"):
        read_image(put(buffer.getvalue(), "one.jpg"))
    assert read_image(put(encoded(kind, first))).shape == (9, 9, 3)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_fault_80_photographs_with_a_small_copy_are_read(place, options):
    first, small = (Image.new("RGB", (size, size), (size, 0, 0)) for size in (32, 8))
    buffer = io.BytesIO()
    first.save(buffer, "MPO", save_all=True, append_images=[small], **options)
    assert read_image(put(buffer.getvalue())).shape == (32, 32, 3)

    with tifffile.TiffWriter(path := place / "one.tif") as file:
        file.write(GREY)
        file.write(GREY[::2, ::2].copy(), subfiletype=1)
    assert np.array_equal(read_image(path)[..., 0], GREY)


def masks_of_every_layout(root: Path, content: bytes) -> list[Any]:
    """Datasets of which every mask is this file."""
    for path in voc(root / "voc").glob("SegmentationClass/*"):
        path.write_bytes(content)
    own = paired_folders(root / "own", {"train": "0", "val": "1"}, content=content)
    names = {"training": "0", "validation": "1"}
    ade = paired_folders(root / "ade", names, masks="annotations", content=content)
    names = {"train2017": "0", "val2017": "1"}
    coco = paired_folders(root / "coco", names, masks="stuffthingmaps", content=content)
    named: dict[str, Any] = {"class_names": ["one", "two", "three"]}
    return [
        Voc(root / "voc"),
        Ade20k(ade),
        CocoStuff(coco),
        ImageMaskFolders(own, **named),
        ImageMaskFolders(own, **named, colours=[[0, 0, 0], [8, 8, 8], [9, 9, 9]]),
    ]


LOSSY: dict[str, tuple[str, dict[str, Any]]] = {
    "JPEG": ("JPEG", {}),
    "lossy WebP": ("WEBP", {}),
    "lossy TIFF": ("TIFF", {"compression": "jpeg"}),
    "AVIF": ("AVIF", {}),
    "HEIC": ("HEIF", {}),
}


@pytest.mark.parametrize("called", LOSSY)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_fault_81_masks_of_every_layout_are_lossless(tmp_path, called, mode):
    kind, options = LOSSY[called]
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif kind == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow cannot read AVIF")
    buffer = io.BytesIO()
    Image.fromarray(mask()).convert(mode).save(buffer, kind, **options)

    for dataset in masks_of_every_layout(tmp_path, buffer.getvalue()):
        for images in (dataset.train(), dataset.val()):
            with pytest.raises(DataError, match=rf"\.png has the format {called}\b"):
                images[0]


def reordered(indices: np.ndarray, order: list[int]) -> Image.Image:
    """A mask in VOC's colours whose numbers are places in `order`."""
    place = {number: place for place, number in enumerate(order)}
    image = Image.fromarray(np.vectorize(place.__getitem__)(indices).astype(np.uint8))
    image.putpalette(voc_colours()[order].ravel().tolist())
    return image


@pytest.mark.parametrize("rims", [True, False])
@pytest.mark.parametrize("order", [[0, 8, 255], [0, 255, 8], [8, 255, 0], [255, 0, 8, 20]])
def test_fault_81_a_palette_in_another_order_is_seen(place, capsys, rims, order):
    base = voc(place)
    indices = mask() if rims else np.where(mask() == 255, 0, mask())
    changed = reordered(indices, order)
    changed.save(base / "SegmentationClass/t2.png")
    # It looks as before.
    assert np.array_equal(np.asarray(changed.convert("RGB")), voc_colours()[indices])

    said = fails(capsys, probing("segmentation", "voc2012", place), 3)

    assert "SegmentationClass/t2.png stores" in said
    assert "palette is in another order" in said


def test_fault_81_elsewhere_the_colour_of_rims_tells_such_palettes(tmp_path):
    path = tmp_path / "mask.png"
    reordered(mask(), [0, 8, 255]).save(path)
    with pytest.raises(DataError, match="palette is in another order"):
        read_indices(path)


@pytest.mark.parametrize("has_voc_palette", [True, False])
def test_fault_81_palettes_of_others_are_read_as_numbers(tmp_path, has_voc_palette):
    path = tmp_path / "mask.png"
    whole = Image.fromarray(mask())
    ramp = np.arange(256).repeat(3).reshape(256, 3)
    random = np.random.default_rng(0).integers(1, 255, (256, 3))
    palettes = [voc_colours(), ramp, random, np.zeros((256, 3), int)]
    if not has_voc_palette:
        # Maroon and green, which are VOC's first and second class.
        palettes.append(np.where(np.arange(256)[:, None] == 8, [0, 128, 0], random))
    for palette in palettes:
        whole.putpalette(palette.ravel().tolist())
        whole.save(path)
        assert np.array_equal(read_indices(path, has_voc_palette=has_voc_palette), mask())
    save_mask(path, mask())
    assert np.array_equal(read_indices(path, has_voc_palette=has_voc_palette), mask())


@pytest.mark.parametrize(
    "encode",
    [
        *(lambda values, bits=bits: png(values % 2**bits, bits) for bits in (1, 2, 4)),
        *(lambda values, most=most: pnm(values, most) for most in (20, 150, 255, 300, 65535)),
    ],
)
def test_fault_81_masks_of_few_bits_hold_the_numbers_they_store(place, encode):
    numbers = (np.arange(64).reshape(8, 8) % 20).astype(np.uint8)
    found = read_indices(put(encode(numbers)))

    assert found.max() in (1, 3, 15, 19)
    assert np.array_equal(found, numbers % (int(found.max()) + 1))


@pytest.mark.parametrize("numbers", [GREY % 3, GREY > 99])
def test_fault_81_masks_with_zero_for_white_are_refused(place, numbers):
    with pytest.raises(DataError, match="zero is white"):
        read_indices(put(tif(numbers, photometric="miniswhite")))


def test_fault_81_masks_of_0_and_255_say_which_is_meant(place, capsys):
    binary = Image.fromarray(np.where(mask() == 8, 255, 0).astype(np.uint8))
    paired_folders(place, {"train": "01", "val": "01"}, content=encoded("PNG", binary))
    for task in ("segmentation", "retrieval"):
        words = probing(task, "paired_folders", place, "dataset.class_names=[bg,thing]")
        words += ["--layer", "0", "--out", task]

        said = fails(capsys, words, 3)

        assert "0.png holds 0 and 255" in said
        words += ["dataset.numbers=[0,255]", "dataset.ignored=[]", "data.allow_overlap=true"]
        assert main(words) == 0
        assert records(task)[0].num_images == 2
    data = ImageMaskFolders(place, class_names=["bg", "thing"], ignored=[255])
    stored = data.val()[0].mask
    assert stored is not None
    assert set(np.unique(stored)) == {0, 255}
