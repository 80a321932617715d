"""COCO-Stuff: 171 contiguous classes from 182 ids, or 27 groups."""

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.layouts.coco_stuff import COARSE_NAMES, CocoStuff, read_classes
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError

NEVER = {11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90}


def write(root: Path, split: str, name: str, mask: list[list[int]], maps: str) -> None:
    for folder in (root / "images" / split, root / maps / split):
        folder.mkdir(parents=True, exist_ok=True)
    pixels = np.array(mask, np.uint8)
    Image.new("RGB", pixels.shape[::-1]).save(root / f"images/{split}/{name[:12]}.jpg")
    Image.fromarray(pixels).save(root / maps / split / f"{name}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create images 1 to 4 in train2017 with ids before, between and after the gaps."""
    for number in range(1, 5):
        mask = [[0, 10, 12], [255, 91, 181]]
        write(tmp_path, "train2017", f"{number:012d}", mask, "stuffthingmaps")
    return tmp_path


def mask_of(sample: Sample) -> np.ndarray:
    assert sample.mask is not None
    return sample.mask


def train(root: Path, classes: Literal[171, 27] = 171) -> CocoStuff:
    return CocoStuff(root, "train2017:0-50%", "train2017:50-100%", classes)


def test_ids_are_made_contiguous_over_the_gaps(root):
    # Remapped masks next to the published masks change nothing.
    write(root, "train2017", "000000000001_labelTrainIds", [[5] * 3] * 2, "stuffthingmaps")

    images = train(root).train()

    # By hand: 12 has one gap (11) before it, 91 and 181 have all eleven.
    assert (images.name, images.ids) == ("coco_stuff-4", ("000000000001", "000000000002"))
    assert mask_of(images[0]).tolist() == [[0, 10, 11], [255, 80, 170]]


def test_the_class_table_lists_what_occurs_with_the_groups_of_coco():
    classes = read_classes()
    groups = Counter(group for _, group in classes.values())

    assert set(range(182)) - set(classes) == NEVER
    assert list(classes) == sorted(classes)
    assert len({name for name, _ in classes.values()}) == 171
    assert set(groups) == set(COARSE_NAMES)
    assert sum(groups[name] for name in COARSE_NAMES[:12]) == 80, "things"
    assert (classes[0], classes[181]) == (("person", "person"), ("wood", "solid"))
    assert classes[169] == ("vegetable", "food-stuff")


def test_names_follow_the_classes(root):
    fine, coarse = train(root).train(), train(root, 27).train()

    assert len(fine.class_names) == 171
    assert [fine.class_names[number] for number in (11, 80, 170)] == ["stop sign", "banner", "wood"]
    assert coarse.class_names == COARSE_NAMES
    assert fine.fingerprint() != coarse.fingerprint()
    expected = [["person", "outdoor", "outdoor"], [None, "textile", "solid"]]
    groups = [[COARSE_NAMES[n] if n != 255 else None for n in row] for row in mask_of(coarse[0])]
    assert groups == expected


def test_an_id_that_never_occurs_is_refused(root):
    write(root, "train2017", "000000000001", [[11]], "stuffthingmaps")

    with pytest.raises(DataError, match=r"1\.png holds label 11, expected 0-10, 12-24, "):
        train(root).train()[0]


@pytest.mark.parametrize(
    ("classes", "expected"), [(171, [[0, 11, 170, 255]]), (27, [[9, 8, 24, 255]])]
)
def test_remapped_files_are_not_remapped_again(tmp_path, classes, expected):
    for number in (1, 2):
        name = f"{number:012d}_labelTrainIds"
        write(tmp_path, "train2017", name, [[0, 11, 170, 255]], "annotations")

    images = train(tmp_path, classes).train()

    assert images.ids == ("000000000001",)
    assert mask_of(images[0]).tolist() == expected


def test_without_val2017_the_hint_divides_the_training_split(root):
    # Masks in annotations/ and images next to it are found too.
    (root / "annotations").mkdir()
    (root / "stuffthingmaps").rename(root / "annotations/stuffthingmaps")
    (root / "images/train2017").rename(root / "train2017")
    with pytest.raises(DataError) as caught:
        CocoStuff(root).val()

    first, second = (word.partition("=")[2] for word in caught.value.hint)
    assert (first, second) == ("train2017:0-75%", "train2017:75-100%")
    dataset = CocoStuff(root, first, second)
    assert (len(dataset.train()), len(dataset.val())) == (3, 1)


@pytest.mark.data
def test_the_real_photographs_keep_every_pixel(photos):
    dataset = CocoStuff(photos / "COCO", "train2017:0-75%", "train2017:75-100%")
    train_set, val_set = dataset.train(), dataset.val()

    assert (len(train_set), len(val_set)) == (49, 17)
    raw = np.array([*read_classes(), *[255] * 85])
    maps = photos / "COCO/annotations/stuffthingmaps/train2017"
    for sample in (val_set[index] for index in range(5)):
        stored = np.asarray(Image.open(maps / f"{sample.image_id}.png"))
        assert np.array_equal(raw[mask_of(sample)], stored)
