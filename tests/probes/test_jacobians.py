"""Test the Jacobians of ViT blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from probes.conditioning.decomposition import BlockRecord, decompose_block
from probes.conditioning.jacobians import (
    LinearMap,
    SingularValueBounds,
    bidiagonalise,
    block_functions,
    bound_singular_values,
    exact_jacobian,
    exact_spectra,
    lanczos_bounds,
    rank_details,
)
from probes.spectra import condition_number, effective_rank
from ssl_bench.errors import ConfigurationError
from ssl_bench.features import pad_to_patch
from ssl_bench.models import ViTConfig, build_vit
from tests.support.matrices import normal

TINY = ViTConfig(image_size=16, patch_size=8, dim=8, depth=1, num_heads=2)
BARE = replace(TINY, skip_attention=False, skip_mlp=False)
PROPOSED = replace(BARE, init="skipless")
FACETS = ["attention", "attention_skip", "mlp", "block", "dominant", "perturbation"]


def block_pass(config=TINY, tokens=4, x=None, sharpness=6.0):
    """Multiply the query and key weights of a ViT block by `sharpness` and run the block."""
    block = build_vit(config, seed=0).double().eval().requires_grad_(False).blocks[0]
    block.get_parameter("attn.qkv.weight")[: 2 * config.dim] *= sharpness
    x = normal(tokens, config.dim, seed=1) if x is None else x
    left = block(x[None])[0]
    return BlockRecord(block, x, left, *decompose_block(block, x, left, config.num_heads))


def condition(values):
    return float(condition_number(values, len(values)))


def finite_differences(function, x, step=1e-5):
    steps = step * torch.eye(x.numel(), dtype=torch.float64).reshape(-1, *x.shape)
    columns = [(function(x + one) - function(x - one)).flatten() / (2 * step) for one in steps]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("config", [TINY, PROPOSED])
def test_jacobians_agree_with_finite_differences(config):
    # The proposed initialisation is already sharp. With more sharpness, the softmax would saturate.
    functions = block_functions(block_pass(config, sharpness=6.0 if config is TINY else 0.6))
    assert functions.keys() == set(FACETS)
    for function, point in functions.values():
        found = exact_jacobian(function, point)
        assert found.abs().max() > 1e-4
        torch.testing.assert_close(found, finite_differences(function, point), rtol=1e-6, atol=1e-8)


def compute_jacobian_terms(one):
    """Compute the two terms whose sum is the Jacobian of an attention layer."""
    # Equation 10 of "Cutting the Skip". As there, matrices are flattened column by column.
    block, x = one.block, one.block.norm1(one.input)
    tokens, dim = x.shape
    heads, width = 2, dim // 2
    query, key, value = (w.T for w in block.attn.qkv.weight.split(dim))
    output = block.attn.proj.weight.T
    dominant = torch.zeros(tokens * dim, tokens * dim, dtype=torch.float64)
    perturbation = dominant.clone()
    for head in range(heads):
        channels = slice(head * width, (head + 1) * width)
        form = query[:, channels] @ key[:, channels].T / math.sqrt(width)
        product = value[:, channels] @ output[channels]
        attention = F.softmax(x @ form @ x.T, dim=1)
        dominant += torch.kron(product.T.contiguous(), attention)
        for i in range(tokens):
            softmax = torch.diag(attention[i]) - torch.outer(attention[i], attention[i])
            for m in range(tokens):
                for p in range(dim):
                    # The logits of row i are x_i form x_j. Channel p of token m changes.
                    logits = torch.zeros(tokens, dtype=torch.float64)
                    logits[m] += x[i] @ form[:, p]
                    if i == m:
                        logits += x @ form[p]
                    moved = softmax @ logits @ x @ product
                    rows = torch.arange(dim) * tokens + i
                    perturbation[rows, p * tokens + m] += moved
    return dominant, perturbation


def reorder_by_columns(matrix, tokens, dim):
    """Convert a Jacobian from row-major to column-major order."""
    order = torch.arange(tokens * dim).reshape(tokens, dim).T.flatten()
    return matrix[order][:, order]


def test_b_and_e_equal_equation_10_and_sum_to_jacobians():
    one = block_pass()
    functions = block_functions(one)
    tokens, dim = one.input.shape
    found = {
        name: reorder_by_columns(exact_jacobian(*functions[name]), tokens, dim)
        for name in ("attention", "attention_skip", "dominant", "perturbation")
    }
    dominant, perturbation = compute_jacobian_terms(one)

    torch.testing.assert_close(found["dominant"], dominant, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["perturbation"], perturbation, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["attention"], dominant + perturbation)
    identity = torch.eye(tokens * dim, dtype=torch.float64)
    torch.testing.assert_close(found["attention_skip"], dominant + perturbation + identity)
    share = torch.linalg.matrix_norm(perturbation, 2) / torch.linalg.matrix_norm(dominant, 2)
    assert share > 0.05


def linear_map(matrix):
    return LinearMap(len(matrix), lambda v: matrix @ v, lambda u: matrix.T @ u)


def bounds_of(matrix, steps, seed=0) -> SingularValueBounds:
    test_vector = normal(len(matrix), seed=7)
    return bound_singular_values(
        linear_map(matrix), steps=steps, seed=seed, test_vector=test_vector
    )


def matrix_with_singular_values(values, seed=0):
    left, right = (torch.linalg.qr(normal(len(values), len(values), seed=s)).Q for s in (seed, 9))
    return left @ torch.diag(values) @ right.T


@pytest.mark.parametrize(("config", "is_padded"), [(TINY, True), (PROPOSED, False)])
def test_lanczos_and_the_exact_singular_values_agree(config, is_padded):
    x = None
    if is_padded:
        model = build_vit(config, seed=0).double().eval().requires_grad_(False)
        x = model.embed(pad_to_patch(normal(3, 10, 12)[None], 8))[0]
    one = block_pass(config, x=x)
    exact = exact_spectra(one)
    bounds = lanczos_bounds(one, steps=one.input.numel(), seed=0)
    assert bounds.keys() == exact.keys() == set(FACETS)
    for facet, found in bounds.items():
        assert found.largest == pytest.approx(exact[facet][0].item(), rel=1e-10)
        if math.isfinite(known := condition(exact[facet])):
            assert found.condition_number_at_least == pytest.approx(known, rel=1e-4)


@pytest.mark.parametrize("steps", [3, 8, 20])
def test_lanczos_bounds_contain_the_true_values(steps):
    values = torch.linspace(1, 40, 60).double()
    for seed in range(5):
        found = bounds_of(matrix_with_singular_values(values, seed), steps, seed)
        assert found.steps == steps
        assert found.condition_number_at_least <= 40 * (1 + 1e-12)
        assert found.condition_number_at_most >= 40 * (1 - 1e-12)
        assert (values - found.largest).abs().min() <= found.largest_residual * (1 + 1e-9)
        assert (values - found.smallest).abs().min() <= found.smallest_residual * (1 + 1e-9)
        if steps == 20:
            # After 20 of 60 steps, the largest value has nearly converged.
            assert found.largest_residual < 0.1
        assert found.largest_at_most >= 40
        assert found.smallest_at_least <= 1


def test_a_narrow_spectrum_is_bounded_from_both_sides():
    matrix = matrix_with_singular_values(torch.linspace(1, 2, 200).double())
    found = bounds_of(matrix, 40)
    assert 1.99 < found.condition_number_at_least <= 2
    assert 2 <= found.condition_number_at_most < 2.3
    # Theorem 4.2 of Kuczynski and Wozniakowski, for 40 steps and a failure of 0.05 / 2.
    error = (math.log(1.648 * math.sqrt(200) / 0.025) / (2 * 40 - 1)) ** 2
    assert found.largest_at_most == pytest.approx(found.largest / math.sqrt(1 - error))
    assert bounds_of(matrix, 2).condition_number_at_most == math.inf


def test_vectors_stay_orthogonal_over_a_wide_spectrum():
    matrix = matrix_with_singular_values(10.0 ** -torch.linspace(0, 10, 80).double())
    diagonal, above = bidiagonalise(linear_map(matrix), normal(80, seed=3), 80)
    found = torch.linalg.svdvals(torch.diag(diagonal) + torch.diag(above[:-1], 1))
    # Without orthogonality, large values would occur repeatedly, and small ones would be missing.
    np.testing.assert_allclose(found, torch.linalg.svdvals(matrix), rtol=1e-4, atol=1e-13)


def test_the_effective_rank_is_estimated_from_one_random_vector():
    values = torch.linspace(0, 1, 500).double() ** 4
    shares = values / values.sum()
    expected = float(torch.special.entr(shares).sum().exp())
    estimates = [bounds_of(torch.diag(values), 40, seed).effective_rank for seed in range(8)]
    assert np.mean(estimates) == pytest.approx(expected, rel=0.1)
    assert np.std(estimates) < 0.15 * expected


def test_degenerate_matrices_have_no_undefined_bounds():
    for matrix, number, rank in (
        (torch.zeros(6, 6).double(), math.inf, 0),
        # The rank is only estimated from one random vector.
        (torch.outer(normal(6), normal(6, seed=1)), math.inf, None),
        (3 * torch.eye(6).double(), 1, 6),
    ):
        found = bounds_of(matrix, 6)
        assert found.condition_number_at_least == pytest.approx(number)
        assert found.condition_number_at_most == pytest.approx(number)
        assert math.isfinite(found.effective_rank)
        assert rank is None or found.effective_rank == pytest.approx(rank)


def test_blocks_with_a_norm_are_singular_only_without_a_skip():
    bare, whole = block_pass(BARE), block_pass(TINY)
    exact = exact_spectra(bare)["block"]
    assert condition(exact) == math.inf
    # The norm removes the mean of each of the four tokens. Its eps keeps their length.
    assert rank_details(exact)["rank"] == 4 * 7
    assert 1 < effective_rank(exact) < 28
    assert math.isfinite(rank_details(exact)["condition_number_of_rank"])
    found = lanczos_bounds(bare, steps=3, seed=0)
    assert found["block"].condition_number_at_least == math.inf
    assert found["block"].smallest_residual == math.inf
    assert math.isfinite(condition(exact_spectra(whole)["block"]))
    assert math.isfinite(lanczos_bounds(whole, steps=3, seed=0)["block"].condition_number_at_least)


def test_equal_tokens_make_the_dominant_term_singular():
    one = block_pass(x=normal(1, 8).expand(4, 8).contiguous())
    spectrum = exact_spectra(one)["dominant"]
    assert condition(spectrum) == math.inf
    # Uniform attention has rank one, and the product of values and output has rank 8.
    assert rank_details(spectrum)["rank"] == 8


def test_too_many_tokens_for_exact_jacobians_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        exact_spectra(block_pass(tokens=1025))
    assert caught.value.hint == ("probe.protocol=jacobian_lanczos",)
