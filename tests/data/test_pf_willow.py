"""PF-WILLOW: its pairs and points, and invalid files."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from ssl_bench.data.layouts.pf_willow import PfWillow
from ssl_bench.data.samples import Dataset
from ssl_bench.errors import DataError
from tests.support.faults import picture

POINTS = [[1.0, 40.0], [10.5, 3.0], [32.0, 16.0]]
NAMES = (
    "car(G)/Cars_006a",
    "car(G)/Cars_007a",
    "car(G)/Cars_008b",
    "duck(S)/Ducks_1",
    "duck(S)/D2",
)


def save_points(path: Path, **arrays: Any) -> None:
    savemat(path.with_suffix(".mat"), arrays or {"pts_coord": np.array(POINTS).T})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "PF-dataset-WILLOW"
    for number, name in enumerate(NAMES):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, height=40, width=32).save(path)
        save_points(path, pts_coord=np.array(POINTS).T - [[0], [number]])
    return folder


def test_all_ordered_pairs_of_a_subclass_have_points(root):
    for folder in (root, root.parent):
        pairs = PfWillow(folder).val()

        assert isinstance(PfWillow(folder), Dataset)
        assert (pairs.name, pairs.split, len(pairs)) == ("pf_willow-8", "all", 8)
        assert pairs.ids[1] == "000001-Cars_006a-Cars_008b:car(G)"
        assert pairs.ids[-1] == "000007-Ducks_1-D2:duck(S)"
        sample = pairs[1]
        assert sample.image.shape == (40, 32, 3)
        pair = sample.pair
        assert pair is not None
        assert pair.image_ids == (NAMES[0], NAMES[2])
        # The middle of the first pixel is (1, 1) in the files.
        assert pair.source.tolist() == [[0.5, 39.5], [10.0, 2.5], [31.5, 15.5]]
        assert pair.target.tolist() == [[0.5, 37.5], [10.0, 0.5], [31.5, 13.5]]
        assert (pair.extent, pair.category) == (37.0, "car(G)")


def test_the_fingerprint_follows_points_and_images(root):
    found = [PfWillow(root).val().fingerprint() for _ in range(2)]
    save_points(root / f"{NAMES[0]}.png")
    save_points(root / f"{NAMES[1]}.png")
    found.append(PfWillow(root).val().fingerprint())
    picture(9, height=40, width=32).save(root / f"{NAMES[1]}.png")
    found.append(PfWillow(root).val().fingerprint())

    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no MATLAB file",
        {"other": np.ones((2, 3))},
        {"pts_coord": np.ones((3, 2))},
        {"pts_coord": np.ones((2, 0))},
        {"pts_coord": np.array(POINTS).T + 3},
        {"pts_coord": np.full((2, 3), np.nan)},
        {"pts_coord": np.array(["a", "b"])},
    ],
)
def test_files_without_points_are_refused(root, content):
    path = root / f"{NAMES[0]}.mat"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_points(path, **content)

    with pytest.raises(DataError, match=r"Cars_006a\.mat"):
        _ = PfWillow(root).val()[0]


def test_missing_and_unequal_files_are_named(root):
    save_points(root / f"{NAMES[1]}.mat", pts_coord=np.ones((2, 4)))
    with pytest.raises(DataError, match=r"3 points .* 4"):
        _ = PfWillow(root).val()[0]
    (root / f"{NAMES[2]}.mat").unlink()
    with pytest.raises(DataError, match="1 of 5 files with points"):
        PfWillow(root).val()
    picture(0).save(root / "car(G)/a-b.png")
    with pytest.raises(DataError, match="a-b"):
        PfWillow(root).val()


@pytest.mark.data
def test_the_pairs_of_the_complete_dataset_are_found(shared_data):
    folder = shared_data / "real/pf-willow"
    pairs = PfWillow(folder).val()

    assert (pairs.name, len(pairs)) == ("pf_willow", 900)
    rows = list(csv.reader((folder / "pairs_all_ordered.csv").read_text().splitlines()))[1:]
    for pair_id, row in zip(pairs.ids, rows, strict=True):
        names, _, category = pair_id.rpartition(":")
        assert row == [f"{category}/{name}.png" for name in names.split("-")[1:]]
    found = [pairs[index].pair for index in range(0, 900, 90)]
    assert {len(pair.source) for pair in found if pair is not None} == {10}
