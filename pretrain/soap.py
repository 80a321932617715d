"""SOAP: Adam in the eigenbasis of Shampoo's statistics, parameters of one shape in one stack."""

# torch documents its foreach functions and LinAlgError but exports neither to type checkers.
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

Matrices = dict[int, Float[Tensor, "members _ _"]]
"""One square matrix per member of a stack, by the mode (axis of the parameter) it belongs to."""


@dataclass
class Stack:
    """Parameters of one group, shape and step count; their state in one tensor per kind.

    The optimizer's public `state` holds views of these tensors, parameter by parameter, and is
    enough to stack them anew.

    Attributes:
        step: Updates made so far; -1 before the first gradient, which makes none.
        phases: Steps by which each member's refreshes run ahead of the others.
        turn: Which rank begins when refreshes are shared out.
    """

    parameters: list[nn.Parameter]
    step: int
    phases: list[int]
    turn: int
    exp_avg: Float[Tensor, " members *shape"]
    exp_avg_sq: Float[Tensor, " members *shape"]
    statistics: Matrices
    bases: Matrices

    def gradients(self) -> Float[Tensor, " members *shape"]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        stacked = gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)
        return stacked.to(self.exp_avg.dtype)

    def due(self, frequency: int) -> Iterator[slice]:
        """Runs of neighbouring members whose bases are to be refreshed at this step."""
        is_due = [(self.step + phase) % frequency == 0 for phase in self.phases]
        for wanted, run in groupby(range(len(is_due)), key=is_due.__getitem__):
            if wanted:
                members = list(run)
                yield slice(members[0], members[-1] + 1)

    def state_of(self, member: int) -> dict[str, Any]:
        return {
            "step": self.step,
            "phase": self.phases[member],
            "exp_avg": self.exp_avg[member],
            "exp_avg_sq": self.exp_avg_sq[member],
            "statistics": {mode: stacked[member] for mode, stacked in self.statistics.items()},
            "bases": {mode: stacked[member] for mode, stacked in self.bases.items()},
        }


def preconditioned_modes(shape: Sequence[int], max_precond_dim: int) -> list[int]:
    """Axes with a basis of their own: none of a vector, none longer than the limit.

    An axis of length 1 is left out because its only basis, +-1, changes nothing.
    """
    if len(shape) < 2:
        return []
    return [mode for mode, size in enumerate(shape) if 1 < size <= max_precond_dim]


