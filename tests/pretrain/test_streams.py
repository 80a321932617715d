"""Heads and decoders have random streams of their own."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.objectives.dino import Dino
from pretrain.objectives.mae import Mae
from pretrain.objectives.supervised import Supervised
from pretrain.papers.copying import Copying
from pretrain.schedules import Timeline
from ssl_bench.models import ConvMixerConfig, StateSpaceConfig, ViTConfig

VIT = ViTConfig(image_size=16, patch_size=8, dim=24, depth=1, num_heads=2)
OBJECTIVES = {
    "supervised": (Supervised(), VIT),
    "convolutions": (Supervised(), ConvMixerConfig(image_size=16, patch_size=8, dim=24, depth=1)),
    "dino": (Dino(out_dim=40, hidden_dim=32, bottleneck_dim=24), VIT),
    "narrow decoder": (
        Mae(decoder_dim=24, decoder_depth=1, decoder_heads=2),
        replace(VIT, dim=96),
    ),
    "copying": (Copying(letters=30), StateSpaceConfig(dim=32, num_states=16, num_tokens=32)),
    # As large as the encoder, whose weights would come again.
    "wide decoder": (
        Mae(decoder_dim=24, decoder_depth=1, decoder_heads=2),
        replace(VIT, position_embedding="sinusoidal"),
    ),
}


def matrices(name: str, *, seed: int) -> dict[str, Tensor]:
    """All random weights of a student that are many enough to tell chance from a common stream."""
    objective, model = OBJECTIVES[name]
    classes = [str(number) for number in range(40)]
    learner = objective.build(model, Timeline(10, 10), seed=seed, class_names=classes)
    assert isinstance(learner.student, nn.Module)
    values = learner.student.named_parameters()
    return {key: value.detach() for key, value in values if len(value.unique()) > 500}


def spearman(one: Tensor, other: Tensor) -> float:
    """Largest correlation of ranks by magnitude, 600 of the shorter laid anywhere on the longer."""
    short, long = sorted((one.flatten(), other.flatten()), key=len)
    ranks = [values.argsort().argsort().float() for values in (short[:600], long)]
    short, long = ((values - values.mean()) / values.std() for values in ranks)
    return float(F.conv1d(long[None], short[None, None]).abs().max()) / len(short)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_two_weights_are_drawn_from_the_same_numbers(name):
    drawn = matrices(name, seed=0)

    assert len(drawn) >= 3
    found = {pair: spearman(drawn[pair[0]], drawn[pair[1]]) for pair in combinations(drawn, 2)}
    # Independent ones reach .2. Normal numbers are .33 from the uniform ones they are made of.
    assert {pair: value for pair, value in found.items() if value > 0.25} == {}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_weights_are_those_of_the_seed_alone(name):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = matrices(name, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(7)
    again, other = matrices(name, seed=3), matrices(name, seed=4)

    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not any(torch.equal(value, other[key]) for key, value in first.items())
