"""Test the selection of dataset splits and subsets."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.description import describe, find_differences
from pretrain.options import DataOptions
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.files.readable import ImageSubset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import resolve_dataset_name
from ssl_bench.data.splits import (
    SHARED_KEY_TYPES,
    Split,
    apply_shared_values,
    limit_dataset,
    limit_images,
    read_shared_values,
    require_disjoint,
    sample_ids,
    sample_indices,
)
from ssl_bench.errors import ConfigurationError
from tests.support.faults import (
    class_folders,
    data_of_every_role,
    make_probe_args,
    photo_folder,
    records,
    voc,
)

IDS = [f"{number:02d}" for number in range(10)]


def test_a_share_counts_percent_of_the_sorted_ids():
    assert Split.parse("train2017:0-25%").cut(IDS[::-1]) == ("00", "01")
    assert Split.parse("train2017:25-100%").cut(IDS[::-1]) == tuple(IDS[2:])
    assert Split.parse("train:12.5-30%").cut(IDS) == ("01", "02")
    assert Split.parse("train").cut(["b", "c", "a"]) == ("a", "b", "c")


@given(
    count=st.integers(0, 300),
    cuts=st.lists(st.integers(1, 999).map(lambda tenth: tenth / 10), unique=True, max_size=9),
)
def test_adjacent_shares_neither_overlap_nor_leave_a_gap(count, cuts):
    ids = [f"{number:04d}" for number in range(count)]
    edges = [0, *sorted(cuts), 100]

    pieces = [Split.parse(f"s:{a}-{b}%").cut(ids) for a, b in pairwise(edges)]

    assert [one for piece in pieces for one in piece] == ids


@pytest.mark.parametrize(
    "text", ["", "train:50%", "train:0-101%", "train:60-40%", "train:5-5%", "a:0-5", ":1-2%"]
)
def test_malformed_splits_are_refused(text):
    with pytest.raises(ConfigurationError):
        Split.parse(text)


def test_training_and_validation_must_not_share_images():
    for train, val in [("train", "val"), ("all:0-75%", "all:75-100%"), ("a:0-50%", "b:0-50%")]:
        require_disjoint(train, val)
    for train, val in [("all:0-76%", "all:75-100%"), ("all:50-100%", "all:0-60%")]:
        with pytest.raises(ConfigurationError) as caught:
            require_disjoint(train, val)
        require_disjoint(*(word.partition("=")[2] for word in caught.value.hint))


def test_limited_images_are_spread_over_the_classes(tmp_path):
    whole = ClassFolders(class_folders(tmp_path / "data"))

    few = limit_dataset(whole, 3)

    # The dataset has three images of each of two classes. Every second one is selected.
    assert few.train().ids == whole.train().ids[::2]
    assert [few.train()[i].label for i in range(3)] == [0, 0, 1]
    assert few.name == few.train().name == few.val().name == "class_folders-limit3"


def test_sampled_ids_keep_their_order_and_hardly_depend_on_other_ids():
    ids = [str(number) for number in range(50)][::-1]
    chosen = sample_ids(ids, 9)
    assert len(chosen) == 9
    assert [ids[index] for index in sample_indices(ids, 9)] == [*chosen]
    assert [*chosen] == [image_id for image_id in ids if image_id in chosen]
    assert set(chosen) < set(sample_ids(ids, 10))
    assert set(sample_ids([*ids, "50"], 9)) <= {*chosen, "50"}
    # By hand: `printf 7 | sha256sum` and so on.
    assert sample_ids(["7", "8", "9"], 2) == ("8", "9")


def test_limited_images_have_another_fingerprint(tmp_path):
    root = photo_folder(tmp_path / "photos")
    whole = ImageFolder(root).images()
    for images in (whole, ImageSubset(whole, (0, 1, 2, 3))):
        few, three, all_four = (limit_images(images, count) for count in (2, 3, 9))
        assert (few.ids, few.name, len(few)) == (("0.jpg", "2.jpg"), "folder-limit2", 2)
        assert [few[i].image_id for i in range(2)] == ["0.jpg", "2.jpg"]
        assert len({one.fingerprint() for one in (images, few, three)}) == 3
        assert (all_four.ids, all_four.name) == (images.ids, "folder-limit9")
    # Only the selected files are read.
    (root / "1.jpg").unlink()
    assert len(limit_images(replace(whole), 2).fingerprint()) == 64


def test_first_images_are_the_leading_ones_under_their_own_name(tmp_path):
    words = [f"data.root={photo_folder(tmp_path / 'photos')}", "dataset=folder"]

    def open_images(*more: str):
        config = compose_config("data", [*words, *more])
        return apply_shared_values(build(config, "dataset"), read_shared_values(config)).images()

    first, spread = open_images("data.first=2"), open_images("data.limit=2")
    assert (first.ids, first.name) == (("0.jpg", "1.jpg"), "folder-first2")
    assert (spread.ids, spread.name) == (("0.jpg", "2.jpg"), "folder-limit2")
    assert len({images.fingerprint() for images in (first, spread, open_images())}) == 3
    with pytest.raises(ConfigurationError) as caught:
        open_images("data.first=2", "data.limit=2")
    assert open_images("data.first=2", *caught.value.hint).ids == first.ids


def test_every_key_that_selects_or_changes_images_has_an_effect_on_every_dataset(tmp_path):
    # The root is used when the dataset is created, and probes use the other three keys.
    elsewhere = {"data.root", "data.allow_overlap", "seed", "dtype"}
    changes = [("data.fingerprint", "stat"), ("data.bits", 12), ("data.limit", 2)]
    changes += [("data.first", 2), ("corrupt", "snow:1")]
    assert SHARED_KEY_TYPES.keys() - elsewhere == dict(changes).keys()
    for name, root in data_of_every_role(tmp_path).items():
        config = compose_config("data", [f"dataset={name}", f"data.root={root}"])
        dataset, values = build(config, "dataset"), read_shared_values(config)
        views = [dataset, *(apply_shared_values(dataset, values | dict([one])) for one in changes)]
        assert len({view.images().fingerprint() for view in views}) == len(views), name


def test_results_of_limited_images_have_their_own_name(workdir, capsys):
    words = make_probe_args("pca", "folder", workdir / "photos")

    assert main(words) == main([*words, "--limit", "2"]) == main([*words, "data.first=2"]) == 0
    capsys.readouterr()
    assert main([*words, "data.limit=2"]) == 0

    assert "skipping 1 of 1 results" in capsys.readouterr().err
    named = {(record.dataset, record.num_images) for record in records()}
    assert named == {("folder", 4), ("folder-limit2", 2), ("folder-first2", 2)}


def test_pretraining_with_a_limit_is_another_run(tmp_path):
    root = str(photo_folder(tmp_path / "photos"))
    few, whole = (DataOptions(root=root, limit=limit) for limit in (3, None))

    assert (few.find_images().ids, len(whole.find_images())) == (("0.jpg", "1.jpg", "2.jpg"), 4)
    assert "data.limit: 3 -> None" in find_differences(
        {"data": describe(few)}, {"data": describe(whole)}
    )


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"train": range(1464), "val": range(1464, 2913), "discovery": range(11540)}, "voc2012"),
        ({"train": range(1464)}, "voc2012"),
        ({"train": range(1463), "val": range(2000, 3449)}, "voc2012-2912"),
        ({"train": range(1464), "discovery": range(11541)}, "voc2012-11541"),
    ],
)
def test_parts_of_published_datasets_are_named_by_their_size(found, name):
    ids = {role: [str(number) for number in numbers] for role, numbers in found.items()}
    assert resolve_dataset_name("voc2012", ids) == name
    assert resolve_dataset_name("mine", ids) == "mine"


def test_a_small_voc_has_the_same_name_in_every_role(tmp_path):
    voc(tmp_path)
    dataset = Voc(tmp_path, train_split="train:0-50%")
    # For any share, the name contains the number of all images: 4 for training and 3 others.
    sets = (dataset.train(), dataset.val(), dataset.discovery(), dataset.images())
    assert [(images.name, len(images)) for images in sets] == [
        ("voc2012-7", count) for count in (2, 3, 7, 7)
    ]
