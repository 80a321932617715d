"""Parameters of one shape in one stack, and the bases that SOAP turns them into."""

# torch documents LinAlgError but does not export it to type checkers.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ssl_bench.system.device import in_float64

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


def preconditioned_modes(shape: Sequence[int], max_precond_dim: int) -> list[int]:
    """Axes with a basis of their own: none of a vector, none longer than the limit.

    An axis of length 1 is left out because its only basis, +-1, changes nothing.
    """
    if len(shape) < 2:
        return []
    return [mode for mode, size in enumerate(shape) if 1 < size <= max_precond_dim]


def new_stack(
    parameters: list[nn.Parameter], group: dict[str, Any], turn: int, skipped: Float[Tensor, ""]
) -> Stack:
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
        skipped=skipped,
        phases=spread if group["stagger"] else [0] * members,
        turn=turn,
        exp_avg=torch.zeros(members, *first.shape, **precise),
        exp_avg_sq=torch.zeros(members, *first.shape, **precise),
        statistics={mode: torch.zeros(size, **precise) for mode, size in squares.items()},
        bases={mode: torch.zeros(size, **precise) for mode, size in squares.items()},
    )


def stack_of_states(
    parameters: list[nn.Parameter],
    states: Sequence[dict[str, Any]],
    turn: int,
    skipped: Float[Tensor, ""],
) -> Stack:
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
        vectors = torch.linalg.eigh(in_float64(matrices))[1].to(matrices)
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
        found = orthonormal(powered, before, turn=stack.turn + mode, shared=shared)
        turned[mode] = found.contiguous()
        order = order.view(len(order), *[-1 if axis == mode else 1 for axis in range(num_axes)])
        exp_avg_sq = exp_avg_sq.gather(mode + 1, order.expand_as(exp_avg_sq))
    replace(stack.exp_avg[members], rotate(exp_avg, turned), lost)
    replace(stack.exp_avg_sq[members], exp_avg_sq, lost)
    for mode, basis in bases.items():
        replace(basis, turned[mode], lost)


def replace(old: Tensor, new: Tensor, lost: Bool[Tensor, ""]) -> None:
    old.copy_(torch.where(lost, old, new))
