"""Features of a device that are not finite are told with the block, though the host waits late."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from probes.pca import PCA, features_of
from probes.retrieval import Retrieval
from probes.tokencut.probe import TokenCut, find_in_batch
from ssl_bench.data.samples import Sample
from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from tests.support.colours import probe_context, quick_probe, tiny_encoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def broken():
    """An encoder whose third block gives infinities."""
    encoder = tiny_encoder()
    encoder.module.get_parameter("blocks.2.mlp.fc2.bias").data[5] = torch.inf
    return encoder


def test_a_training_set_stops_at_the_block(tmp_path, broken):
    context = replace(probe_context(tmp_path, broken, layers=(0, 3)), device=CUDA)
    with pytest.raises(CheckpointError, match=r"layer 3 of tiny .*not finite for train/"):
        list(quick_probe().run(context))


def test_memories_stop_at_the_block(tmp_path, broken):
    context = replace(probe_context(tmp_path, broken, layers=(1, 2)), device=CUDA)
    with pytest.raises(CheckpointError, match="layer 2 of tiny"):
        list(Retrieval(image_size=32, neighbours=5).run(context))


def test_maps_stop_at_the_block(tmp_path, broken):
    context = replace(probe_context(tmp_path, broken, layers=(0, 2)), device=CUDA)
    samples = [Sample("blue", np.zeros((32, 32, 3), np.uint8))]
    images = context.dataset.val()
    with pytest.raises(CheckpointError, match=r"layer 2 of tiny .* for blue"):
        features_of(PCA(image_size=32, panels=1), context, images, samples, (0, 2))


@pytest.mark.parametrize("method", ["tokencut", "lost"])
def test_object_discovery_stops_at_the_block(broken, method):
    probe = TokenCut(facet="token", method=method, panels=0)
    extractor = FeatureExtractor(broken, layers=[0, 3], facets=probe.facets, device=CUDA)
    pixels = np.random.default_rng(0).integers(0, 255, (80, 80, 3), dtype=np.uint8)
    with pytest.raises(CheckpointError, match=r"layer 3 of tiny .* for noise"):
        find_in_batch(probe, extractor, [Sample("noise", pixels)])
