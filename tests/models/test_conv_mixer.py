"""Test the ConvMixer encoder.

The expected initial filters follow equations 3.5 to 3.11 of Trockman's thesis "Mimetic
initialization" (2025).
"""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import (
    ConvMixer,
    ConvMixerConfig,
    build_encoder,
    encoder_from_model,
    save_encoder,
)
from ssl_bench.models.initialisers import filter_covariance, positive_root

TINY = ConvMixerConfig(image_size=16, patch_size=4, dim=12, depth=3, kernel_size=3)


def random_mixer(config=TINY, seed=0) -> ConvMixer:
    """Return a ConvMixer whose batch norms have random statistics and weights."""
    model = build_encoder(config, seed=seed)
    assert isinstance(model, ConvMixer)
    generator = torch.Generator().manual_seed(seed)
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert values is not None
            nn.init.uniform_(values, 0.5, 1.5, generator=generator)
    return model.eval()


def images(count=2, height=16, width=24):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def compute_maps_with_loops(model: ConvMixer, image):
    # Trockman, "Mimetic initialization" (2025), equations 2.1 to 2.3.
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    config, pixels = model.config, image.double().numpy()
    size, rows, cols = config.patch_size, *(side // config.patch_size for side in image.shape[1:])
    patch = weights["patch_embed.proj.weight"]
    maps = np.empty((config.dim, rows, cols))
    for row, col in np.ndindex(rows, cols):
        square = pixels[:, row * size : (row + 1) * size, col * size : (col + 1) * size]
        maps[:, row, col] = (patch * square).sum((1, 2, 3)) + weights["patch_embed.proj.bias"]
    maps = gelu_and_norm(maps, weights, "patch_norm")
    states = []
    for layer in range(config.depth):
        name = f"blocks.{layer}"
        mixed = np.zeros_like(maps)
        half = config.kernel_size // 2
        for row, col, to_row, to_col in np.ndindex(rows, cols, rows, cols):
            if max(abs(to_row - row), abs(to_col - col)) <= half:
                filters = weights[f"{name}.depthwise.weight"][:, 0]
                tap = filters[:, row - to_row + half, col - to_col + half]
                mixed[:, to_row, to_col] += tap * maps[:, row, col]
        mixed += weights[f"{name}.depthwise.bias"][:, None, None]
        mixed = gelu_and_norm(mixed, weights, f"{name}.norm1") + (maps if config.skip else 0)
        point = weights[f"{name}.pointwise.weight"][:, :, 0, 0]
        maps = np.einsum("oi,irc->orc", point, mixed)
        maps += weights[f"{name}.pointwise.bias"][:, None, None]
        maps = gelu_and_norm(maps, weights, f"{name}.norm2")
        states.append(maps)
    return states


def gelu_and_norm(maps, weights, norm):
    gelu = maps / 2 * (1 + np.vectorize(math.erf)(maps / math.sqrt(2)))
    mean, variance, scale, shift = (
        weights[f"{norm}.{name}"][:, None, None]
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    return scale * (gelu - mean) / np.sqrt(variance + 1e-5) + shift


@pytest.mark.parametrize("skip", [True, False])
def test_output_and_features_follow_the_equations(skip):
    model = random_mixer(replace(TINY, skip=skip))
    encoder = encoder_from_model(model, name="x", normalization=((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    output = model(images())
    features = FeatureExtractor(encoder, layers=(0, 2), facets=("token", "token_normed"))(images())
    states = [compute_maps_with_loops(model, image) for image in images()]
    expected = np.stack([maps[-1].mean((1, 2)) for maps in states])
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    for layer, facets in features.items():
        expected = np.stack([maps[layer].transpose(1, 2, 0) for maps in states])
        np.testing.assert_allclose(facets["token"].numpy(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(facets["token"], facets["token_normed"])


@pytest.mark.parametrize(("patch_size", "published"), [(1, 706_570), (2, 708_874)])
def test_conv_mixer_256_8_has_the_published_number_of_weights(patch_size, published):
    # 707K weights with patches of one pixel and ten classes. Patches of two add 3 * 3 * 256.
    model = build_encoder(ConvMixerConfig(patch_size=patch_size), seed=0)
    assert sum(p.numel() for p in model.parameters()) + 256 * 10 + 10 == published


def test_the_models_command_reports_no_attention(tmp_path, capsys):
    path = tmp_path / "mixer.safetensors"
    save_encoder(path, build_encoder(TINY, seed=0), {})
    assert main(["models", str(path)]) == 0
    assert "3 blocks, width 12, no attention" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "skip"), [("conv_mixer", True), ("conv_mixer_skipless", False)])
def test_the_presets_are_conv_mixer_256_8(name, skip):
    plan = build(compose_config("pretraining", [f"model={name}", "objective=supervised"]))
    assert plan.model == ConvMixerConfig(skip=skip)


def compute_covariance_with_loops(size, sigma):
    # Trockman, "Mimetic initialization" (2025), equation 3.10. The filter's centre is (0, 0).
    half = size // 2
    steps = range(-half, half + 1)

    def gaussian(rows, cols):
        return math.exp(-(rows**2 + cols**2) / (2 * sigma))

    def around(step):
        return min(abs(step), size - abs(step))

    entries = []
    for i, j, row, col in product(steps, repeat=4):
        mask, static = gaussian(i, j), gaussian(row, col)
        moved = gaussian(around(row - i), around(col - j))
        entries.append(0.5 * (mask * (moved - static) + static * moved))
    return torch.tensor(entries, dtype=torch.float64).view(size**2, size**2)


@pytest.mark.parametrize(("size", "sigma"), [(3, 0.4), (5, 1.0), (7, 1.9)])
def test_the_root_squared_is_the_nearest_positive_semi_definite_matrix(size, sigma):
    covariance = filter_covariance(size, sigma)
    expected = compute_covariance_with_loops(size, sigma)
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-15)
    root = positive_root(covariance)
    positive, added = root @ root, root @ root - covariance
    torch.testing.assert_close(root, root.T)
    assert torch.linalg.eigvalsh(root).min() > -1e-12
    # The nearest matrix in a cone is orthogonal to the added matrix, which is in the dual cone.
    assert torch.linalg.eigvalsh(added).min() > -1e-12
    assert (positive * added).sum().abs() < 1e-12
    if size > 3:
        assert added.abs().max() > 1e-3


def test_filters_get_wider_from_the_first_block_to_the_last():
    config = ConvMixerConfig(dim=512, depth=3, kernel_size=7, init="covariance")
    blocks = build_encoder(config, seed=0).blocks
    for block, sigma in zip(blocks, (0.08, 0.6275, 1.9), strict=True):
        filters = block.get_submodule("depthwise").get_parameter("weight").double().flatten(1)
        root = positive_root(compute_covariance_with_loops(7, sigma))
        shares = filters.square().mean(0) / (root @ root).diagonal()
        assert shares[24].item() == pytest.approx(1, abs=0.25)  # the middle pixel
        assert filters.square().sum(1).mean().item() == pytest.approx(
            (root @ root).trace().item(), rel=0.25
        )


def test_frozen_filters_do_not_affect_the_identity():
    one, other = (
        encoder_from_model(build_encoder(replace(TINY, frozen_filters=frozen), seed=0), name="own")
        for frozen in (False, True)
    )
    assert one.identity() == other.identity()
