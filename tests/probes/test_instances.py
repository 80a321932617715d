"""Test the instance retrieval probe."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probes.instances.probe import Instances, compute_descriptors, crop_copy, jpeg_copy
from probes.instances.ranking import (
    Query,
    average_precision,
    expected_average_precision,
    expected_precision,
    precision_at,
    rank_database,
    score_ranking,
)
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.toy import ToyInstances
from ssl_bench.data.samples import ImageSet, RetrievalTarget
from ssl_bench.errors import ConfigurationError, DataError, UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.neighbours import unit_vectors
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import TILES
from tests.support.faults import class_folders
from tests.support.photographs import context_of, evaluate_probe

TINY = ViTConfig(image_size=32, patch_size=8, dim=24, depth=2, num_heads=3)
NONE = np.empty(0, np.int64)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return encoder_from_model(build_vit(TINY, seed=0), name="tiny")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> ToyInstances:
    return ToyInstances(num_val=4, cache=tmp_path_factory.mktemp("cache"))


def area_by_fractions(is_right: Sequence[bool], num_right: int) -> Fraction:
    """Compute average precision as the exact area under the precision-recall curve."""
    area, found = Fraction(0), 0
    for seen, right in enumerate(is_right, start=1):
        if right:
            before = Fraction(found, seen - 1) if seen > 1 else Fraction(1)
            found += 1
            area += (before + Fraction(found, seen)) / 2 * Fraction(1, num_right)
    return area


def precision_by_fractions(is_right: Sequence[bool], k: int) -> Fraction:
    """Compute the precision at k of a ranking with exact fractions."""
    last = max(place for place, right in enumerate(is_right, start=1) if right)
    return Fraction(sum(is_right[: min(k, last)]), min(k, last))


@pytest.mark.parametrize("hard_only", [False, True])
@pytest.mark.parametrize("top", [None, 7])
def test_scores_equal_exact_fractions_without_ignored_images(hard_only, top):
    generator = np.random.default_rng(0)
    database = np.arange(2, 30)
    for _ in range(20):
        easy, hard, ignored = np.split(generator.permutation(30)[:15], (5, 9))
        query = Query(int(generator.integers(30)), easy, hard, ignored)
        ranked = generator.permutation(database)

        labels = query.label_images(30, hard_only=hard_only)
        score = score_ranking(ranked, labels, database, cutoffs=(1, 5), top=top)

        right = {*hard} if hard_only else {*easy, *hard}
        excluded = {query.row, *ignored, *(easy if hard_only else ())}
        is_right = [image in right for image in ranked.tolist() if image not in excluded]
        assert score is not None
        expected = [area_by_fractions(is_right[:top], sum(is_right))]
        expected += [precision_by_fractions(is_right, k) for k in (1, 5)]
        assert score.values == pytest.approx([float(one) for one in expected], abs=1e-12)


def test_scores_of_rankings_equal_a_count_by_hand():
    mean = (1 + (1 / 2 + 2 / 3) / 2 + (2 / 3 + 3 / 4) / 2) / 3
    assert average_precision(np.array([0, 2, 3]), 3) == pytest.approx(mean)
    assert mean == pytest.approx(0.764, abs=5e-4)
    # An ignored image at rank 1 moves all positives to the front.
    query = Query(9, np.array([0, 2, 3]), NONE, np.array([1]))
    images = np.arange(4)
    score = score_ranking(images, query.label_images(10), images, cutoffs=(1, 5, 10))
    assert score is not None
    assert score.values.tolist() == [1, 1, 1, 1]
    # The correct images have the ranks 0 and 3, so at most four images count.
    assert precision_at(np.array([0, 3]), 2, 10) == 2 / 4
    assert precision_at(np.array([0, 3]), 2, 3) == 1 / 3
    # The second correct image is not among the first ones.
    assert average_precision(np.array([0]), 2) == 0.5
    assert precision_at(np.array([0]), 2, 10) == 1 / 10
    assert score_ranking(images, np.zeros(4, np.int8), images, cutoffs=(1,)) is None


@pytest.mark.parametrize(("images", "right"), [(1, 1), (5, 1), (5, 2), (6, 4), (4, 4)])
@pytest.mark.parametrize("top", [None, 2])
def test_the_baseline_equals_the_mean_over_all_orders(images, right, top):
    orders = [
        [image in chosen for image in range(images)]
        for chosen in itertools.combinations(range(images), right)
    ]
    areas = [area_by_fractions(order[:top], right) for order in orders]
    expected = float(Fraction(sum(areas), len(orders)))
    assert expected_average_precision(images, right, top) == pytest.approx(expected, abs=1e-12)
    for k in (1, 3, 10):
        precisions = [precision_by_fractions(order, k) for order in orders]
        expected = float(Fraction(sum(precisions), len(orders)))
        if k <= images:
            assert expected_precision(images, right, k) == pytest.approx(expected, abs=1e-12)


def test_equal_images_rank_in_the_order_of_the_database():
    unit = unit_vectors(torch.tensor([[1.0, 1], [0, 1], [1, 0], [1, 1], [0, 1], [1, 0.9], [1, 1]]))
    query = Query(0, NONE, NONE, NONE)
    full, top = (
        next(rank_database(unit, [query], np.array([0, 1, 3, 4, 5, 6]), top)).tolist()
        for top in (None, 3)
    )

    # The query ranks first. The score ignores it.
    assert full == [0, 3, 6, 5, 1, 4]
    assert top == full[:4]


@dataclass(frozen=True)
class SameImages:
    """A dataset that uses the same images for training, evaluation and object discovery."""

    image_set: ImageSet
    name: str = "same"
    supports: frozenset[str] = frozenset({"instances", "images"})

    def val(self) -> ImageSet:
        return self.image_set

    train = discovery = images = val


def run(probe: Instances, dataset: Any, encoder: Encoder, folder: Path) -> dict[str, Record]:
    records = evaluate_probe(probe, dataset, ResultStore(folder), encoder, (1,))
    return {record.metric: record for record in records}


def load_per_image(folder: Path, metric: str = "map") -> list[float]:
    store = ResultStore(folder)
    (record,) = [record for record in store.records() if record.metric == metric]
    return np.asarray(store.load_per_image(record)).tolist()


def cosines_to(query: str, images: ImageSet, encoder: Encoder, side: int) -> dict[str, float]:
    """Return the cosine similarity between the query and every other image."""
    extractor = FeatureExtractor(encoder, layers=[1], facets=["cls_normed"])
    vectors = {}
    for sample in images:
        square = Image.fromarray(sample.image).resize((side, side), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)[None].float() / 255
        vector = extractor(pixels)[1]["cls_normed"][0].double().numpy()
        vectors[sample.image_id] = vector / np.sqrt((vector**2).sum())
    query_vector = vectors.pop(query)
    return {name: float(vector @ query_vector) for name, vector in vectors.items()}


def plain_scores(
    images: ImageSet, encoder: Encoder, side: int, hard_only: bool = False, top: int | None = None
) -> list[float]:
    """Compute the average precision of each query image with plain loops."""
    found = []
    for sample in images:
        if (target := sample.retrieval_target) is None:
            continue
        excluded = target.ignored | target.excluded_ids | (target.matches if hard_only else set())
        right = target.hard_matches if hard_only else target.matches | target.hard_matches
        cosines = cosines_to(sample.image_id, images, encoder, side)
        ranked = sorted(cosines.keys() - excluded, key=lambda name: -cosines[name])[:top]
        found.append(100 * float(area_by_fractions([i in right for i in ranked], len(right))))
    return found


def test_scores_of_queries_equal_those_computed_in_float64(toy, encoder, tmp_path):
    records = run(Instances(image_size=48), toy, encoder, tmp_path)

    percent = plain_scores(toy.val(), encoder, 48)
    assert load_per_image(tmp_path) == pytest.approx(percent, abs=1e-9)
    assert {*records} == {"map", "mp_at_1", "mp_at_5", "mp_at_10"}
    record = records["map"]
    assert record.value == pytest.approx(np.mean(percent))
    assert (record.num_images, record.details["database"], record.unit) == (4, 16, "%")
    assert record.details["queries_without_match"] == 0
    chance = 100 * expected_average_precision(15, 3)
    assert record.details["baseline"] == {"answer": "random ranking", "value": chance}


@pytest.mark.parametrize("top", [None, 4])
def test_landmarks_also_score_only_the_hard_matches(toy, encoder, tmp_path, top):
    images = toy.val()
    ids, targets = images.ids, {}
    for query, one in images.retrieval_targets.items():
        ignored, *easy = (ids[(ids.index(query) + n) % 16] for n in (5, 6, 7))
        targets[query] = replace(
            one,
            matches=one.matches | {*easy},
            ignored=frozenset({ignored}),
            excluded_ids=frozenset(ids[::4]),
        )
    dataset = SameImages(replace(images, retrieval_targets=targets))

    records = run(Instances("landmarks", image_size=48, top=top), dataset, encoder, tmp_path)

    for metric, hard_only in (("map_medium", False), ("map_hard", True)):
        percent = plain_scores(dataset.val(), encoder, 48, hard_only, top)
        assert load_per_image(tmp_path, metric) == pytest.approx(percent, abs=1e-9)
    assert records["map_hard"].details["database"] == 12
    assert len(records) == (8 if top is None else 4)


def test_copies_that_equal_their_originals_are_always_found(toy, encoder, tmp_path):
    probe = Instances("copies", "gem", 32, top=3, jpeg_qualities=[], crop_areas=[1.0])

    records = run(probe, toy, encoder, tmp_path)

    assert {name: record.value for name, record in records.items()} == {"map": 100, "mp_at_1": 100}
    assert records["map"].num_images == 16
    assert records["map"].details["by_copy"] == {"crop 1.0": 100}


def test_image_values_are_means_over_copies_of_the_image(toy, encoder, tmp_path):
    both = Instances("copies", image_size=32, top=5, jpeg_qualities=[5], crop_areas=[0.2])
    found = {}
    for name, changes in (
        ("both", {}), ("jpeg", {"crop_areas": []}), ("crop", {"jpeg_qualities": []}),
    ):  # fmt: skip
        records = run(replace(both, **changes), toy, encoder, tmp_path / name)
        found[name] = load_per_image(tmp_path / name), records["map"]

    mean = np.mean([found["jpeg"][0], found["crop"][0]], axis=0)
    assert found["both"][0] == pytest.approx(mean.tolist())
    by_copy = {"jpeg 5": found["jpeg"][1].value, "crop 0.2": found["crop"][1].value}
    assert found["both"][1].details["by_copy"] == pytest.approx(by_copy)
    assert by_copy["crop 0.2"] < by_copy["jpeg 5"]


def test_copies_have_the_size_of_their_image():
    image = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    image[10:30, 15:45] = 200

    crop, jpeg = crop_copy(image, 0.16), jpeg_copy(image, 5)

    assert crop.shape == jpeg.shape == image.shape
    assert (crop == 200).all()
    ramp = np.broadcast_to(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], image.shape)
    ends = crop_copy(ramp, 0.16)[0, [0, -1], 0].astype(int)
    # The crop shows the 24 central ones of 60 columns, whose brightness increases by 4.
    assert ends.tolist() == pytest.approx([4 * 18, 4 * 41], abs=4)
    assert 3 < np.abs(jpeg.astype(float) - image).mean() < 80


def test_in_class_folders_every_image_is_a_query(encoder, tmp_path):
    root = class_folders(tmp_path / "folders")
    single = root / "val/cat"
    for name in ("0.jpg", "1.jpg"):
        (single / name).unlink()

    records = run(Instances("class_folders", image_size=32), ClassFolders(root), encoder, tmp_path)

    record = records["map"]
    # The database has three dogs and a cat. The cat has no match.
    assert (record.num_images, record.details["queries_without_match"]) == (3, 1)
    assert record.details["queries"] == record.details["database"] == 4
    chance = 100 * expected_average_precision(3, 2)
    assert record.details["baseline"]["value"] == pytest.approx(chance)


def test_descriptors_equal_those_of_float64(encoder):
    generator = torch.Generator().manual_seed(0)
    features = {
        "cls_normed": torch.randn(2, 5, generator=generator),
        "token_normed": torch.randn(2, 3, 4, 5, generator=generator),
    }

    patches = features["token_normed"].double().numpy().reshape(2, 12, 5)
    powers = np.maximum(patches, 1e-6) ** 4
    gem = np.sqrt(np.sqrt(powers.sum(1) / 12))
    expected = {
        "cls": features["cls_normed"].numpy(),
        "patch_mean": patches.mean(1),
        "gem": gem,
        "cls_gem": np.concatenate([features["cls_normed"].numpy(), gem], 1),
    }
    for facet, vectors in expected.items():
        assert compute_descriptors(features, facet).numpy() == pytest.approx(vectors, rel=1e-5)


COPIES: dict[str, Any] = {"protocol": "copies", "facet": "cls", "crop_areas": [0.2]}


@pytest.mark.parametrize(
    "options", [{"image_size": 48}, {"max_side": 64}, {"image_size": 48, **COPIES}]
)
def test_descriptors_are_averaged_over_scales_for_each_view(toy, encoder, tmp_path, options):
    def encode(scales: list[float], batch_size: int = 16) -> Any:
        probe = Instances(scales=scales, batch_size=batch_size, **options)
        context = context_of(encoder, toy, (1,), tmp_path)
        return probe._encode(context, probe.scored_images(toy))[0][1, "cls"]

    scales = [1.0, 0.7071, 0.5]
    single, batched = (encode(scales, batch_size) for batch_size in (1, 16))
    parts = [encode([scale]) for scale in scales]

    torch.testing.assert_close(single, batched, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batched, sum(parts) / 3, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(parts[0], parts[2], atol=1e-3)


def test_sides_are_reduced_to_multiples_of_the_patch():
    for options, scale, size in (
        ({}, 1.0, (32, 32)),
        ({"image_size": 48}, 0.5, (24, 24)),
        ({"image_size": 48}, 0.01, (8, 8)),
        ({"max_side": 40}, 1.0, (24, 40)),
        # Smaller images are not enlarged.
        ({"max_side": 100}, 1.0, (32, 56)),
        ({"max_side": 100}, 0.5, (16, 24)),
        ({"max_side": 100, "image_size": 48}, 1.0, (48, 48)),
    ):
        assert Instances(**options)._input_size((39, 60, 3), scale, (32, 32), 8) == size


def test_a_published_dataset_gets_its_protocol(toy):
    names = {
        "roxford5k": ("landmarks", None, 512, None),
        "rparis6k-limit60": ("landmarks", None, 512, None),
        "copydays+snow-3": ("copydays", 320, None, 20),
        "holidays-421": ("holidays", None, None, None),
        "roxford5k_mine": ("holidays", None, None, None),
    }
    for name, expected in names.items():
        dataset = SameImages(toy.val(), name=name)
        probe = Instances().adapt_to_dataset(dataset, ())
        assert (probe.protocol, probe.image_size, probe.max_side, probe.top) == expected
        assert Instances().adapt_to_dataset(dataset, ("protocol",)) == Instances()
    probe = Instances(top=5).adapt_to_dataset(SameImages(toy.val(), name="copydays"), ("top",))
    assert (probe.top, probe.facet) == (5, "cls_gem")


def test_images_and_encoders_that_cannot_be_scored_are_refused(toy, encoder, tmp_path):
    images = toy.val()
    # A query does not match itself.
    for match in ("elsewhere", images.ids[0]):
        unmatched = replace(
            images, retrieval_targets={images.ids[0]: RetrievalTarget(frozenset({match}))}
        )
        with pytest.raises(DataError) as no_match:
            run(Instances(image_size=32), SameImages(unmatched), encoder, tmp_path)
        assert "data.limit=null" in no_match.value.hint
    with pytest.raises(ConfigurationError) as no_copy:
        Instances("copies", jpeg_qualities=[], crop_areas=[])
    assert no_copy.value.hint[0] == "probe.jpeg_qualities=[30,5]"
    for facet, hint in (("cls", "probe.facet=patch_mean"), ("cls_gem", "probe.facet=gem")):
        with pytest.raises(UnsupportedEncoderError) as no_cls:
            Instances(facet=facet).check_encoder(replace(encoder, num_prefix_tokens=0))
        assert no_cls.value.hint == (hint,)
    for scales in ([1.0, 0.5], [0.5]):
        with pytest.raises(UnsupportedEncoderError) as one_size:
            Instances(scales=scales).check_encoder(replace(encoder, dynamic_image_size=False))
        assert one_size.value.hint == ("probe.scales=[1.0]",)
    for options in ({"facet": "key"}, {"scales": []}, {"scales": [2.0]}, {"jpeg_qualities": [0]}):
        with pytest.raises(ConfigurationError):
            Instances(**options)


def test_queries_without_a_hard_match_leave_its_score_undefined(toy, encoder, tmp_path):
    images = toy.val()
    easy = {
        query: replace(one, hard_matches=frozenset())
        for query, one in images.retrieval_targets.items()
    }

    dataset = SameImages(replace(images, retrieval_targets=easy))
    records = run(Instances("landmarks", image_size=32), dataset, encoder, tmp_path)

    assert math.isnan(records["map_hard"].value)
    assert records["map_hard"].details["undefined"] == "no query has a hard match"
    assert records["map_medium"].value > 0


def test_the_first_image_of_a_copy_in_figures_is_its_nearest_original(toy, encoder, tmp_path):
    options = {"image_size": 32, "panels": 1, "jpeg_qualities": [95], "crop_areas": []}
    run(Instances("copies", **options), toy, encoder, tmp_path)

    (path,) = tmp_path.rglob("block01_cls/1-queries.png")
    figure = Image.open(path)
    left, top, *_ = json.loads(figure.info[TILES])[1]
    assert figure.getpixel((left + 4, top + 4)) == (40, 220, 60)


def test_figures_frame_right_and_wrong_images(toy, encoder, tmp_path):
    images = toy.val()
    query = images.ids[0]
    target = replace(images.retrieval_targets[query], ignored=frozenset(images.ids[4:8]))

    dataset = SameImages(replace(images, retrieval_targets={query: target}))
    run(Instances(image_size=32, panels=3), dataset, encoder, tmp_path)

    (path,) = tmp_path.rglob("block01_cls/3-queries.png")
    figure = Image.open(path)
    tiles = json.loads(figure.info[TILES])
    # An image with a height of 144 pixels has a frame of 5 pixels, which is not blurred.
    assert {height for *_, height in tiles} == {144 + 2 * 5}
    frames = [figure.getpixel((left + 4, top + 4)) for left, top, *_ in tiles]
    assert frames[0] == (0, 0, 0)
    assert len(frames) == 9
    cosines = cosines_to(query, images, encoder, 32)
    colours = dict.fromkeys(target.matches | target.hard_matches, (40, 220, 60))
    colours |= dict.fromkeys(target.ignored, (160, 160, 160))
    nearest = sorted(cosines, key=lambda name: -cosines[name])[:8]
    assert frames[1:] == [colours.get(name, (255, 70, 60)) for name in nearest]
