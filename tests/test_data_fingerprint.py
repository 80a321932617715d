"""Row 54 of the catalogue of faults: a fingerprint is of what the files hold, read once."""

import json
import os
import shutil
import signal
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ssl_bench.cli import main
from ssl_bench.data import digest_cache, digests
from ssl_bench.data.ade20k import Ade20k
from ssl_bench.data.archives import open_archives, open_labelled_archives
from ssl_bench.data.class_folders import ClassFolders
from ssl_bench.data.coco20k import Coco20k
from ssl_bench.data.coco_stuff import CocoStuff
from ssl_bench.data.folder import ImageFolder
from ssl_bench.data.image_mask_folders import ImageMaskFolders
from ssl_bench.data.known_by_stat import DatasetByStat, known_by_stat
from ssl_bench.data.readable import RemainingImages
from ssl_bench.data.samples import ImageSet
from ssl_bench.data.voc import Voc
from ssl_bench.errors import DataError
from tests.faults import (
    VAL,
    class_folders,
    encoder_file,
    exit_code,
    fails,
    fork,
    mask,
    photo_folder,
    picture,
    pretraining,
    probing,
    records,
    save_mask,
    voc,
)
from tests.test_progress import on_a_terminal

JSON = "annotations/instances_train2014.json"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of its own, which trusts files as soon as the clock of the files has moved on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digest_cache, "_RACY_NS", 0)
    return tmp_path / "cache/ssl-bench/digests"


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names of what is read, in place of what is remembered."""
    names: list[str] = []
    whole = digests._read
    monkeypatch.setattr(digests, "_read", lambda part: names.append(part.file.name) or whole(part))
    return names


def settle() -> None:
    # The clock of files moves every four milliseconds.
    time.sleep(0.02)


def repaint(path: Path, old: bytes | None = None, new: bytes = b"") -> None:
    """Change bytes of a file in its place; its size and its time of change stay as they were."""
    settle()
    status, content = path.stat(), path.read_bytes()
    if old is None:
        old = content[-16:]
        new = bytes(byte ^ 1 for byte in old)
    assert content.count(old) >= 1
    assert len(old) == len(new)
    with path.open("r+b") as file:
        file.write(content.replace(old, new))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert after.st_ino == status.st_ino
    settle()


def paired(root: Path, images: str, masks: str) -> Path:
    """One photograph and its mask for training, one for validation."""
    for number, split in enumerate(("train", "val")):
        for folder in (images, masks):
            (root / folder.format(split)).mkdir(parents=True)
        picture(number).save(root / images.format(split) / "000000000001.jpg")
        save_mask(root / masks.format(split) / "000000000001.png", mask())
    return root


def coco20k(root: Path) -> Path:
    for folder in ("annotations", "images/train2014"):
        (root / folder).mkdir(parents=True)
    picture(0).save(root / "images/train2014/COCO_train2014_000000000007.jpg")
    (root / "coco_20k_filenames_subset.txt").write_text("COCO_train2014_000000000007.jpg")
    images = [{"id": 7, "note": "seen"}, {"id": 3}]
    boxes = [{"image_id": n, "bbox": [n, 2, 5, 6], "iscrowd": 0} for n in (7, 3)]
    (root / JSON).write_text(json.dumps({"images": images, "annotations": boxes}))
    return root


def tiny_imagenet(root: Path) -> Path:
    class_folders(root)
    for name in ("cat", "dog"):
        for path in (root / "val" / name).iterdir():
            path.rename(root / "val" / f"{name}{path.name}")
        (root / "val" / name).rmdir()
    lines = [f"{name}{n}.jpg\t{name}\t0\t0\n" for name in ("cat", "dog") for n in range(3)]
    (root / "val/val_annotations.txt").write_text("".join(lines))
    return root


def named_folders(root: Path) -> Path:
    (paired(root, "images/{}", "masks/{}") / "classes.txt").write_text("sky\nsea")
    return root


def tarred(root: Path) -> Path:
    photo_folder(root)
    with tarfile.open(root / "a.tar", "w") as archive:
        for path in sorted(root.glob("*.jpg")):
            archive.add(path, path.name)
            path.unlink()
    return root


def zipped(root: Path, method: int) -> Path:
    photo_folder(root)
    with zipfile.ZipFile(root / "a.zip", "w", method) as archive:
        for path in sorted(root.glob("*.jpg")):
            archive.write(path, path.name)
            path.unlink()
    return root


def in_tar(root: Path) -> None:
    with tarfile.open(root / "a.tar") as archive:
        member = archive.getmember("2.jpg")
    content = (root / "a.tar").read_bytes()
    old = content[member.offset_data + member.size - 32 : member.offset_data + member.size]
    repaint(root / "a.tar", old, bytes(byte ^ 1 for byte in old))


def in_zip(root: Path) -> None:
    """The checksums of the members are those of before, as after a change by hand."""
    with zipfile.ZipFile(root / "a.zip") as archive:
        end = archive.getinfo("3.jpg").header_offset
    content = (root / "a.zip").read_bytes()
    repaint(root / "a.zip", content[end - 32 : end], bytes(b ^ 1 for b in content[end - 32 : end]))


def voc_set(root: Path) -> Path:
    return voc(root).parents[1]


Opener = Callable[[Path], ImageSet]
YEAR = "VOCdevkit/VOC2012"


def at(path: str, old: bytes | None = None, new: bytes = b"") -> Callable[[Path], None]:
    return lambda root: repaint(root / path, old, new)


CASES: dict[str, tuple[Callable[[Path], Path], Opener, Callable[[Path], None]]] = {
    "picture": (photo_folder, lambda r: ImageFolder(r).images(), at("2.jpg")),
    "VOC image": (voc_set, lambda r: Voc(r).val(), at(f"{YEAR}/JPEGImages/v1.jpg")),
    "VOC mask": (voc_set, lambda r: Voc(r).val(), at(f"{YEAR}/SegmentationClass/v1.png")),
    "VOC boxes": (
        *(voc_set, lambda r: Voc(r).discovery()),
        at(f"{YEAR}/Annotations/v1.xml", b"<xmin>9<", b"<xmin>8<"),
    ),
    "COCO image": (
        *(coco20k, lambda r: Coco20k(r).discovery()),
        at("images/train2014/COCO_train2014_000000000007.jpg"),
    ),
    "COCO boxes": (
        *(coco20k, lambda r: Coco20k(r).discovery()),
        at(JSON, b"[7, 2, 5, 6]", b"[7, 2, 5, 4]"),
    ),
    "COCO-Stuff mask": (
        lambda root: paired(root, "images/{}2017", "stuffthingmaps/{}2017"),
        lambda r: CocoStuff(r).val(),
        at("stuffthingmaps/val2017/000000000001.png"),
    ),
    "ADE20K mask": (
        lambda root: paired(root, "images/{}ing", "annotations/{}ing"),
        lambda r: Ade20k(r, "training", "valing").val(),
        at("annotations/valing/000000000001.png"),
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
    "tar": (tarred, lambda r: open_archives(f"{r}/a.tar"), in_tar),
    "tar in memory": (tarred, lambda r: open_archives(f"{r}/a.tar", in_memory=True), in_tar),
    "zip": (
        lambda root: zipped(root, zipfile.ZIP_STORED),
        lambda r: open_archives(f"{r}/a.zip"),
        in_zip,
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


def test_fault_54_a_repainted_mask_gives_a_number_of_its_own(place, capsys):
    base = voc(place)
    masks = [base / f"SegmentationClass/{image_id}.png" for image_id in VAL]
    # Without compression, so that another picture has the same size.
    for path in masks:
        Image.fromarray(mask()).save(path, "BMP")
    settle()
    assert main(probing("segmentation", "voc2012", place)) == 0
    first = {record.value for record in records() if record.metric == "miou_oracle"}

    for path in masks:
        content = path.read_bytes()
        repaint(path, content[-300:], b"\0" * 150 + b"\x08" * 150)
    capsys.readouterr()
    assert main(probing("segmentation", "voc2012", place)) == 0

    assert "finished before" not in capsys.readouterr().err
    values = {record.value for record in records() if record.metric == "miou_oracle"}
    assert first < values
    assert len(values) == 2


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_fault_54_a_run_does_not_go_on_with_repainted_images(place, capsys, kind):
    root = place / "photos" if kind == "folder" else tarred(place / "packed") / "a.tar"
    run = pretraining(root, "run", "train.max_minutes=0.0")
    settle()
    assert main(run) == 0

    repaint(root / "0.jpg") if kind == "folder" else in_tar(root.parent)

    said = fails(capsys, [*run, "--resume"], 2)
    assert "image_files: " in said
    assert "images: " not in said


def test_fault_54_a_repainted_picture_is_noticed_in_coarse_time(tmp_path, monkeypatch, read):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exact = digests.file_state

    def coarse(path: Path) -> digest_cache.FileState:
        state = exact(path)
        second = 10**9
        return state._replace(
            mtime_ns=state.mtime_ns // second * second, ctime_ns=state.ctime_ns // second * second
        )

    monkeypatch.setattr(digests, "file_state", coarse)
    root = photo_folder(tmp_path / "photos")
    # Both within one second of the clock.
    time.sleep(1 - time.time() % 1 + 0.02)
    before = ImageFolder(root).images().fingerprint()
    repaint(root / "1.jpg")

    assert ImageFolder(root).images().fingerprint() != before


def test_copies_and_touched_files_have_the_same_fingerprint(tmp_path, read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = ImageFolder(root).images().fingerprint()
    shutil.copytree(root, tmp_path / "copy")
    os.utime(root / "1.jpg", (1, 1))
    settle()
    del read[:]

    assert ImageFolder(root).images().fingerprint() == first
    assert read == ["1.jpg"]
    assert ImageFolder(tmp_path / "copy").images().fingerprint() == first
    root.rename(tmp_path / "moved")
    assert ImageFolder(tmp_path / "moved").images().fingerprint() == first


def test_a_change_that_concerns_other_images_is_none(tmp_path):
    root = coco20k(tmp_path / "COCO")
    first = Coco20k(root).discovery().fingerprint()

    repaint(root / JSON, b"[3, 2, 5, 6]", b"[3, 2, 5, 4]")
    repaint(root / JSON, b"seen", b"SEEN")

    assert Coco20k(root).discovery().fingerprint() == first


def test_only_the_files_of_the_split_are_read_and_each_once(tmp_path, read):
    root = voc(tmp_path).parents[1]
    settle()

    for _ in range(2):
        Voc(root).val().fingerprint()

    assert sorted(read) == sorted(f"{i}{suffix}" for i in VAL for suffix in (".jpg", ".png"))


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


def damaged(content: bytes) -> dict[str, bytes]:
    old = content.replace(b"files 1", b"files 0")
    flipped = {
        f"bit {place}": content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in (0, 30, 70, 100, len(content) - 1)
    }
    return flipped | {
        "empty": b"",
        "cut": content[:-40],
        "cut at an entry": content[:-64],
        "longer": content + bytes(64),
        "older": old,
        "text": b"{}\n" * 99,
    }


def test_fault_54_a_damaged_cache_is_made_anew_and_never_believed(tmp_path, cache, read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = ImageFolder(root).images().fingerprint()
    (kept,) = cache.iterdir()
    content = kept.read_bytes()

    for how, spoilt in damaged(content).items():
        kept.write_bytes(spoilt)
        del read[:]
        assert ImageFolder(root).images().fingerprint() == first, how
        assert len(read) == 4, how
        assert kept.read_bytes()[:28] == content[:28], how
    del read[:]
    assert ImageFolder(root).images().fingerprint() == first
    assert not read


def test_fault_54_what_is_remembered_of_other_files_says_nothing(tmp_path, cache, read):
    one, other = (photo_folder(tmp_path / name) for name in ("one", "other"))
    for path in other.iterdir():
        repaint(path)
    settle()
    expected = ImageFolder(other).images().fingerprint()
    places = []
    for root in (one, other):
        shutil.rmtree(cache)
        ImageFolder(root).images().fingerprint()
        places += [(path, path.read_bytes()) for path in cache.iterdir()]
    del read[:]

    places[1][0].write_bytes(places[0][1])

    assert ImageFolder(other).images().fingerprint() == expected
    assert len(read) == 4


@pytest.mark.parametrize("homeless", [False, True])
def test_fault_54_a_cache_that_cannot_be_written_is_said_once(
    tmp_path, monkeypatch, capsys, read, homeless
):
    if homeless:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError(tmp_path)))
    else:
        (tmp_path / "cache").write_text("in the way")
    roots = [photo_folder(tmp_path / name) for name in ("one", "other")]
    settle()
    found = [ImageFolder(root).images().fingerprint() for root in roots * 2]

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the sha256 of files is not kept for the next time: ")
    assert line.endswith("; XDG_CACHE_HOME=DIR moves it")
    assert len(set(found)) == 1
    assert len(read) == (16 if homeless else 8)


def test_the_cache_keeps_what_was_used_last(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(digest_cache, "_MOST_FILES", 3)
    roots = [photo_folder(tmp_path / str(number), 1) for number in range(5)]
    settle()
    kept = []
    for root in roots:
        ImageFolder(root).images().fingerprint()
        kept += [path for path in cache.iterdir() if path not in kept]
        settle()
    ImageFolder(roots[2]).images().fingerprint()
    settle()
    ImageFolder(photo_folder(tmp_path / "5", 1)).images().fingerprint()

    assert {path for path in kept if path.exists()} == {kept[2], kept[4]}
    assert len(list(cache.iterdir())) == 3


def test_fault_54_two_processes_at_once_find_the_same_and_leave_a_whole_cache(tmp_path, read):
    root = photo_folder(tmp_path / "photos", 40)
    settle()

    def work(name: str) -> Callable[[], None]:
        return lambda: (
            (tmp_path / name).write_text(ImageFolder(root).images().fingerprint()) and None
        )

    children = [fork(work(name)) for name in "ab"]
    assert [exit_code(child) for child in children] == [0, 0]

    found = {(tmp_path / name).read_text() for name in "ab"}
    assert found == {ImageFolder(root).images().fingerprint()}
    assert not read


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("probe", signal.SIGINT, 130),
        ("pretrain", signal.SIGINT, 130),
        ("pretrain", signal.SIGTERM, 75),
    ],
)
def test_fault_54_an_interrupt_keeps_what_was_read(
    place, cache, monkeypatch, read, command, number, code
):
    root = photo_folder(place / "many", 100)
    settle()
    whole = digests._read

    def soon_slow(part: digests.Part) -> bytes:
        if len(read) > 60:
            (place / "slow").touch()
            time.sleep(0.2)
        return whole(part)

    monkeypatch.setattr(digests, "_read", soon_slow)
    words = probing("pca", "folder", root) if command == "probe" else pretraining(root, "run")
    child = fork(lambda: main(words), stderr=place / "said")
    deadline = time.monotonic() + 30
    while not (place / "slow").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, number)

    assert exit_code(child) == code, (place / "said").read_text()
    assert "Traceback" not in (place / "said").read_text()
    kept = sum(len(digest_cache._read(path)) for path in cache.iterdir())
    assert 60 <= kept < 90


def test_fault_54_files_that_cannot_be_read_are_named(tmp_path):
    root = photo_folder(tmp_path / "photos")
    images = ImageFolder(root).images()
    (root / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"1\.jpg cannot be read \(No such file or directory\)"):
        images.fingerprint()
    os.mkfifo(root / "1.jpg")
    with pytest.raises(DataError, match=r"1\.jpg is no file"):
        ImageFolder(root).images().fingerprint()


def test_fault_54_a_file_that_is_being_written_is_refused(tmp_path, monkeypatch):
    root = photo_folder(tmp_path / "photos")
    settle()
    whole = digests._read

    def meanwhile(part: digests.Part) -> bytes:
        digest = whole(part)
        if part.file.name == "2.jpg":
            part.file.write_bytes(b"more")
        return digest

    monkeypatch.setattr(digests, "_read", meanwhile)

    with pytest.raises(DataError, match=r"2\.jpg changes while it is read"):
        ImageFolder(root).images().fingerprint()


def test_what_an_archive_held_in_memory_says_nothing_of_its_file(tmp_path):
    root = tarred(tmp_path / "packed")
    settle()
    before = open_archives(f"{root}/a.tar", in_memory=True)
    in_tar(root)

    first, changed = before.fingerprint(), open_archives(f"{root}/a.tar").fingerprint()

    assert first != changed
    assert open_archives(f"{root}/a.tar", in_memory=True).fingerprint() == changed


def test_sizes_and_times_are_trusted_where_that_is_asked_for(tmp_path, read):
    root = photo_folder(tmp_path / "photos")
    images = known_by_stat(ImageFolder(root).images())
    first = images.fingerprint()

    repaint(root / "1.jpg")
    assert known_by_stat(ImageFolder(root).images()).fingerprint() == first
    os.utime(root / "1.jpg")

    assert known_by_stat(ImageFolder(root).images()).fingerprint() != first
    assert not read


def test_every_kind_of_image_set_says_that_it_trusts_times(tmp_path):
    archive = tarred(tmp_path / "packed") / "a.tar"
    sets: list[Any] = [
        known_by_stat(open_archives(str(archive))),
        DatasetByStat(Voc(voc(tmp_path).parents[1])).discovery(),
        DatasetByStat(ClassFolders(class_folders(tmp_path / "classes"))).val(),
    ]
    sets += [RemainingImages(images, (1, 2)) for images in sets]

    found = [images.fingerprint() for images in sets]
    assert all(fingerprint.startswith("stat-") for fingerprint in found)
    assert len({fingerprint[5:11] for fingerprint in found}) == 6


def test_a_labelled_archive_is_known_by_its_content(tmp_path):
    class_folders(tmp_path / "classes")
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        archive.add(tmp_path / "classes/train", "train")

    packed = open_labelled_archives(f"{tmp_path}/train.tar/train")

    assert packed.fingerprint() == ClassFolders(tmp_path / "classes").train().fingerprint()


def test_numbers_that_trust_times_say_so_and_never_meet_others(place, capsys):
    words = probing("pca", "folder", place / "photos")
    assert main([*words, "data.fingerprint=stat"]) == 0
    trusting = capsys.readouterr()
    assert main(words) == 0
    reading = capsys.readouterr()

    note = "4 images, their files known by size and time alone; "
    assert note in trusting.out
    assert note not in reading.out
    assert "finished before" not in reading.err
    kinds = [record.dataset_fingerprint.startswith("stat-") for record in records()]
    assert sorted(kinds) == [False, True]
    assert main(["table"]) == 0
    assert "[data stat-" in capsys.readouterr().out
    assert "valid: content, stat" in fails(capsys, [*words, "data.fingerprint=times"], 2)


def test_a_run_may_trust_times_and_says_when_it_no_longer_does(place, capsys):
    run = pretraining(place / "photos", "run", "train.max_minutes=0.0")
    assert main([*run, "data.fingerprint=stat"]) == 0

    assert main([*run, "data.fingerprint=stat", "--resume"]) == 0
    said = fails(capsys, [*run, "--resume"], 2)

    assert "data.fingerprint: stat -> content" in said
    assert "image_files: stat-" in said


def test_a_sweep_reads_each_file_once_whatever_is_planned(place, read, capsys):
    (place / "cache").write_text("in the way")
    encoder_file(place / "other.safetensors", seed=1)
    words = probing("pca", "folder", place / "photos")[3:]

    assert (
        main(["sweep", "--task", "pca", *words, "--checkpoint", "other.safetensors", "--dry-run"])
        == 0
    )

    assert sorted(read) == ["0.jpg", "1.jpg", "2.jpg", "3.jpg"]


def test_a_terminal_shows_how_far_the_reading_is(tmp_path):
    root = photo_folder(tmp_path / "photos")

    shown = on_a_terminal(lambda: ImageFolder(root).images().fingerprint())

    assert "sha256 of folder all: " in shown
