"""Generated rooms with exact depth, computed from the geometry of the camera."""

import numpy as np
import pytest

from ssl_bench.data.layouts.toy_depth import RoomPainter, ToyDepth


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> ToyDepth:
    return ToyDepth(num_train=6, num_val=3, cache=tmp_path_factory.mktemp("cache"))


def test_rooms_come_back_from_disk_with_their_depth(toy):
    for split, images in (("train", toy.train()), ("val", toy.val())):
        painter = RoomPainter(split, seed=0)
        for index, sample in enumerate(images):
            image, millimetres = painter.paint_room(index)
            assert np.array_equal(sample.depth, np.float32(millimetres / 1000))
            assert np.abs(sample.image - image.astype(float)).mean() < 12
    assert [len(images) for images in (toy.train(), toy.val(), toy.images())] == [6, 3, 6]
    assert toy.val().name == "toy_depth"
    assert len(list(toy.cache.iterdir())) == 1


def test_the_floor_is_a_plane_and_objects_face_the_camera(toy):
    for sample in toy.train():
        depth = sample.depth
        assert depth is not None
        assert 0.8 < depth.min() < depth.max() <= 9
        wall, below = depth[0, 0], [row for row in depth if row.max() < depth[0, 0]]
        assert (depth <= wall).all()
        # On the floor, the inverse of depth is linear in the row. In each row, it is farthest.
        inverse = 1 / np.array([row.max() for row in below[-12:]])
        assert np.abs(np.diff(inverse, 2)).max() < 1e-3
        values, counts = np.unique(depth, return_counts=True)
        nearer = values[(counts > 100) & (values < wall)]
        assert len(nearer) >= 1


def test_a_room_depends_on_split_seed_and_number_alone():
    room = RoomPainter("train", 0).paint_room(1)

    for split, seed, index in [("train", 4, 1), ("val", 0, 1), ("train", 0, 0)]:
        other = RoomPainter(split, seed).paint_room(index)
        assert other[0].shape != room[0].shape or not np.array_equal(other[1], room[1])
    for one, other in zip(RoomPainter("train", 0).paint_room(1), room, strict=True):
        assert np.array_equal(one, other)
