"""Test that an image and its mask are cropped in the same way."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from probes.features.training_images import (
    ResizedCrops,
    ScaledCrops,
    WholeImage,
    resize_bilinear,
    resize_mask,
)
from probes.heads.scored_images import ByPatch, ImageCounts, SlidingWindows
from ssl_bench.data.samples import Sample

GRAY = (0.5, 0.5, 0.5)


def make_scene(height=24, width=36):
    """Return an image whose right half is the object."""
    rows, cols = np.mgrid[:height, :width]
    image = np.stack([cols * 255 // width, rows * 255 // height, 0 * rows], -1).astype(np.uint8)
    return Sample("scene", image, (cols >= width // 2).astype(np.uint8))


def test_labels_are_taken_from_the_center_of_each_cell():
    mask = torch.tensor([[0, 1, 2, 3, 4, 5]], dtype=torch.uint8)
    assert resize_mask(mask, 1, 2).tolist() == [[1, 4]]
    assert resize_mask(mask, 2, 12)[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_squashing_averages_pixels_and_does_not_mirror():
    image = np.zeros((8, 32, 3), np.uint8)
    image[:, 16:, 0] = 200
    image[:, ::4, 1] = 100
    view, mask = WholeImage().make_view(Sample("x", image, np.zeros((8, 32), np.uint8)), 0, 8)
    assert view.shape == (3, 8, 8)
    assert mask.shape == (8, 32)
    assert view[0, 0, 0] < 0.1 < 0.7 < view[0, 0, 7]
    # Every fourth column is bright. Bilinear resizing without antialiasing would miss them.
    torch.testing.assert_close(view[1, :, 1:7], torch.full((8, 6), 25 / 255), atol=0.02, rtol=0)


def test_second_views_of_whole_images_are_mirror_images():
    plain, mirror = (WholeImage(2).make_view(make_scene(), number, 16) for number in (0, 1))
    torch.testing.assert_close(mirror[0], plain[0].flip(-1))
    assert torch.equal(mirror[1], plain[1].flip(-1))


@pytest.mark.parametrize("views", [ResizedCrops(8, seed=0), ScaledCrops(8, 0, (0.0, 0.0, 1.0))])
def test_image_and_mask_of_a_crop_show_the_same_region(views):
    # Red shows the half of the image that a pixel comes from. Pixels outside of the image are blue.
    for number in range(views.count):
        image, mask = views.make_view(make_scene(), number, 32)
        red = resize_bilinear(image, *mask.shape)
        is_clear = ((red[0] - 0.5).abs() > 0.1) & (red[2] == 0) & (mask != 255)
        assert is_clear.float().mean() > 0.1
        assert torch.equal((red[0] > 0.5)[is_clear], (mask == 1)[is_clear])
        assert ((mask == 255) == (red[2] > 0.5)).float().mean() > 0.95


@pytest.mark.parametrize("kind", [ResizedCrops, partial(ScaledCrops, mean=(0.5, 0.5, 0.5))])
def test_crops_depend_on_number_seed_and_image(kind):
    crops, scene = kind(3, 0), make_scene()
    renamed = replace(scene, image_id="other")
    (first, _), (same, _) = (crops.make_view(scene, 0, 16) for _ in range(2))
    views = (
        crops.make_view(scene, 1, 16),
        kind(3, 1).make_view(scene, 0, 16),
        crops.make_view(renamed, 0, 16),
    )
    assert torch.equal(first, same)
    assert not any(torch.equal(first, image) for image, _ in views)


def test_crops_have_the_given_area_or_scale_at_any_place():
    masks = [ResizedCrops(40, seed=0).make_view(make_scene(60, 60), n, 16)[1] for n in range(40)]
    shares = [mask.numel() / 60**2 for mask in masks]
    assert 0.75 < min(shares) < 0.85 < 0.9 < max(shares) <= 1.0
    scaled = ScaledCrops(40, 0, (0.0, 0.0, 0.0))
    inside = [
        (scaled.make_view(make_scene(60, 90), n, 16)[1] != 255).float().mean() for n in range(40)
    ]
    # At half the scale, an image of 2 : 3 covers 8 x 12 of 16 x 16 pixels. At twice the scale, it
    # covers all pixels.
    assert min(inside) < 0.5
    assert max(inside) == 1.0
    # A crop of a quarter of 6 x 6 pixels has 4 x 4 positions. All pixels have different labels.
    mask = np.arange(36, dtype=np.uint8).reshape(6, 6)
    sample = Sample("x", np.zeros((6, 6, 3), np.uint8), mask)
    crops = ResizedCrops(400, seed=0, area=(0.25, 0.25), aspect=(1.0, 1.0))
    first = [int(crops.make_view(sample, number, 3)[1].min()) for number in range(400)]
    places = [6 * row + col for row in range(4) for col in range(4)]
    # Each position is expected 25 times, with a deviation of 5.
    assert [first.count(place) for place in places] == pytest.approx([25] * 16, abs=4 * 5)


@pytest.mark.parametrize(
    ("scene", "shape"), [(make_scene(40, 160), (40, 53)), (make_scene(160, 40), (53, 40))]
)
def test_crops_of_long_images_are_central(scene, shape):
    image, mask = ResizedCrops(1, seed=0).make_view(scene, 0, 16)
    assert tuple(mask.shape) == shape
    assert float(image[:2].mean((1, 2)).sum()) == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize(("width", "starts"), [(32, [0]), (53, [0, 21]), (60, [0, 21, 28])])
def test_windows_cover_the_image_and_end_at_its_edge(width, starts):
    scene = make_scene(64, 2 * width)
    image = SlidingWindows().prepare(scene, 32, GRAY)
    assert image.size == (32, width)
    assert image.corners == tuple((0, start) for start in starts)
    whole = resize_bilinear(torch.from_numpy(scene.image).movedim(-1, 0) / 255, 32, width)
    for window, (_, left) in zip(image.windows, image.corners, strict=True):
        torch.testing.assert_close(window, whole[:, :, left : left + 32])
    # A very long image is padded with the mean colour.
    mean = (0.25, 0.5, 0.75)
    filled = SlidingWindows().prepare(make_scene(16, 160), 16, mean)
    assert filled.size == (6, 64)
    below = filled.windows[:, :, 6:]
    torch.testing.assert_close(below, torch.tensor(mean).view(3, 1, 1).expand_as(below))


def test_every_pixel_gets_the_class_of_its_patch():
    image = ByPatch(5).prepare(make_scene(), 16)
    logits = torch.zeros(1, 1, 2, 2, 3)
    for number, (row, col) in enumerate([(0, 1), (1, 0)], 1):
        logits[0, 0, row, col, number] = 1
    (predicted,) = ByPatch(5).predict(logits, image)
    upper, lower = [0, 0, 1, 1, 1], [2, 2, 0, 0, 0]
    assert predicted.tolist() == [upper, upper, lower, lower, lower]


def test_overlapping_windows_are_averaged():
    image = SlidingWindows().prepare(make_scene(64, 98), 32, GRAY)
    assert image.corners == ((0, 0), (0, 17))
    logits = torch.zeros(2, 1, 4, 4, 2)
    logits[0, ..., 1], logits[1, ..., 1] = 1.0, -1.5
    predicted = SlidingWindows().predict(logits, image)[0]
    # Column 34 is at position 16.75, where 0.25 * 1 + 0.75 * (1 - 1.5) / 2 is just above zero.
    assert (predicted[:, :35] == 1).all()
    assert (predicted[:, 35:] == 0).all()


def test_count_entries_are_ignored_unless_they_are_the_next_images():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (5, 2, 3, 3, 4), generator=generator)
    counts[:, :, :, 2] = counts[:, :1, :1, 2]
    counts[:, :, :, 0] = counts[:, :, :, :2].amin(3)
    original, restored = ImageCounts(2, 3, 4), ImageCounts(2, 3, 4)
    entries = []
    for first, last in ((0, 2), (2, 3), (3, 5)):
        original.add(counts[first:last])
        entries.append(original.entry(first))

    for entry in (entries[1], entries[0], entries[2], entries[0], *entries):
        restored.extend(entry)

    big = ImageCounts(1, 1, 1)
    for _ in range(3):
        big.add(torch.full((1, 1, 1, 3, 1), 2**30))
    assert big.total.tolist() == [[[[3 * 2**30]] * 3]], "sums exceed int32"
    assert len(restored) == 5
    for found in (original, restored):
        assert (found.total == counts.sum(0).numpy()).all()
        assert (found.per_image(1, 2) == counts[:, 1, 2].numpy()).all()
