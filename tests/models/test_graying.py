"""Test token graying, which raises the singular values of a token matrix to a power."""

import math
from dataclasses import replace

import pytest
import scipy.fft
import torch
from torch import Tensor

from pretrain.objectives.supervised import Supervised
from pretrain.resources import count_training_flops
from pretrain.schedules import Timeline
from probes.conditioning.decomposition import decompose_block
from ssl_bench.models import ViTConfig, build_vit
from ssl_bench.models.graying import (
    TokenGraying,
    dct_matrix,
    gray_by_cholesky,
    gray_by_dct,
    gray_by_svd,
)
from ssl_bench.models.orthogonal import LinearAttention
from ssl_bench.models.vit import Block
from tests.support.matrices import normal

DIM = 12
TINY = ViTConfig(image_size=32, patch_size=8, dim=DIM, depth=2, num_heads=3)
GRAYING = {"svd": gray_by_svd, "dct": gray_by_dct}
FUNCTIONS = {**GRAYING, "cholesky": gray_by_cholesky}
WIDE, TALL, SEVERAL = (1, 5, 9), (1, 9, 5), (3, 4, 7)


def matrix_of(*values: float, rows: int = 7, cols: int = DIM) -> Tensor:
    """Return a random matrix with the given singular values."""
    left, right = (torch.linalg.qr(normal(n, len(values), seed=n)).Q for n in (rows, cols))
    return ((left * torch.tensor(values, dtype=torch.float64)) @ right.T)[None]


def gray_config(config: ViTConfig, kind: str, exponent: float = 0.5) -> ViTConfig:
    return replace(config, graying=kind, graying_exponent=exponent)


@pytest.mark.parametrize("shape", [TALL, SEVERAL])
@pytest.mark.parametrize("exponent", [0.5, 0.9, 1.0])
def test_gray_by_svd_raises_singular_values_as_in_the_paper(shape, exponent):
    x = normal(*shape)
    for image, gray in zip(x, gray_by_svd(x, exponent), strict=True):
        u, s, vh = torch.linalg.svd(image, full_matrices=False)
        expected = u @ torch.diag(s.max() * (s / s.max()) ** exponent) @ vh
        torch.testing.assert_close(gray, expected, rtol=0, atol=1e-12)


def test_gray_by_svd_is_exact_for_small_values_in_float32():
    values = torch.tensor([1, 1e-2, 1e-5])
    gray = gray_by_svd(matrix_of(*values.tolist()).float(), 0.5)
    # The ratio of 1e-5 is above the machine epsilon of 1.2e-7 and below its square root.
    torch.testing.assert_close(torch.linalg.svdvals(gray)[0, :3], values.sqrt(), rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [1, 2, 7, 197])
