"""Test the linear depth estimation probe."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probes.depth.heads import (
    NUM_BINS,
    HeadTraining,
    TrainingDepths,
    decode_depth,
    predict_depth,
    scale_invariant_loss,
)
from probes.depth.probe import (
    UNITS,
    Depth,
    DepthRun,
    colour_depth,
    draw_depths,
    image_metrics,
    mean_interval,
)
from probes.features.journal import Journal
from probes.features.tiers import StoredFeatures
from probes.features.training_images import ids_sha256
from probes.heads.losses import PIECE_BYTES
from ssl_bench.data.layouts.depth_folders import DepthFolders
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from ssl_bench.system.files import TILES
from tests.support.faults import picture
from tests.support.photographs import context_of, evaluate_probe, silent

TINY = ViTConfig(image_size=32, patch_size=8, dim=24, depth=2, num_heads=3)
SMALL = Depth(image_size=32, learning_rates=(1e-3, 1e-2), epochs=3, panels=1)
BINS = torch.linspace(0.001, 10, NUM_BINS)
CPU = torch.device("cpu")
LEARNED: dict[str, Any] = {"learning_rates": (0.1,), "epochs": 25}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def upsample(values: np.ndarray) -> np.ndarray:
    """Upsample a square array by a factor of 4 with bilinear interpolation."""
    for _ in range(2):
        size = len(values)
        places = np.clip((np.arange(4 * size) + 0.5) / 4 - 0.5, 0, size - 1)
        before = np.floor(places).astype(int)
        after, share = np.minimum(before + 1, size - 1), (places - before)[:, None, None]
        values = ((1 - share) * values[before] + share * values[after]).swapaxes(0, 1)
    return values


def test_depth_is_the_mean_of_bins_weighted_by_positive_logits():
    for shape in ((1, 1), (2, 3), (5, 4)):
        all_logits = random(2, *shape, NUM_BINS)

        depths = decode_depth(all_logits, BINS)

        for logits, depth in zip(all_logits.double().numpy(), depths, strict=True):
            weights = np.maximum(upsample(logits), 0) + 0.1
            expected = (weights * np.linspace(0.001, 10, 256)).sum(-1) / weights.sum(-1)
            np.testing.assert_allclose(depth.numpy(), expected, rtol=1e-5)


def test_the_gradient_equals_finite_differences():
    bins = torch.linspace(1, 3, 4, dtype=torch.float64)
    logits = random(2, 3, 2, 4).double().requires_grad_()

    assert torch.autograd.gradcheck(lambda x: decode_depth(x, bins), [logits])


def test_pieces_of_the_upsampled_logits_change_neither_depth_nor_gradient(monkeypatch):
    logits, bins = random(5, 2, 4, 8).requires_grad_(), torch.linspace(1, 3, 8)

    def decode() -> tuple[torch.Tensor, torch.Tensor]:
        depth = decode_depth(logits, bins)
        return depth, torch.autograd.grad(depth.square().sum(), logits)[0]

    expected = decode()
    # A map has 3 rows of cells with 2560 bytes. A piece has 1 row, 2 rows or 2 maps.
    for num_bytes in (1, 2 * 2560, 7 * 2560):
        monkeypatch.setitem(PIECE_BYTES, "cpu", num_bytes)
        torch.testing.assert_close(decode(), expected)


def test_cls_is_joined_to_each_patch():
    weight, bias = random(2, 8, 5), random(2, 8, seed=1)
    patches, cls = random(3, 2, 4, 3, seed=2), random(3, 2, seed=3)
    joined = torch.cat([patches, cls[:, None, None].expand(3, 2, 4, 2)], -1)
    logits = torch.einsum("kbd,nyxd->knyxb", weight, joined) + bias[:, None, None, None]
    bins = torch.linspace(1, 3, 8)

    depths = predict_depth(weight, bias, bins, patches, cls)

    expected = decode_depth(logits.flatten(0, 1), bins)
    torch.testing.assert_close(depths.flatten(0, 1), expected)


@pytest.mark.parametrize("only_mean", [False, True])
def test_the_loss_is_scale_invariant_up_to_its_mean_term(only_mean):
    depth, target = random(3, 2, 4, 4).exp(), random(2, 4, 4, seed=1).exp()
    is_known = random(2, 4, 4, seed=2) > 0

    found = scale_invariant_loss(depth, target, is_known, only_mean=only_mean)

    t = target.double().numpy()[is_known.numpy()]
    for predicted, loss in zip(depth.double().numpy(), found, strict=True):
        g = np.log(predicted[is_known.numpy()] + 0.001) - np.log(t + 0.001)
        variance = 0 if only_mean else np.var(g, ddof=1)
        assert float(loss) == pytest.approx(math.sqrt(variance + 0.15 * g.mean() ** 2), rel=1e-5)


@pytest.mark.parametrize("equal", [True, False])
def test_the_gradient_is_zero_for_unknown_or_correct_depth(equal):
    target = random(2, 4, 4).exp()
    depth = (target[None] if equal else 2 * target[None]).clone().requires_grad_()
    is_known = torch.full((2, 4, 4), equal)

    loss = scale_invariant_loss(depth, target, is_known)

    assert float(loss.sum().detach()) == pytest.approx(0, abs=1e-5)
    assert torch.autograd.grad(loss.sum(), depth)[0].abs().max() == 0


def plain_metrics(predicted: np.ndarray, depth: np.ndarray, low: float, high: float) -> list[float]:
    """Compute the depth metrics of one image with plain Python loops."""
    pairs = [(d, t) for d, t in zip(predicted.flat, depth.flat, strict=True) if low < t < high]
    ratios = [max(d / t, t / d) for d, t in pairs]
    errors = [math.log(d) - math.log(t) for d, t in pairs]
    n = len(pairs)
    mean = sum(errors) / n
    return [
        *(100 * sum(ratio < 1.25**power for ratio in ratios) / n for power in (1, 2, 3)),
        math.sqrt(sum((d - t) ** 2 for d, t in pairs) / n),
        sum(abs(d - t) / t for d, t in pairs) / n,
        sum(abs(math.log10(d) - math.log10(t)) for d, t in pairs) / n,
        100 * math.sqrt(sum(e**2 for e in errors) / n - mean**2),
    ]


def test_metrics_equal_a_computation_pixel_by_pixel():
    depth, predicted = 4 * random(6, 7).exp(), 4 * random(3, 6, 7, seed=1).exp()
    depth[0] = 0

    found = image_metrics(predicted, depth, (0.001, 10.0))

    assert (depth > 10).any()
    for one, row in zip(predicted.double().numpy(), found.tolist(), strict=True):
        expected = plain_metrics(one, depth.double().numpy(), 0.001, 10.0)
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_metrics_of_a_constant_factor_equal_hand_computations():
    depth = 1 + random(5, 5).abs()

    by_factor = image_metrics(torch.stack([depth, 1.2 * depth, 1.3 * depth]), depth, (0.001, 10.0))

    names = [*UNITS]
    exact, near, far = (dict(zip(names, row, strict=True)) for row in by_factor.tolist())
    assert [exact[name] for name in names] == pytest.approx([100] * 3 + [0] * 4, abs=1e-6)
    assert [near["delta1"], far["delta1"], far["delta2"]] == [100, 0, 100]
    assert near["abs_rel"] == pytest.approx(0.2, abs=1e-6)
    assert far["log10"] == pytest.approx(math.log10(1.3), abs=1e-6)
    assert far["silog"] == pytest.approx(0, abs=1e-4)


def test_only_intervals_of_percentages_end_at_100():
    values = np.array([50.0, 250.0, 300.0, 200.0])
    margin = 3.182446 * values.std(ddof=1) / 2

    assert mean_interval(values, "") == pytest.approx((200 - margin, 200 + margin), rel=1e-5)
    assert mean_interval(np.array([90.0, 100.0]), "%") == (pytest.approx(31.5, abs=0.1), 100)
    assert mean_interval(np.zeros(3), "m") is None


# Training.


def training(**changes: Any) -> HeadTraining:
    options: dict[str, Any] = {
        "learning_rates": (1e-3, 1e-2), "epochs": 6, "batch_size": 4, "warmup": 0.05,
        "weight_decay": 1e-4, "standardize": True, "bounds": (0.001, 10.0), "seed": 0,
    }  # fmt: skip
    return HeadTraining(**{**options, **changes})


def known_depths(*, in_cls: bool = False) -> TrainingDepths:
    """Return training data in which only block 1 encodes depth."""
    generator = torch.Generator().manual_seed(0)
    depth = 1 + 7 * torch.rand(8, *(1, 1) if in_cls else (3, 3), generator=generator)
    depth = depth.expand(8, 3, 3)
    shown, noise = torch.stack([depth, depth.log()], -1), random(8, 3, 3, 2)
    patches = torch.stack([noise, noise if in_cls else shown])
    cls = torch.zeros(2, 8, 2)
    if in_cls:
        cls[1] = shown[:, 0, 0]
    labels = torch.nn.functional.interpolate(depth[None], scale_factor=4, mode="bilinear")[0]
    return TrainingDepths(StoredFeatures((0, 1), patches.half(), labels), cls)


def journal(folder: Path, minutes: float = 60, **header: Any) -> Journal:
    return Journal(folder, "depth", header, say=lambda _: None, minutes=minutes)


def train(features: TrainingDepths, folder: Path, sources=((0,), (1,)), **changes: Any) -> Any:
    log = changes.pop("journal", None) or journal(folder)
    progress = changes.pop("progress", silent)
    return training(**changes).train(features, sources, torch.arange(8), CPU, progress, log)


def relative_errors(heads: Any, features: TrainingDepths) -> list[float]:
    """Return the mean relative depth error of the best head of each block."""
    labels, found = features.patches.labels, []
    for index in range(len(heads.weight)):
        predicted = heads.predict(
            index, features.patches.features[index].float(), features.cls[index]
        )
        found.append(float(((predicted - labels).abs() / labels).mean((1, 2, 3)).min()))
    return found


@pytest.mark.parametrize("in_cls", [False, True])
def test_heads_learn_depth_from_patches_and_from_cls(tmp_path, in_cls):
    features = known_depths(in_cls=in_cls)

    of_noise, of_depth = relative_errors(train(features, tmp_path, **LEARNED), features)

    assert of_depth < 0.1 < 0.2 < of_noise


def test_standardised_heads_do_not_depend_on_scale_and_offset(tmp_path):
    features = known_depths()
    moved = StoredFeatures(
        (0, 1), (8 * features.patches.features.float() + 3).half(), features.patches.labels
    )
    first, second = (
        train(TrainingDepths(patches, features.cls), tmp_path)
        for patches in (features.patches, moved)
    )

    x = features.patches.features[1].float()
    one = first.predict(1, x, features.cls[1])
    torch.testing.assert_close(
        second.predict(1, 8 * x + 3, features.cls[1]), one, rtol=0.02, atol=0.02
    )
    assert not torch.allclose(second.predict(1, x, features.cls[1]), one, rtol=0.02, atol=0.02)


def test_unknown_pixels_do_not_change_heads(tmp_path):
    features = known_depths()
    labels = features.patches.labels.clone()
    labels[:, :3] = 0
    beyond = labels.clone()
    beyond[:, :3] = 70

    unknown, far = (
        train(replace(features, patches=replace(features.patches, labels=changed)), tmp_path)
        for changed in (labels, beyond)
    )

    assert torch.equal(unknown.weight, far.weight)


def test_a_resumed_training_gives_the_same_heads(tmp_path):
    features = known_depths()
    expected = train(features, tmp_path)

    def stop(items: Any, name: str, total: int | None = None) -> Any:
        for number, item in enumerate(items):
            if name.startswith("heads") and number == 7:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        train(features, tmp_path, journal=journal(tmp_path, 0), progress=stop)
    again = journal(tmp_path, 0)
    assert again.entries[-1]["step"] == 7

    heads = train(features, tmp_path, journal=again)

    assert torch.equal(heads.weight, expected.weight)
    assert torch.equal(heads.bias, expected.bias)
    assert heads.seconds > again.entries[-1]["seconds"]


# Runs.


def scene(root: Path, split: str, name: str, number: int, depth: np.ndarray | None = None) -> None:
    for part in ("images", "depth"):
        (root / part / split).mkdir(parents=True, exist_ok=True)
    picture(number).save(root / f"images/{split}/{name}.jpg", quality=95)
    if depth is None:
        depth = np.full((32, 40), 1000 + 500 * number, np.uint16)
        depth[8:24, 8:24], depth[0] = 800, 0
    Image.fromarray(depth).save(root / f"depth/{split}/{name}.png")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for number in range(6):
        scene(root, "train", f"t{number}", number)
    for number in range(4):
        scene(root, "val", f"v{number}", 10 + number)
    return root


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return encoder_from_model(build_vit(TINY, seed=0), name="tiny")


def run(probe: Depth, root: Path, encoder: Encoder, out: Path, **changes: Any) -> list[Any]:
    dataset = DepthFolders(root)
    return evaluate_probe(probe, dataset, ResultStore(out), encoder, (0, 1), **changes)


def test_records_state_units_rates_and_the_mean_depth_as_baseline(folders, encoder, tmp_path):
    orphan = tmp_path / f"cache/heads/.ssl-bench-{7:032x}.tmp"
    orphan.parent.mkdir(parents=True)
    orphan.touch()
    os.utime(orphan, (0, 0))
    probe = replace(
        SMALL, keep_minutes=0.0, cache=str(tmp_path / "cache"), guesses=["$epochs times"]
    )
    records = {(r.layer, r.metric): r for r in run(probe, folders, encoder, tmp_path)}
    assert not list(orphan.parent.iterdir())

    units = {metric: record.unit for (_, metric), record in records.items()}
    assert units == {
        "delta1_holdout": "%", "delta1_oracle": "%", "delta2": "%", "delta3": "%", "rmse": "m",
        "abs_rel": "", "log10": "", "silog": "",
    }  # fmt: skip
    oracle, held_out = records[1, "delta1_oracle"], records[1, "delta1_holdout"]
    details = held_out.details
    assert oracle.value == pytest.approx(max(details["delta1_by_rate"]))
    choice = details["learning_rates"].index(details["learning_rate"])
    assert choice == int(np.argmax(details["delta1_by_rate_held_out"]))
    assert held_out.value == pytest.approx(details["delta1_by_rate"][choice])
    assert (details["num_train_images"], details["num_held_out_images"]) == (5, 1)
    assert (
        records[0, "rmse"].details["learning_rate"] == records[0, "silog"].details["learning_rate"]
    )

    # The baseline is the mean depth of the training images, resized to the size of each image.
    context = context_of(encoder, DepthFolders(folders), (0, 1), tmp_path, seed=3)
    assert DepthRun(SMALL, context).training.seed == 3
    run_of_split = DepthRun(replace(SMALL, norm="final"), replace(context, seed=0))
    assert not run_of_split.training.standardize
    trained = [5 - number for number in range(6) if 5 - number not in run_of_split.split.held_out]
    assert details["guesses"] == [f"{SMALL.epochs} times"]
    expected = np.mean([1.0 + 0.5 * number for number in trained])
    dataset = DepthFolders(folders).val()
    rmse = []
    labels = run_of_split.compute_features().patches.labels
    # A map of 32 x 40 pixels is resized to 16 x 16 pixels, with the value of the nearest pixel.
    rows, cols = (((np.arange(16) + 0.5) * size / 16).astype(int) for size in (32, 40))
    first = DepthFolders(folders).train()[0].depth
    assert first is not None
    assert np.array_equal(labels[0].numpy(), first[np.ix_(rows, cols)])
    mean = run_of_split.mean_depth(labels[trained])
    assert float(mean[8, 14]) == pytest.approx(expected)
    # Pixels without a depth (0) do not count.
    depths = torch.tensor([[[2.0, 0.0, 0.0]], [[4.0, 1.0, 0.0]]])
    assert run_of_split.mean_depth(depths).tolist() == [[3.0, 1.0, pytest.approx(7 / 3)]]
    assert float(mean[0, 0]) == pytest.approx(float(mean[mean > 0].mean()), rel=0.2)
    for sample in dataset:
        depth = torch.from_numpy(sample.depth)
        large = torch.nn.functional.interpolate(mean[None, None], depth.shape, mode="bilinear")[0]
        rmse.append(float(image_metrics(large, depth, SMALL.bounds)[0, 3]))
    baseline = records[0, "rmse"].details["baseline"]
    assert baseline["value"] == pytest.approx(np.mean(rmse))


def test_held_out_images_choose_the_rate(folders, encoder, tmp_path, monkeypatch):
    def score(_: Any, heads: Any, images: Any, indices: Any, mean_depth: Any = None) -> Any:
        # Rate 1 is best on held-out images, and rate 2 on scored images.
        delta1 = [10, 90, 30] if mean_depth is None else [40, 20, 80]
        metrics = np.zeros((len(indices), 2, len(delta1), len(UNITS))) + np.arange(3)[:, None]
        metrics[..., 0] = delta1
        return metrics, np.zeros((len(indices), len(UNITS)))

    monkeypatch.setattr(DepthRun, "score", score)

    probe = replace(SMALL, learning_rates=(1e-3, 1e-2, 1e-1))
    records = {(r.layer, r.metric): r for r in run(probe, folders, encoder, tmp_path)}

    expected = {"delta1_holdout": (20, 1e-2), "delta1_oracle": (80, 1e-1), "rmse": (1, 1e-2)}
    for metric, (value, rate) in expected.items():
        record = records[0, metric]
        assert (record.value, record.details["learning_rate"]) == (value, rate)
        is_at_edge = any("at the edge" in line for line in record.details["warnings"])
        assert is_at_edge == (metric == "delta1_oracle")


def test_without_held_out_images_the_scored_images_choose_the_rate(folders, encoder, tmp_path):
    probe = replace(SMALL, learning_rates=(1e-4, 1e-2), epochs=2, holdout=0.0, panels=0)
    probe = replace(probe, train_images=5)

    records = {(r.layer, r.metric): r for r in run(probe, folders, encoder, tmp_path)}

    assert (0, "delta1_holdout") not in records
    details = records[0, "delta2"].details
    best = int(np.argmax(details["delta1_by_rate"]))
    assert details["learning_rate"] == (1e-4, 1e-2)[best]
    assert details["delta1_by_rate_held_out"] is None
    assert (details["num_train_images"], details["num_held_out_images"]) == (5, 0)
    names = DepthFolders(folders).train().ids
    subsets = [ids_sha256([*names[:left_out], *names[left_out + 1 :]]) for left_out in range(6)]
    assert details["train_ids_sha256"] in subsets
    assert not list(tmp_path.rglob("*.png"))


def test_features_in_a_temporary_file_give_the_same_results(folders, encoder, tmp_path):
    in_memory = run(SMALL, folders, encoder, tmp_path / "memory")
    probe = replace(SMALL, memory_gib=0.0, cache=str(tmp_path / "cache"))

    on_disk = run(probe, folders, encoder, tmp_path / "disk")

    assert [record.value for record in on_disk] == [record.value for record in in_memory]
    assert (tmp_path / "cache/features").is_dir()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"layers_mode": "last4"}, [[0, 1]]),
        ({"facet": "key"}, [[0], [1]]),
        ({"norm": "final"}, [[0], [1]]),
        ({"norm": "none"}, [[0], [1]]),
    ],
)
def test_heads_are_trained_on_other_features_or_several_blocks(
    folders, encoder, tmp_path, options, blocks
):
    probe = replace(SMALL, learning_rates=(1e-3,), epochs=2, panels=0, **options)

    records = run(probe, folders, encoder, tmp_path)

    assert [r.details["layers"] for r in records if r.metric == "rmse"] == blocks
    assert all(math.isfinite(record.value) for record in records)
    assert not any("edge" in line for record in records for line in record.details["warnings"])


def test_an_encoder_without_cls_is_scored_by_its_patches(folders, encoder_without_cls, tmp_path):
    records = run(SMALL, folders, encoder_without_cls, tmp_path)

    assert {record.layer for record in records} == {0, 1}


def test_blocks_with_constant_features_have_a_warning(folders, tmp_path):
    model = build_vit(TINY, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("blocks.1"):
                parameter.zero_()
    probe = replace(SMALL, epochs=1, panels=0)

    records = run(probe, folders, encoder_from_model(model, name="constant"), tmp_path)

    for record in records:
        warnings = [line.partition(":")[0] for line in record.details["warnings"]]
        assert warnings[0] == "degenerate"
        assert len(warnings) == 2
        assert record.details["constant_features"]


def test_a_figure_shows_image_depth_and_each_block(folders, encoder, tmp_path, monkeypatch):
    def remember(image: Any, maps: Any, path: Any) -> None:
        drawn.append(maps)
        draw_depths(image, maps, path)

    drawn = list[Any]()
    monkeypatch.setattr("probes.depth.probe.draw_depths", remember)
    run(SMALL, folders, encoder, tmp_path)

    ((true, *predicted),) = (maps.values() for maps in drawn)
    # Only the first row has no known depth.
    assert np.isnan(true[0]).all()
    assert np.isfinite([true[1:], *(one[1:] for one in predicted)]).all()

    (path,) = tmp_path.rglob("*.png")
    assert len(json.loads(Image.open(path).info[TILES])) == 4
    colours = colour_depth(np.array([[1, 3, np.nan]], np.float32), 1.0, 3.0)
    assert colours.tolist() == [[[68, 1, 84], [253, 231, 37], [255, 255, 255]]]


def test_all_maps_of_a_figure_share_the_true_depth_range(tmp_path):
    true = np.repeat(np.linspace(1, 3, 8, dtype=np.float32)[None], 8, axis=0)
    true[0, 0] = np.nan
    middle = np.full((8, 8), 2, np.float32)

    image = np.zeros((8, 8, 3), np.uint8)
    draw_depths(image, {"depth": true, "block 0": middle}, tmp_path / "a.png")

    figure = Image.open(tmp_path / "a.png")
    left, top, width, height = json.loads(figure.info[TILES])[2]
    # The colour in the middle of matplotlib's scale `viridis`.
    assert figure.getpixel((left + width // 2, top + height // 2)) == (33, 145, 140)


def test_depth_without_a_pixel_in_the_range_is_refused(folders, encoder, tmp_path):
    scene(tmp_path, "train", "a", 1)
    scene(tmp_path, "train", "b", 2)
    scene(tmp_path, "val", "far", 3, np.full((32, 40), 20_000, np.uint16))
    with pytest.raises(DataError, match="far has no pixel") as caught:
        run(SMALL, tmp_path, encoder, tmp_path / "out")
    assert caught.value.hint == ("probe.max_depth={number}",)
    for name in "ab":
        scene(tmp_path, "train", name, 1, np.full((32, 40), 50_000, np.uint16))
    with pytest.raises(DataError, match="train has no pixel"):
        run(SMALL, tmp_path, encoder, tmp_path / "out")
    # A held-out image does not train heads.
    halves = replace(SMALL, holdout=0.5)
    own = DepthRun(halves, context_of(encoder, DepthFolders(tmp_path), (0, 1), tmp_path))
    (held_out,) = own.split.held_out
    scene(tmp_path, "train", Path(own.images.ids[own.split.indices[held_out]]).stem, 1)
    with pytest.raises(DataError, match="train has no pixel"):
        run(halves, tmp_path, encoder, tmp_path / "out")


def test_settings_that_exclude_each_other_are_refused():
    for options in (
        {"min_depth": 10.0},
        {"learning_rates": ()},
        {"facet": "blocks.1.mlp.fc1", "layers_mode": "last4"},
        {"facet": "key", "norm": "final"},
    ):
        with pytest.raises(ConfigurationError):
            Depth(**options)
