"""`ssl-bench data`: what is published, fetched from a web server of this machine, and checked."""

import io
import json
import re
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import voc as torchvision_voc

from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.data.files import unpacking
from ssl_bench.data.sources import SOURCES, Download
from ssl_bench.system.files import sha256_of
from tests.support.faults import picture

NAMES = ("2007_1", "2007_2", "2008_3")
XML = (
    "<annotation><object><name>cat</name><bndbox><xmin>2</xmin><ymin>3</ymin><xmax>9</xmax>"
    "<ymax>8</ymax></bndbox></object></annotation>"
)


def voc_tree(root: Path) -> Path:
    """Two training images, one for validation, in VOC's layout."""
    base = root / "VOCdevkit/VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "Annotations"):
        (base / folder).mkdir(parents=True)
    lists = {"Segmentation/train": NAMES[:2], "Segmentation/val": NAMES[2:], "Main/trainval": NAMES}
    for name, ids in lists.items():
        path = base / f"ImageSets/{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{one}\n" for one in ids))
    for number, name in enumerate(NAMES):
        Image.new("RGB", (12, 10), (number, 0, 0)).save(base / f"JPEGImages/{name}.jpg")
        mask = Image.fromarray(np.full((10, 12), number, np.uint8), mode="P")
        mask.putpalette(bytes(768))
        mask.save(base / f"SegmentationClass/{name}.png")
        (base / f"Annotations/{name}.xml").write_text(XML)
    return root


def packed(root: Path, kind: str) -> bytes:
    content = io.BytesIO()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if kind == "tar":
        with tarfile.open(fileobj=content, mode="w") as archive:
            for path in files:
                archive.add(path, path.relative_to(root))
    else:
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
            for path in files:
                zipped.write(path, path.relative_to(root))
    return content.getvalue()


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    """Let voc2012 come from the server of this machine; gives a function that publishes bytes."""

    def publish(content: bytes, kind: str = "tar", *, digest: bool = True) -> Path:
        found = server.publish(content, "md5")
        one = Download(
            f"voc.{kind}", found if digest else replace(found, digest=None, size=None), len(content)
        )
        source = replace(
            SOURCES["voc2012"], downloads=(one,), counts={"train": 2, "val": 1, "discovery": 3}
        )
        monkeypatch.setattr(data_command, "SOURCES", {"voc2012": source})
        return tmp_path / "data"

    return publish


def download(root: Path) -> int:
    return main(["data", "download", "voc2012", "--data-root", str(root)])


def check(root: Path, *more: str) -> int:
    return main(["data", "check", "voc2012", "--data-root", str(root), *more])


