"""Clusters beside classes: counted by hand, as scikit-learn has it, and of coloured pictures."""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch

from probes.clustering.agreement import (
    Matching,
    agreements,
    ari,
    meetings,
    nmi,
    purity,
    without_each,
)
from probes.clustering.probe import Clustering
from probes.clustering.run import ClusteringRun
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError, UnfitEncoder
from ssl_bench.evaluation import Evaluation, ProbeContext
from ssl_bench.models import (
    ConvMixerConfig,
    ViTConfig,
    build_encoder,
    build_vit,
    encoder_from_model,
)
from ssl_bench.results import ResultStore
from ssl_bench.system.progress import show_progress
from tests.support.coloured_classes import coloured_classes
from tests.support.configured import configured

MET = np.array([[4, 0], [0, 3], [1, 2]])


def drawn(images=60, clusters=5, classes=4):
    generator = np.random.default_rng(0)
    truth = generator.integers(classes, size=images)
    guess = np.where(
        generator.random(images) < 0.6, truth, generator.integers(clusters, size=images)
    )
    return guess, truth, meetings(guess, truth, clusters, classes)


def test_meetings_purity_and_matched_iou_counted_by_hand():
    clusters = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    classes = np.array([0, 0, 0, 0, 1, 1, 1, 0, 1, 1])
    assert meetings(clusters, classes, 3, 2).tolist() == MET.tolist()
    assert purity(MET) == pytest.approx(90)
    # 4 of 5 and 3 of 5; the third cluster stands for no class, and is none of its own.
    assert Matching.of(MET).miou(MET) == pytest.approx(70)
    # A class that no image is of has no IoU, though a cluster is matched with it.
    more = np.pad(MET, ((0, 0), (0, 1)))
    assert Matching.of(more).miou(more) == pytest.approx(70)


def test_a_majority_shares_classes_and_all_of_it_counts():
    majority = Matching.of_majority(MET)

    # The third cluster joins the second: 4 of 5 and 5 of 6; one to one 7 of 10 are right.
    assert majority.standing.tolist() == [0, 1, 1]
    assert majority.miou(MET) == pytest.approx(100 * (4 / 5 + 5 / 6) / 2)
    assert majority.accuracy(MET) == pytest.approx(purity(MET))
    assert Matching.of(MET).accuracy(MET) == pytest.approx(70)


def test_many_tables_at_once_are_scored_as_each_alone():
    generator = np.random.default_rng(0)
    mets = generator.integers(9, size=(7, 5, 3))
    mets[0, :, 1:] = 0

    together = agreements(mets)

    for number, met in enumerate(mets):
        for name, value in agreements(met).items():
            np.testing.assert_allclose(together[name][number], value, err_msg=name)
    assert np.isnan(together["nmi"][0])


def test_the_matching_takes_most_images_and_not_the_best_of_each():
    # The first cluster alone would take class 0; together 5 + 4 are more than 6 + 0.
    met = np.array([[6, 5], [4, 0]])
    matching = Matching.of(met)
    assert matching.standing.tolist() == [1, 0]
    assert matching.miou(met) == pytest.approx(100 * (4 / 10 + 5 / 11) / 2)


def test_fewer_clusters_than_classes_leave_a_class_without():
    met = np.array([[3, 0, 1], [0, 2, 0]])
    assert Matching.of(met).miou(met) == pytest.approx(100 * (3 / 4 + 1 + 0) / 3)


def test_scores_are_those_of_scikit_learn():
    guess, truth, met = drawn()
    assert nmi(met) == pytest.approx(
        100 * sklearn.metrics.normalized_mutual_info_score(truth, guess)
    )
    assert ari(met) == pytest.approx(sklearn.metrics.adjusted_rand_score(truth, guess))


def restated_stego(met):
    """Of more clusters than classes: those left over are a further class of IoU 0 in the mean."""
    matching = Matching.of(met)
    return matching.miou(met) * met.shape[1] / (met.shape[1] + 1)


def test_the_mean_with_a_further_class_is_that_of_stego():
    assert restated_stego(MET) == pytest.approx(46.7, abs=0.05)


def test_names_of_clusters_make_no_difference():
    _, _, met = drawn()
    other = met[np.random.default_rng(1).permutation(len(met))]
    for score in (nmi, ari, purity, lambda some: Matching.of(some).miou(some)):
        assert score(other) == pytest.approx(score(met))


def test_equal_partitions_are_perfect_and_one_class_says_nothing():
    same = np.diag([3, 4, 5])
    assert (nmi(same), ari(same), purity(same)) == (pytest.approx(100), pytest.approx(1), 100)
    assert Matching.of(same).miou(same) == 100
    assert ari(np.array([[1, 1], [1, 1]])) < 0
    one = np.array([[3], [4]])
    assert math.isnan(nmi(one))
    assert math.isnan(ari(one))
    together = np.array([[3, 4], [0, 0]])
    assert (nmi(together), ari(together)) == (pytest.approx(0), pytest.approx(0))


def test_a_score_without_an_image_is_that_of_the_others():
    guess, truth, met = drawn()
    others = np.arange(60) != 7
    fewer = meetings(guess[others], truth[others], *met.shape)
    for score in (nmi, ari, purity):
        assert without_each(met, guess, truth, score)[7] == pytest.approx(score(fewer))


