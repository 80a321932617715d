"""Test the probe that tracks objects in videos."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter
from scipy.spatial.distance import cdist

from probes.tracking.pictures import choose_frames, draw_overlay, save_animation
from probes.tracking.probe import Tracking, VideoResult, score_block
from probes.tracking.propagation import (
    LabelPropagation,
    PropagationConfig,
    labels_to_mask,
    shrink_mask,
)
from probes.tracking.scores import (
    ObjectMask,
    ObjectScores,
    contour_accuracy,
    decay,
    region_similarity,
    split_objects,
    symmetric_ci95,
    video_estimate,
)
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.toy_video import ToyVideo
from ssl_bench.data.layouts.videos import Davis, FrameFolders
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model, load_encoder
from ssl_bench.results import ResultStore
from tests.probes.test_attention import perturb
from tests.support.photographs import context_of, evaluate_probe

TINY = ViTConfig(image_size=32, patch_size=8, dim=24, depth=2, num_heads=3)
DINO = PropagationConfig(latest_frames=7, radius=12, neighbours=5, temperature=0.1)


def dense_labels(
    features: Sequence[np.ndarray], first_labels: np.ndarray, config: PropagationConfig
) -> list[np.ndarray]:
    """Propagate patch labels with the affinity between all pairs of patches."""
    rows, cols = first_labels.shape[:2]
    units = [f.reshape(rows * cols, -1).astype(np.float64) for f in features]
    units = [f / np.linalg.norm(f, axis=1, keepdims=True) for f in units]
    y, x = np.divmod(np.arange(rows * cols), cols)
    near = np.abs(y[:, None] - y) <= config.radius
    near &= np.abs(x[:, None] - x) <= config.radius
    labels = [first_labels.reshape(rows * cols, -1).astype(np.float64)]
    for number in range(1, len(units)):
        used = [0, *range(max(1, number - config.latest_frames), number)]
        similarities = [units[n] @ units[number].T / config.temperature for n in used]
        affinity = np.concatenate([np.where(near, np.exp(s), 0) for s in similarities])
        least = np.sort(affinity, 0)[-min(config.neighbours, len(affinity))]
        # In float32, equal features have equal similarities up to rounding.
        affinity[affinity < least * (1 - 1e-12)] = 0
        affinity /= affinity.sum(0)
        labels.append(affinity.T @ np.concatenate([labels[n] for n in used]))
    return [own.reshape(rows, cols, -1) for own in labels]


def dense_mask(labels: np.ndarray, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Convert patch labels to a mask at full image resolution."""
    channels = []
    for channel in np.moveaxis(labels, -1, 0):
        for axis in (0, 1):
            centres = np.arange(channel.shape[axis])
            points = (np.arange(len(centres) * patch) + 0.5) / patch - 0.5
            interpolate = partial(np.interp, points, centres)
            channel = np.apply_along_axis(interpolate, axis, channel)
        low, high = channel.min(), channel.max()
        channels.append((channel - low) / (high - low) if high > low else channel)
    numbers = np.argmax(channels, 0).astype(np.uint8)
    return resize_nearest(numbers, size)


def resize_nearest(numbers: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    # The official code uses Pillow. Other libraries round differently.
    return np.array(Image.fromarray(numbers).resize(size[::-1], Image.Resampling.NEAREST))


def random_video(
    seed: int, grid: tuple[int, int], num_frames: int, channels: int = 3, dim: int = 6
) -> tuple[list[np.ndarray], np.ndarray]:
    generator = np.random.default_rng(seed)
    features = [generator.normal(size=(*grid, dim)) for _ in range(num_frames)]
    return features, np.eye(channels)[generator.integers(channels, size=grid)]


def propagate(
    features: Sequence[np.ndarray], first: np.ndarray, config: PropagationConfig, dtype: torch.dtype
) -> list[np.ndarray]:
    tensors = [torch.from_numpy(own).to(dtype) for own in features]
    state = LabelPropagation(tensors[0], torch.from_numpy(first).to(dtype), config)
    return [first, *(state.propagate(own).numpy() for own in tensors[1:])]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"latest_frames": 2, "radius": 2},
        {"latest_frames": 0, "radius": 0, "neighbours": 1},
        {"neighbours": 1000, "radius": 3, "temperature": 1.0},
    ],
)
def test_labels_equal_those_of_the_full_affinity(changes):
    config = replace(DINO, **changes)
    for grid in ((5, 9), (9, 5), (1, 1), (3, 140), (40, 7)):
        features, first = random_video(0, grid, 7)

        labels = propagate(features, first, config, torch.float64)

        for found, expected in zip(labels, dense_labels(features, first, config), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-9)


