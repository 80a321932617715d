"""Non-finite features are reported with their block, although they are checked late."""

import pytest
import torch

from ssl_bench.models import build_vit, save_encoder
from tests.device.runs import WALKS
from tests.support.faults import TINY, expect_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("walk", ["segmentation, fast", "retrieval", "pca", "tokencut, lost"])
def test_a_probe_stops_at_the_block(data, workdir, capsys, walk):
    model = build_vit(TINY, seed=0)
    torch.nn.init.constant_(model.get_parameter("blocks.1.mlp.fc2.weight"), 3e38)
    save_encoder(workdir / "encoder.safetensors", model, {})
    task, dataset, *arguments = WALKS[walk]
    # By default LOST uses keys, which are computed before the weights that are broken here.
    arguments += ["probe.facet=token"] if walk == "tokencut, lost" else []
    arguments += ["--data-root", str(data[dataset]), "--checkpoint", "encoder.safetensors"]

    message = expect_error(capsys, ["probe", "--task", task, "--dataset", dataset, *arguments], 4)

    assert "block 1 of encoder" in message
