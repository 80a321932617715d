"""Test that ADE20K masks are read with class numbers from 0 to 149."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data import samples
from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "ADEChallengeData2016"
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for name in ("a", "b"):
            Image.new("RGB", (3, 2)).save(root / f"images/{split}/{name}.jpg")
            mask = np.array([[0, 1, 2], [0, 150, 149]], np.uint8)
            Image.fromarray(mask).save(root / f"annotations/{split}/{name}.png")
    return root


def test_numbers_are_shifted_once_and_zero_is_ignored(root):
    sample = Ade20k(root).val()[0]

    assert sample.mask is not None
    assert sample.mask.dtype == np.uint8
    assert sample.mask.tolist() == [[255, 0, 1], [255, 149, 148]]


@pytest.mark.parametrize(("value", "kind"), [(255, np.uint8), (257, np.uint16)])
def test_masks_that_were_already_shifted_are_refused(root, value, kind):
    shifted = np.array([[value, 0, 1], [150, 149, 148]], kind)
    Image.fromarray(shifted).save(root / "annotations/training/a.png")

    with pytest.raises(DataError, match=rf"a\.png stores the number {value}, expected 0-150\."):
        Ade20k(root).train()[0]


def test_class_names_come_from_the_table_of_the_download(root, capsys):
    assert Ade20k(root).val().class_names[::149] == ("class_0", "class_149")

    rows = [f"{n}\t0.1\t9\t9\tthing {n}, other word" for n in range(1, 151)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    assert Ade20k(root).val().class_names[::149] == ("thing 1", "thing 150")
    for folder in (root, root.parent):
        assert main(["data", "check", "ade20k", "--data-root", str(folder), "--subset"]) == 0
        assert "classes    150: thing 1, thing 2, " in capsys.readouterr().out


def test_the_name_counts_all_images_of_both_splits(root, monkeypatch):
    dataset = Ade20k(str(root.parent), "training:0-50%", "training:50-100%")

    assert (dataset.train().ids, dataset.val().ids) == (("a",), ("b",))
    assert dataset.images()[0].mask is None
    # Both splits have the same two ids.
    assert dataset.train().name == dataset.images().name == "ade20k-2"
    for train, val, name in ((2, 2, "ade20k"), (1, 2, "ade20k-2"), (2, 1, "ade20k-2")):
        counts = {"ade20k": {"train": train, "val": val}}
        monkeypatch.setattr(samples, "PUBLISHED_COUNTS", counts)
        assert Ade20k(root).val().name == name
    with pytest.raises(DataError, match="training, validation"):
        Ade20k(root, val_split="test").val()


@pytest.mark.data
def test_the_real_photographs_hold_known_classes(photos):
    dataset = Ade20k(photos)
    train, val = dataset.train(), dataset.val()

    assert (len(train), len(val)) == (21, 13)
    assert train.class_names[:3] == ("wall", "building", "sky")
    assert len(set(train.class_names)) == 150
    masks = photos / "ADEChallengeData2016/annotations/validation"
    for sample in val:
        assert sample.mask is not None
        stored = np.asarray(Image.open(masks / f"{sample.image_id}.png"))
        known = stored > 0
        assert np.array_equal(sample.mask[known] + 1, stored[known])
        assert (sample.mask[~known] == 255).all()
