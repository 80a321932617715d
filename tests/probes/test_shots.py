"""Test probes that are trained with few images."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from probes.classification import LinearClassification
from probes.features.training_images import Shots, TrainingSplit
from probes.knn import KNN
from probes.top_k import average_over_draws
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import changed_settings
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Score
from ssl_bench.results.per_image import ImageCurve
from tests.support.coloured_classes import coloured_classes, run_probe, select_train_images
from tests.support.faults import class_folders, make_probe_args, records
from tests.support.heads import classification

QUICK: dict[str, Any] = {"crop_share": 1.0, "c_values": [1e-3, 0.1, 10.0], "num_workers": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return coloured_classes(tmp_path_factory.mktemp("colours"), noise=250)


def scores(probe: Any, dataset: Any, **changes: Any) -> dict[tuple[int, str, str], Score]:
    return run_probe(probe, dataset, layers=(1, 0), **changes)


def test_fewer_shots_are_a_subset_and_draws_and_seeds_differ(root):
    images = ClassFolders(root).train()
    shots, again, few, other = (
        Shots.draw(images, per_class=most, draws=3, seed=seed)
        for most, seed in ((4, 0), (4, 0), (2, 0), (4, 1))
    )

    def ids(shots: Shots, draw: int, count: int, skip: int = 0) -> list[int]:
        return [shots.indices[n] for n in shots.select(draw, count, skip=skip).tolist()]

    for draw in range(3):
        one, two, four = selected = [ids(shots, draw, count) for count in (1, 2, 4)]
        assert set(one) < set(two) < set(four)
        assert selected == [ids(again, draw, count) for count in (1, 2, 4)]
        assert two == ids(few, draw, 2)
        assert sorted(two + ids(shots, draw, 2, skip=2)) == four
        labels = [images.labels[index] for index in two]
        assert sorted(labels) == [n for n in range(6) for _ in range(2)]
    different = {tuple(ids(each, draw, 2)) for each in (shots, other) for draw in range(3)}
    assert len(different) == 6


def scores_by_draw(*num_correct: int) -> list[list[Score]]:
    return [
        [
            Score(3, "cls", "top1_k1", 10.0 * n, None, 10,
                  {"bank": 6, "n": n, "warnings": ["w", f"of {n}"], "train_seconds": n / 4},
                  np.arange(10) < n)
        ]
        for n in num_correct
    ]  # fmt: skip


def test_the_interval_is_a_t_interval_over_the_draws():
    (score,) = average_over_draws(scores_by_draw(4, 5, 6), 2)

    # The deviation is 10, so the margin is 10 / sqrt(3) times 4.3027, the t value for 2 degrees of
    # freedom.
    assert (score.metric, score.value) == ("top1_k1_2shot", pytest.approx(50))
    assert score.ci95 == pytest.approx((50 - 24.841, 50 + 24.841), abs=1e-3)
    assert score.details["value_by_draw"] == [40, 50, 60]
    assert (score.details["bank"], score.details["n_by_draw"]) == (6, [4, 5, 6])
    assert score.details["warnings"] == ["w", "of 4", "of 5", "of 6"]
    assert score.details["train_seconds"] == 3.75
    # The means of the images are 1 (four times), 2/3, 1/3 and 0 (four times). Their deviation is
    # 0.4779, and the t value for 9 degrees of freedom is 2.2622.
    assert score.details["ci95_over_images"] == pytest.approx((15.813, 84.187), abs=1e-3)
    assert score.per_image is not None
    assert score.per_image.tolist()[3:6] == [[True] * 3, [False, True, True], [False, False, True]]
    # A single draw and equal draws have no interval.
    for right in ((5,), (5, 5)):
        assert next(average_over_draws(scores_by_draw(*right), 1)).ci95 is None


def test_votes_of_shots_equal_votes_of_the_smaller_dataset(root):
    seed = 3
    probe = KNN(shots=[3, 1], draws=2, neighbours=[2, 10], facet=["cls", "patch_mean"])
    found = scores(probe, ClassFolders(root), seed=seed)
    shots = Shots.draw(ClassFolders(root).train(), per_class=3, draws=2, seed=seed)

    for count, neighbours in ((3, (2, 3)), (1, (1,))):
        expected = []
        for draw in range(2):
            indices = [shots.indices[n] for n in shots.select(draw, count).tolist()]
            single = KNN(neighbours=neighbours, facet=["cls", "patch_mean"])
            expected.append(scores(single, select_train_images(root, indices)))
        for cell in expected[0]:
            score = found[(*cell[:2], f"{cell[2]}_{count}shot")]
            assert score.details["value_by_draw"] == [one[cell].value for one in expected]
            assert score.details["bank"] == 6 * count
            assert score.value == pytest.approx(np.mean(score.details["value_by_draw"]))


def test_heads_of_shots_equal_heads_of_the_smaller_dataset(root):
    quick = {"training": "sgd", "learning_rates": [1e-3, 1.0], "epochs": 3, "crop_share": 1.0}
    probe = classification(**quick, shots=[1, 2], draws=2, facet="patch_mean")
    found = scores(probe, ClassFolders(root))
    shots = Shots.draw(ClassFolders(root).train(), per_class=4, draws=2, seed=0)

    for draw in range(2):
        fitted, held_out = (
            [shots.indices[n] for n in shots.select(draw, 2, skip=skip).tolist()] for skip in (0, 2)
        )
        single = classification(**quick, holdout=0.0, facet="patch_mean")
        scored_on_val = scores(single, select_train_images(root, fitted))
        dataset = select_train_images(root, fitted)
        images = ClassFolders(root).train().select("class_folders", held_out)
        object.__setattr__(dataset, "val", lambda images=images: images)
        scored_on_held_out = scores(single, dataset)
        for layer in (0, 1):
            details = found[layer, "patch_mean", "top1_holdout_2shot"].details
            on_val = scored_on_val[layer, "patch_mean", "top1_oracle"].details
            on_held_out = scored_on_held_out[layer, "patch_mean", "top1_oracle"].details
            rates = detail_of_draw(details, "top1_by_rate_held_out", draw)
            assert rates == on_held_out["top1_by_rate"]
            assert detail_of_draw(details, "top1_by_rate", draw) == on_val["top1_by_rate"]
            rate = detail_of_draw(details, "learning_rate", draw)
            assert rate == on_held_out["learning_rate"]
            assert (details["num_train_images"], details["num_held_out_images"]) == (12, 12)


def detail_of_draw(details: Any, name: str, draw: int) -> Any:
    return details[name] if name in details else details[f"{name}_by_draw"][draw]


def test_a_class_with_too_few_images_is_refused(root):
    images = select_train_images(root, [*range(23), *range(25, 30)])
    # With held-out images, each class needs twice as many images, because half of them select C.
    for probe in (KNN(shots=[1, 4]), classification(QUICK, shots=2)):
        with pytest.raises(DataError, match=r"class4 .* 3 images, expected at least 4") as error:
            scores(probe, images)
        assert error.value.hint == ("probe.shots={smaller}",)
    assert scores(KNN(shots=3, draws=1, neighbours=[1]), images)
    assert scores(classification(QUICK, shots=3, draws=1, holdout=0.0), images)


@pytest.mark.parametrize("kind", [KNN, LinearClassification])
def test_settings_do_not_depend_on_other_requested_shots(kind):
    one, both = kind(shots=2, draws=3), kind(shots=[5, 2, 2], draws=3)

    assert one.settings() == both.settings()
    # The name of the metric contains these settings, or they have no effect.
    omitted = {"shots", "neighbours", "holdout", "train_images"}
    assert one.settings().keys() == (kind().settings().keys() | {"draws"}) - omitted
    assert {"shots", "draws"}.isdisjoint(kind().settings())
    assert changed_settings(one) == {"draws": 3}
    assert set(one.list_score_keys([0])) < set(both.list_score_keys([0]))
    assert len(both.list_score_keys([0])) == len(set(both.list_score_keys([0])))


def test_images_are_paired_by_their_number_of_correct_draws():
    hits = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], bool)
    curve = ImageCurve("top1_k1_2shot", {0: hits, 1: ~hits})

    assert [curve.value(hits), curve.estimate(hits).value] == [37.5, 37.5]
    # The images have 100, 50, 0 and 0 %. The margin is 47.87 / 2 times 3.1824, the t value for 3
    # degrees of freedom.
    assert curve.estimate(~hits).ci95() == pytest.approx((0, 100))
    low, high = curve.estimate(hits).difference_ci95(curve.estimate(hits & False)) or (0, 0)
    assert (low, high) == pytest.approx((37.5 - 76.176, 100), abs=1e-2)
    assert curve.find_best_layer() == 1


def test_the_command_line_accepts_shots(workdir):
    class_folders(workdir / "classes")
    words = make_probe_args("knn", "class_folders", workdir / "classes", "probe.shots=[1,2]")
    assert main([*words, "probe.draws=2"]) == 0
    first = records()
    assert {r.metric for r in first} == {
        f"top{top}_{name}" for top in (1, 5) for name in ("k1_1shot", "k1_2shot", "k2_2shot")
    }
    assert all(math.isnan(r.value) for r in first if "top5" in r.metric)


def test_samples_of_the_training_images_depend_on_the_seed(root):
    images = ClassFolders(root).train()
    one, same, other = (
        TrainingSplit.draw(images, max_images=10, holdout=0.2, seed=seed) for seed in (0, 0, 1)
    )
    assert one == same
    assert one.indices != other.indices
    assert len(set(one.indices)) == 10
    assert len(one.held_out) == 2
    entries = one.train_view_indices(2).tolist()
    assert len(entries) == 16
    assert {entry // 2 for entry in entries} == set(range(10)) - one.held_out
    # Each of ten images is held out with a probability of 1/5: 100 of 500 times, with a deviation
    # of 9.
    ten = images.select("class_folders", list(range(10)))
    draw = partial(TrainingSplit.draw, ten, max_images=None, holdout=0.2)
    positions = [position for seed in range(500) for position in draw(seed=seed).held_out]
    assert np.bincount(positions).tolist() == pytest.approx([100] * 10, abs=5 * 9)
