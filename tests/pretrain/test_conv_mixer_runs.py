"""Test the training of ConvMixers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import ENCODER
from pretrain.crops.single import SingleCrop
from pretrain.distributed import TrainingRanks
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, Soap, parameter_groups
from pretrain.options import TrainOptions
from pretrain.plan import Pretraining
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.cli.__main__ import main
from ssl_bench.models import ConvMixerConfig, build_encoder, load_encoder
from tests.pretrain import plans
from tests.pretrain.plans import CPU
from tests.support.faults import class_folders
from tests.support.runs import assert_resumes_exactly, log_rows

TINY = ConvMixerConfig(image_size=16, patch_size=4, dim=12, depth=3, kernel_size=3)
FROZEN = replace(TINY, frozen_filters=True)


def test_norms_are_not_decayed_and_frozen_filters_have_no_group():
    model = build_encoder(FROZEN, seed=0)
    decayed, exempt = parameter_groups(model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch_embed.proj.weight",
        *(f"blocks.{layer}.pointwise.weight" for layer in range(3)),
    }
    assert {"blocks.0.norm1.weight", "patch_norm.bias", "blocks.2.depthwise.bias"} <= {
        names[id(p)] for p in exempt["params"]
    }


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return class_folders(tmp_path_factory.mktemp("classes"))


def plan_of(root, **parts) -> Pretraining:
    objective = Supervised(crops=SingleCrop(num_ops=0))
    parts = {"model": TINY, "batch_size": 3, "max_steps": 6, **parts}
    return plans.plan_of(root, objective=objective, **parts)


def test_a_stopped_run_with_frozen_filters_continues_bit_for_bit(images, tmp_path):
    optimizer = Soap(lr=0.3, precondition_frequency=2)
    plan = plan_of(images, model=FROZEN, optimizer=optimizer, max_steps=4)
    path = assert_resumes_exactly(plan, tmp_path, parts=3, steps=3)
    weights, initial = load_encoder(str(path)).module.state_dict(), build_encoder(TINY, seed=3)
    changed = {n for n, v in initial.state_dict().items() if not torch.equal(v, weights[n])}
    assert changed == {name for name in weights if not name.endswith("depthwise.weight")}
    assert weights["blocks.2.norm1.num_batches_tracked"] == 4


def test_a_monitor_does_not_change_batch_statistics(images, tmp_path):
    plan = plan_of(images, max_steps=2)
    plan.run(tmp_path / "without", device="cpu")
    monitored = plans.monitored(plan, knn_epochs=1, accuracy_epochs=1, neighbours=2)
    monitored.run(tmp_path / "with", device="cpu")
    one, other = ((tmp_path / name / ENCODER).read_bytes() for name in ("with", "without"))
    assert one == other
    assert "knn_top1" in log_rows(tmp_path / "with")[-1]
    probe = ["probe", "--task", "knn", "--dataset", "class_folders", "--data-root", str(images)]
    probe += ["--checkpoint", str(tmp_path / "with"), "--out", str(tmp_path / "results")]
    assert main([*probe, "probe.neighbours=1", "probe.facet=patch_mean"]) == 0


def test_a_skipped_step_does_not_change_batch_statistics():
    timeline = Timeline(2, 2)
    learner = Supervised().build(TINY, timeline, seed=0, class_names=("a", "b"))
    options = TrainOptions(epochs=1, batch_size=4)
    trainer = Trainer(learner, AdamW(), options, timeline, TrainingRanks(device=CPU))

    def take(step: int, images: torch.Tensor) -> dict[str, torch.Tensor]:
        trainer.take_step(step, [(images, torch.tensor([0, 1, 0, 1]), torch.tensor(1.0))])
        return statistics()

    def statistics() -> dict[str, torch.Tensor]:
        state = learner.student.state_dict()
        return {name: value.clone() for name, value in state.items() if "running" in name}

    before = statistics()
    lost = take(0, torch.full((4, 3, 16, 16), torch.nan))
    after = take(1, torch.randn(4, 3, 16, 16))
    for name, value in before.items():
        assert torch.equal(value, lost[name])
        assert not torch.equal(value, after[name])