def test_all_patches_in_the_window_count_if_equally_similar():
    features = [np.ones((6, 30, 4))] * 3
    first = np.zeros((6, 30, 2))
    first[..., 0] = 1
    first[2, 14] = (0, 1)

    _, second, third = propagate(features, first, replace(DINO, radius=2), torch.float32)

    # Patch (2, 14) is one of 25 in the window, and one of 20 or 15 near the upper edge.
    assert second[2, 14, 1] == pytest.approx(1 / 25)
    assert second[1, 13, 1] == pytest.approx(1 / 20)
    assert second[0, 12, 1] == pytest.approx(1 / 15)
    assert second[2, 17, 1] == 0
    expected = dense_labels(features, first, replace(DINO, radius=2))[2]
    np.testing.assert_allclose(third, expected, atol=1e-6)


def test_a_mask_is_interpolated_scaled_and_resized():
    generator = np.random.default_rng(0)
    labels = generator.random((4, 6, 3)) * [1.0, 0.2, 0.05]

    mask = labels_to_mask(torch.from_numpy(labels), 8, (64, 64))

    assert np.array_equal(mask, dense_mask(labels, 8, (64, 64)))
    assert set(np.unique(mask)) == {0, 1, 2}


def test_constant_channels_are_not_scaled():
    rounded = torch.tensor([[[0.0, 1.0], [0.0, 1 - 1e-7]]])
    assert (labels_to_mask(rounded, 4, (8, 16)) == 1).all()
    assert (labels_to_mask(torch.zeros(1, 2, 2), 4, (8, 16)) == 0).all()


def test_a_patch_has_the_label_of_its_central_pixel():
    mask = np.zeros((48, 85), np.uint8)
    mask[7:9, 20:22] = 3

    patches = shrink_mask(mask, (3, 4))

    rows = [int((row + 0.5) * 48 / 3) for row in range(3)]
    cols = [int((col + 0.5) * 85 / 4) for col in range(4)]
    assert np.array_equal(patches, mask[np.ix_(rows, cols)])


def square(left: int) -> np.ndarray:
    mask = np.zeros((480, 854), bool)
    mask[100:200, left : left + 100] = True
    return mask


@pytest.mark.parametrize(
    ("shift", "region", "contour"), [(0, 1, 1), (8, 0.852, 1), (9, 0.835, 0.54)]
)
def test_a_shifted_square_has_the_scores_of_the_official_code(shift, region, contour):
    found, true = ObjectMask.from_mask(square(300 + shift)), ObjectMask.from_mask(square(300))

    assert region_similarity(found.mask, true.mask) == pytest.approx(region, abs=5e-4)
    assert contour_accuracy(found, true) == pytest.approx(contour, abs=5e-3)


def plain_contour_accuracy(found: np.ndarray, true: np.ndarray) -> float:
    """Compute the contour F-measure of two masks from pixel distances."""

    def contour(mask: np.ndarray) -> np.ndarray:
        # A pixel is on the contour if it differs from a pixel to its right, below, or both.
        window = {"size": 2, "origin": -1, "mode": "nearest"}
        return np.argwhere(maximum_filter(mask, **window) != minimum_filter(mask, **window))

    first, second = contour(found), contour(true)
    if not len(first) or not len(second):
        return float(len(first) == len(second))
    distances = cdist(first, second)
    radius = math.ceil(0.008 * math.sqrt(sum(side**2 for side in found.shape)))
    precision, recall = (distances.min(1) <= radius).mean(), (distances.min(0) <= radius).mean()
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def test_contours_of_random_masks_equal_a_comparison_of_all_pixels():
    generator = np.random.default_rng(0)
    for _ in range(6):
        # The objects consist of blocks and touch the edges of the image.
        blocks = generator.random((2, 4, 5)) < 0.3
        found, true = (np.kron(mask, np.ones((9, 40))) > 0 for mask in blocks)
        accuracy = contour_accuracy(ObjectMask.from_mask(found), ObjectMask.from_mask(true))
        assert accuracy == pytest.approx(plain_contour_accuracy(found, true))


