"""Test that images and segmentation masks are read from folders."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.samples import Dataset
from ssl_bench.errors import ConfigurationError, DataError

CONFIGS = Path(__file__).parents[2] / "configs/dataset"
ROAD, SKY, VOID = (128, 64, 128), (70, 130, 180), (0, 0, 0)
MASK = [[0, 1, 1], [255, 0, 1]]
INDICES = [[0, 1, 1], [1, 0, 1]]
NAMED: dict[str, Any] = {"class_names": ["road", "sky"]}


def save(root: Path, name: str, pixels: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, np.uint8)).save(path)


def save_images(root: Path, *names: str) -> None:
    for name in names:
        save(root, name, [[(9, 8, 7)] * 3] * 2)


def mask_of(dataset: ImageMaskFolders) -> list[list[int]]:
    mask = dataset.val()[0].mask
    assert mask is not None
    return mask.tolist()


def build_dataset(name: str, root: Path, **changes: Any) -> ImageMaskFolders:
    config: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    composed = OmegaConf.create({"data": {"root": str(root)}, "dataset": config | changes})
    return instantiate(composed, _convert_="all")["dataset"]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for split, names in (("train", "ab"), ("val", "c")):
        for name in names:
            save_images(tmp_path, f"images/{split}/{name}.jpg")
            save(tmp_path, f"masks/{split}/{name}.png", MASK)
    return tmp_path


@pytest.fixture
def cityscapes(tmp_path: Path) -> Path:
    for split, city in (("train", "aachen"), ("train", "bochum"), ("val", "lindau")):
        name = f"{split}/{city}/{city}_000000_000019"
        save_images(tmp_path, f"leftImg8bit/{name}_leftImg8bit.png")
        save(tmp_path, f"gtFine/{name}_gtFine_labelIds.png", [[7, 8, 33], [0, 4, 31]])
        save(tmp_path, f"gtFine/{name}_gtFine_labelTrainIds.png", [[0, 1, 18], [255, 255, 16]])
        save_images(tmp_path, f"gtFine/{name}_gtFine_color.png")
        (tmp_path / f"gtFine/{name}_gtFine_polygons.json").write_text("{}")
    return tmp_path


def test_cityscapes_has_19_classes_in_folders_of_cities(cityscapes):
    dataset = build_dataset("cityscapes", cityscapes)

    train, val = dataset.train(), dataset.val()
    assert isinstance(dataset, Dataset)
    assert train.ids == ("aachen/aachen_000000_000019", "bochum/bochum_000000_000019")
    assert val.ids == ("lindau/lindau_000000_000019",)
    assert mask_of(dataset) == [[0, 1, 18], [255, 255, 16]]
    assert (val.name, val.class_names[::18]) == ("cityscapes-3", ("road", "bicycle"))
    assert dataset.images()[1].mask is None
    # These numbers are part of the fingerprint, so they must be the same as in older versions.
    assert val.masks is not None
    assert sorted(val.masks.labels.classes) == [*range(34), 255]
    with pytest.raises(DataError, match=r"no split test\. .*: val, train"):
        build_dataset("cityscapes", cityscapes, val_split="test").val()


def test_training_ids_of_cityscapes_are_recognised_by_name_or_refused(cityscapes):
    suffix, stated = "_gtFine_labelTrainIds.png", {"numbers": None, "ignored": [255]}
    for changes in ({}, stated):
        remapped = build_dataset("cityscapes", cityscapes, mask_suffix=suffix, **changes)
        assert mask_of(remapped) == [[0, 1, 18], [255, 255, 16]]

    for path in cityscapes.rglob("*_labelTrainIds.png"):
        path.rename(path.with_name(path.name.replace("labelTrainIds", "labelIds")))
    with pytest.raises(DataError, match=r"labelIds\.png stores 255") as caught:
        build_dataset("cityscapes", cityscapes).val()

    assert caught.value.hint == ("dataset.numbers=null", "dataset.ignored=[255]")
    assert mask_of(build_dataset("cityscapes", cityscapes, **stated)) == [
        [0, 1, 18],
        [255, 255, 16],
    ]


def test_camvid_has_masks_in_folders_that_end_in_annot(tmp_path):
    for split in ("train", "val", "test"):
        save_images(tmp_path, f"{split}/0001TP_006690.png")
        save(tmp_path, f"{split}annot/0001TP_006690.png", [[0, 10, 11], [3, 3, 3]])
    dataset = build_dataset("camvid", tmp_path)

    assert (dataset.train().name, dataset.train().ids) == ("camvid-1", ("0001TP_006690",))
    assert mask_of(dataset) == [[0, 10, 255], [3, 3, 3]]
    assert len(build_dataset("camvid", tmp_path, val_split="test").val()) == 1
    with pytest.raises(DataError, match=r"no split other\. .*: val, test, train\."):
        build_dataset("camvid", tmp_path, train_split="other").train()


def test_lists_of_names_divide_one_folder_into_splits(tmp_path):
    for name in "abc":
        save_images(tmp_path, f"raw/{name}.png")
        save(tmp_path, f"labels/{name}_L.png", MASK)
    (tmp_path / "train.txt").write_text("/SegNet/train/a.png /SegNet/trainannot/a.png\nb\n")
    (tmp_path / "val.txt").write_text("c.png\n")
    places = {"image_folder": "raw", "mask_folder": "labels", "lists": "{split}.txt"}
    suffixes = {"image_suffix": ".png", "mask_suffix": "_L.png"}
    dataset = ImageMaskFolders(tmp_path, **places, **suffixes, **NAMED)

    assert (dataset.train().ids, dataset.val().ids) == (("a", "b"), ("c",))
    assert dataset.images().ids == ("a", "b")
    (tmp_path / "val.txt").write_text("c\nd\n")
    with pytest.raises(DataError, match=r"1 of 2 images of the split val .* d\.png\..*val\.txt"):
        dataset.val()
    # A line may contain the suffix of the image.
    (tmp_path / "raw/c.png").rename(tmp_path / "raw/c_left.png")
    (tmp_path / "val.txt").write_text("images/c_left.png\n")
    assert replace(dataset, image_suffix="_left.png").val().ids == ("c",)


def test_images_and_masks_may_share_a_folder(tmp_path):
    save_images(tmp_path, "train/a.png", "val/a.png")
    save(tmp_path, "val/a_label.png", MASK)
    together = {"image_folder": "{split}", "mask_folder": "{split}", "image_suffix": ".png"}

    dataset = ImageMaskFolders(tmp_path, **together, mask_suffix="_label.png", **NAMED)
    assert dataset.val().ids == ("a",)
    save(tmp_path, "val/b_label.png", MASK)
    with pytest.raises(DataError, match="1 of 2 images"):
        dataset.val()
    with pytest.raises(ConfigurationError) as caught:
        ImageMaskFolders(tmp_path, **together, mask_suffix=".png", **NAMED)
    assert "dataset.mask_suffix={mask_suffix}" in caught.value.hint


def test_colours_become_classes_and_unknown_ones_are_refused(folders):
    colours: dict[str, Any] = {"colours": [ROAD, SKY], "ignored_colours": [VOID], **NAMED}
    save(folders, "masks/val/c.png", [[ROAD, SKY, VOID], [SKY, SKY, ROAD]])
    dataset = ImageMaskFolders(folders, **colours)

    assert mask_of(dataset) == [[0, 1, 255], [1, 1, 0]]
    swapped = ImageMaskFolders(folders, **{**colours, "colours": [SKY, ROAD]})
    assert swapped.val().fingerprint() != dataset.val().fingerprint()
    # In the order of RGB values, one colour is between the known colours, and one after them.
    for unknown in (1, 2, 3), (255, 255, 255):
        save(folders, "masks/val/c.png", [[ROAD, SKY, unknown], [SKY, SKY, ROAD]])
        with pytest.raises(DataError, match=re.escape(f"c.png contains the colour {[*unknown]}")):
            mask_of(dataset)


def test_a_mask_of_two_classes_may_hold_one_number_only(folders):
    for number in (0, 255):
        save(folders, "masks/val/c.png", [[number] * 3] * 2)
        assert mask_of(ImageMaskFolders(folders, **NAMED)) == [[number] * 3] * 2
    save(folders, "masks/val/c.png", [[0, 255, 0]] * 2)
    with pytest.raises(DataError) as caught:
        ImageMaskFolders(folders, **NAMED).val()
    first, _, second = " ".join(caught.value.hint).partition(" or ")
    assert first == "dataset.numbers=[0,255] dataset.ignored=[]"
    assert second == "dataset.ignored=[255]"
    assert mask_of(ImageMaskFolders(folders, numbers=[0, 255], ignored=[], **NAMED))[0] == [0, 1, 0]
    assert mask_of(ImageMaskFolders(folders, numbers=[0, 7], **NAMED)) == [[0, 255, 0]] * 2


def test_class_names_come_from_files_and_numbers_start_at_1(folders):
    (folders / "classes.txt").write_text("sky\n road \n\n")
    save(folders, "masks/val/c.png", [[0, 1, 2], [2, 255, 0]])
    dataset = ImageMaskFolders(folders, reduce_zero=True)

    for names in (dataset, replace(dataset, one_object=True)):
        assert names.val().class_names == ("sky", "road")
    assert mask_of(dataset) == [[255, 0, 1], [1, 255, 255]]
    (folders / "classes.txt").unlink()
    with pytest.raises(DataError) as caught:
        ImageMaskFolders(folders).val()
    assert caught.value.hint == ("dataset.class_names=[road,sky]",)


@pytest.mark.parametrize("lost", ["images/train/a.jpg", "masks/train/b.png"])
def test_an_image_without_its_mask_is_found_at_once(folders, lost):
    (folders / lost).unlink()

    with pytest.raises(DataError, match=f"1 of 2 {lost[:5]}.* train .*{lost[-5:]}"):
        ImageMaskFolders(folders, **NAMED).train()


def test_contradicting_options_are_refused(folders):
    options: list[dict[str, Any]] = [
        *({"numbers": numbers} for numbers in ([1, 1], [0, 255], [0, 300])),
        {"ignored": [300]},
        *({"colours": [ROAD]}, {"colours": [ROAD, SKY], "ignored_colours": [SKY]}),
        {"numbers": [1, 2], "reduce_zero": True},
    ]
    for changes in options:
        with pytest.raises(ConfigurationError):
            ImageMaskFolders(folders, **NAMED, **changes).val()


def test_ecssd_is_one_set_of_masks_of_one_object(tmp_path, capsys):
    for name in ("0001", "0002"):
        save_images(tmp_path, f"images/{name}.jpg")
        save(tmp_path, f"ground_truth_mask/{name}.png", [[0, 255, 255], [0, 0, 255]])
    dataset = build_dataset("ecssd", tmp_path)

    assert dataset.supports == {"saliency", "images"}
    assert (dataset.val().name, dataset.val().split) == ("ecssd-2", "all")
    assert mask_of(dataset) == [[0, 1, 1], [0, 0, 1]]
    assert dataset.images().ids == ("0001", "0002")
    words = ["data", "check", "ecssd", "--data-root", str(tmp_path), "--subset"]
    assert main(words) == 0
    save(tmp_path, "ground_truth_mask/0002.png", [[0, 255, 127], [0, 0, 255]])
    assert main(words) == 3
    assert "0002.png stores the number 127, expected 0, 255" in capsys.readouterr().err


def test_masks_of_one_object_support_segmentation_with_two_splits(folders):
    both = ImageMaskFolders(folders, one_object=True, numbers=[0, 1])

    assert both.supports == {"saliency", "segmentation", "images"}
    assert (both.val().class_names, len(both.train())) == (("background", "object"), 2)
    halves = {"train_split": "all:0-50%", "val_split": "all:50-100%"}
    assert "segmentation" in build_dataset("ecssd", folders, **halves).supports
    with pytest.raises(ConfigurationError):
        ImageMaskFolders(folders, train_split="a:0-60%", val_split="a:50-100%", one_object=True)


def save_with_palette(path: Path, mask: Any, colours: list[tuple[int, int, int]]) -> None:
    image = Image.fromarray(np.array(mask, np.uint8))
    image.putpalette([level for colour in colours for level in colour])
    image.save(path)


def test_a_palette_in_another_order_than_the_others_is_refused(folders):
    # A split may contain masks with a palette and grey masks.
    save_with_palette(folders / "masks/train/b.png", INDICES, [ROAD, SKY])
    masks = [sample.mask for sample in ImageMaskFolders(folders, **NAMED).train()]
    assert [mask.tolist() for mask in masks if mask is not None] == [MASK, INDICES]
    # The end of a palette may repeat a colour.
    save_with_palette(folders / "masks/train/a.png", INDICES, [ROAD, SKY, ROAD, SKY])
    assert ImageMaskFolders(folders, **NAMED).train()[1].mask is not None

    save_with_palette(folders / "masks/train/a.png", INDICES, [ROAD, SKY])
    save_with_palette(folders / "masks/train/b.png", INDICES, [SKY, ROAD])
    save_with_palette(folders / "masks/val/c.png", INDICES, [SKY, ROAD])
    train = ImageMaskFolders(folders, **NAMED).train()

    assert train[0].mask is not None
    with pytest.raises(DataError, match=r"b\.png stores 0 for the colour \[70, 130, 180\]"):
        train[1]
    # All masks of this split have the same order.
    assert mask_of(ImageMaskFolders(folders, **NAMED)) == INDICES
    by_colour = ImageMaskFolders(folders, colours=[ROAD, SKY], **NAMED)
    assert mask_of(by_colour) == [[1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("levels", "is_refused"), [((0, 2, 255), True), ((0, 255), False), ((0, 128, 255), False)]
)
def test_grey_masks_with_an_added_palette_are_refused(folders, levels, is_refused):
    mask = [[*range(len(levels)), 0]]
    save(folders, "images/val/c.jpg", [[(9, 8, 7)] * (len(levels) + 1)])
    save_with_palette(folders / "masks/val/c.png", mask, [(level,) * 3 for level in levels])
    dataset = ImageMaskFolders(folders, class_names=["road", "sky", "tree"])

    if is_refused:
        with pytest.raises(DataError, match=r"stores 1 for the colour \[2, 2, 2\], expected 2"):
            mask_of(dataset)
    else:
        assert mask_of(dataset) == mask
