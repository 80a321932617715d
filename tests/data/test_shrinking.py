"""Test the command `ssl-bench data shrink`, which writes smaller copies of images."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base as Tag

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.images import read_image
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.shrinking import METADATA_FILE
from tests.support.faults import expect_error, photo_folder

# Names and sizes (width, height) of images, with the size that their copies should have.
SIZES = {
    "train/cat/wide.JPEG": ((90, 60), (48, 32)),
    "train/cat/small.jpg": ((31, 40), (31, 40)),
    "val/dog/high.png": ((33, 101), (32, 98)),
    "val/dog/square.webp": ((64, 64), (32, 32)),
    "val/dog/moving.gif": ((64, 64), (64, 64)),
}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for name, ((width, height), _) in SIZES.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, columns = np.mgrid[:height, :width]
        pixels = np.stack([rows * 255 / height, columns * 255 / width, rows * 0 + 90.0], -1)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    exif = Image.Exif()
    exif[Tag.Orientation] = 6
    Image.new("RGB", (80, 40), "red").save(tmp_path / "photos/turned.jpg", exif=exif)
    return tmp_path / "photos"


def shrink(root: Path, out: Path, *more: str) -> int:
    return main(["data", "shrink", str(root), "--out", str(out), "--side", "32", *more])


def test_copies_have_the_names_and_the_shorter_side(photographs, tmp_path, capsys):
    out = tmp_path / "copies"

    assert shrink(photographs, out, "--json") == 0

    copies, sources = ImageFolder(str(out)).images(), ImageFolder(str(photographs)).images()
    assert copies.ids == sources.ids
    for name, (old, new) in SIZES.items():
        copy, source = read_image(out / name), read_image(photographs / name)
        assert copy.shape[:2] == new[::-1]
        if old == new:
            assert (out / name).read_bytes() == (photographs / name).read_bytes()
        expected = Image.fromarray(source).resize(new, Image.Resampling.BICUBIC)
        assert np.abs(copy - np.asarray(expected, np.float64)).mean() < 2
    assert read_image(out / "turned.jpg", apply_exif_orientation=True).shape[:2] == (64, 32)
    about = json.loads(capsys.readouterr().out)
    assert about["fingerprint"] == sources.fingerprint()
    assert about["images"] == len(sources) == len(SIZES) + 1
    files = [path for path in photographs.rglob("*") if path.is_file()]
    assert about["bytes_before"] == sum(path.stat().st_size for path in files)
    assert about["bytes_after"] == sum((out / name).stat().st_size for name in copies.ids)
    assert json.loads((out / METADATA_FILE).read_text()).items() <= about.items()


def test_an_unreadable_image_is_named_and_finished_copies_are_kept(photographs, tmp_path, capsys):
    out, damaged = tmp_path / "copies", photographs / "val/dog/high.png"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])

    command = ["data", "shrink", str(photographs), "--out", str(out)]
    assert "high.png" in expect_error(capsys, command, 3)

    assert not (out / "val/dog/high.png").exists()
    kept = out / "train/cat/wide.JPEG"
    inode = kept.stat().st_ino
    damaged.write_bytes(content)
    orphan = out / f"val/.ssl-bench-{7:032x}.tmp"
    orphan.touch()
    os.utime(orphan, (0, 0))
    # An image that was replaced by an older file is copied again.
    turned = photographs / "turned.jpg"
    Image.new("RGB", (300, 40), "blue").save(turned)
    os.utime(turned, (10**9, 10**9))
    (photographs / "train/cat/small.jpg").unlink()
    assert main(command) == 0
    assert kept.stat().st_ino == inode
    assert not orphan.exists()
    assert read_image(out / "turned.jpg")[0, 0, 2] > 250
    assert "train/cat/small.jpg" in capsys.readouterr().err


def test_images_that_a_format_cannot_store_are_copied_unchanged(tmp_path):
    path = tmp_path / "photos/high.webp"
    path.parent.mkdir()
    Image.new("RGB", (60, 40_000)).save(path, "PNG")
    samples = np.full((40, 50), 4095, np.uint16)
    Image.fromarray(samples).save(tmp_path / "photos/deep.png")

    assert shrink(path.parent, tmp_path / "copies", "data.bits=12") == 0

    assert (tmp_path / "copies/high.webp").read_bytes() == path.read_bytes()
    assert read_image(tmp_path / "copies/deep.png").min() == 255


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "ssl-bench data shrink FOLDER --out FOLDER"),
        (["photos"], "ssl-bench data shrink FOLDER --out FOLDER"),
        (["photos", "--out", "photos/small"], "--out FOLDER"),
        (["photos", "--out", "copies", "--side", "0"], "--side=256"),
        (["photos", "--out", "copies", "--side", "16"], "--out FOLDER"),
        (["other", "--out", "copies", "--side", "32"], "--out FOLDER"),
        (["photos", "--out", "other"], "--out FOLDER"),
        (["photos", "--out", "other/1.jpg"], "--out FOLDER"),
        (["photos", "--out", "loop"], "--out FOLDER"),
    ],
)
def test_a_wrong_request_is_refused(photographs, tmp_path, monkeypatch, capsys, words, hint):
    monkeypatch.chdir(tmp_path)
    assert shrink(photographs, tmp_path / "copies") == 0
    photo_folder(tmp_path / "other")
    (tmp_path / "loop").symlink_to("loop")
    assert hint in expect_error(capsys, ["data", "shrink", *words], 2)