def test_empty_masks_are_correct_only_for_empty_true_masks():
    empty, full = ObjectMask.from_mask(square(900)), ObjectMask.from_mask(square(300))
    for found, true, expected in ((empty, empty, 1), (empty, full, 0), (full, empty, 0)):
        assert region_similarity(found.mask, true.mask) == expected
        assert contour_accuracy(found, true) == expected
    scores = ObjectScores()
    scores.add_frame([empty, full], [empty, empty])
    assert scores.region == scores.contour == [[1, 0]]


def test_statistics_of_an_object_equal_those_of_the_official_code():
    scores = ObjectScores()
    values = [1, 1, 0.8, 0.8, 0.6, 0.6, 0.4, 0.4]
    scores.region = [[value, 0.5] for value in values]
    scores.contour = [[0.0, 1.0] for _ in values]

    found = scores.statistics()

    assert found["j_mean"] == pytest.approx([70, 50])
    # A value of exactly 0.5 is not a hit.
    assert found["j_recall"] == pytest.approx([75, 0])
    assert found["j_decay"] == pytest.approx([100 * 7 / 15, 0])
    assert found["j_and_f"] == pytest.approx([35, 75])
    assert decay(np.arange(300.0)[::-1, None])[0] == pytest.approx(299 - 37.5 - 37.5)
    # A quarter that ends between two frames includes the later one.
    for frames, first, last in ((1, 1, 0), (3, 2, 2), (5, 2, 3), (7, 3, 5), (11, 4, 8)):
        squares = np.arange(float(frames))[:, None] ** 2
        expected = squares[:first].mean(0) - squares[last:].mean(0)
        assert decay(squares) == pytest.approx(expected)


def test_void_pixels_are_background():
    truth = np.zeros((20, 20), np.uint8)
    truth[5:10], truth[10:15] = 2, 255
    predicted = np.where(truth == 255, 2, truth)

    found, true = (split_objects(mask, np.array([2], np.uint8))[0] for mask in (predicted, truth))

    assert region_similarity(found.mask, true.mask) == 0.5


def test_contributions_of_videos_average_to_the_mean_over_objects():
    generator = np.random.default_rng(0)
    values = [generator.uniform(0, 100, count) for count in (1, 3, 2, 1, 5)]

    contributions, estimate = video_estimate(values)

    mean = np.concatenate(values).mean()
    assert contributions.mean() == pytest.approx(mean)
    assert estimate.value == pytest.approx(mean)
    # The variance of a ratio of sums (Cochran, Sampling Techniques, 1977, equation 6.10).
    counts = np.array([len(scores) for scores in values])
    residuals = np.array([scores.sum() for scores in values]) - mean * counts
    variance = (residuals**2).sum() / 4 / 5 / counts.mean() ** 2
    assert contributions.var(ddof=1) / 5 == pytest.approx(variance)
    single, _ = video_estimate([scores[:1] for scores in values])
    assert single == pytest.approx([scores[0] for scores in values])
    # Student's t of four degrees of freedom is 2.776445.
    margin = 2.776445 * math.sqrt(variance)
    assert symmetric_ci95(estimate) == pytest.approx((mean - margin, mean + margin))
    # Intervals of decays may contain negative values.
    _, decays = video_estimate([np.array([-3.0]), np.array([1.0])])
    assert symmetric_ci95(decays) == pytest.approx((-1 - 12.7062 * 2, -1 + 12.7062 * 2), rel=1e-4)
    assert symmetric_ci95(video_estimate(values[:1])[1]) is None


