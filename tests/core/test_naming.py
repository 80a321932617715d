"""Test that long names give valid and distinct file names."""

import random
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.data import unpack
from ssl_bench.system.files import (
    figures_folder_name,
    figures_folder_prefix,
    file_name,
    natural_sort_key,
    write_text_atomically,
)
from tests.support.faults import (
    encoded,
    encoder_file,
    make_probe_args,
    mask,
    paired_folders,
    picture,
    records,
)

LONG = {"255 bytes": "n" * 251, "characters of three bytes": "画" * 83}


@pytest.mark.parametrize("text", ["n" * 252, "画" * 84, "é" * 150, "\udcff" * 300])
def test_a_long_name_is_shortened_and_stays_distinct(text):
    names = [file_name(text + end, added=4) for end in ("", "a", "b")]

    assert len({*names, file_name(names[0])}) == 4
    for name in names:
        content = name.encode(errors="surrogateescape")
        assert len(content) <= 251
        assert text.encode(errors="surrogateescape").startswith(content.rpartition(b"~")[0])
    assert "~" in names[0]
    assert file_name("b/画 a~0.jpg") == "b_画 a~0.jpg"
    assert file_name("n" * 251, added=4) == "n" * 251


@pytest.mark.parametrize("text", ["", ".", "..", ".hidden", "a\0b"])
def test_no_name_is_hidden_or_leaves_its_folder(text):
    name = file_name(text)

    assert name[0] not in "./~"
    assert "\0" not in name
    assert name != file_name(f"_{text}")


def test_encoder_folders_contain_digits_of_the_sha256():
    assert figures_folder_prefix("timm/vit", "abcdef0123") == "timm_vit-abcdef01"
    assert (
        len(figures_folder_name(figures_folder_prefix("n" * 255, "abcdef0123"), "stat-9876543210"))
        == 255
    )


@pytest.mark.parametrize(
    ("stem", "task"), [(LONG["characters of three bytes"], "pca"), (LONG["255 bytes"], "tokencut")]
)
def test_images_with_the_longest_names_are_probed_and_drawn(workdir, stem, task):
    photos = workdir / "photos"
    for path in list(photos.iterdir())[1:]:
        path.unlink()
    picture(5).save(photos / f"{stem}.jpg")

    assert main(make_probe_args(task, "folder", photos)) == 0

    figures = [path for path in Path("results/pictures").rglob("*.png") if stem[:60] in path.name]
    assert figures


def test_models_and_datasets_with_long_names_are_recorded(workdir, capsys):
    model, dataset = "m" * 244, "画" * 81
    run = encoder_file(workdir / model / "last.safetensors")
    mask_png = encoded("PNG", Image.fromarray(mask() // 8 % 2))
    paired_folders(workdir, {"train": "012", "val": "34"}, content=mask_png)
    words = make_probe_args(
        "segmentation", "paired_folders", workdir, f"dataset.name='{dataset * 2}'"
    )
    words[words.index("encoder.safetensors")] = str(run.parent)

    assert main([*words, "dataset.class_names=[no,yes]", "probe.panels=1"]) == 0

    assert {(record.model, record.dataset) for record in records()} == {(model, dataset * 2)}
    assert main(["report", "--into", "r" * 244]) == 0
    assert list(Path("r" * 244).rglob("*.png"))
    # The name of the file with the digest would be too long.
    weights = Path(f"{'w' * 243}.safetensors")
    shutil.copy("encoder.safetensors", weights)
    assert main(["models", str(weights)]) == 4


@pytest.mark.parametrize("stem", LONG.values(), ids=LONG)
def test_a_file_with_the_longest_name_is_written_and_unpacked(tmp_path, stem):
    source = tmp_path / f"{stem}.txt"
    write_text_atomically(source, "whole")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(source, source.name)

    unpack(tmp_path / "a.tar", tmp_path / "out")

    assert (tmp_path / "out" / source.name).read_text() == "whole"


def test_numbers_in_names_are_sorted_by_value():
    ordered = ["10", "9" * 5000, "run", "run@010", "run@10", "run@50", "run@100", "vit_b8"]
    shuffled = random.Random(0).sample(ordered, len(ordered))

    assert sorted(shuffled, key=natural_sort_key) == ordered
