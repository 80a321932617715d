"""Weight-decay groups, clipping, SOAP compared with a NumPy restatement, and skipped steps."""

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
def test_with_decay_tokens_false_only_tokens_become_exempt(model, layer_decay):
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
def test_a_matrix_is_decayed_by_its_name(name, decays, decays_as_token):
    matrix = nn.Parameter(torch.ones(2, 2))
    for decay_tokens, expected in ((True, decays), (False, decays_as_token)):
        decayed, _ = parameter_groups([(name, matrix)], decay_tokens=decay_tokens)
        assert bool(decayed["params"]) == expected


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("most", [3.0, 1e6])
def test_clipping_equals_that_of_torch(whole, most):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (3,), (), (2, 3, 2, 2), (30, 30)]
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in "ab")
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()
    frozen = nn.Parameter(torch.zeros(3))

    norms = clip_gradients(iter([frozen, *ours]), most, whole=whole)

    # Torch clips the whole; alone, each tensor is the whole.
    groups = [theirs] if whole else [[parameter] for parameter in theirs]
    expected = torch.stack([nn.utils.clip_grad_norm_(group, most) for group in groups])
    torch.testing.assert_close(norms.norm()[None] if whole else norms, expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert frozen.grad is None


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
    with pytest.raises(ConfigurationError) as caught:
        parameter_groups(
            [("backbone.model.layers.0.blocks.0.mlp.fc1.weight", matrix)], layer_decay=0.5
        )
    assert caught.value.hint == ("train.layer_decay=1",)


def test_rates_fall_by_a_factor_from_the_head_to_the_embedding():
    model = replace(TINY, num_registers=1)
    learner = Mae(decoder_dim=12, decoder_depth=1, decoder_heads=3).build(
        model, Timeline(10, 5), seed=0
    )
    named = dict(learner.student.named_parameters())

    groups = parameter_groups(named.items(), layer_decay=0.5)

    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert len(scales) == len(named) == sum(len(group["params"]) for group in groups)
    expected = {
        "backbone.cls_token": 1 / 8,
        "backbone.reg_token": 1 / 8,
        "backbone.pos_embed": 1 / 8,
        "backbone.patch_embed.": 1 / 8,
        "backbone.blocks.0.": 1 / 4,
        "backbone.blocks.1.": 1 / 2,
        "backbone.norm.": 1,
        "decoder.": 1,
    }
    for name, parameter in named.items():
        (scale,) = (scale for start, scale in expected.items() if name.startswith(start))
        assert scales[id(parameter)] == scale, name
    for decayed, exempt in zip(groups[::2], groups[1::2], strict=True):
        assert "weight_decay" not in decayed
        assert exempt["weight_decay"] == 0
        assert all(p.ndim > 1 for p in decayed["params"])


# Decay rates of the mean gradient, of its square and of the statistics.
BETAS = (0.9, 0.97, 0.8)


class PlainSoap:
    """SOAP for one parameter and one matrix at a time, with a mean gradient that is not rotated."""

    def __init__(self, weight: np.ndarray, *, limit: int, frequency: int, phase: int = 0) -> None:
        self.weight, self.frequency, self.phase = weight, frequency, phase
        self.steps = -1
        self.mean, self.square = np.zeros_like(weight), np.zeros_like(weight)
        sizes = weight.shape if weight.ndim > 1 else ()
        self.moments = {i: np.zeros((n, n)) for i, n in enumerate(sizes) if n <= limit}
        self.bases: dict[int, np.ndarray] = {}

    def turned(self, tensor: np.ndarray, *, back: bool = False) -> np.ndarray:
        for axis, basis in self.bases.items():
            matrix = basis if back else basis.T
            tensor = np.moveaxis(np.tensordot(matrix, tensor, axes=(1, axis)), 0, axis)
        return tensor

    def learn(self, gradient: np.ndarray, lr: float, decay: float) -> None:
        self.steps += 1
        if self.steps > 0:
            self.move(gradient, lr, decay)
        for axis, moment in self.moments.items():
            flat = np.moveaxis(gradient, axis, 0).reshape(gradient.shape[axis], -1)
            moment *= BETAS[2]
            moment += (1 - BETAS[2]) * flat @ flat.T
        if self.steps == 0:
            self.bases = {i: np.linalg.eigh(m)[1][:, ::-1] for i, m in self.moments.items()}
        elif (self.steps + self.phase) % self.frequency == 0:
            self.renew()

    def move(self, gradient: np.ndarray, lr: float, decay: float) -> None:
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * self.turned(gradient) ** 2
        mean = self.turned(self.mean) / (1 - BETAS[0] ** self.steps)
        # The published code adds epsilon before it corrects the square for its bias.
        unbiased = np.sqrt(1 - BETAS[1] ** self.steps)
        direction = mean / ((np.sqrt(self.square) + 1e-8) / unbiased)
        self.weight = (self.weight - lr * self.turned(direction, back=True)) * (1 - lr * decay)

    def renew(self) -> None:
        for axis, basis in self.bases.items():
            values = np.einsum("ij,ik,kj->j", basis, self.moments[axis], basis)
            order = np.argsort(-values)
            self.square = np.take(self.square, order, axis=axis)
            self.bases[axis] = np.linalg.qr(self.moments[axis] @ basis[:, order])[0]


# Square, or long enough on the other axes: the first statistics then have full rank, and their
# eigenbasis is unique. 12 is the limit and 40 is above it; equal shapes are stacked.
SHAPES = [(12, 12), (8, 8), (12, 12), (40, 12), (12, 40), (7,), (7,), (), (12, 12), (4, 3, 2, 2)]
SHAPES += [(1, 6, 6)]
LATE = {2: 7, 6: 3, 9: 1}
LIMIT, FREQUENCY = 12, 10


def weights_and_gradients(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    draws = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for _ in range(steps + 1)
    ]
    return draws[0], draws[1:]


def schedule(step: int) -> tuple[float, float]:
    return 1e-2 * (1 + step % 7), 0.05 * (step % 4)


def has_gradient(index: int, step: int) -> bool:
    """Return whether a parameter has a gradient in a step."""
    return step >= LATE.get(index, 0) and not (index == 8 and 20 <= step < 23)


def optimise(optimizer: SOAP, parameters: Sequence[nn.Parameter], noise: Sequence, at=0) -> None:
    """Take a step per item of `noise`, added to 0.3 times the parameter."""
    for step, gradients in enumerate(noise, start=at):
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


def test_the_statistics_decay_by_the_second_beta_unless_another_one_is_given():
    weights, gradients = weights_and_gradients(5)
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
def test_few_gradients_leave_orthonormal_bases_that_begin_with_them(device):
    # Like a class token: 24 axes, and a gradient more at each step.
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


def test_losses_agree_with_another_implementation():
    # A network of square matrices, whose gradients have full rank.
    pixels, classes = map(torch.from_numpy, load_digits(return_X_y=True))
    images = pixels.view(-1, 4, 2, 4, 2).mean((2, 4)).flatten(1)
    images = (images - images.mean(0)) / images.std(0)
    losses = {}
    for kind in (SOAP, pytorch_optimizer.SOAP):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
        optimizer = kind(list(model.parameters()), lr=1e-2, weight_decay=0.0)
        losses[kind] = []
        for _ in range(60):
            loss = nn.functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    ours, others = losses.values()
    assert ours[0] - ours[-1] > 1.0
    # The other one decomposes in float32, hence not closer.
    assert ours == pytest.approx(others, abs=1e-5, rel=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_restored_run_continues_bit_for_bit(dtype):
    weights, noise = weights_and_gradients(17)
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
        optimise(optimizer, parameters, noise[6:], at=6)
        runs.append([*parameters, *everything(optimizer, parameters)])
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {kept}
    assert same(*runs)


@pytest.mark.parametrize(
    ("sides", "expected"),
    [([3] * 20, dict.fromkeys(range(10), 2)), ([3, 4, 5], {0: 1, 1: 1, 2: 1})],
)
def test_staggered_refreshes_are_spread_over_the_period(sides, expected):
    parameters = [nn.Parameter(torch.randn(side, side)) for side in sides]
    optimizer = SOAP(parameters, stagger=True, precondition_frequency=10)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert Counter(optimizer.state[p]["phase"] for p in parameters) == expected


def test_statistics_on_which_float32_fails_are_decomposed_in_float64(monkeypatch):
    solve = torch.linalg.eigh

    def picky(matrices: Tensor) -> tuple[Tensor, Tensor]:
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(matrices)

    matrices = torch.diag(torch.tensor([1.0, 3.0, 2.0]))[None]
    monkeypatch.setattr(torch.linalg, "eigh", picky)
    vectors = soap.compute_eigenvectors(matrices)
    assert vectors.dtype == torch.float32
    assert torch.equal(vectors.abs()[0], torch.eye(3)[:, [1, 2, 0]])


def trained(*, drifts: bool = False, **options: Any) -> list[Tensor]:
    """Return weights and eigenbases after fifteen steps; `drifts` flips signs of eigenvectors."""
    if drifts:
        # A processor of its own: its decompositions turn every second vector round.
        solve, factor = torch.linalg.eigh, torch.linalg.qr
        signs = (-1.0) ** torch.arange(100)
        torch.linalg.eigh = lambda m: (None, solve(m)[1] * signs[: m.shape[-1]])
        torch.linalg.qr = lambda m: SimpleNamespace(Q=factor(m).Q * signs[: m.shape[-1]])
    weights, noise = weights_and_gradients(15)
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = SOAP(parameters, precondition_frequency=3, stagger=True, **options)
    optimise(optimizer, parameters, noise)
    bases = [basis for p in parameters for basis in optimizer.state[p]["bases"].values()]
    return [*(p.detach() for p in parameters), *bases]


def run_rank(rank: int, world: int, folder: str, drifts: bool, shared: bool) -> None:
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    found = trained(drifts=drifts and rank > 0, shard_refreshes=shared)
    found.append(TrainingRanks(CPU, rank, world).average(torch.tensor([float(rank)])))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True], ids=["drifting", "sharing"])
