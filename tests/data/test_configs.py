"""Test every dataset that has a config file in `configs/dataset`."""

import json
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ssl_bench.data import samples
from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.data.layouts.coco_stuff import CocoStuff
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import ROLE_ANNOTATIONS, SPLITS_OF_ROLES, Layout
from ssl_bench.data.sources import DATASET_INFOS
from ssl_bench.errors import ConfigurationError, DataError, MachineError

CONFIGS = Path(__file__).parents[2] / "configs/dataset"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
# The function builds all datasets, which takes most of the time of these tests.
find_datasets = cache(samples.find_datasets)


@pytest.fixture(autouse=True)
def roles_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "find_datasets", find_datasets)


def dataset_of_config(name: str, root: str | None = "/data") -> Any:
    loaded = OmegaConf.load(CONFIGS / f"{name}.yaml")
    config = OmegaConf.create({"data": {"root": root}, "dataset": loaded})
    return instantiate(config, _convert_="all")["dataset"]


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_file_builds_a_dataset_and_opens_no_file(name):
    dataset = dataset_of_config(name)

    assert isinstance(dataset, Layout)
    assert dataset.name == name
    assert dataset_of_config(name, None).supports <= ROLE_ANNOTATIONS.keys()
    if name in DATASET_INFOS:
        assert len(getattr(dataset, "class_names", ())) in (0, DATASET_INFOS[name].num_classes)


@pytest.mark.parametrize("name", NAMES)
def test_missing_and_empty_folders_and_other_roles_are_refused(name, tmp_path):
    dataset = dataset_of_config(name, None)
    supported = dataset.supports & SPLITS_OF_ROLES.keys()
    methods = {method for role in supported for method in SPLITS_OF_ROLES[role]}

    for method in {"train", "val", "discovery", "images"} - methods:
        with pytest.raises(DataError):
            getattr(dataset, method)()
    for method in methods if hasattr(dataset, "root") else ():
        with pytest.raises(DataError) as caught:
            getattr(dataset, method)()
        assert caught.value.hint[-2:] == ("--data-root", "{folder}")
        # Some datasets need a package that is not installed everywhere.
        with pytest.raises((DataError, MachineError)):
            getattr(dataset_of_config(name, str(tmp_path)), method)()


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("segmentation", {"ade20k", "camvid", "cityscapes", "coco_stuff", "toy", "voc2012"}),
        ("saliency", {"ecssd"}),
        ("classification", {"class_folders", "toy_objects"}),
        ("correspondence", {"spair71k"}),
        ("discovery", {"coco20k", "folder", "toy", "voc2007", "voc2012"}),
        ("images", {"folder", "spair71k", "toy"}),
    ],
)
def test_datasets_are_found_by_the_roles_that_they_support(role, names):
    found = find_datasets(role)

    assert names <= set(found)
    assert found == sorted(found)
    assert all(role in dataset_of_config(name, None).supports for name in found)


@pytest.mark.parametrize(
    ("name", "method", "role"),
    [
        ("ade20k", "discovery", "discovery"),
        ("coco20k", "val", "segmentation"),
        ("folder", "train", "segmentation"),
        ("ecssd", "train", "segmentation"),
    ],
)
def test_an_unsupported_role_names_the_datasets_that_have_it(name, method, role):
    with pytest.raises(DataError) as caught:
        getattr(dataset_of_config(name), method)()

    assert f"{name} has no {ROLE_ANNOTATIONS[role]}" in str(caught.value)
    assert all(other in str(caught.value) for other in find_datasets(role))


@pytest.mark.parametrize("dataset", [Ade20k, CocoStuff, ImageMaskFolders, Voc])
def test_overlapping_splits_are_refused_before_any_file_is_opened(dataset):
    with pytest.raises(ConfigurationError):
        dataset("/nowhere", train_split="trainval", val_split="trainval:0-10%")


