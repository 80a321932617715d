"""Test the fingerprint of a dataset.

A fingerprint is a hash of the images and labels of a dataset.
"""

import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files import fingerprints
from ssl_bench.data.files.file_sets import FileImageSet, Files, LabelMap, Masks
from ssl_bench.data.files.fingerprints import (
    ReadOptions,
    dataset_with_read_options,
    sample_hashes,
    with_read_options,
)
from ssl_bench.data.files.readable import ImageSubset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError
from tests.support.faults import (
    class_folders,
    coco20k,
    exit_code,
    expect_error,
    fork,
    make_pretrain_args,
    make_probe_args,
    paired_folders,
    photo_folder,
    picture,
    records,
    voc,
    wait_until,
)
from tests.support.fingerprints import repaint, settle

pytestmark = pytest.mark.usefixtures("cache")

BY_STAT = ReadOptions("stat")
JSON = "annotations/instances_train2014.json"


def fingerprint(root: Path) -> str:
    return ImageFolder(root).images().fingerprint()


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
    "labelled": (class_folders, lambda r: ClassFolders(r).val(), "val/dog/1.jpg", None, b""),
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
def test_changed_bytes_of_equal_size_and_time_are_noticed(tmp_path, case):
    make, open_images, file, old, new = CASES[case]
    root = make(tmp_path / "data")
    settle()
    before = [open_images(root).fingerprint() for _ in range(2)]

    repaint(root / file, old, new)

    assert before[0] == before[1] != open_images(root).fingerprint()


