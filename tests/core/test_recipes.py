"""docs/recipes.md says what the experiments do, and marks all that differs from its source."""

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from pretrain.schedules import Cosine
from pretrain.train import Run
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import as_plain, build, compose_config
from ssl_bench.errors import Preempted
from ssl_bench.models.initialisers import in_full
from tests.support.faults import unchecked_types

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
# Two of the first epoch and one of the second.
STEPS = 3
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
    found = as_plain(compose_config("pretraining", [f"experiment={name}"]))
    model = found["model"]
    told = in_full(model["init"], model["init_options"])
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


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """Two classes of two pictures; two steps of two an epoch."""
    root = tmp_path_factory.mktemp("photographs")
    coarse = np.random.default_rng(0).integers(0, 256, (4, 12, 16, 3), dtype=np.uint8)
    for number, pixels in enumerate(coarse):
        for split in ("train", "val"):
            folder = root / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(pixels).resize((320, 240), Image.Resampling.BICUBIC)
            picture.save(folder / f"{number}.jpg")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # SOAP's first step decomposes a matrix of the size of every side that it preconditions.
        (
            "supervised_imagenet_skipless_soap",
            ["model.depth=1", "optimizer.max_precond_dim=1024"],
        ),
        ("dino_imagenet_skip_soap", ["model.depth=1", "objective.hidden_dim=512"]),
        ("deit_imagenet_vit_b", ["model.depth=1", "train.repeats=2"]),
    ],
)
def test_a_recipe_as_it_is_written_takes_steps(photographs, tmp_path, monkeypatch, name, changes):
    """But for the batch and what would take minutes; the schedules are those of all epochs."""
    monkeypatch.setattr(Run, "_wants_to_stop", lambda run: run.step >= STEPS)
    root = photographs / "train" if name.startswith("dino") else photographs
    data = [f"data.root={root}", "train.batch_size=2", "train.num_workers=0"]
    quiet = ["monitor.accuracy_epochs=null", f"experiment={name}"]
    plan = build(compose_config("pretraining", [*quiet, *data, *changes]))

    with unchecked_types(), pytest.raises(Preempted, match=rf"after step {STEPS} of"):
        plan.run(tmp_path / "run", device="cpu")

    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    top = plan.optimizer.lr * 2 / 256
    warmup = round(2 * plan.train.warmup_epochs)
    assert [row["lr"] for row in rows] == pytest.approx(
        [Cosine(top, plan.train.final_lr, 2 * plan.train.epochs, warmup)(i) for i in range(STEPS)]
    )
    assert all(math.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert len({row["loss"] for row in rows}) == STEPS
