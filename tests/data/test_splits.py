"""Splits and shares of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_bench.data.splits import Split, require_disjoint
from ssl_bench.errors import ConfigurationError

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


def test_training_and_validation_must_not_share_images():
    for train, val in [("train", "val"), ("all:0-75%", "all:75-100%"), ("a:0-50%", "b:0-50%")]:
        require_disjoint(train, val)
    for train, val in [("all:0-76%", "all:75-100%"), ("all:50-100%", "all:0-60%")]:
        with pytest.raises(ConfigurationError, match="share images"):
            require_disjoint(train, val)
