"""The files in configs/experiment: they build, say what they cost, and differ in what they name."""

import re
from functools import cache

import pytest

from pretrain.crops.single import SingleCrop
from pretrain.description import describe, differences
from pretrain.train import Pretraining
from ssl_bench.composition.compose import build, choices, compose_config, config_folder
from ssl_bench.models import ConvMixerConfig, ViTConfig
from ssl_bench.models.initialisers.blocks import MimeticInit, initialiser_of
from ssl_bench.tables.published import published_table

EXPERIMENTS = choices("experiment")
# Experiments with a row of their own in a published table.
PUBLISHED = {
    "convmixer_cifar10_uniform": ("convmixer_cifar10", "uniform init, 200 epochs"),
    "convmixer_cifar10_covariance": ("convmixer_cifar10", "covariance init, 200 epochs"),
    "convmixer_imagenet_512_12_uniform": ("convmixer", "ConvMixer-512/12, uniform init"),
    "convmixer_imagenet_512_24_uniform": ("convmixer", "ConvMixer-512/24, uniform init"),
    "convmixer_imagenet_512_32_uniform": ("convmixer", "ConvMixer-512/32, uniform init"),
    "convmixer_imagenet_512_12_covariance": ("convmixer", "ConvMixer-512/12, covariance init"),
    "convmixer_imagenet_512_24_covariance": ("convmixer", "ConvMixer-512/24, covariance init"),
    "convmixer_imagenet_512_32_covariance": ("convmixer", "ConvMixer-512/32, covariance init"),
    "mae_imagenet": ("mae", "MAE"),
    "mae_imagenet_dct": ("mae", "MAE, DCT token graying"),
    "mae_imagenet_finetune": ("mae", "MAE"),
    "mae_imagenet_finetune_dct": ("mae", "MAE, DCT token graying"),
    "mimetic_cifar10_default": ("cifar10", "width 192, 12 blocks, 3 heads, default init"),
    "mimetic_cifar10_mimetic": ("cifar10", "width 192, 12 blocks, 3 heads, mimetic init"),
    "graying_imagenet_vit_s_plain": ("imagenet1k", "ViT-S"),
    "graying_imagenet_vit_s_dct": ("imagenet1k", "ViT-S, DCT token graying"),
    "graying_imagenet_vit_b_plain": ("imagenet1k", "ViT-B"),
    "graying_imagenet_vit_b_dct": ("imagenet1k", "ViT-B, DCT token graying"),
    "graying_tiny_imagenet_plain_linear": ("tiny_imagenet", "linear attention"),
    "graying_tiny_imagenet_svd_linear": (
        "tiny_imagenet",
        "linear attention, SVD token graying",
    ),
    "graying_tiny_imagenet_dct_linear": (
        "tiny_imagenet",
        "linear attention, DCT token graying",
    ),
    "graying_tiny_imagenet_plain_softmax": ("tiny_imagenet", "softmax attention"),
    "graying_tiny_imagenet_svd_softmax": (
        "tiny_imagenet",
        "softmax attention, SVD token graying",
    ),
    "graying_tiny_imagenet_dct_softmax": (
        "tiny_imagenet",
        "softmax attention, DCT token graying",
    ),
    "osa_mnist_qr": ("mnist", "OSA (QR)"),
    "osa_mnist_newton_schulz": ("mnist", "OSA (Newton-Schulz)"),
    "osa_mnist_vit": ("mnist", "ViT"),
    "osa_mnist_vit_no_skip": ("mnist", "ViT, no skip"),
    "osa_mnist_vit_no_skip_no_norm": ("mnist", "ViT, no skip, no layer norm"),
    "supervised_imagenet_skip_adamw": ("table1", "skip, adamw"),
    "supervised_imagenet_skip_soap": ("table1", "skip, soap"),
    "supervised_imagenet_skipless_default_adamw": ("table1", "skipless, default init, adamw"),
    "supervised_imagenet_skipless_default_soap": ("table1", "skipless, default init, soap"),
    "supervised_imagenet_skipless_adamw": ("table1", "skipless, proposed init, adamw"),
    "supervised_imagenet_skipless_soap": ("table1", "skipless, proposed init, soap"),
}
# Stems of experiments, and what the arms under them may differ in.
COMPARISONS = {
    "convmixer_cifar10": {"model"},
    "convmixer_imagenet": {"model"},
    "deit_imagenet": {"model"},
    "dino_100_imagenet": {"model"},
    "dino_300_imagenet": {"model"},
    "dino_imagenet": {"model", "optimizer"},
    "dino_photographs": {"model", "optimizer"},
    "dino_tiny_imagenet": {"model", "optimizer"},
    "graying_imagenet": {"model"},
    "graying_tiny_imagenet": {"model"},
    "initialisation_readings": {"model"},
    "mae_imagenet_finetune": {"model"},
    "mimetic_cifar10": {"model"},
    "osa_mnist": {"model"},
    "supervised_imagenet": {"model", "optimizer"},
    "supervised_tiny_imagenet": {"model", "optimizer"},
}


