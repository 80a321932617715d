"""`ssl-bench cost` on a device: measured and predicted side by side."""

import json
from functools import partial

import pytest
import torch

from ssl_bench.cli import cost
from ssl_bench.cli.__main__ import main
from ssl_bench.cost import this_machine
from ssl_bench.cost.counting import Count, Operation
from ssl_bench.cost.predicting import Predictor
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = ("cost.model.depth=1", "cost.model.dim=12", "cost.model.num_heads=2")
SMALL = {
    "pretrain_dino_soap": (
        "cost.batch_size=4", "cost.part=2", "cost.model.image_size=32", "cost.objective.out_dim=32",
        "cost.objective.hidden_dim=16", "cost.objective.bottleneck_dim=8",
    ),
    "segmentation_voc2012": (
        "cost.train_images=8", "cost.val_images=4", "cost.height=40", "cost.width=50",
        "cost.probe.image_size=32", "cost.classes=3",
    ),
    "retrieval_voc2012": (
        "cost.height=40", "cost.width=50", "cost.probe.image_size=32", "cost.classes=3",
        "cost.probe.memory_patches=50",
    ),
    "clustering_voc2012": (
        "cost.probe.image_size=32", "cost.probe.batch_size=2", "cost.classes=3",
    ),
    "tokencut_voc2007": ("cost.height=160", "cost.width=160"),
    "knn_imagenet": ("cost.train_images=500", "cost.val_images=10", "cost.model.image_size=32"),
    "classification_imagenet": (
        "cost.train_images=500", "cost.val_images=10", "cost.model.image_size=32", "cost.classes=3",
    ),
    "pca": (),
    "conditioning": ("cost.probe.image_size=32",),
}  # fmt: skip


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Not on a simulated device: rates of large matrices, and another device without values."""
    if is_simulated():
        some = Count({Operation("mm", 1e9, 1e6, "product", dtype=torch.float32): 1}, 1e6)
        monkeypatch.setattr(cost, "Predictor", partial(Predictor, counting=lambda _: some))
        for name, value in (("_SIDES", (64,)), ("_ROWS", 64), ("_COPIED", 2**21)):
            monkeypatch.setitem(getattr(this_machine, name), "cuda", value)


@pytest.mark.parametrize("work", SMALL)
def test_every_unit_is_measured_and_kept_beside_its_prediction(work, tmp_path, capsys):
    out = tmp_path / "devices"

    assert main(["cost", "--work", work, "--out", str(out), *MODEL, *SMALL[work]]) == 0
    (file,) = out.iterdir()
    content = json.loads(file.read_text())
    assert content["device"] == torch.cuda.get_device_name()
    (found,) = content["works"][work].values()
    assert all(unit["measured"] > 0 and unit["seconds"] > 0 for unit in found["units"])
    assert "(measured " in capsys.readouterr().out
