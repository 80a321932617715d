"""Pictures in archives are those of the unpacked folder, wherever they are read."""

import io
import pickle
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from pretrain.crops.multi import MultiCrop
from pretrain.runtime.batches import Batches, Share
from ssl_bench.data.layouts.archives import is_archive, open_archives, open_labelled_archives
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError, MachineError

NAMES = ("cat/10.png", "cat/9.jpg", "dog/deep/1.JPEG", "top.bmp")


def encoded(red: int, suffix: str = ".png") -> bytes:
    buffer = io.BytesIO()
    kind = {".png": "PNG", ".bmp": "BMP"}.get(suffix.lower(), "JPEG")
    Image.new("RGB", (9, 7), (red, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


def contents(names=NAMES) -> dict[str, bytes]:
    return {name: encoded(40 * n, Path(name).suffix) for n, name in enumerate(names)}


def tarred(path: Path, files: dict[str, bytes], mode: Literal["w", "w:gz"] = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def zipped(path: Path, files: dict[str, bytes], method=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.mkdir("empty")
        for name, content in files.items():
            member = zipfile.ZipInfo(name)
            member.compress_type, member.extra = method, b"\x99\x99\x04\x00more"
            archive.writestr(member, content)
    return path


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def assert_same(one: ImageSet, other: ImageSet) -> None:
    assert one.ids == other.ids
    assert one.fingerprint() == other.fingerprint()
    for index in range(len(one)):
        assert one[index].image_id == other[index].image_id
        np.testing.assert_array_equal(one[index].image, other[index].image)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("suffix", "make"),
    [
        (".tar", tarred),
        (".TAR", tarred),
        (".zip", zipped),
        (".zip", lambda path, files: zipped(path, files, zipfile.ZIP_DEFLATED)),
        (".tar.gz", lambda path, files: tarred(path, files, "w:gz")),
        (".tgz", lambda path, files: tarred(path, files, "w:gz")),
    ],
)
def test_an_archive_gives_what_its_folder_gives(tmp_path, suffix, make, in_memory):
    files = contents() | {"readme.txt": b"no picture", ".hidden/x.png": b"", "cat/._9.jpg": b""}
    path = make(tmp_path / f"a{suffix}", files)
    if suffix in (".tar.gz", ".tgz") and not in_memory:
        with pytest.raises(DataError, match=r"compressed as a whole.*data\.in_memory=true.*gunzip"):
            open_archives(str(path))
        return

    images = open_archives(str(path), in_memory=in_memory)

    assert isinstance(images, ImageSet)
    assert images.ids == NAMES
    assert_same(images, ImageFolder(folder_of(tmp_path / "folder", contents())).images())


def test_archives_kept_in_memory_need_no_file_any_more(tmp_path):
    path = tarred(tmp_path / "a.tar", contents())
    on_disk, kept = (open_archives(str(path), in_memory=form) for form in (False, True))

    path.unlink()

    assert kept[0].image[0, 0, 0] == 0
    with pytest.raises(DataError, match=r"a\.tar does not exist"):
        on_disk[0]


@pytest.mark.parametrize(
    "pattern",
    ["part_*.tar", "part_{08..10}.tar", "part_{08,10,09}.tar", "part_0?.tar", "part_09.tar", ""],
)
def test_parts_make_one_set_in_the_order_of_the_ids(tmp_path, pattern):
    files = list(contents().items())
    for number, part in {"10": files[:1], "08": files[2:], "09": files[1:2]}.items():
        tarred(tmp_path / f"part_{number}.tar", dict(part))
    expected = {"part_0?.tar": NAMES[1:], "part_09.tar": NAMES[1:2]}.get(pattern, NAMES)

    images = open_archives(str(tmp_path / pattern))

    assert images.ids == expected
    assert [s.image[0, 0, 0] // 39 for s in images] == [NAMES.index(i) for i in images.ids]


def test_a_folder_inside_the_archives_can_be_named(tmp_path):
    files = {f"./set/train/{name}": content for name, content in contents().items()}
    tarred(tmp_path / "a.tar", files | {"set/val/other.png": b"", "set/train2/x.png": b""})

    images = open_archives(f"{tmp_path}/a.tar/set/train")

    assert images.ids == NAMES
    assert open_archives(f"{tmp_path}/a.tar/set").ids[-1] == "val/other.png"
    assert open_archives(f"{tmp_path}/a.tar/set/{{val,train2}}").ids == ("other.png", "x.png")


def test_what_a_root_is_depends_on_its_suffix_and_what_lies_in_it(tmp_path):
    tarred(tmp_path / "parts/a.tar", contents())
    tarred(tmp_path / "mixed/a.tar", contents())
    folder_of(tmp_path / "mixed", {"cat/1.png": encoded(0)})
    folder_of(tmp_path / "odd.tar", {"1.png": encoded(0)})

    answers = {
        name: is_archive(str(tmp_path / name))
        for name in ("parts", "mixed", "odd.tar", "parts/a.tar", "parts/*.tar/cat", "x.zip", "none")
    }

    assert [name for name, answer in answers.items() if answer] == [
        *("parts", "parts/a.tar", "parts/*.tar/cat", "x.zip")
    ]


def test_a_name_in_two_places_is_refused(tmp_path):
    tarred(tmp_path / "a.tar", contents())
    tarred(tmp_path / "b.tar", {"top.bmp": encoded(0)})
    tarred(tmp_path / "c.tar", {"./more.png": b"", "more.png": b""})

    with pytest.raises(DataError, match=r"c\.tar holds more\.png twice"):
        open_archives(str(tmp_path / "c.tar"))
    with pytest.raises(DataError, match=r"a\.tar and .*b\.tar hold top\.bmp twice"):
        open_archives(f"{tmp_path}/{{a,b}}.tar")


@pytest.mark.parametrize("kept", [0, 100, 512, 700, 1024, 1084, 1240, 2048, 2500])
def test_a_tar_that_is_cut_short_is_refused(tmp_path, kept):
    path = tarred(tmp_path / "a.tar", contents(("1.png", "2.png")))
    assert path.stat().st_size == 10240
    content = path.read_bytes()
    # Header, picture, header, picture of 512 bytes each; what follows is the end mark.
    path.write_bytes(content[:kept])

    with pytest.raises(DataError, match=r"a\.tar is damaged or cut short|a\.tar holds no picture"):
        open_archives(str(path))


def test_a_damaged_header_in_the_middle_does_not_hide_the_rest(tmp_path):
    path = tarred(tmp_path / "a.tar", contents(("1.png", "2.png", "3.png")))
    content = bytearray(path.read_bytes())
    content[1024 + 100] ^= 1
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"neither a file nor the end mark at byte 1024"):
        open_archives(str(path))


@pytest.mark.parametrize("name", ["a.tar", "a.zip", "a.tar.gz"])
@pytest.mark.parametrize("content", [b"", b"<html>not found</html>" * 40, bytes(2048)])
def test_what_is_no_archive_is_refused_in_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match=r"a\.\S+ (is damaged or cut short|holds no)") as refusal:
        open_archives(str(tmp_path / name), in_memory=True)

    assert "\n" not in str(refusal.value)


def test_a_cut_gz_and_a_cut_zip_are_refused(tmp_path):
    packed = tarred(tmp_path / "a.tar.gz", contents(), "w:gz")
    other = zipped(tmp_path / "a.zip", contents())
    for path in (packed, other):
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(DataError, match="is damaged or cut short"):
            open_archives(str(path), in_memory=True)


def test_an_unusual_zip_and_links_are_refused(tmp_path):
    zipped(tmp_path / "a.zip", contents(), zipfile.ZIP_BZIP2)
    with tarfile.open(tarred(tmp_path / "a.tar", contents()), "a") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0.png"
        archive.addfile(link)

    with pytest.raises(DataError, match=r"10\.png is encrypted or packed unusually"):
        open_archives(str(tmp_path / "a.zip"))
    with pytest.raises(DataError, match=r"only a link for link\.png; .*--dereference"):
        open_archives(str(tmp_path / "a.tar"))


@pytest.mark.parametrize("claimed", [0, 100, 10**6 - 1, 10**6 + 1])
def test_a_file_that_is_not_as_long_as_its_archive_says_is_refused(tmp_path, claimed):
    path = zipped(tmp_path / "a.zip", {"1.png": bytes(10**6)}, zipfile.ZIP_DEFLATED)
    images = open_archives(str(path))
    pretended = replace(images, places=np.where(images.places == 10**6, claimed, images.places))

    assert len(images.archives[0].read(images.archives[0].members()[0])) == 10**6
    with pytest.raises(DataError, match=rf"it holds (more|fewer) than {claimed} bytes"):
        pretended[0]


@pytest.mark.parametrize(
    ("root", "complaint"),
    [
        ("none.tar", "none.tar does not exist"),
        ("none_*.tar", "does not exist; expected an archive or a pattern"),
        ("a_{1..2}.tar", "a_2.tar does not exist"),
        ("a_1.tar/elsewhere", "holds no picture"),
        ("a_1.rar", "is no archive; known are .tar, .tar.gz, .tgz, .zip"),
    ],
)
def test_a_root_without_pictures_is_refused(tmp_path, root, complaint):
    tarred(tmp_path / "a_1.tar", contents())

    with pytest.raises(DataError, match=complaint):
        open_archives(str(tmp_path / root))


def test_a_damaged_picture_is_named_with_its_archive(tmp_path):
    half = encoded(9, ".jpg")[:-200]
    images = open_archives(str(tarred(tmp_path / "a.tar", {"x/1.jpg": half})))

    with pytest.raises(DataError, match=r"a\.tar/x/1\.jpg is damaged or cut short"):
        images[0]


def test_an_archive_that_shrinks_after_it_was_opened_is_named(tmp_path):
    path = tarred(tmp_path / "a.tar", contents())
    images = open_archives(str(path))

    path.write_bytes(path.read_bytes()[:530])

    with pytest.raises(DataError, match=r"a\.tar is damaged or cut short \(it ends too early\)"):
        images[0]


def test_labels_are_the_folders(tmp_path):
    files = {f"train/{name}": content for name, content in contents(NAMES[:3]).items()}
    path = tarred(tmp_path / "a.tar", files)

    images = open_labelled_archives(f"{path}/train")

    assert images.class_names == ("cat", "dog")
    assert [sample.label for sample in images] == [0, 0, 1]
    with pytest.raises(DataError, match=r"single class train; .* such as .*a\.tar/FOLDER"):
        open_labelled_archives(str(path))


def shards(folder: Path, classes: dict[str, bytes]) -> str:
    """Two shards as webdataset writes them."""
    keys = sorted(classes)
    for number, part in enumerate((keys[:2], keys[2:])):
        files = {}
        for key in part:
            files |= {f"{key}.jpg": encoded(9, ".jpg"), f"{key}.cls": classes[key]}
            files[f"{key}.json"] = b"{}"
        tarred(folder / f"s-{number:03}.tar", files)
    return str(folder / "s-{000..001}.tar")


def test_labels_of_shards_are_the_numbers_beside_the_pictures(tmp_path):
    root = shards(tmp_path, {"000": b"7\n", "001": b"30", "002": b"4", "003": b"7"})

    images = open_labelled_archives(root)

    assert images.class_names == ("4", "7", "30")
    assert [sample.label for sample in images] == [1, 2, 0, 1]
    assert open_archives(root)[0].label is None


@pytest.mark.parametrize(
    ("classes", "complaint"),
    [({"000": b"1", "001": b"cat"}, "001.cls holds b'cat', expected the number of a class")],
)
def test_a_class_that_is_no_number_is_refused(tmp_path, classes, complaint):
    with pytest.raises(DataError, match=complaint):
        open_labelled_archives(shards(tmp_path, classes))


def test_a_picture_without_its_class_is_refused(tmp_path):
    files = {"000.jpg": encoded(1, ".jpg"), "000.cls": b"1", "001.jpg": encoded(1, ".jpg")}
    path = tarred(tmp_path / "a.tar", files)

    with pytest.raises(DataError, match=r"001\.jpg has no 001\.cls beside it"):
        open_labelled_archives(str(path))


@pytest.mark.parametrize("in_memory", [False, True])
def test_worker_processes_read_what_the_main_process_reads(tmp_path, in_memory):
    names = [f"{number}.png" for number in range(12)]
    noise = np.random.default_rng(0).integers(0, 256, (12, 20, 24, 3), dtype=np.uint8)
    files = {}
    for name, pixels in zip(names, noise, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        files[name] = buffer.getvalue()
    tarred(tmp_path / "a.tar", files)
    images = open_archives(str(tmp_path / "a.tar"), in_memory=in_memory)
    crops = MultiCrop(num_locals=2)

    def cut(samples, generators):
        return crops.cut(samples, generators, (16, 8))

    alone, helped = (
        list(
            DataLoader(
                Batches(images, cut, Share(3), seed=0),
                batch_size=None,
                sampler=range(8),
                num_workers=workers,
            )
        )
        for workers in (0, 2)
    )

    for one, other in zip(alone, helped, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert (ours.pixels == theirs.pixels).all()
    assert_same(images, pickle.loads(pickle.dumps(images)))


@pytest.mark.data
@pytest.mark.slow
def test_parts_of_tiny_imagenet_are_read_as_published(shared_data):
    parts = shared_data / "tiny_imagenet/tiny_imagenet_train_0{0,1}.tar.gz"

    images = open_labelled_archives(f"{parts}/tiny-imagenet-200/train", in_memory=True)

    assert len(images) == 40_000
    assert len(images.class_names) == 80
    assert images.ids[0] == "n01443537/images/n01443537_0.JPEG"
    assert np.bincount([images.labels[i] for i in range(40_000)]).tolist() == [500] * 80
    assert {images[index].image.shape for index in range(0, 40_000, 400)} == {(64, 64, 3)}


def test_an_index_that_memory_does_not_hold_ends_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.png", b"")

    def too_much(self: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        raise MemoryError

    monkeypatch.setattr(zipfile.ZipFile, "infolist", too_much)
    with pytest.raises(MachineError, match=r"a\.zip needs more memory than there is; unpack it"):
        open_archives(str(path))
