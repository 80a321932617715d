"""Test the training settings that reproduce published papers."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.description import describe, find_differences
from pretrain.plan import Pretraining
from ssl_bench.cli.reproduce import is_run
from ssl_bench.composition.choices import choices, config_folder, experiments
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.models.initialisers import fill_options
from ssl_bench.tables.published import load_published_tables
from tests.support.faults import unchecked_types

EXPERIMENTS = choices("experiment")
RUNS = experiments()
RECIPES = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))


@cache
def experiment(name, *overrides) -> Pretraining:
    run = RUNS[name]
    changes = (f"{key}={json.dumps(value)}" for key, value in run.changes.items())
    # `experiment=NAME` gives the same configuration, but composing it takes longer.
    words = [f"experiment={run.recipe}", *changes, *overrides]
    with unchecked_types():
        plan = build(compose_config("pretraining", words))
    assert isinstance(plan, Pretraining)
    return plan


# The fast tests build a recipe of each kind of model and objective.
FIRST = [name for name in RECIPES if not name.startswith("convmixer")]


@pytest.mark.parametrize("names", [FIRST, pytest.param(EXPERIMENTS, marks=pytest.mark.slow)])
def test_every_experiment_builds(names):
    for run in names:
        plan = experiment(run)
        sizes = plan.objective.crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
        assert all(size % plan.encoder.patch_size == 0 for size in sizes), run


@pytest.mark.slow
def test_run_names_select_a_recipe_and_its_changes():
    # Some runs choose another file of a group, the others only change values.
    grouped = [n for n, run in RUNS.items() if any("." not in key for key in run.changes)]
    plain = [n for n, run in RUNS.items() if run.changes and n not in grouped]
    for name in (*grouped[::20], *plain[::40]):
        plan = build(compose_config("pretraining", [f"experiment={name}"]))
        assert describe(plan) == describe(experiment(name)), name


def test_every_run_has_a_recipe():
    assert {run.recipe for run in RUNS.values()} == set(RECIPES)
    assert set(EXPERIMENTS) == set(RUNS)


def test_each_row_has_its_own_run_on_the_table_images():
    for table in load_published_tables():
        for row, address in table.runs.items():
            if not is_run(address):
                continue
            name, _, epoch = address.partition("@")
            scored = [column for column in table.columns if (row, column.name) in table.values]
            datasets = {column.dataset for column in scored if column.task == "supervised"}

            assert datasets <= {RUNS[name].images}, (table.name, row)
            assert list(table.runs.values()).count(address) == 1, (table.name, row)
            assert not epoch or int(epoch) < experiment(name).train.epochs, (table.name, row)


def row_of_depth(plan) -> str:
    return f"{'skip' if plan.model.skip_mlp else 'skipless'}, {plan.model.depth} blocks"


def row_of_exponent(plan) -> str:
    kind, exponent = plan.model.graying, plan.model.graying_exponent
    return "no token graying" if kind == "none" else f"{kind.upper()}, exponent {exponent}"


def row_of_graying(plan) -> str:
    kind = plan.model.graying.upper()
    return f"{plan.model.attention} attention" + f", {kind} token graying" * (kind != "NONE")


def row_of_table_1(plan) -> str:
    init = {"skipless": "proposed", "default": "default"}[plan.model.init]
    kind = "skip" if plan.model.skip_mlp else f"skipless, {init} init"
    return f"{kind}, {type(plan.optimizer).__name__.lower()}"


def row_of_sizes(plan) -> str:
    one = plan.model
    return f"width {one.dim}, {one.depth} blocks, {one.num_heads} heads, {one.init} init"


ROWS = {
    "table1": row_of_table_1, "table3": row_of_depth, "table4": row_of_depth,
    "cifar10": row_of_sizes, "graying_exponent": row_of_exponent, "tiny_imagenet": row_of_graying,
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_name_of_a_published_row_describes_its_run(name):
    (table,) = [one for one in load_published_tables() if one.name == name]
    for row, run in table.runs.items():
        assert row == ROWS[name](experiment(run.partition("@")[0]))


# Experiments whose names begin with one of these words form a group. A key lists the parts of the
# configuration in which the experiments of such a group may differ.
COMPARISONS = {
    "model": """convmixer_skip_cifar10 deit_imagenet dino_100_imagenet dino_300_imagenet
    graying_imagenet graying_tiny_imagenet initialisation_readings mae_imagenet_finetune
    mimetic_cifar10 mimetic_mlp_cifar10 mimetic_mlp_imagenet one_skip_cifar10""",
    "objective": "mae_imagenet_dct",
    "model optimizer": """dino_imagenet dino_photographs dino_tiny_imagenet supervised_imagenet
    supervised_tiny_imagenet""",
    "model train": """convmixer24_cifar10 convmixer_cifar10 convmixer_patch1_cifar10
    convnext_imagenet convmixer_imagenet osa_mnist""",
    "model objective train": "convmixer_ablation",
    "model objective optimizer train": "mimetic_copying",
}


@pytest.mark.parametrize(
    "parts", [pytest.param(n, marks=[pytest.mark.slow] * ("train" in n)) for n in COMPARISONS]
)
def test_compared_experiments_differ_only_in_the_named_parts(parts):
    for stem in COMPARISONS[parts].split():
        arms = [name for name in EXPERIMENTS if name.startswith(f"{stem}_")]
        described = [describe(experiment(name)) for name in arms]
        first = describe(experiment(stem))

        changed = {line.split(".")[0] for arm in described for line in find_differences(first, arm)}

        assert changed <= set(parts.split()), stem
        assert len(set(map(str, described))) == len(described), stem


def test_a_fine_tuned_encoder_has_the_settings_of_its_pretraining():
    for ending in ("", "_dct"):
        before = describe(experiment(f"mae_imagenet{ending}").encoder)
        now = describe(experiment(f"mae_imagenet_finetune{ending}").encoder)
        assert find_differences(before, now) == [
            "drop_path: 0.0 -> 0.1",
            "position_embedding: sinusoidal -> learned",
        ]


PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
# The table below each experiment. Its fourth and fifth columns are a key and our value.
TABLES = {
    name: re.findall(r"^\|(?:[^|]*\|){3} `([\w.]+)` \| `([^`]*)`", section, re.MULTILINE)
    for name, section in re.findall(r"`experiment=(\w+)`(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


def compose_experiment(name: str) -> dict[str, Any]:
    found = compose_config("pretraining", [f"experiment={name}"])
    model = found["model"]
    return found | {
        "model": model | {"init_options": fill_options(model["init"], model["init_options"])}
    }


@pytest.mark.parametrize("name", TABLES)
def test_a_table_states_the_values_that_its_experiment_uses(name):
    config = compose_experiment(name)
    assert name in choices("experiment")
    assert len(TABLES[name]) >= 5
    for key, stated in TABLES[name]:
        value = config
        for part in key.split("."):
            value = value[part]
        assert repr(yaml.safe_load(stated)) == repr(value), key
