"""Test the dataset of synthetic toy scenes."""

import os
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.data.layouts import toy as toy_scenes
from ssl_bench.data.layouts.class_folders import LabelledImages
from ssl_bench.data.layouts.toy import (
    CLASS_NAMES,
    Painter,
    Scene,
    Toy,
    ToyObjects,
    _crop_background,
    _draw_outlines,
)
from ssl_bench.data.samples import Dataset
from ssl_bench.errors import DataError, MachineError


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(num_train=12, num_val=4, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def few_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate toy scenes from fewer photographs to save time."""
    monkeypatch.setattr(toy_scenes, "BACKGROUNDS", toy_scenes.BACKGROUNDS[:1])
    monkeypatch.setattr(toy_scenes, "TEXTURES", dict(list(toy_scenes.TEXTURES.items())[:3]))


cached_painter = cache(Painter)


def test_the_toy_dataset_supports_every_role(toy):
    assert [len(s) for s in (toy.train(), toy.val(), toy.discovery(), toy.images())] == [
        *(12, 4, 16, 12)
    ]
    assert (toy.train().name, toy.train().class_names) == ("toy", CLASS_NAMES)
    shapes = {sample.image.shape[:2] for sample in toy.discovery()}
    assert len(shapes) > 1
    assert all(height != width for height, width in shapes)
    assert any(height % 16 or width % 16 for height, width in shapes)
    masks = [sample.mask for sample in toy.train()]
    assert 8 <= len({number for mask in masks for number in np.unique(mask)}) <= 9
    assert len(CLASS_NAMES) == 9
    assert 0.15 < np.mean([(mask > 0).mean() for mask in masks]) < 0.5
    assert isinstance(toy, Dataset)


def test_saved_scenes_have_masks_and_boxes_of_visible_objects(toy):
    overlaps, masked, boxed = 0, toy.train(), toy.discovery()
    for index, scene in enumerate(map(cached_painter("train", 0).paint_scene, range(12))):
        found, boxes = masked[index], np.array(scene.boxes)
        assert np.array_equal(found.mask, scene.mask)
        assert np.abs(found.image - scene.image.astype(float)).mean() < 12
        assert boxed[index].boxes.tolist() == boxes.tolist()
        written = boxed.boxes.files.path(found.image_id).read_text()
        assert 1 <= len(boxes) <= 3
        for number, box in zip(scene.classes, scene.boxes, strict=True):
            rows, cols = np.nonzero(scene.mask == number)
            assert len(rows) > 200
            assert box == (cols.min(), rows.min(), cols.max() + 1, rows.max() + 1)
        rim = np.concatenate([scene.mask[[0, -1]].ravel(), scene.mask[:, [0, -1]].ravel()])
        truncated = [str(int(number in rim)) for number in scene.classes]
        assert re.findall("<truncated>(.)<", written) == truncated
        # Boxes overlap, but masks do not, because one object hides a part of the other.
        overlaps += len(boxes) > 1 and bool(
            (np.maximum(boxes[0, :2], boxes[1, :2]) < np.minimum(boxes[0, 2:], boxes[1, 2:])).all()
        )
    assert overlaps >= 3


def test_no_object_is_hidden_by_more_than_half():
    rng = np.random.default_rng(0)

    for depths in (_draw_outlines(rng, 40, 50) for _ in range(30)):
        for number, depth in enumerate(depths):
            hidden = np.any([other < 1 for other in depths[number + 1 :]], axis=0)
            assert ((depth < 1) & ~hidden).sum() >= 0.5 * (depth < 1).sum()


def test_objects_have_their_centres_in_the_middle_of_both_sides():
    rng, height, width = np.random.default_rng(0), 40, 100

    for depth in (depth for _ in range(30) for depth in _draw_outlines(rng, height, width)):
        row, col = np.unravel_index(depth.argmin(), depth.shape)
        assert 0.2 * height - 1 <= row <= 0.8 * height + 1
        assert 0.2 * width - 1 <= col <= 0.8 * width + 1


def test_a_background_is_a_part_of_a_photograph_without_distortion():
    # The channels of the photograph are the row, the column and 0.
    photograph = np.stack([*np.mgrid[:60, :200], np.zeros((60, 200))], 2).astype(np.float32)
    zooms, flips = [], set()

    for seed in range(20):
        crop = _crop_background(np.random.default_rng(seed), photograph, 30, 40)
        assert crop.shape == (30, 40, 3)
        middle = crop[5:-5, 5:-5]
        down, right = np.diff(middle[..., 0], axis=0).mean(), np.diff(middle[..., 1], axis=1).mean()
        zooms.append(down)
        flips.add(bool(right < 0))
        assert down == pytest.approx(abs(right), abs=0.08)

    # At most, the crop has the height of the photograph. At least, it has 60 % of this height.
    assert 1.15 <= min(zooms) < 1.4
    assert 1.8 < max(zooms) <= 2.05
    assert flips == {False, True}


def test_a_scene_depends_on_split_seed_and_number_alone():
    scene = cached_painter("train", 0).paint_scene(5)

    assert scene.image.shape[:2] in toy_scenes.SIZES
    for split, seed, index in [("train", 4, 5), ("val", 0, 5), ("train", 0, 4)]:
        other = cached_painter(split, seed).paint_scene(index)
        assert not np.array_equal(other.image, scene.image)
        assert not np.array_equal(other.mask, scene.mask)
    assert np.array_equal(cached_painter("train", 0).paint_scene(5).image, scene.image)


def test_each_object_has_the_texture_of_its_class(monkeypatch):
    painter = Painter("train", 0)
    colours = [np.array([[[20.0 * n, 0, 180 - 20 * n]]], np.float32) for n in range(1, 9)]
    monkeypatch.setattr(painter, "_textures", colours)
    monkeypatch.setattr(
        toy_scenes, "_warp_texture", lambda _, colour, *size: np.ones((*size, 1)) * colour
    )
    for index in range(4):
        scene = painter.paint_scene(index)
        for number in scene.classes:
            # Shading does not change the ratio of the channels.
            red, _, blue = np.median(scene.image[scene.mask == number], axis=0)
            assert red / (red + blue) == pytest.approx(number / 9, abs=0.03)


def test_the_splits_share_no_pixel_of_a_texture(monkeypatch):
    columns = np.arange(100, dtype=np.uint8)
    ramp = np.broadcast_to(columns[None, :, None], (20, 100, 3)).copy()
    monkeypatch.setattr(toy_scenes, "read_image", lambda _: ramp)
    photograph = toy_scenes.Photograph("skimage", "data/brick.png")

    parts = [toy_scenes._load_photograph(photograph, split)[0, :, 0] for split in ("train", "val")]

    assert np.concatenate(parts).tolist() == columns.tolist()
    assert parts[0].max() < parts[1].min()


@pytest.mark.usefixtures("few_photographs")
@pytest.mark.usefixtures("few_photographs")
def test_scenes_are_written_once_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Toy(num_train=1, num_val=1)
    fingerprint = first.val().fingerprint()
    (image,) = tmp_path.rglob("JPEGImages/val_00000.jpg")
    os.utime(image, (0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(Painter, "paint_scene", lambda *_: pytest.fail("drawn again"))
        assert first.val().fingerprint() == fingerprint

    scene = Painter("val", 0).paint_scene(0)
    monkeypatch.setattr(Painter, "paint_scene", lambda *_: scene)
    other = {"num_train": 2}, {"num_val": 2}, {"seed": 1}
    sets = [Toy(**{"num_train": 1, "num_val": 1, **changes}) for changes in other]
    assert [(len(one.train()), len(one.val())) for one in sets] == [(2, 1), (1, 2), (1, 1)]
    assert len(list((tmp_path / "ssl-bench").glob("toy-*"))) == 4


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("JPEGImages/val_00000.jpg", Path.unlink),
        ("JPEGImages/val_00000.jpg", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("Annotations/train_00000.xml", lambda path: path.write_bytes(path.read_bytes()[::-1])),
        ("files.json", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("files.json", Path.unlink),
    ],
)
@pytest.mark.usefixtures("few_photographs")
def test_damaged_scenes_are_drawn_again(tmp_path, capsys, name, damage):
    dataset = Toy(num_train=1, num_val=1, cache=tmp_path)
    fingerprint = dataset.val().fingerprint()
    (folder,) = tmp_path.iterdir()
    damage(folder / name)

    assert dataset.val()[0].image.shape[2] == 3
    assert dataset.val().fingerprint() == fingerprint
    assert dataset.discovery().fingerprint()
    assert list(tmp_path.iterdir()) == [folder]
    # Older versions wrote no list of files.
    is_new = name != "files.json" or damage is not Path.unlink
    assert ("generated again" in capsys.readouterr().err) == is_new


@pytest.mark.usefixtures("few_photographs")
def test_neither_an_interrupt_nor_a_second_writer_leaves_incomplete_scenes(tmp_path, monkeypatch):
    slow, quick = (Toy(num_train=1, num_val=1, cache=tmp_path) for _ in range(2))

    def interrupt(*_: object) -> Scene:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Painter, "paint_scene", interrupt)
        with pytest.raises(KeyboardInterrupt):
            slow.train()
    assert list(tmp_path.iterdir()) == []
    write = Toy._write

    def overtaken(toy: Toy, folder: Path) -> None:
        monkeypatch.setattr(Toy, "_write", write)
        write(toy, folder)
        quick.train()

    monkeypatch.setattr(Toy, "_write", overtaken)

    assert slow.train().fingerprint() == quick.train().fingerprint()
    assert len(slow.train()) == len(list(tmp_path.iterdir())) == 1


def test_missing_photographs_and_unwritable_folders_are_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(MachineError) as caught:
        Toy(cache=tmp_path / "file/below").train()
    assert caught.value.hint == ("dataset.cache={folder}",)

    gone = toy_scenes.Photograph("skimage", "data/gone.png")
    monkeypatch.setattr(toy_scenes, "BACKGROUNDS", (gone,))
    with pytest.raises(MachineError, match=r"gone\.png"):
        Painter("train", 0)


@pytest.mark.slow
def test_the_objects_of_the_scenes_are_cut_out_and_named(toy, tmp_path):
    objects = ToyObjects(num_train=12, num_val=4, cache=tmp_path)
    assert objects.images().ids == objects.train().ids
    train = objects.train()
    assert isinstance(train, LabelledImages)

    # Each box of a scene gives one image of the size of the box.
    sizes = sorted(
        (int(y1 - y0), int(x1 - x0))
        for sample in toy.discovery()
        if sample.image_id.startswith("train")
        for x0, y0, x1, y1 in np.asarray(sample.boxes)
    )
    assert sorted(sample.image.shape[:2] for sample in train) == sizes
    assert set(train.class_names) <= set(CLASS_NAMES[1:])
    names = [train.class_names[label] for label in train.labels]
    assert names == [image_id.partition("/")[0] for image_id in train.ids]
    assert train.name == objects.val().name == "toy_objects"
    assert len(objects.val()) > 4
    with pytest.raises(DataError):
        objects.discovery()
