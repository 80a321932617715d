"""RandAugment: its operations are timm's pixel by pixel, its draws timm's in distribution."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import norm
from timm.data.auto_augment import AugmentOp, rand_augment_transform
from timm.data.auto_augment import RandAugment as TimmsRandAugment
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision.transforms import ColorJitter

from pretrain.crops.rand_augment import OPERATIONS, RandAugment, amount, apply_operations
from pretrain.crops.single import SingleCrop
from tests.support.draws import alike, as_frequent, follows

OPTIONS = {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
RECIPE = "rand-m9-mstd0.5-inc1"
DRAWS = 20_000


def test_the_recipes_leave_timm_no_choice_but_these_options():
    """Their arguments; with them it does not change the colours apart from RandAugment."""
    recipe: Any = {"color_jitter": 0.4, "auto_augment": RECIPE, "interpolation": "bicubic"}

    transform: Any = create_transform(224, is_training=True, **recipe)

    (augment,) = (step for step in transform.transforms if isinstance(step, TimmsRandAugment))
    for operation in augment.ops:
        assert operation.kwargs["fillcolor"] == OPTIONS["img_mean"]
        assert operation.kwargs["resample"] == OPTIONS["interpolation"]
    assert not any(isinstance(step, ColorJitter) for step in transform.transforms)


def picture() -> Tensor:
    """Slopes with noise, of few dark values, so that no operation leaves it as it is."""
    rows, cols = np.mgrid[:20, :28]
    noise = np.random.default_rng(0).integers(0, 40, (20, 28, 3))
    pixels = 20 + np.stack([5 * rows, 4 * cols, 3 * (rows + cols)], axis=-1) + noise
    return torch.from_numpy(pixels.astype(np.uint8)).permute(2, 0, 1)


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_leaves_the_pixels_that_timm_leaves(name, negated, monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.9 if negated else 0.1)
    image = Image.fromarray(picture().permute(1, 2, 0).numpy())

    # Without a bit left Pillow refuses to posterize for timm.
    largest = 9.99 if name == "PosterizeIncreasing" else 10.0
    for magnitude in (0.0, 0.3, 2.5, 5.0, 7.49, 9.0, 9.77, largest):
        value = amount(name, magnitude / 10, negate=negated)
        ours = apply_operations(picture(), [(name, value)])

        timms: Any = AugmentOp(name, prob=1.0, hparams=OPTIONS)
        timms.magnitude = magnitude
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.array(timms(image))), magnitude


def test_each_operation_changes_the_picture_at_the_usual_magnitude():
    for name in OPERATIONS:
        changed = apply_operations(picture(), [(name, amount(name, 0.9, negate=False))])
        assert not torch.equal(changed, picture()), name


def test_a_picture_of_which_no_bit_is_left_is_black():
    nothing_left = amount("PosterizeIncreasing", 1.0, negate=False)

    assert nothing_left == 0
    assert not apply_operations(picture(), [("PosterizeIncreasing", nothing_left)]).any()


def test_operations_follow_one_another():
    both = apply_operations(picture(), [("TranslateXRel", 0.3), ("Invert", 0)])

    moved = apply_operations(picture(), [("TranslateXRel", 0.3)])
    assert torch.equal(both, 255 - moved)
    assert apply_operations(picture(), []).equal(picture())


@cache
def draws_of_ours() -> list[list[tuple[str, int | float]]]:
    generator = np.random.default_rng(0)
    return [RandAugment(2, 9, 0.5).draw(generator) for _ in range(DRAWS)]


@cache
def draws_of_timm() -> list[list[tuple[str, int | float]]]:
    """What timm's operations are called with; none of them is carried out."""
    augment = rand_augment_transform(RECIPE, {**OPTIONS})
    called: list[tuple[str, int | float]] = []
    for operation in augment.ops:

        def note(image, value=0, name=operation.name, **_):
            called.append((name, value))
            return image

        operation.aug_fn = note
    random.seed(0)
    np.random.seed(0)
    draws = []
    for _ in range(DRAWS):
        augment(None)
        draws.append(called.copy())
        called.clear()
    return draws


def test_operations_are_drawn_and_applied_as_often_as_by_timm():
    both = (draws_of_ours(), draws_of_timm())
    names = ([name for draw in draws for name, _ in draw] for draws in both)
    counts = [[drawn.count(name) for name in OPERATIONS] for drawn in names]
    lengths = [[[*map(len, draws)].count(length) for length in range(3)] for draws in both]

    assert as_frequent(*counts)
    assert as_frequent(*lengths)
    # By hand: each of 15 by two chances of a half; none, one or two of both.
    assert np.array(counts[0]) / DRAWS == pytest.approx(np.full(15, 1 / 15), abs=0.008)
    assert np.array(lengths[0]) / DRAWS == pytest.approx([0.25, 0.5, 0.25], abs=0.015)
    pairs = [draw for draw in draws_of_ours() if len(draw) == 2]
    equal = np.mean([one[0] == other[0] for one, other in pairs])
    assert equal == pytest.approx(1 / 15, abs=0.015)


@pytest.mark.parametrize("name", OPERATIONS)
def test_amounts_are_distributed_as_those_of_timm(name):
    ours, theirs = (
        [value for draw in draws for one, value in draw if one == name]
        for draws in (draws_of_ours(), draws_of_timm())
    )

    if name in ("AutoContrast", "Equalize", "Invert"):
        assert len(ours) > 1000
    else:
        assert alike(ours, theirs)
        assert np.unique(np.sign(ours)).tolist() == np.unique(np.sign(theirs)).tolist()


def test_magnitudes_are_normal_and_end_at_ten():
    shares = [a / 30 for d in draws_of_ours() for name, a in d if name == "Rotate"]
    magnitudes = 10 * np.abs(shares)

    inside = magnitudes[magnitudes < 10]
    upmost = norm.cdf(10, 9, 0.5)
    assert follows(inside, lambda x: norm.cdf(x, 9, 0.5) / upmost)
    assert np.mean(magnitudes == 10) == pytest.approx(1 - upmost, abs=0.012)
    assert np.mean(np.array(shares) < 0) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("magnitude", "expected"), [(0, 0.0), (4, 12.0), (10, 30.0)])
def test_without_deviation_the_magnitude_is_what_was_said(magnitude, expected):
    generator = np.random.default_rng(0)

    drawn = [d for _ in range(400) for d in RandAugment(3, magnitude, 0.0).draw(generator)]

    assert {abs(amount) for name, amount in drawn if name == "Rotate"} == {expected}


def test_a_crop_has_the_strength_and_number_of_operations_that_were_said():
    crops = SingleCrop(num_ops=5, magnitude=3, magnitude_deviation=0.0)
    generator = np.random.default_rng(0)

    drawn = [crops.rand_augment.draw(generator) for _ in range(200)]

    assert max(len(one) for one in drawn) == 5
    assert {abs(a) for one in drawn for name, a in one if name == "Rotate"} == {30 * 0.3}
    assert crops.rand_augment == RandAugment(5, 3, 0.0)
