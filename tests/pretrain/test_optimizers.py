"""Test the optimizers.

SOAP is compared with a NumPy implementation.
"""

import copy
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pretrain.distributed import TrainingRanks
from pretrain.objectives.mae import Mae
from pretrain.optimizers import soap
from pretrain.optimizers.recipes import (
    SOAP,
    AdamW,
    Soap,
    clip_gradients,
    parameter_groups,
)
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import build_vit
from tests.pretrain.plans import CPU, SMALL_DINO, TINY


@pytest.fixture
def model() -> nn.Module:
    encoder = build_vit(replace(TINY, dim=12), seed=0)
    last_layer = nn.ParameterDict({"weight_v": torch.randn(5, 12), "weight_g": torch.ones(5, 1)})
    last_layer["weight_g"].requires_grad_(False)
    return nn.ModuleDict({"backbone": encoder, "last_layer": last_layer})


def names_of(group: dict[str, Any], model: nn.Module) -> set[str]:
    ids = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_matrices_and_tokens_are_decayed_but_vectors_are_not(model):
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
def test_decay_tokens_false_exempts_only_tokens(model, layer_decay):
    model["backbone"].reg_token = nn.Parameter(torch.zeros(1, 2, 12))
    model["mask_token"] = nn.ParameterDict({"mask_token": torch.zeros(1, 1, 12)})
    exempt = {}
    for decay_tokens in (True, False):
        groups = parameter_groups(
            model.named_parameters(), layer_decay=layer_decay, decay_tokens=decay_tokens
        )
        exempt[decay_tokens] = set().union(*(names_of(group, model) for group in groups[1::2]))

    assert exempt[False] - exempt[True] == {
        *(f"backbone.{name}" for name in ("cls_token", "pos_embed", "reg_token")),
        "mask_token.mask_token",
    }
    assert exempt[True] < exempt[False]


@pytest.mark.parametrize(
    ("name", "decays", "decays_as_token"),
    [
        ("bias", True, True),
        ("head.bias", False, False),
        ("backbone.model.layers.0.blocks.0.attn.relative_position_bias_table", True, False),
    ],
)
def test_the_name_of_a_matrix_decides_about_its_decay(name, decays, decays_as_token):
    matrix = nn.Parameter(torch.ones(2, 2))
    for decay_tokens, expected in ((True, decays), (False, decays_as_token)):
        decayed, _ = parameter_groups([(name, matrix)], decay_tokens=decay_tokens)
        assert bool(decayed["params"]) == expected


