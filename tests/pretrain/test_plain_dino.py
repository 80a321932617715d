"""What ours is measured against computes the same thing."""

import pytest
import torch

from pretrain.crops.multi import MultiCrop
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW
from ssl_bench.models import ViTConfig
from tests.benchmarks import pretrain as bench
from tests.benchmarks.memory import MEBIBYTE, peak_mebibytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("fused_attention", [True, False])
def test_the_plain_loop_and_ours_have_the_same_losses(fused_attention):
    objective = Dino(
        out_dim=32, hidden_dim=16, bottleneck_dim=8, freeze_last_layer_epochs=0.0,
        crops=MultiCrop(num_locals=3),
    )  # fmt: skip
    model = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2)
    setting = bench.Setting(CPU, model, objective, 4, fused_attention)
    groups = setting.groups()
    ours, trainer = bench.ours(setting, AdamW(lr=2.0), groups)
    plain = bench.plain(setting, groups, trainer.values)

    # Rates of the warm-up are small: at this one the losses move.
    steps = range(0, 6_000, 1_000)
    losses = [ours.take_step(step)["loss"].item() for step in steps]
    others = [plain.take_step(step) for step in steps]

    assert losses == pytest.approx(others, abs=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-2


def test_live_bytes_see_the_peak_and_not_what_was_freed():
    def work():
        one = torch.zeros(MEBIBYTE)  # 4 mebibytes
        two = one + 1
        del one
        three = two.view(2, -1) * 2
        del two
        return three.sum()

    assert peak_mebibytes(work, CPU) == pytest.approx(8, abs=0.01)


@pytest.mark.slow
def test_head_and_loss_take_a_third_of_the_memory_of_the_double_loop():
    ours, plain = (
        bench.measured_head(name, 16, device=CPU, out_dim=65_536)
        for name in (bench.ADAMW, bench.PLAIN)
    )

    assert ours.mebibytes * 2.9 < plain.mebibytes
