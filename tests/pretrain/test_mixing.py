"""mixup and CutMix: what they leave of images and classes, and how often, is what timm does."""

import numpy as np
import pytest
import timm.data.mixup
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.loss.cross_entropy import SoftTargetCrossEntropy

from pretrain.crops.single import Mixing, Mixture, mix
from pretrain.objectives.supervised import Supervised
from pretrain.schedules import Timeline
from ssl_bench.models import ViTConfig
from tests.support.draws import alike, as_frequent

TINY = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2)
DRAWS = 4000


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
def test_images_and_loss_are_those_of_timm(mixture, smoothing, monkeypatch):
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
    theirs = [of_timm(timms, size) for _ in range(DRAWS)]

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


def of_timm(mixup, size):
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
