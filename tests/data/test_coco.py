"""Test the datasets COCO20k and COCO-Stuff."""

import hashlib
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data import samples
from ssl_bench.data.files.file_sets import validate_boxes
from ssl_bench.data.layouts import coco20k as layout
from ssl_bench.data.layouts.coco20k import (
    IMAGE_LIST,
    Coco20k,
    CocoBoxes,
    parse_boxes,
    read_boxes,
)
from ssl_bench.data.layouts.coco_stuff import COARSE_NAMES, CocoStuff, read_classes
from ssl_bench.data.samples import PUBLISHED_COUNTS, Dataset, Sample
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.network import PublishedFile
from tests.support.faults import coco20k

# COCO20k.

# Image 7 has two objects and a crowd, image 9 has only a crowd, and image 12 has no object. Image 3
# is not in the list.
ANNOTATIONS: list[dict[str, Any]] = [
    {"id": 1, "image_id": 9, "bbox": [0, 0, 9, 9], "iscrowd": 1},
    {"id": 2, "image_id": 7, "bbox": [1.4, 2.5, 3.2, 4.0], "iscrowd": 0},
    {"id": 3, "image_id": 7, "bbox": [0, 0, 5, 5], "iscrowd": 1},
    {"id": 4, "image_id": 3, "bbox": [0, 0, 2, 2], "iscrowd": 0},
    {"id": 5, "image_id": 7, "bbox": [0.6, 3.5, 2.0, 1.0], "iscrowd": 0},
]


def boxes_of(sample: Sample) -> np.ndarray:
    assert sample.boxes is not None
    return sample.boxes


def stem(number: int) -> str:
    return f"COCO_train2014_{number:012d}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    images = [{"id": number} for number in (12, 7, 9, 3)]
    coco20k(tmp_path / "COCO", (12, 7, 9), {"images": images, "annotations": ANNOTATIONS})
    return tmp_path / "COCO"


@pytest.fixture
def dataset(root: Path, tmp_path: Path) -> Coco20k:
    return Coco20k(root, cache=tmp_path / "cache")


def test_boxes_are_rounded_corners_without_crowds(root, dataset, capsys):
    # Boxes need no category, and pycocotools prints nothing.
    path = root / "annotations/instances_train2014.json"
    path.write_text(path.read_text().replace('{"images"', '{"categories": [{"id": 1}], "images"'))

    images = dataset.discovery()

    # By hand: 1.4 + 3.2 = 4.6 and 2.5 + 4 = 6.5. Halves are rounded to the even number.
    assert isinstance(dataset, Dataset)
    assert (images.name, images.ids) == ("coco20k-3", (stem(7), stem(9), stem(12)))
    assert boxes_of(images[0]).tolist() == [[1, 2, 5, 6], [1, 4, 3, 4]]
    assert [boxes_of(images[n]).shape for n in (1, 2)] == [(0, 4), (0, 4)]
    assert capsys.readouterr().out == ""


def test_only_boxes_of_listed_images_are_in_the_fingerprint(root, dataset):
    path = root / "annotations/instances_train2014.json"
    whole, before = path.read_text(), dataset.discovery().fingerprint()
    for old, new, is_listed in (("[0, 0, 2, 2]", "[0, 0, 2, 3]", False), ("4.0]", "6.0]", True)):
        path.write_text(whole.replace(old, new))
        assert (dataset.discovery().fingerprint() != before) == is_listed
    assert dataset.images().fingerprint() != before


def test_the_parent_folder_or_a_partial_list_is_accepted(root, tmp_path):
    half = Coco20k(tmp_path, discovery_split="train2014:0-34%", cache=tmp_path / "cache")

    assert half.discovery().ids == half.images().ids == (stem(7),)
    assert boxes_of(half.discovery()[0]).tolist() == [[1, 2, 5, 6], [1, 4, 3, 4]]
    with pytest.raises(ConfigurationError):
        Coco20k(tmp_path, discovery_split="train2014:half")


def test_incomplete_annotations_are_refused(root, dataset):
    path = root / "annotations/instances_train2014.json"
    whole = path.read_text()
    # A missing image, a cut file, a repeated id, a list of image ids, and invalid coordinates.
    for old, new in (
        *(("[1.4, ", f"[{number}, ") for number in ("NaN", "1e999", "2147483648", "true", '"1"')),
        *(('{"id": 12}, ', ""), ('"iscrowd": 0}]}', "")),
        *(('"id": 5', '"id": 2'), ('"image_id": 9', '"image_id": [9]')),
    ):
        path.write_text(whole.replace(old, new))
        with pytest.raises(DataError):
            dataset.discovery()


