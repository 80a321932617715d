"""Faulty images, masks, boxes and folders: the command names the file and computes nothing."""

import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.voc import Voc
from tests.support.faults import (
    OBJECT,
    SMALL,
    TRAIN,
    Fault,
    check_fault,
    class_folders,
    coco20k,
    each,
    expect_error,
    mask,
    nothing,
    peak_memory_mib,
    picture,
    png_of,
    probing,
    records,
    save_mask,
    spoil,
    voc,
)
from tests.support.spair import PAIRS, spair, write_annotation

VOC = Path("VOCdevkit/VOC2012")
ENCODER = "--checkpoint encoder.safetensors --layer 1"
PCA = f"probe --task pca --dataset folder --data-root photos {ENCODER}"
STRICT = f"{PCA} --on-bad-image fail"
KNN = f"probe --task knn --dataset class_folders --data-root . {ENCODER}"
SEGMENTATION = f"probe --task segmentation --dataset voc2012 --data-root . {ENCODER}"
FAST_SEGMENTATION = f"{SEGMENTATION} {' '.join(SMALL['segmentation'])}"
TOKENCUT = f"probe --task tokencut --dataset voc2012 --data-root . {ENCODER}"
CHECK_VOC = "data check voc2012 --data-root . --subset"
CHECK_COCO = "data check coco20k --data-root . --subset"
CHECK_SPAIR = "data check spair71k --data-root . --subset"
Prepare = Callable[[Path], object]


def spoilt_photo(how: str) -> Prepare:
    return lambda folder: spoil(folder / "photos/1.jpg", how)


def link_to_nothing(folder: Path) -> None:
    (folder / "photos/2.jpg").unlink()
    (folder / "photos/2.jpg").symlink_to("not there.jpg")


def link_to_itself(folder: Path) -> None:
    (folder / "photos/loop").symlink_to(folder / "photos/loop")


def change_voc(change: Callable[[Path], object]) -> Prepare:
    """Return a function that creates VOC2012 and changes something in its folder."""
    return lambda folder: change(voc(folder))


def colour_mask(base: Path) -> None:
    path = base / "SegmentationClass/t0.png"
    Image.open(path).convert("RGB").save(path)


def label_21(name: str, base: Path) -> None:
    indices = mask()
    indices[0, 0] = 21
    save_mask(base / f"SegmentationClass/{name}.png", indices)


def without(pattern: str, base: Path) -> None:
    """Remove three files, and the encoder, which must not be loaded before the data is checked."""
    for number in (1, 2, 3):
        (base / pattern.format(number)).unlink()
    (base.parents[1] / "encoder.safetensors").unlink()


def without_a_second_class_in_masks(base: Path) -> None:
    for name in TRAIN:
        save_mask(base / f"SegmentationClass/{name}.png", np.zeros((32, 40), np.uint8))


def without_a_second_class(folder: Path) -> None:
    for path in class_folders(folder).glob("*/dog/*"):
        path.unlink()


def classes_within_classes(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / name / "old").mkdir(parents=True)
        picture(0).save(folder / name / "old/0.jpg")


def list_absent_images(base: Path) -> None:
    names = [*TRAIN, *(f"absent{number}" for number in range(9))]
    (base / "ImageSets/Main/trainval.txt").write_text("\n".join(names))


