"""Rows 1 to 15 of the catalogue of faults: what datasets may hold, and what must happen."""

import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import ReadOptions, with_read_options
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError
from tests.support.faults import (
    TRAIN,
    class_folders,
    fails,
    mask,
    peak_memory_mib,
    picture,
    png_of,
    probing,
    records,
    save_mask,
    spoil,
    voc,
)

SPOILT = {
    "empty": "is empty",
    "half": "is damaged or cut short",
    "last2": "is damaged or cut short",
    "html": "is a web page",
    "lfs": "is a Git LFS pointer",
}


@pytest.mark.parametrize("how", SPOILT)
def test_fault_01_an_image_that_cannot_be_read_is_named_or_left_out(place, capsys, how):
    """A spoilt photograph is named and stops the run, or is left out and counted."""
    photos = place / "photos"
    spoil(photos / "1.jpg", how)

    stopping = probing("pca", "folder", photos, "--on-bad-image", "fail")
    said = fails(capsys, stopping, 3)
    assert f"photos/1.jpg {SPOILT[how]}" in said
    assert main(probing("pca", "folder", photos)) == 0

    (skipping,) = records()
    assert skipping.num_images == 3
    assert skipping.details["left_out"] == {"all": {"count": 1, "first": ["1.jpg"]}}
    (photos / "1.jpg").unlink()
    assert main(probing("pca", "folder", photos, "--out", "without")) == 0
    assert records("without")[0].value == skipping.value


@pytest.mark.parametrize(
    "task", ["tokencut", "discovery", "segmentation", "retrieval", "knn", "classification"]
)
def test_fault_01_every_probe_leaves_out_what_cannot_be_read_in_any_split(place, task):
    dataset = "class_folders" if task in ("knn", "classification") else "voc2012"
    build = class_folders if dataset == "class_folders" else voc
    base, without = build(place / "a"), build(place / "b")
    broken = ["JPEGImages/t1.jpg", "JPEGImages/v2.jpg"]
    if dataset == "class_folders":
        broken = ["train/cat/1.jpg", "val/dog/0.jpg"]
    for name in broken:
        spoil(base / name, "half")
        (without / name).unlink()
    for listing in without.glob("ImageSets/*/*.txt"):
        kept = [word for word in listing.read_text().split() if word not in ("t1", "v2")]
        listing.write_text("\n".join(kept))

    assert main(probing(task, dataset, place / "a", "--on-bad-image", "skip")) == 0
    assert main(probing(task, dataset, place / "b", "--out", "without")) == 0

    skipping = {(r.metric, r.value, r.num_images) for r in records()}
    assert skipping == {(r.metric, r.value, r.num_images) for r in records("without")}
    (gone,) = {json.dumps(r.details["left_out"]) for r in records()}
    assert sum(split["count"] for split in json.loads(gone).values()) == 2


def test_fault_02_numbers_with_and_without_skipped_images_never_share_a_table(place, capsys):
    photos = place / "photos"
    assert main(probing("pca", "folder", photos)) == 0
    spoil(photos / "1.jpg", "half")
    assert main(probing("pca", "folder", photos, "--on-bad-image", "skip")) == 0
    capsys.readouterr()

    assert main(["table", "--format", "markdown"]) == 0

    out = capsys.readouterr().out
    assert out.count("| block |") == 2
    assert "left_out=1 of all" in out
    assert len(re.findall(r", without 1 that cannot be read: 1\.jpg[,;]", out)) == 1


def test_fault_03_where_no_image_can_be_read_there_is_no_number(place, capsys):
    photos = place / "photos"
    skipping = probing("pca", "folder", photos, "--on-bad-image", "skip")
    spoil(photos / "1.jpg", "html")
    assert main(skipping) == 0
    first = records()
    capsys.readouterr()
    assert main(skipping) == 0
    assert "skipping 1 of 1 results" in capsys.readouterr().err
    assert records() == first

    for number in (0, 2, 3):
        spoil(photos / f"{number}.jpg", "html")

    assert "none of the 4 images of folder all can be read" in fails(capsys, skipping, 3)


def test_fault_04_flipped_bytes_of_an_image_are_found_by_its_sha256(place, capsys):
    base = voc(place)
    verify = ["data", "verify", str(base)]
    assert main(verify) == 0
    assert main(verify) == 0
    path = base / "JPEGImages/t2.jpg"
    content = bytearray(path.read_bytes())
    content[-40] ^= 4
    path.write_bytes(content)
    # The decoder sees nothing.
    assert Voc(place).train()[2].image.shape == (32, 40, 3)

    said = fails(capsys, verify, 3)

    assert "1 changed" in said
    assert "JPEGImages/t2.jpg" in said
    assert "t1.jpg" not in said
    assert main([*verify, "--update"]) == 0
    assert main(verify) == 0