def test_copies_and_touched_files_have_the_same_fingerprint(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = fingerprint(root)
    shutil.copytree(root, tmp_path / "copy")
    os.utime(root / "1.jpg", (1, 1))
    settle()
    del files_read[:]

    assert fingerprint(root) == first
    assert set(files_read) == {"1.jpg"}
    assert fingerprint(tmp_path / "copy") == first
    # The digests of the other files are still stored.
    del files_read[:]
    assert fingerprint(root) == first
    assert not files_read


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
        found.add(fingerprint(tmp_path / str(number)))

    assert len(found) == 4


def test_sizes_and_times_are_trusted_only_on_request(tmp_path, files_read):
    def open_sets() -> list[Any]:
        sets: list[Any] = [
            with_read_options(ImageFolder(tmp_path / "photos").images(), BY_STAT),
            dataset_with_read_options(Voc(tmp_path), BY_STAT).discovery(),
            dataset_with_read_options(ClassFolders(tmp_path / "classes"), BY_STAT).val(),
        ]
        return sets + [ImageSubset(images, (1, 2)) for images in sets]

    photo_folder(tmp_path / "photos")
    class_folders(tmp_path / "classes")
    voc(tmp_path)
    first = [images.fingerprint() for images in open_sets()]
    assert {fingerprint[:5] for fingerprint in first} == {"stat-"}
    assert len({fingerprint[5:11] for fingerprint in first}) == 6
    repaint(tmp_path / "photos/1.jpg")
    assert [images.fingerprint() for images in open_sets()] == first
    os.utime(tmp_path / "photos/1.jpg")
    changed = [images.fingerprint() for images in open_sets()]
    assert [a == b for a, b in zip(changed, first, strict=True)] == [0, 1, 1, 0, 1, 1]
    assert not files_read


def test_results_by_sizes_and_times_are_kept_apart(workdir, capsys):
    words = make_probe_args("pca", "folder", workdir / "photos")
    assert main([*words, "data.fingerprint=stat"]) == 0
    assert "identified by size and time" in capsys.readouterr().out
    assert main(words) == 0
    assert "identified by size and time" not in capsys.readouterr().out

    kinds = [record.dataset_fingerprint.startswith("stat-") for record in records()]
    assert sorted(kinds) == [False, True]
    assert main(["table"]) == 0
    assert "data stat-" in capsys.readouterr().out


def test_a_run_does_not_resume_with_changed_images(workdir, capsys):
    run = make_pretrain_args(
        workdir / "photos", "run", "train.max_minutes=0.0", "objective.crops.num_locals=0"
    )
    by_stat = [*run, "data.fingerprint=stat"]
    assert main(by_stat) == main([*by_stat, "--resume"]) == 0
    message = expect_error(capsys, [*run, "--resume"], 2)
    assert "data.fingerprint: stat -> content" in message
    # This difference follows from that of `data.fingerprint`, so it is not printed.
    assert "image_files: " not in message
    settle()
    assert main([*run, "--overwrite"]) == 0

    repaint(workdir / "photos/0.jpg")

    message = expect_error(capsys, [*run, "--resume"], 2)
    assert "image_files: " in message
    assert "images: " not in message


# The cache of digests.


@pytest.mark.parametrize("has_old_mtime", [False, True])
def test_a_repainted_picture_is_noticed_in_coarse_time(tmp_path, monkeypatch, has_old_mtime):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exact, second = fingerprints.file_state, 10**9

    def coarse(path: Path) -> tuple[int, int, int, int]:
        size, mtime_ns, ctime_ns, inode = exact(path)
        return size, mtime_ns // second * second, ctime_ns // second * second, inode

    monkeypatch.setattr(fingerprints, "file_state", coarse)
    root = photo_folder(tmp_path / "photos", 1)
    # Make both changes within the same second.
    if time.time() % 1 > 0.7:
        time.sleep(1 - time.time() % 1 + 0.02)
    found = set()
    for _ in range(2):
        repaint(root / "0.jpg")
        # A program may restore the modification time, but not the change time.
        if has_old_mtime:
            os.utime(root / "0.jpg", (0, 0))
        found.add(fingerprint(root))

    assert len(found) == 2


def test_hashes_of_single_images_depend_on_content_and_bits(tmp_path):
    root = photo_folder(tmp_path / "photos", 2)
    shutil.copy(root / "0.jpg", root / "copy.jpg")

    def hashes(*options: Any) -> tuple[str, list[str]]:
        images = with_read_options(ImageFolder(root).images(), ReadOptions(*options))
        return images.fingerprint(), sample_hashes(images)

    whole, (first, second, copy) = hashes()
    assert first == copy != second
    # An image that needs no bits has the same pixels with 16 bits.
    assert hashes("content", 16) == hashes()
    assert not {whole, first, second} & {hashes("content", 12)[0], *hashes("content", 12)[1]}
    # Without the contents, a hash is that of the whole set and the image id.
    before = hashes("stat")[1]
    assert len({*before}) == 3
    (root / "1.jpg").unlink()
    assert not {*before} & {*hashes("stat")[1]}


def test_a_damaged_cache_is_ignored_and_replaced(tmp_path, cache, files_read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = fingerprint(root)
    (kept,) = cache.iterdir()
    content = kept.read_bytes()
    flipped = [
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in (0, 30, 70, len(content) - 1)
    ]
    older = content.replace(b"files 1", b"files 0")

    for damaged in (*flipped, b"", content[:-40], content[:-64], content + bytes(64), older):
        kept.write_bytes(damaged)
        del files_read[:]
        assert fingerprint(root) == first
        assert len(set(files_read)) == 4
        assert kept.read_bytes()[:28] == content[:28]
    del files_read[:]
    assert fingerprint(root) == first
    assert not files_read


@pytest.mark.parametrize("has_home", [False, True])
def test_a_cache_that_cannot_be_written_is_reported_once(
    tmp_path, monkeypatch, capsys, files_read, has_home
):
    if has_home:
        (tmp_path / "cache").write_text("in the way")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError(tmp_path)))
    roots = [photo_folder(tmp_path / name) for name in ("one", "other")]
    settle()

    assert len({fingerprint(root) for root in roots * 2}) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "XDG_CACHE_HOME" in line
    # Each file is read once for its bytes and once for its orientation, in both commands.
    assert len(files_read) == 32


