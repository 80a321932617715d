"""Options of probes without a meaning, each refused by the name of its key.

That every number has a legal range is in tests/core/test_fields.py.
"""

from functools import partial

import pytest

from probes.classification import LinearClassification
from probes.clustering.probe import Clustering
from probes.conditioning.probe import Conditioning
from probes.correspondence import Correspondence
from probes.geometry import Geometry
from probes.knn import KNN
from probes.pca import PCA
from probes.retrieval import Retrieval
from probes.tokencut.probe import TokenCut
from ssl_bench.errors import ConfigurationError
from tests.support.configured import configured
from tests.support.heads import classification, segmentation

NO_HOLDOUT = "`probe.holdout=0.0`"
LBFGS, SGD = {"training": "lbfgs"}, {"training": "sgd"}
knn, retrieval = partial(configured, KNN), partial(configured, Retrieval)
linear, clustering = partial(configured, LinearClassification), partial(configured, Clustering)
tokencut, pca = partial(configured, TokenCut), partial(configured, PCA)
conditioning = partial(configured, Conditioning)
correspondence, geometry = partial(configured, Correspondence), partial(configured, Geometry)
BY_SHOTS = [
    ({"shots": []}, "probe.shots expects at least one value"),
    ({"shots": [1], "train_images": 9}, "probe.train_images must be null"),
]


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        *((kind, *case) for kind in (knn, linear) for case in BY_SHOTS),
        (knn, {"neighbours": []}, "probe.neighbours"),
        (knn, {"facet": "key"}, "probe.facet must be one of cls, patch_mean"),
        (knn, {"protocol": "paper"}, "probe.protocol"),
        (clustering, {"clusters_per_class": []}, "clusters_per_class expects at least one value"),
        (retrieval, {"norm": "l2"}, "probe.norm"),
        (retrieval, {"crops": "scaled"}, "probe.crops"),
        (retrieval, {"views": 3}, "probe.views=1"),
        (classification, {"c_values": []}, "probe.training.c_values expects at least one value"),
        (classification, SGD | {"learning_rates": []}, "learning_rates expects at least one"),
        (classification, {"layers_mode": "multi"}, "probe.layers_mode expects single or last4"),
        (classification, {"facet": "token"}, "probe.facet must be one of cls, patch_mean"),
        (classification, {"facet": []}, "probe.facet must be one of"),
        (segmentation, {"norm": "batch"}, "probe.norm expects"),
        (segmentation, {"layers_mode": "all"}, "probe.layers_mode expects"),
        (segmentation, {"learning_rates": []}, "probe.training.learning_rates expects"),
        (segmentation, {"views": 3}, "probe.views=1"),
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
            "probe.training.refit=false",
        ),
        (segmentation, LBFGS | {"max_iterations": 0}, "probe.training.max_iterations expects"),
        (tokencut, {"facet": "keys"}, "facet must be one of key, .* got keys"),
        (tokencut, {"facet": []}, "got none"),
        (tokencut, {"facet": ["key", "cls"]}, "got cls"),
        (tokencut, {"tau": 1.0}, "tau expects a number in"),
        (tokencut, {"tau": -0.1, "method": "maskcut"}, r"tau must lie in \[0, 1\) for maskcut"),
        (tokencut, {"eps": 0.0}, "eps expects a number in"),
        (tokencut, {"panels": -1}, "panels expects"),
        (tokencut, {"max_objects": 0}, "max_objects expects"),
        (tokencut, {"protocol": "mine"}, "probe.protocol expects reference"),
        (tokencut, {"longer_side": 0}, "probe.longer_side"),
        (tokencut, {"method": "mine"}, "probe.method expects tokencut or lost or maskcut"),
        (pca, {"protocol": "video"}, "probe.protocol"),
        (pca, {"panels": 0}, "probe.panels"),
        (pca, {"grid": "pdf"}, "probe.grid"),
        (pca, {"background": "black"}, "probe.background"),
        (pca, {"background": "first_component", "protocol": "dataset"}, "probe.background"),
        (conditioning, {"protocol": "video"}, "probe.protocol"),
        (conditioning, {"num_images": 0}, "probe.num_images"),
        (conditioning, {"num_steps": 0}, "probe.num_steps"),
        (conditioning, {"compare_to": "a"}, "probe.compare_to"),
        (correspondence, {"alphas": []}, "probe.alphas"),
        (correspondence, {"alphas": [0.1, 0.1]}, "probe.alphas"),
        (correspondence, {"alphas": [0.0]}, "probe.alphas"),
        (correspondence, {"strength": 0.34}, "probe.strength"),
        (correspondence, {"warp": "twist"}, "probe.warp"),
        (correspondence, {"num_points": 0}, "probe.num_points"),
        (correspondence, {"prediction": "best"}, "probe.prediction"),
        (correspondence, {"temperature": 0.0}, "probe.temperature"),
        (correspondence, {"facet": "tokens"}, "probe.facet"),
        (correspondence, {"protocol": "davis"}, "probe.protocol"),
        (geometry, {"facet": ["cls", "cls_patch_mean"]}, "must be one of cls, patch_mean"),
        (geometry, {"alpha_ranks": [100, 11]}, r"alpha_ranks expects the smaller .* got \[100,11"),
        (geometry, {"view_area": [0.5, 0.25]}, "view_area expects the smaller number first"),
        (geometry, {"views": 1}, r"probe.views expects a whole number in \[2, 1000\]"),
        (geometry, {"outlier_factor": 0}, "probe.outlier_factor expects a number"),
    ],
)
def test_options_without_meaning_are_refused(kind, options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        kind(**options)
