"""Values that a probe cannot take are refused, with its key, before anything is read."""

import pytest

from probes.conditioning.probe import Conditioning
from probes.correspondence import Correspondence
from probes.geometry.probe import Geometry
from probes.pca import PCA
from probes.tokencut.probe import TokenCut
from ssl_bench.errors import ConfigurationError
from tests.support.configured import configured


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (TokenCut, {"facet": "keys"}, "facet must be among key, .* got keys"),
        (TokenCut, {"facet": []}, "got none"),
        (TokenCut, {"facet": ["key", "cls"]}, "got cls"),
        (TokenCut, {"tau": 1.0}, "tau expects a number in"),
        (TokenCut, {"tau": -0.1, "method": "maskcut"}, r"tau must lie in \[0, 1\) for maskcut"),
        (TokenCut, {"eps": 0.0}, "eps expects a number in"),
        (TokenCut, {"panels": -1}, "panels expects"),
        (TokenCut, {"max_objects": 0}, "max_objects expects"),
        (TokenCut, {"protocol": "mine"}, "probe.protocol expects reference"),
        (TokenCut, {"longer_side": 0}, "probe.longer_side"),
        (TokenCut, {"method": "mine"}, "probe.method expects tokencut or lost or maskcut"),
        (PCA, {"protocol": "video"}, "probe.protocol"),
        (PCA, {"panels": 0}, "probe.panels"),
        (PCA, {"grid": "pdf"}, "probe.grid"),
        (PCA, {"background": "black"}, "probe.background"),
        (PCA, {"background": "first_component", "protocol": "dataset"}, "probe.background"),
        (Conditioning, {"protocol": "video"}, "probe.protocol"),
        (Conditioning, {"num_images": 0}, "probe.num_images"),
        (Conditioning, {"num_steps": 0}, "probe.num_steps"),
        (Conditioning, {"compare_to": "a"}, "probe.compare_to"),
        (Correspondence, {"alphas": []}, "probe.alphas"),
        (Correspondence, {"alphas": [0.1, 0.1]}, "probe.alphas must name each share once"),
        (Correspondence, {"alphas": [0.0]}, "probe.alphas"),
        (Correspondence, {"strength": 0.34}, "probe.strength"),
        (Correspondence, {"warp": "twist"}, "probe.warp"),
        (Correspondence, {"num_points": 0}, "probe.num_points"),
        (Correspondence, {"prediction": "best"}, "probe.prediction"),
        (Correspondence, {"temperature": 0.0}, "probe.temperature"),
        (Correspondence, {"facet": "tokens"}, "probe.facet"),
        (Correspondence, {"protocol": "davis"}, "probe.protocol"),
        (Geometry, {"facet": ["cls", "cls_patch_mean"]}, "must be among cls, patch_mean, attn_out"),
        (Geometry, {"alpha_ranks": [100, 11]}, r"alpha_ranks expects the smaller .* got \[100,11"),
        (Geometry, {"view_area": [0.5, 0.25]}, "view_area expects the smaller number first"),
        (Geometry, {"views": 1}, r"probe.views expects a whole number in \[2, 1000\]"),
        (Geometry, {"outlier_factor": 0}, "probe.outlier_factor expects a number"),
    ],
)
def test_a_value_that_a_probe_cannot_take_is_refused(kind, options, said):
    with pytest.raises(ConfigurationError, match=said):
        configured(kind, **options)
