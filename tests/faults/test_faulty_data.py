"""Test how commands treat faulty and unusual images."""

import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.options import DataOptions
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.toy import Toy
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError
from tests.faults.test_fault_table import ALLOW, ONE_STEP, coco, voc_box, voc_xml
from tests.support.faults import (
    class_folders,
    corrupt_file,
    expect_error,
    make_pretrain_args,
    make_probe_args,
    make_supervised_args,
    mask,
    paired_folders,
    peak_memory_mib,
    photo_folder,
    picture,
    png_of,
    records,
    save_mask,
    voc,
)
from tests.support.runs import log_rows


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
        assert main(make_probe_args("tokencut", "coco20k", workdir / "COCO")) == 0
        (record,) = records()
        assert (record.num_images, record.value) == (1, 0.0)
    boxes = Coco20k(workdir / "COCO").discovery()[0].boxes
    assert boxes is not None
    assert np.ptp(boxes.reshape(2, 2), axis=0).min() == 0


BROKEN = {
    "folder": ["1.jpg"],
    "class_folders": ["train/cat/1.jpg", "val/dog/0.jpg"],
    "voc2012": ["JPEGImages/t1.jpg", "JPEGImages/v2.jpg"],
}


@pytest.mark.parametrize(
    ("task", "dataset", "how"),
    [
        *(("pca", "folder", how) for how in ("empty", "html")),
        *((task, "voc2012", "half") for task in ("tokencut", "segmentation", "retrieval")),
        *((task, "class_folders", "half") for task in ("knn", "classification")),
    ],
)
def test_unreadable_images_of_any_split_are_left_out_and_counted(workdir, task, dataset, how):
    build = {"folder": photo_folder, "class_folders": class_folders, "voc2012": voc}[dataset]
    base, smaller = build(workdir / "a"), build(workdir / "b")
    for name in BROKEN[dataset]:
        corrupt_file(base / name, how)
        (smaller / name).unlink()
    for listing in smaller.glob("ImageSets/*/*.txt"):
        kept = [word for word in listing.read_text().split() if word not in ("t1", "v2")]
        listing.write_text("\n".join(kept))

    assert main(make_probe_args(task, dataset, workdir / "a", "--on-bad-image", "skip")) == 0
    assert main(make_probe_args(task, dataset, workdir / "b", "--out", "without")) == 0

    skipping = {(r.metric, r.value, r.num_images) for r in records()}
    assert skipping == {(r.metric, r.value, r.num_images) for r in records("without")}
    (left_out,) = {json.dumps(r.details["left_out"]) for r in records()}
    counts = json.loads(left_out).values()
    assert sum(split["count"] for split in counts) == len(BROKEN[dataset])
    if dataset == "folder":
        assert json.loads(left_out) == {"all": {"count": 1, "first": ["1.jpg"]}}


def test_results_with_and_without_skipped_images_never_share_a_table(workdir, capsys):
    skipping = make_probe_args("pca", "folder", workdir / "photos", "--on-bad-image", "skip")
    assert main(skipping) == 0
    corrupt_file(workdir / "photos/1.jpg", "half")
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
        corrupt_file(workdir / f"photos/{number}.jpg", "html")
    assert "none of the 4 images" in expect_error(capsys, skipping, 3)
    assert records() == before