# The files of each dataset, with the name of a split and the number of an image. Text files without
# a number in their path list all numbers.
DAVIS = "JPEGImages/480p/{n}/0.jpg JPEGImages/480p/{n}/1.jpg Annotations/480p/{n}/0.png"
NYU = "official_splits/{split}/a/rgb_{n}.jpg official_splits/{split}/a/"
VOC = "JPEGImages/{n}.jpg SegmentationClass/{n}.png Annotations/{n}.xml"
VOC += " ImageSets/Segmentation/{split}.txt ImageSets/Main/{split}.txt"
FILES = {
    "ade20k": "images/{split}/{n}.jpg annotations/{split}/{n}.png",
    "camvid": "{split}/{n}.png {split}annot/{n}.png",
    "cityscapes": "leftImg8bit/{split}/a/{n}_leftImg8bit.png "
    "gtFine/{split}/a/{n}_gtFine_labelIds.png",
    "class_folders": "{split}/a/{n}.jpg {split}/b/{n}.jpg",
    "coco20k": "images/{split}/{n}.jpg annotations/instances_{split}.json "
    "coco_20k_filenames_subset.txt",
    "coco_stuff": "images/{split}/{n}.jpg stuffthingmaps/{split}/{n}.png",
    "davis2016": f"{DAVIS} ImageSets/2016/{{split}}.txt",
    "davis2017": f"{DAVIS} ImageSets/2017/{{split}}.txt",
    "depth_folders": "images/{split}/{n}.jpg depth/{split}/{n}.png",
    "ecssd": "images/{n}.jpg ground_truth_mask/{n}.png",
    "nyu": f"{NYU}sync_depth_{{n}}.png",
    "nyu40": f"{NYU}label40_{{n}}.png",
    "paired_folders": "images/{split}/{n}.jpg masks/{split}/{n}.png",
    "spair71k": "JPEGImages/cat/{n}.jpg PairAnnotation/{split}/{n}-0-1:cat.json "
    "Layout/large/{split}.txt",
    "voc2007": VOC,
    "voc2012": VOC,
}
NUMBERS = range(4)
BOXES = [{"id": n, "image_id": n, "bbox": [1, 1, 2, 2], "iscrowd": 0} for n in NUMBERS]
TEXTS = {
    ".json": json.dumps({"images": [{"id": n} for n in NUMBERS], "annotations": BOXES}),
    ".txt": "\n".join(map(str, NUMBERS)),
}
OTHERS = {"hf", "webdataset"}
"""Datasets that are no folders of images. `webdataset` selects splits by file names."""


def options_of_splits(name: str) -> dict[str, str]:
    """Return the values of all dataset options whose names end in "_split"."""
    dataset = dataset_of_config(name, None)
    names = sorted(one.name for one in fields(dataset) if one.name.endswith("_split"))
    return {one: getattr(dataset, one) or one.removesuffix("_split") for one in names}


def write_files(root: Path, pattern: str, split: str) -> None:
    for number in NUMBERS:
        path = root / pattern.format(split=split, n=number)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = TEXTS.get(path.suffix, "")
        path.write_text(re.sub("$", "-0-1:cat", text, flags=re.M) if "Layout" in pattern else text)


@pytest.mark.parametrize("name", [n for n in NAMES if options_of_splits(n) and n not in OTHERS])
def test_half_of_a_split_is_labelled_as_such_and_changes_no_other(name, tmp_path):
    options = options_of_splits(name)
    for pattern in FILES[name].split():
        for split in options.values():
            write_files(tmp_path, pattern, split)
    named = {"class_names": ["a", "b"]} if name == "paired_folders" else {}
    whole = replace(dataset_of_config(name, str(tmp_path)), **options, **named)
    roles = {role for kind in whole.supports - {"boxes"} for role in SPLITS_OF_ROLES[kind]}
    for split in set(options.values()):
        part, labels = f"{split}:0-50%", set()
        half = replace(whole, **{one: part for one, value in options.items() if value == split})
        for role in roles:
            before, after = getattr(whole, role)(), getattr(half, role)()
            first = tuple(i for i in before.ids if int(re.findall(r"\d", i)[0]) < 2)
            expected = (part, first) if before.split == split else (before.split, before.ids)
            assert (after.split, after.ids) == expected
            labels.add(after.split)
        assert part in labels
