"""Test the command `ssl-bench data`."""

import io
import json
import re
import shutil
import tarfile
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchvision.datasets import voc as torchvision_voc

from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.data.layouts.toy import Painter
from ssl_bench.data.sources import DATASET_INFOS, Download
from ssl_bench.errors import DataError, MachineError
from tests.support.faults import expect_error, photo_folder, picture, voc


def make_archive(root: Path, kind: str = "tar") -> bytes:
    voc(root)
    return Path(shutil.make_archive(str(root), kind, root)).read_bytes()


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    def publish(content: bytes, kind: str = "tar", *, digest: bool = True) -> Path:
        found = server.publish(content, "md5")
        if not digest:
            found = replace(found, digest=None, size=None)
        info = replace(
            DATASET_INFOS["voc2012"],
            downloads=(Download(f"voc.{kind}", found, len(content)),),
            counts={"train": 4, "val": 3, "discovery": 7},
        )
        monkeypatch.setattr(data_command, "DATASET_INFOS", {"voc2012": info})
        return tmp_path / "data"

    return publish


def download(root: Path) -> int:
    return main(["data", "download", "voc2012", "--data-root", str(root)])


def check(root: Path, *more: str) -> int:
    return main(["data", "check", "voc2012", "--data-root", str(root), *more])


