"""What the refreshes of SOAP add to a training step of DINO, counted and not timed.

    python -m tests.benchmarks.soap_refresh

Tensors have shapes and no values, so that a batch of 1,024 needs neither memory nor a GPU.
Operations are calls of torch that compute, views aside: each is one kernel or more, a QR
decomposition on CUDA many, matrix after matrix. FLOPs are those of products, and 8/3 n^3 for Q of
the QR decomposition of n x n (Householder, 4/3 n^3 each for reducing and for forming Q; Golub and
Van Loan, section 5.2). Shares of time follow from rates that are assumed, and can be given.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pretrain.crops.multi import MultiCrop
from pretrain.logging.mfu import training_flops
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import Soap, parameter_groups
from pretrain.schedules import Timeline
from ssl_bench.composition.compose import build, compose_config
from tests.benchmarks.soap import OpCounter

_QR: Any = torch.ops.aten.linalg_qr
# torch counts only the form that gives a new tensor.
_BADDBMM_IN_PLACE: Any = torch.ops.aten.baddbmm_
TERA = 1e12


@dataclass(frozen=True)
class Count:
    """Of one step.

    Attributes:
        products: FLOPs of matrix products.
        decompositions: FLOPs of QR decompositions.
    """

    ops: int
    products: float
    decompositions: float


def qr_flops(shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Q of the decomposition of square matrices."""
    return 8 * prod(shape[:-2]) * shape[-1] ** 3 // 3


def added_product_flops(
    _: Sequence[int], left: Sequence[int], right: Sequence[int], **__: Any
) -> int:
    """The product that is added to a tensor in place."""
    return 2 * prod(left) * right[-1]


def counted(optimizer: torch.optim.Optimizer) -> Count:
    """What a step of the optimizer does."""
    formulas = {_QR: qr_flops, _BADDBMM_IN_PLACE: added_product_flops}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with OpCounter() as ops, counter:
        optimizer.step()
    found = counter.get_flop_counts()["Global"]
    decompositions = found.get(_QR, 0)
    return Count(ops.total, counter.get_total_flops() - decompositions, decompositions)


def period(student: nn.Module, *, stagger: bool, max_precond_dim: int) -> list[Count]:
    """The steps from one refresh to the next."""
    recipe = Soap(stagger=stagger, max_precond_dim=max_precond_dim)
    for parameter in student.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = recipe.build(parameter_groups(student.named_parameters()))
    # The first builds the bases.
    optimizer.step()
    return [counted(optimizer) for _ in range(recipe.precondition_frequency)]


def main() -> None:
    parser = argparse.ArgumentParser(description="SOAP's refreshes beside a training step")
    parser.add_argument("--model", default="vit_small_skip")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--training", type=float, default=400, help="TFLOP/s of the training step")
    parser.add_argument("--products", type=float, default=40, help="TFLOP/s of SOAP's products")
    parser.add_argument("--qr", type=float, default=0.5, help="TFLOP/s of QR decompositions")
    options = parser.parse_args()

    plan = build(compose_config("pretraining", [f"model={options.model}"]))
    learner: Any = Dino().build(plan.encoder, Timeline(100, 10), seed=0)
    crops, (large, small) = MultiCrop(), MultiCrop().sizes(plan.encoder.image_size, 16)
    views = [
        torch.empty(count * options.batch, 3, size, size, device="meta")
        for count, size in ((2, large), (crops.num_locals, small))
    ]
    training = training_flops(learner, views, 0)
    student = learner.student.to("meta")
    seconds = training / options.training / TERA
    print(f"{options.model}, DINO, batch {options.batch}: {training / TERA:.1f} TFLOP forwards and")
    print(f"backwards. Time if training runs at {options.training:g} TFLOP/s, SOAP's products at")
    print(f"{options.products:g}, decompositions at {options.qr:g}: predicted, counted on CPU")
    print()
    print("| refreshes | step | operations | products, GFLOP | QR, GFLOP | FLOPs | time |")
    print("|---|---|---|---|---|---|---|")
    for stagger in (False, True):
        steps = period(student, stagger=stagger, max_precond_dim=Soap().max_precond_dim)
        name = "staggered" if stagger else "all at once"
        for which, count in extremes(steps).items():
            flops = count.products + count.decompositions
            time = count.products / options.products + count.decompositions / options.qr
            print(
                f"| {name} | {which} | {count.ops:,.0f} | {count.products / 1e9:,.0f} "
                f"| {count.decompositions / 1e9:,.0f} | {100 * flops / training:.2f} % "
                f"| {100 * time / TERA / seconds:.0f} % |"
            )


def extremes(steps: Sequence[Count]) -> dict[str, Count]:
    """The steps with the fewest and the most FLOPs, and the mean of all."""
    ordered = sorted(steps, key=lambda count: count.products + count.decompositions)
    sums = [sum(column) for column in zip(*(vars(c).values() for c in steps), strict=True)]
    mean = Count(*(total / len(steps) for total in sums))  # pyright: ignore[reportArgumentType]
    return {"least": ordered[0], "most": ordered[-1], "mean": mean}


if __name__ == "__main__":
    main()
