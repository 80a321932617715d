"""ConvMixer under the trainer: what is decayed, counted, resumed, refused, and then probed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import ENCODER
from pretrain.crops.single import SingleCrop
from pretrain.description import describe, update_description
from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, Soap, parameter_groups
from pretrain.options import TrainOptions
from pretrain.plan import Pretraining
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ConvMixerConfig, ViTConfig, build_encoder, load_encoder
from ssl_bench.results import ResultStore
from tests.pretrain import plans
from tests.pretrain.plans import CPU
from tests.support.faults import class_folders
from tests.support.runs import assert_goes_on_to_the_bit, log_rows

TINY = ConvMixerConfig(image_size=16, patch_size=4, dim=12, depth=3, kernel_size=3)


def test_norms_are_never_decayed_and_frozen_filters_never_trained():
    model = build_encoder(replace(TINY, frozen_filters=True), seed=0)
    decayed, exempt = parameter_groups(model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    assert {names[id(p)] for p in decayed["params"]} == {
        "patch_embed.proj.weight",
        *(f"blocks.{layer}.pointwise.weight" for layer in range(3)),
    }
    assert {"blocks.0.norm1.weight", "patch_norm.bias", "blocks.2.depthwise.bias"} <= {
        names[id(p)] for p in exempt["params"]
    }


def test_a_teacher_of_running_averages_is_refused_in_one_line():
    with pytest.raises(ConfigurationError, match=r"=dino expects a Vision Tr.*=supervised"):
        Dino().build(TINY, Timeline(10, 5), seed=0)


def test_a_run_of_a_version_with_the_class_elsewhere_can_be_resumed():
    older = {**describe(TINY), "_target_": "ssl_bench.models.config.ConvMixerConfig"}

    assert update_description(older, TINY) == describe(TINY)
    assert update_description(older, ViTConfig()) == older


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Six training and six validation pictures of two classes."""
    return class_folders(tmp_path_factory.mktemp("classes"))


def plan_of(root, config=TINY, **parts) -> Pretraining:
    objective = Supervised(crops=SingleCrop(num_ops=0))
    parts = {"optimizer": AdamW(lr=0.3), "batch_size": 3, "max_steps": 6, **parts}
    return plans.plan_of(root, model=config, objective=objective, **parts)


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.3), Soap(lr=0.3, precondition_frequency=2)])
def test_a_stopped_run_goes_on_to_the_very_bits_of_an_uninterrupted_one(
    pictures, tmp_path, optimizer
):
    plan = plan_of(pictures, replace(TINY, frozen_filters=True), optimizer=optimizer)

    path = assert_goes_on_to_the_bit(plan, tmp_path, parts=3, steps=3)

    weights, start = load_encoder(str(path)).module.state_dict(), build_encoder(TINY, seed=3)
    changed = {n for n, v in start.state_dict().items() if not torch.equal(v, weights[n])}
    assert changed == {name for name in weights if not name.endswith("depthwise.weight")}
    assert weights["blocks.2.norm1.num_batches_tracked"] == 6


def test_a_monitor_looks_with_the_statistics_of_the_run_and_leaves_them_alone(pictures, tmp_path):
    plan = plan_of(pictures)
    plan.run(tmp_path / "without", device="cpu")
    seen = plans.monitored(plan, knn_epochs=1, accuracy_epochs=1, neighbours=2)
    seen.run(tmp_path / "with", device="cpu")

    one, other = ((tmp_path / name / ENCODER).read_bytes() for name in ("with", "without"))
    assert one == other
    assert "knn_top1" in log_rows(tmp_path / "with")[-1]


@pytest.mark.slow
def test_a_checkpoint_goes_from_pretraining_through_the_probes(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "model=conv_mixer_skipless model.init=covariance model.image_size=32 model.dim=12"
    words += " model.depth=2 model.patch_size=8 objective=supervised data.labels=true"
    words += " train.batch_size=3 train.max_steps=4 train.num_workers=0"
    arguments = ["--data-root", str(pictures), "--out", "run", *words.split()]
    assert main(["pretrain", *arguments]) == 0

    probing = ["--layer", "all", "--checkpoint", "run", "--out", "results"]
    toy = ["--dataset", "toy", "dataset.num_train=4", "dataset.num_val=3"]
    classes = ["--dataset", "class_folders", "--data-root", str(pictures)]
    knn = [*classes, "probe.neighbours=[1,2]", "probe.facet=patch_mean"]
    small = ["probe.image_size=64", "probe.num_workers=1"]
    for task, more in {
        "knn": knn,
        "clustering": [*classes, "probe.facet=patch_mean"],
        "segmentation": [*toy, "probe.protocol=fast", *small, "probe.training.epochs=2"],
        "pca": [*toy, "probe.image_size=64", "probe.panels=2"],
        "retrieval": [*toy, *small, "probe.neighbours=5"],
        "geometry": [*toy, *small, "probe.views=2", "probe.facet=patch_mean"],
        "tokencut": [*toy, "probe.facet=token"],
        "discovery": [*toy, "probe.facet=token"],
    }.items():
        assert main(["probe", "--task", task, *probing, *more]) == 0, task

    found = ResultStore(tmp_path / "results").records()
    assert {record.layer for record in found} == {0, 1}
    assert {record.task for record in found} == {
        *("knn", "segmentation", "pca", "retrieval", "tokencut", "geometry"),
        *("clustering", "discovery"),
    }


def test_a_step_that_learns_nothing_leaves_the_batch_statistics_too():
    timeline = Timeline(2, 2)
    learner = Supervised().build(TINY, timeline, seed=0, class_names=("a", "b"))
    options = TrainOptions(epochs=1, batch_size=4)
    trainer = Trainer(learner, AdamW(), options, timeline, TrainingRanks(device=CPU))
    before = {name: value.clone() for name, value in learner.student.state_dict().items()}
    views = (torch.full((4, 3, 16, 16), torch.nan), torch.tensor([0, 1, 0, 1]), torch.tensor(1.0))
    trainer.take_step(0, [views])
    lost = {name: value.clone() for name, value in learner.student.state_dict().items()}
    trainer.take_step(1, [(torch.randn(4, 3, 16, 16), *views[1:])])
    statistics = [name for name in before if "running" in name]
    assert all(torch.equal(before[name], lost[name]) for name in statistics)
    after = learner.student.state_dict()
    assert not any(torch.equal(after[name], lost[name]) for name in statistics)
