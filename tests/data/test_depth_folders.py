"""Folders of images and depth maps: units, unknown depth, and invalid files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.layouts.depth_folders import DepthFolders
from ssl_bench.data.samples import Dataset
from ssl_bench.data.splits import limit_dataset
from ssl_bench.errors import ConfigurationError, DataError

NUMBERS = [[0, 1, 1234], [65535, 2500, 9]]


def save(root: Path, name: str, pixels: Any, dtype: type = np.uint16) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, dtype)).save(path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Create two training images and one validation image."""
    for name in ("train/x/a", "train/x/b", "val/y/c"):
        save(tmp_path, f"images/{name}.jpg", [[(9, 8, 7)] * 3] * 2, np.uint8)
        save(tmp_path, f"depth/{name}.png", NUMBERS)
    return tmp_path


def depth(dataset: DepthFolders) -> np.ndarray:
    found = dataset.val()[0].depth
    assert found is not None
    return found


def test_numbers_are_millimetres_and_0_is_unknown(folders):
    dataset = DepthFolders(folders)

    assert depth(dataset).dtype == np.float32
    assert np.array_equal(depth(dataset), np.array(NUMBERS, np.float32) / np.float32(1000))
    assert (dataset.train().ids, dataset.val().ids) == (("x/a", "x/b"), ("y/c",))
    assert dataset.images()[1].depth is None
    assert isinstance(dataset, Dataset)
    assert dataset.supports == {"depth", "images"}


def test_another_unit_and_a_largest_depth(folders):
    found = depth(DepthFolders(folders, metres_per_unit=0.01, max_metres=25.0))

    assert found.ravel().tolist() == pytest.approx([0, 0.01, 12.34, 0, 25, 0.09])


def test_8_bit_maps_and_shares_of_a_split(folders):
    save(folders, "depth/train/x/b.png", [[0, 1, 2], [3, 4, 255]], np.uint8)
    dataset = DepthFolders(
        folders, train_split="train:0-50%", val_split="train:50-100%", metres_per_unit=0.5
    )

    assert depth(dataset).ravel().tolist() == [0, 0.5, 1, 1.5, 2, 127.5]
    assert len(limit_dataset(dataset, 1).train()) == 1


def test_the_fingerprint_follows_depth_unit_and_limit(folders):
    found = [
        DepthFolders(folders, **options).val().fingerprint()
        for options in ({}, {}, {"metres_per_unit": 0.002}, {"max_metres": 5.0})
    ]
    save(folders, "depth/val/y/c.png", np.array(NUMBERS) + (np.array(NUMBERS) == 9))
    found.append(DepthFolders(folders).val().fingerprint())

    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_wrong_files_are_named(folders):
    map_path = folders / "depth/val/y/c.png"
    cases: list[tuple[Any, str]] = [
        (lambda: save(folders, "depth/val/y/c.png", [[(1, 2, 3)] * 3] * 2, np.uint8), "one depth"),
        (lambda: save(folders, "depth/val/y/c.png", [[1, 2]]), "2 x 1 pixels"),
        (lambda: map_path.write_bytes(b"x"), "c.png"),
        (map_path.unlink, "1 of 1 depth maps"),
    ]
    for spoil, word in cases:
        spoil()
        with pytest.raises(DataError, match=word):
            _ = DepthFolders(folders).val()[0]
    (folders / "images/train/x/b.jpg").unlink()
    with pytest.raises(DataError, match="1 of 2 images"):
        DepthFolders(folders).train()
    with pytest.raises(DataError, match="depths"):
        DepthFolders(folders, depth_folder="depths/{split}").train()


@pytest.mark.parametrize(
    "options", [{"name": "nyu"}, {"val_split": "train:50-100%"}, {"metres_per_unit": 0.0}]
)
def test_settings_without_meaning_are_refused(options):
    with pytest.raises(ConfigurationError):
        DepthFolders("/nowhere", **options)
