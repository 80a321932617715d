"""Test that clustering scores equal those of scikit-learn."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sklearn.metrics

from probes.clustering.agreement import (
    SCORES,
    accuracy,
    ami,
    ari,
    contingency_table,
    estimate_entropy,
    image_independent_baselines,
    image_intervals,
    interval_warnings,
    majority_classes,
    match_clusters,
    miou,
    nmi,
    purity,
)
from probes.clustering.probe import Clustering, fit_kmeans
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import Encoder
from ssl_bench.results import ResultStore
from ssl_bench.tables.entries import choose_main_metric
from tests.support.coloured_classes import build_constant_encoder, coloured_classes, run_probe, tiny
from tests.support.photographs import evaluate_probe

TABLE = np.array([[4, 0], [0, 3], [1, 2]])


def draw_labels(images=60, clusters=5, classes=4):
    """Return random cluster labels, class labels and their contingency table."""
    generator = np.random.default_rng(0)
    truth = generator.integers(classes, size=images)
    is_right, others = generator.random(images) < 0.6, generator.integers(clusters, size=images)
    guess = np.where(is_right, truth, others)
    return guess, truth, contingency_table(guess, truth, clusters, classes)


def test_tables_purity_and_assignments_equal_a_count_by_hand():
    clusters = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    classes = np.array([0, 0, 0, 0, 1, 1, 1, 0, 1, 1])
    assert contingency_table(clusters, classes, 3, 2).tolist() == TABLE.tolist()
    assert purity(TABLE) == pytest.approx(90)
    # Class 0 has most images in the first cluster, but 5 + 4 matched images are more than 6 + 0.
    assert match_clusters(np.array([[6, 5], [4, 0]])).tolist() == [1, 0]
    # The second and third clusters share a class, so the IoUs are 4/5 and 5/6. If each class has
    # one cluster only, 7 of 10 images are correct.
    shared = majority_classes(TABLE)
    assert shared.tolist() == [0, 1, 1]
    assert miou(TABLE, shared) == pytest.approx(100 * (4 / 5 + 5 / 6) / 2)
    assert accuracy(TABLE, shared) == pytest.approx(purity(TABLE))
    assert accuracy(TABLE, match_clusters(TABLE)) == pytest.approx(70)


def test_matched_ious_equal_a_count_by_hand():
    for table, expected in (
        # The IoUs are 4/5 and 3/5. The third cluster has no class. STEGO counts such a cluster as
        # a further class with an IoU of 0, which would give 46.7.
        (TABLE, 70),
        # A class without images has no IoU, although a cluster is matched with it.
        (np.pad(TABLE, ((0, 0), (0, 1))), 70),
        ([[6, 5], [4, 0]], 100 * (4 / 10 + 5 / 11) / 2),
        # If there are fewer clusters than classes, a class has no cluster.
        ([[3, 0, 1], [0, 2, 0]], 100 * (3 / 4 + 1 + 0) / 3),
    ):
        assert miou(np.array(table), match_clusters(np.array(table))) == pytest.approx(expected)


def test_a_batch_of_tables_has_the_scores_of_single_tables():
    tables = np.random.default_rng(0).integers(9, size=(7, 5, 3))
    tables[0, :, 1:] = 0

    for name, score in SCORES.items():
        expected = [score(table) for table in tables]
        np.testing.assert_allclose(score(tables), expected, atol=1e-9, err_msg=name)
    assert np.isnan(nmi(tables)[0])
    assert np.isnan(ami(tables)[0])


@pytest.mark.parametrize(
    ("images", "clusters", "classes"),
    [(10, 3, 2), (18, 18, 6), (60, 50, 50), (900, 20, 7), (5000, 3, 2), (100_000, 9, 5)],
)
def test_scores_equal_those_of_scikit_learn(images, clusters, classes):
    guess, truth, table = draw_labels(images, clusters, classes)
    adjusted = sklearn.metrics.adjusted_mutual_info_score(truth, guess, average_method="arithmetic")
    normalised = sklearn.metrics.normalized_mutual_info_score(truth, guess)
    assert ami(table) == pytest.approx(100 * adjusted, abs=1e-8)
    assert nmi(table) == pytest.approx(100 * normalised)
    assert ari(table) == pytest.approx(sklearn.metrics.adjusted_rand_score(truth, guess))


def test_random_clusters_of_the_same_sizes_are_the_baseline():
    _, truth, table = draw_labels()
    generator = np.random.default_rng(1)
    guess = np.repeat(np.arange(5), table.sum(1))
    shuffled = np.stack(
        [contingency_table(guess, generator.permutation(truth), 5, 4) for _ in range(2000)]
    )

    found = image_independent_baselines(table, list(SCORES))

    assert {one.answer for one in found.values()} == {"random clusters"}
    assert (found["ami"].value, found["ari"].value) == (0, 0)
    assert found["nmi"].value == pytest.approx(nmi(shuffled).mean(), abs=0.2)
    for name in ("purity", "miou_matched", "accuracy_matched", "miou_majority"):
        assert found[name].value == pytest.approx(SCORES[name](shuffled).mean(), abs=1.5), name
    # With a single class or a single cluster, only one table is possible.
    for one in (table[:, :1], table.sum(0, keepdims=True)):
        baseline = image_independent_baselines(one, ["purity"])["purity"]
        assert baseline.value == pytest.approx(purity(one))


def test_the_entropy_of_unseen_cells_equals_a_loop():
    for counts, share in (
        ([5, 3, 2, 2, 1, 1, 1, 0], 2 * 2 / (14 * 3 + 2 * 2)),
        # If no cell has a count of two, the number of such cells is estimated.
        ([5, 3, 1, 1], 2 / (9 * 1 + 2)),
    ):
        total, once = sum(counts), counts.count(1)
        seen = sum(x / total * sum(1 / k for k in range(x, total)) for x in counts if x)
        terms = ((1 - share) ** (r - total + 1) / r for r in range(total, 3000))
        expected = seen + once / total * sum(terms)
        assert estimate_entropy(np.array(counts)) == pytest.approx(expected, rel=1e-9)


def test_the_entropy_of_few_samples_is_nearly_unbiased():
    generator = np.random.default_rng(0)
    counts = np.stack([generator.multinomial(200, np.full(200, 1 / 200)) for _ in range(40)])
    assert estimate_entropy(counts).mean() == pytest.approx(np.log(200), abs=0.05)


@pytest.mark.parametrize("strength", [0.3, 0.95])
def test_nine_of_ten_intervals_contain_the_true_agreement(strength):
    share = strength * np.eye(10) / 10 + (1 - strength) / 100
    generator = np.random.default_rng(0)
    tables = [generator.multinomial(300, share.ravel()).reshape(10, 10) for _ in range(60)]

    found = [image_intervals(table) for table in tables]

    for name in ("ami", "ari"):
        truth = float(SCORES[name](np.rint(share * 10**12).astype(int)))
        ends = [one[name] or (0, 0) for one in found]
        assert sum(low <= truth <= high for low, high in ends) >= 54, name
    for table, one in zip(tables, found, strict=True):
        low, high = one["ami"] or (0, 0)
        assert low <= ami(table) <= high
        assert set(one) == {"ami", "ari"}
        low, high = one["ari"] or (0, 0)
        assert high - low < 0.3


def test_intervals_need_three_images_for_each_pair():
    assert image_intervals(draw_labels(images=59)[2]) == {}
    _, _, table = draw_labels(images=60)
    assert interval_warnings(table, 60) == []
    assert image_intervals(table)["ami"]
    # With 6 clusters and 5 classes, three images for each of 30 pairs are needed.
    _, _, table = draw_labels(images=89, clusters=6, classes=5)
    assert "89 images, expected at least 90 for 30 pairs" in interval_warnings(table, 89)[0]


def test_equal_partitions_are_perfect_and_one_class_has_no_agreement():
    same = np.diag([3, 4, 5])
    assert (nmi(same), ari(same), purity(same)) == (pytest.approx(100), pytest.approx(1), 100)
    assert ami(same) == pytest.approx(100)
    assert miou(same, match_clusters(same)) == 100
    assert ari(np.array([[1, 1], [1, 1]])) < 0
    together = np.array([[3, 4], [0, 0]])
    for score in (nmi, ami, ari):
        assert math.isnan(score(np.array([[3], [4]])))
        assert score(together) == pytest.approx(0)


@pytest.fixture
def colours(tmp_path):
    return ClassFolders(coloured_classes(tmp_path / "colours", train=1, val=3, noise=20))


def scores(dataset, encoder: Encoder | None = None, *, seed=0, **options):
    probe = Clustering(**{"facet": "patch_mean", "num_workers": 1, **options})
    found = run_probe(probe, dataset, encoder=encoder or tiny(), layers=(0, 1), seed=seed)
    return {metric: score for (layer, _, metric), score in found.items() if layer == 1}


def test_unit_vectors_of_colours_are_clustered_perfectly(colours, monkeypatch):
    clustered = []

    def spy(unit, *more):
        clustered.append(unit)
        return fit_kmeans(unit, *more)

    monkeypatch.setattr("probes.clustering.probe.fit_kmeans", spy)
    found = scores(colours)

    for metric in ("nmi", "ami", "purity", "miou_matched"):
        assert found[metric].value == pytest.approx(100)
    assert found["ari"].value == pytest.approx(1)
    baseline = found["purity"].details["baseline"]
    assert baseline["answer"] == "random clusters"
    assert 100 / 6 < baseline["value"] < 60
    assert found["ami"].ci95 is None
    details = found["nmi"].details
    assert (details["num_clusters"], details["constant_features"]) == (6, False)
    assert len(clustered) == 2
    np.testing.assert_allclose(np.linalg.norm(clustered, axis=-1), 1, atol=1e-6)


def test_more_clusters_than_classes_match_fewer_images(colours):
    found = scores(colours, clusters_per_class=[1, 2])

    assert found["purity_x2"].value == pytest.approx(100)
    assert found["miou_matched_x2"].value < 90
    assert found["nmi_x2"].value < 100
    assert found["nmi_x2"].details["num_clusters"] == 12
    assert {metric for metric, score in found.items() if score.unit != "%"} == {"ari", "ari_x2"}


def test_equal_features_are_flagged_and_have_no_agreement(colours):
    found = scores(colours, build_constant_encoder())

    assert found["nmi"].details["constant_features"]
    assert found["nmi"].details["empty_clusters"] == 5
    assert found["nmi"].value == pytest.approx(0)
    assert found["ari"].value == pytest.approx(0)


def test_agreement_below_chance_is_stored_and_leads_the_table(colours, tmp_path, capsys):
    store = ResultStore(tmp_path / "out")
    found = {
        r.metric: r for r in evaluate_probe(Clustering(num_workers=1), colours, store, tiny(), [1])
    }
    store.save(replace(found["ami"], value=-3.25, ci95=(-5.0, -1.0)))
    path = store.save(replace(found["nmi"], value=-3.25))

    assert main(["table", "--out", str(tmp_path / "out"), "--task", "clustering"]) == 0

    shown = capsys.readouterr()
    assert "-3.2" in shown.out
    assert path.name in shown.err
    metrics = [(metric, record.is_ranked) for metric, record in found.items()]
    assert choose_main_metric("clustering", metrics) == "ami"
    assert [r.unit for r in found.values()] == ["%", "%", "", "%", "%"]
    assert all(r.trained_on is None for r in found.values())


def test_the_seed_of_a_run_initialises_k_means(colours):
    one, same, other = (
        [s.value for s in scores(colours, seed=n, num_restarts=1, clusters_per_class=[2]).values()]
        for n in (1, 1, 3)
    )
    assert one == same != other


def test_the_clusters_with_the_lowest_inertia_are_kept():
    unit = np.random.default_rng(0).normal(size=(60, 3))
    once, often = (fit_kmeans(unit, 8, restarts, seed=0).inertia_ for restarts in (1, 20))
    assert often < once


def test_more_clusters_than_images_are_refused(colours):
    with pytest.raises(ConfigurationError, match="24 clusters, expected at most 18"):
        scores(colours, clusters_per_class=[1, 4])
