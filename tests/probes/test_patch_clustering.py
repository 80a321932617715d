"""Test the patch clustering probe."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.cluster
import sklearn.metrics
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array

from probes.clustering.agreement import SCORES, ari, patch_intervals
from probes.clustering.probe import (
    METRICS,
    Clustering,
    PatchLabels,
    draw_patches,
    patch_contingency,
)
from probes.features.training_images import image_and_mask, resize_bilinear, resize_mask
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.features import FeatureExtractor
from ssl_bench.planning import plan_probes
from ssl_bench.request import probing_config
from tests.support.colours import ColourDataset, Counter, probe_context, tiny_encoder

QUICK: dict[str, Any] = {
    "protocol": "patches", "facet": "token", "image_size": 32, "batch_size": 4, "num_workers": 1,
    "num_restarts": 1,
}  # fmt: skip
IGNORE_INDEX = 255


def clustering(**changes: Any) -> Clustering:
    return Clustering(**{**QUICK, **changes})


def scores_of(tmp_path, dataset=None, encoder=None, seed=0, **changes: Any):
    context = probe_context(tmp_path, encoder, dataset, (3,), seed)
    return {score.metric: score for score in clustering(**changes).run(context)}


def cluster_pixels(context, layer):
    """Return the cluster and the true class of each labelled pixel."""
    extractor = FeatureExtractor(context.encoder, layers=(layer,))

    def unit(sample):
        pixels = resize_bilinear(image_and_mask(sample)[0], 32, 32)
        return F.normalize(extractor(pixels[None])[layer]["token"].flatten(0, 2), dim=1)

    train, val = context.dataset.train(), context.dataset.val()
    vectors = torch.cat([unit(train[n]).half().float() for n in range(len(train))])
    kmeans = sklearn.cluster.KMeans(4, n_init="auto", random_state=0).fit(vectors.numpy())
    guess, truth = [], []
    for number in range(len(val)):
        clusters = np.asarray(kmeans.predict(unit(val[number]).numpy()), np.uint8).reshape(4, 4)
        mask = val[number].mask
        enlarged = resize_mask(torch.from_numpy(clusters), *mask.shape).numpy()
        guess.append(enlarged[mask != IGNORE_INDEX])
        truth.append(mask[mask != IGNORE_INDEX])
    return np.concatenate(guess), np.concatenate(truth)


def best_of_all_matchings(guess, truth, clusters):
    """Find the best assignment of clusters to classes by trying all permutations."""
    best = (-1.0, 0.0)
    for names in itertools.permutations(range(clusters), 4):
        ious = []
        for kind in np.unique(truth):
            found, true = guess == names[kind], truth == kind
            ious.append((found & true).sum() / (found | true).sum())
        right = np.mean([names[kind] for kind in truth] == guess)
        best = max(best, (100 * right, 100 * np.mean(ious)))
    return best


def test_scores_equal_those_of_scikit_learn_on_single_pixels(tmp_path):
    context = probe_context(tmp_path, tiny_encoder(), layers=(1,))
    guess, truth = cluster_pixels(context, 1)

    scores = list(clustering().run(context))

    found = {s.metric: s.value for s in scores}
    assert {s.num_images for s in scores} == {7}
    assert {s.details["num_fit_patches"] for s in scores} == {18 * 16}
    table: Any = sklearn.metrics.cluster.contingency_matrix(truth, guess)
    accuracy, miou = best_of_all_matchings(guess, truth, 4)
    assert found == {
        "ami": pytest.approx(100 * sklearn.metrics.adjusted_mutual_info_score(truth, guess)),
        "nmi": pytest.approx(100 * sklearn.metrics.normalized_mutual_info_score(truth, guess)),
        "ari": pytest.approx(sklearn.metrics.adjusted_rand_score(truth, guess)),
        "purity": pytest.approx(100 * table.max(0).sum() / table.sum()),
        "miou_matched": pytest.approx(miou),
        "accuracy_matched": pytest.approx(accuracy),
    }


def test_all_metrics_need_one_pass_and_have_a_baseline(tmp_path):
    encoder, probe = tiny_encoder(), clustering(clusters_per_class=[1, 2])
    counter, context = Counter(encoder), probe_context(tmp_path, encoder)

    scores = list(probe.run(context))

    assert counter.images == 18 + 7
    assert set(counter.passes.values()) == {1}
    apart = replace(probe, memory_gib=1e-6).run(probe_context(tmp_path))
    assert [score.value for score in apart] == [score.value for score in scores]
    assert [(s.layer, s.facet, s.metric) for s in scores] == probe.list_score_keys(context.layers)
    by_metric = {s.metric: s for s in scores if s.layer == 3}
    assert by_metric["miou_majority_x2"].value >= by_metric["miou_matched_x2"].value
    assert by_metric["purity_x2"].value > 95
    assert by_metric["miou_matched"].details["iou_by_class"]["never"] is None
    for score in scores:
        assert score.ci95 is None or score.ci95[0] <= score.value <= score.ci95[1]
        assert score.details["baseline"]["answer"] in ("random clusters", "single cluster")
        assert score.details["num_clusters"] == (8 if "_x2" in score.metric else 4)
        json.dumps(score.details, allow_nan=False)


def test_the_seed_selects_patches_and_k_means_initialisations(tmp_path):
    counters, values = [], []
    for seed in (0, 0, 1):
        encoder = tiny_encoder()
        counters.append(Counter(encoder))
        scores = scores_of(tmp_path, encoder=encoder, seed=seed, fit_patches=5)
        assert counters[-1].images - 7 <= 5
        assert scores["nmi"].details["num_fit_patches"] == 5
        values.append({cell: s.value for cell, s in scores_of(tmp_path, seed=seed).items()})

    assert counters[0].passes == counters[1].passes != counters[2].passes
    assert values[0] == values[1] != values[2]
    patches = draw_patches(18 * 16, 5, 0)
    assert patches.unique().tolist() == patches.tolist()


def test_constant_features_are_flagged_and_score_as_the_baseline(tmp_path):
    encoder = tiny_encoder()
    with torch.no_grad():
        encoder.module.get_parameter("norm.weight").zero_()
        encoder.module.get_parameter("norm.bias").fill_(1)

    found = scores_of(tmp_path, encoder=encoder, facet="token_normed")

    for metric in METRICS:
        score = found[metric]
        assert score.details["constant_features"]
        assert score.details["empty_clusters"] == 3
        assert score.value == pytest.approx(score.details["baseline"]["value"])


def test_one_class_and_one_image_have_no_agreement_or_interval(tmp_path):
    one = ColourDataset(num_train=1, num_val=1, val_masks={0: 0})

    found = scores_of(tmp_path, one)

    assert math.isnan(found["nmi"].value)
    assert math.isnan(found["ari"].value)
    assert "baseline" not in found["nmi"].details
    assert found["purity"].value == 100
    assert {score.ci95 for score in found.values()} == {None}


@pytest.mark.parametrize(
    "changes",
    [{"clusters_per_class": [1, 73]}, {"fit_patches": 3}, {"image_size": 36}, {"facet": "cls"}],
)
def test_impossible_settings_are_refused(tmp_path, changes):
    with pytest.raises(ConfigurationError):
        scores_of(tmp_path, **changes)


def test_scored_images_without_labels_are_refused(tmp_path):
    with pytest.raises(DataError):
        scores_of(tmp_path, ColourDataset(val_masks=dict.fromkeys(range(7), IGNORE_INDEX)))


@pytest.mark.parametrize(
    ("dataset", "overrides", "protocol", "facet"),
    [
        ("voc2012", [], "patches", "token"),
        ("ade20k", ["probe.facet=key"], "patches", "key"),
        ("class_folders", [], "images", "cls"),
    ],
)
def test_the_dataset_determines_what_is_clustered(dataset, overrides, protocol, facet):
    (planned,) = plan_probes(["clustering"], [dataset], overrides, {dataset: "/nowhere"})

    probe: Any = planned.probe
    assert (probe.protocol, probe.facet) == (protocol, facet)
    assert probe.image_size == (512 if protocol == "patches" else None)
    # The plan of a printed or queued command has the same settings.
    config = probing_config(*planned.task_and_dataset, planned.overrides, planned.root)
    assert config["probe"]["protocol"] == protocol
    unused = {"patches": "crop_share", "images": "fit_patches"}[protocol]
    assert unused not in probe.settings()
    assert replace(probe, batch_size=9, memory_gib=1.0).settings() == probe.settings()
    assert replace(probe, num_restarts=5).settings() != probe.settings()
    with pytest.raises(DataError):
        plan_probes(["clustering"], ["voc2012"], ["probe.protocol=images"], {"voc2012": "/nowhere"})
    # Images with both masks and labels are clustered as a whole.
    assert type(probe).settings_for({"segmentation", "classification"}) == {}


@pytest.mark.parametrize("size", [(24, 40), (7, 33), (3, 2)])
def test_pixels_are_counted_at_the_size_of_the_mask(size):
    generator = np.random.default_rng(0)
    masks = generator.choice([0, 1, 2, IGNORE_INDEX], (2, *size)).astype(np.uint8)
    clusters = generator.integers(4, size=(2, 5, 6))
    labels = PatchLabels.concatenate([PatchLabels.from_mask(mask, 5, 6) for mask in masks], 5 * 6)

    table, by_image = patch_contingency(labels, clusters.reshape(2, -1), 4, 3)

    for row, mask, image in zip(by_image.toarray(), masks, clusters, strict=True):
        enlarged = resize_mask(torch.from_numpy(image).to(torch.uint8), *size).numpy()
        assert row.tolist() == [
            ((enlarged == k) & (mask == c)).sum() for k in range(4) for c in range(3)
        ]
    assert table.ravel().tolist() == by_image.toarray().sum(0).tolist()


def test_intervals_equal_a_loop_over_images_in_numpy():
    generator = np.random.default_rng(0)
    images = generator.integers(9, size=(60, 3, 2)) * (generator.random((60, 3, 2)) < 0.5)
    table = images.sum(0)

    found = patch_intervals(table, csr_array(images.reshape(60, -1)))

    assert patch_intervals(table, csr_array(images[1:].reshape(59, -1))) == {}
    # If all images are perfect, they do not show how scores vary.
    perfect = np.tile(np.diag([2, 3, 1]).ravel(), (60, 1))
    none = patch_intervals(perfect.sum(0).reshape(3, 3), csr_array(perfect))
    assert set(none.values()) == {None}
    assert set(found) == set(SCORES) - {"miou_majority"}
    for name, interval in found.items():
        score = SCORES[name]
        value = float(score(table))
        without = np.array([float(score(table - one)) for one in images])
        bias = 59 * (without.mean() - value)
        margin = scipy.stats.t.ppf(0.975, 59) * np.sqrt(59 * without.var())
        low, high = interval or (0, 0)
        lowest = -100 if name == "ami" else -1 if name == "ari" else 0
        assert low == pytest.approx(max(lowest, value - max(bias, 0) - margin), abs=1e-6), name
        assert high == pytest.approx(min(100, value - min(bias, 0) + margin), abs=1e-6), name


def test_pairs_of_very_many_pixels_are_counted_without_overflow():
    assert ari(np.diag([5_000_000_000, 5_000_000_000])) == pytest.approx(1)
    many = np.array([[6, 1], [2, 5]]) * 2_000_000_000
    total = many.sum()
    pairs = [sum(n * n for n in map(int, some)) for some in (many.flat, many.sum(1), many.sum(0))]
    chance = pairs[1] * pairs[2] / int(total) ** 2
    expected = (pairs[0] - chance) / ((pairs[1] + pairs[2]) / 2 - chance)
    assert ari(many) == pytest.approx(expected, abs=1e-8)
