"""Test the orthogonal self-attention layer."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.description import describe, find_differences
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.models import ViTConfig, build_vit
from ssl_bench.models.initialisers import OsaInit, XavierInit
from ssl_bench.models.orthogonal import (
    OrthogonalAttention,
    cholesky_basis,
    max_doublings,
    newton_schulz_basis,
    phi,
    phi_without_sync,
)
from tests.support.matrices import normal

DIM, HEADS = 12, 3
WIDTH = DIM // HEADS
BASES = ("qr", "newton_schulz")
TINY = ViTConfig(
    image_size=32, patch_size=8, dim=DIM, depth=2, num_heads=HEADS, attention="osa_qr",
    skip_attention=False, skip_mlp=False, norm="none", qkv_bias=False, init="osa",
)  # fmt: skip
ROWS = ("qr", "newton_schulz", "vit", "vit_no_skip", "vit_no_skip_no_norm")


def layer(basis: str, *, alpha: float = 1.0, seed: int = 0) -> OrthogonalAttention:
    torch.manual_seed(seed)
    return OrthogonalAttention(DIM, HEADS, basis, alpha).double()


def tokens(count: int, *, batch: int = 2, scale: float = 3.0) -> Tensor:
    return scale * normal(batch, count, DIM, seed=1)


def compute_matrices(
    attention: OrthogonalAttention, x: Tensor, head: int
) -> tuple[Tensor, Tensor, Tensor]:
    # S is the skew-symmetric matrix in equation 5 of "Orthogonal Self-Attention"
    # by Zhang and Martens.
    query, key, value = attention.qkv.weight.T.chunk(3, dim=1)
    columns = slice(head * WIDTH, (head + 1) * WIDTH)
    q, k, v = (x @ weight[:, columns] for weight in (query, key, value))
    skew = attention.alpha[head] / WIDTH**0.5 * (q @ k.T - k @ q.T)
    return skew, torch.cat([q, k], dim=1), v


def attend_naively(attention: OrthogonalAttention, x: Tensor) -> Tensor:
    """Compute orthogonal self-attention from its definition, with `torch.linalg.matrix_exp`."""
    # Equations 4 and 5 of "Orthogonal Self-Attention" by Zhang and Martens.
    total = torch.zeros_like(x)
    for head in range(HEADS):
        skew, _, v = compute_matrices(attention, x, head)
        rows = attention.proj.weight.T[head * WIDTH : (head + 1) * WIDTH]
        total = total + torch.linalg.matrix_exp(skew) @ v @ rows
    return total


@pytest.mark.parametrize(("count", "alpha"), [(1, 1.0), (5, 0.1), (2 * WIDTH, 1.0), (30, 20.0)])
def test_attention_with_qr_is_the_exponential_of_the_full_matrix(count, alpha):
    attention, x = layer("qr", alpha=alpha), tokens(count)
    matrices = attention.attention(x)
    for image in range(2):
        for head in range(HEADS):
            skew, _, _ = compute_matrices(attention, x[image], head)
            expected = torch.linalg.matrix_exp(skew)
            torch.testing.assert_close(matrices[image, head], expected, rtol=0, atol=1e-10)
    expected = torch.stack([attend_naively(attention, image) for image in x])
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [5, 30])
def test_attention_with_newton_schulz_follows_equations_6_to_9(count):
    attention, x = layer("newton_schulz"), tokens(count, batch=1)
    matrices = attention.attention(x)
    for head in range(HEADS):
        skew, m, _ = compute_matrices(attention, x[0], head)
        basis = m / m.norm()
        identity = torch.eye(2 * WIDTH, dtype=m.dtype)
        for _ in range(6):
            basis = basis @ (3 * identity - basis.T @ basis) / 2
        inner = torch.linalg.matrix_exp(basis.T @ skew @ basis) - identity
        expected = torch.eye(count, dtype=m.dtype) + basis @ inner @ basis.T
        torch.testing.assert_close(matrices[0, head], expected, rtol=0, atol=1e-7)
        # The bound of theorem 3.1.
        size = (torch.linalg.matrix_norm(skew, 2).exp() - 1).item() ** 2
        scales = torch.linalg.svdvals(newton_schulz_basis(m))
        bound = size * (scales**2 * (scales**2 - 1)).abs().max().item()
        assert _orthogonality_error(matrices[0, head]) <= bound <= size / 4
    values = attention.qkv(x).chunk(3, dim=2)[2].unflatten(2, (HEADS, WIDTH)).transpose(1, 2)
    expected = attention.proj((matrices @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-9)


def _orthogonality_error(matrix: Tensor) -> float:
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    return torch.linalg.matrix_norm(matrix.T @ matrix - identity, 2).item()


def rank_deficient_tokens() -> dict[str, Tensor]:
    x = tokens(15)
    return {
        "zero": torch.zeros_like(x),
        "all tokens the same": x[:, :1].expand(-1, 15, -1),
        "two different tokens": x[:, [0, 1] * 7 + [0]],
        "one token": x[:, :1],
        "tiny": 1e-30 * x,
    }


@pytest.mark.parametrize("case", rank_deficient_tokens())
@pytest.mark.parametrize("basis", BASES)
def test_rank_deficient_queries_and_keys_have_finite_gradients(case, basis):
    attention = layer(basis).float()
    x = rank_deficient_tokens()[case].float().requires_grad_()
    output = attention(x)
    output.square().sum().backward()
    values = [output, x.grad, *(parameter.grad for parameter in attention.parameters())]
    assert all(value is not None and value.isfinite().all() for value in values)


@pytest.mark.parametrize("case", ["full rank", *rank_deficient_tokens()])
def test_gradients_with_qr_equal_those_of_the_full_exponential(case):
    attention, start = layer("qr"), {"full rank": tokens(15), **rank_deficient_tokens()}[case]
    # With a separate weight for each token, gradients outside the span of Q and K count.
    weights = normal(*start.shape, seed=3)
    gradients = []
    for apply in (
        attention,
        lambda x: torch.stack([attend_naively(attention, image) for image in x]),
    ):
        x = start.clone().requires_grad_()
        inputs = [x, *attention.parameters()]
        gradients.append(torch.autograd.grad((apply(x) * weights).sum(), inputs))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("count", [3, 11])
def test_gradients_with_newton_schulz_equal_finite_differences(count):
    attention = layer("newton_schulz")
    names = [name for name, _ in attention.named_parameters()]

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (x,))

    inputs = [tokens(count, batch=1, scale=1.0), *attention.parameters()]
    inputs = [value.detach().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(output, inputs, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("norm", [0.0, 0.1, 3.0, 200.0])
def test_phi_equals_a_block_of_a_larger_exponential(norm):
    x = normal(6, 6)
    skew = x - x.T
    skew = skew * norm / torch.linalg.matrix_norm(skew, 2)
    doubled = torch.zeros(12, 12, dtype=torch.float64)
    doubled[:6, :6], doubled[:6, 6:] = skew, torch.eye(6)
    expected = torch.linalg.matrix_exp(doubled)[:6, 6:]
    torch.testing.assert_close(phi(skew), expected, rtol=0, atol=1e-12)
    # The result does not depend on the other matrices of the batch.
    several = torch.stack([1e-3 * skew, skew, 50 * skew]).float()
    alone = torch.cat([phi(one[None]) for one in several])
    assert torch.equal(phi(several), alone)
    assert torch.equal(phi_without_sync(several), alone)


def skew_matrices(spectral_norm: float, count: int = 2, side: int = 8) -> Tensor:
    x = normal(count, side, side)
    skew = x - x.mT
    return (skew * spectral_norm / torch.linalg.matrix_norm(skew, 2)[:, None, None]).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_doublings_is_enough_for_all_resolvable_angles(dtype):
    # The doublings cover matrices up to this size. Rounding changes their angles by 2^-7.
    largest = (torch.finfo(dtype).eps * math.factorial(13)) ** (1 / 13) * 2 ** max_doublings(dtype)
    assert largest * torch.finfo(dtype).eps == pytest.approx(2**-7, rel=1)
    angle = torch.tensor(0.999 * largest, dtype=dtype)
    skew = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=dtype) * angle
    exponential = torch.eye(2, dtype=dtype) + phi_without_sync(skew) @ skew
    cosine, sine = angle.double().cos(), angle.double().sin()
    expected = torch.stack([cosine, -sine, sine, cosine]).view(2, 2)
    torch.testing.assert_close(exponential.double(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("norm", [1e6, 1e15])
def test_larger_matrices_give_rotations_with_finite_gradients(norm):
    skew = skew_matrices(norm).requires_grad_()
    phi_without_sync(skew).sum().backward()
    assert skew.grad is not None
    assert skew.grad.isfinite().all()
    skew = skew.detach().double()
    exponential = torch.eye(8) + phi_without_sync(skew.float()).double() @ skew
    error = exponential.mT @ exponential - torch.eye(8)
    assert error.abs().max() < 0.05


@pytest.mark.parametrize("norm", [0.1, 30.0])
def test_the_gradient_of_phi_without_sync_equals_that_of_phi(norm):
    weights = normal(2, 8, 8, seed=1)
    gradients = []
    for function, dtype in ((phi_without_sync, torch.float32), (phi, torch.float64)):
        skew = skew_matrices(norm).to(dtype).requires_grad_()
        (function(skew) * weights.to(dtype)).sum().backward()
        assert skew.grad is not None
        gradients.append(skew.grad.double())
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


def test_the_gradient_of_phi_holds_for_non_skew_matrices():
    x = (0.3 * normal(1, 3, 3)).requires_grad_()
    assert torch.autograd.gradcheck(phi_without_sync, (x,))


@pytest.mark.parametrize("shape", [(30, 8), (5, 8)])
@pytest.mark.parametrize("decades", [0, 7, 12])
def test_a_cholesky_basis_is_orthonormal_and_spans_the_columns(shape, decades):
    rank = min(shape)
    left, right = (torch.linalg.qr(normal(2, size, rank, seed=size)).Q for size in shape)
    m = ((left * torch.logspace(0, -decades, rank).double()) @ right.mT).float()
    basis = cholesky_basis(m).double()
    assert (m - basis @ (basis.mT @ m.double())).abs().max() < 2e-7
    assert torch.linalg.svdvals(basis)[:, :rank].sub(1).abs().max() < 2e-6
    assert torch.equal(cholesky_basis(torch.zeros(2, 5, 3)), torch.zeros(2, 5, 3))
    expected = cholesky_basis(m)[1]
    m[0, 3, 2] = math.nan
    assert torch.equal(cholesky_basis(m)[1], expected)


@pytest.mark.parametrize(("count", "alpha"), [(1, 0.1), (5, 1.0), (30, 1.0)])
def test_attention_with_a_cholesky_basis_equals_qr(count, alpha, monkeypatch):
    attention, x = layer("qr", alpha=alpha), tokens(count, scale=1.0)
    weights = normal(2, count, DIM, seed=2)

    def values_and_gradients(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_(), *attention.to(dtype).parameters()]
        value = attention(inputs[0])
        return [value.detach(), *torch.autograd.grad((value * weights.to(dtype)).sum(), inputs)]

    expected = values_and_gradients(torch.float64)
    monkeypatch.setattr("ssl_bench.models.orthogonal.orthonormal_basis", cholesky_basis)
    monkeypatch.setattr("ssl_bench.models.orthogonal.phi", phi_without_sync)
    for one, other in zip(values_and_gradients(torch.float32), expected, strict=True):
        scale = other.abs().max().clamp_min(1)
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("value", [float("nan"), 1e15])
def test_non_finite_or_huge_tokens_affect_only_their_image(basis, value):
    x = tokens(9).float()
    x[0, 3] = value
    output = layer(basis).float()(x)
    assert output[1].isfinite().all()


class LargestTensor(TorchDispatchMode):
    """A `TorchDispatchMode` that records the size of the largest tensor."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.most = max(self.most, *sizes, 0)
        return result


