"""Test commands on a folder of photographs."""

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.models.loading.addresses import expand_addresses
from tests.support.faults import (
    corrupt_file,
    encoder_file,
    expect_error,
    make_probe_args,
    photo_folder,
    picture,
    records,
)

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)
ORIENTATION = 0x0112


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder_file(tmp_path / "encoder.safetensors")
    return tmp_path


def save_rotated(path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    picture(0, 24, 40).save(path, exif=exif, quality=95)


def rows_by_log() -> dict[str, dict[str, dict]]:
    logs = Path("results/pictures").glob("*/*/*/*/images_*.jsonl")
    lines = {str(log): log.read_text().splitlines()[1:] for log in logs}
    return {log: {json.loads(x)["image"]: json.loads(x) for x in own} for log, own in lines.items()}


def test_unreadable_images_are_found_before_a_model_is_loaded(workdir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    photos = photo_folder(workdir / "photos", 5)
    corrupt_file(photos / "1.jpg", "half")
    corrupt_file(photos / "3.jpg", "empty")
    (photos / "phone.HEIC").write_bytes(HEIC)
    for name in ("a.NEF", "sub/b.nef", "notes.txt", ".hidden"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_bytes(b"II*\0")

    words = [
        word.replace("pca", "pca,tokencut") for word in make_probe_args("pca", "folder", photos)
    ]
    assert main(words) == 0

    lines = capsys.readouterr().err.splitlines()
    (suffixes,) = [line for line in lines if "suffix" in line]
    assert "3 files" in suffixes
    assert "2 .nef, 1 .txt" in suffixes
    using, encoder = (
        next(n for n, line in enumerate(lines) if line.startswith(start))
        for start in ("using ", "encoder ")
    )
    assert using < encoder
    assert lines[using] == (
        "using 3 images of folder; 2 cannot be read: 1.jpg, 3.jpg; "
        "1 needs pip install 'ssl-bench[heic]': phone.HEIC"
    )
    gone = {"count": 3, "first": ["1.jpg", "3.jpg", "phone.HEIC"]}
    assert {r.task for r in records()} == {"pca", "tokencut"}
    assert all(r.details["left_out"] == {"all": gone} for r in records())
    for more in ([], ["--dry-run"]):
        said = expect_error(capsys, [*words, "--pictures", "2", "--on-bad-image", "fail", *more], 3)
        assert "photos/1.jpg" in said


@pytest.mark.parametrize("suffix", [".jfif", ".JPE", ".pgm", ".dib", ".mpo"])
def test_images_with_rare_suffixes_are_used(tmp_path, suffix):
    kind = {".pgm": "PPM", ".dib": "BMP"}.get(suffix, "JPEG")
    picture(0, 24, 40).convert("L").save(tmp_path / f"a{suffix}", kind)

    (sample,) = ImageFolder(tmp_path).images()

    assert (sample.image_id, sample.image.shape) == (f"a{suffix}", (24, 40, 3))


def test_a_second_command_decodes_no_image_to_check_it(workdir, capsys, monkeypatch):
    photos = photo_folder(workdir / "photos")
    for path in photos.iterdir():
        # The cache ignores files that were written a moment ago.
        os.utime(path, (time.time() - 3600,) * 2)
    monkeypatch.setattr("ssl_bench.data.files.fingerprints.RACY_NS", -(10**12))
    words = make_probe_args("pca", "folder", photos, "--dry-run")
    assert main(words) == 0

    def read(*_, **__):
        raise AssertionError("was decoded")

    monkeypatch.setattr("ssl_bench.data.files.file_sets.read_image", read)
    assert main(words) == 0
    assert "using 4 images of folder" in capsys.readouterr().err


def test_heic_is_read_where_pillow_heif_is_installed(workdir):
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    (workdir / "photos").mkdir()
    # The image is smooth, because the codec would distort noise.
    rows, cols = np.mgrid[:64, :96]
    smooth = np.stack([rows * 3, cols * 2, rows + cols], axis=2).astype(np.uint8)
    Image.fromarray(smooth).save(workdir / "photos/a.heic", quality=95)

    (sample,) = ImageFolder(workdir / "photos").images()

    assert np.abs(sample.image - smooth.astype(int)).mean() < 4


def test_photographs_are_rotated_by_their_exif_orientation(tmp_path):
    kinds = ["jpg", "png", "webp", "tif", *(["avif"] if features.check("avif") else [])]
    names = sorted(f"{number}.{kind}" for number in range(1, 9) for kind in kinds)
    (tmp_path / "photos").mkdir()
    for name in names:
        save_rotated(tmp_path / "photos" / name, int(name[0]))
    images = ImageFolder(tmp_path / "photos").images()

    assert images.ids == tuple(names)
    for index, name in enumerate(names):
        with Image.open(tmp_path / "photos" / name) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        assert np.array_equal(images[index].image, np.asarray(upright)), name
    for kind in ("cat", "dog"):
        (tmp_path / "classes/train" / kind).mkdir(parents=True)
        save_rotated(tmp_path / "classes/train" / kind / "a.jpg", 6)
    assert ClassFolders(tmp_path / "classes").train()[0].image.shape == (40, 24, 3)


def test_fingerprints_change_only_with_the_pixels(tmp_path):
    photos = photo_folder(tmp_path / "photos")
    plain = ImageFolder(photos).images()
    save_rotated(photos / "9.jpg", 6)
    both = ImageFolder(photos).images()

    assert replace(both, apply_exif_orientation=False).fingerprint() != both.fingerprint()
    assert replace(plain, apply_exif_orientation=False).fingerprint() == plain.fingerprint()


def test_only_new_photographs_are_searched(workdir):
    photos = photo_folder(workdir / "photos", 5)
    words = make_probe_args("tokencut", "folder", photos, "--pictures", "0")
    assert main(words) == 0
    picture(77).save(photos / "2.jpg", quality=95)
    picture(78).save(photos / "new.jpg", quality=95)
    (photos / "0.jpg").unlink()
    (photos / "1.jpg").rename(photos / "renamed.jpg")
    ((first, before),) = rows_by_log().items()

    assert main(words) == 0

    (other,) = set(rows_by_log()) - {first}
    rows = rows_by_log()[other]
    assert sorted(rows) == ["2.jpg", "3.jpg", "4.jpg", "new.jpg", "renamed.jpg"]
    known = {row["entry"] for row in before.values()}
    taken = {name for name, row in rows.items() if row["entry"] in known}
    assert taken == {"3.jpg", "4.jpg", "renamed.jpg"}
    masks = {path.name for path in Path(other).parent.glob("masks/*/*.png")}
    assert masks == {f"{name}.png" for name in rows}
    # The results equal the results of a search from scratch.
    shutil.rmtree("results")
    assert main(words) == 0
    (alone,) = rows_by_log().values()
    cells, fresh = ({name: row["cells"] for name, row in r.items()} for r in (rows, alone))
    assert cells == fresh


def test_figures_are_drawn_for_images_from_the_whole_dataset(workdir, capsys):
    photos = photo_folder(workdir / "photos", 12)
    words = make_probe_args("tokencut", "folder", photos, "--pictures", "3")

    assert main(words) == 0

    (folder,) = Path("results/pictures").glob("tokencut/folder/*/reference_max_side=640")
    names = {path.name.removesuffix(".png") for path in folder.glob("block01_key/*.png")}
    assert len(names) == 3
    assert names != set(sorted(f"{number}.jpg" for number in range(12))[:3])
    assert "probe.panels=4" in expect_error(capsys, [*words, "probe.panels=4"], 2)


def test_checkpoints_are_separated_by_commas(workdir, capsys):
    (workdir / "runs,all").mkdir()
    encoder_file(workdir / "runs,all/a.safetensors")
    stated = "mean=0.5,std=0.5:encoder.safetensors"

    for text, found in {
        "demo:skip,encoder.safetensors": ["demo:skip", "encoder.safetensors"],
        f"{stated},demo:skip": [stated, "demo:skip"],
        f"demo:skip,random:{stated}": ["demo:skip", f"random:{stated}"],
        "runs,all/a.safetensors": ["runs,all/a.safetensors"],
        "enc*,demo:skip": ["encoder.safetensors", "demo:skip"],
        stated: [stated],
    }.items():
        assert expand_addresses([text]) == found
    words = make_probe_args("pca", "folder", photo_folder(workdir / "photos", 1))
    both = [word.replace("encoder.safetensors", "encoder.safetensors,no.pth") for word in words]
    assert "no.pth" in expect_error(capsys, both, 4)


def test_a_check_of_photographs_lists_the_unreadable_ones(workdir, capsys):
    corrupt_file(photo_folder(workdir / "photos") / "1.jpg", "half")
    words = ["data", "check", "folder", "--data-root", "photos"]

    assert main(words) == 3
    said = capsys.readouterr()
    first, why = said.out.splitlines()
    assert first == "4 images: 1 unreadable"
    assert "1.jpg is damaged or cut short" in why
    assert "1 of 4 images of folder all cannot be read" in said.err
    assert main([*words, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report == {"dataset": "folder", "images": 3, "left_out": ["1.jpg"]}
    Path("photos/1.jpg").unlink()
    assert main(words) == 0
    assert capsys.readouterr().out == "3 images: ok\n"


def test_maps_of_two_sizes_are_in_different_folders(workdir):
    words = make_probe_args("pca", "folder", photo_folder(workdir / "photos", 1))
    for size in (32, 48):
        assert main([w.replace("image_size=32", f"image_size={size}") for w in words]) == 0

    kinds = {folder.name for folder in Path("results/pictures/pca/folder").glob("*/*/")}
    assert kinds == {"image-32px", "image-48px"}
