"""Test every dataset that has a config file in `configs/dataset`."""

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