@pytest.mark.parametrize("basis", BASES)
def test_memory_is_linear_in_the_number_of_tokens(basis):
    attention, sizes = layer(basis), []
    for count in (200, 400):
        with LargestTensor() as largest:
            attention(tokens(count, batch=1)).sum().backward()
        sizes.append(largest.most)
    assert sizes[0] < 200 * 200
    assert sizes[1] <= 2 * sizes[0]


@pytest.mark.parametrize("basis", BASES)
def test_autocast_keeps_the_rotation_in_float32(basis):
    attention, x = layer(basis, alpha=0.1).float(), tokens(30).float()
    with torch.autocast("cpu", torch.bfloat16):
        output, matrices = attention(x), attention.attention(x)
    assert (output - attention(x)).abs().max() < 0.05 * attention(x).abs().max()
    if basis == "qr":
        assert max(_orthogonality_error(matrix) for matrix in matrices.flatten(0, 1)) < 1e-5


def test_the_initialisation_follows_section_4():
    weights = OsaInit().attention(DIM, HEADS, torch.Generator().manual_seed(0))
    for head in range(HEADS):
        columns = slice(head * WIDTH, (head + 1) * WIDTH)
        query, key = weights.query[:, columns], weights.key[:, columns]
        pair = torch.cat([query, key], dim=1)
        identity = torch.eye(2 * WIDTH, dtype=torch.float64)
        torch.testing.assert_close(pair.T @ pair, identity, rtol=0, atol=1e-12)
        # Theorem 4.2: all 2 d_v non-zero singular values of W_Q W_K^T - W_K W_Q^T are 1.
        scales = torch.linalg.svdvals(query @ key.T - key @ query.T)
        expected = torch.tensor([1.0] * (2 * WIDTH) + [0.0] * (DIM - 2 * WIDTH)).double()
        torch.testing.assert_close(scales, expected, rtol=0, atol=1e-12)
        scales = torch.linalg.svdvals(weights.value[:, columns] @ weights.output[columns])
        expected = torch.tensor([1.0] * WIDTH + [0.0] * (DIM - WIDTH)).double()
        torch.testing.assert_close(scales, expected, rtol=0, atol=1e-12)
    # Heads, values and outputs are drawn separately.
    parts = [*weights.query.chunk(HEADS, 1), *weights.value.chunk(HEADS, 1)]
    parts += weights.output.T.chunk(HEADS, 1)
    pairs = [(one, other) for i, one in enumerate(parts) for other in parts[:i]]
    assert all((one - other).abs().max() > 0.1 for one, other in pairs)