def files_below(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def test_every_dataset_says_where_it_comes_from():
    assert sorted(SOURCES) == choices("dataset")
    for source in SOURCES.values():
        assert source.licence
        assert source.downloads or source.by_hand
        assert source.tree or source.is_generated


def test_the_addresses_of_voc_are_those_of_torchvision():
    for year, split in (("2012", "voc2012"), ("2007", "voc2007")):
        (one,) = SOURCES[split].downloads
        assert one.published.url == torchvision_voc.DATASET_YEAR_DICT[year]["url"]


def test_all_but_one_of_the_downloads_have_a_published_digest_and_length():
    for source in SOURCES.values():
        for one in source.downloads:
            digits = {"md5": 32, "sha256": 64}[one.published.algorithm]
            if one.name == "stuffthingmaps_trainval2017.zip":
                assert (one.published.digest, one.published.size) == (None, None)
            else:
                assert re.fullmatch(f"[0-9a-f]{{{digits}}}", one.published.digest or "")
                assert one.size == one.published.size


def test_the_list_has_a_line_for_each_and_json_says_the_same(capsys):
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SOURCES) + 1
    assert any(line.startswith("cityscapes") and "by hand" in line for line in lines)
    assert main(["data", "list", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed.keys() == SOURCES.keys()
    assert listed["coco_stuff"]["class_names"][:2] == ["person", "bicycle"]
    assert len(listed["coco_stuff"]["class_names"]) == listed["coco_stuff"]["num_classes"] == 171
    assert listed["cityscapes"]["roles"] == ["segmentation", "images"]


def test_one_dataset_is_shown_with_tree_files_and_classes(capsys):
    assert main(["data", "list", "voc2012"]) == 0
    said = capsys.readouterr().out
    for part in (
        "1,464 images",
        "sha256 e14f763270cf193d0b5f74b169f44157a4b0c6efa708f4dd0ff78ee691763bcb",
        "tvmonitor",
        "Annotations",
    ):
        assert part in said
    assert main(["data", "list", "voc2021"]) == 2
    assert "did you mean voc2012" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("digest", [True, False])
def test_a_download_is_unpacked_and_passes_the_check(
    published, server, tmp_path, kind, digest, capsys
):
    made = voc_tree(tmp_path / "made")
    root = published(packed(made, kind), kind, digest=digest)
    assert download(root) == 0
    assert set(files_below(made)) < set(files_below(root))
    for name in files_below(made):
        assert (root / name).read_bytes() == (made / name).read_bytes()
    assert check(root) == 0
    said = capsys.readouterr().out
    assert "train      2 images of 2 published, 2 read as a sample: ok" in said
    assert "discovery  3 images of 3 published" in said


def test_a_download_that_goes_on_needs_no_space_for_what_is_there(published, tmp_path, monkeypatch):
    content = packed(voc_tree(tmp_path / "made"), "tar")
    root = published(content)
    root.mkdir(parents=True)
    (root / "voc.tar.part").write_bytes(content[: len(content) // 2])
    free = len(content) + len(content) // 2 + 1
    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert download(root) == 0


def test_what_was_fetched_is_not_fetched_again_even_without_its_archive(
    published, server, tmp_path
):
    root = published(packed(voc_tree(tmp_path / "made"), "tar"))
    assert download(root) == 0
    (root / "voc.tar").unlink()
    assert download(root) == 0
    assert server.ranges == [""]


def test_a_connection_that_breaks_leaves_no_dataset_and_the_next_call_goes_on(
    published, server, tmp_path, capsys
):
    root = published(packed(voc_tree(tmp_path / "made"), "tar"))
    server.cut_after = 3000
    assert download(root) == 5
    assert "broke off after 3000 of" in capsys.readouterr().err
    assert files_below(root) == ["voc.tar.part"]
    assert download(root) == 0
    assert server.ranges == ["", "bytes=3000-"]
    assert check(root) == 0


def test_a_wrong_checksum_unpacks_nothing(published, server, tmp_path, capsys):
    root = published(packed(voc_tree(tmp_path / "made"), "tar"))
    server.content = server.content[:-1] + b"x"
    assert download(root) == 5
    assert "published was" in capsys.readouterr().err
    assert not (root / "VOCdevkit").exists()


OUTWARD = {
    "above": ("../out.png", tarfile.REGTYPE, ""),
    "above, hidden": ("inside/../../out.png", tarfile.REGTYPE, ""),
    "link to an absolute path": ("inside/a.png", tarfile.SYMTYPE, "/etc/passwd"),
    "link above": ("inside/a.txt", tarfile.SYMTYPE, "../../secret"),
    "hard link above": ("inside/a.png", tarfile.LNKTYPE, "../secret"),
}


@pytest.mark.parametrize("outward", OUTWARD.values(), ids=OUTWARD)
def test_fault_35_a_tar_that_leads_outwards_is_refused(published, outward, capsys):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo(outward[0])
        _, member.type, member.linkname = outward
        archive.addfile(member)
    root = published(content.getvalue())

    assert download(root) == 3

    assert "voc.tar is damaged" in capsys.readouterr().err
    assert files_below(root.parent) == ["data/voc.tar"]


@pytest.mark.parametrize("name", ["../out.png", "/tmp/out.png", "a/../../out.png"])
def test_fault_35_a_zip_that_leads_outwards_stays_below_its_folder(published, name):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "x")
    root = published(content.getvalue(), "zip")

    assert download(root) == 0

    assert all(file.startswith("data/") for file in files_below(root.parent))
    assert not Path("/tmp/out.png").exists()


def test_a_damaged_member_is_told_and_the_dataset_is_not_taken_for_complete(
    published, tmp_path, capsys
):
    content = bytearray(packed(voc_tree(tmp_path / "made"), "zip"))
    place = content.index(b"<annotation>") if b"<annotation>" in content else 60
    content[place + 3] ^= 255
    root = published(bytes(content), "zip", digest=False)
    assert download(root) == 3
    assert "is damaged" in capsys.readouterr().err
    assert not (root / ".ssl-bench").exists()


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(
    published, server, tmp_path, monkeypatch, capsys
):
    root = published(packed(voc_tree(tmp_path / "made"), "tar"))
    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    assert download(root) == 5
    assert "0.0 GB are free" in capsys.readouterr().err
    assert server.ranges == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["download", "cityscapes", "--data-root", "x"], "register at https://www.cityscapes"),
        (["download", "paired_folders", "--data-root", "x"], "classes.txt has a name a line"),
        (["download", "voc2012"], "data download needs --data-root DIR"),
        (["download"], "name a dataset: voc2012"),
        (["check", "ade20k"], "data check needs --data-root DIR"),
        (["verify"], "data verify needs the folder"),
        (["fetch"], "invalid choice: 'fetch'"),
        (["list", "voc2012", "dataset.year=2007"], "data list` takes no 'dataset.year=2007'"),
        (["check", "folder", "--data-root", "x", "dataset.x=1"], "unknown key 'dataset.x'"),
    ],
)
def test_what_is_asked_for_without_what_it_needs_is_told(words, said, capsys):
    assert main(["data", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda base: (base / "SegmentationClass/2008_3.png").unlink(), "1 of 1 masks"),
        (lambda base: (base / "JPEGImages/2007_1.jpg").write_bytes(b""), "2007_1.jpg"),
        (
            lambda base: (base / "ImageSets/Segmentation/train.txt").write_text("2007_1\n"),
            "1 images, published are 2",
        ),
        (lambda base: (base / "Annotations/2007_2.xml").write_text("<a>"), "2007_2.xml"),
    ],
)
def test_a_check_says_what_is_missing_unreadable_or_too_few(
    published, tmp_path, change, said, capsys
):
    published(b"")
    root = voc_tree(tmp_path / "data")
    change(root / "VOCdevkit/VOC2012")
    assert check(root) == 3
    out, err = capsys.readouterr()
    assert said in out
    assert said in err
    assert err.count("\n") == 1
    assert check(root, "--json") == 3
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert any(said in problem for split in splits for problem in split["problems"])