def test_the_dct_matrix_equals_scipy_and_is_orthonormal(size):
    d = dct_matrix(size, like=torch.zeros(1, dtype=torch.float64))
    x = normal(size, 3)
    expected = torch.from_numpy(scipy.fft.dct(x.numpy(), axis=0, norm="ortho"))
    torch.testing.assert_close(d @ x, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(d @ d.T, torch.eye(size).double(), rtol=0, atol=1e-13)
    assert (dct_matrix(size, like=torch.zeros(1)) - d).abs().max() < 2e-7


@pytest.mark.parametrize("shape", [TALL, SEVERAL])
@pytest.mark.parametrize("exponent", [0.85, 0.95])
def test_gray_by_dct_raises_each_coefficient_of_scipy(shape, exponent):
    x = normal(*shape)
    for image, gray in zip(x, gray_by_dct(x, exponent), strict=True):
        z = torch.from_numpy(scipy.fft.dctn(image.numpy(), norm="ortho"))
        most = z.abs().max()
        raised = z.sign() * most * (z.abs() / most) ** exponent
        expected = torch.from_numpy(scipy.fft.idctn(raised.numpy(), norm="ortho"))
        torch.testing.assert_close(gray, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gray", FUNCTIONS.values(), ids=FUNCTIONS)
def test_graying_is_homogeneous_and_the_identity_for_exponent_one(gray):
    x = normal(2, 7, DIM)
    torch.testing.assert_close(gray(x, 1.0), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(gray(-3e-20 * x, 0.6) / -3e-20, gray(x, 0.6), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gray", GRAYING.values(), ids=GRAYING)
@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_both_modes_of_gradients_agree_with_finite_differences(gray, shape):
    x = normal(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gray(x, 0.6), (x,), check_forward_ad=True)


@pytest.mark.parametrize("values", [(3, 1, 1, 1), (3, 2, 2, 0.01, 0.01), (3, 1, 1 + 1e-12, 0.5)])
@pytest.mark.parametrize("is_tall", [True, False])
def test_gradients_at_repeated_singular_values_equal_finite_differences(values, is_tall):
    start = matrix_of(*values, rows=len(values))
    start = start.mT.contiguous() if is_tall else start
    weights = normal(*start.shape, seed=4)
    x = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((gray_by_svd(x, 0.6) * weights).sum(), x)
    for seed in range(3):
        step = 1e-6 * normal(*start.shape, seed=seed)
        ends = [(gray_by_svd(start + sign * step, 0.6) * weights).sum() for sign in (1, -1)]
        along = (gradient * step).sum().item()
        assert along == pytest.approx((ends[0] - ends[1]).item() / 2, rel=1e-4)


@pytest.mark.parametrize("case", ["zero", "same tokens", "rank two", "one token", "tiny"])
@pytest.mark.parametrize("gray", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_matrices_have_finite_values_and_gradients(case, gray, dtype):
    one = normal(1, 1, DIM)
    start = {
        "zero": 0 * one.expand(1, 7, DIM), "same tokens": one.expand(1, 7, DIM),
        "rank two": matrix_of(3, 1), "one token": one, "tiny": 1e-30 * normal(1, 7, DIM),
    }[case]  # fmt: skip
    x = start.to(dtype).clone().requires_grad_()
    value = gray(x, 0.5)
    value.backward(normal(*x.shape, seed=3).to(dtype))
    assert x.grad is not None
    assert value.isfinite().all()
    assert x.grad.isfinite().all()
    if case in ("same tokens", "one token") and gray is gray_by_cholesky:
        # The largest singular value does not change.
        torch.testing.assert_close(value, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gray", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_image_affects_no_other_image(gray, value):
    x = normal(2, 7, DIM)
    expected = gray(x, 0.7)[1]
    x[0, 3, 2] = value
    result = gray(x, 0.7)
    assert not result[0].isfinite().any()
    torch.testing.assert_close(result[1], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
@pytest.mark.parametrize("decades", [0.5, 5])
@pytest.mark.parametrize("exponent", [0.5, 0.95])
def test_gray_by_cholesky_equals_gray_by_svd(shape, decades, exponent):
    values = torch.logspace(1, 1 - decades, 12).tolist()
    x = matrix_of(*values, rows=shape[0], cols=shape[1]).float()
    weights = normal(*x.shape, seed=3)
    results = []
    for function, start in ((gray_by_cholesky, x), (gray_by_svd, x.double())):
        start_leaf = start.clone().requires_grad_()
        value = function(start_leaf, exponent)
        (gradient,) = torch.autograd.grad((value * weights.to(value.dtype)).sum(), start_leaf)
        results += [value.detach().double() / 10, gradient.double() / gradient.abs().max()]
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=2e-6)
    torch.testing.assert_close(results[1], results[3], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", GRAYING)
def test_autocast_keeps_float32_graying_and_the_dtype(kind):
    module, x = TokenGraying(kind, 0.6), normal(2, 65, DIM).float()
    with torch.autocast("cpu", torch.bfloat16):
        result, low = module(x), module(x.bfloat16())
    torch.testing.assert_close(result, module(x), rtol=0, atol=1e-6)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, GRAYING[kind](x.bfloat16().float(), 0.6).bfloat16())


@pytest.mark.parametrize(("kind", "skip"), [("svd", True), ("dct", False)])
def test_blocks_gray_all_tokens_before_attention_and_skip(kind, skip):
    config, images = replace(TINY, skip_attention=skip, skip_mlp=skip), normal(2, 3, 16, 40).float()
    model, plain = build_vit(gray_config(config, kind), seed=0), build_vit(config, seed=0)
    x = plain.embed(images)
    for block in plain.blocks:
        x = block(GRAYING[kind](x, 0.5))
    torch.testing.assert_close(model.forward_features(images), plain.norm(x))


@pytest.mark.parametrize(("kind", "attention"), [("svd", "softmax"), ("dct", "linear")])
def test_the_conditioning_probe_decomposes_a_block_with_graying(kind, attention):
    config = replace(gray_config(TINY, kind), attention=attention)
    block, x = build_vit(config, seed=0).blocks[0].double(), normal(9, DIM)
    assert isinstance(block, Block)
    with torch.no_grad():
        parts, _ = decompose_block(block, x, block(x[None])[0], TINY.num_heads)
        assert parts is not None
        gray = GRAYING[kind](x[None], 0.5)
        after = (gray + block.attn(block.norm1(gray)))[0]
        torch.testing.assert_close(parts.apply_attention(x), after, rtol=0, atol=1e-12)
    # Linear attention has no attention matrix.
    assert (parts.heads is not None) == (attention == "softmax")


def test_only_the_chosen_blocks_gray_their_tokens():
    config = replace(gray_config(TINY, "svd"), graying_layers=(1,))
    model, x = build_vit(config, seed=0), normal(1, 9, DIM).float()
    plain, gray = build_vit(TINY, seed=0), build_vit(gray_config(TINY, "svd"), seed=0)
    assert torch.equal(model.blocks[0](x), plain.blocks[0](x))
    assert torch.equal(model.blocks[1](x), gray.blocks[1](x))
    # Checkpoints of versions without graying are loaded without graying.
    old = {k: v for k, v in TINY.to_dict().items() if not k.startswith("graying")}
    assert ViTConfig.from_dict(old) == replace(TINY, graying="none", graying_layers=None)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_linear_attention_is_q_k_v_divided_by_its_scale():
    torch.manual_seed(0)
    attention = LinearAttention(DIM, 3, qkv_bias=True).double()
    x = normal(2, 5, DIM)
    for image, output in zip(x, attention(x), strict=True):
        q, k, v = attention.qkv(image).chunk(3, dim=1)
        heads = [
            q[:, i : i + 4] @ k[:, i : i + 4].T / 4**0.5 / 5**0.5 @ v[:, i : i + 4]
            for i in (0, 4, 8)
        ]
        torch.testing.assert_close(output, attention.proj(torch.cat(heads, 1)), rtol=0, atol=1e-12)


def test_flops_of_decompositions_can_be_counted():
    osa = replace(TINY, qkv_bias=False, attention="osa_qr", skip_attention=False, skip_mlp=False)
    views = normal(2, 3, 32, 32).float(), torch.tensor([0, 1]), torch.tensor(1.0)
    for config in (gray_config(TINY, "svd"), osa):
        learner = Supervised().build(config, Timeline(1, 1), seed=0, class_names=("a", "b"))
        assert count_training_flops(learner, views, 0) > 0
