"""The crops of supervised training: what happens to images, in which order, drawn from what.

What cropping, erasing and mixing leave, and how often, is what timm does.
"""

import math
import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import timm.data.mixup
import timm.data.random_erasing
import torch
from PIL import Image, ImageOps
from scipy.stats import norm, uniform
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from torch.utils.data import DataLoader
from torchvision.transforms import functional

from pretrain.batches import Batches, Share
from pretrain.crops.augmentation import BRIGHTNESS, CONTRAST, SATURATION
from pretrain.crops.single import (
    LabelledCrops,
    Mixing,
    Mixture,
    SingleCrop,
    draw_rectangle,
    draw_square,
    erase,
    grey_out,
    mix,
)
from pretrain.objectives.supervised import Supervised
from pretrain.schedules import Timeline
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD, ViTConfig
from tests.support.draws import alike, as_frequent, follows

CPU = torch.device("cpu")
TINY = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2)
DRAWS = 4000
PLAIN = SingleCrop(scale=(1.0, 1.0), aspect_ratio=(1.0, 1.0), flip_probability=0.0, num_ops=0)
EVERYTHING = SingleCrop(
    color_jitter=0.4, cutout=4, erasing_probability=0.5, mixup=0.8, cutmix=1.0, mix_probability=0.9
)


def samples(count, size=12, seed=0):
    generator = np.random.default_rng(seed)
    shape = (count, size, size, 3)
    images = generator.integers(0, 256, shape, dtype=np.uint8)
    return [Sample(str(i), image, label=i % 3) for i, image in enumerate(images)]


def cut(crops, some, *, size=12, seed=0):
    return crops.cut(some, [np.random.default_rng((seed, i)) for i in range(len(some))], [size])


def normalised(pixels):
    statistics = torch.tensor([IMAGENET_MEAN, IMAGENET_STD])[..., None, None]
    return (pixels - statistics[0]) / statistics[1]


def test_an_image_that_nothing_happens_to_is_only_normalised():
    some = samples(3)

    images, labels, own_share = PLAIN.finish(cut(PLAIN, some), CPU)

    pixels = torch.from_numpy(np.stack([s.image for s in some])).float() / 255
    expected = normalised(pixels.permute(0, 3, 1, 2))
    torch.testing.assert_close(images, expected, atol=1e-6, rtol=1e-6)
    assert (labels.tolist(), own_share.item()) == ([0, 1, 2], 1.0)


def test_half_of_the_images_are_mirrored():
    flipping, some = replace(PLAIN, flip_probability=0.5), samples(1) * 200

    pixels = cut(flipping, some).pixels

    original = torch.from_numpy(some[0].image).permute(2, 0, 1)
    is_mirrored = [torch.equal(p, original.flip(-1)) for p in pixels]
    assert all(torch.equal(p, original) or m for p, m in zip(pixels, is_mirrored, strict=True))
    assert 70 < sum(is_mirrored) < 130


def test_rand_augment_changes_pixels_by_the_sample_alone():
    augmenting, some = replace(PLAIN, num_ops=2), samples(4)
    state = torch.get_rng_state()

    part = cut(augmenting, some)

    assert torch.equal(state, torch.get_rng_state())
    alone = augmenting.cut(some[2:3], [np.random.default_rng((0, 2))], [12])
    assert torch.equal(part.pixels[2], alone.pixels[0])
    plain = cut(PLAIN, some).pixels
    assert not torch.equal(part.pixels, plain)
    assert torch.equal(cut(augmenting, some).pixels, part.pixels)
    assert not torch.equal(cut(augmenting, some, seed=1).pixels, part.pixels)


