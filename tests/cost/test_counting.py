"""What work asks of a device, counted with and without values."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pretrain.costs import PretrainingCost
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import Soap
from ssl_bench.cost.counting import Ledger, Operation
from ssl_bench.cost.places import RealPlace
from ssl_bench.cost.work import Unit, count, count_on
from ssl_bench.models import ViTConfig

CPU = torch.device("cpu")
TINY = ViTConfig(image_size=32, patch_size=16, dim=12, depth=2, num_heads=2)


def linear(batch):
    """A linear layer from 5 to 7 features."""

    def make(place, parts):
        layer = place.built(lambda _: nn.Linear(5, 7), lambda built: [built])
        inputs = torch.randn(batch, 5, device=place.device)

        def step():
            with torch.no_grad():
                layer(inputs)

        return step

    return Unit("linear", 1, make)


def dino(part, **changes):
    objective = Dino(out_dim=32, hidden_dim=16, bottleneck_dim=8)
    fixed = {"batch_size": part, "part": part, "precision": "float32", **changes}
    return PretrainingCost(model=TINY, objective=objective, **fixed).units(0.0)[0]


def test_a_linear_layer_is_what_a_hand_counts():
    found = count(linear(3))

    # Weights and bias, images in, images out, of four bytes each.
    moved = 4.0 * (7 * 5 + 7 + 3 * 5 + 3 * 7)
    operation = Operation("addmm", 2.0 * 3 * 5 * 7, moved, "product", 35.0, dtype=torch.float32)
    assert found.operations == {operation: 1}
    # All of it and the image: 56 bytes more make no storage smaller or larger.
    assert found.peak_bytes == moved


def test_a_product_in_place_counts_as_any_other():
    left, right = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)
    with Ledger() as ledger:
        torch.zeros(2, 3, 5).baddbmm_(left, right)

    assert ledger.count().flops == 2 * 2 * 3 * 4 * 5


def test_views_and_empty_memory_are_no_launches():
    with Ledger() as ledger:
        torch.empty(4, 6).view(24)[3:].unsqueeze(0).expand(5, -1)

    assert ledger.count().launches == 0


def test_twice_the_images_are_twice_the_products_with_values_and_without():
    once, twice = count(linear(3)), count_on(RealPlace(CPU), linear(6))

    assert twice.flops == 2 * once.flops
    assert count(linear(6)).operations == twice.operations


@pytest.mark.slow
def test_a_training_step_without_values_is_that_with_them():
    with_values, without = count_on(RealPlace(CPU), dino(2)), count(dino(2))

    assert with_values.operations == without.operations
    assert with_values.peak_bytes == without.peak_bytes


@pytest.mark.slow
def test_twice_the_batch_is_twice_the_products_and_so_are_two_parts():
    once, twice = count(dino(4)), count(dino(8))
    in_parts = count(dino(4, batch_size=8))

    # What the prototypes' lengths cost does not hang on the batch.
    assert twice.flops == pytest.approx(2 * once.flops, rel=1e-6)
    assert in_parts.flops == pytest.approx(2 * once.flops, rel=1e-6)
    assert in_parts.peak_bytes < twice.peak_bytes


def test_the_peak_is_that_of_torchs_own_profiler():
    def make(place, parts):
        layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        model = place.built(lambda _: layers, lambda built: [built])
        inputs = torch.randn(100, 64, device=place.device)

        def step():
            model(inputs).square().mean().backward()
            model.zero_grad(set_to_none=True)

        return step

    unit = Unit("perceptron", 1, make, differentiates=True)
    step = unit.make(RealPlace(CPU), 1)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    held, most, profiler = 0, 0, cast(Any, trace.profiler)
    for event in sorted(profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    still = 4 * (2 * 64 * 256 + 256 + 64 + 100 * 64)

    # The profiler sees scratch memory inside of an operation too.
    assert count(unit).peak_bytes - still == pytest.approx(most, rel=0.02)


@pytest.mark.slow
def test_a_refresh_of_soap_is_more_than_a_step_between_two():
    often = PretrainingCost(model=TINY, objective=Dino(out_dim=32), optimizer=Soap(), part=1,
                            batch_size=1, num_images=100)  # fmt: skip
    between, refresh = often.units(0.0)

    assert (between.times, refresh.times) == (90, 10)
    names = [{one.name for one in count(unit).operations} for unit in (between, refresh)]
    assert ["linalg_qr" in some for some in names] == [False, True]