def test_annotations_are_parsed_once_until_they_change(root, tmp_path, monkeypatch):
    path, cache = root / "annotations/instances_train2014.json", tmp_path / "cache"
    first = read_boxes(path, cache)
    with monkeypatch.context() as patched:
        patched.setattr(layout, "parse_boxes", lambda _: pytest.fail("parsed again"))
        again = read_boxes(path, cache)
    assert again.read(stem(7)).tolist() == first.read(stem(7)).tolist()
    assert again.list_missing([stem(12), stem(13)]) == [stem(13)]

    (index,) = cache.iterdir()
    whole = index.read_bytes()
    for damaged in (b"", whole[:100], b"{}"):
        index.write_bytes(damaged)
        assert len(read_boxes(path, cache).read(stem(7))) == 2
        assert index.read_bytes() == whole
    # The cache folder cannot be written.
    assert len(read_boxes(path, index / "below").read(stem(7))) == 2
    path.write_text(path.read_text().replace("1.4", "8.4"))
    assert read_boxes(path, cache).read(stem(7))[0, 0] == 8
    path.unlink()
    with pytest.raises(DataError):
        read_boxes(path, cache)


def test_annotations_that_change_while_they_are_parsed_are_refused(root, tmp_path, monkeypatch):
    def parse(path: Path) -> CocoBoxes:
        boxes = parse_boxes(path)
        path.write_text(path.read_text() + " ")
        return boxes

    monkeypatch.setattr(layout, "parse_boxes", parse)
    with pytest.raises(DataError):
        read_boxes(root / "annotations/instances_train2014.json", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_complete_list_must_be_the_published_one(root, dataset, monkeypatch):
    path = root / "coco_20k_filenames_subset.txt"
    monkeypatch.setattr(samples, "PUBLISHED_COUNTS", {"coco20k": {"discovery": 3}})

    with pytest.raises(DataError, match=IMAGE_LIST.digest):
        dataset.discovery()
    own = PublishedFile(IMAGE_LIST.url, hashlib.md5(path.read_bytes()).hexdigest(), "md5")
    monkeypatch.setattr(layout, "IMAGE_LIST", own)
    assert dataset.discovery().name == "coco20k"


def test_lists_are_given_found_near_the_root_or_downloaded(
    root, dataset, tmp_path, server, monkeypatch
):
    subset, beside = (
        root / "coco_20k_filenames_subset.txt",
        root.parent / "coco_20k_filenames.txt",
    )
    beside.write_text(f"train2014/{stem(9)}.jpg")
    assert dataset.images().ids == (stem(9),), "before the subset"
    elsewhere = tmp_path / "mine.txt"
    elsewhere.write_text(stem(12))
    assert Coco20k(root, list_file=elsewhere).images().ids == (stem(12),)
    with pytest.raises(DataError, match=r"other\.txt"):
        Coco20k(root, list_file=tmp_path / "other.txt").images()

    content = subset.read_bytes()
    subset.unlink()
    beside.unlink()
    monkeypatch.setattr(layout, "IMAGE_LIST", server.publish(content, "md5"))
    assert dataset.images().ids == dataset.images().ids == (stem(7), stem(9), stem(12))
    assert len(server.ranges) == 1
    assert (dataset.cache / "coco_20k_filenames.txt").read_bytes() == content


@pytest.mark.data
def test_the_published_list_has_the_stated_digest(shared_data):
    path = shared_data / "coco_20k_filenames.txt"

    lines = path.read_text().splitlines()

    assert len(set(lines)) == PUBLISHED_COUNTS["coco20k"]["discovery"]
    assert hashlib.md5(path.read_bytes()).hexdigest() == IMAGE_LIST.digest


@pytest.mark.data
def test_real_boxes_lie_within_their_photographs(photos, tmp_path):
    images = Coco20k(photos / "COCO", cache=tmp_path).discovery()

    assert (images.name, len(images)) == ("coco20k-7", 7)
    assert sum(len(boxes_of(sample)) for sample in images) == 93
    for sample in images:
        boxes, (height, width) = boxes_of(sample), sample.image.shape[:2]
        assert (boxes[:, 2:] <= (width, height)).all()
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        assert np.array_equal(boxes, np.rint(boxes))


@pytest.mark.parametrize(
    ("box", "is_valid", "is_valid_if_flat"),
    [
        # In an image of 32 rows and 40 columns.
        ([0, 0, 40, 32], True, True),
        ([-40, -32, 1, 1], True, True),
        ([39, 31, 80, 64], True, True),
        ([-41, 0, 1, 1], False, False),
        ([0, -33, 1, 1], False, False),
        ([0, 0, 81, 32], False, False),
        ([0, 0, 40, 65], False, False),
        ([33, 0, 39, 8], True, True),
        ([0, 33, 8, 39], False, False),
        # The boxes touch the image.
        ([40, 0, 48, 8], False, True),
        ([-8, 0, 0, 8], False, True),
        ([8, 8, 8, 16], False, True),
        ([8, 16, 24, 8], False, False),
    ],
)
def test_boxes_must_overlap_their_image(box, is_valid, is_valid_if_flat):
    for allow_flat, expected in ((False, is_valid), (True, is_valid_if_flat)):
        context = nullcontext() if expected else pytest.raises(DataError, match="file, object 7")
        with context:
            found = validate_boxes([box], "file", [7], (32, 40), allow_flat=allow_flat)
            assert found.tolist() == [box]


def test_a_stated_size_must_be_that_of_the_image():
    for stated in (None, (32.0, 40.0)):
        assert validate_boxes([], "file", [], (32, 40), stated_size=stated).shape == (0, 4)
    assert validate_boxes([], "file", [], stated_size=(1.0, 2.0)).shape == (0, 4)
    with pytest.raises(DataError, match="32 x 40 pixels, but the image has 40 x 32"):
        validate_boxes([], "file", [], (32, 40), stated_size=(40.0, 32.0))


# COCO-Stuff: 171 contiguous classes from 182 ids, or 27 groups.

NEVER = {11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90}


def write_stuff(root: Path, name: str, mask: list[list[int]], maps: str = "stuffthingmaps") -> None:
    image_path = root / f"images/train2017/{name[:12]}.jpg"
    mask_path = root / maps / f"train2017/{name}.png"
    for path in (image_path, mask_path):
        path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.array(mask, np.uint8)
    Image.new("RGB", pixels.shape[::-1]).save(image_path)
    Image.fromarray(pixels).save(mask_path)


@pytest.fixture
def stuff(tmp_path: Path) -> Path:
    # These class ids are next to gaps in the published ids.
    for number in range(1, 5):
        write_stuff(tmp_path, f"{number:012d}", [[0, 10, 12], [255, 91, 181]])
    return tmp_path


def mask_of(sample: Sample) -> np.ndarray:
    assert sample.mask is not None
    return sample.mask


def stuff_halves(root: Path, classes: Literal[171, 27] = 171) -> CocoStuff:
    return CocoStuff(root, "train2017:0-50%", "train2017:50-100%", classes)


def test_ids_are_made_contiguous_over_the_gaps(stuff):
    # Remapped masks next to the published masks change nothing.
    write_stuff(stuff, "000000000001_labelTrainIds", [[5] * 3] * 2)

    images = stuff_halves(stuff).train()

    # By hand: one gap (11) precedes 12, and all eleven gaps precede 91 and 181.
    assert (images.name, images.ids) == ("coco_stuff-4", ("000000000001", "000000000002"))
    assert mask_of(images[0]).tolist() == [[0, 10, 11], [255, 80, 170]]


def test_the_class_table_lists_occurring_classes_with_coco_groups():
    classes = read_classes()
    groups = Counter(group for _, group in classes.values())

    assert set(range(182)) - set(classes) == NEVER
    assert list(classes) == sorted(classes)
    assert len({name for name, _ in classes.values()}) == 171
    assert set(groups) == set(COARSE_NAMES)
    assert sum(groups[name] for name in COARSE_NAMES[:12]) == 80, "things"
    assert (classes[0], classes[181]) == (("person", "person"), ("wood", "solid"))
    assert classes[169] == ("vegetable", "food-stuff")


def test_class_names_match_the_class_numbers(stuff):
    fine, coarse = stuff_halves(stuff).train(), stuff_halves(stuff, 27).train()

    assert len(fine.class_names) == 171
    assert [fine.class_names[number] for number in (11, 80, 170)] == ["stop sign", "banner", "wood"]
    assert coarse.class_names == COARSE_NAMES
    assert fine.fingerprint() != coarse.fingerprint()
    expected = [["person", "outdoor", "outdoor"], [None, "textile", "solid"]]
    groups = [[COARSE_NAMES[n] if n != 255 else None for n in row] for row in mask_of(coarse[0])]
    assert groups == expected


def test_an_id_that_never_occurs_is_refused(stuff):
    write_stuff(stuff, "000000000001", [[11]])

    with pytest.raises(DataError, match=r"1\.png stores the number 11, expected 0-10, 12-24, "):
        stuff_halves(stuff).train()[0]


@pytest.mark.parametrize(
    ("classes", "expected"), [(171, [[0, 11, 170, 255]]), (27, [[9, 8, 24, 255]])]
)
def test_remapped_files_are_not_remapped_again(tmp_path, classes, expected):
    for number in (1, 2):
        name = f"{number:012d}_labelTrainIds"
        write_stuff(tmp_path, name, [[0, 11, 170, 255]], "annotations")

    images = stuff_halves(tmp_path, classes).train()

    assert images.ids == ("000000000001",)
    assert mask_of(images[0]).tolist() == expected


def test_without_val2017_the_hint_divides_the_training_split(stuff):
    # Masks in annotations/ and images next to this folder are found, too.
    (stuff / "annotations").mkdir()
    (stuff / "stuffthingmaps").rename(stuff / "annotations/stuffthingmaps")
    (stuff / "images/train2017").rename(stuff / "train2017")
    with pytest.raises(DataError) as caught:
        CocoStuff(stuff).val()

    first, second = (word.partition("=")[2] for word in caught.value.hint)
    assert (first, second) == ("train2017:0-75%", "train2017:75-100%")
    dataset = CocoStuff(stuff, first, second)
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
