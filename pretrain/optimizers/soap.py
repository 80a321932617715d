"""SOAP: Adam in the eigenbasis of Shampoo's statistics, parameters of one shape in one stack."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ssl_bench.system.device import float64_device, to_float64

_ORTHONORMAL = 1e-5
"""Largest product of two columns of a new basis, and of a column with itself less 1."""

Matrices = dict[int, Float[Tensor, "members _ _"]]
"""One square matrix per member of a stack, by the mode (axis of the parameter) it belongs to."""


@dataclass
class Stack:
    """Parameters of one group, shape and step count; their state in one tensor per kind.

    The optimizer's public `state` holds views of these tensors, parameter by parameter, and is
    enough to stack them anew.

    Attributes:
        step: Gradients since the first; -1 before it, which makes no update.
        skipped: How many after the first were lost; a float64 scalar on the device, which stacks
            that started together share.
        phases: Steps by which each member's refreshes run ahead of the others.
        turn: Which rank begins when refreshes are shared out.
    """

    parameters: list[nn.Parameter]
    step: int
    skipped: Float[Tensor, ""]
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
            "skipped": self.skipped,
            "phase": self.phases[member],
            "exp_avg": self.exp_avg[member],
            "exp_avg_sq": self.exp_avg_sq[member],
            "statistics": {mode: stacked[member] for mode, stacked in self.statistics.items()},
            "bases": {mode: stacked[member] for mode, stacked in self.bases.items()},
        }


def stack_of(
    parameters: list[nn.Parameter],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    turn: int,
    skipped: Float[Tensor, ""],
) -> Stack:
    """A stack at its start, or what `states` hold of those that have begun."""
    first, members, frequency = parameters[0], len(parameters), group["precondition_frequency"]
    if "step" in states[0]:

        def stacked(kind: str) -> Matrices:
            return {mode: torch.stack([s[kind][mode] for s in states]) for mode in states[0][kind]}

        return Stack(
            parameters,
            step=states[0]["step"],
            skipped=skipped,
            phases=[state["phase"] for state in states],
            turn=turn,
            exp_avg=torch.stack([state["exp_avg"] for state in states]),
            exp_avg_sq=torch.stack([state["exp_avg_sq"] for state in states]),
            statistics=stacked("statistics"),
            bases=stacked("bases"),
        )
    precise = {
        "dtype": torch.float64 if first.dtype == torch.float64 else torch.float32,
        "device": first.device,
    }
    # None of a vector, none longer than the limit. An axis of length 1 is left out because its only
    # basis, +-1, changes nothing.
    squares = {
        mode: (members, size, size)
        for mode, size in enumerate(first.shape if first.ndim > 1 else ())
        if 1 < size <= group["max_precond_dim"]
    }
    # Neighbours share a phase, so that a refresh works on slices, not on gathered copies.
    spread = [(turn + member * frequency // members) % frequency for member in range(members)]
    return Stack(
        parameters,
        step=-1,
        skipped=skipped,
        phases=spread if group["stagger"] else [0] * members,
        turn=turn,
        exp_avg=torch.zeros(members, *first.shape, **precise),
        exp_avg_sq=torch.zeros(members, *first.shape, **precise),
        statistics={mode: torch.zeros(size, **precise) for mode, size in squares.items()},
        bases={mode: torch.zeros(size, **precise) for mode, size in squares.items()},
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


def eigenvectors(matrices: Float[Tensor, "members n n"]) -> Float[Tensor, "members n n"]:
    """Columns by descending eigenvalue. Waits for the device, once in a parameter's life."""
    try:
        vectors = torch.linalg.eigh(matrices)[1]
    except torch.linalg.LinAlgError:
        # The first gradient's statistics are singular, where float32 solvers may not converge.
        vectors = torch.linalg.eigh(to_float64(matrices))[1].to(matrices)
    return vectors.flip(-1)


