"""Recipes and the papers' runs: they build, say what they cost, and differ in what they name."""

import json
import re
from functools import cache

import pytest
import torch

from pretrain.description import describe, differences
from pretrain.train import Pretraining
from ssl_bench.cli.reproduce import is_run
from ssl_bench.composition.choices import choices, config_folder, experiments
from ssl_bench.composition.compose import as_plain, build, compose_config
from ssl_bench.models import ConvMixerConfig, TimmConfig, ViTConfig, build_encoder
from ssl_bench.tables.published import published_tables
from tests.support.faults import unchecked_types

EXPERIMENTS = choices("experiment")
RUNS = experiments()
RECIPES = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
# Stems of experiments, and what the arms under them may differ in.
COMPARISONS = {
    "convmixer24_cifar10": {"model", "train"},
    "convmixer_cifar10": {"model", "train"},
    "convmixer_patch1_cifar10": {"model", "train"},
    "convmixer_skip_cifar10": {"model"},
    "convnext_imagenet": {"model", "train"},
    "convmixer_imagenet": {"model", "train"},
    "deit_imagenet": {"model"},
    "dino_100_imagenet": {"model"},
    "dino_300_imagenet": {"model"},
    "dino_imagenet": {"model", "optimizer"},
    "dino_photographs": {"model", "optimizer"},
    "dino_tiny_imagenet": {"model", "optimizer"},
    "graying_imagenet": {"model"},
    "graying_tiny_imagenet": {"model"},
    "initialisation_readings": {"model"},
    "mae_imagenet_dct": {"objective"},
    "mae_imagenet_finetune": {"model"},
    "convmixer_ablation": {"model", "objective", "train"},
    "mimetic_cifar10": {"model"},
    "mimetic_copying": {"model", "objective", "optimizer", "train"},
    "mimetic_mlp_cifar10": {"model"},
    "mimetic_mlp_imagenet": {"model"},
    "one_skip_cifar10": {"model"},
    "osa_mnist": {"model", "train"},
    "supervised_imagenet": {"model", "optimizer"},
    "supervised_tiny_imagenet": {"model", "optimizer"},
}


@cache
def experiment(name, *overrides) -> Pretraining:
    """Its recipe and what it changes, typed; that its own name says the same is a test of its own.

    A hundred runs of a recipe so take two seconds instead of twenty.
    """
    run = RUNS[name]
    changes = (f"{key}={json.dumps(value)}" for key, value in run.changes.items())
    words = [f"experiment={run.recipe}", *changes, *overrides]
    with unchecked_types():
        plan = build(compose_config("pretraining", words))
    assert isinstance(plan, Pretraining)
    return plan


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("convmixer")) for n in RECIPES],
)
def test_every_experiment_builds(recipe):
    for name in (name for name, run in RUNS.items() if run.recipe == recipe):
        plan = experiment(name)
        sizes = plan.objective.crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
        assert all(size % plan.encoder.patch_size == 0 for size in sizes), name


def test_the_name_of_a_run_composes_its_recipe_with_its_changes():
    # Of each recipe one run, one that takes another file of a group if there is one.
    changed = [run for run in RUNS.values() if run.changes]
    changed.sort(key=lambda run: any("." not in key for key in run.changes))
    last = {run.recipe: run.name for run in changed}
    for name in last.values():
        plan = build(compose_config("pretraining", [f"experiment={name}"]))
        assert describe(plan) == describe(experiment(name)), name


def test_every_recipe_is_a_run_of_a_paper_and_every_run_takes_a_recipe():
    assert set(RECIPES) <= set(RUNS)
    assert {run.recipe for run in RUNS.values()} == set(RECIPES)
    assert set(EXPERIMENTS) == set(RUNS)
    assert all(not RUNS[name].changes for name in RECIPES)


@cache
def sections(*overrides) -> dict:
    return as_plain(compose_config("pretraining", overrides))


def at(values, key):
    for name in key.split("."):
        values = values[name]
    return values


def test_no_run_repeats_a_value_of_its_recipe():
    for name, run in RUNS.items():
        files = {key: value for key, value in run.changes.items() if "." not in key}
        recipe = [f"experiment={run.recipe}"]
        base = sections(*recipe, *(f"{key}={value}" for key, value in files.items()))

        repeated = [key for key in files if base[key] == sections(*recipe)[key]]
        repeated += [key for key, v in run.changes.items() if "." in key and at(base, key) == v]

        assert not repeated, name


def test_a_row_stands_for_a_run_of_its_own_and_trains_on_the_images_of_the_table():
    for table in published_tables():
        for row, address in table.runs.items():
            if not is_run(address):
                continue
            name, _, epoch = address.partition("@")
            scored = [column for column in table.columns if (row, column.name) in table.values]
            datasets = {column.dataset for column in scored if column.task == "supervised"}

            assert datasets <= {RUNS[name].images}, (table.name, row)
            assert list(table.runs.values()).count(address) == 1, (table.name, row)
            assert not epoch or int(epoch) < experiment(name).train.epochs, (table.name, row)


def rows_of(name) -> dict[str, Pretraining]:
    """The runs of a table by its rows."""
    (table,) = [one for one in published_tables() if one.name == name]
    return {row: experiment(run.partition("@")[0]) for row, run in table.runs.items()}