def test_frames_are_resized_to_multiples():
    for options, shape, patch, expected in (
        ({}, (480, 854), 16, (480, 832)),
        ({}, (480, 854), 8, (480, 832)),
        ({}, (480, 854), 14, (476, 854)),
        ({}, (854, 480), 14, (854, 476)),
        ({}, (1080, 1920), 16, (480, 832)),
        ({}, (300, 310), 16, (480, 480)),
        ({"image_size": 224, "long_side_multiple": 16}, (480, 854), 16, (224, 384)),
        ({"image_size": 32}, (128, 160), 8, (32, 32)),
        ({"image_size": 224, "keep_aspect_ratio": False}, (480, 854), 14, (224, 224)),
    ):
        assert Tracking(**options).frame_size(*shape, patch) == expected


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> ToyVideo:
    return ToyVideo(num_val=2, cache=tmp_path_factory.mktemp("cache"))


def tiny_encoder() -> Any:
    torch.manual_seed(0)
    return encoder_from_model(perturb(build_vit(TINY, seed=0)), name="tiny")


def dense_scores(
    probe: Tracking, encoder: Any, video: Sample, layer: int
) -> tuple[dict[str, float], list[np.ndarray]]:
    """Track the objects of a video by comparing all pairs of patches."""
    assert video.frames is not None
    assert video.mask is not None
    frames = list(video.frames)
    height, width = video.mask.shape
    size = probe.frame_size(height, width, encoder.patch_size)
    extractor = FeatureExtractor(encoder, layers=[layer], facets=["token_normed"])
    features = []
    for frame in frames:
        resized = cv2.resize(frame.image, size[::-1])
        pixels = torch.from_numpy(resized).permute(2, 0, 1)[None].float() / 255
        features.append(extractor(pixels)[layer]["token_normed"][0].numpy())
    grid = features[0].shape[:2]
    first = video.mask * (video.mask != 255)
    numbers = [0, *sorted(set(np.unique(first).tolist()) - {0})]
    small = resize_nearest(first, grid)
    labels = np.stack([small == number for number in numbers], -1).astype(float)
    config = PropagationConfig(
        probe.latest_frames, probe.radius, probe.neighbours, probe.temperature
    )
    masks = [
        np.array(numbers)[dense_mask(frame_labels, encoder.patch_size, first.shape)]
        for frame_labels in dense_labels(features, labels, config)
    ]
    masks[0] = first
    pairs = [
        (masks[n] == number, np.asarray(frames[n].mask) == number)
        for number in numbers[1:]
        for n in range(1, len(frames) - 1)
    ]
    ious = [(a & b).sum() / (a | b).sum() if (a | b).any() else 1 for a, b in pairs]
    f_measures = [plain_contour_accuracy(a, b) for a, b in pairs]
    means = {"j_mean": np.mean(ious), "f_mean": np.mean(f_measures)}
    return {metric: 100 * float(mean) for metric, mean in means.items()}, masks


@pytest.mark.parametrize("changes", [{}, {"radius": 3, "latest_frames": 2, "image_size": 64}])
def test_scores_of_toy_videos_equal_those_of_the_full_affinity(toy, tmp_path, changes):
    probe = Tracking(**{"image_size": 96, "long_side_multiple": 8, "panels": 0, **changes})
    encoder, store = tiny_encoder(), ResultStore(tmp_path)

    records = evaluate_probe(replace(probe, save_masks=True), toy, store, encoder, (1,))

    found = {record.metric: record for record in records}
    expected = [dense_scores(probe, encoder, toy.val()[index], 1) for index in range(2)]
    for metric in ("j_mean", "f_mean"):
        values = [scores[metric] for scores, _ in expected]
        assert found[metric].details["by_video"] == pytest.approx(values, abs=0.2)
    for index, (_, masks) in enumerate(expected):
        paths = sorted(tmp_path.rglob(f"masks/block01_token_normed/video_{index:05d}/*.png"))
        for path, mask in zip(paths, masks, strict=True):
            assert (np.asarray(Image.open(path)) != mask).mean() < 0.002


def video_results(*videos: tuple[Sequence[float], float]) -> list[VideoResult]:
    names = ("j_and_f", "j_mean", "f_mean", "j_recall", "f_recall", "j_decay", "f_decay")
    return [
        VideoResult(dict.fromkeys(names, np.array(values)), np.full(len(values), float(area)), 3)
        for values, area in videos
    ]