@pytest.mark.parametrize("order", [*permutations((BRIGHTNESS, CONTRAST, SATURATION))])
def test_colours_change_as_by_torchvision_in_the_order_drawn(order):
    jittering, some = replace(PLAIN, color_jitter=0.4), samples(1)
    factors = (1.3, 0.65, 1.4)
    part = replace(
        cut(jittering, some), order=torch.tensor([order]), factors=torch.tensor([factors])
    )

    images, _, _ = jittering.finish(part, CPU)

    adjust = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
    )
    exact, picture = part.pixels.float() / 255, Image.fromarray(some[0].image)
    for kind in order:
        exact = adjust[kind](exact, factors[kind])
        picture = adjust[kind](picture, factors[kind])
    torch.testing.assert_close(images, normalised(exact), atol=1e-5, rtol=1e-5)
    # Pillow drops what is behind the point after each of the three, times up to 1.4.
    rounded = functional.to_tensor(picture)
    assert 255 * (exact[0] - rounded).abs().max() < 1.4**2 + 1.4 + 1 + 1


def test_strengths_of_colours_are_uniform_and_all_orders_equally_frequent():
    part = cut(replace(PLAIN, color_jitter=0.4), samples(1, size=2) * 1200, size=2)

    counts = torch.unique(part.order, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert counts.tolist() == pytest.approx([200] * 6, abs=5 * 13)  # of a deviation of 13
    for kind in (BRIGHTNESS, CONTRAST, SATURATION):
        assert follows((part.factors[:, kind].numpy() - 0.6) / 0.8, uniform.cdf)
    assert cut(replace(PLAIN, color_jitter=1.5), samples(9)).factors.min() >= 0


def test_cutout_hides_the_square_that_was_drawn():
    cutout, some = replace(PLAIN, cutout=3), samples(2)
    part = replace(cut(cutout, some), hidden=torch.tensor([[0, 3, 1, 4], [10, 13, -1, 2]]))

    before, after = (crops.finish(part, CPU)[0] for crops in (PLAIN, cutout))

    hidden = torch.zeros(2, 12, 12, dtype=torch.bool)
    hidden[0, 0:3, 1:4] = hidden[1, 10:, :2] = True
    assert torch.equal((after == 0).all(1), hidden)
    kept = ~hidden[:, None].expand_as(after)
    assert torch.equal(after[kept], before[kept])
    sides = cut(cutout, some).hidden.view(2, 2, 2).diff()
    assert (sides == 3).all()


def test_images_are_erased_after_normalising_and_mixed_after_erasing():
    part = cut(replace(PLAIN, erasing_probability=1.0, mixup=1.0), samples(4))
    assert (part.erased[:, 1] > 0).all()
    assert part.mixture.own_share < 1

    images, _, own_share = PLAIN.finish(part, CPU)

    alone, _, _ = PLAIN.finish(replace(part, erased=0 * part.erased, mixture=Mixture()), CPU)
    expected = mix(erase(alone, part.erased, part.noise_seed), part.mixture)
    assert torch.equal(images, expected)
    assert own_share.item() == pytest.approx(part.mixture.own_share)


def posterized(image, bits):
    """Its highest bits; Pillow's own function refuses to keep none."""
    return Image.fromarray(np.array(image) & np.uint8(256 - 2 ** (8 - bits)))


def test_images_of_a_whole_recipe_are_distributed_as_those_of_timm(monkeypatch):
    count, image = 700, np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(image).resize((48, 36), Image.Resampling.BICUBIC)
    recipe: Any = {"auto_augment": "rand-m9-mstd0.5-inc1", "interpolation": "bicubic"}
    erasing: Any = {"re_prob": 0.25, "re_mode": "pixel"}
    transform: Any = create_transform(24, is_training=True, color_jitter=0.4, **recipe, **erasing)
    monkeypatch.setattr(ImageOps, "posterize", posterized)
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    theirs = torch.stack([transform(picture) for _ in range(count)])

    crops, some = SingleCrop(erasing_probability=0.25), [Sample("", np.array(picture), label=0)]
    ours, _, _ = crops.finish(cut(crops, some * count, size=24), CPU)

    for measure in (torch.mean, torch.std, torch.amax, torch.amin):
        assert alike(*(measure(images, dim=(1, 2, 3)) for images in (ours, theirs)))
    edges = (images.diff(dim=3).abs().mean((1, 2, 3)) for images in (ours, theirs))
    corners = (images[:, 1, 0, 0] for images in (ours, theirs))
    assert alike(*edges)
    assert alike(*corners)


def test_what_a_recipe_does_not_ask_for_does_not_happen():
    parts = [cut(PLAIN, samples(2), seed=seed) for seed in range(40)]

    assert all(not part.erased.any() and part.mixture == Mixture() for part in parts)
    parts = [cut(EVERYTHING, samples(2), seed=seed) for seed in range(40)]
    assert 30 < sum(int((part.erased[:, 1] > 0).sum()) for part in parts) < 50
    assert sum(part.mixture.box is not None for part in parts) > 5
    assert sum(part.mixture == Mixture() for part in parts) in range(1, 12)


def test_batches_do_not_depend_on_the_number_of_workers():
    def cut_all(some, generators):
        return EVERYTHING.cut(some, generators, (16,))

    source = Batches(samples(9), cut_all, Share(4), 3, repeats=2)
    alone, helped = (
        list(DataLoader(source, batch_size=None, sampler=range(3), num_workers=workers))
        for workers in (0, 2)
    )

    for one, other in zip(alone, helped, strict=True):
        assert as_plain(one) == as_plain(other)
        finished = zip(EVERYTHING.finish(one, CPU), EVERYTHING.finish(other, CPU), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in finished)
    assert as_plain(alone[0]) != as_plain(alone[1])


def as_plain(part: LabelledCrops):
    return {k: v.tolist() if torch.is_tensor(v) else v for k, v in vars(part).items()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", (0.5, 0.4)),
        ("num_ops", -1),
        ("magnitude", 11),
        ("magnitude_deviation", -0.5),
        ("color_jitter", -0.1),
        ("cutout", -1),
        ("erasing_probability", 1.1),
        ("mixup", -0.1),
        ("cutmix", -0.1),
        ("mix_probability", 1.1),
        ("switch_probability", -0.1),
    ],
)
def test_a_recipe_without_meaning_is_refused(field, value):
    with pytest.raises(ConfigurationError, match=rf"crops\.{field}"):
        SingleCrop(**{field: value})


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
def test_erased_rectangles_are_distributed_as_those_of_timm(size, monkeypatch):
    generator = np.random.default_rng(0)
    ours = np.array([draw_rectangle(generator, size, 0.5) for _ in range(DRAWS)])
    monkeypatch.setattr(
        timm.data.random_erasing, "_get_pixels", lambda *args, **_: torch.ones(args[2])
    )
    random.seed(0)
    theirs = np.array([edges_of_timm(RandomErasing(0.5, mode="pixel"), size) for _ in range(DRAWS)])

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


