"""Every dataset that can be typed is what its class gives by default."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.coco_stuff import CocoStuff
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.hugging_face import HuggingFace
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.python_dataset import PythonDataset
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.layouts.toy import Toy, ToyObjects
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import Layout, datasets_with
from ssl_bench.errors import ConfigurationError, DataError

FOLDER = Path(__file__).parents[2] / "configs/dataset"
DEFAULTS = {
    "voc2012": Voc("/data"),
    "voc2007": Voc("/data", year=2007),
    "ade20k": Ade20k("/data"),
    "coco_stuff": CocoStuff("/data"),
    "coco20k": Coco20k("/data"),
    "spair71k": Spair71k("/data"),
    "folder": ImageFolder("/data"),
    "class_folders": ClassFolders("/data"),
    "paired_folders": ImageMaskFolders("/data"),
    "hf": HuggingFace(root="/data"),
    "python": PythonDataset(),
    "toy": Toy(),
    "toy_objects": ToyObjects(),
}
# Folders that a file describes, and how many classes they have.
DESCRIBED = {"cityscapes": 19, "camvid": 11, "ecssd": 2}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_yaml_file_builds_the_default_dataset_of_its_name(path):
    config = OmegaConf.create({"data": {"root": "/data"}, "dataset": OmegaConf.load(path)})

    dataset = instantiate(config, _convert_="all")["dataset"]

    # Not `Dataset`, because this would read the roles, for which hf opens its files.
    assert isinstance(dataset, Layout)
    assert dataset.name == path.stem
    if isinstance(dataset, ImageMaskFolders) and path.stem in DESCRIBED:
        assert len(dataset.class_names) == DESCRIBED[path.stem]
    else:
        assert dataset == DEFAULTS[path.stem]


def test_roles_are_found_by_looking_at_the_datasets():
    own = {"ade20k", "coco_stuff", "hf", "paired_folders", "toy", "voc2007", "voc2012"}
    assert datasets_with("segmentation") == sorted(own | {"camvid", "cityscapes"})
    assert datasets_with("saliency") == ["ecssd", "hf"]
    assert datasets_with("classification") == ["class_folders", "hf", "toy_objects"]
    assert datasets_with("correspondence") == ["spair71k"]
    assert datasets_with("discovery") == ["coco20k", "folder", "hf", "toy", "voc2007", "voc2012"]
    assert datasets_with("images") == sorted((DEFAULTS | DESCRIBED).keys() - {"python"})


@pytest.mark.parametrize(
    ("dataset", "role", "said"),
    [
        (
            Ade20k(),
            "discovery",
            "ade20k has no boxes; datasets for discovery: coco20k, folder, .*toy",
        ),
        (Coco20k(), "val", "coco20k has no masks; datasets for segmentation: ade20k"),
        (ImageFolder(), "train", "folder has no masks; datasets for segmentation: ade20k"),
        (
            ImageMaskFolders(name="ecssd", train_split="all", val_split="all", one_object=True),
            *("train", "ecssd has no masks; datasets for segmentation"),
        ),
    ],
)
def test_a_role_that_a_dataset_lacks_is_refused_with_those_that_have_it(dataset, role, said):
    with pytest.raises(DataError, match=said):
        getattr(dataset, role)()


@pytest.mark.parametrize("name", sorted(n for n, one in DEFAULTS.items() if hasattr(one, "root")))
def test_without_a_folder_a_dataset_asks_for_it_when_it_is_used(name):
    dataset: Any = DEFAULTS[name]

    with pytest.raises(DataError, match="--data-root FOLDER"):
        replace(dataset, root=None).images()


@pytest.mark.parametrize("dataset", [Ade20k, CocoStuff, ImageMaskFolders, Voc])
def test_splits_that_share_images_are_refused_before_any_file_is_opened(dataset):
    with pytest.raises(ConfigurationError, match="share images"):
        dataset("/nowhere", train_split="trainval", val_split="trainval:0-10%")