def test_a_check_of_a_folder_that_is_not_there_says_how_to_get_it(published, tmp_path, capsys):
    published(b"")
    assert check(tmp_path / "absent") == 3
    assert "ssl-bench data download voc2012 --data-root DIR" in capsys.readouterr().err


def test_a_sample_is_read_of_every_split_and_no_more(published, tmp_path, monkeypatch, capsys):
    published(b"")
    monkeypatch.setattr(data_command, "_SAMPLE", 1)
    assert check(voc_tree(tmp_path / "data"), "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [(s["role"], s["images"], s["read"]) for s in splits] == [
        ("train", 2, 1), ("val", 1, 1), ("discovery", 3, 1),
    ]  # fmt: skip


def test_folders_of_ones_own_are_checked_as_overrides_say(tmp_path, capsys):
    base = voc_tree(tmp_path) / "VOCdevkit/VOC2012"
    words = ["data", "check", "paired_folders", "--data-root", str(base)]
    keys = [
        "dataset.image_folder=JPEGImages", "dataset.mask_folder=SegmentationClass",
        "dataset.class_names=[a,b,c]", "dataset.train_split=train:0-50%",
        "dataset.val_split=train:50-100%",
    ]  # fmt: skip
    assert main([*words, *keys]) == 0
    assert "1 images, 1 read as a sample: ok" in capsys.readouterr().out
    assert main([*words, *keys, "dataset.class_names=[a,b]"]) == 3
    assert "label 2" in capsys.readouterr().err


@pytest.mark.slow
def test_toy_scenes_need_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data_command, "_SAMPLE", 2)
    assert main(["data", "check", "toy"]) == 0
    assert "200 images of 200 published" in capsys.readouterr().out


def test_verify_prints_json(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a")
    digest = sha256_of(tmp_path / "a.txt")
    assert main(["data", "verify", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["listed"] == 1
    (tmp_path / "a.txt").write_text("b")
    assert main(["data", "verify", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["changed"] == ["a.txt"]
    assert (tmp_path / "SHA256SUMS").read_text() == f"{digest}  a.txt\n"


@pytest.mark.data
def test_the_photographs_are_found_readable_but_few(photos, capsys):
    assert main(["data", "check", "voc2012", "--data-root", str(photos)]) == 3
    out, err = capsys.readouterr()
    assert "val        26 images of 1,449 published, 26 read as a sample: 1 problem(s)" in out
    assert "36 images, published are 1,464" in err


def test_a_part_of_a_dataset_is_checked_as_it_is(tmp_path, capsys):
    root = voc_tree(tmp_path)
    words = ["data", "check", "voc2012", "--data-root", str(root)]

    assert main(words) == 3
    assert "is a part of what is published" in (said := capsys.readouterr().err)
    assert "--subset checks a part as it is" in said
    assert main([*words, "--subset"]) == 0
    assert "2 images, 2 read as a sample: ok" in capsys.readouterr().out
    (root / "VOCdevkit/VOC2012/JPEGImages/2007_1.jpg").write_bytes(b"cut")
    assert main([*words, "--subset"]) == 3


@pytest.mark.parametrize(
    "folders", [("a/cat", "b/cat", "b/dog"), ("photos/cat", "photos/dog", "notes")]
)
def test_the_hint_of_a_share_works_when_it_is_typed(tmp_path, capsys, folders):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        for number in range(4 * folder.count("/")):
            picture(number).save(tmp_path / folder / f"{number}.jpg")
    words = ["data", "check", "class_folders", "--data-root", str(tmp_path)]
    assert main(words) == 3

    hint = re.findall(r"dataset\.\w+_split=\S+%", capsys.readouterr().err)
    assert len(hint) == 2
    assert main([*words, *hint]) == 0


def test_folders_without_two_classes_are_no_splits_to_cut(tmp_path, capsys):
    for folder in ("cat/old", "dog/old"):
        (tmp_path / folder).mkdir(parents=True)
        picture(0).save(tmp_path / folder / "0.jpg")

    assert main(["data", "check", "class_folders", "--data-root", str(tmp_path)]) == 3

    said = capsys.readouterr().err
    assert "expected SPLIT/CLASS/PICTURE or CLASS/PICTURE" in said
    assert "_split=" not in said
