"""Crops and looks: the operations of torchvision, batched, and free of worker state."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tvf
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from pretrain.crops.augmentation import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    AugmentationParams,
    apply_looks,
    blend,
    blur,
    greyscale,
    shift_hue,
    solarize,
)
from pretrain.crops.multi import MultiCrop
from pretrain.crops.plain import crop, draw_boxes
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD
from tests.support.draws import as_frequent

ADJUST = {
    BRIGHTNESS: tvf.adjust_brightness,
    CONTRAST: tvf.adjust_contrast,
    SATURATION: tvf.adjust_saturation,
    HUE: tvf.adjust_hue,
}


def pictures(count, height=20, width=28, seed=0):
    """Smooth random colours with a grey patch, where hue has no meaning."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 7, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    images[:, :, :4, :4] = 0.3
    return images


def bytes_of(count, height, width, seed=0):
    images = (pictures(count, height, width, seed) * 255).byte().permute(0, 2, 3, 1)
    return [image.numpy().copy() for image in images]


def plain_looks(views):
    """AugmentationParams that change nothing."""
    off = torch.zeros(views, dtype=torch.bool)
    order = torch.arange(4).expand(views, 4).clone()
    factors = torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(views, 4).clone()
    return AugmentationParams(off, off, order, factors, off, torch.zeros(views), off)


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", [BRIGHTNESS, CONTRAST, SATURATION])
def test_each_view_gets_the_torchvision_adjustment_with_its_own_factor(kind):
    images, factors = pictures(3), torch.tensor([0.6, 1.0, 1.4])

    ours = blend(images, torch.full((3,), kind), factors)

    for image, factor, result in zip(images, factors.tolist(), ours, strict=True):
        torch.testing.assert_close(result, ADJUST[kind](image, factor), atol=2e-6, rtol=0)


def test_hue_turns_as_in_torchvision_and_a_full_turn_changes_nothing():
    images, shifts = pictures(4), torch.tensor([-0.5, -0.07, 0.1, 0.5])

    ours = shift_hue(images, shifts)

    for image, shift, result in zip(images, shifts.tolist(), ours, strict=True):
        torch.testing.assert_close(result, tvf.adjust_hue(image, shift), atol=2e-6, rtol=0)
    torch.testing.assert_close(shift_hue(images, torch.ones(4)), images, atol=1e-5, rtol=0)


def test_grey_and_solarize_equal_torchvision():
    images = pictures(2)
    images[0, 0, 9] = 0.25

    torch.testing.assert_close(greyscale(images), tvf.rgb_to_grayscale(images), atol=1e-6, rtol=0)
    torch.testing.assert_close(solarize(images, 0.25), tvf.solarize(images, 0.25), atol=0, rtol=0)