def new_stack(parameters: list[nn.Parameter], group: dict[str, Any], turn: int) -> Stack:
    first, members, frequency = parameters[0], len(parameters), group["precondition_frequency"]
    precise = {
        "dtype": torch.float64 if first.dtype == torch.float64 else torch.float32,
        "device": first.device,
    }
    modes = preconditioned_modes(first.shape, group["max_precond_dim"])
    squares = {mode: (members, first.shape[mode], first.shape[mode]) for mode in modes}
    # Neighbours share a phase, so that a refresh works on slices, not on gathered copies.
    spread = [(turn + member * frequency // members) % frequency for member in range(members)]
    return Stack(
        parameters,
        step=-1,
        phases=spread if group["stagger"] else [0] * members,
        turn=turn,
        exp_avg=torch.zeros(members, *first.shape, **precise),
        exp_avg_sq=torch.zeros(members, *first.shape, **precise),
        statistics={mode: torch.zeros(size, **precise) for mode, size in squares.items()},
        bases={mode: torch.zeros(size, **precise) for mode, size in squares.items()},
    )


def stack_of_states(
    parameters: list[nn.Parameter], states: Sequence[dict[str, Any]], turn: int
) -> Stack:
    def stacked(kind: str) -> Matrices:
        return {mode: torch.stack([s[kind][mode] for s in states]) for mode in states[0][kind]}

    return Stack(
        parameters,
        step=states[0]["step"],
        phases=[state["phase"] for state in states],
        turn=turn,
        exp_avg=torch.stack([state["exp_avg"] for state in states]),
        exp_avg_sq=torch.stack([state["exp_avg_sq"] for state in states]),
        statistics=stacked("statistics"),
        bases=stacked("bases"),
    )


def rotate(
    tensors: Float[Tensor, " members *shape"], bases: Matrices
) -> Float[Tensor, " members *shape"]:
    """Coordinates in the bases, whose columns are the basis vectors; axes without one stay."""
    if not bases:
        return tensors
    # Every axis is taken from the front and put back last, so the order returns by itself.
    for mode in range(tensors.ndim - 1):
        tensors = tensors.movedim(1, -1)
        if mode in bases:
            flat = tensors.flatten(1, -2)  # members rest size
            tensors = torch.bmm(flat, bases[mode]).view(tensors.shape)
    return tensors


def rotate_back(
    tensors: Float[Tensor, " members *shape"], bases: Matrices
) -> Float[Tensor, " members *shape"]:
    return rotate(tensors, {mode: basis.mT for mode, basis in bases.items()})


def accumulate(
    statistics: Matrices, gradients: Float[Tensor, " members *shape"], beta: float
) -> None:
    for mode, average in statistics.items():
        unfolded = gradients.movedim(mode + 1, 1).flatten(2)
        average.baddbmm_(unfolded, unfolded.mT, beta=beta, alpha=1 - beta)


def eigenvectors(matrices: Float[Tensor, "members n n"]) -> Float[Tensor, "members n n"]:
    """Columns by descending eigenvalue. Waits for the device, once in a parameter's life."""
    try:
        vectors = torch.linalg.eigh(matrices)[1]
    except torch.linalg.LinAlgError:
        # The first gradient's statistics are singular, where float32 solvers may not converge.
        vectors = torch.linalg.eigh(matrices.double())[1].to(matrices.dtype)
    return vectors.flip(-1)


def orthonormal(
    matrices: Float[Tensor, "members n n"], *, turn: int, shared: bool
) -> Float[Tensor, "members n n"]:
    """Q of the QR decomposition; `shared`, each rank decomposes its part and all get the whole."""
    world = dist.get_world_size() if shared and dist.is_initialized() else 1
    if world == 1:
        return torch.linalg.qr(matrices).Q
    rank = (dist.get_rank() + turn) % world
    part = slice(len(matrices) * rank // world, len(matrices) * (rank + 1) // world)
    whole = torch.zeros_like(matrices)
    whole[part] = torch.linalg.qr(matrices[part]).Q
    dist.all_reduce(whole)
    return whole


def refresh(stack: Stack, members: slice, *, shared: bool) -> None:
    """Move the members to the bases one power iteration further, best directions first.

    The mean gradient is rotated along; the mean squares, which cannot be, are re-sorted.
    """
    bases = {mode: stacked[members] for mode, stacked in stack.bases.items()}
    exp_avg = rotate_back(stack.exp_avg[members], bases)
    exp_avg_sq, num_axes = stack.exp_avg_sq[members], stack.exp_avg_sq.ndim - 1
    for mode, basis in bases.items():
        powered = torch.bmm(stack.statistics[mode][members], basis)
        order = (basis * powered).sum(-2).argsort(-1, descending=True)
        powered = powered.gather(-1, order[:, None].expand_as(powered))
        basis.copy_(orthonormal(powered, turn=stack.turn + mode, shared=shared))
        order = order.view(len(order), *[-1 if axis == mode else 1 for axis in range(num_axes)])
        exp_avg_sq = exp_avg_sq.gather(mode + 1, order.expand_as(exp_avg_sq))
    stack.exp_avg[members].copy_(rotate(exp_avg, bases))
    stack.exp_avg_sq[members].copy_(exp_avg_sq)


def descend(stacks: Sequence[Stack], gradients: Sequence[Tensor], group: dict[str, Any]) -> None:
    """One Adam step in the eigenbases, then the decoupled decay."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    rotated = [rotate(g, stack.bases) for stack, g in zip(stacks, gradients, strict=True)]
    means, squares = [stack.exp_avg for stack in stacks], [stack.exp_avg_sq for stack in stacks]
    torch._foreach_lerp_(means, rotated, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, rotated, rotated, 1 - beta2)
    deviations = torch._foreach_sqrt(squares)
    torch._foreach_add_(deviations, group["eps"])
    updates = torch._foreach_div(means, deviations)
    steps = [stack.step for stack in stacks]
    sizes = [-lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
    torch._foreach_mul_(updates, sizes)
    parameters: list[Tensor] = [p for stack in stacks for p in stack.parameters]
    changes = [
        change
        for stack, update in zip(stacks, updates, strict=True)
        for change in rotate_back(update, stack.bases).unbind()
    ]
    torch._foreach_add_(parameters, changes)
    if group["weight_decay"] > 0:
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: moved(entry, device) for key, entry in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


class SOAP(torch.optim.Optimizer):
    """SOAP with the numbers of the reference and a small share of its kernel launches.

    A parameter's first gradient only builds its statistics and bases: no step, no decay. Steps are
    counted per parameter, so one that starts late is corrected for bias from its own start. Every
    axis of a parameter of two or more dimensions has a basis, as in the reference's default: a
    patch embedding has four, none merged. Vectors and scalars are plain Adam. State and
    decompositions are float32, or float64 for float64 parameters (the reference: always float32).

    No step waits for the device but one in which a parameter meets its first gradient.

    Args:
        shampoo_beta: Decay of the statistics; `betas[1]` if None.
        precondition_frequency: Steps between two refreshes of a basis.
        max_precond_dim: A longer axis keeps its own coordinates.
        stagger: Spread the refreshes over the period instead of doing all in the same step.
        shard_refreshes: Share the decompositions out over the ranks of `torch.distributed`.

    Source: Vyas et al., https://arxiv.org/abs/2409.11321, algorithm 3; behaviour of
    https://github.com/nikhilvyas/SOAP at a1e5535, whose step applies the decay to the updated
    weights. Cubic in each axis' length per refresh.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: Sequence[float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10_000,
        *,
        stagger: bool = False,
        shard_refreshes: bool = False,
    ) -> None:
        if precondition_frequency < 1:
            raise ValueError(
                f"precondition_frequency must be 1 or more, got {precondition_frequency}"
            )
        if not all(0 <= beta < 1 for beta in (*betas, shampoo_beta or 0.0)):
            raise ValueError(f"betas must lie in [0, 1), got {(*betas, shampoo_beta)}")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "stagger": stagger,
            "shard_refreshes": shard_refreshes,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_stacks()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._forget_stacks()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # The base class has cast the state to the parameters' dtype, which may be lower.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            if key in state_dict["state"]:
                self.state[parameter] = moved(state_dict["state"][key], parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stack_active()
        for group, stacks in zip(self.param_groups, self._stacks, strict=True):
            self._step_group(group, stacks)
        return loss

    def _step_group(self, group: dict[str, Any], stacks: Sequence[Stack]) -> None:
        beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
        gradients = [stack.gradients() for stack in stacks]
        self._count_step(stacks)
        started = [i for i, stack in enumerate(stacks) if stack.step > 0]
        if started:
            descend([stacks[i] for i in started], [gradients[i] for i in started], group)
        # After the update, which must not see its own gradient in the bases.
        for stack, stacked in zip(stacks, gradients, strict=True):
            accumulate(stack.statistics, stacked, beta)
            if stack.step == 0:
                for mode, basis in stack.bases.items():
                    basis.copy_(eigenvectors(stack.statistics[mode]))
            elif stack.bases:
                for members in stack.due(group["precondition_frequency"]):
                    refresh(stack, members, shared=group["shard_refreshes"])

    def _count_step(self, stacks: Sequence[Stack]) -> None:
        for stack in stacks:
            stack.step += 1
            for parameter in stack.parameters:
                self.state[parameter]["step"] = stack.step

    def _forget_stacks(self) -> None:
        self._active: list[list[int]] = []
        self._stacks: list[list[Stack]] = []

    def _stack_active(self) -> None:
        """Rebuild the stacks when other parameters than at the last step have a gradient."""
        active = [
            [id(p) for p in group["params"] if p.grad is not None] for group in self.param_groups
        ]
        if active != self._active:
            self._forget_stacks()
            self._stacks = [self._stacks_of(group) for group in self.param_groups]
            self._active = active

    def _stacks_of(self, group: dict[str, Any]) -> list[Stack]:
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                key = (p.shape, p.dtype, p.device, self.state[p].get("step", -1))
                alike.setdefault(key, []).append(p)
        stacks = []
        for turn, ((*_, step), parameters) in enumerate(alike.items()):
            if step < 0:
                stack = new_stack(parameters, group, turn)
            else:
                stack = stack_of_states(parameters, [self.state[p] for p in parameters], turn)
            for member, parameter in enumerate(parameters):
                self.state[parameter] = stack.state_of(member)
            stacks.append(stack)
        return stacks
