"""Test that depth datasets return depth maps in metres."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.depth_folders import DepthFolders
from ssl_bench.data.layouts.nyu import CLASS_NAMES, Nyu
from ssl_bench.data.layouts.toy_depth import RoomPainter, ToyDepth
from ssl_bench.data.samples import Dataset
from ssl_bench.data.splits import limit_dataset
from ssl_bench.errors import ConfigurationError, DataError
from tests.support.fingerprints import assert_fingerprint_depends_on

NUMBERS = [[0, 1, 1234], [65535, 2500, 9]]
IDS = {"train": ("hall/00002", "hall/00010"), "test": ("kitchen/00000",)}


def save(path: Path, pixels: Any, dtype: type = np.uint16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, dtype)).save(path)


def depth_of(dataset: Any) -> np.ndarray:
    depth = dataset.val()[0].depth
    assert depth is not None
    return depth


# Folders of images and depth maps.


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("train/x/a", "train/x/b", "val/y/c"):
        save(tmp_path / f"images/{name}.jpg", [[(9, 8, 7)] * 3] * 2, np.uint8)
        save(tmp_path / f"depth/{name}.png", NUMBERS)
    return tmp_path


def test_numbers_are_millimetres_and_0_is_unknown(folders):
    dataset = DepthFolders(folders)

    assert depth_of(dataset).dtype == np.float32
    assert np.array_equal(depth_of(dataset), np.array(NUMBERS, np.float32) / np.float32(1000))
    assert (dataset.train().ids, dataset.val().ids) == (("x/a", "x/b"), ("y/c",))
    assert dataset.images()[1].depth is None
    assert isinstance(dataset, Dataset)
    assert dataset.supports == {"depth", "images"}
    other = depth_of(DepthFolders(folders, metres_per_unit=0.01, max_metres=25.0))
    assert other.ravel().tolist() == pytest.approx([0, 0.01, 12.34, 0, 25, 0.09])


def test_8_bit_depth_maps_and_shares_of_splits_are_read(folders):
    save(folders / "depth/train/x/b.png", [[0, 1, 2], [3, 4, 255]], np.uint8)
    halves = {"train_split": "train:0-50%", "val_split": "train:50-100%"}
    dataset = DepthFolders(folders, **halves, metres_per_unit=0.5)

    assert depth_of(dataset).ravel().tolist() == [0, 0.5, 1, 1.5, 2, 127.5]
    assert len(limit_dataset(dataset, 1).train()) == 1
    assert dataset.images().ids == ("x/a",)


def test_the_fingerprint_depends_on_depth_unit_and_limit(folders):
    options: dict[str, float] = {}
    changed = np.array(NUMBERS) + (np.array(NUMBERS) == 9)
    assert_fingerprint_depends_on(
        lambda: DepthFolders(folders, **options).val(),
        lambda: options.update(metres_per_unit=0.002),
        lambda: options.update(max_metres=5.0),
        lambda: save(folders / "depth/val/y/c.png", changed),
    )


def test_wrong_files_of_folders_are_named(folders):
    path = folders / "depth/val/y/c.png"
    for spoil, word in (
        (lambda: save(path, [[(1, 2, 3)] * 3] * 2, np.uint8), "one depth"),
        (lambda: save(path, [[1, 2]]), "2 x 1 pixels"),
        (lambda: path.write_bytes(b"x"), "c.png"),
        (path.unlink, "1 of 1 depth maps"),
    ):
        spoil()
        with pytest.raises(DataError, match=word):
            _ = DepthFolders(folders).val()[0]
    (folders / "images/train/x/b.jpg").unlink()
    with pytest.raises(DataError, match="1 of 2 images"):
        DepthFolders(folders).train()
    with pytest.raises(DataError, match="depths"):
        DepthFolders(folders, depth_folder="depths/{split}").train()
    for options in ({"name": "nyu"}, {"val_split": "train:50-100%"}, {"metres_per_unit": 0.0}):
        with pytest.raises(ConfigurationError):
            DepthFolders("/nowhere", **options)


# NYU Depth v2.


@pytest.fixture(scope="module")
def nyu(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "nyu_depth_v2"
    numbers = np.arange(480 * 640).reshape(480, 640)
    for split, ids in IDS.items():
        for image_id in ids:
            scene, _, number = image_id.partition("/")
            place = folder / "official_splits" / split / scene
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (640, 480), (int(number), 5, 5)).save(place / f"rgb_{number}.jpg")
            save(place / f"sync_depth_{number}.png", (numbers + 1) % 10_000)
            save(place / f"label40_{number}.png", numbers % 41, np.uint8)
    line = "/hall/rgb_00010.jpg /hall/sync_depth_00010.png 518.8579\n"
    (folder / "train_list.txt").write_text(line)
    (folder / "test_list.txt").write_text("kitchen/rgb_00000.jpg None 518.8579\n")
    return folder


def test_depth_outside_of_the_eigen_crop_is_unknown(nyu):
    cropped, whole = depth_of(Nyu(nyu)), depth_of(Nyu(nyu, eigen_crop=False))

    inside = np.zeros((480, 640), bool)
    inside[45:471, 41:601] = True
    assert np.array_equal(cropped[inside], whole[inside])
    assert not cropped[~inside].any()
    assert whole[0, :3].tolist() == pytest.approx([0.001, 0.002, 0.003])
    assert whole.max() == pytest.approx(9.999)
    assert Nyu(nyu).val().fingerprint() != Nyu(nyu, eigen_crop=False).val().fingerprint()


def test_nyu_splits_have_ids_and_lists_select_images(nyu, capsys):
    dataset, listed = Nyu(nyu.parent), Nyu(nyu, lists="{split}_list.txt")

    assert (dataset.train().ids, dataset.val().ids) == (IDS["train"], IDS["test"])
    names = {images.name for images in (dataset.train(), dataset.val(), dataset.images())}
    assert names == {"nyu-3"}
    assert dataset.images()[0].depth is None
    assert (dataset.supports, dataset.class_names) == ({"depth", "images"}, ())
    assert (listed.train().ids, listed.val().ids) == (("hall/00010",), IDS["test"])
    assert listed.train().name == "nyu-2"
    words = ["data", "check", "nyu", "--data-root", str(nyu)]
    assert main([*words, "--subset"]) == 0
    assert main(words) == 3
    assert "795" in capsys.readouterr().err


def test_the_40_classes_begin_at_1_or_at_0(nyu):
    dataset = Nyu(nyu, annotation="classes", reduce_zero=True)

    assert (dataset.name, dataset.supports) == ("nyu40", {"segmentation", "images"})
    assert len(dataset.class_names) == len(set(CLASS_NAMES)) == 40
    mask = dataset.val()[0].mask
    assert mask is not None
    assert mask[0, :42].tolist() == [255, *range(40), 255]
    from_zero = Nyu(nyu, annotation="classes", reduce_zero=False)
    assert len(from_zero.class_names) == 40
    with pytest.raises(DataError, match="reduce_zero=true"):
        _ = from_zero.val()[0]


def test_wrong_files_and_lines_of_nyu_are_named(tmp_path):
    place, small = tmp_path / "official_splits/test/kitchen", np.ones((8, 8), np.uint16)
    save(place / "rgb_00000.jpg", small, np.uint8)
    listed = {"lists": "{split}.txt"}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (lambda: None, {}, "kitchen/sync_depth_00000.png"),
        (lambda: save(place / "sync_depth_00000.png", small), {}, "640 x 480"),
        (lambda: None, listed, "test"),
        (lambda: (tmp_path / "test.txt").write_text("rgb_00000.jpg"), listed, "SCENE/rgb"),
        (
            lambda: (tmp_path / "test.txt").write_text("kitchen/rgb_00001.jpg"),
            listed,
            "kitchen/rgb_00001.jpg",
        ),
        (lambda: None, {"val_split": "val"}, "Existing splits: test"),
    ]
    for prepare, options, word in cases:
        prepare()
        with pytest.raises(DataError, match=word):
            _ = Nyu(tmp_path, **options).val()[0]
    assert depth_of(Nyu(tmp_path, eigen_crop=False)).any()
    with pytest.raises(DataError) as caught:
        _ = Nyu(tmp_path).val()[0]
    assert caught.value.hint == ("dataset.eigen_crop=false",)


@pytest.mark.data
def test_real_frames_are_read_in_metres(shared_data):
    place = shared_data / "real/nyu_v2"
    if not place.is_dir():
        pytest.skip(f"no {place}")
    listed = Nyu(place, lists="{split}_list.txt")

    train, val = listed.train(), listed.val()

    assert (train.name, len(train), len(val)) == ("nyu-208", 90, 118)
    assert (train.ids, val.ids) == (Nyu(place).train().ids, Nyu(place).val().ids)
    depth = depth_of(listed)
    assert (depth > 0).sum() == 426 * 560
    # The depth of these frames was once stored in 8 bits.
    steps = np.diff(np.unique(depth[depth > 0]))
    assert steps.min() == pytest.approx(0.039, abs=1e-5)
    assert 0.3 < depth[depth > 0].min() < depth.max() < 10


# Generated rooms, whose depth is computed from the geometry of the camera.


@pytest.fixture(scope="module")
def rooms(tmp_path_factory) -> ToyDepth:
    return ToyDepth(num_train=4, num_val=2, cache=tmp_path_factory.mktemp("cache"))


def test_rooms_come_back_from_disk_with_their_depth(rooms):
    for split, images in (("train", rooms.train()), ("val", rooms.val())):
        painter = RoomPainter(split, seed=0)
        for index in range(2):
            image, millimetres = painter.paint_room(index)
            assert np.array_equal(images[index].depth, np.float32(millimetres / 1000))
            assert np.abs(images[index].image - image.astype(float)).mean() < 12
    assert [len(images) for images in (rooms.train(), rooms.val(), rooms.images())] == [4, 2, 4]
    assert rooms.val().name == "toy_depth"
    assert len(list(rooms.cache.iterdir())) == 1


def test_the_floor_is_a_plane_and_objects_face_the_camera(rooms):
    for sample in rooms.train():
        depth = sample.depth
        assert depth is not None
        assert 0.8 < depth.min() < depth.max() <= 9
        wall, below = depth[0, 0], [row for row in depth if row.max() < depth[0, 0]]
        assert (depth <= wall).all()
        # The floor is the farthest surface of each row, and its inverse depth is linear in the row.
        inverse = 1 / np.array([row.max() for row in below[-12:]])
        assert np.abs(np.diff(inverse, 2)).max() < 1e-3
        values, counts = np.unique(depth, return_counts=True)
        nearer = values[(counts > 100) & (values < wall)]
        assert len(nearer) >= 1


def test_a_room_depends_on_split_seed_and_number_alone():
    painter = RoomPainter("train", 0)
    room = painter.paint_room(1)

    for other in (RoomPainter("train", 4).paint_room(1), RoomPainter("val", 0).paint_room(1),
                  painter.paint_room(0)):  # fmt: skip
        assert other[0].shape != room[0].shape or not np.array_equal(other[1], room[1])
    for one, again in zip(painter.paint_room(1), room, strict=True):
        assert np.array_equal(one, again)