def test_scores_are_object_means_with_the_first_mask_as_baseline():
    results = video_results(([80.0, 60.0], 2.0), ([40.0], 0.5))
    baseline = video_results(([30.0, 0.0], 1), ([30.0], 1))

    scores = {score.metric: score for score in score_block((4, "token"), results, baseline)}

    score = scores["j_and_f"]
    assert (score.value, score.num_images, score.unit) == (pytest.approx(60), 2, "%")
    assert score.details["baseline"] == {"answer": "first mask in its place", "value": 20}
    assert score.details["by_video"] == [70, 40]
    assert (score.details["objects"], score.details["frames"]) == (3, 6)
    assert np.mean(np.asarray(score.per_image)) == pytest.approx(60)
    assert (scores["j_decay"].value, scores["j_decay"].unit) == (pytest.approx(60), "")
    assert scores["area_ratio"].value == pytest.approx(1.5)
    assert scores["area_ratio"].ci95 is not None
    # The interval of a ratio can be below 0, because a ratio is not a percentage.
    assert scores["area_ratio"].ci95[0] < 0
    unscored = [replace(result, statistics={}) for result in results]
    (only,) = score_block((0, "token"), unscored, baseline)
    assert only.metric == "area_ratio"


def write_video(folder: Path, masks: Sequence[np.ndarray | None]) -> Path:
    """Write video frames that show a moving bright object."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    background = generator.integers(0, 120, (32, 48, 3), dtype=np.uint8)
    for number, mask in enumerate(masks):
        pixels = background.copy()
        pixels[8:24, 8 + 2 * number : 24 + 2 * number] += 120
        Image.fromarray(pixels).save(folder / f"{number:05d}.jpg", quality=95)
        if mask is not None:
            Image.fromarray(mask).save(folder / f"{number:05d}.png")
    return folder


def one_object(number: int = 1) -> np.ndarray:
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 8:24] = number
    return mask


def test_videos_without_a_mask_to_score_get_masks_without_scores(tmp_path):
    first_mask = one_object(3)
    first_mask[:2] = 255
    write_video(tmp_path / "videos/cup", [first_mask, None, None, one_object(3)])
    dataset = FrameFolders(tmp_path / "videos")
    probe = Tracking(image_size=32).adapt_to_dataset(dataset, ())

    records = evaluate_probe(probe, dataset, ResultStore(tmp_path / "out"), tiny_encoder(), (0, 1))

    assert probe.truth == "none"
    assert [(record.layer, record.metric) for record in records] == [
        (layer, "area_ratio") for layer in (0, 1)
    ]
    paths = sorted((tmp_path / "out").rglob("masks/block01_token_normed/cup/*.png"))
    assert [path.stem for path in paths] == ["00000", "00001", "00002", "00003"]
    first = np.asarray(Image.open(paths[0]))
    assert np.array_equal(first, one_object(3))
    assert set(np.unique(np.asarray(Image.open(paths[3])))) == {0, 3}


def test_frames_without_masks_are_not_scored(tmp_path):
    masks = [one_object(), None, one_object(), None, one_object()]
    write_video(tmp_path / "videos/cup", masks)
    dataset = FrameFolders(tmp_path / "videos")
    probe = Tracking(image_size=32, panels=0).adapt_to_dataset(dataset, ())

    records = evaluate_probe(probe, dataset, ResultStore(tmp_path / "out"), tiny_encoder(), (0,))

    assert not list((tmp_path / "out").rglob("masks"))
    found = {record.metric: record for record in records}
    assert found["j_mean"].details["frames"] == 1
    assert found["j_mean"].details["baseline"]["value"] == 100


def test_a_video_without_a_mask_to_score_is_refused(tmp_path):
    write_video(tmp_path / "videos/cup", [one_object(), None, one_object()])
    probe, dataset = Tracking(image_size=32, panels=0), FrameFolders(tmp_path / "videos")

    with pytest.raises(DataError) as caught:
        list(probe.run(context_of(tiny_encoder(), dataset, [0], tmp_path)))

    assert caught.value.hint == ("probe.truth=none",)


def test_drawn_frames_include_both_ends():
    assert choose_frames(20, 6) == [0, 4, 8, 11, 15, 19]
    assert choose_frames(3, 6) == [0, 1, 2]
    assert choose_frames(100, 40)[-1] == 99


def test_overlays_have_the_object_colour_and_a_white_outline():
    image = np.full((40, 60, 3), 100, np.uint8)
    predicted, true = np.zeros((2, 40, 60), np.uint8)
    predicted[10:20, 10:20], true[10:20, 30:40] = 1, 255
    true[25:35, 30:40] = 2

    drawn = draw_overlay(image, predicted, true)

    assert drawn[15, 15].tolist() == [(100 + 128) // 2, 50, 50]
    assert drawn[25, 30].tolist() == [255, 255, 255]
    # Ignored pixels are not an object.
    assert drawn[15, 30].tolist() == [100, 100, 100]


def test_a_reduced_overlay_has_only_colours_of_its_objects():
    numbers = np.zeros((500, 700), np.uint8)
    numbers[100:301, 100:203], numbers[100:301, 203:400] = 2, 4
    truth = np.where(numbers == 4, 255, 0).astype(np.uint8)

    drawn = draw_overlay(np.zeros((500, 700, 3), np.uint8), numbers, truth)

    assert drawn.shape == (192, 269, 3)
    # VOC's colours of the objects 2 and 4 are (0, 128, 0) and (0, 0, 128). Void has no outline.
    colours, counts = np.unique(drawn.reshape(-1, 3), axis=0, return_counts=True)
    assert colours.tolist() == [[0, 0, 0], [0, 0, 64], [0, 64, 0]]
    assert counts[1:] / counts.sum() == pytest.approx(
        np.array([201 * 197, 201 * 103]) / (500 * 700), rel=0.03
    )


def test_an_animation_is_a_png_with_all_frames(tmp_path):
    frames = [np.full((320, 400, 3), 40 * number, np.uint8) for number in range(5)]

    save_animation(frames, tmp_path / "moving.png")

    with Image.open(tmp_path / "moving.png") as image:
        assert (image.format, getattr(image, "n_frames", 1)) == ("PNG", 5)
        assert (image.size, image.info["loop"], image.info["duration"]) == ((200, 160), 0, 100)
        for number in range(5):
            image.seek(number)
            assert abs(int(np.asarray(image.convert("RGB"))[5, 5, 0]) - 40 * number) <= 8


@pytest.mark.data
def test_a_published_encoder_has_the_scores_of_the_official_code(
    shared_data, published_encoder, tmp_path
):
    words = ["probe", "--task", "tracking", "--checkpoint", str(published_encoder)]
    words += ["--dataset", f"davis2016:{shared_data}/real/davis2016", "--out", str(tmp_path)]
    # The selected video, the fifth of ten, is "dog".
    words += ["dataset.val_split=val:40-50%", "dataset.max_frames=20", "--layer", "8,11"]

    assert main([*words, "--pictures", "0"]) == 0

    records = {(r.layer, r.metric): r.value for r in ResultStore(tmp_path).records()}
    keys = [(layer, metric) for layer in (8, 11) for metric in ("j_mean", "f_mean")]
    # The scores of the scripts of DINO and DAVIS 2017.
    expected = [90.11, 93.35, 69.73, 58.32]
    assert [records[key] for key in keys] == pytest.approx(expected, abs=0.005)


@pytest.mark.data
@pytest.mark.parametrize("share", ["40-50%", "20-30%"])
def test_masks_of_real_videos_equal_those_of_the_full_affinity(
    shared_data, published_encoder, tmp_path, share
):
    root, split = shared_data / "real/davis2016", f"val:{share}"
    dataset = Davis(root, year=2016, val_split=split, max_frames=4)
    probe = Tracking(image_size=238, save_masks=True, panels=0)
    encoder = load_encoder(str(published_encoder))

    evaluate_probe(probe, dataset, ResultStore(tmp_path), encoder, (8,))

    _, masks = dense_scores(probe, encoder, dataset.val()[0], 8)
    paths = sorted(tmp_path.rglob("masks/**/*.png"))
    for path, mask in zip(paths, masks, strict=True):
        assert (np.asarray(Image.open(path)) != mask).mean() < 1e-4
