"""Schedules against their closed forms, at every boundary."""

import math

import numpy as np
import pytest

from pretrain.options import TrainOptions
from pretrain.schedules import Cosine, Linear, Timeline, Triangle
from ssl_bench.errors import ConfigurationError


def official_cosine(start, end, num_steps, warmup_steps):
    """The published table: a linspace, then a cosine over the steps that are left."""
    steps = np.arange(num_steps - warmup_steps)
    cosine = end + 0.5 * (start - end) * (1 + np.cos(np.pi * steps / len(steps)))
    return np.concatenate([np.linspace(0, start, warmup_steps), cosine])


@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 7])
def test_the_cosine_is_the_official_table_at_every_step(warmup_steps):
    schedule = Cosine(start=5e-4, end=1e-6, num_steps=20, warmup_steps=warmup_steps)

    values = [schedule(step) for step in range(20)]

    assert values == pytest.approx(official_cosine(5e-4, 1e-6, 20, warmup_steps), abs=1e-15)


def test_the_cosine_starts_at_zero_peaks_twice_and_is_half_way_in_the_middle():
    schedule = Cosine(start=2.0, end=1.0, num_steps=14, warmup_steps=4)

    assert [schedule(step) for step in (0, 1, 3, 4)] == [0, pytest.approx(2 / 3), 2, 2]
    assert schedule(9) == pytest.approx(1.5)
    assert schedule(13) == pytest.approx(1 + 0.5 * (1 + math.cos(math.pi * 0.9)))
    assert schedule(14) == 1


def test_a_cosine_that_rises_never_passes_its_end():
    momentum = Cosine(start=0.996, end=1.0, num_steps=50)

    values = [momentum(step) for step in range(50)]

    assert values == sorted(values)
    assert values[0] == pytest.approx(0.996)
    assert 0.9999 < values[-1] < 1


def test_a_straight_line_reaches_its_end_with_its_last_step_and_stays():
    temperature = Linear(start=0.04, end=0.07, num_steps=4)

    values = [temperature(step) for step in range(6)]

    assert values == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_line_without_length_is_at_its_end_at_once(num_steps):
    assert Linear(start=0.04, end=0.07, num_steps=num_steps)(0) == 0.07


def test_the_triangle_is_the_published_one_at_every_step():
    """Corners at 0, 2/5, 4/5 and the end; the log of its README has .005 after one of 25 epochs."""
    schedule = Triangle(top=0.05, num_steps=25)

    values = [schedule(step) for step in range(25)]

    corners = np.interp(np.arange(1, 26), [0, 10, 20, 25], [0, 0.05, 0.0025, 0])
    assert values == pytest.approx(corners, abs=1e-15)
    assert [round(value, 6) for value in values[:2]] == [0.005, 0.01]
    assert [round(value, 6) for value in values[9:12]] == [0.05, 0.04525, 0.0405]
    assert [round(value, 6) for value in values[-2:]] == [0.0005, 0]


def test_the_triangle_of_a_run_takes_no_warmup():
    timeline = Timeline(total_steps=10, steps_per_epoch=5)

    assert TrainOptions(schedule="triangular").rate(0.1, timeline) == Triangle(0.1, 10)
    assert TrainOptions().rate(0.1, timeline) == Cosine(0.1, 1e-6, 10, 1)
    with pytest.raises(ConfigurationError, match=r"has no warm-up, got train\.warmup_epochs=2;"):
        TrainOptions(schedule="triangular", warmup_epochs=2.0)


def test_epochs_change_on_the_first_step_after_the_last_whole_batch():
    timeline = Timeline(total_steps=30, steps_per_epoch=10)

    assert [timeline.epoch(step) for step in (0, 9, 10, 29)] == [0, 0, 1, 2]


def test_a_run_without_steps_is_refused():
    with pytest.raises(ConfigurationError, match="at least one step"):
        Timeline(total_steps=0, steps_per_epoch=5)