def test_a_built_encoder_has_this_initialisation_and_no_biases():
    block = build_vit(TINY, seed=0).blocks[0]
    attention, mlp = block.get_submodule("attn"), block.get_submodule("mlp")
    assert isinstance(attention, OrthogonalAttention)
    rows = attention.proj(torch.eye(DIM))[:WIDTH]
    torch.testing.assert_close(rows @ rows.T, torch.eye(WIDTH), rtol=0, atol=1e-5)
    assert attention.alpha.tolist() == pytest.approx([0.1] * HEADS)
    assert {name for name, _ in attention.named_parameters()} == {
        "alpha", "qkv.weight", "proj.weight"
    }  # fmt: skip
    first, second = mlp.get_parameter("fc1.weight"), mlp.get_parameter("fc2.weight")
    torch.testing.assert_close(first.T @ first, 4 * torch.eye(DIM), rtol=0, atol=1e-5)
    torch.testing.assert_close(second @ second.T, torch.eye(DIM), rtol=0, atol=1e-5)


def test_xavier_weights_are_uniform_within_their_bound():
    initialiser, generator = XavierInit(), torch.Generator().manual_seed(0)
    attention = initialiser.attention(96, 3, generator)
    first, second = initialiser.mlp(96, 384, generator)
    square, long = (6 / 192) ** 0.5, (6 / 480) ** 0.5
    matrices = [attention.query, attention.key, attention.value, attention.output]
    for matrix, bound in [(m, square) for m in matrices] + [(first, long), (second, long)]:
        assert 0.99 * bound < matrix.abs().max() <= bound
        assert matrix.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.05)


def test_rows_of_the_mnist_table_differ_only_in_the_model():
    plans = (build(compose_config("pretraining", [f"experiment=osa_mnist_{row}"])) for row in ROWS)
    described = {row: describe(plan) for row, plan in zip(ROWS, plans, strict=True)}
    changed = {row: find_differences(described["vit"], described[row]) for row in ROWS}
    no_skip = ["model.skip_attention: True -> False", "model.skip_mlp: True -> False"]
    no_norm = ["model.norm: layernorm -> none"]
    osa = ["model.init: xavier -> osa", *no_norm, "model.qkv_bias: True -> False", *no_skip]
    assert changed == {
        "vit": [],
        "vit_no_skip": no_skip,
        "vit_no_skip_no_norm": [*no_norm, *no_skip],
        "qr": ["model.attention: softmax -> osa_qr", *osa],
        "newton_schulz": ["model.attention: softmax -> osa_newton_schulz", *osa],
    }
