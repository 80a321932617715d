"""Test how often the CPU waits for the GPU.

Each test runs a short and a long command and compares how often the CPU waits. On a real GPU, the
tests only check that the commands run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from probes.heads import logistic
from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig
from tests.device.runs import pretraining
from tests.support.faults import class_folders, encoder_file
from tests.support.objectives import OBJECTIVES
from tests.support.simulated_cuda import LEDGER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# With three blocks, one wait for each block would exceed the limit of every unit.
THREE_BLOCKS = ViTConfig(image_size=32, patch_size=8, dim=24, depth=3, num_heads=2)


class Unit(NamedTuple):
    """A unit of work, such as a training step."""

    # Two commands are compared that differ only in their number of units.
    arguments: Sequence[str]
    few: str  # Additional argument of the shorter command.
    many: str  # Additional argument of the longer command.
    more: int | None  # Additional units of the longer command. If None, L-BFGS steps are counted.
    waits: int = 0  # Maximum number of waits per unit.


def step_of(objective: str, *options: str) -> Unit:
    arguments = tuple(pretraining(objective, "classes3", *options))
    return Unit(arguments, "train.max_steps=1", "train.max_steps=2", 1)


TOY = ("--dataset", "toy", "dataset.num_train=6", "dataset.num_val=3")
PROBE = ("probe", "--layer", "all", "--checkpoint", "encoder.safetensors", "--task")
SEGMENTATION = (
    *PROBE, "segmentation", *TOY, "probe.image_size=32", "probe.holdout=0.0", "probe.panels=0",
    "probe.training.batch_size=3", "probe.training.epochs=1",
    "probe.training.learning_rates=[0.001,0.01]",
)  # fmt: skip
FEW, MANY = "dataset.num_val=3", "dataset.num_val=9"


def heads_step(*options: str, waits: int = 0) -> Unit:
    few, many = ("probe.training.epochs=1", "probe.training.epochs=3")
    return Unit((*SEGMENTATION, *options), few, many, 4, waits)


UNITS = {
    **{f"step, {name}": step_of(name) for name in OBJECTIVES},
    "step, linear": step_of("dino", "model.attention=linear"),
    **{
        f"step, {name}": step_of("dino", f"model.attention={name}", "model.qkv_bias=false")
        for name in ("osa_qr", "osa_newton_schulz")
    },
    "step, graying svd": step_of("dino", "model.graying=svd"),
    "step, graying dct": step_of("dino", "model.graying=dct"),
    # The first update of a weight costs waits, so all weights are trained from the first step.
    "step, SOAP with a refresh": step_of(
        "dino", "optimizer=soap", "optimizer.precondition_frequency=1",
        "objective.freeze_last_layer_epochs=0.0",
    ),
    "TokenCut, batch": Unit((*PROBE, "tokencut", *TOY, "probe.panels=0"), FEW, MANY, 2, 1),
    "feature cache, batch": Unit(SEGMENTATION, "dataset.num_train=3", "dataset.num_train=9", 2, 1),
    **{
        f"heads' step, {name}": heads_step(f"probe.loss={name}")
        for name in ("upsample4", "full_resolution", "histogram", "majority")
    },
    "heads' step, labels of 100 x 100": heads_step("probe.loss=resampled", "probe.loss.size=100"),
    # Features are computed in every epoch and checked for non-finite values before the step.
    "heads' step, streamed": heads_step("probe.tier=stream", waits=1),
    "L-BFGS, step": Unit(
        (*PROBE, "classification", "--dataset", "class_folders", "--data-root", "classes3"),
        "probe.training.max_iterations=4", "probe.training.max_iterations=10", None, 1,
    ),
    **{
        f"scored segmentation, batch, {name}": Unit(
            (*SEGMENTATION, f"probe.inference={name}"), FEW, MANY, 2, 1
        )
        for name in ("squash", "patch", "slide")
    },
    "scored retrieval, batch": Unit(
        (
            *PROBE, "retrieval", *TOY, "probe.image_size=32", "probe.neighbours=5",
            "probe.batch_size=3",
        ),
        FEW, MANY, 2, 1,
    ),
    # Two classes in two splits. The votes of three blocks and two facets also use masks.
    "k-NN, batch": Unit(
        (
            *PROBE, "knn", "--dataset", "class_folders", "probe.neighbours=[1]",
            "probe.batch_size=3", "probe.facet=[cls,patch_mean]",
        ),
        "--data-root=classes3", "--data-root=classes9", 8, 2,
    ),
    "PCA, image": Unit(
        (*PROBE, "pca", *TOY, "probe.image_size=32", "probe.panels=1"), FEW, MANY, 6, 1
    ),
}  # fmt: skip


@contextmanager
def count_steps() -> Iterator[list[int]]:
    """Count how often L-BFGS evaluates the loss."""
    # The number of steps depends on rounding.
    steps = []
    original = logistic.minimise

    def minimise(objective, *args, **options):
        def counted(*problems):
            steps.append(1)
            return objective(*problems)

        return original(counted, *args, **options)

    with patch.object(logistic, "minimise", minimise):
        yield steps


@pytest.mark.parametrize("name", UNITS)
def test_the_number_of_waits_per_unit_is_limited(workdir, name):
    unit = UNITS[name]
    encoder_file(workdir / "encoder.safetensors", config=THREE_BLOCKS)
    for count in (3, 9):
        class_folders(workdir / f"classes{count}", count)

    def count_costs(argument: str, out: str):
        arguments = [*unit.arguments, "--device", "cuda", "--out", out]
        with count_steps() as steps, LEDGER.counting() as counts:
            assert main([*arguments, argument]) == 0
        return counts, len(steps)

    # The first run pays for everything that happens only once.
    count_costs(unit.few, "first")
    few, few_steps = count_costs(unit.few, "few")
    many, many_steps = count_costs(unit.many, "many")
    more = many_steps - few_steps if unit.more is None else unit.more
    many.waits.subtract(few.waits)
    many.uploads.subtract(few.uploads)

    assert more > 0
    assert many.waits.total() <= more * unit.waits, +many.waits
    assert not +many.uploads


@pytest.mark.parametrize(
    ("objective", "optimizer", "launches"),
    [("dino", "adamw", 1182), ("dino", "soap", 1247), ("mae", "adamw", 294)],
)
def test_the_number_of_operators_in_a_step_is_limited(workdir, objective, optimizer, launches):
    arguments = pretraining(objective, class_folders(workdir / "photos"), f"optimizer={optimizer}")

    def count_launches(num_steps: int, out: str):
        options = ["--device", "cuda", "--out", out, f"train.max_steps={num_steps}"]
        with LEDGER.counting() as counts:
            assert main([*arguments, *options]) == 0
        return counts.launches

    # The first run pays for everything that happens only once. The first step of each run also
    # creates the moments of the optimizer.
    count_launches(2, "first")
    two, three = count_launches(2, "two"), count_launches(3, "three")
    three.subtract(two)
    assert three.total() <= launches, three.most_common(20)
