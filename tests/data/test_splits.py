"""Splits and shares of them."""

from itertools import pairwise
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from ssl_bench.data.splits import Split, absent_split, read_list, require_disjoint
from ssl_bench.errors import ConfigurationError, DataError

IDS = [f"{number:02d}" for number in range(10)]


def test_a_plain_name_is_everything_in_sorted_order():
    assert Split.parse("train").cut(["b", "c", "a"]) == ("a", "b", "c")


def test_a_share_counts_percent_of_the_sorted_ids():
    assert Split.parse("train2017:0-25%").cut(IDS[::-1]) == ("00", "01")
    assert Split.parse("train2017:25-100%").cut(IDS[::-1]) == tuple(IDS[2:])
    assert Split.parse("train:12.5-30%").cut(IDS) == ("01", "02")


@given(
    count=st.integers(0, 300),
    cuts=st.lists(st.decimals(min_value="0.1", max_value="99.9", places=1), unique=True),
)
def test_shares_that_meet_neither_overlap_nor_leave_a_gap(count, cuts):
    ids = [f"{number:04d}" for number in range(count)]
    edges = [0, *sorted(cuts), 100]

    pieces = [Split.parse(f"s:{a}-{b}%").cut(ids) for a, b in pairwise(edges)]

    assert [one for piece in pieces for one in piece] == ids


@pytest.mark.parametrize(
    "text",
    ["", "train:", "train:50%", "train:0-101%", "train:60-40%", "train:5-5%", "a:0-5", ":1-2%"],
)
def test_what_is_no_split_is_a_configuration_error(text):
    with pytest.raises(ConfigurationError, match="expected a split such as"):
        Split.parse(text)


@pytest.mark.parametrize(
    ("train", "val", "allowed"),
    [
        ("train", "val", True),
        ("all:0-75%", "all:75-100%", True),
        ("all:0-76%", "all:75-100%", False),
        ("all", "all:75-100%", False),
        ("all:50-100%", "all:0-60%", False),
        ("train:0-50%", "val:0-50%", True),
    ],
)
def test_training_and_validation_must_not_share_images(train, val, allowed):
    if allowed:
        require_disjoint(train, val)
    else:
        with pytest.raises(ConfigurationError, match="share images"):
            require_disjoint(train, val)


@pytest.mark.parametrize(
    "line",
    [
        "2007_000032",
        "2007_000032  1",
        "/JPEGImages/2007_000032.jpg /Aug/2007_000032.png",
        "a/2007_000032.jpg",
    ],
)
def test_a_list_may_hold_ids_paths_or_columns(tmp_path, line):
    (tmp_path / "train.txt").write_text(f"{line}\n\n")

    assert read_list(tmp_path / "train.txt") == ["2007_000032"]


def test_an_absent_list_names_those_that_are_meant(tmp_path):
    for name in (
        "aeroplane_train",
        "bicycle_train",
        "bird_val",
        "boat_val",
        "cat_val",
        "train",
        "val",
    ):
        (tmp_path / f"{name}.txt").touch()

    with pytest.raises(
        DataError, match=r"no split test, but val, train, .*train_split=train:0-75% "
    ):
        read_list(tmp_path / "test.txt")


def test_the_advice_for_a_missing_split_can_be_typed():
    message = str(absent_split("val2017", ["train2017"], Path("maps")))

    typed = [word for word in message.split() if word.startswith("dataset.")]
    parsed = OverridesParser.create().parse_overrides(typed)
    assert [override.value() for override in parsed] == ["train2017:0-75%", "train2017:75-100%"]
    require_disjoint(*(str(override.value()) for override in parsed))
