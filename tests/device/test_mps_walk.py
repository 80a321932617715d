"""Everything on an MPS device, which has no float64: a stand-in without a Mac."""

from pathlib import Path

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from ssl_bench.system.device import in_float64
from tests.device.runs import OBJECTIVES, SMALL
from tests.support.faults import data_of_every_role, encoder_file, fails
from tests.support.simulated_mps import simulation

HEADS = ("probe.image_size=32", "probe.training.epochs=2", "probe.training.batch_size=3")
WALKS = {
    "segmentation": ("segmentation", "voc2012", *HEADS),
    "segmentation, fast": ("segmentation", "voc2012", *HEADS, "probe.protocol=fast"),
    "segmentation, capi": (
        "segmentation", "voc2012", "probe.protocol=capi", "probe.image_size=32",
        "probe.training.batch_size=2", "probe.training.max_iterations=4",
        "probe.training.c_values=[0.01,1.0]", "probe.holdout=0.4", "probe.inference.score_size=32",
    ),
    "segmentation, dinov2": ("segmentation", "voc2012", *HEADS, "probe.protocol=dinov2"),
    "tokencut": ("tokencut", "voc2012", "probe.facet=[key,mlp_hidden]"),
    "tokencut, lost": ("tokencut", "voc2012", "probe.method=lost"),
    "tokencut, maskcut": ("tokencut", "voc2012", "probe.method=maskcut"),
    "discovery": ("discovery", "voc2012"),
    "discovery, lost": ("discovery", "voc2012", "probe.method=lost"),
    "pca": ("pca", "folder", "probe.image_size=32"),
    "correspondence": ("correspondence", "folder", "probe.facet=[token,key]"),
    "correspondence, soft": ("correspondence", "folder", "probe.prediction=soft"),
    "correspondence, spair": ("correspondence", "spair71k", "probe.protocol=spair"),
    "conditioning": ("conditioning", "folder"),
    "geometry": ("geometry", "folder", "probe.views=2", "probe.facet=[cls,mlp_out]"),
    "conditioning, lanczos": (
        "conditioning", "folder", "probe.protocol=jacobian_lanczos", "probe.num_images=1",
        "probe.num_steps=8",
    ),
    "knn": ("knn", "class_folders", "probe.neighbours=[1,2]", "probe.facet=[cls,mlp_out]"),
    "clustering": ("clustering", "class_folders"),
    "clustering, patches": ("clustering", "voc2012", "probe.image_size=32"),
    "classification": ("classification", "class_folders", "probe.training.c_values=[0.01,1.0]"),
    "classification, attentive": (
        "classification", "class_folders", "probe.pool=attentive", "probe.pool.queries=4",
        "probe.pool.epochs=2",
    ),
    "classification, dino": (
        "classification", "class_folders", "probe.protocol=dino", "probe.training.batch_size=4",
        "probe.training.epochs=2",
    ),
    "retrieval": ("retrieval", "voc2012", "probe.image_size=32", "probe.neighbours=5"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    return tmp_path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_of_every_role(tmp_path_factory.mktemp("mps"))


def scores(data, task, dataset, *more, device):
    words = ["probe", "--task", task, "--dataset", dataset, "--data-root", str(data[dataset])]
    words += ["--checkpoint", "encoder.safetensors", "--device", device, "--out", device]
    assert main([*words, *more]) == 0
    return {(r.layer, r.facet, r.metric): r.value for r in ResultStore(Path(device)).records()}


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS)
def test_a_probe_scores_what_the_cpu_does(data, walk):
    on_cpu = scores(data, *WALKS[walk], device="cpu")
    with simulation():
        on_device = scores(data, *WALKS[walk], device="mps")

    assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=0.05, nan_ok=True)
    assert on_cpu


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_three_steps_of_pretraining_are_run(data, objective, optimizer):
    dataset = "class_folders" if objective == "supervised" else "folder"
    words = ["pretrain", "--data-root", str(data[dataset]), "--out", "run", "--device", "mps"]
    words += [f"objective={objective}", f"optimizer={optimizer}", *SMALL, *OBJECTIVES[objective]]
    with simulation():
        assert main(words) == 0
    assert Path("run/last.safetensors").is_file()


def test_the_stand_in_refuses_float64_and_mixed_devices():
    with simulation():
        here = torch.ones(3, device="mps")
        assert (here.device.type, (here + here).device.type, here.is_mps) == ("mps", "mps", True)
        for wrong in (
            lambda: here.double(),
            lambda: torch.zeros(3, dtype=torch.float64, device="mps"),
            lambda: torch.zeros(3, dtype=torch.float64).to("mps"),
            lambda: torch.tensor([1.0], dtype=torch.float64, device="mps"),
            lambda: here.sum(dtype=torch.float64),
            lambda: torch.nn.Linear(3, 3).to("mps").double(),
        ):
            with pytest.raises(TypeError, match="the MPS framework doesn't support float64"):
                wrong()
        with pytest.raises(RuntimeError, match="found mps:0 and cpu"):
            torch.add(here, torch.ones(3))


def test_float64_is_of_the_cpu_where_the_device_has_none():
    third = torch.tensor([1 / 3])
    with simulation():
        found = in_float64(third.to("mps"))
        assert (found.device.type, found.dtype) == ("cpu", torch.float64)
    assert torch.equal(in_float64(third), third.double())


def test_a_machine_without_the_device_says_so_in_a_line(data, capsys):
    words = ["probe", "--task", "pca", "--dataset", "folder", "--data-root", str(data["folder"])]
    words += ["--checkpoint", "encoder.safetensors", "--device", "mps"]
    assert "device mps is not usable here; try --device cpu" in fails(capsys, words, 5)