IMAGES = [
    Fault("an empty image", spoilt_photo("empty"), STRICT, 3, ("photos/1.jpg", "empty")),
    Fault("a cut image", spoilt_photo("half"), STRICT, 3, ("photos/1.jpg", "cut short")),
    Fault("two lost bytes", spoilt_photo("last2"), STRICT, 3, ("photos/1.jpg", "cut short")),
    Fault("a web page", spoilt_photo("html"), STRICT, 3, ("photos/1.jpg", "web page")),
    Fault("a Git LFS pointer", spoilt_photo("lfs"), STRICT, 3, ("photos/1.jpg", "Git LFS")),
    Fault("a broken link", link_to_nothing, STRICT, 3, "photos/2.jpg"),
    Fault("a broken link to skip", link_to_nothing, PCA, 3, "photos/2.jpg"),
    Fault("a broken link to learn from", link_to_nothing,
          "pretrain --data-root photos --out run", 3, "photos/2.jpg"),
    Fault("a link to itself", link_to_itself, "data verify photos", 3, "photos/loop"),
    Fault("an image for a folder", nothing, PCA.replace("photos", "photos/0.jpg"), 3, "0.jpg"),
]  # fmt: skip
MASKS_AND_LISTS = [
    Fault("a mask of colours", change_voc(colour_mask), SEGMENTATION, 3, ("t0.png", "colours")),
    Fault("a label out of range in a training image", change_voc(partial(label_21, "t0")),
          SEGMENTATION, 3, ("t0.png", "21")),
    Fault("a label out of range in a scored image", change_voc(partial(label_21, "v0")),
          CHECK_VOC, 3, ("v0.png", "21")),
    Fault("a mask of another size",
          change_voc(lambda base: save_mask(base / "SegmentationClass/v1.png", mask(32, 41))),
          CHECK_VOC, 3, ("v1.png", "41 x 32")),
    Fault("a mask of another size is no image to skip",
          change_voc(lambda base: save_mask(base / "SegmentationClass/v1.png", mask(32, 41))),
          f"{FAST_SEGMENTATION} --on-bad-image skip", 3, ("v1.png", "41 x 32")),
    Fault("missing images", change_voc(partial(without, "JPEGImages/t{}.jpg")),
          SEGMENTATION, 3, ("3 of 4 images", "t1.jpg, t2.jpg, t3.jpg")),
    Fault("missing masks", change_voc(partial(without, "SegmentationClass/t{}.png")),
          SEGMENTATION, 3, ("3 of 4 masks", "t1.png, t2.png, t3.png")),
    Fault("missing annotations", change_voc(partial(without, "Annotations/t{}.xml")),
          TOKENCUT, 3, ("3 of 7 annotations", "t1.xml, t2.xml, t3.xml")),
    Fault("more than five missing images", change_voc(list_absent_images), TOKENCUT, 3,
          ("9 of 13 images", "absent4.jpg, ...")),
    Fault("an empty list",
          change_voc(lambda base: (base / "ImageSets/Segmentation/val.txt").write_text("\n\n")),
          SEGMENTATION, 3, "val.txt"),
    Fault("masks of a single class", change_voc(without_a_second_class_in_masks),
          FAST_SEGMENTATION, 3, "class"),
    Fault("a single class", without_a_second_class, KNN, 3, "class"),
    Fault("classes within classes", classes_within_classes,
          "data check class_folders --data-root .", 3, "SPLIT/CLASS/IMAGE or CLASS/IMAGE"),
]  # fmt: skip


@each([*IMAGES, *MASKS_AND_LISTS])
def test_a_faulty_image_mask_or_list_is_named(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)


@pytest.mark.parametrize("exists", [True, False])
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
def test_a_wrong_folder_shows_the_expected_layout(workdir, capsys, dataset, task, tree, exists):
    if exists:
        (workdir / "elsewhere/things").mkdir(parents=True)
    command = f"probe --task {task} --dataset {dataset} --data-root elsewhere {ENCODER}"

    check_fault(Fault("", nothing, command, 3, ("elsewhere", tree)), workdir, capsys)


def voc_box(*corners: object, more: str = "", before: str = "") -> Prepare:
    """Return a function that gives the first image of VOC, which is 40 x 32, one object."""

    def prepare(folder: Path) -> None:
        path = voc(folder) / "Annotations/t0.xml"
        names = ("xmin", "ymin", "xmax", "ymax")
        box = "".join(f"<{name}>{n}</{name}>" for name, n in zip(names, corners, strict=True))
        one = f"<object><name>cat</name><bndbox>{box}</bndbox></object>"
        path.write_text(f"<annotation>{more}{before}{one}</annotation>")

    return prepare


def voc_xml(old: str, new: str) -> Prepare:
    """Return a function that replaces a part of a valid annotation."""

    def prepare(folder: Path) -> None:
        size = "<size><width>40</width><height>32</height></size>"
        voc_box(9, 9, 24, 24, more=size)(folder)
        path = folder / VOC / "Annotations/t0.xml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return prepare


