"""Row 54 of the catalogue of faults: a fingerprint follows the content of the files, read once.

With data.fingerprint=stat it follows their sizes and times, and says so.
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


Case = tuple[Callable[[Path], Path], Callable[[Path], ImageSet], str, bytes | None, bytes]
XML = "VOCdevkit/VOC2012/Annotations/v1.xml"
LIST = "val/val_annotations.txt"
CASES: dict[str, Case] = {
    "picture": (photo_folder, lambda r: ImageFolder(r).images(), "2.jpg", None, b""),
    "VOC boxes": (voc_set, lambda r: Voc(r).discovery(), XML, b"<xmin>9<", b"<xmin>8<"),
    "COCO boxes": (coco_set, lambda r: Coco20k(r).discovery(), JSON, b"2, 5, 6]", b"2, 5, 4]"),
    "mask": (named_folders, lambda r: ImageMaskFolders(r).val(), "masks/val/1.png", None, b""),
    "class names": (
        *(named_folders, lambda r: ImageMaskFolders(r).val()),
        *("classes.txt", b"sky\nsea", b"sea\nsky"),
    ),
    "labels": (
        tiny_imagenet,
        lambda r: ClassFolders(r).val(),
        LIST,
        b"cat1.jpg\tcat",
        b"cat1.jpg\tdog",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fault_54_changed_bytes_of_equal_size_and_time_are_noticed(tmp_path, case):
    make, opened, file, old, new = CASES[case]
    root = make(tmp_path / "data")
    settle()
    before = [opened(root).fingerprint() for _ in range(2)]

    repaint(root / file, old, new)

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


def test_changes_of_other_images_do_not_matter(tmp_path):
    root = coco_set(tmp_path / "COCO")
    first = Coco20k(root).discovery().fingerprint()

    repaint(root / JSON, b"[3, 2, 5, 6]", b"[3, 2, 5, 4]")
    repaint(root / JSON, b"seen", b"SEEN")

    assert Coco20k(root).discovery().fingerprint() == first


def test_separators_and_odd_bytes_in_names_are_distinguished(tmp_path):
    names = (b"a\tb.jpg", b"a/b.jpg", b"a\nb.jpg", b"\xff.jpg")
    found = set()
    for number, name in enumerate(names):
        path = tmp_path / str(number) / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Pillow cannot save to a name that is not UTF-8.
        picture(0).save(tmp_path / "same.jpg")
        shutil.copy(tmp_path / "same.jpg", path)
        found.add(ImageFolder(tmp_path / str(number)).images().fingerprint())

    assert len(found) == 4


def test_sizes_and_times_are_trusted_only_on_request(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos")

    def fingerprint() -> str:
        return with_read_options(ImageFolder(root).images(), BY_STAT).fingerprint()

    first = fingerprint()
    repaint(root / "1.jpg")
    assert fingerprint() == first
    os.utime(root / "1.jpg")
    assert fingerprint() != first
    assert not files_read


def test_fingerprints_of_sizes_and_times_have_a_prefix(tmp_path):
    sets: list[Any] = [
        with_read_options(ImageFolder(photo_folder(tmp_path / "photos")).images(), BY_STAT),
        dataset_with_read_options(Voc(voc_set(tmp_path)), BY_STAT).discovery(),
        dataset_with_read_options(ClassFolders(class_folders(tmp_path / "classes")), BY_STAT).val(),
    ]
    sets += [ImageSubset(images, (1, 2)) for images in sets]

    found = [images.fingerprint() for images in sets]
    assert {fingerprint[:5] for fingerprint in found} == {"stat-"}
    assert len({fingerprint[5:11] for fingerprint in found}) == 6


def test_results_by_sizes_and_times_are_kept_apart(place, capsys):
    words = probing("pca", "folder", place / "photos")
    assert main([*words, "data.fingerprint=stat"]) == 0
    assert "identified by size and time" in capsys.readouterr().out
    assert main(words) == 0
    assert "identified by size and time" not in capsys.readouterr().out

    kinds = [record.dataset_fingerprint.startswith("stat-") for record in records()]
    assert sorted(kinds) == [False, True]
    assert main(["table"]) == 0
    assert "data stat-" in capsys.readouterr().out
    fails(capsys, [*words, "data.fingerprint=times"], 2)


def test_fault_54_a_run_does_not_resume_with_changed_images(place, capsys):
    run = pretraining(
        place / "photos", "run", "train.max_minutes=0.0", "objective.crops.num_locals=0"
    )
    by_stat = [*run, "data.fingerprint=stat"]
    assert main(by_stat) == main([*by_stat, "--resume"]) == 0
    said = fails(capsys, [*run, "--resume"], 2)
    assert "data.fingerprint: stat -> content" in said
    # This difference follows from the other one.
    assert "image_files: " not in said
    settle()
    assert main([*run, "--overwrite"]) == 0

    repaint(place / "photos/0.jpg")

    said = fails(capsys, [*run, "--resume"], 2)
    assert "image_files: " in said
    assert "images: " not in said
