"""Test the keypoint datasets SPair-71k and PF-WILLOW."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from ssl_bench.data import samples
from ssl_bench.data.layouts.pf_willow import PfWillow
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.samples import Dataset
from ssl_bench.data.splits import limit_dataset
from ssl_bench.errors import DataError
from tests.support.faults import picture
from tests.support.fingerprints import assert_fingerprint_depends_on
from tests.support.spair import PAIRS, SOURCE_SIZE, TARGET_SIZE, spair, write_annotation

# SPair-71k.


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return spair(tmp_path)


def test_a_line_of_spair_names_both_images_and_their_points(base):
    pairs = Spair71k(base.parent).val()

    sample = pairs[1]

    assert (pairs.name, pairs.split, len(pairs)) == ("spair71k-3", "test", 3)
    assert sample.image_id == "000002-2008_000003-2008_000002:cat"
    assert sample.image.shape == (*SOURCE_SIZE[::-1], 3)
    pair = sample.pair
    assert pair is not None
    assert pair.image.shape == (*TARGET_SIZE[::-1], 3)
    assert pair.image_ids == ("cat/2008_000003", "cat/2008_000002")
    # The centres of pixels (6, 6) and (30, 20). The target is 5/6 as wide and 15/8 as high.
    assert pair.source.tolist() == [[6.5, 6.5], [30.5, 20.5]]
    assert pair.target.tolist() == [[5.5, 11.5], [25.5, 38.5]]
    # The box is 25 pixels wide and 50 pixels high.
    assert (pair.extent, pair.category) == (50.0, "cat")


def test_pair_subsets_keep_the_name_and_images_need_no_pairs(base):
    pairs, images = Spair71k(base, val_split="test:0-67%").val(), Spair71k(base).images()

    assert (len(pairs), pairs.name, pairs.split) == (2, "spair71k-3", "test:0-67%")
    assert len(limit_dataset(Spair71k(base), 1).val()) == 1
    assert (images.name, images.ids[0]) == ("spair71k-5", "bird/2009_000004")
    assert images[0].image.shape == (*SOURCE_SIZE[::-1], 3)


def test_the_fingerprint_of_spair_depends_on_points_and_images(base):
    cats = base / "JPEGImages/cat"
    other = (cats / "2008_000001.jpg").read_bytes()
    assert_fingerprint_depends_on(
        lambda: Spair71k(base).val(),
        lambda: write_annotation(base, PAIRS[2], trg_kps=[[17, 20]]),
        lambda: (cats / "2008_000002.jpg").write_bytes(other),
    )


def test_missing_files_and_wrong_lines_of_spair_are_named(base):
    image, line = base / "JPEGImages/bird/2009_000005.jpg", PAIRS[1].line
    with pytest.raises(DataError, match=r"no split trn\. .* test"):
        Spair71k(base, val_split="trn").val()
    content = image.read_bytes()
    image.unlink()
    with pytest.raises(DataError, match=r"1 of 5 images .*2009_000005"):
        Spair71k(base).val()
    image.write_bytes(content)
    (base / f"PairAnnotation/test/{PAIRS[0].line}.json").unlink()
    with pytest.raises(DataError, match="1 of 3 pairs"):
        Spair71k(base).val()
    for text, word in (
        (f"{line}\n{line}", "twice"),
        (line[7:], "expected NUMBER"),
        ("", "no pair"),
    ):
        (base / "Layout/large/test.txt").write_text(text)
        with pytest.raises(DataError, match=word):
            Spair71k(base).val()


# PF-WILLOW.

POINTS = np.array([[1.0, 40.0], [10.5, 3.0], [32.0, 16.0]]).T
NAMES = (
    *(f"car(G)/Cars_{number}" for number in ("006a", "007a", "008b")),
    *("duck(S)/Ducks_1", "duck(S)/D2"),
)


def save_points(path: Path, points: np.ndarray) -> None:
    savemat(path.with_suffix(".mat"), {"pts_coord": points})


@pytest.fixture
def willow(tmp_path: Path) -> Path:
    folder = tmp_path / "PF-dataset-WILLOW"
    for number, name in enumerate(NAMES):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, height=40, width=32).save(path)
        # The further an image is in the list, the smaller is the extent of its points.
        save_points(path, np.maximum(POINTS - [[0], [2 * number]], 1))
    return folder


def test_all_ordered_pairs_of_a_subclass_have_points(willow):
    for folder in (willow, willow.parent):
        pairs = PfWillow(folder).val()

        assert isinstance(PfWillow(folder), Dataset)
        assert (pairs.name, pairs.split, len(pairs)) == ("pf_willow-8", "all", 8)
        assert pairs.ids[1] == "000001-Cars_006a-Cars_008b:car(G)"
        assert pairs.ids[-1] == "000007-Ducks_1-D2:duck(S)"
        assert pairs[1].image.shape == (40, 32, 3)
        pair = pairs[1].pair
        assert pair is not None
        assert pair.image_ids == (NAMES[0], NAMES[2])
        # The centre of the first pixel is (1, 1) in the files.
        assert pair.source.tolist() == [[0.5, 39.5], [10.0, 2.5], [31.5, 15.5]]
        assert pair.target.tolist() == [[0.5, 35.5], [10.0, 0.5], [31.5, 11.5]]
        assert (pair.extent, pair.category) == (35.0, "car(G)")


def test_the_fingerprint_of_willow_depends_on_points_and_images(willow):
    second = willow / f"{NAMES[1]}.png"
    assert_fingerprint_depends_on(
        lambda: PfWillow(willow).val(),
        lambda: save_points(second, POINTS),
        lambda: picture(9, height=40, width=32).save(second),
    )


def test_wrong_and_missing_files_of_willow_are_named(willow):
    path = willow / f"{NAMES[0]}.mat"
    wrong_points = (np.ones((3, 2)), np.ones((2, 0)), POINTS + 3, np.full((2, 3), np.nan))
    contents: list[Any] = [b"", b"no MATLAB file", {"other": POINTS}]
    contents += [{"pts_coord": points} for points in (*wrong_points, np.array(["a", "b"]))]
    for content in contents:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            savemat(path, content)
        with pytest.raises(DataError, match=r"Cars_006a\.mat"):
            _ = PfWillow(willow).val()[0]
    save_points(path, POINTS)
    save_points(willow / f"{NAMES[1]}.mat", np.ones((2, 4)))
    with pytest.raises(DataError, match=r"3 points .* 4"):
        _ = PfWillow(willow).val()[0]
    (willow / f"{NAMES[2]}.mat").unlink()
    with pytest.raises(DataError, match="1 of 5 files with points"):
        PfWillow(willow).val()
    picture(0).save(willow / "car(G)/a-b.png")
    with pytest.raises(DataError, match="a-b"):
        PfWillow(willow).val()


def test_pairs_and_images_are_counted_separately(base, willow, monkeypatch):
    for dataset in (Spair71k(base), PfWillow(willow)):
        counts = {"val": len(dataset.val()), "images": len(dataset.images())}
        for changes in ({}, {"val": 999}, {"images": 999}):
            published = {dataset.name: counts | changes}
            monkeypatch.setattr(samples, "PUBLISHED_COUNTS", published)
            for split, images in (("val", dataset.val()), ("images", dataset.images())):
                is_part = f"-{counts[split]}" if split in changes else ""
                assert images.name == dataset.name + is_part


@pytest.mark.data
def test_the_pairs_of_the_complete_willow_are_found(shared_data):
    folder = shared_data / "real/pf-willow"
    pairs = PfWillow(folder).val()

    assert (pairs.name, len(pairs)) == ("pf_willow", 900)
    rows = list(csv.reader((folder / "pairs_all_ordered.csv").read_text().splitlines()))[1:]
    for pair_id, row in zip(pairs.ids, rows, strict=True):
        names, _, category = pair_id.rpartition(":")
        assert row == [f"{category}/{name}.png" for name in names.split("-")[1:]]
    found = [pairs[index].pair for index in range(0, 900, 90)]
    assert {len(pair.source) for pair in found if pair is not None} == {10}
