"""Test the correspondence probe, which matches patches between two images."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probes.correspondence import (
    GAP,
    SIDE,
    Correspondence,
    ViewPair,
    argmax_positions,
    cosine_similarities,
    draw_matches,
    homography,
    is_inside,
    make_image_rng,
    make_warped_pair,
    order_by_category,
    sample_features,
    sample_points,
    sample_warp,
    soft_argmax_positions,
    transform_points,
    warp_image,
)
from probes.pictures import MARGIN
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.samples import Dataset, Sample
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from ssl_bench.results.per_image import load_curve
from tests.support.colours import Counter
from tests.support.faults import unchecked_types
from tests.support.photographs import evaluate_probe
from tests.support.spair import TARGET_SIZE, WrittenPair, spair

WARPS: dict[str, Any] = {
    "image_size": 32, "num_points": 20, "num_workers": 1, "batch_size": 2, "panels": 0,
}  # fmt: skip
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def tiny(**changes: Any) -> Encoder:
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return encoder_from_model(build_vit(config, seed=0), name="tiny")


def run(dataset: Dataset, store: ResultStore, *, encoder: Encoder | None = None, **options: Any):
    probe = Correspondence(**{**WARPS, **options})
    return evaluate_probe(probe, dataset, store, encoder or tiny(), (0, 2), overwrite=False)


def test_larger_alphas_score_higher_and_figure_names_state_the_warp(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    options = {"warp": "flip", "facet": ["token", "key"], "panels": 1}

    records = run(photographs, store, **options)

    alphas = ("pck_0.01", "pck_0.05", "pck_0.1", "pck_0.15")
    by_cell = {(r.layer, r.facet, r.metric): r.value for r in records}
    for layer, facet in ((0, "token"), (2, "key")):
        found = [by_cell[layer, facet, metric] for metric in alphas]
        assert found == sorted(found)
    assert {(r.num_images, r.details["points"]) for r in records} == {(3, 60)}
    for name in ("reachable", "baseline"):
        values = [r.details[name] for r in records[:4]]
        values = [value["value"] if name == "baseline" else value for value in values]
        assert sorted(values) == values != values[:1] * 4
    (folder,) = (store.root / "pictures/correspondence/folder").iterdir()
    drawn = {p.relative_to(folder).as_posix() for p in folder.rglob("*.png")}
    probe = Correspondence(**{**WARPS, **options})
    assert drawn == probe.list_figures((0, 2), photographs.images(), 0).keys()
    assert len(drawn) == 4
    assert all("warp=flip" in name and name.endswith(".png.png") for name in drawn)


def test_figures_mark_points_by_a_tolerance_of_a_tenth_or_else_the_last(
    photographs, tmp_path, monkeypatch
):
    drawn: list[tuple[np.ndarray, str]] = []
    monkeypatch.setattr(
        "probes.correspondence.draw_matches",
        lambda _pair, _positions, correct, title, _path: drawn.append((correct, title)),
    )
    for alphas, metric in (([0.05, 0.1, 0.3], "pck_0.1"), ([0.05, 0.3], "pck_0.3")):
        drawn.clear()
        records = run(photographs, ResultStore(tmp_path / metric), alphas=alphas, panels=3)
        shares = [100 * correct.mean() for correct, title in drawn if "block 2" in title]
        (value,) = [r.value for r in records if (r.layer, r.metric) == (2, metric)]
        assert np.mean(shares) == pytest.approx(value)
        assert all(f"{metric} " in title for _, title in drawn)


def test_sharp_soft_predictions_are_the_best_patches(photographs, tmp_path):
    # At a low temperature without a narrow window, only the most similar patch counts.
    soft = {"prediction": "soft", "sigma": 1000.0, "temperature": 1e-3}
    sharp, best = (
        run(photographs, ResultStore(tmp_path / name), warp="flip", **options)
        for name, options in (("sharp", soft), ("best", {}))
    )

    assert [record.value for record in sharp] == [record.value for record in best]
    assert max(record.value for record in sharp) > 20


def test_image_scores_do_not_depend_on_other_images(photographs, tmp_path):
    whole, alone = ResultStore(tmp_path / "one"), ResultStore(tmp_path / "other")
    first = run(photographs, whole)
    for name in ("a.png", "b.png"):
        (photographs.root / name).unlink()
    second = run(photographs, alone)

    for one, other in zip(first, second, strict=True):
        images = whole.load_per_image(one), alone.load_per_image(other)
        assert images[0] is not None
        assert images[1] is not None
        assert images[0][2].tolist() == images[1][0].tolist()


def test_stored_per_image_values_give_the_same_value_and_interval(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    records = [r for r in run(photographs, store) if r.metric == "pck_0.15"]

    blocks = load_curve(store, records).layer_estimates

    for record in records:
        assert blocks[record.layer].value == pytest.approx(record.value)
        assert blocks[record.layer].ci95() == record.ci95


def test_a_block_with_equal_patches_is_degenerate(photographs, tmp_path):
    encoder = tiny(skip_mlp=False)
    with torch.no_grad():
        encoder.module.get_parameter("blocks.2.mlp.fc2.weight").zero_()
        encoder.module.get_parameter("blocks.2.mlp.fc2.bias").fill_(1)

    # The size is rounded to a multiple of the patch size.
    records = run(photographs, ResultStore(tmp_path / "out"), encoder=encoder, image_size=45)

    marks = {record.layer: record.details["degenerate_percent"] for record in records}
    assert marks == {0: 0.0, 2: 100.0}
    assert {record.details["view_size"] for record in records} == {48}


def test_pairs_are_degenerate_if_all_target_patches_are_equal(tmp_path):
    base, encoder = spair(tmp_path), tiny()
    with torch.no_grad():
        encoder.module.get_parameter("pos_embed").zero_()
    # This image is the target of two of the three pairs.
    Image.new("RGB", TARGET_SIZE, (90, 120, 30)).save(base / "JPEGImages/cat/2008_000002.jpg")

    store = ResultStore(tmp_path / "out")
    records = run(Spair71k(tmp_path), store, encoder=encoder, protocol="spair", alphas=[0.08])

    assert records[0].details["degenerate_percent"] == pytest.approx(200 / 3)


def test_pairs_are_averaged_by_pair_by_point_and_by_category(tmp_path):
    spair(tmp_path)
    store = ResultStore(tmp_path / "out")

    records = run(Spair71k(tmp_path), store, protocol="spair", alphas=[0.08])

    record = records[0]
    counts = store.load_per_image(record)
    assert counts is not None
    # The pairs of cats have 0 of 3 and 1 of 2 correct points, and the pair of birds has 1 of 1.
    assert counts.tolist() == [[0, 3], [1, 2], [1, 1]]
    assert record.value == pytest.approx((0 + 50 + 100) / 3)
    assert record.details["of_all_points"] == pytest.approx(100 * 2 / 6)
    assert record.details["by_category"] == pytest.approx({"bird": 100, "cat": 25})
    assert record.details["of_categories"] == pytest.approx((100 + 25) / 2)
    baseline = record.details["baseline"]
    assert baseline["answer"] in ("same place", "middle")
    assert not {"warp", "strength", "num_points"} & record.settings.keys()


def test_resized_objects_are_found_and_reachable_points_are_recorded(tmp_path):
    spair(tmp_path)

    near, far = (
        run(Spair71k(tmp_path), ResultStore(tmp_path / name), protocol="spair", alphas=[alpha])
        for name, alpha in (("near", 0.08), ("far", 0.2))
    )

    # Resized to a square, the two images of a pair are equal. A patch is 15 pixels high, and the
    # box 50 pixels.
    assert [record.value for record in far] == [100.0, 100.0]
    # A patch has 10 x 15 pixels, and a point may be 4 pixels from the centre of a patch. The
    # targets of the first pair lie on corners of patches. In the second pair, (5.5, 11.5) is just
    # over 4 pixels from (5, 7.5), and (25.5, 38.5) is 1 pixel from (25, 37.5). In the third pair,
    # (17.5, 19.5) is 3.9 pixels from (15, 22.5).
    assert near[0].details["reachable"] == pytest.approx((0 + 50 + 100) / 3)


def test_cached_images_in_several_pairs_are_encoded_once(tmp_path):
    pairs = ("ax", "by", "cx", "dx")
    spair(tmp_path, tuple(WrittenPair(n, a, b, "cat") for n, (a, b) in enumerate(pairs)))
    values, images = [], []
    # Size of the float32 features of two blocks with 4 x 4 patches and 12 channels.
    view_gib = 2 * 4 * 4 * 12 * 4 / 2**30
    for gib in (8.0, 3 * view_gib, 2 * view_gib, 0.0):
        encoder, store = tiny(), ResultStore(tmp_path / str(gib))
        counter = Counter(encoder)
        options = {"protocol": "spair", "batch_size": 1, "memory_gib": gib}
        records = run(Spair71k(tmp_path), store, encoder=encoder, **options)
        values.append([record.value for record in records])
        images.append(counter.images)

    assert values == [values[0]] * 4
    # If three images fit, x is still cached for the last pair, because the third pair used it.
    assert images == [6, 6, 7, 8]


def compose_probe(*overrides: str) -> Correspondence:
    return build(compose_config("probing", ["probe=correspondence", *overrides]), "probe")


def test_settings_contain_only_the_options_in_use():
    everything = compose_probe("probe.prediction=soft").settings()
    assert everything == {
        "image_size": None, "warp": "homography", "strength": 0.25, "num_points": 256,
        "prediction": "soft", "sigma": 7.0, "temperature": 0.04,
    }  # fmt: skip
    cells = compose_probe("probe.warp=flip").settings()
    assert cells == {"image_size": None, "warp": "flip", "num_points": 256, "prediction": "cell"}
    pairs = compose_probe("probe.protocol=spair")
    assert pairs.settings() == {"image_size": None, "prediction": "cell"}
    assert compose_probe("probe.sampling=patch").settings()["sampling"] == "patch"
    assert (pairs.role, pairs.metrics[-1]) == ("correspondence", "pck_0.2")
    assert (compose_probe().role, compose_probe().metrics[0]) == ("images", "pck_0.01")


def test_settings_do_not_depend_on_the_type_of_numbers():
    whole = ("probe.strength=0", "probe.prediction=soft", "probe.sigma=2", "probe.alphas=[1]")

    with unchecked_types():
        one = compose_probe(*whole)

    assert [repr(one.settings()[name]) for name in ("strength", "sigma")] == ["0.0", "2.0"]
    assert one.metrics == ("pck_1.0",)


@pytest.mark.data
def test_a_published_encoder_has_the_expected_pck(shared_data, published_encoder, tmp_path):
    words = ["probe", "--task", "correspondence", "--checkpoint", str(published_encoder)]
    words += ["--dataset", f"pf_willow:{shared_data}/real/pf-willow", "--layer", "2,8"]
    words += ["probe.protocol=spair", "probe.sampling=patch", "probe.image_size=224"]

    assert main([*words, "--pictures", "0", "--out", str(tmp_path)]) == 0

    records = {r.layer: r.value for r in ResultStore(tmp_path).records() if r.metric == "pck_0.1"}
    # Another program computed these values. Its points are half a pixel away from ours.
    assert records == pytest.approx({2: 15.31, 8: 39.49}, abs=0.3)


def test_points_behind_the_horizon_become_nan():
    corners = np.array([[33.0, 33.0], [100.0, 0.0], [100.0, 100.0], [0.0, 67.0]])

    points = np.concatenate([corners, [[0.0, 0.0]]])
    found = transform_points(points, homography(corners, 100 * SQUARE))

    assert found[:4] == pytest.approx(100 * SQUARE, abs=1e-3)
    assert np.isnan(found[4]).all()
    assert not is_inside(found[4:], 100).any()


@pytest.mark.parametrize("kind", ["homography", "crop", "flip"])
def test_warped_pixels_and_points_agree(kind):
    # The red value is the column of a pixel, and the green value its row.
    size, (row, col) = 224, np.indices((224, 224))
    gradient = np.stack([col, row, 0 * row], -1).astype(np.uint8)
    for image_id in ("a", "b", "c"):
        generator = make_image_rng(0, image_id)
        matrix = sample_warp(kind, size, 0.3, generator)
        points = sample_points(matrix, size, 300, generator)
        target = transform_points(points, matrix)
        # The colour at the target point states the source pixel, which the matrix must state, too.
        col, row = np.floor(target).astype(int).T
        pixels = warp_image(gradient, matrix)[row, col, :2]
        expected = transform_points(np.column_stack([col, row]) + 0.5, np.linalg.inv(matrix))

        assert is_inside(target, size).all()
        assert np.abs(pixels + 0.5 - expected).max() < 1.6
        # A shift by half a pixel would change the mean by 0.5.
        assert np.abs((pixels + 0.5 - expected).mean(0)).max() < 0.1


@pytest.mark.parametrize("kind", ["homography", "crop"])
def test_a_warp_shows_only_a_part_of_the_image(kind):
    for number in range(40):
        inverse = np.linalg.inv(sample_warp(kind, 100, 0.33, make_image_rng(number, "a")))
        corners = transform_points(100 * SQUARE, inverse / inverse[2, 2])

        assert (corners > -1e-3).all()
        assert (corners < 100 + 1e-3).all()
        inwards = np.minimum(corners, 100 - corners)
        assert (inwards < (33 if kind == "homography" else 66) + 1e-3).all()


def test_the_image_id_and_the_seed_determine_the_warp():
    image = np.random.default_rng(1).integers(0, 255, (40, 50, 3), dtype=np.uint8)

    pairs = [
        make_warped_pair(Sample(name, image), 32, seed, Correspondence(num_points=20))
        for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]

    same, *others = (np.array_equal(pairs[0].truth, pair.truth) for pair in pairs[1:])
    assert same
    assert not any(others)


@pytest.mark.parametrize(
    ("sigma", "indices"),
    [
        (7.0, [[1.822745680809021, 2.9561963081359863], [3.8296804428100586, 1.1564617156982422]]),
        (1.0, [[2.0, 3.0], [4.000000476837158, 1.000000238418579]]),
    ],
)
def test_soft_argmax_equals_that_of_insid3_plus_half_a_patch(sigma, indices):
    # These patch indices come from `kernel_softargmax_get_matches_logits(scores, 0.04, sigma)` in
    # `utils/keypoints.py` of https://github.com/visinf/INSID3 (f1c9622a).
    scores = (torch.arange(70).double() * 37 % 71 / 71).view(1, 2, 5, 7).float()

    found = soft_argmax_positions(scores, sigma=sigma, temperature=0.04)

    assert found[0].numpy() == pytest.approx((np.array(indices) + 0.5) / (7, 5), abs=1e-5)


@pytest.mark.parametrize("sampling", ["bilinear", "patch"])
def test_matches_equal_those_of_a_plain_loop_in_float64(sampling):
    generator = np.random.default_rng(0)
    source, target = generator.standard_normal((2, 4, 5, 6))
    points = generator.random((12, 2))

    source_map, target_map, places = (
        torch.from_numpy(x[None]).float() for x in (source, target, points)
    )
    features = sample_features(source_map, places, sampling)
    found = argmax_positions(cosine_similarities(features, target_map))

    # The cosine does not depend on the lengths of features.
    for point, place in zip(points, found[0].numpy(), strict=True):
        if sampling == "patch":
            feature = source[int(point[1] * 4), int(point[0] * 5)]
        else:
            # Bilinear weights of the centres of patches. The edge of the grid is repeated.
            x, y = np.clip(point * (5, 4) - 0.5, 0, (4, 3))
            weights = [
                [max(0, 1 - abs(x - c)) * max(0, 1 - abs(y - r)) for c in range(5)]
                for r in range(4)
            ]
            feature = np.einsum("rc,rcd->d", weights, source)
        cosine = target @ feature / np.linalg.norm(target, axis=-1)
        row, col = np.unravel_index(cosine.argmax(), cosine.shape)
        assert place == pytest.approx(((col + 0.5) / 5, (row + 0.5) / 4))


def test_points_on_image_edges_belong_to_the_outermost_patches():
    source = torch.arange(6.0).view(1, 2, 3, 1)
    points = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [1 / 3, 0.0], [0.0, 0.5]]])

    assert sample_features(source, points, "patch").flatten().tolist() == [0, 5, 1, 3]


def test_features_that_encode_the_position_find_every_point():
    size, grid = 224, 14
    centres = (np.stack(np.meshgrid(*[np.arange(grid)] * 2), -1).reshape(-1, 2) + 0.5) / grid

    def encode(places: np.ndarray) -> torch.Tensor:
        """Return patch features that encode the position of each patch."""
        flat = np.column_stack([places - 0.5, np.ones(len(places))])
        return torch.from_numpy(flat).float().view(1, grid, grid, 3)

    for image_id in ("a", "b"):
        image = np.zeros((size, size, 3), np.uint8)
        pair = make_warped_pair(Sample(image_id, image), size, 0, Correspondence(num_points=200))
        generator = make_image_rng(0, image_id)
        matrix = sample_warp("homography", size, 0.25, generator)
        target = transform_points(centres * size, np.linalg.inv(matrix)) / size
        points = torch.from_numpy(pair.source[None]).float()
        features = sample_features(encode(centres), points, "bilinear")
        found = argmax_positions(cosine_similarities(features, encode(target)))

        # The largest error is the distance from a corner of a patch to its centre, plus the
        # distortion by the projection to directions.
        alphas = [1.25 * math.sqrt(0.5) / grid, 0.1 / grid]
        is_correct = pair.is_correct(found[0].double().numpy(), alphas)
        assert is_correct[0].all()
        assert not is_correct[1].all()


def view_pair(truth: Sequence[Sequence[float]], **changed: Any) -> ViewPair:
    view = torch.zeros(3, 8, 8, dtype=torch.uint8)
    values = {"target_size": (100.0, 100.0), "reference_length": 50.0, **changed}
    places = np.array(truth, np.float64)
    return ViewPair("pair", ("a", "b"), (view, view), places, places, **values)


def test_errors_are_measured_in_pixels_of_the_second_image():
    pair = view_pair([[0.2, 0.2], [0.5, 0.5]])
    found = np.array([[0.24, 0.2], [0.5, 0.44]])

    # The errors are 4 and 6 pixels, and the box has 50 pixels.
    assert pair.is_correct(found, [0.07, 0.1, 0.13]).mean(1).tolist() == [0.0, 0.5, 1.0]
    # In an image that is twice as wide as high, the errors are 20 and 10 pixels.
    wide = view_pair([[0.5, 0.5], [0.5, 0.5]], target_size=(200.0, 100.0))
    near = wide.is_correct(np.array([[0.6, 0.5], [0.5, 0.6]]), [0.19, 0.21, 0.39, 0.41])
    assert near.T.tolist() == [[False, False, False, True], [False, True, True, True]]
    # An error of exactly the largest distance is correct. Floats represent these numbers exactly.
    even = view_pair([[0.5, 0.5]], target_size=(8.0, 8.0), reference_length=8.0)
    assert even.is_correct(np.array([[0.75, 0.5]]), [0.25, 0.24]).tolist() == [[True], [False]]


def test_pairs_are_ordered_by_category_and_image():
    ids = ["1-b-c:dog", "2-z-c:cat", "3-b-a:dog", "4-a-c:cat"]

    assert order_by_category(ids) == [3, 1, 2, 0]


def test_lines_of_correct_points_are_green_and_others_red(tmp_path):
    pair = view_pair([[0.5, 0.25], [0.5, 0.75]])
    places = np.array([[0.5, 0.25], [0.5, 0.5]])

    draw_matches(pair, places, np.array([True, False]), "title", tmp_path / "a.png")

    picture = np.asarray(Image.open(tmp_path / "a.png")).astype(int)
    views = picture[picture.shape[0] - SIDE - MARGIN :, MARGIN:]
    middle = (2 * SIDE + GAP) // 2
    # These pixels are in the gap between the views.
    right, wrong = (
        views[row - 2 : row + 3, middle - GAP // 2 - 4].reshape(-1, 3).max(0)
        for row in (SIDE // 4, round(0.63 * SIDE))
    )
    assert right[1] > 100 > right[0]
    assert wrong[0] > 100 > wrong[1]
    # A ring marks the true target point.
    ring = views[round(0.75 * SIDE) - 6 : round(0.75 * SIDE) + 7, middle + GAP // 2 + SIDE // 2]
    assert (ring[:, 1] > 100).any()
    # The line of a correct point covers that of a wrong one.
    same = view_pair([[0.5, 0.25], [0.5, 0.25]])
    draw_matches(same, same.truth, np.array([True, False]), "title", tmp_path / "b.png")
    picture = np.asarray(Image.open(tmp_path / "b.png")).astype(int)
    row = picture.shape[0] - SIDE - MARGIN + SIDE // 4
    red, green, _ = picture[row, MARGIN + middle - GAP // 2 - 4]
    assert green > 100 > red