def test_fault_04_missing_and_new_files_are_told_apart_and_a_broken_list_is_refused(place, capsys):
    photos = place / "photos"
    verify = ["data", "verify", str(photos), "--manifest", "lists/photos"]
    picture(9).save(photos / "back\\slash\n.png")
    assert main(verify) == 0
    assert main(verify) == 0
    picture(9).save(photos / "new.png")
    assert main(verify) == 0
    assert "new.png" in capsys.readouterr().err
    (photos / "0.jpg").unlink()
    line = fails(capsys, verify, 3)
    assert "1 missing" in line
    assert "0.jpg" in line

    Path("lists/photos").write_text("no digest  0.jpg\n")

    assert "line 1" in fails(capsys, verify, 3)
    assert "is not a folder" in fails(capsys, ["data", "verify", "absent"], 3)


def bomb(side: int) -> bytes:
    """A PNG of a few megabytes that would decode to gigabytes."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = [packer.compress(bytes(1 + 3 * side)) for _ in range(40)]
    pixels = b"".join([*rows, packer.flush()])
    return png_of((b"IHDR", header), (b"IDAT", pixels))


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_fault_05_a_decompression_bomb_is_refused_in_little_memory(place, capsys, side):
    photos = place / "photos"
    assert main(probing("pca", "folder", photos)) == 0
    (photos / "0.png").write_bytes(bomb(side))

    with peak_memory_mib() as peak:
        said = fails(capsys, probing("pca", "folder", photos, "--on-bad-image", "fail"), 3)

    assert "0.png" in said
    assert peak() < 60


@pytest.mark.filterwarnings("error")
def test_fault_06_pictures_of_every_mode_become_rgb(tmp_path):
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


def test_fault_07_exif_rotation_leaves_image_mask_and_boxes_in_agreement(place):
    base = voc(place)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0).save(base / "JPEGImages/t0.jpg", quality=95, exif=exif)

    labelled, boxed = Voc(place).train()[0], Voc(place).discovery()[0]

    assert labelled.mask is not None
    assert labelled.image.shape[:2] == labelled.mask.shape == (32, 40)
    inside = labelled.image[labelled.mask == 8].mean()
    assert inside > labelled.image[labelled.mask == 0].mean() + 60
    assert np.array_equal(labelled.image, boxed.image)


def test_fault_08_a_palette_mask_is_read_as_the_numbers_it_stores(place, capsys):
    base = voc(place)
    read = Voc(place).train()[0].mask
    assert read is not None
    assert np.array_equal(read, mask())

    colours = Image.open(base / "SegmentationClass/t0.png").convert("RGB")
    colours.save(base / "SegmentationClass/t0.png")

    said = fails(capsys, probing("segmentation", "voc2012", place), 3)
    assert "SegmentationClass/t0.png stores colours" in said


@pytest.mark.parametrize("split", ["t0", "v0"])
def test_fault_09_a_label_out_of_range_is_named_with_its_file(place, capsys, split):
    base = voc(place)
    indices = mask()
    indices[0, 0] = 21
    save_mask(base / f"SegmentationClass/{split}.png", indices)

    said = fails(capsys, probing("segmentation", "voc2012", place), 3)

    assert f"{split}.png holds label 21, expected 0-20, 255" in said


def test_fault_10_a_mask_of_another_size_is_refused(place, capsys):
    base = voc(place)
    save_mask(base / "SegmentationClass/v1.png", mask(32, 41))

    # It is no unreadable file: skipping must not hide it.
    for policy in ("fail", "skip"):
        words = probing("segmentation", "voc2012", place, "--on-bad-image", policy)
        said = fails(capsys, words, 3)
        assert "v1.png has 41 x 32 pixels, but its image" in said


@pytest.mark.parametrize("batch_size", [1, 16])
def test_fault_11_a_mask_without_any_label_is_counted_and_the_metric_finite(place, batch_size):
    base = voc(place)
    ignored = np.full((32, 40), 255, np.uint8)
    save_mask(base / "SegmentationClass/t1.png", ignored)
    save_mask(base / "SegmentationClass/v1.png", ignored)
    # Alone in its batch, the image has no pixel to take the mean of.
    alone = [f"probe.training.batch_size={batch_size}", "probe.training.epochs=40"]

    assert main(probing("segmentation", "voc2012", place, *alone)) == 0

    for record in records():
        assert 0 <= record.value <= 100
        assert record.details["all_ignored_train_images"] == 1
        # Heads of NaN name one class everywhere.
        assert min(record.details["iou_by_class"][name] for name in ("background", "cat")) > 20


@pytest.mark.parametrize(
    ("task", "missing", "kind"),
    [
        ("segmentation", "JPEGImages/t{}.jpg", "3 of 4 images"),
        ("segmentation", "SegmentationClass/t{}.png", "3 of 4 masks"),
        ("retrieval", "SegmentationClass/t{}.png", "3 of 4 masks"),
        ("tokencut", "Annotations/t{}.xml", "3 of 7 annotations"),
    ],
)
def test_fault_12_missing_files_are_named_before_a_model_is_loaded(
    place, capsys, task, missing, kind
):
    base = voc(place)
    for number in range(1, 4):
        (base / missing.format(number)).unlink()
    # Were the model loaded first, this would be what is complained of.
    Path("encoder.safetensors").unlink()

    said = fails(capsys, probing(task, "voc2012", place), 3)

    assert kind in said
    assert ", ".join(Path(missing.format(number)).name for number in range(1, 4)) in said


def test_fault_12_only_the_first_five_names_are_listed(place):
    listing = voc(place) / "ImageSets/Main/trainval.txt"
    listing.write_text("\n".join([*TRAIN, *(f"absent{number}" for number in range(9))]))

    with pytest.raises(DataError, match=r"9 of 13 images .*absent4\.jpg, \.\.\.;"):
        Voc(place).discovery()


def test_fault_13_an_empty_split_is_refused(place, capsys):
    base = voc(place)
    (base / "ImageSets/Segmentation/val.txt").write_text("\n\n")

    assert "val.txt lists no image" in fails(capsys, probing("segmentation", "voc2012", place), 3)


@pytest.mark.parametrize("task", ["segmentation", "knn"])
def test_fault_13_a_single_class_is_refused(place, capsys, task):
    if task == "segmentation":
        base, dataset = voc(place), "voc2012"
        for name in TRAIN:
            save_mask(base / f"SegmentationClass/{name}.png", np.zeros((32, 40), np.uint8))
    else:
        base, dataset = class_folders(place), "class_folders"
        for path in base.glob("*/dog/*"):
            path.unlink()

    assert "class" in fails(capsys, probing(task, dataset, place), 3)


@pytest.mark.parametrize("task", ["tokencut", "discovery", "pca", "segmentation", "retrieval"])
def test_fault_14_images_of_any_size_are_probed_and_boxes_lie_inside(place, task):
    base = voc(place)
    sizes = {"0": (1, 1), "1": (33, 47), "2": (1, 60)}
    for number, (height, width) in sizes.items():
        for first, name in ((5, f"v{number}"), (50, f"t{number}")):
            content = picture(first + int(number), height, width)
            content.save(base / f"JPEGImages/{name}.jpg")
            whole = np.full((height, width), 8, np.uint8)
            save_mask(base / f"SegmentationClass/{name}.png", whole)
            annotation = base / f"Annotations/{name}.xml"
            text = annotation.read_text().replace("min>9<", "min>1<")
            text = text.replace("xmax>24<", f"xmax>{width}<").replace("ymax>24<", f"ymax>{height}<")
            annotation.write_text(text)

    assert main(probing(task, "voc2012", place)) == 0

    assert all(0 <= record.value <= 100 for record in records())
    if task in ("tokencut", "discovery"):
        (log,) = place.rglob("results/**/*.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        found = {line["image"]: line for line in lines if line.get("image", "").startswith("v")}
        for number, (height, width) in sizes.items():
            # Every pixel lies in a patch.
            assert found[f"v{number}"]["grid"] == [-(-height // 8), -(-width // 8)]
            (cell,) = found[f"v{number}"]["cells"].values()
            x0, y0, x1, y1 = cell["box"]
            assert 0 <= x0 < x1 <= width
            assert 0 <= y0 < y1 <= height


@pytest.mark.parametrize(
    ("dataset", "task", "tree"),
    [
        ("voc2012", "tokencut", "VOCdevkit/VOC2012/{JPEGImages,SegmentationClass"),
        ("ade20k", "segmentation", "ADEChallengeData2016/{images,annotations}"),
        ("coco20k", "tokencut", "annotations/instances_train2014.json, images/train2014/*.jpg"),
        ("coco_stuff", "segmentation", "images/{train2017,val2017}/*.jpg and stuffthingmaps/"),
        ("cityscapes", "segmentation", "leftImg8bit/{train,val}/*_leftImg8bit.png and gtFine/"),
        ("camvid", "segmentation", "{train,val}/*.png and {train,val}annot/*.png"),
        ("spair71k", "correspondence", "JPEGImages/CLASS/*.jpg, PairAnnotation/SPLIT/*.json"),
        ("paired_folders", "segmentation", "images/{train,val}/*.jpg and masks/{train,val}/*.png"),
        ("class_folders", "knn", "train/CLASS/IMAGE"),
        ("folder", "pca", "images"),
    ],
)
def test_fault_15_a_wrong_root_shows_the_tree_that_is_expected(place, capsys, dataset, task, tree):
    root = place / "elsewhere"
    for exists in (False, True):
        if exists:
            (root / "things").mkdir(parents=True)

        said = fails(capsys, probing(task, dataset, root), 3)

        assert said.startswith(f"ssl-bench: {root} ")
        assert tree in said
        assert "docs/data.md" in said or "--data-root" in said or dataset == "folder"


def test_fault_15_a_bare_image_is_no_dataset(place, capsys):
    picture(0).save(place / "one.png")

    assert "one.png" in fails(capsys, probing("pca", "folder", place / "one.png"), 3)