@pytest.mark.parametrize("global_norm", [False, True])
@pytest.mark.parametrize("most", [3.0, 1e6])
def test_clipping_equals_torch(global_norm, most):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (3,), (), (2, 3, 2, 2), (30, 30)]
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in "ab")
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()
    frozen = nn.Parameter(torch.zeros(3))
    norms = clip_gradients(iter([frozen, *ours]), most, global_norm=global_norm)

    # Torch clips by the norm of all given tensors.
    groups = [theirs] if global_norm else [[parameter] for parameter in theirs]
    expected = torch.stack([nn.utils.clip_grad_norm_(group, most) for group in groups])
    torch.testing.assert_close(norms.norm()[None] if global_norm else norms, expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert frozen.grad is None


def test_recipes_pass_their_fields_to_the_optimizer():
    group = [{"params": [nn.Parameter(torch.zeros(2, 2))]}]
    adamw = AdamW(lr=1.0, betas=[0.5, 0.6], eps=1e-3).build(group).param_groups[0]
    assert (adamw["lr"], adamw["betas"], adamw["eps"]) == (1.0, (0.5, 0.6), 1e-3)
    assert adamw["fused"]
    recipe = Soap(1.0, [0.5, 0.6], 0.7, 1e-3, 4, 99, stagger=True, shard_refreshes=True)
    optimizer = recipe.build(group)
    assert isinstance(optimizer, SOAP)
    for name, value in vars(replace(recipe, betas=(0.5, 0.6))).items():
        assert optimizer.param_groups[0][name] == value


def test_layer_decay_is_refused_without_a_sequence_of_blocks():
    parameters = [
        ("backbone.model.layers.0.blocks.0.mlp.fc1.weight", nn.Parameter(torch.ones(2, 2)))
    ]
    with pytest.raises(ConfigurationError) as caught:
        parameter_groups(parameters, layer_decay=0.5)
    assert caught.value.hint == ("train.layer_decay=1",)


def test_layer_decay_reduces_the_rate_from_head_to_embedding():
    mae, model = (
        Mae(decoder_dim=12, decoder_depth=1, decoder_heads=3),
        replace(TINY, num_registers=1),
    )
    learner = mae.build(model, Timeline(10, 5), seed=0)
    parameters = dict(learner.student.named_parameters())
    groups = parameter_groups(parameters.items(), layer_decay=0.5)

    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert len(scales) == len(parameters) == sum(len(group["params"]) for group in groups)
    embedding = ("cls_token", "reg_token", "pos_embed", "patch_embed.")
    expected = {f"backbone.{name}": 1 / 8 for name in embedding}
    expected |= {"backbone.blocks.0.": 1 / 4, "backbone.blocks.1.": 1 / 2, "backbone.norm.": 1}
    expected["decoder."] = 1
    for name, parameter in parameters.items():
        (scale,) = (scale for start, scale in expected.items() if name.startswith(start))
        assert scales[id(parameter)] == scale, name
    for decayed, exempt in zip(groups[::2], groups[1::2], strict=True):
        assert "weight_decay" not in decayed
        assert exempt["weight_decay"] == 0
        assert all(p.ndim > 1 for p in decayed["params"])


# Decay rates of the mean gradient, of the mean square, and of the statistics.
BETAS = (0.9, 0.97, 0.8)


class PlainSoap:
    """A NumPy version of SOAP for one parameter."""

    # Unlike our implementation, it stores the mean gradient in the original basis.

    def __init__(self, weight: np.ndarray, *, limit: int, frequency: int, phase: int = 0) -> None:
        self.weight, self.frequency, self.phase = weight, frequency, phase
        self.steps = -1
        self.mean, self.square = np.zeros_like(weight), np.zeros_like(weight)
        sizes = weight.shape if weight.ndim > 1 else ()
        self.moments = {i: np.zeros((n, n)) for i, n in enumerate(sizes) if n <= limit}
        self.bases: dict[int, np.ndarray] = {}

    def rotate(self, tensor: np.ndarray, *, back: bool = False) -> np.ndarray:
        for axis, basis in self.bases.items():
            matrix = basis if back else basis.T
            tensor = np.moveaxis(np.tensordot(matrix, tensor, axes=(1, axis)), 0, axis)
        return tensor

    def step(self, gradient: np.ndarray, lr: float, decay: float) -> None:
        self.steps += 1
        if self.steps > 0:
            self.update(gradient, lr, decay)
        for axis, moment in self.moments.items():
            flat = np.moveaxis(gradient, axis, 0).reshape(gradient.shape[axis], -1)
            moment *= BETAS[2]
            moment += (1 - BETAS[2]) * flat @ flat.T
        if self.steps == 0:
            self.bases = {i: np.linalg.eigh(m)[1][:, ::-1] for i, m in self.moments.items()}
        elif (self.steps + self.phase) % self.frequency == 0:
            self.refresh()

    def update(self, gradient: np.ndarray, lr: float, decay: float) -> None:
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * self.rotate(gradient) ** 2
        mean = self.rotate(self.mean) / (1 - BETAS[0] ** self.steps)
        # As in the published code, epsilon is added before the bias correction.
        unbiased = np.sqrt(1 - BETAS[1] ** self.steps)
        direction = mean / ((np.sqrt(self.square) + 1e-8) / unbiased)
        self.weight = (self.weight - lr * self.rotate(direction, back=True)) * (1 - lr * decay)

    def refresh(self) -> None:
        for axis, basis in self.bases.items():
            values = np.einsum("ij,ik,kj->j", basis, self.moments[axis], basis)
            order = np.argsort(-values)
            self.square = np.take(self.square, order, axis=axis)
            self.bases[axis] = np.linalg.qr(self.moments[axis] @ basis[:, order])[0]


# The first statistics have full rank for these shapes, so their eigenbasis is unique. Sides above
# the limit of 12 have no basis. Parameters of equal shape are stacked.
SHAPES = [(12, 12), (8, 8), (12, 12), (40, 12), (12, 40), (7,), (7,), (), (12, 12), (4, 3, 2, 2)]
SHAPES += [(1, 6, 6)]
LATE = {2: 7, 6: 3, 9: 1}
LIMIT, FREQUENCY = 12, 10


def draw_weights_and_gradients(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for _ in range(steps + 1)
    )
    return weights, gradients


def schedule(step: int) -> tuple[float, float]:
    return 1e-2 * (1 + step % 7), 0.05 * (step % 4)


def has_gradient(index: int, step: int) -> bool:
    return step >= LATE.get(index, 0) and not (index == 8 and 20 <= step < 23)


def optimise(
    optimizer: SOAP, parameters: Sequence[nn.Parameter], noise: Sequence, first_step=0
) -> None:
    for step, gradients in enumerate(noise, start=first_step):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"] = schedule(step)
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            coupled = gradient.to(parameter.dtype) + 0.3 * parameter.detach()
            parameter.grad = coupled if has_gradient(index, step) else None
        optimizer.step()


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stagger", [False, True])
def test_soap_equals_the_plain_algorithm_in_float64(stagger, device):
    weights, noise = draw_weights_and_gradients(40)
    parameters = [nn.Parameter(weight.clone().to(device)) for weight in weights]
    on_device = [[gradient.to(device) for gradient in step] for step in noise]
    optimizer = SOAP(
        parameters, betas=BETAS[:2], shampoo_beta=BETAS[2], max_precond_dim=LIMIT,
        precondition_frequency=FREQUENCY, stagger=stagger,
    )  # fmt: skip
    optimise(optimizer, parameters, on_device)

    for index, (weight, parameter) in enumerate(zip(weights, parameters, strict=True)):
        phase = optimizer.state[parameter]["phase"]
        plain = PlainSoap(weight.numpy(), limit=LIMIT, frequency=FREQUENCY, phase=phase)
        for step, gradients in enumerate(noise):
            if has_gradient(index, step):
                plain.step(gradients[index].numpy() + 0.3 * plain.weight, *schedule(step))
        assert np.abs(plain.weight - parameter.detach().cpu().numpy()).max() <= 1e-8, index


def test_shampoo_beta_defaults_to_the_second_beta():
    weights, gradients = draw_weights_and_gradients(5)
    results = []
    for shampoo_beta in (None, 0.8, 0.7):
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = SOAP(
            parameters, betas=(0.7, 0.8), shampoo_beta=shampoo_beta, precondition_frequency=1
        )
        optimise(optimizer, parameters, gradients)
        results.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("device", DEVICES)
def test_bases_after_few_gradients_are_orthonormal_and_begin_with_them(device):
    # Like a class token, it has 24 dimensions, of which each step adds one to the statistics.
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
def test_bases_stay_orthonormal_if_all_gradients_are_zero(device):
    weight = nn.Parameter(torch.zeros(6, 4, device=device))
    optimizer = SOAP([weight], precondition_frequency=2)
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    for basis in optimizer.state[weight]["bases"].values():
        assert torch.allclose((basis.T @ basis).cpu(), torch.eye(len(basis)), atol=1e-6)


def test_soap_agrees_with_another_implementation():
    # The matrices are square, so their gradients have full rank.
    pixels, classes = map(torch.from_numpy, load_digits(return_X_y=True))
    images = pixels.view(-1, 4, 2, 4, 2).mean((2, 4)).flatten(1)
    images = (images - images.mean(0)) / images.std(0)
    losses = {}
    for kind in (SOAP, pytorch_optimizer.SOAP):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
        optimizer = kind(list(model.parameters()), lr=1e-2, weight_decay=0.0)
        losses[kind] = []
        for _ in range(30):
            loss = nn.functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    ours, others = losses.values()
    assert ours[0] - ours[-1] > 0.5
    # The other implementation decomposes in float32.
    assert ours == pytest.approx(others, abs=1e-5, rel=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_restored_optimizer_continues_bit_for_bit(dtype):
    weights, noise = draw_weights_and_gradients(17)
    runs = []
    for is_restored in (False, True):
        parameters = [nn.Parameter(weight.to(dtype, copy=True)) for weight in weights]
        optimizer = SOAP(parameters, precondition_frequency=4, stagger=True)
        optimise(optimizer, parameters, noise[:6])
        if is_restored:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = SOAP(parameters, precondition_frequency=4, stagger=True)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        optimise(optimizer, parameters, noise[6:], first_step=6)
        runs.append([*parameters, *copy_state(optimizer, parameters)])
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {kept}
    assert are_equal(*runs)


@pytest.mark.parametrize(
    ("sides", "expected"),
    [([3] * 20, dict.fromkeys(range(10), 2)), ([3, 4, 5], {0: 1, 1: 1, 2: 1})],
)
def test_staggered_refreshes_are_distributed_over_the_period(sides, expected):
    parameters = [nn.Parameter(torch.randn(side, side)) for side in sides]
    optimizer = SOAP(parameters, stagger=True, precondition_frequency=10)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert Counter(optimizer.state[p]["phase"] for p in parameters) == expected


def test_eigenvectors_are_computed_in_float64_if_float32_fails(monkeypatch):
    solve = torch.linalg.eigh

    def fail_in_float32(matrices: Tensor) -> tuple[Tensor, Tensor]:
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(matrices)

    matrices = torch.diag(torch.tensor([1.0, 3.0, 2.0]))[None]
    monkeypatch.setattr(torch.linalg, "eigh", fail_in_float32)
    vectors = soap.compute_eigenvectors(matrices)
    assert vectors.dtype == torch.float32
    assert torch.equal(vectors.abs()[0], torch.eye(3)[:, [1, 2, 0]])


def train_with_soap(*, flips_signs: bool = False, **options: Any) -> list[Tensor]:
    if flips_signs:
        # Another processor may return every second eigenvector with the other sign.
        solve, factor = torch.linalg.eigh, torch.linalg.qr
        signs = (-1.0) ** torch.arange(100)
        torch.linalg.eigh = lambda m: (None, solve(m)[1] * signs[: m.shape[-1]])
        torch.linalg.qr = lambda m: SimpleNamespace(Q=factor(m).Q * signs[: m.shape[-1]])
    weights, noise = draw_weights_and_gradients(15)
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = SOAP(parameters, precondition_frequency=3, stagger=True, **options)
    optimise(optimizer, parameters, noise)
    bases = [basis for p in parameters for basis in optimizer.state[p]["bases"].values()]
    return [*(p.detach() for p in parameters), *bases]


def run_rank(rank: int, world: int, folder: str, flips_signs: bool, shared: bool) -> None:
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    result = train_with_soap(flips_signs=flips_signs and rank > 0, shard_refreshes=shared)
    result.append(TrainingRanks(CPU, rank, world).average(torch.tensor([float(rank)])))
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True], ids=["flipped signs", "shared refreshes"])
def test_two_processes_with_soap_equal_one(tmp_path, shared):
    # Forked processes need no imports. Forking is safe, because nothing calls autograd.
    torch.multiprocessing.start_processes(
        run_rank, args=(2, str(tmp_path), not shared, shared), nprocs=2, start_method="fork"
    )
    alone = train_with_soap(shard_refreshes=False)
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        # The last value is the mean of both ranks.
        assert are_equal([*alone, torch.tensor([0.5])], result)


