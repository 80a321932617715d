"""Test that images are read from tar files."""

import gzip
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.files import tar_shards
from ssl_bench.data.files.fingerprints import ReadOptions, with_read_options
from ssl_bench.data.files.readable import count_shared_files, find_read_errors
from ssl_bench.data.files.tar_shards import TarImages, find_shards, index_shard
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.webdataset import WebDataset, is_webdataset
from ssl_bench.errors import ConfigurationError, DataError, UnreadableImageError
from tests.support.faults import class_folders, encoded, picture
from tests.support.shards import tars_of, write_tar

JPEG = encoded("JPEG", picture(0))
PNG = encoded("PNG", picture(1))


def open_tars(*shards: Path, **options) -> TarImages:
    images = TarImages.open(shards, name="webdataset", split="all")
    return images.with_read_options(ReadOptions(**options))


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for number in range(3):
        members = {f"{number}.jpg": JPEG, f"{number}.cls": b"7"}
        write_tar(tmp_path / f"shards/{number:03}.tar", members)
    return tmp_path / "shards"


@pytest.fixture
def scans(monkeypatch) -> list[Path]:
    usual, found = tar_shards._scan, list[Path]()
    monkeypatch.setattr(tar_shards, "_scan", lambda shard: found.append(shard) or usual(shard))
    return found


def test_images_in_tar_files_are_those_of_the_folder(tmp_path):
    class_folders(tmp_path / "photos")
    train = tmp_path / "photos/train"
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(9).save(train / "cat/turned.jpg", exif=exif)
    expected = ImageFolder(train).images()
    found = WebDataset(tars_of(train, tmp_path / "tars")).images()

    assert [image_id.split("/", 1)[1] for image_id in found.ids] == list(expected.ids)
    for index in range(len(expected)):
        assert np.array_equal(found[index].image, expected[index].image)
    few = found.select("few", [2, 0])
    assert (few.name, few.ids) == ("few", (found.ids[2], found.ids[0]))
    assert np.array_equal(few[1].image, expected[0].image)


def test_members_may_have_any_order_and_side_files(tmp_path):
    members = {
        "./b.cls": b"1\n",
        "./": b"",
        "./b.json": b"{}",
        "./a.PNG": PNG,
        "./._a.png": b"a resource fork",
        "./b.jpg": JPEG,
        "./a.cls": b"0",
        "LICENSE": b"CC0",
        "./a.seg.png": b"a mask",
    }
    images = WebDataset(write_tar(tmp_path / "x.tar", members)).pretraining_images()

    assert images.ids == ("x.tar/a.PNG", "x.tar/b.jpg")
    assert images.class_names == ("0", "1")
    assert [images[index].label for index in range(2)] == [0, 1]


def test_a_folder_and_every_pattern_name_the_same_images(tars):
    first = WebDataset(tars).images()
    tars = tars.rename(tars.with_name("moved"))
    braces = ("{000..002}.tar", "{000,001,002}.tar", "0{00..02}.tar")
    for pattern in ("*.tar", "00[0-2].tar", *braces):
        assert is_webdataset(tars / pattern)
        found = WebDataset(tars / pattern).images()
        assert found.ids == first.ids
        assert found.fingerprint() == open_tars(*find_shards(tars)).fingerprint()
    for path in tars.iterdir():
        path.rename(tars / path.name[2:])
    assert len(find_shards(tars / "{0..2}.tar")) == 3
    (tars / "0.tar").rename(tars / "0.TAR")
    (tars / "tar.txt").touch()
    assert find_shards(tars) == [tars / name for name in ("0.TAR", "1.tar", "2.tar")]
    for number, path in enumerate(find_shards(tars), 8):
        path.rename(tars / f"{number}.tar")
    for pattern in ("{8..10}.tar", "{10..8}.tar"):
        assert [path.stem for path in find_shards(tars / pattern)] == ["10", "8", "9"]


def test_missing_tar_files_are_named(tars, monkeypatch):
    with pytest.raises(DataError, match=r"97 of 100 tar files are missing.*003\.tar$"):
        find_shards(tars / "{000..099}.tar")
    for pattern in ("x*.tar", "x.tar", "**x.tar"):
        with pytest.raises(DataError, match=r"x\*?\.tar"):
            find_shards(tars / pattern)
    monkeypatch.setattr(tar_shards, "_MAX_SHARDS", 100)
    for pattern in ("{0..999999999}.tar", "{0..10}{0..9}.tar"):
        with pytest.raises(ConfigurationError):
            find_shards(tars / pattern)


def test_tar_files_patterns_and_folders_of_them_are_recognised(tars):
    (tars / "photos").mkdir()
    assert is_webdataset(tars)
    (tars / "photos/0.png").write_bytes(PNG)
    assert not is_webdataset(tars)
    assert not is_webdataset(tars / "photos")
    assert not is_webdataset(tars / "absent")
    for name in ("x.tar", "x.tar.gz", "x.tgz", "{0..3}", "x?.tar"):
        assert is_webdataset(tars / name)


