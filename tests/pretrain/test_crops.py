"""Test crops and augmentations.

The reference implementations are those of torchvision and timm.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import timm.data.mixup
import timm.data.random_erasing
import torch
import torchvision.transforms.v2.functional as tvf
from PIL import Image, ImageOps
from scipy.stats import norm, uniform
from timm.data.auto_augment import AugmentOp, rand_augment_transform
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from torch import Tensor
from torchvision.transforms import ColorJitter, RandomResizedCrop

from pretrain.crops import augmentation
from pretrain.crops.augmentation import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    AugmentationParams,
    augment,
)
from pretrain.crops.multi import MultiCrop
from pretrain.crops.plain import NUM_RANDOMS_PER_BOX, PlainCrop, crop, place_boxes
from pretrain.crops.single import (
    OPERATIONS,
    Mixture,
    SingleCrop,
    apply_operations,
    compute_argument,
    draw_rectangle,
    draw_square,
    erase,
    mix,
)
from pretrain.objectives.supervised import Supervised
from pretrain.options import DataOptions
from pretrain.schedules import Timeline
from ssl_bench.data.samples import Sample
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD
from tests.pretrain.plans import CPU, TINY
from tests.support.distributions import (
    has_distribution,
    have_same_distribution,
    have_same_frequencies,
)
from tests.support.faults import unchecked_types

ADJUST = {
    BRIGHTNESS: tvf.adjust_brightness,
    CONTRAST: tvf.adjust_contrast,
    SATURATION: tvf.adjust_saturation,
    HUE: tvf.adjust_hue,
}
DRAWS = 3000
WHOLE: dict[str, Any] = {"scale": (1.0, 1.0), "aspect_ratio": (1.0, 1.0), "flip_probability": 0.0}
PLAIN = SingleCrop(num_ops=0, **WHOLE)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw_params(crops, *, images, views=10) -> AugmentationParams:
    # Consecutive rows are views of the same image.
    crops = replace(crops, num_locals=views - 2)
    generators = [np.random.default_rng(seed) for seed in range(images)]
    _, params = crops.draw(generators, np.full((images, 2), 99))
    return params.map(lambda v: v.unflatten(0, (views, images)).transpose(0, 1).flatten(0, 1))


def normalised(pixels):
    return tvf.normalize(pixels, list(IMAGENET_MEAN), list(IMAGENET_STD))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_augmentation_of_a_batch_equals_torchvision(device):
    # The images have smooth colours and a grey patch, for which hue is undefined.
    coarse = torch.rand(6, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    pixels = torch.nn.functional.interpolate(coarse, size=(20, 28), mode="bilinear")
    pixels[:, :, :4, :4] = 0.3
    pixels = (pixels * 255).byte()
    crops = MultiCrop(hue=0.5, blur_sigma=(0.1, 2.0), grey_probability=0.4)
    params = draw_params(crops, images=1, views=6)
    params = replace(
        params,
        solarize=torch.tensor([True, False] * 3),
        jitter=torch.tensor([True, True, False] * 2),
        grey=torch.tensor([True] * 3 + [False] * 3),
    )
    ours = augment(pixels.to(device), params, solarize_threshold=0.5).cpu()
    for view in range(6):
        reference = augment_with_torchvision(pixels[view], params, view)
        torch.testing.assert_close(ours[view], reference, atol=5e-5, rtol=0)


def test_colours_computed_for_all_or_only_changed_views_are_equal(monkeypatch):
    monkeypatch.setattr(augmentation, "_compiled_jitter", lambda: augmentation.apply_one_jitter)
    pixels = picture(24, 20).repeat(60, 1, 1, 1)
    params = draw_params(MultiCrop(hue=0.5, grey_probability=0.4), images=6)
    ours = augmentation._change_colours_on_gpu(pixels, params)
    assert torch.equal(ours, augmentation._change_colours_on_cpu(pixels, params))


def augment_with_torchvision(pixels, params, view):
    image = pixels.float() / 255
    image = image.flip(-1) if params.flip[view] else image
    if params.jitter[view]:
        for kind in params.order[view].tolist():
            image = ADJUST[kind](image, params.factors[view, kind].item())
    image = tvf.rgb_to_grayscale(image, 3) if params.grey[view] else image
    if sigma := params.blur_sigma[view].item():
        image = tvf.gaussian_blur(image, [25, 25], [sigma, sigma])
    return normalised(tvf.solarize(image, 0.5) if params.solarize[view] else image)


def test_augmentations_have_the_official_probabilities_and_ranges():
    params = draw_params(MultiCrop(), images=1500)

    for name, share in {"flip": 0.5, "jitter": 0.8, "grey": 0.2}.items():
        assert getattr(params, name).float().mean() == pytest.approx(share, abs=0.015)
    solarized, blurred = (
        (values > 0).float().view(1500, 10).mean(0).tolist()
        for values in (params.solarize, params.blur_sigma)
    )
    assert solarized == pytest.approx([0, 0.2, *[0] * 8], abs=0.04)
    assert blurred == pytest.approx([1, 0.1, *[0.5] * 8], abs=0.05)
    sigma = params.blur_sigma[params.blur_sigma > 0]
    assert has_distribution((sigma.numpy() - 0.1) / 1.9, uniform.cdf)
    # Strengths are uniform, and all 24 orders are equally likely.
    lowest, width = np.array([0.6, 0.6, 0.8, -0.1]), np.array([0.8, 0.8, 0.4, 0.2])
    for shares in ((params.factors.numpy() - lowest) / width).T:
        assert has_distribution(shares, uniform.cdf)
    # Factors are never negative.
    jitter: Any = ColorJitter(saturation=1.5)
    least, largest = jitter.saturation
    factors = draw_params(MultiCrop(saturation=1.5), images=150).factors[:, SATURATION]
    assert has_distribution((factors.numpy() - least) / (largest - least), uniform.cdf)
    counts = params.order.unique(dim=0, return_counts=True)[1] / len(params.order)
    assert len(counts) == 24
    assert (counts - 1 / 24).abs().max() < 0.008


def test_parameters_are_independent():
    crops = MultiCrop(
        jitter_probability=0.5, grey_probability=0.5, blur_sigma=(1.0, 2.0), hue=0.5,
        blur_probability=(1.0, 1.0, 1.0), solarize_probability=(0.5, 0.5, 0.5),
    )  # fmt: skip
    params = draw_params(crops, images=300)
    values = [params.flip, params.jitter, params.grey, params.solarize, params.blur_sigma]
    correlations = torch.corrcoef(torch.stack([*values, *params.factors.T]).double())
    assert correlations.fill_diagonal_(0).abs().max() < 0.08


def test_a_value_at_the_threshold_is_solarized():
    pixels = torch.tensor([127, 128, 129]).byte().expand(1, 3, 4, 3)
    flags = torch.zeros(1, dtype=torch.bool)
    params = AugmentationParams(
        flip=flags, jitter=flags, order=torch.arange(4)[None], factors=torch.ones(1, 4),
        grey=flags, blur_sigma=torch.zeros(1), solarize=~flags,
    )  # fmt: skip
    result = augment(pixels, params, solarize_threshold=128 / 255)
    expected = normalised(torch.tensor([127, 127, 126]).div(255).expand(3, 4, 3))
    torch.testing.assert_close(result[0], expected, rtol=0, atol=1e-6)


def draw_boxes(size, scales, aspect_ratio):
    numbers = np.random.default_rng(0).random((len(scales), 1, NUM_RANDOMS_PER_BOX))
    return place_boxes(numbers, np.array([size]), scales, aspect_ratio)[:, 0]


def test_boxes_have_the_requested_areas_and_aspect_ratios():
    scales = np.array([[0.4, 1.0], [0.05, 0.4]] * 2000)
    boxes = draw_boxes((300, 400), scales, (3 / 4, 4 / 3))

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
    values = [top / (300 - height), left / (400 - width), area[1::2], ratio[1::2]]
    assert np.abs(np.corrcoef(values) - np.eye(4)).max() < 0.08


def test_corners_are_distributed_as_in_torchvision():
    # A box always has 3 x 3 of 6 x 8 pixels, so it has 4 x 6 possible corners.
    scales = np.array([[3 / 16, 3 / 16]] * 2400)
    ours = draw_boxes((6, 8), scales, (1.0, 1.0))
    torch.manual_seed(0)
    image = torch.empty(3, 6, 8)
    area, ratio = [3 / 16, 3 / 16], [1.0, 1.0]
    theirs = [RandomResizedCrop.get_params(image, area, ratio) for _ in range(2400)]
    counts = []
    for boxes in (ours, np.array(theirs)):
        assert (boxes[:, 2:] == 3).all()
        counts.append(np.bincount(6 * boxes[:, 0] + boxes[:, 1], minlength=24))
    assert (counts[0] > 0).all()
    assert have_same_frequencies(*counts)


@pytest.mark.parametrize(("size", "box"), [((10, 90), (0, 38, 10, 13)), ((90, 9), (39, 0, 12, 9))])
def test_images_too_elongated_for_any_box_are_cropped_centrally(size, box):
    assert tuple(draw_boxes(size, np.array([[0.9, 1.0]]), (3 / 4, 4 / 3))[0]) == box


def test_a_crop_equals_that_of_pil():
    image = picture(90, 120).permute(1, 2, 0).numpy()
    ours = crop(torch.from_numpy(image), np.array([10, 30, 60, 50]), 24)
    pil = Image.fromarray(image[10:70, 30:80]).resize((24, 24), Image.Resampling.BICUBIC)
    difference = ours.permute(1, 2, 0).int() - torch.from_numpy(np.array(pil)).int()
    assert difference.abs().max() <= 2


@pytest.mark.parametrize(
    ("image_size", "patch_size", "sizes"),
    [(224, 16, (224, 96)), (64, 8, (64, 24)), (96, 16, (96, 48)), (32, 16, (32, 16))],
)
def test_small_crops_have_a_multiple_of_the_patch_size(image_size, patch_size, sizes):
    assert MultiCrop().sizes(image_size, patch_size) == sizes
    assert MultiCrop(num_locals=0).sizes(image_size, patch_size) == (image_size,)


def samples(count, size=12):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Sample(str(i), image, label=i % 3) for i, image in enumerate(images)]


def cut(crops, some, *, size=12):
    return crops.cut(some, [np.random.default_rng((0, i)) for i in range(len(some))], [size])


def test_colour_jitter_equals_torchvision_in_every_order():
    orders, factors = [*permutations((BRIGHTNESS, CONTRAST, SATURATION))], (1.3, 0.65, 1.4)
    crops = replace(PLAIN, color_jitter=0.4)
    part = cut(crops, samples(6))
    part = replace(part, order=torch.tensor(orders), factors=torch.tensor([factors] * 6))
    images, _, _ = crops.augment_on_device(part, CPU)
    for image, pixels, order in zip(images, part.pixels, orders, strict=True):
        expected = pixels.float() / 255
        for kind in order:
            expected = ADJUST[kind](expected, factors[kind])
        torch.testing.assert_close(image, normalised(expected), atol=1e-5, rtol=1e-5)


@unchecked_types()
def test_colour_jitter_has_uniform_strengths_and_orders():
    part = cut(replace(PLAIN, color_jitter=0.4), samples(1, size=2) * 1200, size=2)
    counts = torch.unique(part.order, dim=0, return_counts=True)[1]
    assert counts.tolist() == pytest.approx([200] * 6, abs=5 * 13)  # The standard deviation is 13.
    for kind in (BRIGHTNESS, CONTRAST, SATURATION):
        assert has_distribution((part.factors[:, kind].numpy() - 0.6) / 0.8, uniform.cdf)
    assert cut(replace(PLAIN, color_jitter=1.5), samples(9)).factors.min() >= 0


def test_cutout_hides_only_its_square():
    cutout, some = replace(PLAIN, cutout=3), samples(2)
    part = replace(cut(cutout, some), cutout=torch.tensor([[0, 3, 1, 4], [10, 13, -1, 2]]))
    before, after = (crops.augment_on_device(part, CPU)[0] for crops in (PLAIN, cutout))
    hidden = torch.zeros(2, 12, 12, dtype=torch.bool)
    hidden[0, 0:3, 1:4] = hidden[1, 10:, :2] = True
    assert torch.equal((after == 0).all(1), hidden)
    kept = ~hidden[:, None].expand_as(after)
    assert torch.equal(after[kept], before[kept])
    assert (cut(cutout, some).cutout.view(2, 2, 2).diff() == 3).all()


def test_images_are_normalised_then_erased_then_mixed():
    part = cut(replace(PLAIN, erasing_probability=1.0, mixup=1.0), samples(4))
    assert (part.erased[:, 1] > 0).all()
    assert part.mixture.lam < 1
    images, _, lam = PLAIN.augment_on_device(part, CPU)
    alone, _, _ = PLAIN.augment_on_device(
        replace(part, erased=0 * part.erased, mixture=Mixture()), CPU
    )
    assert torch.equal(images, mix(erase(alone, part.erased, part.noise_seed), part.mixture))
    assert lam.item() == pytest.approx(part.mixture.lam)


def posterize(image, bits):
    # Pillow's function does not accept 0 bits.
    return Image.fromarray(np.array(image) & np.uint8(256 - 2 ** (8 - bits)))


def test_images_of_the_whole_recipe_are_distributed_as_in_timm(monkeypatch):
    count, image = 300, np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    whole = Image.fromarray(image).resize((48, 36), Image.Resampling.BICUBIC)
    recipe: Any = {"auto_augment": RECIPE, "interpolation": "bicubic"}
    erasing: Any = {"re_prob": 0.25, "re_mode": "pixel"}
    transform: Any = create_transform(24, is_training=True, color_jitter=0.4, **recipe, **erasing)
    monkeypatch.setattr(ImageOps, "posterize", posterize)
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    theirs = torch.stack([transform(whole) for _ in range(count)])
    crops, some = SingleCrop(erasing_probability=0.25), [Sample("", np.array(whole), label=0)]
    ours, _, _ = crops.augment_on_device(cut(crops, some * count, size=24), CPU)

    for measure in (torch.mean, torch.std, torch.amax, torch.amin):
        assert have_same_distribution(
            *(measure(images, dim=(1, 2, 3)) for images in (ours, theirs))
        )
    assert have_same_distribution(
        *(images.diff(dim=3).abs().mean((1, 2, 3)) for images in (ours, theirs))
    )
    assert have_same_distribution(*(images[:, 1, 0, 0] for images in (ours, theirs)))


def test_the_centers_of_squares_are_uniform_over_the_image():
    generator = np.random.default_rng(0)
    squares = np.array([draw_square(generator, 4, 3) for _ in range(2000)])
    assert (squares[:, 1::2] - squares[:, ::2] == 3).all()
    centers, counts = np.unique(squares[:, ::2] + 1, axis=0, return_counts=True)
    assert centers.tolist() == [[row, col] for row in range(4) for col in range(4)]
    assert counts / 2000 == pytest.approx(np.full(16, 1 / 16), abs=0.03)


@unchecked_types()
def test_erased_rectangles_are_distributed_as_in_timm(monkeypatch):
    size, generator = 24, np.random.default_rng(0)
    ours = np.array([draw_rectangle(generator, size, 0.5) for _ in range(DRAWS)])
    monkeypatch.setattr(
        timm.data.random_erasing, "_get_pixels", lambda *args, **_: torch.ones(args[2])
    )
    random.seed(0)
    theirs = np.array([edges_of_timm(RandomErasing(0.5, mode="pixel"), size) for _ in range(DRAWS)])
    erased = [edges[edges[:, 1] > 0] for edges in (ours, theirs)]
    assert have_same_frequencies(*([len(some), DRAWS - len(some)] for some in erased))
    for one, other in zip(*map(measure_rectangles, erased, [size] * 2), strict=True):
        assert have_same_distribution(one, other)


def measure_rectangles(edges, size):
    top, bottom, left, right = edges.T
    height, width = bottom - top, right - left
    return [top, left, height, width, height * width, height / width, size - bottom, size - right]


def edges_of_timm(erasing, size):
    taken = erasing(torch.zeros(1, size, size))[0].nonzero()
    if not len(taken):
        return [0, 0, 0, 0]
    (top, left), (bottom, right) = taken.amin(0).tolist(), (taken.amax(0) + 1).tolist()
    return [top, bottom, left, right]


def test_erasing_fills_only_its_rectangle_with_standard_normal_noise():
    images, state = torch.full((3, 3, 40, 50), 7.0), torch.get_rng_state()
    edges = torch.tensor([(0, 40, 5, 45), (0, 0, 0, 0), (10, 30, 0, 50)])
    erased, again, other = (erase(images.clone(), edges, seed) for seed in (3, 3, 2))
    assert torch.equal(erased, again)
    assert not torch.equal(erased, other)
    assert torch.equal(torch.get_rng_state(), state)
    taken, expected = erased != 7, torch.zeros(3, 3, 40, 50, dtype=torch.bool)
    expected[0, :, :, 5:45] = expected[2, :, 10:30] = True
    assert torch.equal(taken, expected)
    noise = erased[taken]
    assert len(noise.unique()) > 0.99 * len(noise)  # Pixels and channels differ.
    assert has_distribution(noise.numpy(), norm.cdf)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixture", [Mixture(), Mixture(0.3), Mixture(1 - 12 / 64, (1, 5, 0, 3))])
def test_mixed_images_and_their_loss_equal_timm(mixture, smoothing, monkeypatch):
    params = (mixture.lam if mixture.box is None else 0.5, mixture.box is not None)
    monkeypatch.setattr(Mixup, "_params_per_batch", lambda _: params)
    monkeypatch.setattr(timm.data.mixup, "rand_bbox", lambda *_, **__: mixture.box)
    labels = torch.tensor([0, 2, 1, 1])
    original = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    timms = Mixup(0.8, 1.0, label_smoothing=smoothing, num_classes=3)
    images, targets = timms(original.clone(), labels)
    logits = images.flatten(1)[:, :3]
    mixed = mix(original, mixture)
    learner = Supervised(label_smoothing=smoothing).build(
        TINY, Timeline(10, 5), seed=1, class_names=("a", "b", "c")
    )
    views = (mixed, labels, torch.tensor(mixture.lam))
    loss, _ = learner.loss(lambda shown: shown.flatten(1)[:, :3], views, 0)

    torch.testing.assert_close(mixed, images)
    torch.testing.assert_close(loss, SoftTargetCrossEntropy()(logits, targets))


def lams(mixtures: list[Mixture], *, in_box: bool) -> list[float]:
    mixed = [one for one in mixtures if one != Mixture()]
    return [one.lam for one in mixed if (one.box is not None) == in_box]


@pytest.mark.parametrize(
    "crops",
    [
        SingleCrop(mixup=0.2, cutmix=1.0, mix_probability=0.5, switch_probability=0.7),
        SingleCrop(mixup=0.8),
        SingleCrop(cutmix=0.4, mix_probability=0.9),
    ],
)
@unchecked_types()
def test_mixtures_are_distributed_as_in_timm(crops):
    size, generator = 24, np.random.default_rng(0)
    ours = [crops.draw_mixture(generator, size) for _ in range(DRAWS)]
    timms = Mixup(crops.mixup, crops.cutmix, None, crops.mix_probability, crops.switch_probability)
    np.random.seed(0)
    theirs = [mixture_of_timm(timms, size) for _ in range(DRAWS)]

    counts = ([mixtures.count(Mixture())] for mixtures in (ours, theirs))
    for in_box in (True, False):
        one, other = (lams(mixtures, in_box=in_box) for mixtures in (ours, theirs))
        assert not one or have_same_distribution(one, other)
        counts = [[*c, len(o)] for c, o in zip(counts, (one, other), strict=True)]
    assert have_same_frequencies(*counts)
    for mixture in ours:
        if mixture.box:
            top, bottom, left, right = mixture.box
            rest = 1 - (bottom - top) * (right - left) / size**2
            assert mixture.lam == pytest.approx(rest)
    # Boxes inside the image are squares whose sides may be odd.
    boxes = np.array([m.box for m in ours if m.box]).reshape(-1, 4)
    inside = boxes[(boxes > 0).all(1) & (boxes < size).all(1)]
    assert (inside[:, 1] - inside[:, 0] == inside[:, 3] - inside[:, 2]).all()
    assert not len(boxes) or {*(inside[:, 1] - inside[:, 0]) % 2} == {0, 1}
    edges = (zip(*(m.box for m in mixtures if m.box), strict=True) for mixtures in (ours, theirs))
    assert all(have_same_distribution(one, other) for one, other in zip(*edges, strict=True))


def mixture_of_timm(mixup, size):
    lam, in_box = mixup._params_per_batch()
    if not in_box:
        return Mixture(float(lam))
    edges, lam = cutmix_bbox_and_lam((3, size, size), lam)
    top, bottom, left, right = map(int, edges)
    return Mixture(float(lam), (top, bottom, left, right))


OPTIONS = {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
RECIPE = "rand-m9-mstd0.5-inc1"
MANY = 3_000


def picture(height=20, width=28) -> Tensor:
    """Return an image that every operation of RandAugment changes."""
    rows, cols = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 40, (height, width, 3))
    slopes = np.stack([5 * rows, 4 * cols, 3 * (rows + cols)], axis=-1) % 200
    return torch.from_numpy((20 + slopes + noise).astype(np.uint8)).permute(2, 0, 1)


@pytest.mark.parametrize("negated", [False, True])
def test_every_operation_equals_timm(negated, monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.9 if negated else 0.1)
    image = Image.fromarray(picture().permute(1, 2, 0).numpy())

    for name in OPERATIONS:
        # At 10.0 no bit is left, which Pillow refuses.
        largest = 9.99 if name == "PosterizeIncreasing" else 10.0
        for magnitude in (0.0, 2.5, 7.49, 9.0, largest):
            value = compute_argument(name, magnitude / 10, negate=negated)
            ours = apply_operations(picture(), [(name, value)])

            timms: Any = AugmentOp(name, prob=1.0, hparams=OPTIONS)
            timms.magnitude = magnitude
            expected = np.array(timms(image))
            assert np.array_equal(ours.permute(1, 2, 0).numpy(), expected), (name, magnitude)
            assert magnitude != 9.0 or not torch.equal(ours, picture()), name


def test_operations_are_applied_in_sequence():
    both = apply_operations(picture(), [("TranslateXRel", 0.3), ("Invert", 0)])
    moved = apply_operations(picture(), [("TranslateXRel", 0.3)])
    assert torch.equal(both, 255 - moved)
    assert apply_operations(picture(), []).equal(picture())
    no_bits = compute_argument("PosterizeIncreasing", 1.0, negate=False)
    assert not apply_operations(picture(), [("PosterizeIncreasing", no_bits)]).any()


@cache
@unchecked_types()
def draw_operations() -> list[list[tuple[str, int | float]]]:
    generator = np.random.default_rng(0)
    return [SingleCrop().draw_operations(generator) for _ in range(MANY)]


@cache
def draw_operations_with_timm() -> list[list[tuple[str, int | float]]]:
    augment = rand_augment_transform(RECIPE, {**OPTIONS})
    calls: list[tuple[str, int | float]] = []
    for operation in augment.ops:

        def record(image, value=0, name=operation.name, **_):
            calls.append((name, value))
            return image

        operation.aug_fn = record
    random.seed(0)
    np.random.seed(0)
    draws = []
    for _ in range(MANY):
        augment(None)
        draws.append(calls.copy())
        calls.clear()
    return draws


@pytest.mark.slow
def test_operations_are_as_frequent_as_in_timm():
    both = (draw_operations(), draw_operations_with_timm())
    names = ([name for draw in draws for name, _ in draw] for draws in both)
    counts = [[one.count(name) for name in OPERATIONS] for one in names]
    lengths = [[[*map(len, draws)].count(length) for length in range(3)] for draws in both]
    assert have_same_frequencies(*counts)
    assert have_same_frequencies(*lengths)
    # All 15 operations are equally likely. Each of two is applied with a probability of 0.5.
    assert np.array(counts[0]) / MANY == pytest.approx(np.full(15, 1 / 15), abs=0.015)
    assert np.array(lengths[0]) / MANY == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    pairs = [draw for draw in draw_operations() if len(draw) == 2]
    equal = np.mean([one[0] == other[0] for one, other in pairs])
    assert equal == pytest.approx(1 / 15, abs=0.03)


def test_arguments_are_distributed_as_in_timm():
    for name in OPERATIONS.keys() - {"AutoContrast", "Equalize", "Invert"}:
        ours, theirs = (
            [value for draw in draws for one, value in draw if one == name]
            for draws in (draw_operations(), draw_operations_with_timm())
        )
        assert have_same_distribution(ours, theirs), name
        assert {*np.sign(ours)} == {*np.sign(theirs)}, name


@pytest.mark.parametrize(("magnitude", "expected"), [(0, 0.0), (4, 12.0), (10, 30.0)])
def test_without_deviation_the_magnitude_is_constant(magnitude, expected):
    generator = np.random.default_rng(0)
    crops = SingleCrop(num_ops=3, magnitude=magnitude, magnitude_deviation=0.0)
    operations = [one for _ in range(400) for one in crops.draw_operations(generator)]
    assert {abs(value) for name, value in operations if name == "Rotate"} == {expected}


UNCHANGED = MultiCrop(
    global_scale=(1.0, 1.0), num_locals=0, aspect_ratio=(1.0, 1.0), jitter_probability=0.0,
    grey_probability=0.0, blur_probability=(0.0, 0.0, 0.0), solarize_probability=(0.0, 0.0, 0.0),
)  # fmt: skip


@pytest.mark.parametrize("crops", [PLAIN, PlainCrop(**WHOLE), UNCHANGED])
def test_black_and_white_are_normalised_as_computed_by_hand(crops):
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    image[:, 4:] = 255
    colours = DataOptions(mean=[0.0, 0.5, 0.1307], std=[1.0, 0.5, 0.3081]).normalization
    # The box is the whole image, so nothing is resized.
    groups = crops.cut([Sample("0", image, label=0)], [np.random.default_rng(0)], [8])
    views = crops.augment_on_device(groups, CPU, colours)[0][0]
    # The last channel has the usual values of MNIST: -0.1307 / 0.3081 and 0.8693 / 0.3081.
    assert views.amin((1, 2)).tolist() == pytest.approx([0.0, -1.0, -0.42421], abs=1e-5)
    assert views.amax((1, 2)).tolist() == pytest.approx([1.0, 1.0, 2.82149], abs=1e-5)
