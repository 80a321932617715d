"""The arithmetic of a step, counted without doing it, and the rate of this machine."""

import pytest
import torch
from torch import nn

from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW
from pretrain.options import TrainOptions
from pretrain.resources import product_rate, training_flops
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.models import ViTConfig

CPU = torch.device("cpu")
TINY = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2)
SMALL = Dino(out_dim=20, hidden_dim=16, bottleneck_dim=8)


class Line(nn.Module):
    """One product of (batch, 5) and (5, 7), and a random number as mixtures of images draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(5, 7, bias=False)

    def loss(self, network, views, step):
        del step
        return network(views[0]).sum() * torch.rand(()).to(views[0].device), {}


def test_a_product_counts_twice_its_multiplications_and_once_more_for_the_weights():
    # The input needs no gradient: one product forwards, one backwards.
    assert training_flops(Line(), [torch.zeros(3, 5)], 0) == 2 * (2 * 3 * 5 * 7)


def test_counting_leaves_random_numbers_and_the_learner_alone():
    learner, line = SMALL.build(TINY, Timeline(10, 10), seed=0), Line()
    state, weights = torch.get_rng_state(), [p.clone() for p in learner.parameters()]

    flops = training_flops(learner, [torch.zeros(4, 3, 16, 16), torch.zeros(4, 3, 8, 8)], 0)
    training_flops(line, [torch.zeros(3, 5)], 0)

    assert flops > 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in learner.parameters())
    assert all(map(torch.equal, weights, learner.parameters()))
    assert not learner._teacher_means


def test_utilisation_is_the_share_of_the_measured_rate_over_all_parts():
    options = TrainOptions(batch_size=4, accumulation=2)
    learner = SMALL.build(TINY, Timeline(10, 10), seed=0)
    trainer = Trainer(learner, AdamW(), options, Timeline(10, 10), TrainingRanks(device=CPU))
    views = [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)]
    flops = 2 * training_flops(learner, views, 0)

    trainer.take_step(0, iter([views, views]))

    rate = product_rate(CPU, torch.float32)
    assert trainer.utilisation(0.5) == pytest.approx(100 * flops / (0.5 * rate))
    assert 1e8 < rate < 1e14


@pytest.mark.slow
def test_an_image_of_the_official_recipe_costs_what_its_products_do():
    # 113.8 GFLOP: student 94.0, teacher 18.4, heads 1.4.
    learner = Dino().build(ViTConfig(), Timeline(100, 10), seed=0)

    flops = training_flops(learner, [torch.zeros(2, 3, 224, 224), torch.zeros(8, 3, 96, 96)], 0)

    assert flops / 1e9 == pytest.approx(113.8, rel=0.005)
