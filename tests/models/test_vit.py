"""Test our implementation of the Vision Transformer."""

from dataclasses import replace

import pytest
import timm
import torch
import yaml

from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError, split_alternatives
from ssl_bench.models import OrthogonalAttention, VisionTransformer, ViTConfig, build_vit
from ssl_bench.models.config import config_from_dict
from ssl_bench.models.encoder import describe_config
from ssl_bench.models.initialisers import fill_options
from ssl_bench.models.vit import Attention, Block, resize_positions, sinusoidal_positions
from tests.support.faults import unchecked_types

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=3, num_heads=3)
SKIPLESS = {"init": "skipless"}
COVARIANCE = {"kind": "conv_mixer", "init": "covariance"}


def compose_model(*overrides: str) -> ViTConfig:
    return build(compose_config("pretraining", overrides), "model")


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.Identity])
def test_a_skipless_block_has_no_residual_connections(norm):
    kind = "layernorm" if norm is torch.nn.LayerNorm else "none"
    config = ViTConfig(dim=12, num_heads=2, skip_attention=False, skip_mlp=False, norm=kind)
    block, x = Block(config, drop_path=0.0), torch.randn(2, 5, 12)
    assert isinstance(VisionTransformer(config).norm, norm)
    expected = block.mlp(block.norm2(block.attn(block.norm1(x))))
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize(
    ("name", "arm", "parameters"),
    [
        ("tiny", "skip", 5_524_416), ("small", "skipless", 21_665_664),
        ("base", "skip", 85_798_656),
    ],
)  # fmt: skip
def test_the_sizes_have_the_published_number_of_parameters(name, arm, parameters):
    config = compose_model(f"model=vit_{name}_{arm}")
    with torch.device("meta"):
        model = VisionTransformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert (config.skip_attention, config.skip_mlp) == (arm == "skip", arm == "skip")
    assert (config.init, config.drop_path) == ("default" if arm == "skip" else "skipless", 0.0)


def test_options_of_initialisers_can_be_overridden_and_reset():
    config = compose_model("model=vit_tiny_skipless", "model.init_options.alpha=2", "model.depth=3")
    assert (config.init_options, config.depth) == ({"alpha": 2}, 3)
    assert compose_model("model=vit_tiny_skipless", "model.init=default").init_options == {}
    filled = fill_options("covariance", {"sigma_0": None, "v_sigma": 0.5})
    assert filled == {"sigma_0": 0.08, "v_sigma": 0.5, "a_sigma": 2.9}


@pytest.mark.parametrize(
    ("wrong", "ways"),
    [
        ({"dim": 50, "num_heads": 4}, ["model.dim=48", "model.dim=52"]),
        ({"image_size": 100}, ["model.image_size=96", "model.image_size=112"]),
        ({"image_size": 8}, ["model.image_size=16"]),
        ({"skip_mlp": "yes"}, []),
        ({"position_embedding": "sinusoidal", "dim": 54}, ["model.dim=60"]),
        ({"drop_path": 1.0}, []),
        ({"drop_path": 0.1, "skip_mlp": False}, ["model.drop_path=0"]),
        ({"drop_path": 0.1, "skip_attention": False}, ["model.drop_path=0"]),
        (
            {"position_scale": 2.0},
            ["model.position_embedding=sinusoidal", "model.position_scale=1"],
        ),
        ({"init_options": {"mlp_input_std": -0.1}}, []),
        ({"graying": "dft"}, []),
        ({"graying_layers": [0, 12]}, ["model.graying_layers=null"]),
        ({"graying_layers": []}, ["model.graying_layers=null"]),
        ({"attention": "osa"}, []),
        ({"attention": "osa_qr"}, ["model.qkv_bias=false"]),
        ({"init": "osa", "num_heads": 1}, ["model.num_heads=2"]),
        ({"init": "mimetic", "init_options": {"parts": "vq"}}, []),
        ({"init": "zzz"}, []),
        ({"init": "skiples"}, ["model.init=skipless"]),
        (SKIPLESS | {"init_options": {"alhpa": 1.0}}, ["model.init_options.alpha={value}"]),
        (SKIPLESS | {"init_options": {"alpha": "big"}}, []),
        ({"init_options": {"alpha": 1.0}}, ["model.init_options={{}}"]),
        ({"dimm": 48}, []),
        ({"kind": "conv_mixer", "kernel_size": 4}, ["model.kernel_size=5"]),
        ({"kind": "conv_mixer", "patch_size": 5}, ["model.image_size=30"]),
        (COVARIANCE | {"init": "covariances"}, ["model.init=covariance"]),
        (COVARIANCE | {"init_options": {"sigma_0": 0.0}}, []),
        # The width is positive in the first and the last block, but not in the blocks between.
        (COVARIANCE | {"init_options": {"v_sigma": -1.4}}, []),
        ({"kind": "state_space", "head_width": 6}, ["model.head_width=2"]),
        ({"kind": "state_space", "dim": 6, "head_width": 8}, ["model.head_width=4"]),
        ({"kind": "state_space", "mimetic_layers": [2]}, ["model.mimetic_layers=null"]),
    ],
)
def test_a_wrong_configuration_is_refused_with_a_hint(wrong, ways):
    values = dict(wrong)
    kind = values.pop("kind", "vit")
    with unchecked_types(), pytest.raises(ConfigurationError) as raised:
        config_from_dict(kind, values)
    assert "\n" not in str(raised.value)
    hints = [" ".join(words) for words in split_alternatives(raised.value.hint)]
    assert set(ways) <= set(hints)
    assert bool(ways) == bool(hints)
    for hint in hints:
        key, _, value = hint.removeprefix("model.").partition("=")
        if "{" not in value:
            config_from_dict(kind, {**values, key: yaml.safe_load(value)})


