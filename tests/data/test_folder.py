"""A folder of pictures, however it is nested."""

from pathlib import Path

import pytest
from PIL import Image

from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.samples import Dataset
from ssl_bench.errors import DataError


def put(path: Path, red: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 2), (red, 0, 0)).save(path)


def test_pictures_are_found_at_any_depth_in_the_order_of_their_paths(tmp_path):
    for name in ("b/2.png", "b/1.JPEG", "a.bmp", "c/d/e/3.webp", ".hidden/4.png", "b/._1.png"):
        put(tmp_path / name)
    (tmp_path / "readme.txt").touch()
    dataset = ImageFolder(tmp_path)

    images = dataset.images()

    assert isinstance(dataset, Dataset)
    assert images.ids == ("a.bmp", "b/1.JPEG", "b/2.png", "c/d/e/3.webp")
    assert images[3].image.shape == (2, 3, 3)


def test_linked_folders_are_followed_and_circles_end(tmp_path):
    put(tmp_path / "elsewhere/1.png", red=200)
    root = tmp_path / "root"
    put(root / "2.png")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "circle").symlink_to(root)

    images = ImageFolder(root).images()

    assert images.ids == ("2.png", "link/1.png")
    assert images[1].image[0, 0, 0] == 200


@pytest.mark.data
def test_the_real_folders_give_every_photograph(photos):
    images = ImageFolder(photos / "pretrain128").images()

    assert len(images) == 2900
    assert images[0].image.shape[2] == 3
    assert images[0].image_id.startswith("bsds500/")


def test_nothing_is_known_of_the_objects_in_a_folder_and_an_empty_one_is_none(tmp_path):
    put(tmp_path / "some/1.png")
    (tmp_path / "empty").mkdir()

    assert ImageFolder(tmp_path / "some").discovery()[0].boxes is None
    with pytest.raises(DataError, match="holds no picture"):
        ImageFolder(tmp_path / "empty").images()