def bad_voc_box(name: str, *corners: object) -> Fault:
    return Fault(name, voc_box(*corners), CHECK_VOC, 3, ("Annotations/t0.xml", "object 1"))


def bad_voc_xml(name: str, old: str, new: str, command: str = CHECK_VOC) -> Fault:
    return Fault(name, voc_xml(old, new), command, 3, "t0.xml")


def coco(bbox: object = (8, 8, 16, 16), width: object = 40, **changed: object) -> Prepare:
    """Return a function that creates COCO20k with one object in one image of 40 x 32."""

    def prepare(folder: Path) -> None:
        one = {"id": 7, "image_id": 1, "category_id": 1, "iscrowd": 0, "bbox": bbox}
        image = {"id": 1, "width": width, "height": 32}
        coco20k(folder, [1], {"images": [image], "annotations": [one | changed]})

    return prepare


def bad_coco(name: str, *words: str, **changed: object) -> Fault:
    words = ("instances_train2014.json", *words)
    return Fault(f"COCO: {name}", coco(**changed), CHECK_COCO, 3, words)


def coco_with_other_names(folder: Path) -> None:
    coco()(folder)
    images = folder / "images/train2014"
    (images / "COCO_train2014_000000000001.jpg").rename(images / "cat.jpg")
    (folder / "coco_20k_filenames.txt").write_text("train2014/cat.jpg\n")


def bad_pair(name: str, words: str, **changed: object) -> Fault:
    def prepare(folder: Path) -> None:
        write_annotation(spair(folder), PAIRS[0], **changed)

    file = PAIRS[0].line.replace(":", "_").partition("_")[0]
    return Fault(f"SPair: {name}", prepare, CHECK_SPAIR, 3, (file, words))


FIRST = OBJECT.removeprefix("<annotation>").removesuffix("</annotation>")
EASY = f"{CHECK_VOC} dataset.exclude_difficult=true"
BOXES = [
    bad_voc_box("an underscore in a number", 9, 9, "2_4", 24),
    bad_voc_box("Arabic digits", 9, 9, "٢٤", 24),
    bad_voc_box("no number", "", 9, 24, 24),
    bad_voc_box("right to left", 24, 9, 9, 24),
    bad_voc_box("bottom to top", 9, 24, 24, 9),
    bad_voc_box("no width", 9, 9, 8, 24),
    bad_voc_box("no height", 9, 9, 24, 8),
    bad_voc_box("right of the image", 41, 9, 60, 24),
    bad_voc_box("below the image", 9, 33, 24, 60),
    bad_voc_box("left of the image", -30, 9, 0, 24),
    bad_voc_box("huge coordinates", 9, 9, 1e308, 1e308),
    bad_voc_box("too far to the right", 9, 9, 81, 24),
    bad_voc_box("too far to the left", -40, 9, 24, 24),
    Fault("the second object is named", voc_box(9, 9, 8, 24, before=FIRST), CHECK_VOC, 3,
          ("t0.xml", "object 2")),
    Fault("a bad box stops TokenCut", voc_box(9, 9, 8, 24), TOKENCUT, 3, ("t0.xml", "object 1")),
    bad_voc_xml("an empty width", "<width>40", "<width>"),
    bad_voc_xml("another width than the image", "<width>40", "<width>80"),
    bad_voc_xml("no box", "bndbox>", "box>"),
    bad_voc_xml("cut XML", "</annotation>", ""),
    bad_voc_xml("another root element", "annotation>", "html>"),
    bad_voc_xml("a text for difficult", "<bndbox>", "<difficult>yes</difficult><bndbox>", EASY),
    bad_voc_xml("difficult is 2", "<bndbox>", "<difficult>2</difficult><bndbox>", EASY),
    bad_coco("huge coordinates", bbox=[8, 8, 1e300, 16]),
    bad_coco("a truth value", bbox=[8, 8, True, 16]),
    bad_coco("three numbers", bbox=[8, 8, 16]),
    bad_coco("a dictionary", bbox={"x": 8, "y": 8, "w": 16, "h": 16}),
    bad_coco("negative width", bbox=[8, 8, -4, 16]),
    bad_coco("right of the image", "object 7", "[41.0, 8.0, 57.0, 24.0]", bbox=[41, 8, 16, 16]),
    bad_coco("a truth value for iscrowd", "object 7", iscrowd=False),
    bad_coco("iscrowd is 2", "object 7", iscrowd=2),
    bad_coco("a fractional image id", "object 7", image_id=1.6),
    bad_coco("a truth value for an id", id=True),
    bad_coco("another width than the image", width=80),
    bad_coco("a text for the width", width="40"),
    Fault("COCO: other file names", coco_with_other_names, CHECK_COCO, 3, "cat is not"),
    bad_pair("no box", "trg_bndbox", trg_bndbox=None),
    bad_pair("right to left", "x = 30", trg_bndbox=[30, 8, 5, 58]),
    bad_pair("no height", "y = 8", trg_bndbox=[5, 8, 30, 8]),
    bad_pair("outside of the image", "trg_bndbox", trg_bndbox=[400, 8, 430, 58]),
    bad_pair("a truth value in a point", "trg_kps", trg_kps=[[True, 8], [24, 16], [36, 24]]),
    bad_pair("no points", "src_kps", src_kps=[]),
    bad_pair("a third coordinate", "src_kps", src_kps=[[1, 2, 3]]),
    bad_pair("fewer points", "3 src_kps and 1 trg_kps", trg_kps=[[1, 2]]),
    bad_pair("a point outside", "outside the 40 x 60", trg_kps=[[1, 2], [3, 4], [41, 5]]),
    bad_pair("another category", "cat", category="dog"),
]  # fmt: skip