def vit(plan) -> ViTConfig:
    assert isinstance(plan.model, ViTConfig)
    return plan.model


def mixer(plan) -> ConvMixerConfig:
    assert isinstance(plan.encoder, ConvMixerConfig)
    return plan.encoder


@pytest.mark.slow
def test_rows_that_name_their_sizes_have_them():
    for row, plan in rows_of("cifar10").items():
        width, depth, heads, init = re.findall(r"\d+|default|mimetic", row)
        sizes = [vit(plan).dim, vit(plan).depth, vit(plan).num_heads, vit(plan).init]
        assert sizes == [int(width), int(depth), int(heads), init]
    for row, plan in rows_of("convmixer_cifar10").items():
        size, ending = mixer(plan).kernel_size, ", frozen" if mixer(plan).frozen_filters else ""
        wanted = f"{size} x {size}, {plan.train.epochs} epochs, {mixer(plan).init} init{ending}"
        assert row == wanted
    for name in ("table3", "table4"):
        for row, plan in rows_of(name).items():
            kind = "skip" if vit(plan).skip_mlp else "skipless"
            assert row == f"{kind}, {vit(plan).depth} blocks"


@pytest.mark.slow
def test_rows_of_convolutions_on_imagenet_have_their_sizes_and_their_covariance():
    for row, plan in rows_of("convmixer").items():
        one = plan.encoder
        assert isinstance(one, ConvMixerConfig | TimmConfig)
        options = [one.init_options.get(name) for name in ("sigma_0", "v_sigma", "a_sigma")]
        shares = " ".join(f"{value:g}".lstrip("0") for value in options if value is not None)
        init = f"{one.init} init {shares}".rstrip()
        if isinstance(one, ConvMixerConfig):
            sizes = f"ConvMixer-{one.dim}/{one.depth}, patch {one.patch_size}"
            assert (one.kernel_size, one.image_size) == (9, 224)
        else:
            assert one.patch_size == 4
            sizes = f"ConvNeXt-{one.name.removeprefix('convnext_').title()}, patch 4"
        ending = ", frozen" if one.frozen_filters else ""
        assert row == f"{sizes}, {plan.train.epochs} epochs, {init}{ending}"


def test_rows_of_graying_have_its_kind_and_exponent():
    for row, plan in rows_of("graying_exponent").items():
        kind, exponent = vit(plan).graying, vit(plan).graying_exponent
        wanted = f"{kind.upper()}, exponent {exponent}"
        assert row == ("no token graying" if kind == "none" else wanted)
    for row, plan in rows_of("tiny_imagenet").items():
        kind = "" if vit(plan).graying == "none" else f", {vit(plan).graying.upper()} token graying"
        assert row == f"{vit(plan).attention} attention{kind}"


def test_rows_of_the_supervised_table_have_its_skips_initialisation_and_optimizer():
    for row, plan in rows_of("table1").items():
        optimizer = type(plan.optimizer).__name__.lower()
        init = {"skipless": "proposed", "default": "default"}[vit(plan).init]
        kind = "skip" if vit(plan).skip_mlp else f"skipless, {init} init"
        assert row == f"{kind}, {optimizer}"


@pytest.mark.parametrize(
    "stem",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("conv")) for n in COMPARISONS],
)
def test_the_arms_of_a_comparison_differ_in_what_they_name_alone(stem):
    arms = {name: describe(experiment(name)) for name in EXPERIMENTS if name.startswith(f"{stem}_")}
    first = describe(experiment(stem))

    changed = {
        name: {line.split(".")[0] for line in differences(first, arms[name])} for name in arms
    }

    assert set().union(*changed.values()) <= COMPARISONS[stem]
    assert len({str(arm) for arm in arms.values()}) == len(arms)


def test_the_arms_of_one_skip_are_without_it_and_begin_with_the_same_weights():
    """Figure 1c of "Always Skip Attention"."""
    names = [f"one_skip_cifar10_{arm}" for arm in ("both", "no_mlp", "no_attention")]
    plans = [experiment(name, "model.depth=2") for name in names]
    first, *others = (build_encoder(plan.encoder, seed=3).state_dict() for plan in plans)

    changed = [differences(describe(plans[0]), describe(plan)) for plan in plans]

    assert changed == [
        [], ["model.skip_mlp: True -> False"], ["model.skip_attention: True -> False"],
    ]  # fmt: skip
    assert all(other.keys() == first.keys() for other in others)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_what_is_typed_wins_over_the_experiment():
    plan = experiment("dino_imagenet_skip_adamw", "train.epochs=100", "optimizer=soap")
    assert plan.train.epochs == 100
    assert type(plan.optimizer).__name__ == "Soap"


def test_a_fine_tuned_encoder_is_the_one_that_was_pretrained():
    """But for what may differ: positions may be trained from now on, and blocks dropped."""
    for ending in ("", "_dct"):
        before = describe(experiment(f"mae_imagenet{ending}").encoder)
        now = describe(experiment(f"mae_imagenet_finetune{ending}").encoder)
        assert differences(before, now) == [
            "drop_path: 0.0 -> 0.1",
            "position_embedding: sinusoidal -> learned",
        ]
