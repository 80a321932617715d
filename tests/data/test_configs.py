"""What every dataset of `configs/dataset` must do.

A new dataset needs no entry here.
"""

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
from ssl_bench.data.samples import ROLE_ANNOTATIONS, SPLITS_OF_ROLES, Layout, datasets_with
from ssl_bench.data.sources import SOURCES
from ssl_bench.errors import ConfigurationError, DataError, MachineError

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/dataset").glob("*.yaml"))


def dataset_of_config(name: str, root: str | None = "/data") -> Any:
    path = Path(__file__).parents[2] / f"configs/dataset/{name}.yaml"
    config = OmegaConf.create({"data": {"root": root}, "dataset": OmegaConf.load(path)})
    return instantiate(config, _convert_="all")["dataset"]


def methods_of(name: str) -> list[str]:
    """The methods that return the images of the roles that a dataset supports."""
    roles = dataset_of_config(name, None).supports & SPLITS_OF_ROLES.keys()
    return sorted({method for role in roles for method in SPLITS_OF_ROLES[role]})


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_file_builds_a_dataset_of_its_name_and_opens_no_file(name):
    dataset = dataset_of_config(name)

    assert isinstance(dataset, Layout)
    assert dataset.name == name
    assert dataset_of_config(name, None).supports <= ROLE_ANNOTATIONS.keys()
    if name in SOURCES:
        assert len(getattr(dataset, "class_names", ())) in (0, SOURCES[name].num_classes)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_folder_a_dataset_asks_for_it_when_it_is_used(name):
    dataset = dataset_of_config(name, None)
    if not hasattr(dataset, "root"):
        pytest.skip("it has no folder")

    for method in methods_of(name):
        with pytest.raises(DataError) as caught:
            getattr(dataset, method)()
        assert caught.value.hint[-2:] == ("--data-root", "{folder}")


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_folder_is_refused_in_one_line(name, tmp_path):
    dataset = dataset_of_config(name, str(tmp_path))
    if not hasattr(dataset, "root"):
        pytest.skip("it has no folder")

    for method in methods_of(name):
        # Some datasets need a package that is not installed everywhere.
        with pytest.raises((DataError, MachineError)):
            getattr(dataset, method)()


@pytest.mark.parametrize("name", NAMES)
def test_roles_that_a_dataset_does_not_support_are_refused(name):
    dataset = dataset_of_config(name, None)

    for method in {"train", "val", "discovery", "images"} - set(methods_of(name)):
        with pytest.raises(DataError):
            getattr(dataset, method)()


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
    with pytest.raises(
        DataError, match=f"{dataset.name} has no {ROLE_ANNOTATIONS[role]}"
    ) as caught:
        getattr(dataset, method)()

    assert all(name in str(caught.value) for name in datasets_with(role))


@pytest.mark.parametrize("dataset", [Ade20k, CocoStuff, ImageMaskFolders, Voc])
def test_splits_that_share_images_are_refused_before_any_file_is_opened(dataset):
    with pytest.raises(ConfigurationError, match="share images"):
        dataset("/nowhere", train_split="trainval", val_split="trainval:0-10%")
