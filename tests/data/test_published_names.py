"""A part of a dataset, or other images in its layout, do not pass for it."""

from collections.abc import Mapping

import pytest

from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import name_of_images
from tests.support.faults import voc


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
    ids: Mapping[str, list[str]] = {
        role: [str(n) for n in images] for role, images in found.items()
    }
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