def comment(name) -> str:
    """The comment of an experiment as one line."""
    text = (config_folder() / "experiment" / f"{name}.yaml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    return " ".join(lines)


@cache
def experiment(name, *overrides) -> Pretraining:
    plan = build(compose_config("pretraining", [f"experiment={name}", *overrides]))
    assert isinstance(plan, Pretraining)
    return plan


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_builds_and_says_what_it_costs_and_where_its_figures_are_from(name):
    plan = experiment(name)

    sizes = plan.objective.crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
    assert all(size % plan.encoder.patch_size == 0 for size in sizes)
    assert " Cost: " in comment(name)
    is_base = any(other.startswith(f"{name}_") for other in EXPERIMENTS)
    assert is_base or " Expected: " in comment(name)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_cost_is_a_number_or_stands_in_the_experiment_that_it_names(name):
    cost = comment(name).split(" Cost: ")[1]

    named = re.match(r"(?:see|as) (\w+)", cost)
    assert re.search(r"\d", cost) or (named and named[1] in EXPERIMENTS)
    assert not re.search(r"\b(COST|EXPECTED|TODO|TBD|FIXME|XXX+)\b", comment(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_expected_is_the_published_value(name):
    table, row = PUBLISHED[name]
    published = published_table(table)
    expected = re.split(r"Expected: | Cost: ", comment(name))[1]

    for column in published.columns:
        decimals = 2 if published.paper == "mimetic_initialization" else 1
        assert f"{published.values[row, column.name]:.{decimals}f} %" in expected


@pytest.mark.parametrize("arm", ["default", "mimetic"])
def test_the_other_rows_of_cifar10_stand_in_the_comment(arm):
    text = comment(f"mimetic_cifar10_{arm}")
    for row, _ in published_table("cifar10").values:
        width, depth, heads, init = re.findall(r"\d+|default|mimetic", row)
        if init == arm and (width, depth, heads) != ("192", "12", "3"):
            value = published_table("cifar10").values[row, "top-1"]
            assert f"{width}/{depth}/{heads} {value:.2f}" in text


def test_the_exponents_of_graying_stand_in_the_comment():
    text = comment("graying_imagenet_vit_b_dct").split(" Other exponents ")[1]
    by_dct, by_svd = text.split("model.graying=svd ")
    for (row, _), value in published_table("graying_exponent").values.items():
        kind, _, exponent = row.partition(", exponent ")
        if exponent not in ("", "0.95"):
            assert f"{exponent} {value}" in {"DCT": by_dct, "SVD": by_svd}[kind].replace("`", "")


@pytest.mark.parametrize("stem", COMPARISONS)
def test_the_arms_of_a_comparison_differ_in_what_they_name_alone(stem):
    arms = {name: describe(experiment(name)) for name in EXPERIMENTS if name.startswith(f"{stem}_")}
    first = describe(experiment(stem))

    changed = {
        name: {line.split(".")[0] for line in differences(first, arms[name])} for name in arms
    }

    assert set().union(*changed.values()) <= COMPARISONS[stem]
    assert len({str(arm) for arm in arms.values()}) == len(arms)


@pytest.mark.parametrize(
    "data", ["dino_imagenet", "dino_tiny_imagenet", "supervised_tiny_imagenet"]
)
def test_an_arm_is_the_model_and_the_optimizer_of_its_name(data):
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


@pytest.mark.parametrize("data", ["dino_imagenet", "dino_tiny_imagenet"])
def test_the_depths_of_table_3_change_the_depth_alone(data):
    twelve = describe(experiment(f"{data}_skipless_adamw"))
    for depth in (9, 10, 11):
        other = describe(experiment(f"{data}_skipless_adamw_depth{depth}"))
        assert differences(twelve, other) == [f"model.depth: 12 -> {depth}"]


def test_what_is_typed_wins_over_the_experiment():
    plan = experiment("dino_imagenet_skip_adamw", "train.epochs=100", "optimizer=soap")
    assert plan.train.epochs == 100
    assert type(plan.optimizer).__name__ == "Soap"


def test_imagenet_runs_are_those_of_the_papers_tables():
    plan = experiment("dino_imagenet_skipless_soap")
    model = plan.model
    assert isinstance(model, ViTConfig)
    assert (model.dim, model.depth, model.num_heads, model.patch_size) == (384, 12, 6, 16)
    assert [model.skip_attention, model.skip_mlp, model.drop_path] == [False, False, 0]
    assert plan.train.epochs == 300


@pytest.mark.parametrize(
    ("name", "other", "changed"),
    [
        (
            "mimetic_cifar10_default",
            "mimetic_cifar10_mimetic",
            ["model.init: default -> mimetic", "model.position_embedding: learned -> sinusoidal"],
        ),
        (
            "graying_imagenet_vit_b_plain",
            "graying_imagenet_vit_b_dct",
            ["model.graying: none -> dct"],
        ),
        *(
            (name, f"{name}_dct", ["model.graying: none -> dct"])
            for name in ("mae_imagenet", "mae_imagenet_finetune")
        ),
        (
            "convmixer_cifar10_uniform",
            "convmixer_cifar10_covariance",
            ["model.init: uniform -> covariance"],
        ),
        *(
            (
                f"convmixer_imagenet_512_{depth}_uniform",
                f"convmixer_imagenet_512_{depth}_covariance",
                [
                    "model.init: uniform -> covariance",
                    f"model.init_options.a_sigma: None -> {a_sigma}",
                    "model.init_options.sigma_0: None -> 0.15",
                    f"model.init_options.v_sigma: None -> {v_sigma}",
                ],
            )
            for depth, v_sigma, a_sigma in ((12, 0.5, 0.25), (24, 0.5, 0.25), (32, 0.25, 1.0))
        ),
        (
            "supervised_tiny_imagenet_skipless_soap",
            "supervised_tiny_imagenet_skipless_default_soap",
            ["model.init: skipless -> default"],
        ),
    ],
)
def test_two_arms_differ_by_these_lines(name, other, changed):
    assert differences(describe(experiment(name)), describe(experiment(other))) == changed


def test_shorter_runs_of_a_convmixer_stand_in_the_comment():
    for (row, _), value in published_table("convmixer_cifar10").values.items():
        init, epochs = row.split()[0], row.split()[-2]
        text = comment(f"convmixer_cifar10_{init}")
        assert f"{value:.2f} % after {epochs}" in text


@pytest.mark.parametrize("depth", [12, 24, 32])
def test_the_convmixers_of_imagenet_have_the_sizes_of_the_thesis(depth):
    plan = experiment(f"convmixer_imagenet_512_{depth}_covariance")

    model, train = plan.encoder, plan.train
    assert isinstance(model, ConvMixerConfig)
    assert (model.dim, model.depth, model.patch_size, model.kernel_size) == (512, depth, 14, 9)
    assert (model.image_size, train.epochs, model.frozen_filters) == (224, 50, False)


def test_a_fine_tuned_encoder_is_the_one_that_was_pretrained():
    """But for what may differ: positions may be trained from now on, and blocks dropped."""
    for ending in ("", "_dct"):
        before = describe(experiment(f"mae_imagenet{ending}").encoder)
        now = describe(experiment(f"mae_imagenet_finetune{ending}").encoder)
        assert differences(before, now) == [
            "drop_path: 0.0 -> 0.1",
            "position_embedding: sinusoidal -> learned",
        ]


def test_the_row_of_the_cifar10_table_has_the_recipe_of_the_thesis():
    plan = experiment("mimetic_cifar10_mimetic")

    model, train, crops = plan.encoder, plan.train, plan.objective.crops
    assert (model.dim, model.depth, model.num_heads) == (192, 12, 3)
    assert (model.image_size, model.patch_size) == (32, 2)
    assert isinstance(crops, SingleCrop)
    assert (train.epochs, train.batch_size, train.weight_decay) == (100, 512, 0.01)
    assert plan.optimizer.lr * train.batch_size / 256 == pytest.approx(3e-3)
    assert min(crops.num_ops, crops.cutout) > 0
    shares = initialiser_of(model.init, model.init_options)
    assert isinstance(shares, MimeticInit)
    assert (shares.alpha1, shares.beta1, shares.alpha2, shares.beta2) == (0.7, 0.7, 0.4, 0.4)
