"""Test the initial weights of attention and MLP layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ConvNeXtConfig, ViTConfig, build_encoder, build_vit
from ssl_bench.models.encoder import describe_config
from ssl_bench.models.initialisers import MimeticInit, SkiplessInit, uniform_orthogonal

DIM, HEADS = 24, 3
HEAD_DIM = DIM // HEADS
IDENTITY = torch.eye(DIM, dtype=torch.float64)


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def columns_of_head(matrix: Tensor, index: int) -> Tensor:
    return matrix[:, index * HEAD_DIM : (index + 1) * HEAD_DIM]


def truncate_rank(matrix: Tensor, rank: int) -> Tensor:
    left, scales, right = torch.linalg.svd(matrix)
    return left[:, :rank] @ torch.diag(scales[:rank]) @ right[:rank]


def draw_matrices(seed: int, count: int) -> list[Tensor]:
    # The papers call these matrices Z.
    generator = seeded(seed)
    return [
        torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("initialiser", "alpha", "beta"),
    [
        (SkiplessInit(), 1.8, 1.0),
        (SkiplessInit(alpha=2.0, beta=0.6), 2.0, 0.6),
        (MimeticInit(), 0.7, 0.7),
    ],
)
def test_query_times_key_is_a_truncated_noisy_identity_per_head(initialiser, alpha, beta):
    weights = initialiser.attention(DIM, HEADS, seeded(5))
    for index, noise in enumerate(draw_matrices(5, HEADS)):
        product = columns_of_head(weights.query, index) @ columns_of_head(weights.key, index).T
        expected = truncate_rank(alpha * noise + beta * IDENTITY, HEAD_DIM)
        torch.testing.assert_close(product, expected, rtol=0, atol=1e-12)


def test_a_built_encoder_has_these_products():
    # If a matrix were transposed by mistake, the products would lose their diagonals.
    options = {"alpha1": 0.1, "beta1": 1.0, "alpha2": 0.1, "beta2": 0.5}
    config = ViTConfig(
        image_size=16, dim=48, depth=1, num_heads=HEADS, init="mimetic", init_options=options
    )
    attention: Any = build_vit(config, seed=0).blocks[0].attn
    query, key, value = attention.qkv(torch.eye(48)).chunk(3, dim=1)
    heads = zip(query.chunk(HEADS, dim=1), key.chunk(HEADS, dim=1), strict=True)
    traces = [torch.trace(q @ k.T).item() for q, k in heads]
    assert traces == pytest.approx([16.0] * 3, rel=0.1)
    assert torch.trace(attention.proj(value)).item() == pytest.approx(-24.0, rel=0.1)


def test_skipless_values_and_logit_scale_follow_the_paper():
    plain, cancelled = (
        SkiplessInit(c=3.0, cancel_logit_scale=cancel).attention(DIM, HEADS, seeded())
        for cancel in (False, True)
    )
    product = plain.value @ plain.output
    torch.testing.assert_close(product @ product.T, 81 * IDENTITY, rtol=0, atol=1e-11)
    torch.testing.assert_close(plain.value @ plain.value.T, 9 * IDENTITY, rtol=0, atol=1e-12)
    logits = [columns_of_head(w.query, 0) @ columns_of_head(w.key, 0).T for w in (plain, cancelled)]
    torch.testing.assert_close(logits[1] / HEAD_DIM**0.5, logits[0], rtol=0, atol=1e-12)
    assert torch.equal(plain.value, cancelled.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "gain"), [(6, 24, True), (6, 24, False), (24, 6, True), (6, 6, True)]
)
def test_mlp_matrices_are_semi_orthogonal_with_the_published_gain(inputs, outputs, gain):
    weights = uniform_orthogonal(inputs, outputs, seeded(), gain=gain)
    small = weights @ weights.T if inputs <= outputs else weights.T @ weights
    expected = max((outputs / inputs) ** 0.5, 1.0) if gain else 1.0
    identity = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(small, expected**2 * identity, rtol=0, atol=1e-12)


def test_entries_of_orthogonal_matrices_have_mean_zero():
    generator = seeded()
    draws = torch.stack([uniform_orthogonal(8, 4, generator, gain=False) for _ in range(400)])
    # An entry has variance 1 / 8. Without the signs of R, the diagonal would have one sign.
    assert draws.mean(0).abs().max() < 5 * (1 / 8 / 400) ** 0.5


def test_uniform_noise_is_bounded_with_the_variance_of_normal_noise():
    without_identity = SkiplessInit(alpha=1.0, beta=0.0, noise="uniform")
    # A single head has full rank, so the product is Z itself.
    weights = without_identity.attention(64, 1, seeded())
    noise = weights.query @ weights.key.T
    assert noise.abs().max() <= (3 / 64) ** 0.5 + 1e-12
    assert noise.abs().max() > 0.99 * (3 / 64) ** 0.5
    assert noise.square().mean().item() == pytest.approx(1 / 64, rel=0.05)


def test_mimetic_value_times_output_is_noise_minus_identity():
    weights = MimeticInit().attention(DIM, HEADS, seeded(5))
    noise = draw_matrices(5, HEADS + 1)[-1]
    expected = 0.4 * noise - 0.4 * IDENTITY
    torch.testing.assert_close(weights.value @ weights.output, expected, rtol=0, atol=1e-12)
    gram = weights.value.T @ weights.value, weights.output @ weights.output.T
    torch.testing.assert_close(*gram, rtol=0, atol=1e-12)


def mimetic_weights(parts: str) -> dict[str, Tensor]:
    config = ViTConfig(
        image_size=16, dim=48, depth=2, num_heads=HEADS, init="mimetic",
        init_options={"parts": parts},
    )  # fmt: skip
    weights = build_vit(config, seed=0).state_dict()
    pieces = {name: value for name, value in weights.items() if not name.endswith("qkv.weight")}
    for block in (0, 1):
        thirds = weights[f"blocks.{block}.attn.qkv.weight"].chunk(3)
        pieces |= dict(
            zip((f"{block}.{n}" for n in ("query", "key", "value")), thirds, strict=True)
        )
    return pieces


@pytest.mark.parametrize(
    ("parts", "default"), [("qk", ("value", "attn.proj.weight")), ("vo", ("query", "key"))]
)
def test_each_part_of_mimetic_initialisation_can_be_used_alone(parts, default):
    both, one = mimetic_weights("both"), mimetic_weights(parts)
    differ = [name for name in both if not torch.equal(both[name], one[name])]
    assert len(differ) == 4
    assert all(name.endswith(default) for name in differ)
    matrices = torch.stack([one[name] for name in differ])
    assert matrices.std().item() == pytest.approx(0.02, rel=0.05)
    # All matrices of all blocks are different.
    assert len(matrices[:, 0, 0].unique()) == 4


PLAIN = ViTConfig(image_size=16, dim=200, depth=2, num_heads=4)


@pytest.mark.parametrize(
    "config",
    [PLAIN, replace(PLAIN, init="skipless"), ConvNeXtConfig(image_size=16, dim=200, depth=2)],
    ids=["default", "skipless", "convnext"],
)
def test_mlp_options_add_the_terms_of_the_published_equations(config):
    plain, mean, each = (
        build_encoder(replace(config, **more), seed=0).state_dict()
        for more in ({}, {"mlp_mean": -0.25}, {"mlp_input_std": 0.3})
    )

    for name, weight in plain.items():
        first = name.endswith("fc1.weight")
        torch.testing.assert_close(mean[name], weight - 0.25 * first, rtol=0, atol=1e-7)
        if not first:
            assert torch.equal(each[name], weight)
            continue
        # W' = W + 1_p b_n^T adds one number per input, the same for all hidden units.
        added = each[name] - weight
        torch.testing.assert_close(added, added[:1].expand_as(added), rtol=0, atol=1e-6)
        assert added[0].std().item() == pytest.approx(0.3, rel=0.1)
    first, second = (each[n] - plain[n] for n in plain if n.endswith("fc1.weight"))
    assert (first[0] - second[0]).abs().max() > 0.1


def test_former_names_of_the_mlp_options_set_the_fields():
    older = {"mlp_mean": 0.05, "mlp_input_std": 1, "alpha1": 0.6}
    config = ViTConfig(init="mimetic", init_options=older)
    assert config == ViTConfig(
        init="mimetic", init_options={"alpha1": 0.6}, mlp_mean=0.05, mlp_input_std=1.0
    )
    assert ViTConfig.from_dict(config.to_dict() | {"init_options": older}) == config
    with pytest.raises(ConfigurationError) as raised:
        replace(config, init_options={"mlp_mean": 0.1})
    assert raised.value.hint == ("model.init_options.mlp_mean=null",)


def test_default_weights_are_distributed_as_in_official_dino():
    model = build_vit(ViTConfig(image_size=64, dim=96, depth=2, num_heads=3), seed=0)
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    assert len(matrices) == 8
    assert all(p.std().item() == pytest.approx(0.02, rel=0.05) for p in matrices.values())
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.3)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    bound = (3 * 16 * 16) ** -0.5
    assert 0.99 * bound < model.patch_embed.proj.weight.abs().max() <= bound
    biases = [p for n, p in model.blocks.named_parameters() if n.endswith("bias")]
    assert not any(bias.any() for bias in biases)


TOKENS = ("cls_token", "reg_token", "pos_embed")


def build_with_tokens(*, truncated, **options):
    return build_vit(
        ViTConfig(
            image_size=128, patch_size=8, dim=192, depth=1, num_heads=3, num_registers=4,
            truncated_tokens=truncated, **options,
        ),
        seed=5,
    )  # fmt: skip


def test_truncated_tokens_follow_the_truncated_normal_distribution():
    before, after = (build_with_tokens(truncated=truncated) for truncated in (False, True))
    for name, old in before.named_parameters():
        new = after.get_parameter(name)
        kept = old.abs() <= 0.04
        if name in TOKENS:
            assert old.std().item() == pytest.approx(0.02, rel=0.2)
            assert (new.abs() <= 0.04).all()
            assert torch.equal(new[kept], old[kept])
        else:
            assert torch.equal(new, old)
    tokens = after.pos_embed.detach().double()
    # Computed by hand: 1 - 2 * 2 phi(2) / (Phi(2) - Phi(-2)) = 1 - 4 * .0539910 / .9544997.
    assert (tokens.var() / 0.02**2).item() == pytest.approx(0.773741, rel=0.02)
    assert tokens.mean().abs() < 4 * tokens.std() / tokens.numel() ** 0.5
    # (Phi(1) - Phi(-1)) / (Phi(2) - Phi(-2)) = .6826895 / .9544997.
    assert (tokens.abs() < 0.02).double().mean().item() == pytest.approx(0.715233, abs=0.01)

    waves = [
        build_with_tokens(truncated=truncated, position_embedding="sinusoidal")
        for truncated in (False, True)
    ]
    assert torch.equal(waves[0].pos_embed, waves[1].pos_embed)
    assert describe_config(waves[0].config) == describe_config(waves[1].config)
