"""Figure 1c of "Always Skip Attention": three arms that differ in one skip and in nothing else."""

from functools import cache

import pytest
import torch

from pretrain.description import describe, differences
from pretrain.train import Pretraining
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.models import VisionTransformer, build_encoder

ARMS = ("both", "no_mlp", "no_attention")


@cache
def arm(name) -> Pretraining:
    words = [f"experiment=one_skip_cifar10_{name}", "model.depth=2"]
    return build(compose_config("pretraining", words))


def encoder(name) -> VisionTransformer:
    model = build_encoder(arm(name).encoder, seed=3)
    assert isinstance(model, VisionTransformer)
    return model.eval()


def test_an_arm_is_without_the_skip_of_its_name():
    lines = [differences(describe(arm("both")), describe(arm(name))) for name in ARMS]

    assert lines == [[], ["model.skip_mlp: True -> False"], ["model.skip_attention: True -> False"]]


def test_the_arms_begin_with_the_same_weights_and_compute_something_else():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    models = [encoder(name) for name in ARMS]
    first, *others = (model.state_dict() for model in models)

    assert all(other.keys() == first.keys() for other in others)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    both, *rest = (model(images) for model in models)
    assert min((both - other).abs().max() for other in rest) > 0.1


@pytest.mark.parametrize(
    ("silenced", "blind"), [("attn.proj", "no_attention"), ("mlp.fc2", "no_mlp")]
)
def test_a_silent_sublayer_without_its_skip_leaves_nothing_of_the_image(silenced, blind):
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    sees = {}
    for name in ARMS:
        model = encoder(name)
        for parameter in model.blocks[1].get_submodule(silenced).parameters():
            torch.nn.init.zeros_(parameter)
        one, other = model.forward_features(images)
        sees[name] = not torch.equal(one, other)

    assert sees == {name: name != blind for name in ARMS}
