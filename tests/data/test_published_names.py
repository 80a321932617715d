"""A part of a dataset, or other images in its layout, do not pass for it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from ssl_bench.data import roles
from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.data.layouts.coco_stuff import CocoStuff
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.roles import name_of_images
from tests.support.faults import voc

IMAGES = {"train": ["a", "b", "c"], "val": ["d", "e"]}
TOGETHER = len(IMAGES["train"]) + len(IMAGES["val"])
FOLDERS = {
    "ade20k": ("images/{}", "annotations/{}", {"train": "training", "val": "validation"}),
    "coco_stuff": (
        "images/{}", "stuffthingmaps/{}", {"train": "train2017", "val": "val2017"},
    ),
    "camvid": ("{}", "{}annot", {"train": "train", "val": "val"}),
}  # fmt: skip


def folders(root: Path, name: str) -> Ade20k | CocoStuff | ImageMaskFolders:
    """Three training and two other images, under the dataset's names of folders."""
    pictures, masks, splits = FOLDERS[name]
    suffix = ".png" if name == "camvid" else ".jpg"
    for role, split in splits.items():
        for folder, ending, mode in ((pictures, suffix, "RGB"), (masks, ".png", "L")):
            path = root / folder.format(split)
            path.mkdir(parents=True)
            for image_id in IMAGES[role]:
                Image.new(mode, (4, 4), 1).save(path / f"{image_id}{ending}")
    if name == "camvid":
        return ImageMaskFolders(
            root, name, image_folder="{split}", mask_folder="{split}annot", image_suffix=".png",
            class_names=["sky", "road"],
        )  # fmt: skip
    return {"ade20k": Ade20k, "coco_stuff": CocoStuff}[name](root)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"train": range(1464), "val": range(1464, 2913), "discovery": range(11540)}, "voc2012"),
        ({"train": range(1464)}, "voc2012"),
        ({"train": range(1463), "val": range(2000, 3449)}, "voc2012-2912"),
        ({"train": range(36), "val": range(36, 62), "discovery": range(62)}, "voc2012-62"),
        ({"train": range(1464), "discovery": range(11541)}, "voc2012-11541"),
    ],
)
def test_the_name_counts_all_images_unless_they_are_as_many_as_published(found, name):
    ids: Mapping[str, list[str]] = {role: [str(n) for n in some] for role, some in found.items()}
    assert name_of_images("voc2012", ids) == name
    assert name_of_images("mine", ids) == "mine"


def test_a_small_voc_is_named_by_its_images_in_every_role(tmp_path):
    voc(tmp_path)
    dataset = Voc(tmp_path, train_split="train:0-50%")
    # Four of training and three others, however many of them are taken.
    sets = (dataset.train(), dataset.val(), dataset.discovery(), dataset.images())
    assert [(images.name, len(images)) for images in sets] == [
        ("voc2012-7", 2), ("voc2012-7", 3), ("voc2012-7", 7), ("voc2012-7", 7),
    ]  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_other_counts_are_named_by_their_images(tmp_path, monkeypatch, name):
    dataset = folders(tmp_path, name)
    for images in (dataset.train(), dataset.val(), dataset.images()):
        assert images.name == f"{name}-{TOGETHER}"
    counts = {role: len(ids) for role, ids in IMAGES.items()}
    monkeypatch.setattr(roles, "PUBLISHED", {name: counts})
    fresh = replace(dataset)
    assert fresh.val().name == fresh.images().name == name