@pytest.fixture
def colours(tmp_path):
    return ClassFolders(coloured_classes(tmp_path / "colours", train=1, val=3, noise=20))


def vit(**changes):
    config = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2, **changes)
    return build_vit(config, seed=0)


def run_of(dataset, model=None, *, seed=0, **options):
    context = ProbeContext(
        encoder=encoder_from_model(model or vit(), name="tiny"),
        dataset=dataset,
        layers=(0, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=seed,
        artifacts=dataset.root,
        progress=show_progress,
        say=lambda _: None,
    )
    options = {"facet": "patch_mean", "num_workers": 1} | options
    return ClusteringRun(Clustering(**options), context)


def scores(dataset, model=None, **options):
    return {(s.layer, s.facet, s.metric): s for s in run_of(dataset, model, **options).scores()}


def test_colours_come_out_of_features_that_have_them(colours):
    found = scores(colours)

    for layer in (0, 1):
        assert found[layer, "patch_mean", "nmi"].value == pytest.approx(100)
        assert found[layer, "patch_mean", "ari"].value == pytest.approx(1)
        assert found[layer, "patch_mean", "miou_matched"].value == pytest.approx(100)
        # Six classes of three images each, in one cluster.
        assert found[layer, "patch_mean", "purity"].details["baseline"] == {
            "answer": "one cluster", "value": pytest.approx(100 / 6),
        }  # fmt: skip
    details = found[0, "patch_mean", "nmi"].details
    assert (details["num_clusters"], details["constant_features"]) == (6, False)


def test_more_clusters_than_classes_are_purer_and_match_fewer_images(colours):
    found = scores(colours, clusters_per_class=[1, 2])

    assert found[1, "patch_mean", "purity_x2"].value == pytest.approx(100)
    assert found[1, "patch_mean", "miou_matched_x2"].value < 90
    assert found[1, "patch_mean", "nmi_x2"].value < 100
    assert found[1, "patch_mean", "nmi_x2"].details["num_clusters"] == 12


def test_features_that_are_the_same_are_said_and_tell_nothing(colours):
    model = vit()
    with torch.no_grad():
        model.get_parameter("norm.weight").zero_()
        model.get_parameter("norm.bias").fill_(1)
    found = scores(colours, model)

    assert found[1, "patch_mean", "nmi"].details["constant_features"]
    assert found[1, "patch_mean", "nmi"].details["empty_clusters"] == 5
    assert found[1, "patch_mean", "nmi"].value == pytest.approx(0)
    assert found[1, "patch_mean", "ari"].value == pytest.approx(0)


def test_every_cell_gets_a_record_and_the_seed_is_part_of_it(colours, tmp_path):
    probe, store = Clustering(num_restarts=1, num_workers=1), ResultStore(tmp_path / "out")
    encoder, cpu = encoder_from_model(vit(), name="tiny"), torch.device("cpu")

    def run(seed):
        evaluation = Evaluation(encoder, colours, probe, (0, 1), seed, cpu, torch.float32)
        return evaluation.run(store, say=lambda _: None)

    first, again, other = run(0), run(0), run(1)
    assert [r.metric for r in first] == 2 * ["nmi", "ari", "purity", "miou_matched"]
    assert [r.value for r in again] == [r.value for r in first]
    assert {r.digest for r in first}.isdisjoint(r.digest for r in other)
    assert [r.unit for r in first] == 2 * ["%", "", "%", "%"]
    assert all(r.trained_on is None for r in first)


def test_the_seed_decides_where_k_means_begins(colours):
    vectors = np.random.default_rng(0).normal(size=(80, 3))
    one, same, other = (
        run_of(colours, seed=seed, num_restarts=1)._clusters(vectors, 9) for seed in (0, 0, 1)
    )
    assert one.tolist() == same.tolist() != other.tolist()


def test_the_length_of_a_vector_makes_no_difference(colours, monkeypatch):
    seen = []
    whole = ClusteringRun._clusters
    monkeypatch.setattr(
        ClusteringRun, "_clusters", lambda run, unit, k: seen.append(unit) or whole(run, unit, k)
    )
    scores(colours)
    assert len(seen) == 2
    np.testing.assert_allclose(np.linalg.norm(seen, axis=-1), 1, atol=1e-6)


def test_settings_are_what_changes_a_number():
    assert (
        Clustering(batch_size=3, memory_gib=1.0, facet="cls").settings() == Clustering().settings()
    )
    assert Clustering(num_restarts=5).settings() != Clustering().settings()


def test_what_cannot_be_clustered_is_refused(colours):
    with pytest.raises(
        ConfigurationError, match=r"at most the 18 clusters .* got 24; ask for fewer"
    ):
        scores(colours, clusters_per_class=[1, 4])
    with pytest.raises(ConfigurationError, match="clusters_per_class expects one value or more"):
        configured(Clustering, clusters_per_class=[])
    mixer = ConvMixerConfig(image_size=16, patch_size=8, dim=12, depth=2, kernel_size=3)
    with pytest.raises(UnfitEncoder, match=r"take probe\.facet=patch_mean"):
        scores(colours, build_encoder(mixer, seed=0), facet="cls")
