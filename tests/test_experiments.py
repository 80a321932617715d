"""The files in configs/experiment: they build, say what they cost, and differ in what they name."""

import pytest

from pretrain.options import describe, differences
from pretrain.train import Pretraining
from ssl_bench.composition import build, choices, compose_config, config_folder

EXPERIMENTS = choices("experiment")


def experiment(name, *overrides) -> Pretraining:
    plan = build(compose_config("pretraining", [f"experiment={name}", *overrides]))
    assert isinstance(plan, Pretraining)
    return plan


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_builds_and_says_what_it_costs_and_where_its_figures_are_from(name):
    plan = experiment(name)
    text = (config_folder() / "experiment" / f"{name}.yaml").read_text()

    sizes = plan.objective.crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
    assert all(size % plan.encoder.patch_size == 0 for size in sizes)
    assert "# Cost: " in text
    is_base = any(other.startswith(f"{name}_") for other in EXPERIMENTS)
    assert is_base or "# Expected: " in text


@pytest.mark.parametrize("data", ["dino_imagenet", "dino_tiny_imagenet"])
def test_the_arms_of_a_comparison_differ_in_model_and_optimizer_alone(data):
    arms = {
        (model, optimizer): describe(experiment(f"{data}_{model}_{optimizer}"))
        for model in ("skip", "skipless")
        for optimizer in ("adamw", "soap")
    }
    reference = arms["skip", "adamw"]
    for (model, optimizer), arm in arms.items():
        changed = {line.split(".")[0] for line in differences(reference, arm)}
        wanted = {"model": model == "skipless", "optimizer": optimizer == "soap"}
        assert changed == {name for name, is_changed in wanted.items() if is_changed}


def test_the_depths_of_table_3_change_the_depth_alone():
    twelve = describe(experiment("dino_imagenet_skipless_adamw"))
    for depth in (9, 10, 11):
        other = describe(experiment(f"dino_imagenet_skipless_adamw_depth{depth}"))
        assert differences(twelve, other) == [f"model.depth: 12 -> {depth}"]


def test_what_is_typed_wins_over_the_experiment():
    plan = experiment("dino_imagenet_skip_adamw", "train.epochs=100", "optimizer=soap")
    assert plan.train.epochs == 100
    assert type(plan.optimizer).__name__ == "Soap"


def test_imagenet_runs_are_those_of_the_papers_tables():
    plan = experiment("dino_imagenet_skipless_soap")
    model = plan.model
    assert (model.dim, model.depth, model.num_heads, model.patch_size) == (384, 12, 6, 16)
    assert [model.skip_attention, model.skip_mlp, model.drop_path] == [False, False, 0]
    assert plan.train.epochs == 300
