"""Recipes, weight-decay groups and clipping tensor by tensor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain.optimizers.recipes import (
    SOAP,
    AdamW,
    Soap,
    clip_gradients,
    parameter_groups,
)
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ViTConfig, build_vit

CONFIGS = Path(__file__).parents[2] / "configs" / "optimizer"
RECIPES = [AdamW(), Soap()]


@pytest.fixture
def model() -> nn.Module:
    encoder = build_vit(
        ViTConfig(image_size=16, patch_size=8, dim=12, depth=2, num_heads=2), seed=0
    )
    last_layer = nn.ParameterDict({"weight_v": torch.randn(5, 12), "weight_g": torch.ones(5, 1)})
    last_layer["weight_g"].requires_grad_(False)
    return nn.ModuleDict({"backbone": encoder, "last_layer": last_layer})


def names_of(group: dict[str, Any], model: nn.Module) -> set[str]:
    held = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def test_matrices_and_tokens_are_decayed_and_biases_and_vectors_are_not(model):
    decayed, exempt = parameter_groups(model.named_parameters())
    block = "backbone.blocks.{}."
    matrices = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]
    vectors = [name.replace("weight", "bias") for name in matrices]
    vectors += ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
    outside = {f"backbone.{name}" for name in ("cls_token", "pos_embed", "patch_embed.proj.weight")}
    assert names_of(decayed, model) == outside | {"last_layer.weight_v"} | {
        block.format(i) + name for i in range(2) for name in matrices
    }
    assert names_of(exempt, model) == {
        f"backbone.{name}" for name in ("patch_embed.proj.bias", "norm.weight", "norm.bias")
    } | {block.format(i) + name for i in range(2) for name in vectors}
    assert exempt["weight_decay"] == 0.0
    assert "weight_decay" not in decayed


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_without_decay_of_tokens_they_alone_join_the_exempt(model, layer_decay):
    model["backbone"].reg_token = nn.Parameter(torch.zeros(1, 2, 12))
    model["mask_token"] = nn.ParameterDict({"mask_token": torch.zeros(1, 1, 12)})
    named = list(model.named_parameters())
    exempt = {}
    for decay_tokens in (True, False):
        groups = parameter_groups(named, layer_decay=layer_decay, decay_tokens=decay_tokens)
        exempt[decay_tokens] = set().union(*(names_of(group, model) for group in groups[1::2]))

    assert exempt[False] - exempt[True] == {
        *(f"backbone.{name}" for name in ("cls_token", "pos_embed", "reg_token")),
        "mask_token.mask_token",
    }
    assert exempt[True] < exempt[False]


def test_a_bias_of_two_dimensions_is_exempt_by_its_name():
    matrix = nn.Parameter(torch.zeros(2, 2))
    assert parameter_groups([("head.bias", matrix)])[1]["params"][0] is matrix
    assert parameter_groups([("bias", matrix)])[0]["params"][0] is matrix


def clip_one_by_one(gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    clipped = []
    for gradient in gradients:
        coefficient = max_norm / (gradient.square().sum().sqrt() + 1e-6)
        clipped.append(gradient * coefficient if coefficient < 1 else gradient)
    return clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_equals_a_loop_over_the_tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (3,), (), (2, 3, 2, 2), (30, 30)]
    gradients = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    frozen = nn.Parameter(torch.zeros(3))

    norms = clip_gradients(iter([frozen, *parameters]), 3.0)

    expected = clip_one_by_one(gradients, 3.0)
    assert [torch.equal(e, g) for e, g in zip(expected, gradients, strict=True)].count(True) == 2
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms, torch.stack([g.norm() for g in gradients]))
    assert frozen.grad is None


@pytest.mark.parametrize("most", [0.1, 3.0, 1e6])
def test_clipping_of_the_whole_equals_that_of_torch(most):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(s)) for s in [(4, 5), (3,), (30, 30)]] for _ in "ab")
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()

    norms = clip_gradients(ours, most, whole=True)

    total = torch.nn.utils.clip_grad_norm_(theirs, most)
    torch.testing.assert_close(norms.norm(), total)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_clipping_never_reads_a_norm_back_to_the_host():
    # A tensor of the meta device has no values: whatever asks for one raises.
    parameter = nn.Parameter(torch.zeros(3, 3, device="meta"))
    parameter.grad = torch.zeros_like(parameter)
    assert clip_gradients([parameter], 3.0).is_meta


def test_recipes_hand_their_fields_to_the_optimizer():
    group = [{"params": [nn.Parameter(torch.zeros(2, 2))]}]
    adamw = AdamW(lr=1.0, betas=[0.5, 0.6], eps=1e-3).build(group).param_groups[0]
    assert (adamw["lr"], adamw["betas"], adamw["eps"]) == (1.0, (0.5, 0.6), 1e-3)
    assert adamw["fused"]
    recipe = Soap(1.0, [0.5, 0.6], 0.7, 1e-3, 4, 99, stagger=True, shard_refreshes=True)
    optimizer = recipe.build(group)
    assert isinstance(optimizer, SOAP)
    for name, value in vars(replace(recipe, betas=(0.5, 0.6))).items():
        assert optimizer.param_groups[0][name] == value


def test_a_decay_by_layers_without_a_row_of_blocks_is_refused():
    matrix = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match=r"layer_decay needs blocks .*; set train.layer"):
        parameter_groups(
            [("backbone.model.layers.0.blocks.0.mlp.fc1.weight", matrix)], layer_decay=0.5
        )


def test_positions_of_windows_are_decayed_as_those_of_patches():
    table = nn.Parameter(torch.ones(2, 2))
    named = [("backbone.model.layers.0.blocks.0.attn.relative_position_bias_table", table)]
    assert parameter_groups(named)[0]["params"][0] is table
    assert parameter_groups(named, decay_tokens=False)[1]["params"][0] is table
