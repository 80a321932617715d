"""Cutout and random erasing: which pixels they take, and what they leave there."""

import math
import random
from typing import Any

import numpy as np
import pytest
import timm.data.random_erasing
import torch
from scipy.stats import norm
from timm.data.random_erasing import RandomErasing

from pretrain.crops.single import draw_rectangle, draw_square, erase, grey_out
from tests.support.draws import alike, as_frequent, follows

DRAWS = 4000


def edges_of(*edges):
    return torch.tensor(edges)


def test_a_grey_square_is_cut_off_at_the_border():
    images = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0))

    grey = grey_out(images.clone(), edges_of((1, 4, 2, 5), (-1, 2, 3, 9)))

    changed = (grey != images).all(1)
    assert changed[0].nonzero().tolist() == [[r, c] for r in (1, 2, 3) for c in (2, 3, 4)]
    assert changed[1].nonzero().tolist() == [[r, c] for r in (0, 1) for c in (3, 4, 5)]
    assert torch.equal(grey != 0, ~changed[:, None].expand_as(grey))


def test_the_center_of_a_square_lies_anywhere_in_the_image():
    generator = np.random.default_rng(0)

    drawn = np.array([draw_square(generator, 4, 3) for _ in range(2000)])

    assert (drawn[:, 1] - drawn[:, 0] == 3).all()
    assert (drawn[:, 3] - drawn[:, 2] == 3).all()
    centers, counts = np.unique(drawn[:, ::2] + 1, axis=0, return_counts=True)
    assert centers.tolist() == [[row, col] for row in range(4) for col in range(4)]
    assert counts / 2000 == pytest.approx(np.full(16, 1 / 16), abs=0.03)


@pytest.mark.parametrize("size", [24, 32])
def test_rectangles_are_distributed_as_those_of_timm(size, monkeypatch):
    generator = np.random.default_rng(0)
    ours = np.array([draw_rectangle(generator, size, 0.5) for _ in range(DRAWS)])
    monkeypatch.setattr(
        timm.data.random_erasing, "_get_pixels", lambda *args, **_: torch.ones(args[2])
    )
    random.seed(0)
    theirs = np.array([of_timm(RandomErasing(0.5, mode="pixel"), size) for _ in range(DRAWS)])

    some = [drawn[drawn[:, 1] > 0] for drawn in (ours, theirs)]
    assert as_frequent(*([len(s), DRAWS - len(s)] for s in some))
    measures = [
        lambda s: s[:, 0],
        lambda s: s[:, 2],
        lambda s: s[:, 1] - s[:, 0],
        lambda s: s[:, 3] - s[:, 2],
        lambda s: (s[:, 1] - s[:, 0]) * (s[:, 3] - s[:, 2]),
        lambda s: (s[:, 1] - s[:, 0]) / (s[:, 3] - s[:, 2]),
        lambda s: size - s[:, 1],
        lambda s: size - s[:, 3],
    ]
    for measure in measures:
        assert alike(*(measure(s) for s in some))


def of_timm(erasing, size):
    """Edges of what it takes; zeros if it takes nothing."""
    taken = erasing(torch.zeros(1, size, size))[0].nonzero()
    if not len(taken):
        return [0, 0, 0, 0]
    (top, left), (bottom, right) = taken.amin(0).tolist(), (taken.amax(0) + 1).tolist()
    return [top, bottom, left, right]


class Scripted(np.random.Generator):
    """Says beforehand which shares of the area and logarithms of the ratio it will draw."""

    def __init__(self, *numbers):
        super().__init__(np.random.PCG64(0))
        self.numbers = list(numbers)

    def uniform(self, *_: Any, **__: Any) -> Any:
        return self.numbers.pop(0)


def test_a_rectangle_as_high_as_the_image_is_drawn_again_nine_times():
    as_high, fitting = (0.3, math.log(1 / 0.3)), (0.25, 0.0)

    tenth = draw_rectangle(Scripted(*as_high * 9, *fitting), 20, 1.0)
    given_up = draw_rectangle(Scripted(*as_high * 10), 20, 1.0)

    assert (tenth[1] - tenth[0], tenth[3] - tenth[2]) == (10, 10)
    assert not given_up.any()


def test_noise_is_standard_normal_and_stays_in_its_rectangle():
    images = torch.full((3, 3, 40, 50), 7.0)

    erased = erase(images.clone(), edges_of((0, 40, 5, 45), (0, 0, 0, 0), (10, 30, 0, 50)), 3)

    assert torch.equal(erased[1], images[1])
    taken = erased != 7
    assert taken[0, :, :, 5:45].all()
    assert not taken[0, :, :, :5].any()
    assert not taken[0, :, :, 45:].any()
    assert taken[2, :, 10:30].all()
    assert not taken[2, :, :10].any()
    assert not taken[2, :, 30:].any()
    noise = erased[taken]
    assert len(noise.unique()) > 0.99 * len(noise)  # of each pixel and channel its own
    assert follows(noise.numpy(), norm.cdf)


def test_noise_is_a_function_of_its_seed():
    images, edges = torch.zeros(2, 3, 8, 8), edges_of((0, 8, 0, 8), (0, 4, 0, 4))
    state = torch.get_rng_state()

    one, again, other = (erase(images.clone(), edges, seed) for seed in (1, 1, 2))

    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