@pytest.mark.parametrize(
    ("command", "number", "code", "least"),
    # A probe also stores for each of the 40 photographs that it can be decoded.
    [("probe", signal.SIGINT, 130, 70), ("pretrain", signal.SIGTERM, 75, 30)],
)
def test_an_interrupt_keeps_the_computed_digests(
    workdir, cache, monkeypatch, files_read, command, number, code, least
):
    root = photo_folder(workdir / "many", 40)
    settle()
    read = fingerprints._read

    def read_slowly(part: fingerprints.FilePart) -> bytes:
        if len(files_read) > 30:
            (workdir / "slow").touch()
            wait_until((workdir / "signalled").exists)
            time.sleep(0.5)
        return read(part)

    monkeypatch.setattr(fingerprints, "_read", read_slowly)
    words = (
        make_probe_args("pca", "folder", root)
        if command == "probe"
        else make_pretrain_args(root, "run")
    )
    child = fork(lambda: main(words), stderr=workdir / "stderr")
    wait_until((workdir / "slow").exists)
    os.kill(child, number)
    (workdir / "signalled").touch()

    assert exit_code(child) == code, (workdir / "stderr").read_text()
    kept = sum(len(fingerprints._load_entries(path)) for path in cache.iterdir())
    assert least <= kept < least + 45


def test_changing_missing_and_special_files_are_refused(tmp_path, monkeypatch):
    root = photo_folder(tmp_path / "photos")
    settle()
    read = fingerprints._read

    def change_meanwhile(part: fingerprints.FilePart) -> bytes:
        digest = read(part)
        if part.file.name == "2.jpg":
            part.file.write_bytes(b"more")
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(fingerprints, "_read", change_meanwhile)
        with pytest.raises(DataError, match=r"2\.jpg"):
            fingerprint(root)
    images = ImageFolder(root).images()
    (root / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"1\.jpg .*No such file"):
        images.fingerprint()
    os.mkfifo(root / "1.jpg")
    with pytest.raises(DataError, match=r"1\.jpg is not a regular file"):
        fingerprint(root)


# Image sets that read files.


@pytest.fixture
def images(tmp_path: Path) -> FileImageSet:
    paired_folders(tmp_path, {"train": "abc", "val": "d"})
    return ImageMaskFolders(tmp_path, class_names=[str(n) for n in range(9)]).train()


def test_an_image_that_is_named_twice_is_refused(images):
    with pytest.raises(DataError):
        replace(images, ids=("a", "b", "a")).validate()


def test_the_fingerprint_follows_ids_contents_and_the_meaning_of_labels(images):
    assert images.masks is not None
    # The images are not decoded.
    for path in images.images.folder.glob("*"):
        path.write_bytes(b"no picture")
    first, masks = images.fingerprint(), images.masks.files
    changed = [
        replace(images, ids=("a", "b")),
        replace(images, masks=None),
        replace(images, class_names=images.class_names[::-1]),
        replace(images, masks=Masks(masks, LabelMap({0: 0, 8: 1}, hint="-"))),
    ]
    assert len({first, *(other.fingerprint() for other in changed)}) == 5
    assert len({tuple(sample_hashes(other)) for other in (images, *changed[2:])}) == 3
    by_stat = replace(images, options=BY_STAT)
    assert by_stat.fingerprint() != replace(by_stat, apply_exif_orientation=True).fingerprint()
    assert replace(images, name="other", split="part").fingerprint() == first
    copy = pickle.loads(pickle.dumps(images))
    assert (copy.fingerprint(), copy.ids) == (first, images.ids)

    with masks.path("a").open("ab") as file:
        file.write(b"x")
    assert images.fingerprint() == first, "computed once"
    assert replace(images).fingerprint() != first


def test_missing_files_are_found_by_listing_their_folders(images, monkeypatch):
    files, folder = Files(images.images.folder, ".jpg"), images.images.folder
    (folder / "deeper").mkdir()
    (folder / "deeper/d.jpg").symlink_to(folder / "a.jpg")
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "folder.jpg").mkdir()

    absent = ["gone", "folder", "deeper/e", "no/f"]
    names = ["gone.jpg", "folder.jpg", "e.jpg", "f.jpg"]
    assert files.list_missing(["a", "b", "deeper/d", *absent]) == names
    # Some file systems ignore upper and lower case.
    monkeypatch.setattr(Path, "is_file", lambda path: path.name.lower() == "a.jpg")
    assert files.list_missing(["A"]) == []
