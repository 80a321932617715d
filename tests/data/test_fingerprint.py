"""Row 54 of the catalogue of faults: a fingerprint is of what the files hold, read once.

Or of their sizes and times, where these are to be trusted, and says so.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import (
    ReadOptions,
    dataset_with_read_options,
    with_read_options,
)
from ssl_bench.data.files.readable import ImageSubset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import ImageSet
from tests.support.faults import (
    class_folders,
    coco20k,
    fails,
    paired_folders,
    photo_folder,
    picture,
    pretraining,
    probing,
    records,
    voc,
)
from tests.support.repainting import repaint, settle

pytestmark = pytest.mark.usefixtures("cache")

BY_STAT = ReadOptions("stat")

JSON = "annotations/instances_train2014.json"


def coco_set(root: Path) -> Path:
    images = [{"id": 7, "note": "seen"}, {"id": 3}]
    boxes = [{"id": n, "image_id": n, "bbox": [n, 2, 5, 6], "iscrowd": 0} for n in (7, 3)]
    coco20k(root, [7], {"images": images, "annotations": boxes})
    return root


def tiny_imagenet(root: Path) -> Path:
    class_folders(root)
    names = [(kind, n) for kind in ("cat", "dog") for n in range(3)]
    for kind, n in names:
        (root / f"val/{kind}/{n}.jpg").rename(root / f"val/{kind}{n}.jpg")
    lines = [f"{kind}{n}.jpg\t{kind}\t0\t0\n" for kind, n in names]
    (root / "val/val_annotations.txt").write_text("".join(lines))
    return root


def named_folders(root: Path) -> Path:
    """One photograph and its mask for training, one for validation."""
    paired_folders(root, {"train": "1", "val": "1"})
    (root / "classes.txt").write_text("sky\nsea\na\nb\nc\nd\ne\nf\ng")
    return root


def voc_set(root: Path) -> Path:
    return voc(root).parents[1]


Opener = Callable[[Path], ImageSet]
YEAR = "VOCdevkit/VOC2012"


def at(path: str, old: bytes | None = None, new: bytes = b"") -> Callable[[Path], None]:
    return lambda root: repaint(root / path, old, new)


CASES: dict[str, tuple[Callable[[Path], Path], Opener, Callable[[Path], None]]] = {
    "picture": (photo_folder, lambda r: ImageFolder(r).images(), at("2.jpg")),
    "VOC boxes": (
        *(voc_set, lambda r: Voc(r).discovery()),
        at(f"{YEAR}/Annotations/v1.xml", b"<xmin>9<", b"<xmin>8<"),
    ),
    "COCO boxes": (
        *(coco_set, lambda r: Coco20k(r).discovery()),
        at(JSON, b"[7, 2, 5, 6]", b"[7, 2, 5, 4]"),
    ),
    "mask": (
        *(named_folders, lambda r: ImageMaskFolders(r).val()),
        at("masks/val/1.png"),
    ),
    "names of classes": (
        *(named_folders, lambda r: ImageMaskFolders(r).val()),
        at("classes.txt", b"sky\nsea", b"sea\nsky"),
    ),
    "labelled image": (class_folders, lambda r: ClassFolders(r).val(), at("val/dog/1.jpg")),
    "list of labels": (
        *(tiny_imagenet, lambda r: ClassFolders(r).val()),
        at("val/val_annotations.txt", b"cat1.jpg\tcat", b"cat1.jpg\tdog"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fault_54_bytes_that_change_at_the_same_size_and_time_are_noticed(tmp_path, case):
    make, opened, change = CASES[case]
    root = make(tmp_path / "data")
    settle()
    before = [opened(root).fingerprint() for _ in range(2)]

    change(root)

    assert before[0] == before[1] != opened(root).fingerprint()


def test_copies_and_touched_files_have_the_same_fingerprint(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = ImageFolder(root).images().fingerprint()
    shutil.copytree(root, tmp_path / "copy")
    os.utime(root / "1.jpg", (1, 1))
    settle()
    del files_read[:]

    assert ImageFolder(root).images().fingerprint() == first
    assert set(files_read) == {"1.jpg"}
    assert ImageFolder(tmp_path / "copy").images().fingerprint() == first
    root.rename(tmp_path / "moved")
    assert ImageFolder(tmp_path / "moved").images().fingerprint() == first


def test_a_change_that_concerns_other_images_is_none(tmp_path):
    root = coco_set(tmp_path / "COCO")
    first = Coco20k(root).discovery().fingerprint()

    repaint(root / JSON, b"[3, 2, 5, 6]", b"[3, 2, 5, 4]")
    repaint(root / JSON, b"seen", b"SEEN")

    assert Coco20k(root).discovery().fingerprint() == first


def test_names_that_look_like_two_are_one(tmp_path):
    for name, parts in (("one", ["a\tb.jpg"]), ("two", ["a", "b.jpg"]), ("three", ["a\nb.jpg"])):
        path = tmp_path / name / "/".join(parts)
        path.parent.mkdir(parents=True)
        picture(0).save(path)
    odd = Path(os.fsdecode(b"\xff.jpg"))
    photo_folder(tmp_path / "four", 1)
    (tmp_path / "four/0.jpg").rename(tmp_path / "four" / odd)

    names = ("one", "two", "three", "four")
    assert len({ImageFolder(tmp_path / name).images().fingerprint() for name in names}) == 4


def test_sizes_and_times_are_trusted_where_that_is_asked_for(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos")

    def found() -> str:
        return with_read_options(ImageFolder(root).images(), BY_STAT).fingerprint()

    first = found()
    repaint(root / "1.jpg")
    assert found() == first
    os.utime(root / "1.jpg")
    assert found() != first
    assert not files_read


def test_every_kind_of_image_set_says_that_it_trusts_times(tmp_path):
    sets: list[Any] = [
        with_read_options(ImageFolder(photo_folder(tmp_path / "photos")).images(), BY_STAT),
        dataset_with_read_options(Voc(voc(tmp_path).parents[1]), BY_STAT).discovery(),
        dataset_with_read_options(ClassFolders(class_folders(tmp_path / "classes")), BY_STAT).val(),
    ]
    sets += [ImageSubset(images, (1, 2)) for images in sets]

    found = [images.fingerprint() for images in sets]
    assert all(fingerprint.startswith("stat-") for fingerprint in found)
    assert len({fingerprint[5:11] for fingerprint in found}) == 6


def test_numbers_that_trust_times_say_so_and_never_meet_others(place, capsys):
    words = probing("pca", "folder", place / "photos")
    assert main([*words, "data.fingerprint=stat"]) == 0
    trusting = capsys.readouterr()
    assert main(words) == 0
    reading = capsys.readouterr()

    note = "4 images, image_size=32, files identified by size and time only; "
    assert note in trusting.out
    assert note not in reading.out
    assert "that already exist" not in reading.err
    kinds = [record.dataset_fingerprint.startswith("stat-") for record in records()]
    assert sorted(kinds) == [False, True]
    assert main(["table"]) == 0
    assert "data stat-" in capsys.readouterr().out
    assert "expects content or stat" in fails(capsys, [*words, "data.fingerprint=times"], 2)


def test_fault_54_a_run_does_not_go_on_with_repainted_images_and_may_trust_times(place, capsys):
    run = pretraining(
        place / "photos", "run", "train.max_minutes=0.0", "objective.crops.num_locals=0"
    )
    assert main([*run, "data.fingerprint=stat"]) == 0
    assert main([*run, "data.fingerprint=stat", "--resume"]) == 0
    said = fails(capsys, [*run, "--resume"], 2)
    assert "data.fingerprint: stat -> content" in said
    # What follows from it is not said.
    assert "image_files: " not in said
    settle()
    assert main([*run, "--overwrite"]) == 0

    repaint(place / "photos/0.jpg")

    said = fails(capsys, [*run, "--resume"], 2)
    assert "image_files: " in said
    assert "images: " not in said
