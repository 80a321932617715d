"""Test the speed and precision of training on a real GPU."""

import pytest
import torch

from pretrain.crops.multi import MultiCrop
from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW, Soap
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.models import ViTConfig
from tests.benchmarks.pretrain import Setting
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

real = pytest.mark.skipif(is_simulated(), reason="a simulated device neither compiles nor rounds")

MODEL = ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, num_heads=2)
OBJECTIVE = Dino(
    out_dim=256, hidden_dim=64, bottleneck_dim=32, freeze_last_layer_epochs=0.0,
    momentum=0.9, crops=MultiCrop(num_locals=2),
)  # fmt: skip
TIMELINE = Timeline(total_steps=200, steps_per_epoch=50)
BATCH = 16


class Steps:
    """A trainer that uses the same images in every step."""

    def __init__(self, recipe, **options):
        self.device = torch.device("cuda")
        setting = Setting(self.device, MODEL, OBJECTIVE, BATCH)
        self.groups = setting.groups()
        train = TrainOptions(batch_size=BATCH, **options)
        learner = OBJECTIVE.build(MODEL, TIMELINE, seed=0)
        self.trainer = Trainer(learner, recipe, train, TIMELINE, TrainingRanks(device=self.device))

    def take(self, step):
        augment = OBJECTIVE.crops.augment_on_device
        parts = (augment(part, self.device) for part in [self.groups])
        return self.trainer.take_step(step, parts)

    def losses(self, steps):
        return torch.stack([self.take(step)["loss"] for step in steps]).cpu()


@real
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", [AdamW(), Soap()], ids=["adamw", "soap"])
def test_no_step_waits_for_the_device(recipe, compiled):
    steps = Steps(recipe, compile=compiled)
    # Compilation, FLOP counts and the first bases may wait.
    for step in range(2):
        steps.take(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # These steps include a refresh of the bases.
        reports = [steps.take(step) for step in range(2, 12)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(report["loss"].isfinite() for report in reports)


@real
def test_a_compiled_run_equals_an_eager_one():
    eager, compiled = (
        Steps(AdamW(lr=5e-3), compile=compile_, precision="float32").losses(range(20))
        for compile_ in (False, True)
    )
    torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3)


@real
def test_nothing_is_compiled_after_the_first_steps():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps = Steps(AdamW(), compile=True)
    steps.losses(range(3))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    steps.losses(range(3, 13))
    assert 0 < graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"]


@real
@pytest.mark.parametrize("recipe", [AdamW(lr=5e-3), Soap(lr=5e-3)], ids=["adamw", "soap"])
def test_a_bfloat16_run_is_close_to_a_float32_one(recipe):
    high, low = (
        Steps(recipe, precision=precision, compile=False).losses(range(20))
        for precision in ("float32", "bfloat16")
    )
    assert (high - high[0]).abs().max() > 0.2
    torch.testing.assert_close(low, high, atol=0.05, rtol=0.02)


def test_bfloat16_and_float32_gradients_have_the_same_direction():
    gradients = []
    for precision in ("float32", "bfloat16"):
        steps = Steps(AdamW(), precision=precision, compile=False)
        views = OBJECTIVE.crops.augment_on_device(steps.groups, steps.device)
        steps.trainer._accumulate_gradients(0, iter([views]))
        parameters = steps.trainer.learner.student.parameters()
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
