"""The arms, the figures and the page of the first 200 steps of every system."""

import json
from pathlib import Path

import pytest

from ssl_bench.composition.choices import config_folder
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.composition.papers import experiments
from ssl_bench.tables.published import published_tables
from tests.benchmarks.first_steps import falls, score
from tests.benchmarks.first_steps_arms import ARMS, SECTIONS
from tests.benchmarks.first_steps_page import page, published

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_words_of_an_arm_are_a_run_of_its_steps(arm):
    plan = build(compose_config("pretraining", arm.words(after="runs/before")))

    images = plan.data.limit or 32_000
    assert plan.train.timeline(images).total_steps == 200


def test_every_arm_is_an_experiment_and_begins_after_one_that_was_run():
    known, names = experiments(config_folder()), [arm.name for arm in ARMS]

    assert {arm.run for arm in ARMS} - {"convmixer_cifar10"} <= known.keys()
    assert len(set(names)) == len(ARMS) == sum(map(len, SECTIONS.values()))
    assert all(names.index(arm.after) < names.index(arm.name) for arm in ARMS if arm.after)


@pytest.mark.parametrize(
    ("last", "is_lower"),
    [([1.0, 2.0, 3.0], False), ([0.1, 1.1, 2.1], False), ([0.0, 0.1, 0.2], True)],
)
def test_a_loss_falls_by_more_than_twice_its_standard_error(last, is_lower):
    # Deviations of 1 and three steps at both ends: .9 lies within twice .82, 1.9 without twice .58.
    assert falls([1.0, 2.0, 3.0], last) == is_lower


def test_a_run_says_its_accuracy_its_letters_or_its_share_of_the_mean():
    assert score([{"loss": 1.0}, {"loss": 0.5, "val_top1": 30.0, "val_top5": 80.0}]) == {
        "val_top1": 30.0
    }
    assert score([{"letters_8": 5.0, "strings_8": 0.0}]) == {"letters_8": 5.0}
    assert score([{"loss": 0.6, "mean_loss": 0.8}]) == {"of the mean's loss": pytest.approx(0.75)}


def test_published_cells_are_those_of_the_row_of_a_run():
    tables = published_tables()

    assert published("graying_imagenet_swin_s_dct", tables) == (
        "81.6 top-1 on imagenet1k (table of ImageNet-1k); "
        "95.6 top-5 on imagenet1k (table of ImageNet-1k)"
    )
    assert published("mimetic_cifar10_192_12_6_mimetic", tables) == (
        "91.38 top-1 on cifar10 (table 3.3, table 3.4, table 3.7)"
    )
    assert published("mimetic_copying_default", tables) == ""


def test_the_page_is_that_of_the_committed_figures():
    figures = json.loads((ROOT / "results/benchmarks/first_steps-cpu.json").read_text())

    assert (ROOT / "results/tables/first_steps.md").read_text() == page(figures)
