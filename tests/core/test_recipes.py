"""docs/recipes.md says what the experiments do, and marks all that differs from its source."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config
from ssl_bench.models.initialisers import fill_options

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
RECIPES = (
    "supervised_imagenet_skipless_soap",
    "deit_imagenet_vit_b",
    "dino_100_imagenet_skip_adamw",
    "dino_300_imagenet_skip_adamw",
    "dino_imagenet_skipless_soap",
    "mae_imagenet",
    "mae_imagenet_finetune",
    "graying_imagenet_vit_b_dct",
    "graying_tiny_imagenet_dct_softmax",
    "convmixer_cifar10_covariance",
    "mimetic_cifar10_mimetic",
    "osa_mnist_qr",
)


@dataclass(frozen=True)
class Row:
    """One hyperparameter: the source's, and ours.

    Attributes:
        key: Of the configuration; empty where there is none.
        differs: Whether it is marked so.
    """

    what: str
    theirs: str
    source: str
    key: str
    ours: str
    differs: bool


@cache
def tables() -> dict[str, list[Row]]:
    """The rows under each experiment of the page."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        name = re.search(r"`experiment=(\w+)`", section)
        assert name
        lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
        found[name[1]] = [row(line) for line in lines]
    return found


def row(line: str) -> Row:
    what, theirs, source, key, ours, mark = (cell.strip() for cell in line.split("|")[1:-1])
    return Row(what, theirs, source, key.strip("`"), ours, mark == "≠")


def value(cell: str) -> Any:
    """What stands first in a cell, between backquotes."""
    found = re.match(r"`([^`]*)`", cell)
    return yaml.safe_load(found[1]) if found else cell


@cache
def configuration(name: str) -> dict[str, Any]:
    found = compose_config("pretraining", [f"experiment={name}"])
    model = found["model"]
    told = fill_options(model["init"], model["init_options"])
    return found | {"model": model | {"init_options": told}}


def composed(name: str, key: str) -> Any:
    found = configuration(name)
    for part in key.split("."):
        found = found[part]
    return found


CASES = [(name, row) for name, rows in tables().items() for row in rows]


def test_every_recipe_has_a_table():
    assert tuple(tables()) == RECIPES
    assert set(RECIPES) <= set(choices("experiment"))
    assert all(len(rows) >= 5 for rows in tables().values())


@pytest.mark.parametrize("name", RECIPES)
def test_our_column_is_what_the_experiment_composes(name):
    ours = {row.key: value(row.ours) for row in tables()[name] if row.key}

    assert ours == {key: composed(name, key) for key in ours}
    assert {key: type(one) for key, one in ours.items()} == {
        key: type(composed(name, key)) for key in ours
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_is_marked_where_the_values_differ(name):
    compared = [row for row in tables()[name] if row.key and row.theirs.startswith("`")]

    wrong = [row.what for row in compared if row.differs != (value(row.theirs) != value(row.ours))]

    assert compared
    assert not wrong


def test_a_row_names_its_source_unless_the_source_is_silent():
    unsaid = [(name, row.what) for name, row in CASES if not row.source]
    links = re.findall(r"\]\((https://github\.com/[^)]*)\)", PAGE.read_text())

    assert all(row.theirs.startswith("not said") for _, row in CASES if not row.source), unsaid
    assert links
    assert all(re.search(r"/(blob|tree)/[0-9a-f]{40}/", link) for link in links)


def test_what_decides_a_run_is_in_every_table_of_a_published_code():
    wanted = {"train.epochs", "train.batch_size", "optimizer.lr", "train.warmup_epochs"}
    wanted |= {"train.weight_decay", "train.max_grad_norm", "train.decay_tokens", "train.final_lr"}
    for name in RECIPES:
        if "/blob/" in "".join(row.source for row in tables()[name]) and "cifar10" not in name:
            assert wanted <= {row.key for row in tables()[name]}