def test_unsupported_inputs_of_layers_are_refused():
    with unchecked_types(), pytest.raises(ConfigurationError, match="'svd'"):
        OrthogonalAttention(12, 3, "svd")
    with pytest.raises(ConfigurationError, match="32 x 36"):
        build_vit(TINY, seed=0)(torch.zeros(1, 3, 32, 36))


def cubic_weights(new: int, old: int, margin: float) -> torch.Tensor:
    """Return the matrix that resizes a vector by cubic interpolation."""
    a = -0.75
    weights = torch.zeros(new, old, dtype=torch.float64)
    for index in range(new):
        position = (index + 0.5) * old / (new + margin) - 0.5
        first = int(position // 1) - 1
        for tap in range(first, first + 4):
            x = abs(position - tap)
            near = (a + 2) * x**3 - (a + 3) * x**2 + 1
            far = a * (x**3 - 5 * x**2 + 8 * x - 4)
            weights[index, min(max(tap, 0), old - 1)] += near if x <= 1 else far
    return weights


# In floating point, 14 * (61 / 14) is less than 61.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [(20, 30), (3, 14), (7, 28), (61, 15)])
@pytest.mark.parametrize("margin", [0.1, 0.0])
def test_positions_are_resized_as_in_official_dino(size, margin, deterministic, monkeypatch):
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: deterministic)
    if deterministic:
        # The gradient of `interpolate` is not deterministic on a GPU.
        monkeypatch.setattr("torch.nn.functional.interpolate", None)
    positions = torch.randn(1, 1 + 14 * 14, 2)
    grid = positions[0, 1:].double().reshape(14, 14, 2)
    rows, cols = (cubic_weights(side, 14, margin) for side in size)
    expected = torch.einsum("rh,hwd,cw->rcd", rows, grid, cols)
    resized = resize_positions(positions, old_size=(14, 14), new_size=size, margin=margin)
    assert torch.equal(resized[:, :1], positions[:, :1])
    patches = resized[0, 1:].reshape(*size, 2)
    torch.testing.assert_close(patches, expected.float(), rtol=0, atol=1e-5)


def test_sinusoidal_positions_encode_the_column_first_and_are_fixed():
    col, row = torch.tensor(2.0), torch.tensor(1.0)
    expected = [
        f(axis * w) for axis in (col, row) for f in (torch.sin, torch.cos) for w in (1, 0.01)
    ]
    torch.testing.assert_close(sinusoidal_positions(2, 3, 8)[5], torch.stack(expected))
    config = replace(TINY, position_embedding="sinusoidal", position_scale=2.0)
    positions = build_vit(config, seed=0).pos_embed
    assert not positions.requires_grad
    assert torch.equal(positions[0, 1:], 2 * sinusoidal_positions(4, 4, 48))
    assert not positions[0, 0].any()
    # The scale is not part of the description, because checkpoints store the scaled positions.
    assert describe_config(config) == describe_config(replace(config, position_scale=1.0))


def test_registers_follow_cls_and_have_no_position():
    config = ViTConfig(image_size=32, patch_size=8, dim=48, depth=1, num_heads=3, num_registers=2)
    model = build_vit(config, seed=0)
    images = torch.randn(1, 3, 16, 24)
    tokens = model.embed(images)
    plain = VisionTransformer(TINY)
    plain.load_state_dict(model.state_dict(), strict=False)
    without = plain.embed(images)
    assert torch.equal(tokens[:, 1:3], model.reg_token)
    assert torch.equal(torch.cat([tokens[:, :1], tokens[:, 3:]], dim=1), without)


def test_attention_on_a_cpu_is_computed_in_float32_under_autocast():
    attention = Attention(32, 2, qkv_bias=False)
    x = torch.randn(3, 7, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        heads = attention(x)
        heads.float().sum().backward()
    assert heads.dtype == torch.bfloat16
    expected = x.detach().double().requires_grad_(True)
    plain_attention(attention, expected).sum().backward()
    assert x.grad is not None
    assert expected.grad is not None
    error = torch.linalg.vector_norm(x.grad.double() - expected.grad)
    assert 0 < error / torch.linalg.vector_norm(expected.grad) < 2**-7


def plain_attention(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    qkv = x @ attention.qkv.weight.double().T
    q, k, v = qkv.unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    heads = (weights @ v).transpose(1, 2).flatten(2)
    return heads @ attention.proj.weight.double().T + attention.proj.bias.double()


def test_drop_path_drops_whole_samples_only_in_training():
    block = Block(ViTConfig(dim=12, num_heads=2, drop_path=0.5), drop_path=0.5)
    torch.nn.init.zeros_(block.mlp.fc2.weight)
    torch.nn.init.zeros_(block.mlp.fc2.bias)
    x = torch.randn(1, 5, 12).expand(64, 5, 12)
    update = block.eval()(x)[0] - x[0]
    trained = block.train()(x)
    doubled = [torch.allclose(sample - x[0], 2 * update, atol=1e-5) for sample in trained]
    untouched = [torch.equal(sample, x[0]) for sample in trained]
    assert all(one != other for one, other in zip(doubled, untouched, strict=True))
    assert 0 < sum(untouched) < 64
    rates = [b.drop_path for b in VisionTransformer(ViTConfig(depth=3, drop_path=0.2)).blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2])


def test_weights_are_interchangeable_with_timm():
    theirs = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=0
    ).eval()
    ours = build_vit(TINY, seed=0).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs.load_state_dict(ours.state_dict())
        assert (ours(images) - theirs(images)).abs().max() < 1e-5
        theirs.init_weights("jax")
        ours.load_state_dict(theirs.state_dict())
        assert (ours.forward_features(images) - theirs.forward_features(images)).abs().max() < 1e-5