def files_below(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def test_every_dataset_has_a_licence_and_a_source():
    assert DATASET_INFOS.keys() <= set(choices("dataset"))
    for info in DATASET_INFOS.values():
        assert info.licence
        assert info.downloads or info.instructions
        assert info.tree or info.is_generated
        for one in info.downloads:
            digits = {"md5": 32, "sha256": 64}[one.published.algorithm]
            if one.name == "stuffthingmaps_trainval2017.zip":
                assert (one.published.digest, one.published.size) == (None, None)
            else:
                assert re.fullmatch(f"[0-9a-f]{{{digits}}}", one.published.digest or "")
                assert one.size == one.published.size
    for name, city in (("roxford5k", "Oxford"), ("rparis6k", "Paris")):
        assert f"gnd_{name}.pkl" in DATASET_INFOS[name].tree
        assert city in DATASET_INFOS[name].instructions
        assert city in DATASET_INFOS[name].title
    for year in ("2012", "2007"):
        (one,) = DATASET_INFOS[f"voc{year}"].downloads
        assert one.published.url == torchvision_voc.DATASET_YEAR_DICT[year]["url"]


@pytest.mark.slow
def test_datasets_are_listed_together_and_alone(capsys):
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(DATASET_INFOS) + 1
    assert any(line.startswith("cityscapes") and "by hand" in line for line in lines)
    made = {line.split()[0] for line in lines[:-1] if re.search(r" - +generated ", line)}
    assert made == {name for name, info in DATASET_INFOS.items() if info.is_generated}
    assert main(["data", "list", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed.keys() == DATASET_INFOS.keys()
    assert listed["coco_stuff"]["class_names"][:2] == ["person", "bicycle"]
    assert len(listed["coco_stuff"]["class_names"]) == listed["coco_stuff"]["num_classes"] == 171
    assert listed["coco_stuff"]["counts"] == {"train": 118_287, "val": 5_000}
    assert listed["voc2007"]["counts"] == {"train": 209, "val": 213, "discovery": 5_011}
    assert {name: listed[name]["num_classes"] for name in ("voc2012", "camvid", "folder")} == {
        "voc2012": 21, "camvid": 11, "folder": 0
    }  # fmt: skip
    assert listed["cityscapes"]["roles"] == ["segmentation", "images"]
    assert main(["data", "list", "voc2012", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == listed["voc2012"]
    assert main(["data", "list", "voc2012"]) == 0
    said = capsys.readouterr().out
    digest = "sha256 e14f763270cf193d0b5f74b169f44157a4b0c6efa708f4dd0ff78ee691763bcb"
    assert all(part in said for part in ("1,464 images", digest, "tvmonitor", "Annotations"))


def test_a_dataset_without_a_published_source_is_shown_and_checked(tmp_path, monkeypatch, capsys):
    photos = photo_folder(tmp_path / "photos")
    monkeypatch.setattr(data_command, "DATASET_INFOS", {})
    assert main(["data", "list", "folder"]) == 0
    assert re.search("roles +discovery, images", capsys.readouterr().out)
    assert main(["data", "check", f"folder:{photos}"]) == 0
    expect_error(capsys, ["data", "download", "folder", "--data-root", str(photos)], 2)
    monkeypatch.undo()
    said = expect_error(capsys, ["data", "download", "cityscapes", "--data-root", str(photos)], 2)
    assert "https://www.cityscapes-dataset.com" in said
    said = expect_error(capsys, ["data", "check", "cityscapes", "--data-root", str(photos)], 3)
    assert "https://www.cityscapes-dataset.com" in said


@pytest.mark.parametrize(("kind", "digest"), [("tar", True), ("zip", False)])
def test_downloads_are_unpacked_once_and_pass_the_check(
    published, server, tmp_path, kind, digest, capsys
):
    original = tmp_path / "made"
    root = published(make_archive(original, kind), kind, digest=digest)
    assert download(root) == 0
    assert set(files_below(original)) < set(files_below(root))
    for name in files_below(original):
        assert (root / name).read_bytes() == (original / name).read_bytes()
    assert check(root) == 0
    said = capsys.readouterr().out
    assert "train      4 images of 4 published, sample of 4 read: ok" in said
    assert "discovery  7 images of 7 published" in said
    assert "classes    21: background, aeroplane, bicycle" in said
    (root / f"voc.{kind}").unlink()
    assert main(["data", "download", "voc2012", "--data-root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fetched"] == []
    assert server.ranges == [""]

    published(make_archive(original / "second", kind), kind, digest=digest)
    assert download(root) == 0
    # Without a digest, only another address shows that an archive has changed.
    assert len(server.ranges) == 1 + digest


def test_free_space_is_checked_before_a_download_starts(
    published, server, tmp_path, monkeypatch, capsys
):
    content = make_archive(tmp_path / "made")
    root = published(content)
    free = len(content) + len(content) // 2 + 1
    monkeypatch.setattr(data_command.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert download(root) == 5
    assert "use `--data-root FOLDER`" in capsys.readouterr().err
    assert server.ranges == []

    # Bytes that were already downloaded need no space.
    root.mkdir(parents=True, exist_ok=True)
    (root / "voc.tar.part").write_bytes(content[: len(content) // 2])
    assert download(root) == 0


OUTSIDE = {
    "above, hidden": ("inside/../../out.png", tarfile.REGTYPE, ""),
    "link to an absolute path": ("inside/a.png", tarfile.SYMTYPE, "/etc/passwd"),
    "link above": ("inside/a.txt", tarfile.SYMTYPE, "../../secret"),
    "hard link above": ("inside/a.png", tarfile.LNKTYPE, "../secret"),
}


@pytest.mark.parametrize("member_of_tar", OUTSIDE.values(), ids=OUTSIDE)
def test_a_tar_with_paths_outside_its_folder_is_refused(published, member_of_tar, capsys):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo(member_of_tar[0])
        _, member.type, member.linkname = member_of_tar
        archive.addfile(member)
    root = published(content.getvalue())

    assert download(root) == 3

    assert "voc.tar is damaged" in capsys.readouterr().err
    assert files_below(root.parent) == ["data/voc.tar"]


@pytest.mark.parametrize("name", ["/tmp/out.png", "a/../../out.png"])
def test_a_zip_with_paths_outside_is_unpacked_below_its_folder(published, name):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "x")
    root = published(content.getvalue(), "zip")

    assert download(root) == 0

    assert all(file.startswith("data/") for file in files_below(root.parent))
    assert not Path("/tmp/out.png").exists()


@pytest.mark.parametrize("name", ["a.ZIP", "a.zip", "a.tar", "a.tar.gz"])
def test_the_unpacked_size_must_fit_on_the_disk(tmp_path, monkeypatch, name):
    content = bytes(5000)
    if name.lower().endswith("zip"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr("x/y.txt", content)
    else:
        mode: Any = f"w:{name.partition('tar.')[2]}"
        with tarfile.open(tmp_path / name, mode) as tarred:
            member = tarfile.TarInfo("x/y.txt")
            member.size = len(content)
            tarred.addfile(member, io.BytesIO(content))
    free, asked, out = SimpleNamespace(free=4999), [], tmp_path / "new/out"
    monkeypatch.setattr(data_command.shutil, "disk_usage", lambda path: asked.append(path) or free)

    with pytest.raises(MachineError) as caught:
        data_command.unpack(tmp_path / name, out)
    assert caught.value.hint == ("--data-root", "{folder}")
    assert not out.parent.exists()
    free.free = 5000
    for _ in range(2):
        data_command.unpack(tmp_path / name, out)
    assert (out / "x/y.txt").read_bytes() == content
    # The folder may be on another disk than its parents.
    assert asked == [tmp_path, tmp_path, out]


def test_a_damaged_archive_is_reported(published, tmp_path, capsys):
    content = bytearray(make_archive(tmp_path / "made", "zip"))
    content[len(content) // 3] ^= 255
    root = published(bytes(content), "zip", digest=False)
    assert download(root) == 3
    assert "is damaged" in capsys.readouterr().err
    assert not (root / ".ssl-bench").exists()


def test_invalid_or_incomplete_compressed_data_is_damaged(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("x", bytes(5000))
    content = bytearray(path.read_bytes())
    # A header of 30 bytes and the name precede the data. No block of deflate begins like this.
    content[31] = 0xFF
    path.write_bytes(content)

    cut = tmp_path / "a.tar.gz"
    with tarfile.open(cut, "w:gz") as archive:
        archive.add(path, "x")
    cut.write_bytes(cut.read_bytes()[:60])

    for damaged in (path, cut):
        with pytest.raises(DataError, match="is damaged"):
            data_command.unpack(damaged, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda base: (base / "SegmentationClass/v2.png").unlink(), "1 of 3 masks"),
        (
            lambda base: (base / "ImageSets/Segmentation/train.txt").write_text("t1\n"),
            "1 images, expected 4",
        ),
        (
            lambda base: (base / "ImageSets/Segmentation/train.txt").open("a").write("\nv1"),
            "5 images, expected 4",
        ),
        (lambda base: (base / "Annotations/t2.xml").write_text("<a>"), "t2.xml"),
        (shutil.rmtree, "does not contain voc2012"),
    ],
)
def test_a_check_finds_missing_and_unreadable_files(published, tmp_path, change, said, capsys):
    root = published(b"")
    change(voc(root))
    assert check(root) == 3
    out, err = capsys.readouterr()
    assert said in out
    assert said in err
    assert f"ssl-bench data download voc2012 --data-root {root}" in err
    assert ("`--subset`" in err) == (said == "1 images, expected 4")
    assert err.count("\n") == 1
    assert check(root, "--json") == 3
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [split["role"] for split in splits] == ["train", "val", "discovery"]
    assert any(said in problem for split in splits for problem in split["problems"])


def test_a_part_of_a_dataset_is_checked_with_subset(tmp_path, capsys):
    base = voc(tmp_path)

    assert check(tmp_path) == 3
    assert "`--subset`" in capsys.readouterr().err
    assert check(tmp_path, "--subset") == 0
    assert "4 images, sample of 4 read: ok" in capsys.readouterr().out
    (base / "JPEGImages/t1.jpg").write_bytes(b"cut")
    assert check(tmp_path, "--subset") == 3
    capsys.readouterr()
    assert check(tmp_path) == 3
    assert "`--subset`" not in capsys.readouterr().err


def test_folders_of_the_user_are_checked_with_overrides(tmp_path, capsys):
    words = ["data", "check", "paired_folders", "--data-root", str(voc(tmp_path))]
    keys = [
        "dataset.image_folder=JPEGImages", "dataset.mask_folder=SegmentationClass",
        "dataset.class_names=[a,b]", "dataset.numbers=[0,8]",
        "dataset.train_split=train:0-50%", "dataset.val_split=train:50-100%",
    ]  # fmt: skip
    assert main([*words, *keys]) == 0
    assert "3 images, sample of 3 read: ok" in capsys.readouterr().out
    assert main([*words, *keys, "dataset.numbers=[0,1]"]) == 3
    assert "the number 8" in capsys.readouterr().err


def test_generated_scenes_need_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data_command, "_SAMPLE_SIZE", 2)
    paint = cache(Painter.paint_scene)
    # Counting needs no distinct scenes.
    monkeypatch.setattr(Painter, "paint_scene", lambda painter, _: paint(painter, 0))
    assert main(["data", "check", "toy"]) == 0
    assert "200 images of 200 published" in capsys.readouterr().out


@pytest.mark.parametrize(
    "folders", [("a/cat", "b/cat", "b/dog"), ("photos/cat", "photos/dog", "notes")]
)
def test_the_recommended_splits_of_a_folder_are_accepted(tmp_path, capsys, folders):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        for number in range(4 * folder.count("/")):
            picture(number).save(tmp_path / folder / f"{number}.jpg")
    words = ["data", "check", "class_folders", "--data-root", str(tmp_path)]
    assert main(words) == 3

    hint = re.findall(r"dataset\.\w+_split=\S+%", capsys.readouterr().err)
    assert len(hint) == 2
    assert main([*words, *hint]) == 0
    assert re.search(r"^classes +2: cat, dog$", capsys.readouterr().out, re.MULTILINE)
