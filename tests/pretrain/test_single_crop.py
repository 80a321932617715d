"""The crops of supervised training: what happens to images, in which order, drawn from what."""

import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.stats import uniform
from timm.data.transforms_factory import create_transform
from torch.utils.data import DataLoader
from torchvision.transforms import functional

from pretrain.batches import Batches, Share
from pretrain.crops.augmentation import BRIGHTNESS, CONTRAST, SATURATION
from pretrain.crops.single import LabelledCrops, Mixture, SingleCrop, erase, mix
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD
from tests.support.draws import alike, follows

CPU = torch.device("cpu")
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
