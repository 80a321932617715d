"""Correspondence: points of known warps and of annotated pairs, and where they are found."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probes.correspondence.drawing import GAP, SIDE, draw
from probes.correspondence.encoded import EncodedViews
from probes.correspondence.matching import (
    at_points,
    best_cells,
    constant,
    similarities,
    soft_cells,
)
from probes.correspondence.pairs import ViewPair, warped_pair
from probes.correspondence.probe import Correspondence
from probes.correspondence.run import _by_category, _own_cells
from probes.correspondence.warps import (
    drawn_points,
    drawn_warp,
    generator_of,
    homography,
    moved,
    visible,
    warped,
)
from probes.pictures import MARGIN
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.samples import Dataset, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Evaluation
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.pairs.image_scores import Scored, stored_curve
from tests.support.configured import configured
from tests.support.faults import unchecked_types
from tests.support.spair import spair

KINDS = ("homography", "crop", "flip")
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
WARPS: dict[str, Any] = {
    "image_size": 32,
    "num_points": 20,
    "num_workers": 1,
    "batch_size": 2,
    "panels": 0,
}


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, size in (("a", (60, 40)), ("b", (40, 60)), ("c", (50, 50))):
        small = generator.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size).save(folder / f"{name}.png")
    return ImageFolder(folder)


def tiny(**changes: Any) -> Encoder:
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return encoder_from_model(build_vit(config, seed=0), name="tiny")


def run(dataset: Dataset, store: ResultStore, *, encoder: Encoder | None = None, **options: Any):
    evaluation = Evaluation(
        encoder=encoder or tiny(),
        dataset=dataset,
        probe=Correspondence(**{**WARPS, **options}),
        layers=(0, 2),
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return evaluation.run(store, say=lambda _: None)


def gradient(size: int) -> np.ndarray:
    """Red is the column of a pixel, green its row."""
    row, col = np.indices((size, size))
    return np.stack([col, row, 0 * row], -1).astype(np.uint8)


# Geometry


def test_a_flip_and_a_shift_move_pixels_and_points_alike():
    image = np.random.default_rng(0).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    flip = drawn_warp("flip", 6, 0.25, generator_of(0, "a"))
    shift = np.array([[1.0, 0.0, -2.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])

    assert np.array_equal(warped(image, flip), image[:, ::-1])
    # The first pixel goes to the end of its row.
    assert moved(np.array([[0.5, 0.5]]), flip).tolist() == [[5.5, 0.5]]
    assert np.array_equal(warped(image, shift)[1:, :4], image[:5, 2:])
    assert moved(np.array([[2.5, 0.5]]), shift).tolist() == [[0.5, 1.5]]


def test_the_middle_of_a_square_is_enlarged_by_hand():
    matrix = homography(10.0 + 20.0 * SQUARE, 40.0 * SQUARE)

    found = moved(np.array([[10.0, 10.0], [20.0, 20.0], [15.0, 30.0], [9.0, 20.0]]), matrix)

    assert found == pytest.approx(np.array([[0, 0], [20, 20], [10, 40], [-2, 20.0]]))
    assert visible(found, 40).tolist() == [True, True, False, False]


def test_what_is_shown_lies_before_the_horizon_though_a_corner_lies_behind_it():
    shown = np.array([[33.0, 33.0], [100.0, 0.0], [100.0, 100.0], [0.0, 67.0]])

    found = moved(np.concatenate([shown, [[0.0, 0.0]]]), homography(shown, 100 * SQUARE))

    assert found[:4] == pytest.approx(100 * SQUARE, abs=1e-3)
    assert np.isnan(found[4]).all()


def test_points_beyond_the_horizon_are_nowhere():
    tilted = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -0.1, 1.0]])

    found = moved(np.array([[2.0, 5.0], [2.0, 20.0]]), tilted)

    assert found[0].tolist() == [4.0, 10.0]
    assert np.isnan(found[1]).all()
    assert visible(found, 20).tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_warp_shows_where_its_matrix_says(kind):
    size = 224
    for image_id in ("a", "b", "c"):
        chance = generator_of(0, image_id)
        matrix = drawn_warp(kind, size, 0.3, chance)
        points = drawn_points(matrix, size, 300, chance)
        target = moved(points, matrix)
        # What the warp shows at the pixel of the target point, against the column and row there.
        col, row = np.floor(target).astype(int).T
        seen = warped(gradient(size), matrix)[row, col, :2]
        middles = moved(np.column_stack([col, row]) + 0.5, np.linalg.inv(matrix))

        assert visible(target, size).all()
        assert np.abs(seen + 0.5 - middles).max() < 1.6
        # A shift by half a pixel would be half a level.
        assert np.abs((seen + 0.5 - middles).mean(0)).max() < 0.1


@pytest.mark.parametrize("kind", ["homography", "crop"])
def test_a_warp_shows_a_part_of_the_square_and_nothing_else(kind):
    for number in range(40):
        matrix = drawn_warp(kind, 100, 0.33, generator_of(number, "a"))
        corners = moved(100 * SQUARE, np.linalg.inv(matrix) / np.linalg.inv(matrix)[2, 2])

        assert (corners > -1e-3).all()
        assert (corners < 100 + 1e-3).all()
        inwards = np.minimum(corners, 100 - corners)
        assert (inwards < (33 if kind == "homography" else 66) + 1e-3).all()


def test_an_image_has_its_own_warp_whatever_comes_before_it():
    probe = configured(Correspondence, **WARPS)
    image = np.random.default_rng(1).integers(0, 255, (40, 50, 3), dtype=np.uint8)

    pairs = [
        warped_pair(Sample(name, image), probe, 32, seed)
        for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]

    same, *others = (np.array_equal(pairs[0].truth, pair.truth) for pair in pairs[1:])
    assert same
    assert not any(others)


# Matching


def test_points_are_found_in_the_middle_of_the_patch_that_is_alike():
    target = torch.eye(6).view(1, 2, 3, 6)
    # Patches of the source in another order: its first one is like the target's last.
    source = torch.eye(6).flip(0).view(1, 2, 3, 6)
    middles = torch.tensor([[[1 / 6, 0.25], [5 / 6, 0.75], [0.5, 0.25]]])

    found = best_cells(similarities(source, target, middles))

    assert found[0].numpy() == pytest.approx(np.array([[5 / 6, 0.75], [1 / 6, 0.25], [0.5, 0.75]]))


def test_a_point_between_patches_is_their_mixture():
    source = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])  # one row of two patches
    target = torch.tensor([[[[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]]])
    points = torch.tensor([[[0.0, 0.5], [0.5, 0.5], [0.625, 0.5]]])

    found = similarities(source, target, points)[0, :, 0]

    # Beyond the middle of the outermost patch its own, not a part of it.
    assert at_points(source, points)[0, 0].tolist() == [1.0, 0.0]
    # A quarter of the way from the middle of the view: 1/4 of one and 3/4 of the other.
    mixed = np.array([0.25, 1 / math.sqrt(2), 0.75]) / math.hypot(0.25, 0.75)
    half = math.sqrt(0.5)
    assert found.numpy() == pytest.approx(
        np.array([[1, half, 0], [half, 1, half], mixed]), abs=1e-6
    )


@pytest.mark.parametrize("sigma", [7.0, 1.0])
def test_the_soft_place_is_that_of_insid3_and_half_a_patch(sigma):
    """Numbers of INSID3's code.

    `kernel_softargmax_get_matches_logits(scores, 0.04, sigma)` of `utils/keypoints.py` of
    https://github.com/visinf/INSID3 (f1c9622a) gave indices of cells for these scores.
    """
    theirs = {
        7.0: [[1.822745680809021, 2.9561963081359863], [3.8296804428100586, 1.1564617156982422]],
        1.0: [[2.0, 3.0], [4.000000476837158, 1.000000238418579]],
    }
    scores = (torch.arange(70).double() * 37 % 71 / 71).view(1, 2, 5, 7).float()

    found = soft_cells(scores, sigma=sigma, temperature=0.04)

    wanted = (np.array(theirs[sigma]) + 0.5) / (7, 5)
    assert found[0].numpy() == pytest.approx(wanted, abs=1e-5)


def test_lengths_of_features_change_nothing():
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randn(2, 4, 5, 7, generator=generator) for _ in range(2))
    points = torch.rand(2, 9, 2, generator=generator)
    lengths = 0.1 + 10 * torch.rand(2, 4, 5, 1, generator=generator)

    one = similarities(source, target, points)
    other = similarities(3.7 * source, lengths * target, points)

    assert other.numpy() == pytest.approx(one.numpy(), abs=1e-5)


def test_matches_are_those_of_a_plain_loop_in_float64():
    chance = np.random.default_rng(0)
    source, target = chance.standard_normal((2, 4, 5, 6))
    points = chance.random((12, 2))

    found = best_cells(
        similarities(
            torch.from_numpy(source[None]).float(),
            torch.from_numpy(target[None]).float(),
            torch.from_numpy(points[None]).float(),
        )
    )

    for point, place in zip(points, found[0].numpy(), strict=True):
        # Distance to the middles in patches, at most one patch away, none beyond the rim.
        at = np.clip(point * (5, 4) - 0.5, 0, (4, 3))
        wanted = sum(
            source[r, c] * max(0, 1 - abs(at[0] - c)) * max(0, 1 - abs(at[1] - r))
            for r in range(4)
            for c in range(5)
        )
        cosine = target @ wanted / np.linalg.norm(target, axis=-1)
        row, col = np.unravel_index(cosine.argmax(), cosine.shape)
        assert place == pytest.approx(((col + 0.5) / 5, (row + 0.5) / 4))


def test_features_that_tell_the_position_find_every_point():
    size, grid = 224, 14
    probe = configured(Correspondence, image_size=size, num_points=200)
    middles = (np.stack(np.meshgrid(*[np.arange(grid)] * 2), -1).reshape(-1, 2) + 0.5) / grid

    def told(places: np.ndarray) -> torch.Tensor:
        """Of each patch its place in the first view, on a sphere."""
        flat = np.column_stack([places - 0.5, np.ones(len(places))])
        return torch.from_numpy(flat).float().view(1, grid, grid, 3)

    for image_id in ("a", "b", "c", "d"):
        image = np.zeros((size, size, 3), np.uint8)
        pair = warped_pair(Sample(image_id, image), probe, size, 0)
        chance = generator_of(0, image_id)
        matrix = drawn_warp("homography", size, probe.strength, chance)
        target = moved(middles * size, np.linalg.inv(matrix)) / size
        points = torch.from_numpy(pair.source[None]).float()
        found = best_cells(similarities(told(middles), told(target), points))

        # No further than from a corner of a patch to its middle, and what the sphere bends.
        assert pair.errors(found[0].double().numpy()).max() < 1.25 * math.sqrt(0.5) / grid


def test_patches_that_are_all_alike_are_known():
    same = torch.randn(1, 1, 1, 5).expand(1, 3, 4, 5) * torch.linspace(1, 2, 12).view(1, 3, 4, 1)

    assert constant(torch.cat([same, torch.randn(1, 3, 4, 5)])).tolist() == [True, False]


# Scores


def view_pair(truth: Sequence[Sequence[float]], **changed: Any) -> ViewPair:
    view = torch.zeros(3, 8, 8, dtype=torch.uint8)
    told = {"units": (100.0, 100.0), "reference": 50.0, **changed}
    places = np.array(truth, np.float64)
    return ViewPair("pair", ("a", "b"), (view, view), places, places, **told)


def test_one_of_two_points_lies_within_a_tenth_of_the_box():
    pair = view_pair([[0.2, 0.2], [0.5, 0.5]])

    errors = pair.errors(np.array([[0.24, 0.2], [0.5, 0.44]]))

    # 4 and 6 pixels of a box of 50.
    assert errors == pytest.approx([0.08, 0.12])
    right = pair.right(np.array([[0.24, 0.2], [0.5, 0.44]]), [0.05, 0.1, 0.15])
    assert right.mean(1).tolist() == [0.0, 0.5, 1.0]


def test_a_place_at_that_very_distance_is_right():
    pair = view_pair([[0.5, 0.5]], units=(8.0, 8.0), reference=8.0)

    # Numbers without rounding.
    right = pair.right(np.array([[0.75, 0.5]]), [0.25, 0.24])

    assert right.tolist() == [[True], [False]]


def test_errors_are_told_in_pixels_of_the_second_image():
    pair = view_pair([[0.5, 0.5]], units=(200.0, 100.0), reference=50.0)

    errors = [float(pair.errors(np.array([place]))[0]) for place in ([0.6, 0.5], [0.5, 0.6])]

    assert errors == pytest.approx([0.4, 0.2])


def test_the_patch_of_a_point_is_the_one_it_lies_in():
    points = np.array([[0.0, 0.0], [0.49, 0.26], [1.0, 1.0]])

    assert _own_cells(points, (4, 2)).tolist() == [[0.25, 0.125], [0.25, 0.375], [0.75, 0.875]]


def test_pairs_of_a_category_and_of_an_image_follow_each_other():
    ids = ["1-b-c:dog", "2-z-c:cat", "3-b-a:dog", "4-a-c:cat"]

    assert _by_category(ids) == [3, 1, 2, 0]


# Runs


def by_cell(records: Sequence[Record]) -> dict[tuple[int, str, str], float]:
    return {(r.layer, r.facet, r.metric): r.value for r in records}


@pytest.mark.parametrize("warp", KINDS)
def test_every_block_and_facet_gets_a_score_an_alpha(photographs, tmp_path, warp):
    store = ResultStore(tmp_path / "out")

    records = run(photographs, store, warp=warp, facet=["token", "key"])

    alphas = ("pck_0.01", "pck_0.05", "pck_0.1", "pck_0.15")
    assert by_cell(records).keys() == {
        (layer, facet, metric)
        for layer in (0, 2)
        for facet in ("token", "key")
        for metric in alphas
    }
    for layer, facet in ((0, "token"), (2, "key")):
        values = [by_cell(records)[layer, facet, metric] for metric in alphas]
        assert values == sorted(values)
    assert {(r.num_images, r.details["points"]) for r in records} == {(3, 60)}
    assert run(photographs, store, warp=warp, facet=["token", "key"]) == records


# Pictures


def test_the_files_that_are_announced_are_left(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    probe = Correspondence(**{**WARPS, "panels": 1, "warp": "flip"})

    run(photographs, store, panels=1, warp="flip")

    (folder,) = (store.root / "pictures/correspondence/folder").iterdir()
    left = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert left == probe.pictures((0, 2), photographs.images(), 0).keys()
    assert len(left) == 2
    assert all("warp=flip" in name and name.endswith("token/a.png.png") for name in left)


def test_a_line_is_green_where_a_point_is_right_and_red_elsewhere(tmp_path):
    pair = view_pair([[0.5, 0.25], [0.5, 0.75]])
    places = np.array([[0.5, 0.25], [0.5, 0.5]])

    draw(pair, places, np.array([True, False]), "title", tmp_path / "a.png")

    picture = np.asarray(Image.open(tmp_path / "a.png")).astype(int)
    views = picture[picture.shape[0] - SIDE - MARGIN :, MARGIN:]
    middle = (2 * SIDE + GAP) // 2
    # Half of the way from one view to the other, there where both are black.
    right, wrong = (
        views[row - 2 : row + 3, middle - GAP // 2 - 4].reshape(-1, 3).max(0)
        for row in (SIDE // 4, round(0.63 * SIDE))
    )
    assert right[1] > 100 > right[0]
    assert wrong[0] > 100 > wrong[1]
    # The ring around the true place, four pixels wide on either side, on nothing else.
    ring = views[round(0.75 * SIDE) - 6 : round(0.75 * SIDE) + 7, middle + GAP // 2 + SIDE // 2]
    assert (ring[:, 1] > 100).any()


# Records


def test_an_image_scores_the_same_without_the_others(photographs, tmp_path):
    whole, alone = ResultStore(tmp_path / "one"), ResultStore(tmp_path / "other")
    first = run(photographs, whole)
    for name in ("a.png", "b.png"):
        (photographs.root / name).unlink()
    second = run(photographs, alone)

    for one, other in zip(first, second, strict=True):
        images = whole.per_image(one), alone.per_image(other)
        assert images[0] is not None
        assert images[1] is not None
        assert images[0][2].tolist() == images[1][0].tolist()


def test_kept_images_give_the_value_again_and_can_be_paired(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    records = [r for r in run(photographs, store) if r.metric == "pck_0.15"]

    scored = Scored.of(stored_curve(store, records))

    assert not store.damaged
    assert {layer: one.value for layer, one in scored.blocks.items()} == pytest.approx(
        {record.layer: record.value for record in records}
    )
    assert [one.ci95() for one in scored.blocks.values()] == [record.ci95 for record in records]


def test_a_block_whose_patches_are_all_alike_is_marked(photographs, tmp_path):
    encoder = tiny(skip_mlp=False)
    with torch.no_grad():
        encoder.module.get_parameter("blocks.2.mlp.fc2.weight").zero_()
        encoder.module.get_parameter("blocks.2.mlp.fc2.bias").fill_(1)

    records = run(photographs, ResultStore(tmp_path / "out"), encoder=encoder)

    marks = {record.layer: record.details["degenerate_percent"] for record in records}
    assert marks == {0: 0.0, 2: 100.0}


def test_pairs_are_averaged_by_pair_by_point_and_by_category(tmp_path):
    spair(tmp_path)
    store = ResultStore(tmp_path / "out")

    records = run(Spair71k(tmp_path), store, protocol="spair", alphas=[0.08])

    record = records[0]
    counts = store.per_image(record)
    assert counts is not None
    # Two pairs of cats, with none of three points right and one of two, and a bird's only point.
    assert counts.tolist() == [[0, 3], [1, 2], [1, 1]]
    assert record.value == pytest.approx((0 + 50 + 100) / 3)
    assert record.details["of_all_points"] == pytest.approx(100 * 2 / 6)
    assert record.details["by_category"] == pytest.approx({"bird": 100, "cat": 25})
    assert record.details["of_categories"] == pytest.approx((100 + 25) / 2)
    assert not {"warp", "strength", "num_points"} & record.settings.keys()


def test_perfect_features_reach_the_points_near_the_middle_of_their_patch(tmp_path):
    spair(tmp_path)

    (record,) = run(
        Spair71k(tmp_path), ResultStore(tmp_path / "out"), protocol="spair", alphas=[0.08],
        facet="key",
    )[:1]  # fmt: skip

    # Patches of 10 x 15 pixels, 4 of the box are near enough. Targets of the first pair lie on
    # corners of patches; (5.5, 11.5) is 4 from the middle (5, 7.5) of its patch, and a bit;
    # (25.5, 38.5) is 1 from (25, 37.5); (17.5, 19.5) is 3.9 from (15, 22.5).
    assert record.details["reachable"] == pytest.approx((0 + 50 + 100) / 3)


def test_the_same_object_in_two_sizes_is_found(tmp_path):
    spair(tmp_path)

    records = run(Spair71k(tmp_path), ResultStore(tmp_path / "out"), protocol="spair", alphas=[0.2])

    # Squashed to one size both pictures of a pair are the same; a patch is 15 of 50 pixels high.
    assert [record.value for record in records] == [100.0, 100.0]


# What passes the encoder


def views(*keys: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.full((3, 32, 32), 10 * ord(key) % 251, dtype=torch.uint8).random_(
            0, 255, generator=torch.Generator().manual_seed(ord(key))
        )
        for key in keys
    }


def test_a_view_passes_once_while_it_is_remembered():
    extractor = FeatureExtractor(tiny(), layers=(0, 1), facets=("token", "key"))
    each = 2 * 2 * 16 * 12 * 4
    known, forgetful = EncodedViews(extractor, 2 * each), EncodedViews(extractor, 0)

    for keys in ("ab", "a", "c", "a", "b"):
        one, other = known.features(views(*keys)), forgetful.features(views(*keys))
        assert one.keys() == other.keys() == set(keys)
        for key in keys:
            assert one[key].keys() == {(n, f) for n in (0, 1) for f in ("token", "key")}
            for cell in one[key]:
                assert torch.allclose(one[key][cell], other[key][cell], atol=1e-5)

    # a and b pass; a is known; c takes the room of b, which was not asked for as lately; b again.
    assert (known.passes, forgetful.passes) == (4, 6)


# Settings


def composed(*overrides: str) -> Correspondence:
    return build(compose_config("probing", ["probe=correspondence", *overrides]).probe)


def test_settings_name_what_the_choice_uses_and_nothing_else():
    everything = composed("probe.prediction=soft").settings()
    assert everything == {
        "image_size": None, "warp": "homography", "strength": 0.25, "num_points": 256,
        "prediction": "soft", "sigma": 7.0, "temperature": 0.04,
    }  # fmt: skip
    cells = composed("probe.warp=flip").settings()
    assert cells == {"image_size": None, "warp": "flip", "num_points": 256, "prediction": "cell"}
    pairs = composed("probe.protocol=spair")
    assert pairs.settings() == {"image_size": None, "prediction": "cell"}
    assert (pairs.role, pairs.metrics[-1]) == ("correspondence", "pck_0.2")
    assert (composed().role, composed().metrics[0]) == ("images", "pck_0.01")


def test_a_whole_number_names_the_same_cell():
    whole = ("probe.strength=0", "probe.prediction=soft", "probe.sigma=2", "probe.alphas=[1]")

    with unchecked_types():
        one = composed(*whole)

    assert [repr(one.settings()[name]) for name in ("strength", "sigma")] == ["0.0", "2.0"]
    assert one.metrics == ("pck_1.0",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alphas": []},
        {"alphas": [0.1, 0.1]},
        {"alphas": [0.0]},
        {"strength": 0.34},
        {"warp": "twist"},
        {"num_points": 0},
        {"prediction": "best"},
        {"temperature": 0.0},
        {"facet": "tokens"},
        {"protocol": "davis"},
    ],
)
def test_a_wrong_hyperparameter_is_named(wrong):
    with pytest.raises(ConfigurationError, match=f"probe.{next(iter(wrong))}"):
        configured(Correspondence, **wrong)


def test_sizes_are_rounded_to_whole_patches(photographs, tmp_path):
    records = run(photographs, ResultStore(tmp_path / "out"), image_size=45, num_points=5)

    assert {record.details["view_size"] for record in records} == {48}
    assert Path(tmp_path / "out").is_dir()