@pytest.mark.parametrize("options", [{"precondition_frequency": 0}, {"betas": (0.9, 1.0)}])
def test_impossible_hyperparameters_are_refused(options):
    with pytest.raises(ValueError, match="got"):
        SOAP([nn.Parameter(torch.zeros(2))], **options)


# SOAP refreshes no basis in the tests that compare runs with and without a skipped step.
RECIPES = [AdamW(lr=0.1), Soap(lr=0.1, precondition_frequency=100)]


def start(recipe: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (4, 3), (5,), (2, 3, 2, 2)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return weights, recipe.build([{"params": weights, "weight_decay": 0.1}])


def take_step(
    optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], seed: int, *, value: float = 1
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    assert weights[0].grad is not None
    weights[0].grad[0, 0] = value
    lost = torch.tensor(float(not math.isfinite(value)))
    vars(optimizer).update(found_inf=lost, grad_scale=None)
    optimizer.step()
    optimizer.zero_grad()


def copy_state(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> list[Tensor]:
    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Tensor):
            return [values.detach().clone()]
        inner = values.items() if isinstance(values, dict) else ()
        return [t for key, v in inner if key not in ("step", "skipped") for t in tensors(v)]

    return [*(w.detach().clone() for w in weights), *tensors(dict(optimizer.state))]


def are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [*RECIPES, Soap(lr=0.1, precondition_frequency=1)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_changes_neither_weights_nor_state(recipe, value):
    weights, optimizer = start(recipe)
    for seed in range(4):
        take_step(optimizer, weights, seed)
    before = copy_state(optimizer, weights)
    assert len(before) > 3 * len(weights) - 2
    take_step(optimizer, weights, 4, value=value)
    assert are_equal(copy_state(optimizer, weights), before)
    take_step(optimizer, weights, 5)
    assert not are_equal(copy_state(optimizer, weights), before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("at", [2, 6])
def test_a_skipped_step_does_not_affect_later_steps(recipe, at):
    runs = []
    for has_lost_one in (False, True):
        weights, optimizer = start(recipe)
        for seed in range(9):
            if has_lost_one and seed == at:
                take_step(optimizer, weights, 77, value=math.nan)
                # The saved state must count the skipped step, too.
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = recipe.build([{"params": weights, "weight_decay": 0.1}])
                optimizer.load_state_dict(state)
            take_step(optimizer, weights, seed)
        runs.append(copy_state(optimizer, weights))
    assert are_equal(*runs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_first_step_leaves_a_finite_state(recipe):
    weights, optimizer = start(recipe)
    before = [weight.detach().clone() for weight in weights]
    take_step(optimizer, weights, 0, value=math.nan)
    assert are_equal(weights, before)
    for seed in range(1, 6):
        take_step(optimizer, weights, seed)
    assert all(t.isfinite().all() for t in copy_state(optimizer, weights))
    assert not are_equal(weights, before)


def test_a_non_finite_image_changes_neither_student_nor_center():
    model, timeline = replace(TINY, dim=8, depth=1), Timeline(20, 10)
    learner = SMALL_DINO.build(model, timeline, seed=0)
    options = TrainOptions(batch_size=2, warmup_epochs=0.0)
    trainer = Trainer(learner, AdamW(lr=0.1), options, timeline, TrainingRanks(CPU))

    def take(number: int, value: float = 0.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        crops = [torch.randn(4, 3, 16, 16), torch.randn(2, 3, 16, 16)]
        crops[0][0, 0, 0, 0] += value
        report = trainer.take_step(number, [crops])
        return report, {name: value.clone() for name, value in learner.state_dict().items()}

    for number in range(3):
        _, before = take(number)
    report, after = take(3, math.nan)
    assert not report["gradient_norm"].isfinite()
    kept = [name for name in after if not name.startswith("teacher.")]
    assert "center" in kept
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert all(value.isfinite().all() for value in after.values())

    report, later = take(4)
    assert report["loss"].isfinite()
    assert not torch.equal(later["center"], before["center"])