@each(BOXES)
def test_an_invalid_box_or_annotation_is_named(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)


@pytest.mark.parametrize(
    ("corners", "size", "box"),
    [
        ((" 9 ", "\n9", "24.5", "24"), "", [8, 8, 24.5, 24]),
        ((9, 9, 9, 9), "", [8, 8, 9, 9]),
        (("1e1", 0, 41, 33), "", [9, -1, 41, 33]),
        ((-39, 9, 80, 24), "", [-40, 8, 80, 24]),
        ((9, 9, 24, 24), "<size><width>40</width><height>32</height></size>", [8, 8, 24, 24]),
        ((9, 9, 24, 24), "<size><width>0</width><height>0</height></size>", [8, 8, 24, 24]),
    ],
)
def test_unusual_boxes_of_voc_are_read_as_stored(tmp_path, corners, size, box):
    voc_box(*corners, more=size)(tmp_path)

    boxes = Voc(tmp_path).discovery()[0].boxes

    assert boxes is not None
    assert boxes.tolist() == [box]


def test_an_image_with_only_difficult_objects_is_left_out(tmp_path):
    voc_xml("<bndbox>", "<difficult> 1 </difficult><bndbox>")(tmp_path)

    assert "t0" not in Voc(tmp_path, exclude_difficult=True).discovery().ids


@pytest.mark.parametrize("bbox", [[8, 8, 16, 0], [8, 8, 0.3, 16], [40, 8, 0, 0], [39.6, 8, 0.4, 9]])
def test_flat_boxes_of_coco_are_kept_as_in_lost(workdir, bbox):
    coco(bbox)(workdir / "COCO")

    if bbox == [8, 8, 16, 0]:
        assert main(probing("tokencut", "coco20k", workdir / "COCO")) == 0
        (record,) = records()
        assert (record.num_images, record.value) == (1, 0.0)
    boxes = Coco20k(workdir / "COCO").discovery()[0].boxes
    assert boxes is not None
    assert np.ptp(boxes.reshape(2, 2), axis=0).min() == 0


@pytest.mark.parametrize("how", ["empty", "html"])
def test_an_unreadable_image_is_left_out_and_counted(workdir, how):
    photos = workdir / "photos"
    spoil(photos / "1.jpg", how)

    assert main(probing("pca", "folder", photos)) == 0

    (skipping,) = records()
    assert skipping.num_images == 3
    assert skipping.details["left_out"] == {"all": {"count": 1, "first": ["1.jpg"]}}
    (photos / "1.jpg").unlink()
    assert main(probing("pca", "folder", photos, "--out", "without")) == 0
    assert records("without")[0].value == skipping.value


