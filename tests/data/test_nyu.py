"""NYU Depth v2 in the layout of BTS: the crop, the 40 classes, lists and invalid files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.nyu import CLASS_NAMES, Nyu
from ssl_bench.errors import DataError

IDS = {"train": ("hall/00002", "hall/00010"), "test": ("kitchen/00000",)}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Create three scenes of 640 x 480 pixels, whose depth is 1 mm, 2 mm, ... in each row."""
    folder = tmp_path_factory.mktemp("data") / "nyu_depth_v2"
    depth = np.arange(1, 1 + 480 * 640).reshape(480, 640) % 10_000
    classes = np.arange(480 * 640).reshape(480, 640) % 41
    for split, ids in IDS.items():
        for image_id in ids:
            scene, _, number = image_id.partition("/")
            place = folder / "official_splits" / split / scene
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (640, 480), (int(number), 5, 5)).save(place / f"rgb_{number}.jpg")
            Image.fromarray(depth.astype(np.uint16)).save(place / f"sync_depth_{number}.png")
            Image.fromarray(classes.astype(np.uint8)).save(place / f"label40_{number}.png")
    (folder / "train_list.txt").write_text(
        "/hall/rgb_00010.jpg /hall/sync_depth_00010.png 518.8579\n"
    )
    (folder / "test_list.txt").write_text("kitchen/rgb_00000.jpg None 518.8579\n")
    return folder


def test_depth_outside_of_the_eigen_crop_is_unknown(root):
    cropped, whole = Nyu(root).val()[0].depth, Nyu(root, eigen_crop=False).val()[0].depth

    assert cropped is not None
    assert whole is not None
    inside = np.zeros((480, 640), bool)
    inside[45:471, 41:601] = True
    assert np.array_equal(cropped[inside], whole[inside])
    assert not cropped[~inside].any()
    assert whole[0, :3].tolist() == pytest.approx([0.001, 0.002, 0.003])
    assert whole.max() == pytest.approx(9.999)


def test_splits_have_the_ids_and_the_name_of_a_part(root):
    dataset = Nyu(root.parent)

    assert (dataset.train().ids, dataset.val().ids) == (IDS["train"], IDS["test"])
    assert {images.name for images in (dataset.train(), dataset.val(), dataset.images())} == {
        "nyu-3"
    }
    assert dataset.images()[0].depth is None
    assert (dataset.supports, dataset.class_names) == ({"depth", "images"}, ())
    assert Nyu(root).val().fingerprint() != Nyu(root, eigen_crop=False).val().fingerprint()


def test_a_list_selects_images(root):
    listed = Nyu(root, lists="{split}_list.txt")

    assert (listed.train().ids, listed.val().ids) == (("hall/00010",), IDS["test"])
    assert listed.train().name == "nyu-2"


@pytest.mark.parametrize(("reduce_zero", "first"), [(True, 1), (False, 0)])
def test_the_40_classes_begin_at_1_or_at_0(root, reduce_zero, first, tmp_path):
    dataset = Nyu(root, annotation="classes", reduce_zero=reduce_zero)
    assert (dataset.name, dataset.supports) == ("nyu40", {"segmentation", "images"})
    assert len(dataset.class_names) == len(set(CLASS_NAMES)) == 40
    if not reduce_zero:
        with pytest.raises(DataError, match="reduce_zero=true"):
            _ = dataset.val()[0]
        return
    mask = dataset.val()[0].mask
    assert mask is not None
    assert mask[0, :42].tolist() == [255, *range(40), 255]


def test_wrong_files_and_lines_are_named(root, tmp_path):
    place = tmp_path / "official_splits/test/kitchen"
    place.mkdir(parents=True)
    small = np.ones((8, 8), np.uint16)
    Image.fromarray(small.astype(np.uint8)).save(place / "rgb_00000.jpg")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (lambda: None, {}, "kitchen/sync_depth_00000.png"),
        (lambda: Image.fromarray(small).save(place / "sync_depth_00000.png"), {}, "640 x 480"),
        (lambda: None, {"lists": "{split}.txt"}, "test"),
        (
            lambda: (tmp_path / "test.txt").write_text("rgb_00000.jpg"),
            {"lists": "{split}.txt"},
            "SCENE/rgb",
        ),
        (lambda: None, {"val_split": "val"}, "Existing splits: test"),
    ]
    for prepare, options, word in cases:
        prepare()
        with pytest.raises(DataError, match=word) as caught:
            _ = Nyu(tmp_path, **options).val()[0]
    assert Nyu(tmp_path, eigen_crop=False).val()[0].depth is not None
    with pytest.raises(DataError) as caught:
        _ = Nyu(tmp_path).val()[0]
    assert caught.value.hint == ("dataset.eigen_crop=false",)


def test_check_counts_a_part_of_the_dataset(root, capsys):
    words = ["data", "check", "nyu", "--data-root", str(root)]

    assert main([*words, "--subset"]) == 0
    assert main(words) == 3
    assert "795" in capsys.readouterr().err


@pytest.mark.data
def test_real_frames_are_read_in_metres(shared_data):
    """The depth of these frames was stored in 8 bits, so it has steps of 39 mm."""
    place = shared_data / "real/nyu_v2"
    if not place.is_dir():
        pytest.skip(f"no {place}")
    listed = Nyu(place, lists="{split}_list.txt")

    train, val = listed.train(), listed.val()

    assert (train.name, len(train), len(val)) == ("nyu-208", 90, 118)
    assert (train.ids, val.ids) == (Nyu(place).train().ids, Nyu(place).val().ids)
    depth = val[0].depth
    assert depth is not None
    assert (depth > 0).sum() == 426 * 560
    steps = np.diff(np.unique(depth[depth > 0]))
    assert steps.min() == pytest.approx(0.039, abs=1e-5)
    assert 0.3 < depth[depth > 0].min() < depth.max() < 10
