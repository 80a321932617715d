"""Every dataset that can be typed is what its class gives by default."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ssl_bench.data.layouts.ade20k import Ade20k
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.coco_stuff import CocoStuff
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import Layout, datasets_with
from ssl_bench.errors import ConfigurationError, DataError

FOLDER = Path(__file__).parents[2] / "configs/dataset"
FILES = sorted(FOLDER.glob("*.yaml"))


def built(path: Path) -> Any:
    config = OmegaConf.create({"data": {"root": "/data"}, "dataset": OmegaConf.load(path)})
    return instantiate(config, _convert_="all")["dataset"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_yaml_file_builds_the_default_dataset_of_its_name(path):
    dataset, values = built(path), OmegaConf.load(path)

    # Not `Dataset`, because this would read the roles, for which some datasets open their files.
    assert isinstance(dataset, Layout)
    assert dataset.name == path.stem
    if set(values) <= {"_target_", "root"}:
        assert dataset == type(dataset)(**({"root": "/data"} if "root" in values else {}))
    if path.stem in (num_classes := {"cityscapes": 19, "camvid": 11, "ecssd": 2}):
        assert len(dataset.class_names) == num_classes[path.stem]


def test_roles_are_found_by_looking_at_the_datasets():
    own = {"ade20k", "coco_stuff", "hf", "paired_folders", "toy", "voc2007", "voc2012"}
    assert own | {"camvid", "cityscapes"} <= set(datasets_with("segmentation"))
    assert {"ecssd", "hf"} <= set(datasets_with("saliency"))
    assert {"class_folders", "hf", "toy_objects"} <= set(datasets_with("classification"))
    assert "spair71k" in datasets_with("correspondence")
    assert {"coco20k", "folder", "hf", "toy", "voc2012"} <= set(datasets_with("discovery"))
    assert not {"folder", "coco20k"} & set(datasets_with("segmentation"))
    # The dataset python has the roles of the objects that it receives.
    assert set(datasets_with("images")) == {path.stem for path in FILES} - {"python"}


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


@pytest.mark.parametrize(
    "path", [path for path in FILES if "root" in OmegaConf.load(path)], ids=lambda path: path.stem
)
def test_without_a_folder_a_dataset_asks_for_it_when_it_is_used(path):
    with pytest.raises(DataError) as error:
        replace(built(path), root=None).images()
    assert error.value.hint[-2:] == ("--data-root", "{folder}")


@pytest.mark.parametrize("dataset", [Ade20k, CocoStuff, ImageMaskFolders, Voc])
def test_splits_that_share_images_are_refused_before_any_file_is_opened(dataset):
    with pytest.raises(ConfigurationError, match="share images"):
        dataset("/nowhere", train_split="trainval", val_split="trainval:0-10%")