def test_changed_missing_and_new_files_are_found_by_their_sha256(workdir, capsys):
    base = voc(workdir)
    verify = ["data", "verify", str(base), "--manifest", "lists/voc"]
    picture(9).save(base / "back\\slash\n.png")
    assert main(verify) == main(verify) == 0
    if shutil.which("sha256sum"):
        subprocess.run(
            ["sha256sum", "-c", "--strict", str(workdir / "lists/voc")], cwd=base, check=True
        )
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
def test_checksum_lists_of_find_and_binary_mode_are_read(workdir, capsys, mark):
    assert main(["data", "verify", "photos"]) == 0
    listing = workdir / "photos/SHA256SUMS"
    listing.write_text(listing.read_text().replace("  ", mark))

    assert main(["data", "verify", "photos"]) == 0
    picture(9).save(workdir / "photos/2.jpg")
    assert "2.jpg" in expect_error(capsys, ["data", "verify", "photos"], 3)


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_a_decompression_bomb_is_refused_in_little_memory(workdir, capsys, side):
    photos = workdir / "photos"
    assert main(make_probe_args("pca", "folder", photos)) == 0
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = [packer.compress(bytes(1 + 3 * side)) for _ in range(40)]
    pixels = b"".join([*rows, packer.flush()])
    (photos / "0.png").write_bytes(png_of((b"IHDR", header), (b"IDAT", pixels)))

    with peak_memory_mib() as peak:
        message = expect_error(
            capsys, make_probe_args("pca", "folder", photos, "--on-bad-image", "fail"), 3
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
def test_masks_without_labels_are_counted_and_metrics_stay_finite(workdir, batch_size):
    base = voc(workdir)
    ignored = np.full((32, 40), 255, np.uint8)
    save_mask(base / "SegmentationClass/t1.png", ignored)
    save_mask(base / "SegmentationClass/v1.png", ignored)
    # With one image per batch, a batch without labels has no pixel to average over.
    batches = [f"probe.training.batch_size={batch_size}", "probe.training.epochs=40"]

    assert main(make_probe_args("segmentation", "voc2012", workdir, *batches)) == 0

    for record in records():
        assert 0 <= record.value <= 100
        assert record.details["all_ignored_train_images"] == 1
        # A head whose weights are NaN would predict the same class everywhere.
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

    assert main(make_probe_args(task, "voc2012", workdir)) == 0

    assert all(0 <= record.value <= 100 for record in records())
    if task in ("tokencut", "discovery"):
        (log,) = workdir.rglob("results/**/*.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        found = {line["image"]: line for line in lines if line.get("image", "").startswith("v")}
        for number, (height, width) in sizes.items():
            # Every pixel is in a patch.
            assert found[f"v{number}"]["grid"] == [-(-height // 8), -(-width // 8)]
            (cell,) = found[f"v{number}"]["cells"].values()
            x0, y0, x1, y1 = cell["box"]
            assert 0 <= x0 < x1 <= width
            assert 0 <= y0 < y1 <= height


# Images that ssl-bench has written, and images that are both fitted to and scored.


def flat_class_folders(root: Path) -> Path:
    # One class has the name of a split.
    for name, seed in (("cat", 0), ("train", 50)):
        (root / name).mkdir(parents=True)
        for number in range(5):
            picture(seed + number).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("out", ["photos/results", "photos"])
def test_written_pictures_are_no_input_of_the_next_command(workdir, capsys, out):
    assert main(make_probe_args("pca", "folder", workdir / "photos", "--out", out)) == 0

    assert list((workdir / out).rglob("*.jpg.png"))
    assert main(make_probe_args("correspondence", "folder", workdir / "photos", "--out", out)) == 0
    assert {record.num_images for record in records(out)} == {4}
    assert "because ssl-bench wrote" in capsys.readouterr().err


def test_written_files_are_recognised_in_any_folder(workdir):
    photos = workdir / "photos"
    assert main(make_probe_args("pca", "folder", photos)) == 0
    for moved in ("old", "old/kept/deep"):
        shutil.copytree("results/pictures/pca", photos / moved / "any_name")
    shutil.copytree("results", photos / "before", ignore=shutil.ignore_patterns(".ssl-bench-*"))
    (photos / "link").symlink_to(workdir / "results")
    (photos / "loop").symlink_to(photos)
    assert main(["report", "--out", "results", "--into", "photos/page"]) == 0
    Toy(1, 1, cache=photos / "cache").images()

    assert list((photos / "page").rglob("*.png"))
    assert len(ImageFolder(photos).images()) == 4
    # Folders that only have the names of such folders are used.
    for name in ("results/pictures", "records", "pictures", "runs/images"):
        (photos / name).mkdir(parents=True)
        picture(9).save(photos / name / "own.png")
    assert len(ImageFolder(photos).images()) == 8

    classes = class_folders(workdir / "classes")
    pairs = paired_folders(workdir / "pairs", {"train/city": "a"})
    for folder in (classes / "train/cat", pairs / "masks/train", pairs / "images/train/city"):
        shutil.copytree("results", folder / "results")
    named = ImageMaskFolders(pairs, class_names=[str(n) for n in range(9)])
    assert len(ClassFolders(classes).train()) == 6
    assert named.train().ids == ("city/a",)
    assert len(DataOptions(str(classes)).find_images()) == 12


def test_all_tasks_of_a_command_use_the_same_images(workdir, monkeypatch):
    photos = workdir / "photos"
    list_images, calls = ImageFolder.images, []

    def images(self):
        calls.append(self.root)
        picture(40 + len(calls)).save(photos / f"new{len(calls)}.jpg")
        return list_images(self)

    monkeypatch.setattr(ImageFolder, "images", images)

    assert main(make_probe_args("pca", "folder", photos, "--task", "pca,correspondence")) == 0

    assert len(calls) == 1
    assert {record.num_images for record in records()} == {5}


def test_permission_to_overlap_changes_nothing_without_overlap(workdir, capsys):
    words = make_probe_args("knn", "class_folders", class_folders(workdir / "data"))
    assert main(words) == 0

    assert main([*words, ALLOW]) == 0

    assert "that already exist" in capsys.readouterr().err


def test_classes_below_the_root_are_split_80_to_20(workdir, capsys):
    root = flat_class_folders(workdir / "data")

    assert main(make_probe_args("knn", "class_folders", root)) == 0

    (record,) = {(r.split, r.settings["trained_on"]["split"], r.num_images) for r in records()}
    assert record == ("all:80-100%", "all:0-80%", 2)
    assert "each folder is a class" in capsys.readouterr().err
    halves = ["dataset.train_split=all:0-50%", "dataset.val_split=all:50-100%", "--out", "half"]
    assert main(make_probe_args("knn", "class_folders", root, *halves)) == 0
    assert {r.num_images for r in records("half")} == {6}
    assert main(make_probe_args("pca", "folder", root, "--out", "data/results")) == 0
    assert ClassFolders(root).train().class_names == ("cat", "train")
    for split in ("val", "test"):
        (root / split).mkdir()
        picture(0).save(root / split / "1.png")
        with pytest.raises(DataError, match="is in no class folder"):
            ClassFolders(root).train()
        shutil.rmtree(root / split)
    for number in range(4):
        (root / "cat" / f"{number}.png").unlink()
    assert "class cat" in expect_error(capsys, make_probe_args("knn", "class_folders", root), 3)


def test_pretraining_uses_all_classes_below_the_root(workdir, capsys):
    root = flat_class_folders(workdir / "data")
    assert len(DataOptions(str(root), labels=True).find_images()) == 10
    # The monitor would score images of the same folder.
    scored = make_supervised_args(root, "run", "monitor.accuracy_epochs=1")
    assert "2 of 2 scored images" in expect_error(capsys, scored, 3)
    more = ["monitor.knn_epochs=1", f"monitor.root={root}", "monitor.neighbours=1"]

    words = make_pretrain_args(workdir / "photos", "run", *more, "train.max_steps=2")
    assert main(words) == 0

    assert "knn_top1" in log_rows("run")[-1]


def test_recommended_splits_use_keys_of_the_command(workdir, capsys):
    data = class_folders(workdir / "data")
    (data / "train").rename(data / "training")

    message = expect_error(capsys, make_supervised_args(data, "run"), 3)

    assert f"data.root={data / 'training'}" in message
    assert "dataset." not in message
    words = [
        word for word in make_supervised_args(data, "run") if word not in ("--data-root", str(data))
    ]
    assert main([*words, f"data.root={data / 'training'}", ONE_STEP]) == 0
    watched = ["monitor.knn_epochs=1", f"monitor.root={data}"]
    message = expect_error(capsys, make_pretrain_args(data / "training", "other", *watched), 3)
    assert "monitor.train_split=training:0-75%" in message
    assert "dataset." not in message
