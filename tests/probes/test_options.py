"""Test that probes refuse invalid settings."""

from functools import partial

import pytest

from probes.clustering.probe import Clustering
from probes.conditioning.probe import Conditioning
from probes.correspondence import Correspondence
from probes.geometry import Geometry
from probes.knn import KNN
from probes.pca import PCA
from probes.retrieval import Retrieval
from probes.tokencut.probe import TokenCut
from ssl_bench.errors import ConfigurationError
from tests.support.components import build_component
from tests.support.heads import classification, segmentation

SGD, REFIT = {"training": "sgd"}, {"training": "lbfgs", "refit": True, "holdout": 0.0}
FOREGROUND = {"background": "first_component", "protocol": "dataset"}
kinds = (KNN, Retrieval, Clustering, TokenCut, PCA, Conditioning, Correspondence, Geometry)
knn, retrieval, clustering, tokencut, pca, conditioning, correspondence, geometry = (
    partial(build_component, kind) for kind in kinds
)


@pytest.mark.parametrize(
    ("kind", "options", "key", "hint"),
    [
        (knn, {"neighbours": []}, "neighbours", ()),
        (knn, {"facet": "key"}, "facet", ()),
        (knn, {"shots": []}, "shots", ()),
        (knn, {"shots": [1], "train_images": 9}, "train_images", ()),
        (classification, {"shots": [1], "train_images": 9}, "train_images", ()),
        (classification, {"c_values": []}, "training.c_values", ()),
        (classification, SGD | {"learning_rates": []}, "training.learning_rates", ()),
        (classification, {"layers_mode": "multi"}, "layers_mode", ()),
        (classification, {"facet": []}, "facet", ()),
        (clustering, {"clusters_per_class": []}, "clusters_per_class", ()),
        (retrieval, {"crops": "scaled"}, "crops", ()),
        (retrieval, {"norm": "standardize"}, "norm", ()),
        (retrieval, {"views": 3}, "", ("probe.views=1", "or", "probe.views=2")),
        (segmentation, {"views": 3}, "", ("probe.views=1", "or", "probe.views=2")),
        (segmentation, {"factor": 0}, "loss.factor", ()),
        (segmentation, {"score_size": 0}, "inference.score_size", ()),
        (segmentation, {"crops": "resized"}, "holdout", ("probe.holdout=0.0", "or")),
        (segmentation, {"inference": "slide"}, "holdout", ("probe.holdout=0.0", "or")),
        (segmentation, REFIT, "training.refit", ("probe.training.refit=false", "or")),
        (tokencut, {"facet": ["key", "cls"]}, "facet", ()),
        (tokencut, {"tau": 1.0}, "tau", ()),
        (tokencut, {"tau": -0.1, "method": "maskcut"}, "tau", ()),
        (tokencut, {"eps": 0.0}, "eps", ()),
        (pca, {"panels": 0}, "panels", ()),
        (pca, FOREGROUND, "background", ("probe.background=keep",)),
        (conditioning, {"compare_to": "a"}, "compare_to", ("probe.protocol=checkpoints",)),
        (correspondence, {"alphas": []}, "alphas", ()),
        (correspondence, {"alphas": [0.1, 0.1]}, "alphas", ()),
        (correspondence, {"alphas": [0.0]}, "alphas", ()),
        (correspondence, {"strength": 0.34}, "strength", ()),
        (correspondence, {"num_points": 0}, "num_points", ()),
        (geometry, {"alpha_ranks": [100, 11]}, "alpha_ranks", ()),
        (geometry, {"view_area": [0.5, 0.25]}, "view_area", ()),
        (geometry, {"views": 1}, "views", ()),
        (geometry, {"outlier_factor": 0}, "outlier_factor", ()),
    ],
)
def test_impossible_settings_are_refused(kind, options, key, hint):
    with pytest.raises(ConfigurationError) as caught:
        kind(**options)

    assert f"probe.{key}" in str(caught.value) or not key
    assert (caught.value.hint or ())[: len(hint)] == hint
