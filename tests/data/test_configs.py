"""What every dataset of `configs/dataset` has in common."""

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
from ssl_bench.data.samples import OFFERED, Layout, datasets_with
from ssl_bench.data.sources import SOURCES
from ssl_bench.errors import ConfigurationError, DataError

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/dataset").glob("*.yaml"))


def dataset_of_config(name: str, root: str | None = "/data") -> Any:
    path = Path(__file__).parents[2] / f"configs/dataset/{name}.yaml"
    config = OmegaConf.create({"data": {"root": root}, "dataset": OmegaConf.load(path)})
    return instantiate(config, _convert_="all")["dataset"]


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_file_builds_a_dataset_of_its_name_with_a_known_source(name):
    dataset, source = dataset_of_config(name), SOURCES[name]

    assert isinstance(dataset, Layout)
    assert dataset.name == name
    assert len(getattr(dataset, "class_names", ())) in (0, source.num_classes)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_folder_a_dataset_asks_for_it_when_it_is_used(name):
    dataset = dataset_of_config(name)
    if not hasattr(dataset, "root"):
        pytest.skip("it has no folder")

    with pytest.raises(DataError) as caught:
        replace(dataset, root=None).images()

    assert caught.value.hint[-2:] == ("--data-root", "{folder}")


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
    found = datasets_with(role)

    assert names <= set(found)
    assert found == sorted(found)
    assert all(role in dataset_of_config(name, None).supports for name in found)


@pytest.mark.parametrize(
    ("dataset", "method", "role"),
    [
        (Ade20k(), "discovery", "discovery"),
        (Coco20k(), "val", "segmentation"),
        (ImageFolder(), "train", "segmentation"),
        (
            ImageMaskFolders(name="ecssd", train_split="all", val_split="all", one_object=True),
            *("train", "segmentation"),
        ),
    ],
)
def test_a_role_that_a_dataset_lacks_is_refused_with_those_that_have_it(dataset, method, role):
    with pytest.raises(DataError, match=f"{dataset.name} has no {OFFERED[role]}") as caught:
        getattr(dataset, method)()

    assert all(name in str(caught.value) for name in datasets_with(role))


@pytest.mark.parametrize("dataset", [Ade20k, CocoStuff, ImageMaskFolders, Voc])
def test_splits_that_share_images_are_refused_before_any_file_is_opened(dataset):
    with pytest.raises(ConfigurationError, match="share images"):
        dataset("/nowhere", train_split="trainval", val_split="trainval:0-10%")
