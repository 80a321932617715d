"""SOAP against a plain restatement in NumPy, its speed in kernel launches, and its checkpoints."""

# torch documents LinAlgError and start_processes but exports neither to type checkers.
# pyright: reportPrivateImportUsage=false

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.optimizers import soap
from pretrain.optimizers.recipes import Soap, parameter_groups
from pretrain.optimizers.soap import SOAP
from ssl_bench.models import ViTConfig, build_vit
from tests.support.plain_soap import (
    BETAS,
    FREQUENCY,
    LIMIT,
    PlainSoap,
    has_gradient,
    optimise,
    schedule,
    weights_and_gradients,
)

# Mean over a refresh period on the same 12-block encoder, published implementation at a1e5535.
REFERENCE_OPS = 2118


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stagger", [False, True])
def test_fifty_steps_equal_the_plain_algorithm_in_float64(stagger, device):
    weights, noise = weights_and_gradients(50)
    parameters = [nn.Parameter(weight.clone().to(device)) for weight in weights]
    there = [[gradient.to(device) for gradient in step] for step in noise]
    optimizer = SOAP(
        parameters,
        betas=BETAS[:2],
        shampoo_beta=BETAS[2],
        max_precond_dim=LIMIT,
        precondition_frequency=FREQUENCY,
        stagger=stagger,
    )
    optimise(optimizer, parameters, there)

    for index, (weight, parameter) in enumerate(zip(weights, parameters, strict=True)):
        phase = optimizer.state[parameter]["phase"]
        plain = PlainSoap(weight.numpy(), limit=LIMIT, frequency=FREQUENCY, phase=phase)
        for step, gradients in enumerate(noise):
            if has_gradient(index, step):
                plain.learn(gradients[index].numpy() + 0.3 * plain.weight, *schedule(step))
        assert np.abs(plain.weight - parameter.detach().cpu().numpy()).max() <= 1e-8, index


@pytest.mark.parametrize("device", DEVICES)
def test_few_gradients_leave_orthonormal_bases_that_begin_with_them(device):
    # As of a class token: 24 axes, and a gradient more at each step.
    token = nn.Parameter(torch.zeros(1, 24, device=device))
    optimizer = SOAP([token], betas=BETAS[:2], precondition_frequency=4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        token.grad = torch.randn(1, 24, generator=generator).to(device)
        optimizer.step()
    state = optimizer.state[token]
    basis, statistics = (state[kind][1].cpu() for kind in ("bases", "statistics"))
    assert torch.allclose(basis.T @ basis, torch.eye(24), atol=1e-5)
    energies = (basis * (statistics @ basis)).sum(0)
    assert energies[:5].sum() == pytest.approx(float(statistics.trace()), rel=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_bases_of_a_parameter_without_any_gradient_stay_orthonormal(device):
    weight = nn.Parameter(torch.zeros(6, 4, device=device))
    optimizer = SOAP([weight], precondition_frequency=2)
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    for basis in optimizer.state[weight]["bases"].values():
        assert torch.allclose((basis.T @ basis).cpu(), torch.eye(len(basis)), atol=1e-6)


def test_rectangular_matrices_start_in_an_eigenbasis_of_the_first_gradient():
    parameter = nn.Parameter(torch.zeros(6, 3, dtype=torch.float64))
    parameter.grad = torch.randn(6, 3, dtype=torch.float64)
    optimizer = SOAP([parameter])
    optimizer.step()
    basis = optimizer.state[parameter]["bases"][0]
    values = basis.T @ (0.05 * parameter.grad @ parameter.grad.T) @ basis
    assert torch.allclose(basis.T @ basis, torch.eye(6, dtype=torch.float64))
    assert torch.allclose(values, values.diag().diag())
    assert torch.equal(values.diag().argsort(descending=True)[:3], torch.arange(3))


def test_the_first_gradient_makes_neither_a_step_nor_a_decay():
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(4, 4), (3,), ()]]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = SOAP(parameters, lr=0.1, weight_decay=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def digit_losses(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    """Losses of a network of square matrices, whose gradients have full rank, in float64."""
    pixels, classes = map(torch.from_numpy, load_digits(return_X_y=True))
    images = pixels.view(-1, 4, 2, 4, 2).mean((2, 4)).flatten(1)
    images = (images - images.mean(0)) / images.std(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    optimizer, losses = make(list(model.parameters())), []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_agree_with_another_implementation():
    ours = digit_losses(lambda p: SOAP(p, lr=1e-2, weight_decay=0.0))
    others = digit_losses(lambda p: pytorch_optimizer.SOAP(p, lr=1e-2, weight_decay=0.0))
    assert ours[-1] < 0.4 * ours[0]
    # The other one decomposes in float32, hence not closer.
    assert max(abs(a - b) for a, b in zip(ours, others, strict=True)) <= 1e-5


def transformer_losses(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    model = build_vit(ViTConfig(image_size=16, patch_size=4, dim=32, depth=3, num_heads=2), seed=0)
    parameters = list(model.double().parameters())
    generator = torch.Generator().manual_seed(1)
    images, wanted = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(64, 3, 16, 16), (64, 32)]
    )
    optimizer, losses = make(parameters), []
    for _ in range(25):
        loss = (model(images) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_of_a_transformer_agree_with_another_implementation():
    # Gradients of rectangular matrices leave a null space, where any basis is an eigenbasis.
    ours = transformer_losses(lambda p: SOAP(p, lr=5e-5, weight_decay=0.0))
    others = transformer_losses(lambda p: pytorch_optimizer.SOAP(p, lr=5e-5, weight_decay=0.0))
    assert ours[0] - ours[-1] > 0.05
    assert max(abs(a - b) for a, b in zip(ours, others, strict=True)) <= 1e-3


def matrix_regression(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> float:
    generator = torch.Generator().manual_seed(0)
    turns = [torch.linalg.qr(torch.randn(10, 10, generator=generator)).Q for _ in range(2)]
    left, right = (turn @ torch.logspace(0, -2, 10).diag() @ turn.T for turn in turns)
    target = left @ torch.randn(10, 10, generator=generator) @ right
    weight, loss = nn.Parameter(torch.zeros(10, 10)), torch.tensor(0.0)
    optimizer = make([weight])
    for step in range(200):
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * (1 - step / 200)
        loss = (left @ weight @ right - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_the_eigenbasis_beats_adamw_on_an_ill_conditioned_problem():
    rates = [0.03, 0.1, 0.3]
    adamw = min(
        matrix_regression(lambda p, lr=lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.0))
        for lr in rates
    )
    ours = min(matrix_regression(lambda p, lr=lr: SOAP(p, lr=lr, weight_decay=0.0)) for lr in rates)
    assert ours < 0.1 * adamw


def problem(dtype: torch.dtype) -> tuple[list[nn.Parameter], SOAP]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 6), (6, 6), (5, 3), (6,), (), (4, 3, 2, 2)]
    parameters = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}]
    return parameters, SOAP(groups, lr=1e-2, precondition_frequency=4, stagger=True)


