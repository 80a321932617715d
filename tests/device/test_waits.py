"""How often the host waits for the device in each unit of work; no more than is said here.

The additional waits of a command with more units are counted by file and line. On a real device
nothing is counted, and the commands only run.
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
# So many that a wait of every block is more than any unit may cost of its own.
THREE_BLOCKS = ViTConfig(image_size=32, patch_size=8, dim=24, depth=3, num_heads=2)


class Unit(NamedTuple):
    """Words of a command, those for few and for many units, and how many these are more.

    Attributes:
        more: None for L-BFGS: its line search takes as many steps as the processor's rounding asks
            for, so they are counted.
        waits: That each unit may cost at most. No unit sends memory that is not pinned.
    """

    words: Sequence[str]
    few: str
    many: str
    more: int | None
    waits: int = 0


def step_of(objective: str, *words: str) -> Unit:
    """All of it: reading, cutting, training, the log."""
    words = tuple(pretraining(objective, "classes3", *words))
    return Unit(words, "train.max_steps=1", "train.max_steps=2", 1)


TOY = ("--dataset", "toy", "dataset.num_train=6", "dataset.num_val=3")
PROBE = ("probe", "--layer", "all", "--checkpoint", "encoder.safetensors", "--task")
SEGMENTATION = (
    *PROBE, "segmentation", *TOY, "probe.image_size=32", "probe.holdout=0.0", "probe.panels=0",
    "probe.training.batch_size=3", "probe.training.epochs=1",
    "probe.training.learning_rates=[0.001,0.01]",
)  # fmt: skip
FEW, MANY = "dataset.num_val=3", "dataset.num_val=9"


def heads_step(*words: str, waits: int = 0) -> Unit:
    """Two batches an epoch; two learning rates for each of three blocks."""
    few, many = ("probe.training.epochs=1", "probe.training.epochs=3")
    return Unit((*SEGMENTATION, *words), few, many, 4, waits)


UNITS = {
    **{f"step, {name}": step_of(name) for name in OBJECTIVES},
    "step, linear": step_of("dino", "model.attention=linear"),
    "step, osa_qr": step_of(
        "dino", "model.attention=osa_qr", "model.qkv_bias=false"
    ),
    "step, osa_newton_schulz": step_of(
        "dino", "model.attention=osa_newton_schulz", "model.qkv_bias=false"
    ),
    "step, graying svd": step_of("dino", "model.graying=svd"),
    "step, graying dct": step_of("dino", "model.graying=dct"),
    # A weight that learns for the first time costs waits once: all begin with the first step.
    "step, SOAP with a refresh": step_of(
        "dino", "optimizer=soap", "optimizer.precondition_frequency=1",
        "objective.freeze_last_layer_epochs=0.0",
    ),
    "TokenCut, batch": Unit((*PROBE, "tokencut", *TOY, "probe.panels=0"), FEW, MANY, 2, 1),
    "feature cache, batch": Unit(
        SEGMENTATION, "dataset.num_train=3", "dataset.num_train=9", 2, 1
    ),
    "heads' step, upsample4": heads_step("probe.loss=upsample4"),
    "heads' step, full_resolution": heads_step("probe.loss=full_resolution"),
    "heads' step, histogram": heads_step("probe.loss=histogram"),
    "heads' step, majority": heads_step("probe.loss=majority"),
    "heads' step, labels of 100 x 100": heads_step("probe.loss=resampled", "probe.loss.size=100"),
    # Decoded and encoded in every epoch; features that are not finite are known before the step.
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
    # Two classes in two splits; six votes of the images look at masks.
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
def counted_steps() -> Iterator[list[int]]:
    """Yield a list that grows by an item for each step that a line search of L-BFGS tries."""
    steps = []
    original = logistic.minimise

    def minimise(objective, *args, **options):
        def counted(values):
            steps.append(1)
            return objective(values)

        return original(counted, *args, **options)

    with patch.object(logistic, "minimise", minimise):
        yield steps


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_waits_no_more_often_than_is_said(workdir, name):
    unit = UNITS[name]
    encoder_file(workdir / "encoder.safetensors", config=THREE_BLOCKS)
    for count in (3, 9):
        class_folders(workdir / f"classes{count}", count)

    def cost(word: str, out: str):
        words = [*unit.words, "--device", "cuda", "--out", out]
        with counted_steps() as steps, LEDGER.counting() as found:
            assert main([*words, word]) == 0
        return found, len(steps)

    # What is made once is made by the first.
    cost(unit.few, "first")
    (few, few_steps), (many, many_steps) = cost(unit.few, "few"), cost(unit.many, "many")
    more = many_steps - few_steps if unit.more is None else unit.more
    many.waits.subtract(few.waits)
    many.uploads.subtract(few.uploads)

    assert more > 0
    assert many.waits.total() <= more * unit.waits, +many.waits
    assert not +many.uploads