@pytest.mark.parametrize("task", ["tokencut", "segmentation", "retrieval", "knn", "classification"])
def test_every_probe_leaves_out_unreadable_images_of_any_split(workdir, task):
    dataset = "class_folders" if task in ("knn", "classification") else "voc2012"
    build = class_folders if dataset == "class_folders" else voc
    base, smaller = build(workdir / "a"), build(workdir / "b")
    broken = ["JPEGImages/t1.jpg", "JPEGImages/v2.jpg"]
    if dataset == "class_folders":
        broken = ["train/cat/1.jpg", "val/dog/0.jpg"]
    for name in broken:
        spoil(base / name, "half")
        (smaller / name).unlink()
    for listing in smaller.glob("ImageSets/*/*.txt"):
        kept = [word for word in listing.read_text().split() if word not in ("t1", "v2")]
        listing.write_text("\n".join(kept))

    assert main(probing(task, dataset, workdir / "a", "--on-bad-image", "skip")) == 0
    assert main(probing(task, dataset, workdir / "b", "--out", "without")) == 0

    skipping = {(r.metric, r.value, r.num_images) for r in records()}
    assert skipping == {(r.metric, r.value, r.num_images) for r in records("without")}
    (left_out,) = {json.dumps(r.details["left_out"]) for r in records()}
    assert sum(split["count"] for split in json.loads(left_out).values()) == 2


