"""A few images of each split, for a first try: which, and under which name."""

from dataclasses import replace

import pytest

from pretrain.description import describe, find_differences
from pretrain.options import DataOptions
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.files.readable import ImageSubset
from ssl_bench.data.splits import apply_shared_values, limit_dataset, limit_images, shared_values
from ssl_bench.errors import ConfigurationError
from ssl_bench.results import ResultStore
from tests.support.faults import class_folders, photo_folder


def dataset(name: str, root):
    return build(compose_config("data", [f"dataset={name}", f"data.root={root}"]), "dataset")


def test_images_are_spread_over_a_split_that_is_sorted_by_class(tmp_path):
    whole = dataset("class_folders", class_folders(tmp_path / "data"))

    few = limit_dataset(whole, 3)

    # Three images of each of two classes: every second one.
    assert few.train().ids == whole.train().ids[::2]
    assert [few.train()[i].label for i in range(3)] == [0, 0, 1]
    assert few.name == few.train().name == few.val().name == "class_folders-limit3"


def test_fewer_images_have_another_fingerprint_and_know_their_own(tmp_path):
    root = photo_folder(tmp_path / "photos")
    whole = dataset("folder", root).images()
    for images in (whole, ImageSubset(whole, (0, 1, 2, 3))):
        few = limit_images(images, 2)
        assert (few.ids, few.name, len(few)) == (("0.jpg", "2.jpg"), "folder-limit2", 2)
        assert [few[i].image_id for i in range(2)] == ["0.jpg", "2.jpg"]
        assert (
            len({few.fingerprint(), images.fingerprint(), limit_images(images, 3).fingerprint()})
            == 3
        )
        assert (limit_images(images, 9).ids, limit_images(images, 9).name) == (
            images.ids,
            "folder-limit9",
        )
    # Only files that stay are read.
    (root / "1.jpg").unlink()
    assert len(limit_images(replace(whole), 2).fingerprint()) == 64


def test_the_first_images_are_those_in_front_under_a_name_of_their_own(tmp_path):
    root = photo_folder(tmp_path / "photos")
    whole, words = dataset("folder", root), [f"data.root={root}", "dataset=folder"]

    def asked(*more: str):
        config = compose_config("data", [*words, *more])
        return apply_shared_values(build(config, "dataset"), shared_values(config)).images()

    first, spread = asked("data.first=2"), asked("data.limit=2")
    assert (first.ids, first.name) == (("0.jpg", "1.jpg"), "folder-first2")
    assert (spread.ids, spread.name) == (("0.jpg", "2.jpg"), "folder-limit2")
    prints = {images.fingerprint() for images in (first, spread, whole.images())}
    assert len(prints) == 3
    assert asked().fingerprint() in prints
    with pytest.raises(ConfigurationError) as refused:
        asked("data.first=2", "data.limit=2")
    assert asked("data.first=2", *refused.value.hint).ids == first.ids


def test_scores_of_few_images_stand_apart_from_those_of_all(place, capsys):
    words = ["probe", "--task", "pca", "--checkpoint", "encoder.safetensors", "--layer", "0"]
    words += ["--dataset", "folder", "--data-root", "photos", "probe.image_size=32"]

    assert main(words) == 0
    assert main([*words, "--limit", "2"]) == 0
    assert main([*words, "data.limit=2"]) == 0
    assert "skipping 1 of 1 results" in capsys.readouterr().err
    assert main([*words, "data.first=2"]) == 0

    records = ResultStore(place / "results").records()
    named = {(r.dataset, r.num_images) for r in records}
    assert named == {("folder", 4), ("folder-limit2", 2), ("folder-first2", 2)}
    assert main(["table"]) == 0
    assert " on folder-limit2 all" in capsys.readouterr().out


def test_a_run_learns_from_few_images_and_is_another_run(tmp_path):
    few, whole = (
        DataOptions(root=str(photo_folder(tmp_path / str(limit))), limit=limit)
        for limit in (3, None)
    )

    assert few.open().ids == ("0.jpg", "1.jpg", "2.jpg")
    assert len(whole.open()) == 4
    assert "data.limit: 3 -> None" in find_differences(
        {"data": describe(few)}, {"data": describe(whole)}
    )
