"""Test the masked autoencoder (MAE) objective."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.objectives.mae import Mae, MaeDecoder, patchify
from pretrain.schedules import Timeline
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, ViTConfig
from tests.pretrain import plans

TINY = replace(plans.TINY, patch_size=4)
SMALL = Mae(decoder_dim=12, decoder_depth=1, decoder_heads=3)


def learner_of(model: EncoderConfig = TINY, seed=0, **options):
    return replace(SMALL, **options).build(model, Timeline(10, 5), seed=seed)


def images_of(count=3, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator)


def test_patchify_orders_values_by_row_column_and_colour():
    row, col = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    image = torch.stack([100 * colour + 10 * row + col for colour in range(3)])[None]
    patches = patchify(image, 2)
    assert patches.shape == (1, 6, 12)
    assert patches[0, 1].tolist() == [2, 102, 202, 3, 103, 203, 12, 112, 212, 13, 113, 213]
    assert patches[0, 3].tolist() == [20, 120, 220, 21, 121, 221, 30, 130, 230, 31, 131, 231]


def test_the_number_of_visible_patches_is_the_rounded_share():
    for size, mask_ratio, expected in [(224, 0.75, 49), (160, 0.9, 10), (64, 0.7, 4), (64, 0.5, 8)]:
        learner = learner_of(replace(TINY, image_size=size, patch_size=16), mask_ratio=mask_ratio)
        assert learner.student.num_visible == expected
    with pytest.raises(ConfigurationError, match="mask_ratio"):
        learner_of(mask_ratio=0.95)


def test_every_image_has_its_own_random_order_of_all_patches():
    learner, recorded = learner_of(), []

    def network(images, order):
        recorded.append(order)
        return learner.student(images, order)

    torch.manual_seed(1)
    learner.loss(network, (images_of(400),), 0)
    (orders,) = recorded
    assert orders.sort(dim=1).values.tolist() == [list(range(16))] * 400
    assert len({tuple(order) for order in orders.tolist()}) == 400
    visible = orders[:, : learner.student.num_visible]
    counts = visible.flatten().bincount(minlength=16)
    assert visible.shape == (400, 4)
    assert counts.min() > 65  # The expected count is 100, and its standard deviation 8.7.
    assert counts.max() < 135


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"num_registers": 3},
        {"skip_attention": False, "skip_mlp": False},
        {"attention": "linear", "position_embedding": "sinusoidal"},
        {"attention": "osa_newton_schulz", "qkv_bias": False, "norm": "none"},
        {"graying": "svd", "graying_exponent": 0.7},
        {"graying": "dct"},
    ],
)
def test_the_encoder_does_not_depend_on_hidden_pixels(switches):
    student = learner_of(replace(TINY, **switches)).student.eval()
    images, visible = images_of(2), torch.tensor([[5, 0, 11, 6], [15, 3, 4, 8]])
    other = images_of(2, seed=1)
    shown = torch.zeros(2, 4, 4, dtype=torch.bool)
    shown.flatten(1).scatter_(1, visible, torch.ones_like(visible, dtype=torch.bool))
    shown = shown.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    tokens = student.encode(images, visible)
    prefix = 1 + switches.get("num_registers", 0)
    assert tokens.shape == (2, prefix + 4, 24)
    assert torch.equal(tokens, student.encode(torch.where(shown, images, other), visible))
    assert not torch.equal(tokens, student.encode(torch.where(shown, other, images), visible))


def test_without_hidden_patches_the_encoder_is_the_plain_encoder():
    student = learner_of(replace(TINY, num_registers=2)).student.eval()
    images, order = images_of(2), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    tokens = student.encode(images, order.expand(2, -1))
    plain = student.backbone.forward_features(images)
    torch.testing.assert_close(tokens[:, :3], plain[:, :3])
    torch.testing.assert_close(tokens[:, 3:], plain[:, 3:][:, order])


def make_transparent(decoder: MaeDecoder) -> MaeDecoder:
    """Change the weights of an MAE decoder so that it outputs its input tokens as pixels."""
    with torch.no_grad():
        for block in decoder.blocks:
            for name in ("attn.proj.weight", "mlp.fc2.weight"):
                block.get_parameter(name).zero_()
        for linear in (decoder.embed, decoder.pixels):
            linear.weight.copy_(torch.eye(12))
        decoder.mask_token.fill_(-1)
    decoder.norm = nn.Identity()
    return decoder


def test_the_decoder_puts_every_token_at_its_patch_position():
    model = ViTConfig(image_size=4, patch_size=2, dim=12, depth=1, num_heads=2, num_registers=1)
    decoder = make_transparent(learner_of(model, mask_ratio=0.5).student.decoder)
    tokens = torch.tensor([50.0, 51.0, 10.0, 11.0])[None, :, None].expand(1, 4, 12)
    painted = decoder(tokens, torch.tensor([[2, 0, 3, 1]])) - decoder.positions
    # The tokens are [CLS] (50), a register (51), and the tokens of patches 2 and 0.
    expected = torch.tensor([11.0, -1.0, 10.0, -1.0])[None, :, None].expand(1, 4, 12)
    torch.testing.assert_close(painted, expected)


def test_the_decoder_has_sinusoidal_positions_that_are_not_saved():
    decoder = learner_of(replace(TINY, position_embedding="learned")).student.decoder
    first, second = decoder.positions[0, 1], decoder.positions[0, 4]  # right of and below patch 0
    angles = [1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)]
    sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
    assert first.tolist() == pytest.approx([*sines, *cosines, 0, 0, 0, 1, 1, 1])
    assert second.tolist() == pytest.approx([0, 0, 0, 1, 1, 1, *sines, *cosines])
    assert not any("positions" in name for name in decoder.state_dict())


@pytest.mark.parametrize("normalised", [True, False])
def test_the_loss_is_the_mean_squared_error_over_hidden_patches(normalised):
    learner, images, recorded = learner_of(normalised_pixels=normalised), images_of(2), []
    predictions = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(3))

    def network(images, order):
        recorded.append(order)
        return predictions

    loss, report = learner.loss(network, (images,), 0)

    errors, squares = [], []
    for image, painted, order in zip(images, predictions, recorded[0].tolist(), strict=True):
        hidden = patchify(image[None], 4)[0, order[4:]].double().unflatten(1, (16, 3))
        colour_of_all = np.zeros(3) if normalised else hidden.mean((0, 1)).numpy()
        for number in order[4:]:
            top, left = 4 * (number // 4), 4 * (number % 4)
            patch = image[:, top : top + 4, left : left + 4].double().numpy()
            if normalised:
                patch = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6)
            for place, (row, col, colour) in enumerate(np.ndindex(4, 4, 3)):
                expected = patch[colour, row, col]
                errors.append((painted[number, place].item() - expected) ** 2)
                squares.append((expected - colour_of_all[colour]) ** 2)
    assert loss.item() == pytest.approx(statistics.fmean(errors), rel=1e-6)
    assert report["mean_loss"].item() == pytest.approx(statistics.fmean(squares), rel=1e-6)


def test_the_decoder_grays_its_tokens_only_on_request():
    gray = replace(TINY, graying="dct", graying_exponent=0.9, graying_layers=(1,))

    def list_graying(**options):
        decoder = learner_of(gray, decoder_depth=2, **options).student.decoder
        return [repr(block.get_submodule("graying")) for block in decoder.blocks]

    assert list_graying(gray_decoder=True) == ["TokenGraying(kind=dct, exponent=0.9)"] * 2
    assert list_graying() == ["Identity()"] * 2
    with pytest.raises(ConfigurationError, match=r"model\.graying=svd` or `model\.graying=dct"):
        learner_of(gray_decoder=True)


@pytest.mark.parametrize(("loss", "is_ill"), [(0.97, True), (1.3, True), (0.9, False)])
def test_a_loss_no_better_than_the_mean_is_diagnosed(loss, is_ill):
    symptom = learner_of().diagnose({"loss": loss, "mean_loss": 0.975})
    assert (symptom is not None) == is_ill
    assert symptom is None or "optimizer.lr=1.5e-4" in symptom.hint