def test_results_with_and_without_skipped_images_never_share_a_table(workdir, capsys):
    skipping = probing("pca", "folder", workdir / "photos", "--on-bad-image", "skip")
    assert main(skipping) == 0
    spoil(workdir / "photos/1.jpg", "half")
    assert main(skipping) == 0
    capsys.readouterr()
    assert main(["table", "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert out.count("| block |") == 2
    assert "left_out=1 of all" in out

    assert main(skipping) == 0
    assert "skipping 1 of 1 results" in capsys.readouterr().err
    before = records()
    for number in (0, 2, 3):
        spoil(workdir / f"photos/{number}.jpg", "html")
    assert "none of the 4 images" in expect_error(capsys, skipping, 3)
    assert records() == before


def test_changed_missing_and_new_files_are_found_by_their_sha256(workdir, capsys):
    base = voc(workdir)
    verify = ["data", "verify", str(base), "--manifest", "lists/voc"]
    picture(9).save(base / "back\\slash\n.png")
    assert main(verify) == main(verify) == 0
    path = base / "JPEGImages/t2.jpg"
    content = bytearray(path.read_bytes())
    content[-40] ^= 4
    path.write_bytes(content)
    # The decoder does not notice the change.
    assert Voc(workdir).train()[2].image.shape == (32, 40, 3)

    message = expect_error(capsys, verify, 3)

    assert "1 changed" in message
    assert "JPEGImages/t2.jpg" in message
    assert "t1.jpg" not in message
    assert main([*verify, "--update"]) == 0
    picture(9).save(base / "new.png")
    assert main(verify) == 0
    assert "new.png" in capsys.readouterr().err
    (base / "JPEGImages/t0.jpg").unlink()
    message = expect_error(capsys, verify, 3)
    assert "1 missing" in message
    assert "t0.jpg" in message


@pytest.mark.parametrize("mark", ["  ./", " *"])
def test_lists_of_find_and_of_binary_mode_are_read(workdir, capsys, mark):
    assert main(["data", "verify", "photos"]) == 0
    listing = workdir / "photos/SHA256SUMS"
    listing.write_text(listing.read_text().replace("  ", mark))

    assert main(["data", "verify", "photos"]) == 0
    picture(9).save(workdir / "photos/2.jpg")
    assert "2.jpg" in expect_error(capsys, ["data", "verify", "photos"], 3)


def list_of_digests(line: str) -> Prepare:
    return lambda folder: (folder / "photos/SHA256SUMS").write_text(f"{line}\n")


VERIFY = [
    Fault("a line without a digest", list_of_digests("no digest  0.jpg"), "data verify photos", 3,
          "line 1"),
    Fault("a missing folder", nothing, "data verify absent", 3, "absent"),
    *(Fault(f"a listed file outside of the folder: {name}", list_of_digests(f"{'0' * 64}  {name}"),
            "data verify photos", 3, name)
      for name in ("/etc/hostname", "../encoder.safetensors")),
]  # fmt: skip


@each(VERIFY)
def test_a_faulty_list_of_digests_is_named(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_a_decompression_bomb_is_refused_in_little_memory(workdir, capsys, side):
    photos = workdir / "photos"
    assert main(probing("pca", "folder", photos)) == 0
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = [packer.compress(bytes(1 + 3 * side)) for _ in range(40)]
    pixels = b"".join([*rows, packer.flush()])
    (photos / "0.png").write_bytes(png_of((b"IHDR", header), (b"IDAT", pixels)))

    with peak_memory_mib() as peak:
        message = expect_error(
            capsys, probing("pca", "folder", photos, "--on-bad-image", "fail"), 3
        )

    assert "0.png" in message
    assert peak() < 60


def test_exif_rotation_leaves_image_mask_and_boxes_in_agreement(workdir):
    base = voc(workdir)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0).save(base / "JPEGImages/t0.jpg", quality=95, exif=exif)

    labelled, boxed = Voc(workdir).train()[0], Voc(workdir).discovery()[0]

    assert labelled.mask is not None
    assert np.array_equal(labelled.mask, mask())
    assert labelled.image.shape[:2] == labelled.mask.shape == (32, 40)
    inside = labelled.image[labelled.mask == 8].mean()
    assert inside > labelled.image[labelled.mask == 0].mean() + 60
    assert np.array_equal(labelled.image, boxed.image)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_mask_without_labels_is_counted_and_the_metric_is_finite(workdir, batch_size):
    base = voc(workdir)
    ignored = np.full((32, 40), 255, np.uint8)
    save_mask(base / "SegmentationClass/t1.png", ignored)
    save_mask(base / "SegmentationClass/v1.png", ignored)
    # In a batch of one image, no pixel is left to average over.
    batches = [f"probe.training.batch_size={batch_size}", "probe.training.epochs=40"]

    assert main(probing("segmentation", "voc2012", workdir, *batches)) == 0

    for record in records():
        assert 0 <= record.value <= 100
        assert record.details["all_ignored_train_images"] == 1
        # A head of NaN predicts one class everywhere.
        assert min(record.details["iou_by_class"][name] for name in ("background", "cat")) > 20


@pytest.mark.parametrize("task", ["tokencut", "discovery", "pca", "segmentation", "retrieval"])
def test_images_of_any_size_are_probed_and_boxes_lie_inside(workdir, task):
    base = voc(workdir)
    sizes = {"0": (1, 1), "1": (33, 47), "2": (1, 60)}
    for number, (height, width) in sizes.items():
        for first, name in ((5, f"v{number}"), (50, f"t{number}")):
            content = picture(first + int(number), height, width)
            content.save(base / f"JPEGImages/{name}.jpg")
            save_mask(base / f"SegmentationClass/{name}.png", np.full((height, width), 8, np.uint8))
            annotation = base / f"Annotations/{name}.xml"
            text = annotation.read_text().replace("min>9<", "min>1<")
            text = text.replace("xmax>24<", f"xmax>{width}<").replace("ymax>24<", f"ymax>{height}<")
            annotation.write_text(text)

    assert main(probing(task, "voc2012", workdir)) == 0

    assert all(0 <= record.value <= 100 for record in records())
    if task in ("tokencut", "discovery"):
        (log,) = workdir.rglob("results/**/*.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        found = {line["image"]: line for line in lines if line.get("image", "").startswith("v")}
        for number, (height, width) in sizes.items():
            # Every pixel lies in a patch.
            assert found[f"v{number}"]["grid"] == [-(-height // 8), -(-width // 8)]
            (cell,) = found[f"v{number}"]["cells"].values()
            x0, y0, x1, y1 = cell["box"]
            assert 0 <= x0 < x1 <= width
            assert 0 <= y0 < y1 <= height