def test_samples_without_exactly_one_image_are_refused(tmp_path):
    cases: list[tuple[Any, str]] = [
        ({"a.jpg": JPEG, "b.cls": b"0"}, "b.cls"),
        ({"a.json": b"{}"}, "a.json"),
        ([("a.jpg", JPEG), ("a.png", PNG)], "two"),
        ([("a.jpg", JPEG), ("a.cls", b"0"), ("a.cls", b"1")], "twice"),
        ({}, "no image"),
    ]
    for members, word in cases:
        with pytest.raises(DataError, match=word):
            open_tars(write_tar(tmp_path / "x.tar", members))


def test_links_and_names_that_lead_outwards_do_no_harm(tmp_path):
    images = open_tars(
        write_tar(tmp_path / "in/x.tar", {"../../out.jpg": JPEG, "/etc/0.jpg": JPEG})
    )

    assert images[0].image.shape == images[1].image.shape == (32, 40, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            link = tarfile.TarInfo("a.jpg")
            link.type, link.linkname = kind, "/etc/passwd"
            tar.addfile(link)
        with pytest.raises(DataError, match=r"a\.jpg is a link"):
            open_tars(tmp_path / "x.tar")


def test_other_files_in_place_of_a_tar_file_are_refused(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a.jpg": JPEG})
    compressed = Path(f"{path}.gz")
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=f"gunzip {compressed}"):
        open_tars(compressed)
    # `double` consists of two tar files.
    double = 2 * path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    for content, word in ((pointer, "LFS"), (b"x" * 99, "not a tar"), (double, "after byte")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=word):
            open_tars(path)


def test_a_tar_file_that_is_cut_is_refused(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a.jpg": JPEG[:600], "b.cls": b"", "b.jpg": JPEG})
    whole = path.read_bytes()
    for length in (0, 10, 512, 700, 1024, 1536, 2048, 2500):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"x\.tar"):
            open_tars(path)


def test_damaged_headers_and_images_are_named_with_their_tar_file(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a.jpg": JPEG, "a.cls": b"0", "b" * 200 + ".jpg": JPEG})
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    errors = list[str]()
    for _ in range(150):
        damaged = bytearray(whole)
        place = int(generator.integers(len(whole) // 512)) * 512 + int(generator.integers(512))
        damaged[place : place + 12] = generator.bytes(12)
        path.write_bytes(damaged)
        try:
            images = open_tars(path)
            _ = [images[index] for index in range(len(images))]
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 25
    assert all(str(path) in error for error in errors)
    images = open_tars(write_tar(path, {"a.jpg": JPEG, "b/c.jpg": JPEG[:300]}))
    assert images[0].image.shape == (32, 40, 3)
    with pytest.raises(UnreadableImageError, match=rf"^{tmp_path}/x\.tar/b/c\.jpg"):
        _ = images[1]


def test_an_index_is_cached_until_the_tar_file_changes(tars, cache, monkeypatch, scans):
    path = tars / "000.tar"
    # A new tar file may change again at the same time, so its index is not cached.
    index_shard(path)
    index_shard(path)
    assert len(scans) == 2

    # Trust the change time of the inode, although it is always recent in a test.
    monkeypatch.setattr(tar_shards, "RACY_NS", -(10**12))
    first = index_shard(path)
    assert index_shard(path).names == first.names
    assert len(scans) == 3
    write_tar(path, {"other.jpg": PNG})
    assert index_shard(path).names[0] == "other.jpg"
    for index in (cache.parent / "tars").iterdir():
        index.write_bytes(index.read_bytes()[:-1] + b"x")
    assert index_shard(path).names[0] == "other.jpg"
    assert len(scans) == 5


def test_tar_files_that_change_while_in_use_are_refused(tars):
    images = open_tars(*find_shards(tars))
    write_tar(tars / "001.tar", {"1.jpg": PNG})

    assert images[0].image.shape == (32, 40, 3)
    with pytest.raises(DataError, match=r"001\.tar has changed"):
        _ = images[1]


def test_the_fingerprint_follows_the_bytes_or_the_times(tars):
    def open_both() -> list[TarImages]:
        return [open_tars(*find_shards(tars), fingerprint=kind) for kind in ("content", "stat")]

    before = open_both()
    content, stat = (images.fingerprint() for images in before)
    marks, samples = before[0].file_hashes(), before[0].sample_hashes()
    os.utime(tars / "001.tar", (1e9, 1e9))
    touched = open_both()

    assert touched[0].fingerprint() == content
    assert touched[1].fingerprint() != stat
    assert stat.startswith("stat-")
    write_tar(tars / "001.tar", {"1.jpg": PNG, "1.cls": b"7"})
    changed = open_both()[0]
    assert changed.fingerprint() != content
    assert (changed.file_hashes() != marks).tolist() == [False, True, False]
    is_equal = [a == b for a, b in zip(changed.sample_hashes(), samples, strict=True)]
    assert is_equal == [True, False, True]


def split_tars(root: Path) -> Path:
    class_folders(root / "photos")
    tars_of(root / "photos/train", root / "tars/train")
    tars_of(root / "photos/val", root / "tars/val")
    # A folder above the tar files may have the name of a split.
    return (root / "tars").rename(root / "train val")


@pytest.mark.parametrize("layout", ["folders", "names", "chosen"])
def test_splits_have_the_labels_of_class_folders(tmp_path, layout):
    root = split_tars(tmp_path)
    dataset = WebDataset(root)
    if layout == "chosen":
        (root / "train").rename(root / "first")
        dataset = WebDataset(root, train_split="first/{000..001}.tar", val_split="v*/*.tar")
    elif layout == "names":
        for path in sorted(root.glob("*/*.tar")):
            path.rename(root / f"cats-{path.parent.name}idation-{path.name}")
        for split in ("train", "val"):
            (root / split).rmdir()
        write_tar(root / "interval.tar", {"x.jpg": JPEG})
    folders = ClassFolders(tmp_path / "photos")

    for found, expected in ((dataset.train(), folders.train()), (dataset.val(), folders.val())):
        assert found.labels == expected.labels
        assert found.class_names == ("0", "1")
        assert np.array_equal(found[3].image, expected[3].image)
    assert dataset.pretraining_images().ids == dataset.train().ids
    assert len(dataset.images()) == 12 + (layout == "names")


def test_classes_of_the_scored_images_must_have_training_images(tmp_path):
    root = split_tars(tmp_path)
    write_tar(root / "val/more.tar", {"x.jpg": JPEG, "x.cls": b"9"})

    with pytest.raises(DataError, match="class 9") as caught:
        WebDataset(root).val()
    assert caught.value.hint == ("dataset.known_only=true",)
    assert len(WebDataset(root, known_only=True).val()) == 6
    with pytest.raises(DataError):
        WebDataset(root, val_split="val/more.tar", known_only=True).val()


def test_labels_need_class_numbers(tmp_path):
    cases = [
        ({"a.jpg": JPEG, "b.jpg": JPEG, "b.cls": b"1"}, r"no member KEY\.cls.*a\.jpg"),
        ({"a.jpg": JPEG, "a.cls": b"cat"}, r"not a class number.*a\.jpg"),
        ({"a.jpg": JPEG, "a.cls": b"1" * 90}, "not a class number"),
        ({"a.jpg": JPEG, "a.cls": b"1"}, "single class 1"),
    ]
    for number, (members, word) in enumerate(cases):
        dataset = WebDataset(write_tar(tmp_path / f"{number}.tar", members))
        assert dataset.images()[0].label is None
        with pytest.raises(DataError, match=word):
            dataset.pretraining_images()


def test_missing_and_overlapping_splits_are_refused(tars):
    with pytest.raises(DataError) as caught:
        WebDataset(tars).train()
    assert "dataset.train_split={folder}" in caught.value.hint
    with pytest.raises(DataError):
        WebDataset(tars / "*.tar").train()
    write_tar(tars / "001.tar", {"1.jpg": JPEG, "1.cls": b"1"})
    with pytest.raises(DataError, match="both the training split"):
        WebDataset(tars, train_split="00[01].tar", val_split="00[12].tar").val()


@pytest.mark.parametrize("fingerprint", ["content", "stat"])
def test_scored_images_that_are_training_images_are_found(tmp_path, fingerprint):
    root, options = split_tars(tmp_path), ReadOptions(fingerprint)
    shutil.copy2(root / "train/000.tar", root / "val/copy.tar")
    dataset = WebDataset(root)
    train, val = (with_read_options(images, options) for images in (dataset.train(), dataset.val()))

    with pytest.raises(DataError, match=r"train/000\.tar/cat/0\.jpg.*val/copy\.tar/cat/0\.jpg"):
        count_shared_files(train, val, allowed=False)
    assert count_shared_files(train, val, allowed=True) == 4
    photos = with_read_options(ClassFolders(tmp_path / "photos").train(), ReadOptions())
    if fingerprint == "content":
        assert count_shared_files(photos, val, allowed=True) == 4


def test_images_that_were_read_are_not_decoded_again(tars, cache, monkeypatch):
    write_tar(tars / "003.tar", {"damaged.jpg": JPEG[:200]})
    time.sleep(0.05)
    errors = find_read_errors(WebDataset(tars).images(), {})
    assert [error is None for error in errors] == [True, True, True, False]
    monkeypatch.setattr(TarImages, "__getitem__", lambda *_: pytest.fail("decoded"))

    assert find_read_errors(WebDataset(tars / "00[0-2].tar").images(), {}) == [None] * 3
