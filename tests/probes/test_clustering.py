"""Clusters beside classes: counted by hand, as scikit-learn has it, and of coloured pictures."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sklearn.metrics
import torch

from probes.clustering.agreement import (
    SCORES,
    accuracy,
    ami,
    ari,
    contingency_table,
    estimate_entropy,
    few_images_warning,
    image_independent_baselines,
    image_intervals,
    majority_classes,
    match_clusters,
    miou,
    nmi,
    purity,
)
from probes.clustering.probe import Clustering, fit_kmeans
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError, UnfitEncoder
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import Encoder
from ssl_bench.report.panels import choose_main_metric
from ssl_bench.results import ResultStore
from tests.support.coloured_classes import coloured_classes, flat, scored, tiny

MET = np.array([[4, 0], [0, 3], [1, 2]])


def drawn(images=60, clusters=5, classes=4):
    generator = np.random.default_rng(0)
    truth = generator.integers(classes, size=images)
    guess = np.where(
        generator.random(images) < 0.6, truth, generator.integers(clusters, size=images)
    )
    return guess, truth, contingency_table(guess, truth, clusters, classes)


def test_meetings_purity_and_a_matching_counted_by_hand():
    clusters = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    classes = np.array([0, 0, 0, 0, 1, 1, 1, 0, 1, 1])
    assert contingency_table(clusters, classes, 3, 2).tolist() == MET.tolist()
    assert purity(MET) == pytest.approx(90)
    # The first cluster alone would take class 0; together 5 + 4 are more than 6 + 0.
    assert match_clusters(np.array([[6, 5], [4, 0]])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("met", "expected"),
    [
        # 4 of 5 and 3 of 5; the third cluster stands for no class, and is none of its own (STEGO
        # counts it as a further class of IoU 0, which comes to 46.7).
        (MET, 70),
        # A class that no image is of has no IoU, though a cluster is matched with it.
        (np.pad(MET, ((0, 0), (0, 1))), 70),
        ([[6, 5], [4, 0]], 100 * (4 / 10 + 5 / 11) / 2),
        # Fewer clusters than classes leave a class without.
        ([[3, 0, 1], [0, 2, 0]], 100 * (3 / 4 + 1 + 0) / 3),
    ],
)
def test_matched_ious_counted_by_hand(met, expected):
    assert miou(np.array(met), match_clusters(np.array(met))) == pytest.approx(expected)


def test_a_majority_shares_classes_and_all_of_it_counts():
    shared = majority_classes(MET)

    # The third cluster joins the second: 4 of 5 and 5 of 6; one to one 7 of 10 are right.
    assert shared.tolist() == [0, 1, 1]
    assert miou(MET, shared) == pytest.approx(100 * (4 / 5 + 5 / 6) / 2)
    assert accuracy(MET, shared) == pytest.approx(purity(MET))
    assert accuracy(MET, match_clusters(MET)) == pytest.approx(70)


def test_many_tables_at_once_are_scored_as_each_alone():
    generator = np.random.default_rng(0)
    mets = generator.integers(9, size=(7, 5, 3))
    mets[0, :, 1:] = 0

    for name, score in SCORES.items():
        together = score(mets)
        for number, met in enumerate(mets):
            np.testing.assert_allclose(together[number], score(met), atol=1e-9, err_msg=name)
    assert np.isnan(nmi(mets)[0])
    assert np.isnan(ami(mets)[0])


@pytest.mark.parametrize(
    ("images", "clusters", "classes"),
    [(10, 3, 2), (18, 18, 6), (60, 50, 50), (900, 20, 7), (5000, 3, 2), (100_000, 9, 5)],
)
def test_scores_are_those_of_scikit_learn(images, clusters, classes):
    guess, truth, met = drawn(images, clusters, classes)
    adjusted = sklearn.metrics.adjusted_mutual_info_score(truth, guess, average_method="arithmetic")
    normalised = sklearn.metrics.normalized_mutual_info_score(truth, guess)
    assert ami(met) == pytest.approx(100 * adjusted, abs=1e-8)
    assert nmi(met) == pytest.approx(100 * normalised)
    assert ari(met) == pytest.approx(sklearn.metrics.adjusted_rand_score(truth, guess))


def test_random_clusters_of_the_same_sizes_are_the_baseline():
    _, truth, met = drawn()
    generator = np.random.default_rng(1)
    guess = np.repeat(np.arange(5), met.sum(1))
    shuffled = [contingency_table(guess, generator.permutation(truth), 5, 4) for _ in range(4000)]

    found = image_independent_baselines(met, list(SCORES))

    assert {one.answer for one in found.values()} == {"random clusters"}
    assert (found["ami"].value, found["ari"].value) == (0, 0)
    assert found["nmi"].value == pytest.approx(nmi(np.stack(shuffled)).mean(), abs=0.2)
    for name in ("purity", "miou_matched", "accuracy_matched", "miou_majority"):
        expected = SCORES[name](np.stack(shuffled)).mean()
        assert found[name].value == pytest.approx(expected, abs=1.5), name
    # One class is in every cluster alone, and one cluster is what it is.
    assert image_independent_baselines(met[:, :1], ["purity"])["purity"].value == 100
    one = met.sum(0, keepdims=True)
    assert image_independent_baselines(one, ["purity"])["purity"].value == pytest.approx(
        purity(one)
    )


def test_entropy_of_cells_that_were_not_seen_is_that_of_a_loop():
    counts = np.array([5, 3, 2, 2, 1, 1, 1, 0])
    share = 2 * 2 / (14 * 3 + 2 * 2)
    seen = sum(x / 15 * sum(1 / k for k in range(x, 15)) for x in counts if x)
    unseen = 3 / 15 * sum((1 - share) ** (r - 14) / r for r in range(15, 3000))
    assert estimate_entropy(counts) == pytest.approx(seen + unseen, rel=1e-9)

    generator = np.random.default_rng(0)
    drawn = np.stack([generator.multinomial(200, np.full(200, 1 / 200)) for _ in range(40)])
    assert estimate_entropy(drawn).mean() == pytest.approx(np.log(200), abs=0.05)


@pytest.mark.parametrize("strength", [0.3, 0.95])
def test_nine_of_ten_intervals_hold_the_agreement_of_very_many_images(strength):
    share = strength * np.eye(10) / 10 + (1 - strength) / 100
    generator = np.random.default_rng(0)
    samples = [generator.multinomial(300, share.ravel()).reshape(10, 10) for _ in range(60)]

    found = [image_intervals(met) for met in samples]

    for name in ("ami", "ari"):
        truth = float(SCORES[name](np.rint(share * 10**12).astype(int)))
        ends = [one[name] or (0, 0) for one in found]
        assert sum(low <= truth <= high for low, high in ends) >= 54, name
    for met, one in zip(samples, found, strict=True):
        low, high = one["ami"] or (0, 0)
        assert low <= ami(met) <= high
        assert set(one) == {"ami", "ari"}


def test_too_few_images_for_their_pairs_have_no_interval_and_say_so():
    _, _, met = drawn(images=59)
    assert image_intervals(met) == {}
    _, _, met = drawn(images=60)
    assert few_images_warning(met, 60) == []
    assert image_intervals(met)["ami"]
    # A class and a cluster more: 3 for each of 30 pairs.
    _, _, met = drawn(images=89, clusters=6, classes=5)
    assert "89 images, expected at least 90 for 30 pairs" in few_images_warning(met, 89)[0]


def test_equal_partitions_are_perfect_and_one_class_says_nothing():
    same = np.diag([3, 4, 5])
    assert (nmi(same), ari(same), purity(same)) == (pytest.approx(100), pytest.approx(1), 100)
    assert ami(same) == pytest.approx(100)
    assert miou(same, match_clusters(same)) == 100
    assert ari(np.array([[1, 1], [1, 1]])) < 0
    one = np.array([[3], [4]])
    assert math.isnan(nmi(one))
    assert math.isnan(ami(one))
    assert math.isnan(ari(one))
    together = np.array([[3, 4], [0, 0]])
    assert (nmi(together), ami(together), ari(together)) == (pytest.approx(0),) * 3


@pytest.fixture
def colours(tmp_path):
    return ClassFolders(coloured_classes(tmp_path / "colours", train=1, val=3, noise=20))


def scores(dataset, encoder: Encoder | None = None, *, seed=0, **options):
    probe = Clustering(**{"facet": "patch_mean", "num_workers": 1, **options})
    return scored(probe, dataset, encoder=encoder or tiny(), layers=(0, 1), seed=seed)


def test_colours_come_out_of_features_that_have_them(colours):
    found = scores(colours)

    for layer in (0, 1):
        assert found[layer, "patch_mean", "nmi"].value == pytest.approx(100)
        assert found[layer, "patch_mean", "ari"].value == pytest.approx(1)
        assert found[layer, "patch_mean", "miou_matched"].value == pytest.approx(100)
        assert found[layer, "patch_mean", "ami"].value == pytest.approx(100)
        baseline = found[layer, "patch_mean", "purity"].details["baseline"]
        assert baseline["answer"] == "random clusters"
        assert 100 / 6 < baseline["value"] < 60
        assert found[layer, "patch_mean", "ami"].ci95 is None
    details = found[0, "patch_mean", "nmi"].details
    assert (details["num_clusters"], details["constant_features"]) == (6, False)


def test_more_clusters_than_classes_are_purer_and_match_fewer_images(colours):
    found = scores(colours, clusters_per_class=[1, 2])

    assert found[1, "patch_mean", "purity_x2"].value == pytest.approx(100)
    assert found[1, "patch_mean", "miou_matched_x2"].value < 90
    assert found[1, "patch_mean", "nmi_x2"].value < 100
    assert found[1, "patch_mean", "nmi_x2"].details["num_clusters"] == 12


def test_features_that_are_the_same_are_said_and_tell_nothing(colours):
    found = scores(colours, flat())

    assert found[1, "patch_mean", "nmi"].details["constant_features"]
    assert found[1, "patch_mean", "nmi"].details["empty_clusters"] == 5
    assert found[1, "patch_mean", "nmi"].value == pytest.approx(0)
    assert found[1, "patch_mean", "ari"].value == pytest.approx(0)


def test_every_cell_gets_a_record_and_the_seed_is_part_of_it(colours, tmp_path):
    probe, store = Clustering(num_restarts=1, num_workers=1), ResultStore(tmp_path / "out")
    encoder, cpu = tiny(), torch.device("cpu")

    def run(seed):
        evaluation = Evaluation(encoder, colours, probe, (0, 1), seed, cpu, torch.float32)
        return evaluation.run(store, say=lambda _: None)

    first, again, other = run(0), run(0), run(1)
    assert [r.metric for r in first] == 2 * ["ami", "nmi", "ari", "purity", "miou_matched"]
    assert [r.value for r in again] == [r.value for r in first]
    assert {r.digest for r in first}.isdisjoint(r.digest for r in other)
    assert [r.unit for r in first] == 2 * ["%", "%", "", "%", "%"]
    assert all(r.trained_on is None for r in first)


def test_agreement_below_chance_is_read_and_leads_the_table(colours, tmp_path, capsys):
    store, cpu = ResultStore(tmp_path / "out"), torch.device("cpu")
    encoder, probe = tiny(), Clustering(num_workers=1)
    evaluation = Evaluation(encoder, colours, probe, (1,), 0, cpu, torch.float32)
    found = {r.metric: r for r in evaluation.run(store, say=lambda _: None)}
    store.save(replace(found["ami"], value=-3.25, ci95=(-5.0, -1.0)))
    path = store.save(replace(found["nmi"], value=-3.25))

    assert main(["table", "--out", str(tmp_path / "out"), "--task", "clustering"]) == 0

    shown = capsys.readouterr()
    assert "-3.2" in shown.out
    assert path.name in shown.err
    assert choose_main_metric([(metric, r.is_ranked) for metric, r in found.items()]) == "ami"


def test_the_seed_of_a_run_is_that_of_its_k_means(colours):
    one, same, other = (
        [s.value for s in scores(colours, seed=n, num_restarts=1, clusters_per_class=[2]).values()]
        for n in (1, 1, 3)
    )
    assert one == same != other


def test_the_length_of_a_vector_makes_no_difference(colours, monkeypatch):
    seen = []

    def watched(unit, *more):
        seen.append(unit)
        return fit_kmeans(unit, *more)

    monkeypatch.setattr("probes.clustering.probe.fit_kmeans", watched)
    scores(colours)
    assert len(seen) == 2
    np.testing.assert_allclose(np.linalg.norm(seen, axis=-1), 1, atol=1e-6)


def test_what_cannot_be_clustered_is_refused(colours):
    with pytest.raises(ConfigurationError, match=r"24 clusters, expected at most 18"):
        scores(colours, clusters_per_class=[1, 4])
    with pytest.raises(UnfitEncoder, match=r"no \[CLS\] token"):
        Clustering().require_fitting(replace(tiny(), num_prefix_tokens=0))