@pytest.mark.parametrize("height", [13, 20])
def test_each_view_is_blurred_with_its_own_sigma_and_mirrored_at_the_border(height):
    images, sigmas = pictures(3, height=height), torch.tensor([0.1, 0.8, 2.0])

    ours = blur(images, sigmas)

    for image, sigma, result in zip(images, sigmas.tolist(), ours, strict=True):
        reference = tvf.gaussian_blur(image, [25, 25], [sigma, sigma])
        torch.testing.assert_close(result, reference, atol=2e-6, rtol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_batch_of_mixed_looks_equals_torchvision_image_by_image(device):
    pixels = (pictures(6) * 255).byte()
    looks = draw(MultiCrop(blur_sigma=(0.5, 1.5), grey_probability=0.4), images=1, views=6)
    looks = replace(looks, solarize=torch.tensor([True, False] * 3))

    ours = apply_looks(pixels.to(device), looks, solarize_threshold=0.5).cpu()

    assert 0 < looks.grey.sum() < 6 or 0 < looks.jitter.sum() < 6
    for view in range(6):
        reference = one_by_one(pixels[view], looks, view)
        torch.testing.assert_close(ours[view], reference, atol=5e-5, rtol=0)


def one_by_one(pixels, looks, view):
    image = pixels.float() / 255
    image = image.flip(-1) if looks.flip[view] else image
    if looks.jitter[view]:
        for kind in looks.order[view].tolist():
            image = ADJUST[kind](image, looks.factors[view, kind].item())
    image = tvf.rgb_to_grayscale(image, 3) if looks.grey[view] else image
    if sigma := looks.blur_sigma[view].item():
        image = tvf.gaussian_blur(image, [25, 25], [sigma, sigma])
    image = tvf.solarize(image, 0.5) if looks.solarize[view] else image
    return tvf.normalize(image, list(IMAGENET_MEAN), list(IMAGENET_STD))


def test_looks_that_change_nothing_only_normalise():
    pixels = (pictures(2) * 255).byte()

    ours = apply_looks(pixels, plain_looks(2), solarize_threshold=0.5)

    normal = tvf.normalize(pixels.float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(ours, normal, atol=1e-6, rtol=0)


def test_pixels_travel_side_by_side_and_are_changed_plane_by_plane():
    samples = [Sample("", image) for image in bytes_of(3, 30, 40)]
    generators = [np.random.default_rng(seed) for seed in range(3)]

    large, _ = MultiCrop(num_locals=2).cut(samples, generators, (24, 16))
    ours = apply_looks(large.pixels, large.looks, solarize_threshold=0.5)

    assert large.pixels.is_contiguous(memory_format=torch.channels_last)
    assert ours.is_contiguous()
    plain = apply_looks(large.pixels.contiguous(), large.looks, solarize_threshold=0.5)
    assert torch.equal(ours, plain)


def draw(crops, *, images, views=10):
    """AugmentationParams of many images, [images * views], image by image."""
    crops = replace(crops, num_locals=views - 2)
    generators = [np.random.default_rng(seed) for seed in range(images)]
    _, looks = crops.draw(generators, np.full((images, 2), 99))
    by_view = {
        f.name: getattr(looks, f.name).unflatten(0, (views, images))
        for f in fields(AugmentationParams)
    }
    return AugmentationParams(
        **{name: part.transpose(0, 1).flatten(0, 1) for name, part in by_view.items()}
    )


def test_looks_are_drawn_with_the_official_probabilities_and_ranges():
    looks = draw(MultiCrop(), images=1500)
    by_view = {
        f.name: getattr(looks, f.name).float().unflatten(0, (1500, 10))
        for f in fields(AugmentationParams)
    }
    shares = {name: values.mean(0) for name, values in by_view.items()}

    assert shares["flip"].mean() == pytest.approx(0.5, abs=0.015)
    assert shares["jitter"].mean() == pytest.approx(0.8, abs=0.015)
    assert shares["grey"].mean() == pytest.approx(0.2, abs=0.015)
    assert shares["solarize"].tolist() == pytest.approx([0, 0.2, *[0] * 8], abs=0.04)
    blurred = (by_view["blur_sigma"] > 0).float().mean(0)
    assert blurred.tolist() == pytest.approx([1, 0.1, *[0.5] * 8], abs=0.05)
    sigma = looks.blur_sigma[looks.blur_sigma > 0]
    assert (sigma.min() >= 0.1, sigma.max() <= 2.0) == (True, True)
    assert sigma.mean() == pytest.approx(1.05, abs=0.03)


def test_jitter_strengths_are_uniform_and_every_order_is_as_likely():
    looks = draw(MultiCrop(), images=1500)

    spread = torch.tensor([0.8, 0.8, 0.4, 0.2]) / 12**0.5
    torch.testing.assert_close(looks.factors.std(0), spread, rtol=0.03, atol=0)
    torch.testing.assert_close(
        looks.factors.mean(0), torch.tensor([1.0, 1.0, 1.0, 0.0]), rtol=0, atol=0.01
    )
    ranks = looks.order @ torch.tensor([64, 16, 4, 1])
    counts = ranks.unique(return_counts=True)[1] / len(ranks)
    assert len(counts) == 24
    assert (counts - 1 / 24).abs().max() < 0.008


def test_boxes_cover_the_asked_share_of_the_image_at_the_asked_ratio():
    scales = np.array([[0.4, 1.0], [0.05, 0.4]] * 2000)

    boxes = draw_boxes(np.random.default_rng(0), (300, 400), scales, (3 / 4, 4 / 3))

    top, left, height, width = boxes.T
    area, ratio = height * width / (300 * 400), width / height
    assert (np.all(top + height <= 300), np.all(left + width <= 400)) == (True, True)
    assert (top.min(), left.min()) == (0, 0)
    assert (area[0::2].min() > 0.398, area[1::2].min() > 0.048) == (True, True)
    assert area[1::2].max() < 0.41
    assert area[1::2].mean() == pytest.approx(0.225, abs=0.01)
    assert (ratio.min() > 0.73, ratio.max() < 1.36) == (True, True)
    assert np.log(ratio[1::2]).mean() == pytest.approx(0, abs=0.01)
    top, left, height, width = boxes[1::2].T
    drawn = [top / (300 - height), left / (400 - width), area[1::2], ratio[1::2]]
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.08


def test_corners_are_as_frequent_as_those_of_torchvision():
    # A quarter of 6 x 8 pixels at a ratio of 1: always 3 x 3, at 4 x 6 places.
    scales = np.array([[3 / 16, 3 / 16]] * 4800)
    ours = draw_boxes(np.random.default_rng(0), (6, 8), scales, (1.0, 1.0))
    torch.manual_seed(0)
    image = torch.empty(3, 6, 8)
    theirs = [
        RandomResizedCrop.get_params(image, [3 / 16, 3 / 16], [1.0, 1.0]) for _ in range(4800)
    ]

    counts = []
    for boxes in (ours, np.array(theirs)):
        assert (boxes[:, 2:] == 3).all()
        counts.append(np.bincount(6 * boxes[:, 0] + boxes[:, 1], minlength=24))

    assert (counts[0] > 0).all()
    assert as_frequent(*counts)


@pytest.mark.parametrize(("size", "box"), [((10, 90), (0, 38, 10, 13)), ((90, 9), (39, 0, 12, 9))])
def test_a_picture_too_long_for_any_box_gives_its_center(size, box):
    scales = np.array([[0.9, 1.0]])

    boxes = draw_boxes(np.random.default_rng(0), size, scales, (3 / 4, 4 / 3))

    assert tuple(boxes[0]) == box


def test_a_crop_is_what_pil_cuts_out_and_resizes():
    (image,) = bytes_of(1, 90, 120)

    ours = crop(torch.from_numpy(image), np.array([10, 30, 60, 50]), 24)

    pil = Image.fromarray(image[10:70, 30:80]).resize((24, 24), Image.Resampling.BICUBIC)
    difference = ours.permute(1, 2, 0).int() - torch.from_numpy(np.array(pil)).int()
    assert difference.abs().max() <= 2


@pytest.mark.parametrize(
    ("image_size", "patch_size", "sizes"),
    [(224, 16, (224, 96)), (64, 8, (64, 24)), (96, 16, (96, 48)), (32, 16, (32, 16))],
)
def test_small_crops_keep_their_share_in_whole_patches(image_size, patch_size, sizes):
    assert MultiCrop().sizes(image_size, patch_size) == sizes
    assert MultiCrop(num_locals=0).sizes(image_size, patch_size) == (image_size,)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("global_scale", (0.5, 0.4), "least <= largest"),
        ("blur_probability", (1.0, 0.5), "3 of them"),
        ("num_locals", -1, "num_locals expects a whole number"),
    ],
)
def test_a_recipe_without_meaning_is_refused(field, value, message):
    with pytest.raises(ConfigurationError, match=message):
        MultiCrop(**{field: value})
