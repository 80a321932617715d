"""Every number of every configured component has a legal range."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin

import pytest

from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import as_plain, compose_config
from ssl_bench.composition.fields import (
    Count,
    InnerShare,
    Items,
    Share,
    Span,
    Within,
    require,
)
from ssl_bench.errors import ConfigurationError
from tests.core.test_composition import components

GROUPS = ("probe", "dataset", "model", "objective", "optimizer")
ABSURD = (
    *(float("nan"), float("inf"), float("-inf"), 1e30, -1e30, -1.5, "", "a text", [], {}, True),
    *(2**31, 2**63, 10**400, -(10**400), [float("nan")], [None], [[]], "\x00", b"bytes"),
)


def classes() -> Iterator[type]:
    """Those that any file of `configs/` names, those inside others included."""
    for group in GROUPS:
        for name in choices(group):
            root = "probing" if group in ("probe", "dataset") else "pretraining"
            pca = ["probe=pca"] * (group == "dataset")
            config = compose_config(root, [*pca, f"{group}={name}"])
            yield from (kind for _, kind in components(as_plain(config)))


def numbers_without_a_range(kind: Any) -> bool:
    """Whether a type has an `int` or `float` that is not between two ends."""
    if get_origin(kind) is Annotated:
        base, legal = get_args(kind)[:2]
        return not isinstance(legal, Within) and numbers_without_a_range(base)
    return kind in (int, float) or any(map(numbers_without_a_range, get_args(kind)))


def test_every_number_of_every_component_has_a_legal_range():
    found = {
        f"{kind.__qualname__}.{item.name}"
        for kind in classes()
        for item in fields(kind)
        if item.init and numbers_without_a_range(item.type)
    }

    assert not found


def test_no_field_takes_a_number_that_is_not_finite_or_has_no_end():
    for kind in set(classes()):
        for item in (item for item in fields(kind) if item.init):
            for value in ABSURD:
                if (isinstance(value, float | int) and abs(value) > 2**32) or value != value:
                    with pytest.raises(ConfigurationError, match=f"^probe.{item.name} expects"):
                        require(f"probe.{item.name}", item.type, value)


@pytest.mark.parametrize(
    ("kind", "legal", "words"),
    [
        (Count, (1, 10**9), "a whole number in [1, 1000000000]"),
        (Share, (0, 0.5, 1), "a number in [0, 1]"),
        (InnerShare, (1e-9, 0.999), "a number in (0, 1)"),
        (Annotated[float, Within(-1, 1, below=True)], (-1, 0.999), "a number in [-1, 1)"),
        (Span, ([0.1, 2], (1, 1)), "a number in (0, 1000000000], 2 of them"),
        (Annotated[list[int], Items(1, 3)], ([1], [1, 2, 3]), "1 to 3 of them"),
    ],
)
def test_the_ends_of_a_range_are_legal_and_the_message_names_them(kind, legal, words):
    for value in legal:
        require("probe.key", kind, value)
    with pytest.raises(ConfigurationError) as caught:
        require("probe.key", kind, "x" * 10_000)

    assert words in str(caught.value)
    assert len(str(caught.value)) < 400
