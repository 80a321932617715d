"""COCO20k: the published image list, boxes without crowds, an index that is built once."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_bench.data import samples
from ssl_bench.data.layouts import coco20k as layout
from ssl_bench.data.layouts.coco20k import LIST, Coco20k, read_boxes
from ssl_bench.data.samples import PUBLISHED_COUNTS, Dataset, Sample
from ssl_bench.errors import DataError
from ssl_bench.network import PublishedFile
from tests.support.faults import coco20k

# Image 7 has two objects and a crowd, image 9 a crowd only, image 12 nothing; 3 is not listed.
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

    # By hand: 1.4 + 3.2 = 4.6, 2.5 + 4 = 6.5, halves to the even number.
    assert isinstance(dataset, Dataset)
    assert (images.name, images.ids) == ("coco20k-3", (stem(7), stem(9), stem(12)))
    assert boxes_of(images[0]).tolist() == [[1, 2, 5, 6], [1, 4, 3, 4]]
    # The others have only a crowd, and nothing.
    assert [boxes_of(images[n]).shape for n in (1, 2)] == [(0, 4), (0, 4)]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"id": 12}, ', ""),
        ('"iscrowd": 0}]}', ""),
        ('"id": 5', '"id": 2'),
        ('"image_id": 9', '"image_id": [9]'),
    ],
    ids=["an image is missing", "cut short", "an id comes twice", "a list of images"],
)
def test_incomplete_annotations_are_refused(root, dataset, old, new):
    path = root / "annotations/instances_train2014.json"
    path.write_text(path.read_text().replace(old, new))

    with pytest.raises(DataError):
        dataset.discovery()


def test_annotations_are_parsed_once_until_they_change(root, tmp_path, monkeypatch):
    path, cache = root / "annotations/instances_train2014.json", tmp_path / "cache"
    first = read_boxes(path, cache)
    with monkeypatch.context() as patched:
        patched.setattr(layout, "parse_boxes", lambda _: pytest.fail("parsed again"))
        again = read_boxes(path, cache)
    assert again.read(stem(7)).tolist() == first.read(stem(7)).tolist()
    assert again.missing([stem(12), stem(13)]) == [stem(13)]

    (index,) = cache.iterdir()
    whole = index.read_bytes()
    for damaged in (b"", whole[:100], b"{}"):
        index.write_bytes(damaged)
        assert len(read_boxes(path, cache).read(stem(7))) == 2
        assert index.read_bytes() == whole
    # A folder that cannot be written.
    assert len(read_boxes(path, index / "below").read(stem(7))) == 2
    path.write_text(path.read_text().replace("1.4", "8.4"))
    assert read_boxes(path, cache).read(stem(7))[0, 0] == 8
    path.unlink()
    with pytest.raises(DataError):
        read_boxes(path, cache)


def test_a_complete_list_must_be_the_published_one(root, dataset, monkeypatch):
    path = root / "coco_20k_filenames_subset.txt"
    monkeypatch.setattr(samples, "PUBLISHED_COUNTS", {"coco20k": {"discovery": 3}})

    with pytest.raises(DataError, match=LIST.digest):
        dataset.discovery()
    own = PublishedFile(LIST.url, hashlib.md5(path.read_bytes()).hexdigest(), "md5")
    monkeypatch.setattr(layout, "LIST", own)
    assert dataset.discovery().name == "coco20k"


def test_the_list_is_named_or_in_the_root_or_beside_it_or_downloaded(
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
    monkeypatch.setattr(layout, "LIST", server.publish(content, "md5"))
    assert dataset.images().ids == dataset.images().ids == (stem(7), stem(9), stem(12))
    assert len(server.ranges) == 1
    assert (dataset.cache / "coco_20k_filenames.txt").read_bytes() == content


@pytest.mark.data
def test_the_published_list_has_the_stated_digest(shared_data):
    path = shared_data / "coco_20k_filenames.txt"

    lines = path.read_text().splitlines()

    assert len(set(lines)) == PUBLISHED_COUNTS["coco20k"]["discovery"]
    assert hashlib.md5(path.read_bytes()).hexdigest() == LIST.digest


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