def of_first(bases: Float[Tensor, "members n n"]) -> Float[Tensor, "members n n"]:
    """Those of the first rank, in place, for all.

    Where eigenvalues are nearly equal the vectors are free: processors that round otherwise would
    walk apart, though their gradients are the same.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        # Only what lies in one piece can be sent.
        bases = bases.contiguous()
        dist.broadcast(bases, src=0)
    return bases


def orthonormal(
    matrices: Float[Tensor, "members n n"],
    before: Float[Tensor, "members n n"],
    *,
    turn: int,
    shared: bool,
) -> Float[Tensor, "members n n"]:
    """Bases of the spans of each matrix' first columns; `shared`, each rank makes its part.

    `before` stands in for a matrix in which a GPU finds none.
    """
    world = dist.get_world_size() if shared and dist.is_initialized() else 1
    if world == 1:
        return of_first(_orthonormal(matrices, before))
    rank = (dist.get_rank() + turn) % world
    part = slice(len(matrices) * rank // world, len(matrices) * (rank + 1) // world)
    whole = torch.zeros_like(matrices)
    whole[part] = _orthonormal(matrices[part], before[part])
    dist.all_reduce(whole)
    return whole


def _orthonormal(
    matrices: Float[Tensor, "members n n"], before: Float[Tensor, "members n n"]
) -> Float[Tensor, "members n n"]:
    """Q of the QR decomposition; on CUDA up to signs, by factors of the columns' products.

    cuSOLVER decomposes a stack one matrix after the other: 88 ms for 12 of 1536 rows on an H200,
    where a factor, a product and a solution take 8 for the whole stack. A power iteration makes
    columns of very different length, so that they are scaled first; three shifts draw those apart
    that depend on each other, as of statistics that have seen fewer gradients than rows.

    Source: shifted Cholesky QR, Fukaya et al., https://arxiv.org/abs/1809.11085.
    """
    if not matrices.is_cuda:
        return torch.linalg.qr(matrices).Q
    size, precision = matrices.shape[-1], torch.finfo(matrices.dtype)
    identity = torch.eye(size, dtype=matrices.dtype, device=matrices.device)
    found, shift = matrices, 4 * size**0.5 * precision.eps
    for beta in (shift, shift, shift, 0.0):
        found = found / found.norm(dim=-2, keepdim=True).clamp_min(precision.tiny)
        products = torch.baddbmm(identity, found.mT, found, beta=beta)
        lower = torch.linalg.cholesky_ex(products).L
        found = torch.linalg.solve_triangular(lower.mT, found, upper=True, left=False)
    error = (found.mT @ found - identity).abs().amax((-2, -1), keepdim=True)
    # Of what is not finite, too.
    return torch.where(error < _ORTHONORMAL, found, before)


def refresh(stack: Stack, members: slice, lost: Bool[Tensor, ""], *, shared: bool) -> None:
    """Move the members to the bases one power iteration further, best directions first.

    The mean gradient is rotated along; the mean squares, which cannot be, are re-sorted. A step
    that is lost leaves everything.
    """
    bases = {mode: stacked[members] for mode, stacked in stack.bases.items()}
    exp_avg = rotate_back(stack.exp_avg[members], bases)
    exp_avg_sq, num_axes = stack.exp_avg_sq[members], stack.exp_avg_sq.ndim - 1
    turned = {}
    for mode, basis in bases.items():
        powered = torch.bmm(stack.statistics[mode][members], basis)
        order = (basis * powered).sum(-2).argsort(-1, descending=True)
        powered, before = (x.gather(-1, order[:, None].expand_as(x)) for x in (powered, basis))
        # The layout decides how products are rounded.
        basis = orthonormal(powered, before, turn=stack.turn + mode, shared=shared)
        turned[mode] = basis.contiguous()
        order = order.view(len(order), *[-1 if axis == mode else 1 for axis in range(num_axes)])
        exp_avg_sq = exp_avg_sq.gather(mode + 1, order.expand_as(exp_avg_sq))
    kept = [stack.exp_avg[members], stack.exp_avg_sq[members], *bases.values()]
    found = [rotate(exp_avg, turned), exp_avg_sq, *turned.values()]
    for old, new in zip(kept, found, strict=True):
        old.copy_(torch.where(lost, old, new))


class Effect:
    """What a step does, unless it is lost: factors on the device, each computed once.

    Args:
        lost: Float64 scalar, 1 where the step is to change nothing, else 0.
    """

    def __init__(self, lost: Float[Tensor, ""]) -> None:
        self._one, self._share = torch.ones_like(lost), 1 - lost
        self.lost: Bool[Tensor, ""] = lost.bool()
        self._factors: dict[tuple[float, torch.dtype], Tensor] = {}
        self._sizes: dict[tuple[Any, ...], Tensor] = {}

    def multiply(self, tensors: Sequence[Tensor], value: float) -> None:
        """By the value, or by 1, in place."""
        for dtype in {tensor.dtype for tensor in tensors}:
            # A factor of another dtype would cost a launch for each tensor.
            factor = self._factors.get((value, dtype))
            if factor is None:
                factor = self._one.add(self._share, alpha=value - 1).to(dtype)
                self._factors[value, dtype] = factor
            torch._foreach_mul_([t for t in tensors if t.dtype == dtype], factor)

    def step_size(self, stack: Stack, group: dict[str, Any]) -> Float[Tensor, ""]:
        """Learning rate, negative, both averages corrected for their beginning with 0; or 0.

        The same tensor for stacks of the same step and dtype.
        """
        lr, (beta1, beta2) = group["lr"], group["betas"]
        key = (lr, beta1, beta2, stack.step, stack.exp_avg.dtype)
        if key not in self._sizes:
            # None was made where the first of them is lost.
            updates = (stack.step - stack.skipped).clamp_(min=1)
            corrected = (1 - beta2**updates).sqrt_().div_(1 - beta1**updates)
            self._sizes[key] = corrected.mul_(self._share).mul_(-lr).to(stack.exp_avg.dtype)
        return self._sizes[key]


def accumulate(
    stacks: Sequence[Stack], gradients: Sequence[Tensor], beta: float, effect: Effect
) -> None:
    averages = [average for stack in stacks for average in stack.statistics.values()]
    effect.multiply(averages, beta)
    for stack, stacked in zip(stacks, gradients, strict=True):
        for mode, average in stack.statistics.items():
            unfolded = stacked.movedim(mode + 1, 1).flatten(2)
            average.baddbmm_(unfolded, unfolded.mT, alpha=1 - beta)


def descend(
    stacks: Sequence[Stack], gradients: Sequence[Tensor], group: dict[str, Any], effect: Effect
) -> None:
    """One Adam step in the eigenbases, then the decoupled decay."""
    beta1, beta2 = group["betas"]
    rotated = [rotate(g, stack.bases) for stack, g in zip(stacks, gradients, strict=True)]
    means, squares = [stack.exp_avg for stack in stacks], [stack.exp_avg_sq for stack in stacks]
    effect.multiply(means, beta1)
    torch._foreach_add_(means, rotated, alpha=1 - beta1)
    effect.multiply(squares, beta2)
    torch._foreach_addcmul_(squares, rotated, rotated, 1 - beta2)
    deviations = torch._foreach_sqrt(squares)
    torch._foreach_add_(deviations, group["eps"])
    updates = torch._foreach_div(means, deviations)
    sizes = [effect.step_size(stack, group) for stack in stacks]
    for size in {id(size): size for size in sizes}.values():
        alike = [u for u, own in zip(updates, sizes, strict=True) if own is size]
        torch._foreach_mul_(alike, size)
    parameters: list[Tensor] = [p for stack in stacks for p in stack.parameters]
    changes = [
        change
        for stack, update in zip(stacks, updates, strict=True)
        for change in rotate_back(update, stack.bases).unbind()
    ]
    torch._foreach_add_(parameters, changes)
    if group["weight_decay"] > 0:
        effect.multiply(parameters, 1 - group["lr"] * group["weight_decay"])


class SOAP(torch.optim.Optimizer):
    """SOAP with the numbers of the reference and a small share of its kernel launches.

    A parameter's first gradient only builds its statistics and bases: no step, no decay. Steps are
    counted per parameter, so one that starts late is corrected for bias from its own start. Every
    axis of a parameter of two or more dimensions has a basis, as in the reference's default: a
    patch embedding has four, none merged. Vectors and scalars are plain Adam. State and
    decompositions are float32, or float64 for float64 parameters (the reference: always float32).

    No step waits for the device but one in which a parameter meets its first gradient. Where the
    attribute `found_inf` is 1, as torch's fused optimizers have it, the step changes nothing,
    whatever the gradients hold; if it is a parameter's first, its bases are its own axes until the
    next refresh.

    Args:
        shampoo_beta: Decay of the statistics; `betas[1]` if None.
        precondition_frequency: Steps between two refreshes of a basis.
        max_precond_dim: A longer axis keeps its own coordinates.
        stagger: Spread the refreshes over the period instead of doing all in the same step.
        shard_refreshes: Share the decompositions out over the ranks of `torch.distributed`; without
            it all compute them and take those of the first.

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
                move = partial(Tensor.to, device=parameter.device)
                self.state[parameter] = tree_map_only(Tensor, move, state_dict["state"][key])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stack_active()
        stacks = [stack for those in self._stacks for stack in those]
        if stacks:
            effect = self._effect(stacks)
            for group, those in zip(self.param_groups, self._stacks, strict=True):
                self._step_group(group, those, effect)
        return loss

    def _effect(self, stacks: Sequence[Stack]) -> Effect:
        """Whether this step counts, and one more of each stack's steps."""
        found, like = getattr(self, "found_inf", None), stacks[0].skipped
        lost = torch.zeros_like(like) if found is None else found.to(like)
        for skipped in {id(s.skipped): s.skipped for s in stacks if s.step >= 0}.values():
            skipped += lost
        for stack in stacks:
            stack.step += 1
            for parameter in stack.parameters:
                self.state[parameter]["step"] = stack.step
        return Effect(lost)

    def _step_group(self, group: dict[str, Any], stacks: Sequence[Stack], effect: Effect) -> None:
        beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
        gradients = [stack.gradients().masked_fill_(effect.lost, 0.0) for stack in stacks]
        started = [i for i, stack in enumerate(stacks) if stack.step > 0]
        if started:
            descend([stacks[i] for i in started], [gradients[i] for i in started], group, effect)
        # After the update, which must not see its own gradient in the bases.
        accumulate(stacks, gradients, beta, effect)
        for stack in stacks:
            if stack.step == 0:
                for mode, basis in stack.bases.items():
                    basis.copy_(of_first(eigenvectors(stack.statistics[mode])))
            elif stack.bases:
                for members in stack.due(group["precondition_frequency"]):
                    refresh(stack, members, effect.lost, shared=group["shard_refreshes"])

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
            skipped: dict[int, Float[Tensor, ""]] = {}
            self._stacks = [self._stacks_of(group, skipped) for group in self.param_groups]
            self._active = active

    def _stacks_of(
        self, group: dict[str, Any], skipped: dict[int, Float[Tensor, ""]]
    ) -> list[Stack]:
        """Stacks of the parameters that have a gradient; `skipped` is by their step."""
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                key = (p.shape, p.dtype, p.device, self.state[p].get("step", -1))
                alike.setdefault(key, []).append(p)
        stacks = []
        for turn, ((*_, device, step), parameters) in enumerate(alike.items()):
            states = [self.state[p] for p in parameters]
            # A device without float64 counts to 2^24 in float32, too.
            precise = torch.float64 if float64_device(device) == device else torch.float32
            zero = torch.zeros((), dtype=precise, device=device)
            count = skipped.setdefault(step, states[0].get("skipped", zero))
            stack = stack_of(parameters, states, group, turn, count)
            for member, parameter in enumerate(parameters):
                self.state[parameter] = stack.state_of(member)
            stacks.append(stack)
        return stacks
