"""Options of probes without a meaning, each refused by the name of its key."""

from functools import partial

import pytest

from probes.classification import LinearClassification
from probes.clustering.probe import Clustering
from probes.knn import KNN
from probes.retrieval import Retrieval
from ssl_bench.errors import ConfigurationError
from tests.support.configured import configured
from tests.support.heads import classification, segmentation

NO_HOLDOUT = "probe.holdout must be 0 unless"
LBFGS, SGD = {"training": "lbfgs"}, {"training": "sgd"}
knn, retrieval = partial(configured, KNN), partial(configured, Retrieval)
linear, clustering = partial(configured, LinearClassification), partial(configured, Clustering)
BY_SHOTS = [
    ({"shots": []}, "probe.shots expects one value or more"),
    ({"shots": 0}, "probe.shots expects"),
    ({"shots": [1, 0]}, "probe.shots expects"),
    ({"draws": 0}, "probe.draws expects"),
    ({"shots": [1], "train_images": 9}, "probe.train_images must be null where probe.shots"),
]


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        *((kind, *case) for kind in (knn, linear) for case in BY_SHOTS),
        (knn, {"neighbours": []}, "probe.neighbours"),
        (knn, {"neighbours": [0]}, "probe.neighbours"),
        (knn, {"facet": "key"}, "probe.facet must be among cls, patch_mean"),
        (knn, {"temperature": 0.0}, "probe.temperature"),
        (knn, {"crop_share": 1.5}, "probe.crop_share"),
        (knn, {"protocol": "paper"}, "probe.protocol"),
        (clustering, {"clusters_per_class": []}, "clusters_per_class expects one value or more"),
        (retrieval, {"norm": "l2"}, "probe.norm"),
        (retrieval, {"crops": "scaled"}, "probe.crops"),
        (retrieval, {"neighbours": 0}, "probe.neighbours"),
        (retrieval, {"temperature": 0.0}, "probe.temperature"),
        (classification, {"c_values": []}, "probe.training.c_values expects one value or more"),
        (
            classification,
            {"c_values": [0.0, 1.0]},
            "training.c_values expects a list .* number in",
        ),
        (classification, SGD | {"learning_rates": []}, "training.learning_rates expects one"),
        (classification, SGD | {"epochs": 0}, "probe.training.epochs expects a whole number in"),
        (classification, {"layers_mode": "multi"}, "probe.layers_mode expects single or last4"),
        (classification, {"facet": "token"}, "probe.facet must be among cls, patch_mean, cls_p"),
        (classification, {"facet": []}, "probe.facet must be among"),
        (classification, {"holdout": 1.0}, "probe.holdout expects a number in"),
        (classification, {"crop_share": 0.0}, "probe.crop_share expects a number in"),
        (segmentation, {"norm": "batch"}, "probe.norm expects"),
        (segmentation, {"layers_mode": "all"}, "probe.layers_mode expects"),
        (segmentation, {"learning_rates": []}, "probe.training.learning_rates expects"),
        (segmentation, {"learning_rates": [0.1, -0.1]}, "probe.training.learning_rates expects"),
        (segmentation, {"epochs": 0}, "probe.training.epochs expects"),
        (segmentation, {"train_images": -1}, "probe.train_images expects"),
        (segmentation, {"views": 3}, "probe.views must be 1 or 2"),
        (segmentation, {"holdout": 1.0}, "probe.holdout expects"),
        (segmentation, {"crops": "some"}, "probe.crops expects"),
        (segmentation, {"factor": 0}, "probe.loss.factor expects"),
        (segmentation, {"optimizer": "adam"}, "probe.training.optimizer expects"),
        (segmentation, {"schedule": "poly"}, "probe.training.schedule expects"),
        (segmentation, {"score_size": 0}, "probe.inference.score_size expects"),
        (segmentation, {"crops": "resized"}, NO_HOLDOUT),
        (segmentation, {"inference": "slide"}, NO_HOLDOUT),
        (
            segmentation,
            LBFGS | {"refit": True, "holdout": 0.0},
            "training.refit must be false",
        ),
        (segmentation, LBFGS | {"max_iterations": 0}, "probe.training.max_iterations expects"),
    ],
)
def test_options_without_meaning_are_refused(kind, options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        kind(**options)
