"""Test that every numeric setting has a range of legal values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.composition.fields import (
    Bounds,
    Count,
    Fraction,
    FractionBelowOne,
    ListLength,
    OpenFraction,
    Positive,
    PositiveRange,
    Rate,
    check_fields,
    require_type,
)
from ssl_bench.errors import ConfigurationError
from tests.core.test_composition import components
from tests.support.faults import unchecked_types

GROUPS = ("probe", "dataset", "model", "objective", "optimizer")
OUT_OF_RANGE = (
    float("nan"),
    float("inf"),
    float("-inf"),
    1e30,
    -1e30,
    2**63,
    10**400,
    -(10**400),
)


@cache
def configured_classes() -> frozenset[type]:
    found = set[type]()
    for group in GROUPS:
        for name in choices(group):
            root = "probing" if group in ("probe", "dataset") else "pretraining"
            pca = ["probe=pca"] * (group == "dataset")
            config = compose_config(root, [*pca, f"{group}={name}"])
            found.update(kind for _, kind in components(config))
    return frozenset(found)


def has_unbounded_number(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        base, legal = get_args(kind)[:2]
        return not isinstance(legal, Bounds) and has_unbounded_number(base)
    return kind in (int, float) or any(map(has_unbounded_number, get_args(kind)))


@pytest.mark.slow
def test_every_number_of_every_component_has_a_legal_range():
    found = {
        f"{kind.__qualname__}.{item.name}"
        for kind in configured_classes()
        for item in fields(kind)
        if item.init and has_unbounded_number(item.type)
    }

    assert not found


@pytest.mark.slow
def test_no_field_accepts_infinite_or_huge_numbers():
    for kind in configured_classes():
        for item in (item for item in fields(kind) if item.init):
            for value in OUT_OF_RANGE:
                with pytest.raises(ConfigurationError, match=f"^probe.{item.name} expects"):
                    require_type(f"probe.{item.name}", item.type, value)


@pytest.mark.parametrize(
    ("kind", "legal", "words"),
    [
        (Count, (1, 10**9), "a whole number in [1, 1000000000]"),
        (Fraction, (0, 0.5, 1), "a number in [0, 1]"),
        (OpenFraction, (1e-9, 0.999), "a number in (0, 1)"),
        (Annotated[float, Bounds(-1, 1, allow_high=False)], (-1, 0.999), "a number in [-1, 1)"),
        (PositiveRange, ([0.1, 2], (1, 1)), "a list of 2 items, each a number in (0, 1000000000]"),
        (Annotated[list[int], ListLength(1, 3)], ([1], [1, 2, 3]), "a list of 1 to 3 items"),
    ],
)
def test_range_ends_are_legal_and_named_in_the_message(kind, legal, words):
    for value in legal:
        require_type("probe.key", kind, value)
    with pytest.raises(ConfigurationError):
        require_type("probe.key", kind, True)
    with pytest.raises(ConfigurationError) as caught:
        require_type("probe.key", kind, "x" * 10_000)

    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_choice_of_numbers_refuses_equal_values_and_only_numbers_are_quoted():
    for value in (True, 1.0):
        with pytest.raises(ConfigurationError):
            require_type("probe.key", Literal[1, 2], value)
    for value, hint in ((3, ("probe.key='3'",)), (True, ("probe.key='True'",)), ([3], ())):
        with pytest.raises(ConfigurationError) as refused:
            require_type("probe.key", str, value)
        assert refused.value.hint == hint


@dataclass
class Inner:
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    one: float = 0.5
    ranged: Positive = 0.5
    some: Sequence[Rate] = (0.5,)
    optional: Positive | None = None
    one_or_some: float | Sequence[float] = 0.5
    by_name: Mapping[str, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    count: Count = 1
    count_or_share: Count | FractionBelowOne = 1
    flag: bool | float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "outer")


POSTPONED = """from __future__ import annotations
from dataclasses import dataclass
from ssl_bench.composition.fields import Positive, check_fields

@dataclass(frozen=True)
class Outer:
    some: tuple[Positive, ...]

made = Outer((1, 2.5))
check_fields(made, "outer")
"""


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("ranged", 2, 2.0), ("some", (1, 2.5), (1.0, 2.5)), ("some", [1, 2], [1.0, 2.0]),
        ("optional", 1, 1.0), ("optional", None, None), ("one_or_some", 3, 3.0),
        ("one_or_some", [3], [3.0]), ("by_name", {"a": 1}, {"a": 1.0}),
        ("inner", Inner(1), Inner(1.0)), ("count", 1, 1), ("count_or_share", 1, 1),
        ("flag", True, True),
    ],
)  # fmt: skip
def test_a_number_in_a_field_of_floats_is_a_float(name, given, kept):
    assert repr(getattr(Outer(**{name: given}), name)) == repr(kept)


def test_postponed_annotations_are_checked_and_converted():
    space: dict[str, Any] = {"__name__": __name__}
    exec(POSTPONED, space)

    assert repr(space["made"].some) == "(1.0, 2.5)"
    with pytest.raises(ConfigurationError, match=r"outer\.some"):
        check_fields(space["Outer"](("x",)), "outer")


@pytest.mark.parametrize("task", choices("probe"))
def test_settings_are_equal_for_1_and_1_point_0(task):
    probe = build(compose_config("probing", [f"probe={task}"]), "probe")
    for item in (item for item in fields(probe) if item.init):
        for number in (0, 1, 2):
            try:
                with unchecked_types():
                    made = [replace(probe, **{item.name: kind(number)}) for kind in (int, float)]
            except ConfigurationError:
                continue
            settings = [json.dumps(one.settings(), sort_keys=True, default=list) for one in made]
            assert settings[0] == settings[1], item.name


def test_a_long_list_is_shortened_in_an_error():
    with pytest.raises(ConfigurationError, match=r"got \[0,.*,11,\.\.\.\]"):
        require_type("key", int, list(range(20)))