def advance(parameters: Sequence[nn.Parameter], optimizer: SOAP, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if index == 1 and step < 3 else gradient
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_restored_run_continues_bit_for_bit(dtype):
    straight, optimizer = problem(dtype)
    advance(straight, optimizer, range(6))
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), straight), file)
    advance(straight, optimizer, range(6, 17))

    file.seek(0)
    restored, other = problem(dtype)
    with torch.serialization.safe_globals([nn.Parameter]):
        state, weights = torch.load(file, weights_only=True)
    for parameter, weight in zip(restored, weights, strict=True):
        parameter.data.copy_(weight.data)
    other.load_state_dict(state)
    advance(restored, other, range(6, 17))
    assert all(torch.equal(a, b) for a, b in zip(straight, restored, strict=True))


def test_state_is_kept_in_float32_for_low_precision_parameters():
    parameters, optimizer = problem(torch.bfloat16)
    advance(parameters, optimizer, range(3))
    other = problem(torch.bfloat16)[1]
    other.load_state_dict(optimizer.state_dict())
    for state in other.state_dict()["state"].values():
        tensors = [state["exp_avg"], state["exp_avg_sq"]]
        tensors += [*state["statistics"].values(), *state["bases"].values()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


class OpCounter(TorchDispatchMode):
    """Counts tensor operations, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.namespace == "aten":
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def vit_steps(num_steps: int) -> Counter[str]:
    config = ViTConfig(image_size=32, patch_size=8, dim=24, depth=12, num_heads=2)
    model = build_vit(config, seed=0)
    optimizer = SOAP(parameter_groups(model.named_parameters()), weight_decay=0.1)
    total: Counter[str] = Counter()
    for step in range(1 + num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with OpCounter() as counter:
            optimizer.step()
        total += counter.names if step else Counter()
    return total


def test_a_step_takes_a_sixteenth_of_the_reference_operations():
    ops = vit_steps(10)
    assert ops["aten::linalg_qr"] > 0
    assert ops.total() / 10 < REFERENCE_OPS / 16


def test_a_step_never_reads_a_value_back_to_the_host():
    # A tensor of the meta device has no values: whatever asks for one raises.
    with torch.device("meta"):
        parameters = [nn.Parameter(torch.randn(s)) for s in [(4, 4), (4, 4), (3,), (4, 3, 2, 2)]]
    optimizer = SOAP(parameters, precondition_frequency=2)
    with OpCounter() as counter:
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    assert counter.names["aten::linalg_qr"] > 0
    assert counter.names["aten::_local_scalar_dense"] == 0


@pytest.mark.parametrize(("told", "spread"), [(None, False), (False, False), (True, True)])
def test_on_a_cpu_refreshes_are_spread_only_where_asked(told, spread):
    optimizer = Soap(stagger=told).build([{"params": [nn.Parameter(torch.zeros(2, 2))]}])

    assert optimizer.param_groups[0]["stagger"] is spread


def test_staggered_refreshes_are_spread_over_the_period():
    parameters = [nn.Parameter(torch.randn(3, 3)) for _ in range(20)]
    optimizer = SOAP(parameters, stagger=True, precondition_frequency=10)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    phases = Counter(optimizer.state[parameter]["phase"] for parameter in parameters)
    assert phases == dict.fromkeys(range(10), 2)


def test_statistics_on_which_float32_fails_are_decomposed_in_float64(monkeypatch):
    solve = torch.linalg.eigh

    def picky(matrices: Tensor) -> tuple[Tensor, Tensor]:
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(matrices)

    matrices = torch.diag(torch.tensor([1.0, 3.0, 2.0]))[None]
    monkeypatch.setattr(torch.linalg, "eigh", picky)
    vectors = soap.eigenvectors(matrices)
    assert vectors.dtype == torch.float32
    assert torch.equal(vectors.abs()[0], torch.eye(3)[:, [1, 2, 0]])


@pytest.mark.parametrize("turn", [0, 1])
def test_ranks_share_the_decompositions_without_a_gap_or_an_overlap(monkeypatch, turn):
    matrices = torch.randn(5, 4, 4)
    parts = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: parts.append(tensor))
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        soap.orthonormal(matrices, matrices, turn=turn, shared=True)
    assert torch.equal(torch.stack(parts).sum(0), torch.linalg.qr(matrices).Q)
    shares = [int((part.abs().sum((1, 2)) > 0).sum()) for part in parts]
    assert sorted(shares) == [1, 2, 2]


def drifting_rank(rank: int, world: int, folder: str) -> None:
    """A processor of its own: its decompositions turn every second vector round."""
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    solve, factor = torch.linalg.eigh, torch.linalg.qr
    signs = (-1.0 if rank else 1.0) ** torch.arange(100)
    torch.linalg.eigh = lambda m: (None, solve(m)[1] * signs[: m.shape[-1]])
    torch.linalg.qr = lambda m: SimpleNamespace(Q=factor(m).Q * signs[: m.shape[-1]])
    weights, noise = weights_and_gradients(8)
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = SOAP(parameters, precondition_frequency=3)
    optimise(optimizer, parameters, noise)
    bases = [basis for p in parameters for basis in optimizer.state[p]["bases"].values()]
    torch.save([*bases, *(p.detach() for p in parameters)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_processes_whose_decompositions_differ_stay_together(tmp_path: Path):
    torch.multiprocessing.start_processes(
        drifting_rank, args=(2, str(tmp_path)), nprocs=2, start_method="fork"
    )
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert len(one) > 4
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    torch.save(trained(shard_refreshes=True), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def trained(*, shard_refreshes: bool) -> list[Tensor]:
    weights, noise = weights_and_gradients(15)
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = SOAP(
        parameters, precondition_frequency=3, stagger=True, shard_refreshes=shard_refreshes
    )
    optimise(optimizer, parameters, noise)
    return [parameter.detach() for parameter in parameters]


def test_two_processes_that_share_refreshes_equal_one(tmp_path: Path):
    # Forked, not spawned: no second import of everything, and no autograd thread is needed.
    torch.multiprocessing.start_processes(
        run_rank, args=(2, str(tmp_path)), nprocs=2, start_method="fork"
    )
    alone = trained(shard_refreshes=False)
    for rank in range(2):
        weights = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"precondition_frequency": 0}, "1 or more"), ({"betas": (0.9, 1.0)}, r"\[0, 1\)")],
)
def test_impossible_hyperparameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SOAP([nn.Parameter(torch.zeros(2))], **options)
