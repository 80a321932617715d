"""Test the DINO objective."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pretrain.crops.multi import MultiCrop
from pretrain.distributed import TrainingRanks
from pretrain.objectives import dino
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from tests.benchmarks import pretrain as bench
from tests.pretrain.plans import CPU, TINY

SMALL = Dino(out_dim=20, hidden_dim=16, bottleneck_dim=8)


def plain_loss(embeddings, prototypes, targets, temperature):
    terms = []
    for teacher_view, target in enumerate(targets):
        for student_view, embedding in enumerate(embeddings):
            if student_view != teacher_view:
                logits = embedding @ prototypes.T / temperature
                terms.append(-(target * logits.log_softmax(-1)).sum(-1).mean())
    return torch.stack(terms).mean()


def prototypes(network):
    last_layer = network.head.last_layer
    return last_layer.weight_g * F.normalize(last_layer.weight_v, dim=1)


def learner_of(*, steps=100, steps_per_epoch=10, seed=0, **options):
    return replace(SMALL, **options).build(TINY, Timeline(steps, steps_per_epoch), seed=seed)


def views_of(batch=3, num_locals=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2 * batch, 3, 16, 16, generator=generator),
        torch.randn(num_locals * batch, 3, 8, 8, generator=generator),
    ]


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("num_views", [2, 5])
def test_cross_view_loss_equals_the_double_loop_and_its_gradients(chunk, num_views, monkeypatch):
    monkeypatch.setitem(dino._CHUNK, "cpu", chunk)
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, dtype=torch.float64, generator=generator)
    embeddings = F.normalize(randn(num_views, 6, 8), dim=-1).requires_grad_()
    directions, lengths = randn(30, 8).requires_grad_(), randn(30, 1).abs().requires_grad_()
    targets = randn(2, 6, 30).mul(3).softmax(-1)
    ours = dino.cross_view_loss(embeddings, directions, lengths, targets, temperature=0.1)
    plain = plain_loss(embeddings, lengths * F.normalize(directions), targets, 0.1)
    torch.testing.assert_close(ours, plain, atol=0, rtol=1e-10)
    inputs = (embeddings, directions, lengths)
    gradients = (torch.autograd.grad(3 * loss, inputs) for loss in (ours, plain))
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


def test_losses_compare_each_teacher_view_with_other_student_views():
    learner, views = learner_of(), views_of()
    learner.center.copy_(torch.linspace(-0.1, 0.1, 20))
    loss, report = learner.loss(learner.student, views, step=0)

    teacher = learner.teacher.head(learner.teacher.backbone(views[0]))
    logits = (teacher @ prototypes(learner.teacher).T - learner.center) / 0.04
    targets = logits.softmax(-1).unflatten(0, (2, 3))
    student = [learner.student.head(learner.student.backbone(group)) for group in views]
    embeddings = torch.cat(student).unflatten(0, (4, 3))
    plain = plain_loss(embeddings, prototypes(learner.student), targets, 0.1)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    entropy = -(targets * targets.log()).sum(-1).mean()
    assert report["teacher_entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)
    assert report["kl"].item() == pytest.approx((plain - entropy).item(), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sums_bfloat16_products_in_float32():
    tokens, weights = torch.randn(2, 3, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    logits = dino.compute_logits(tokens.to("cuda"), weights.to("cuda")).cpu()
    exact = tokens.double() @ weights.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)


def test_the_head_has_three_layers_and_normalised_prototypes():
    head = learner_of(seed=3).student.head
    hidden = features = torch.randn(5, 24)
    embeddings = head(features)
    for layer in list(head.mlp)[:-1]:
        hidden = F.gelu(layer(hidden)) if isinstance(layer, nn.Linear) else hidden
    expected = list(head.mlp)[-1](hidden)
    torch.testing.assert_close(embeddings, expected / expected.norm(dim=1, keepdim=True))
    unit = F.normalize(head.last_layer.weight_v, dim=1)
    torch.testing.assert_close(head.last_layer(embeddings), embeddings @ unit.T)
    assert head.get_parameter("mlp.2.weight").std().item() == pytest.approx(0.02, rel=0.15)
    assert not head.get_parameter("mlp.0.bias").any()
    for is_fixed in (True, False):
        length = learner_of(norm_last_layer=is_fixed).student.head.last_layer.weight_g
        assert length.requires_grad != is_fixed


def test_the_teacher_is_the_moving_average_of_the_student():
    learner = learner_of(momentum=0.9)
    start = [p.clone() for p in learner.teacher.parameters()]
    assert all(map(torch.equal, start, learner.student.parameters()))
    learner.loss(learner.student, views_of(), step=0)
    for parameter in learner.student.parameters():
        parameter.data.add_(1.0)
    learner.update_teacher(step=0, found_inf=torch.tensor(False))
    for old, new in zip(start, learner.teacher.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.1)
        assert not new.requires_grad


def test_the_center_uses_the_mean_over_all_micro_batches():
    learner = learner_of(center_momentum=0.75)
    parts = [views_of(seed=seed) for seed in (0, 1)]
    for views in parts:
        learner.loss(learner.student, views, step=0)
    before, weights = learner.center.clone(), prototypes(learner.teacher)
    outputs = torch.cat([views[0] for views in parts])
    mean = (learner.teacher.head(learner.teacher.backbone(outputs)) @ weights.T).mean(0)
    learner.update_teacher(step=0, found_inf=torch.tensor(False))
    assert not before.any()
    torch.testing.assert_close(learner.center, 0.25 * mean)


def test_the_last_layer_is_frozen_for_the_first_epochs():
    learner = learner_of(steps=200, steps_per_epoch=10)

    def trained_names(step):
        for parameter in learner.student.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner.freeze_gradients(step)
        return {n for n, p in learner.student.named_parameters() if p.grad is not None}

    everything = {name for name, _ in learner.student.named_parameters()}
    last = {"head.last_layer.weight_v", "head.last_layer.weight_g"}
    assert trained_names(0) == trained_names(9) == everything - last
    assert trained_names(10) == everything
    epochs = {"freeze_last_layer_epochs": 4.0, "teacher_temperature_epochs": 8.0}
    learner = learner_of(steps=200, steps_per_epoch=10, **epochs)
    assert trained_names(39) == everything - last
    assert trained_names(40) == everything
    assert (
        learner.scheduled_values(78)["teacher_temperature"]
        < learner.scheduled_values(79)["teacher_temperature"]
    )


def test_a_frozen_last_layer_counts_in_the_gradient_norm():
    norms = []
    for epochs in (0.0, 4.0):
        learner = learner_of(freeze_last_layer_epochs=epochs)
        options, ranks = TrainOptions(batch_size=3), TrainingRanks(CPU)
        trainer = Trainer(learner, AdamW(), options, Timeline(100, 10), ranks)
        norms.append(trainer.take_step(0, [views_of()])["gradient_norm"])
    assert torch.equal(*norms)


def test_schedules_have_the_official_values():
    learner = learner_of(steps=1000, steps_per_epoch=10)
    assert learner.scheduled_values(0) == {
        "momentum": pytest.approx(0.996),
        "teacher_temperature": 0.04,
    }
    assert learner.scheduled_values(299)["teacher_temperature"] == 0.07
    assert learner.scheduled_values(150)["teacher_temperature"] == pytest.approx(
        0.04 + 0.03 * 150 / 299
    )
    assert learner.scheduled_values(500)["momentum"] == pytest.approx(0.998)
    assert learner.scheduled_values(1000)["momentum"] == 1


def test_the_teacher_has_no_drop_path():
    learner = SMALL.build(replace(TINY, drop_path=0.9), Timeline(10, 10), seed=0)
    torch.manual_seed(0)
    images = torch.randn(64, 3, 16, 16)
    teacher = [learner.teacher.backbone(images) for _ in range(2)]
    student = [learner.student.backbone(images) for _ in range(2)]
    assert torch.equal(*teacher)
    assert not torch.equal(*student)


@pytest.mark.parametrize(
    ("loss", "entropy", "is_collapsed"),
    [
        (1, 0.999, True),
        (0.004, 0.001, True),
        (1.03, 0.8, False),
        (0.99, 1, False),
        (0.3, 0.001, False),
    ],
)
def test_a_collapse_is_diagnosed_from_loss_and_entropy(loss, entropy, is_collapsed):
    learner, ceiling = learner_of(), math.log(20)
    symptom = learner.diagnose({"loss": loss * ceiling, "teacher_entropy": entropy * ceiling})
    assert (symptom is not None) == is_collapsed
    if symptom is not None:
        assert ("3.00" in str(symptom)) == (loss > 0.5)
        assert "objective.momentum=0.99" in symptom.hint


def test_training_equals_a_plain_training_loop():
    objective = Dino(
        out_dim=32, hidden_dim=16, bottleneck_dim=8, freeze_last_layer_epochs=0.0,
        crops=MultiCrop(num_locals=3),
    )  # fmt: skip
    setting = bench.Setting(CPU, TINY, objective, 4)
    groups = setting.groups()
    ours, trainer = bench.build_suite_candidate(setting, AdamW(lr=2.0), groups)
    plain = bench.build_plain_candidate(setting, groups, trainer.scheduled_values)
    # The steps are far apart, because the learning rate is small during the warm-up.
    steps = range(0, 4_000, 1_000)
    losses = [ours.take_step(step)["loss"].item() for step in steps]
    others = [plain.take_step(step) for step in steps]

    assert losses == pytest.approx(others, abs=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-2


@pytest.mark.slow
def test_head_and_loss_need_a_third_of_the_plain_memory():
    (ours, _), (plain, _) = (
        bench.measured_head(name, 16, device=CPU, out_dim=65_536)
        for name in (bench.ADAMW, bench.PLAIN)
    )
    assert ours * 2.9 < plain