def test_two_processes_whose_decompositions_differ_or_are_shared_equal_one(tmp_path, shared):
    # Forked, not spawned: no second import of everything, and no autograd thread is needed.
    torch.multiprocessing.start_processes(
        run_rank, args=(2, str(tmp_path), not shared, shared), nprocs=2, start_method="fork"
    )
    alone = trained(shard_refreshes=False)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        # The last value is the mean of both ranks.
        assert same([*alone, torch.tensor([0.5])], found)


@pytest.mark.parametrize("options", [{"precondition_frequency": 0}, {"betas": (0.9, 1.0)}])
def test_impossible_hyperparameters_are_refused(options):
    with pytest.raises(ValueError, match="got"):
        SOAP([nn.Parameter(torch.zeros(2))], **options)


# No refresh falls into a test that compares with a run that never had the lost step.
RECIPES = [AdamW(lr=0.1), Soap(lr=0.1, precondition_frequency=100)]


def begin(recipe: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (4, 3), (5,), (2, 3, 2, 2)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return weights, recipe.build([{"params": weights, "weight_decay": 0.1}])


def step(
    optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], seed: int, *, value: float = 1
) -> None:
    """Take a step with random gradients, one of which is `value`."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    assert weights[0].grad is not None
    weights[0].grad[0, 0] = value
    lost = torch.tensor(float(not math.isfinite(value)))
    vars(optimizer).update(found_inf=lost, grad_scale=None)
    optimizer.step()
    optimizer.zero_grad()


def everything(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> list[Tensor]:
    """Return the weights and all tensors of the state except counters."""

    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Tensor):
            return [values.detach().clone()]
        inner = values.items() if isinstance(values, dict) else ()
        return [t for key, v in inner if key not in ("step", "skipped") for t in tensors(v)]

    return [*(w.detach().clone() for w in weights), *tensors(dict(optimizer.state))]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [*RECIPES, Soap(lr=0.1, precondition_frequency=1)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_lost_step_changes_no_weight_moment_statistic_or_basis(recipe, value):
    weights, optimizer = begin(recipe)
    for seed in range(4):
        step(optimizer, weights, seed)
    before = everything(optimizer, weights)
    assert len(before) > 3 * len(weights) - 2

    step(optimizer, weights, 4, value=value)
    assert same(everything(optimizer, weights), before)

    step(optimizer, weights, 5)
    assert not same(everything(optimizer, weights), before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("at", [2, 6])
def test_later_steps_are_those_of_a_run_without_the_lost_one(recipe, at):
    runs = []
    for has_lost_one in (False, True):
        weights, optimizer = begin(recipe)
        for seed in range(9):
            if has_lost_one and seed == at:
                step(optimizer, weights, 77, value=math.nan)
                # The saved state counts the lost step too.
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = recipe.build([{"params": weights, "weight_decay": 0.1}])
                optimizer.load_state_dict(state)
            step(optimizer, weights, seed)
        runs.append(everything(optimizer, weights))
    assert same(*runs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_first_step_that_is_lost_does_not_spoil_the_others(recipe):
    weights, optimizer = begin(recipe)
    before = [weight.detach().clone() for weight in weights]
    step(optimizer, weights, 0, value=math.nan)
    assert same(weights, before)
    for seed in range(1, 6):
        step(optimizer, weights, seed)
    assert all(t.isfinite().all() for t in everything(optimizer, weights))
    assert not same(weights, before)


def test_an_image_that_is_not_finite_leaves_student_and_center():
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
