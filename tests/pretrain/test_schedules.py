"""Test the schedules of hyperparameters."""

import numpy as np
import pytest

from pretrain.options import TrainOptions
from pretrain.schedules import (
    LAST_LAYER_FREEZE,
    LR_WARMUP,
    TEMPERATURE_RISE,
    CosineSchedule,
    LinearSchedule,
    Timeline,
    TriangularSchedule,
)
from ssl_bench.errors import ConfigurationError

LONG, SHORT = Timeline(3000, 10), Timeline(300, 10)


def official_cosine(start, end, num_steps, warmup_steps):
    """Compute the cosine schedule with linear warm-up as DINO's official code does."""
    steps = np.arange(num_steps - warmup_steps)
    cosine = end + 0.5 * (start - end) * (1 + np.cos(np.pi * steps / len(steps)))
    return np.concatenate([np.linspace(0, start, warmup_steps), cosine])


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_cosine_equals_the_official_schedule(warmup_steps):
    schedule = CosineSchedule(start=5e-4, end=1e-6, num_steps=20, warmup_steps=warmup_steps)
    values = [schedule(step) for step in range(20)]
    assert values == pytest.approx(official_cosine(5e-4, 1e-6, 20, warmup_steps), abs=1e-15)


def test_linear_is_constant_after_its_last_step():
    temperature = LinearSchedule(start=0.04, end=0.07, num_steps=4)
    values = [temperature(step) for step in range(6)]
    assert values == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])
    assert LinearSchedule(start=0.04, end=0.07, num_steps=0)(0) == 0.07


def test_triangle_equals_the_published_schedule():
    schedule = TriangularSchedule(peak=0.05, num_steps=25)
    values = [schedule(step) for step in range(25)]
    expected = np.interp(np.arange(1, 26), [0, 10, 20, 25], [0, 0.05, 0.0025, 0])
    assert values == pytest.approx(expected, abs=1e-15)
    # The log in the README of the authors has 0.005 after the first of 25 epochs.
    assert [round(value, 6) for value in values[:2]] == [0.005, 0.01]
    assert [round(value, 6) for value in values[9:12]] == [0.05, 0.04525, 0.0405]
    assert [round(value, 6) for value in values[-2:]] == [0.0005, 0]


def test_a_triangular_run_has_no_warmup():
    timeline = Timeline(total_steps=10, steps_per_epoch=5)
    assert TrainOptions(schedule="triangular").lr_schedule(0.1, timeline) == TriangularSchedule(
        0.1, 10
    )
    assert TrainOptions().lr_schedule(0.1, timeline) == CosineSchedule(0.1, 1e-6, 10, 1)
    with pytest.raises(ConfigurationError) as caught:
        TrainOptions(schedule="triangular", warmup_epochs=2.0)
    assert caught.value.hint == ("train.warmup_epochs=null",)


def test_max_steps_can_only_shorten_a_run():
    for max_steps, steps in [(None, 12), (5, 5), (12, 12), (13, 12)]:
        options = TrainOptions(epochs=2, batch_size=2, max_steps=max_steps)
        assert options.timeline(13) == Timeline(steps, 6)
    for numbers in ((0, 5), (5, 0)):
        with pytest.raises(ConfigurationError, match="too short"):
            Timeline(*numbers)


@pytest.mark.parametrize(
    ("warmup", "timeline", "steps"),
    [
        (LR_WARMUP, LONG, 100), (LR_WARMUP, SHORT, 30), (LR_WARMUP, Timeline(301, 10), 31),
        (LAST_LAYER_FREEZE, SHORT, 10), (LAST_LAYER_FREEZE, Timeline(20, 10), 2),
        (TEMPERATURE_RISE, LONG, 300), (TEMPERATURE_RISE, SHORT, 90),
    ],
)  # fmt: skip
def test_default_phases_are_limited_to_a_share_of_the_run(warmup, timeline, steps):
    assert warmup.count_steps(None, timeline) == steps


@pytest.mark.parametrize(("epochs", "steps"), [(0.0, 0), (2.5, 25), (29.0, 290), (30.0, 300)])
def test_a_given_length_of_a_phase_is_not_limited(epochs, steps):
    assert LR_WARMUP.count_steps(epochs, SHORT) == steps
    assert TrainOptions(warmup_epochs=epochs).warmup_steps(SHORT) == steps


@pytest.mark.parametrize("warmup", [LR_WARMUP, LAST_LAYER_FREEZE, TEMPERATURE_RISE])
def test_a_phase_longer_than_the_run_is_refused(warmup):
    with pytest.raises(ConfigurationError, match=warmup.key):
        warmup.count_steps(31.0, SHORT)