def edges_of_timm(erasing, size):
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


def images_of(count: int, size: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_an_image_is_blended_with_the_one_at_its_place_from_the_end():
    images = images_of(3)

    mixed = mix(images.clone(), Mixture(0.75))

    for own, other in ((0, 2), (1, 1), (2, 0)):
        expected = 0.75 * images[own] + 0.25 * images[other]
        torch.testing.assert_close(mixed[own], expected)


def test_a_box_comes_from_the_other_image_alone():
    images = images_of(2)

    mixed = mix(images.clone(), Mixture(1 - 6 / 64, (2, 5, 6, 8)))

    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[2:5, 6:8] = True
    assert torch.equal(mixed[:, :, inside], images.flip(0)[:, :, inside])
    assert torch.equal(mixed[:, :, ~inside], images[:, :, ~inside])


@pytest.mark.parametrize("mixture", [Mixture(), Mixture(0.3), Mixture(1 - 12 / 64, (1, 5, 0, 3))])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_images_and_their_loss_are_those_of_timm(mixture, smoothing, monkeypatch):
    drawn = (mixture.own_share if mixture.box is None else 0.5, mixture.box is not None)
    monkeypatch.setattr(Mixup, "_params_per_batch", lambda _: drawn)
    monkeypatch.setattr(timm.data.mixup, "rand_bbox", lambda *_, **__: mixture.box)
    labels = torch.tensor([0, 2, 1, 1])
    timms = Mixup(0.8, 1.0, label_smoothing=smoothing, num_classes=3)
    images, targets = timms(images_of(4), labels)
    logits = images.flatten(1)[:, :3]

    mixed = mix(images_of(4), mixture)
    learner = Supervised(label_smoothing=smoothing).build(
        TINY, Timeline(10, 5), seed=1, class_names=("a", "b", "c")
    )
    views = (mixed, labels, torch.tensor(mixture.own_share))
    loss, _ = learner.loss(lambda shown: shown.flatten(1)[:, :3], views, 0)

    torch.testing.assert_close(mixed, images)
    torch.testing.assert_close(loss, SoftTargetCrossEntropy()(logits, targets))


@pytest.mark.parametrize(
    "mixing",
    [
        Mixing(0.8, 1.0, 1.0, 0.5),
        Mixing(0.2, 1.0, 0.5, 0.7),
        Mixing(0.8, 0.0, 1.0, 0.5),
        Mixing(0.0, 0.4, 0.9, 0.5),
    ],
)
def test_mixtures_are_distributed_as_those_of_timm(mixing):
    size = 24
    generator = np.random.default_rng(0)
    ours = [mixing.draw(generator, size) for _ in range(DRAWS)]
    timms = Mixup(mixing.mixup, mixing.cutmix, None, mixing.probability, mixing.switch_probability)
    np.random.seed(0)
    theirs = [mixture_of_timm(timms, size) for _ in range(DRAWS)]

    kinds = (is_whole, is_blend, is_box)
    counts = ([sum(map(kind, drawn)) for kind in kinds] for drawn in (ours, theirs))
    assert as_frequent(*counts)
    for kind in (is_blend, is_box):
        one, other = ([m.own_share for m in drawn if kind(m)] for drawn in (ours, theirs))
        assert not one or alike(one, other)
    edges = (zip(*(m.box for m in drawn if m.box), strict=True) for drawn in (ours, theirs))
    assert all(alike(one, other) for one, other in zip(*edges, strict=True))


def is_whole(mixture):
    return mixture.own_share == 1 and mixture.box is None


def is_blend(mixture):
    return mixture.own_share < 1 and mixture.box is None


def is_box(mixture):
    return mixture.box is not None


def mixture_of_timm(mixup, size):
    own_share, in_box = mixup._params_per_batch()
    if not in_box:
        return Mixture(own_share)
    edges, own_share = cutmix_bbox_and_lam((3, size, size), own_share)
    top, bottom, left, right = map(int, edges)
    return Mixture(float(own_share), (top, bottom, left, right))


def test_the_own_share_is_what_the_box_leaves_of_the_image():
    generator = np.random.default_rng(1)

    drawn = [Mixing(0.0, 1.0, 1.0, 0.5).draw(generator, 10) for _ in range(300)]

    for mixture in drawn:
        assert mixture.box is not None
        top, bottom, left, right = mixture.box
        assert 0 <= top <= bottom <= 10 >= right >= left >= 0
        assert mixture.own_share == pytest.approx(1 - (bottom - top) * (right - left) / 100)
    assert min(mixture.own_share for mixture in drawn) < 0.2


@pytest.mark.parametrize("mixing", [Mixing(0.0, 0.0, 1.0, 0.5), Mixing(0.8, 1.0, 0.0, 0.5)])
def test_nothing_is_mixed_without_a_reason(mixing):
    generator = np.random.default_rng(0)

    assert {mixing.draw(generator, 16) for _ in range(50)} == {Mixture()}
