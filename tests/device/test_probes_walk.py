"""Every probe with every protocol on a device, by the command line, beside the CPU's records."""

import math
from pathlib import Path

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ConvMixerConfig, build_encoder, save_encoder
from ssl_bench.results import ResultStore
from tests.support.faults import data_of_every_role, encoder_file
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEGMENTATION = ("probe.image_size=32", "probe.training.epochs=2", "probe.training.batch_size=3")
RETRIEVAL = ("probe.image_size=32", "probe.neighbours=5")
HEADS = ("probe.training.batch_size=4", "probe.training.epochs=2")
WALKS = {
    "segmentation": ("segmentation", "voc2012", *SEGMENTATION),
    "segmentation, multi": ("segmentation", "voc2012", *SEGMENTATION, "probe.layers_mode=multi"),
    "segmentation, fast": ("segmentation", "voc2012", *SEGMENTATION, "probe.protocol=fast"),
    "segmentation, fast from disk": (
        "segmentation", "voc2012", *SEGMENTATION, "probe.protocol=fast", "probe.tier=disk",
        "probe.cache=cache",
    ),
    "segmentation, streamed": (
        "segmentation", "voc2012", *SEGMENTATION, "probe.tier=stream", "probe.cache=cache",
        "probe.keep_minutes=0.0",
    ),
    "segmentation, capi": (
        "segmentation", "voc2012", "probe.protocol=capi", "probe.image_size=32",
        "probe.training.batch_size=2", "probe.training.max_iterations=4",
        "probe.training.c_values=[0.01,1.0]",
        "probe.holdout=0.4", "probe.inference.score_size=32",
    ),
    "segmentation, cutting_the_skip": (
        "segmentation", "voc2012", *SEGMENTATION, "probe.protocol=cutting_the_skip",
    ),
    "segmentation, dinov2": ("segmentation", "voc2012", *SEGMENTATION, "probe.protocol=dinov2"),
    "segmentation, neco": ("segmentation", "voc2012", *SEGMENTATION, "probe.protocol=neco"),
    "segmentation, normed": ("segmentation", "voc2012", *SEGMENTATION, "probe.norm=final"),
    "tokencut": ("tokencut", "voc2012", "probe.facet=[key,token]"),
    "tokencut, weighted": ("tokencut", "voc2012", "probe.weighted=true", "probe.centred=true"),
    "tokencut, lost": ("tokencut", "voc2012", "probe.method=lost"),
    "tokencut, maskcut": ("tokencut", "voc2012", "probe.method=maskcut"),
    "discovery": ("discovery", "voc2012"),
    "discovery, lost": ("discovery", "voc2012", "probe.method=lost"),
    "pca": ("pca", "folder", "probe.image_size=32"),
    "correspondence": ("correspondence", "folder", "probe.facet=[token,key]"),
    "correspondence, soft": ("correspondence", "folder", "probe.prediction=soft"),
    "correspondence, spair": ("correspondence", "spair71k", "probe.protocol=spair"),
    "pca, dataset": ("pca", "folder", "probe.image_size=32", "probe.protocol=dataset"),
    "pca, foreground": (
        "pca", "folder", "probe.image_size=32", "probe.background=first_component",
    ),
    "conditioning": ("conditioning", "folder"),
    "geometry": ("geometry", "folder", "probe.views=2", "probe.facet=[cls,patch_mean,mlp_out]"),
    "knn": ("knn", "class_folders", "probe.neighbours=[1,2]", "probe.facet=[cls,patch_mean]"),
    "clustering": ("clustering", "class_folders", "probe.clusters_per_class=[1,2]"),
    "clustering, patches": (
        "clustering", "voc2012", "probe.image_size=32", "probe.facet=[token,key]",
    ),
    "classification": ("classification", "class_folders", "probe.training.c_values=[0.01,1.0]"),
    "knn, shots": ("knn", "class_folders", "probe.shots=[1,2]", "probe.draws=2"),
    "classification, attentive": (
        "classification", "class_folders", "probe.pool=attentive", "probe.pool.queries=4",
        "probe.pool.epochs=2",
    ),
    "classification, dino": ("classification", "class_folders", "probe.protocol=dino", *HEADS),
    "classification, dinov2": (
        "classification", "class_folders", "probe.protocol=dinov2", *HEADS,
    ),
    "retrieval": ("retrieval", "voc2012", *RETRIEVAL),
    "retrieval, hbird": ("retrieval", "voc2012", *RETRIEVAL, "probe.protocol=hbird"),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_of_every_role(tmp_path_factory.mktemp("walk"))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    return tmp_path


def scores(data, task, dataset, *more, device):
    """Probe all layers; values by cell."""
    words = ["probe", "--task", task, "--dataset", dataset, "--data-root", str(data[dataset])]
    words += ["--checkpoint", "encoder.safetensors", "--device", device, "--out", device]
    assert main([*words, *more]) == 0
    found = ResultStore(Path(device)).records()
    return {(r.layer, r.facet, r.metric): r.value for r in found}


@pytest.mark.parametrize("walk", WALKS)
def test_a_device_scores_what_the_cpu_does(data, walk):
    on_device, on_cpu = (scores(data, *WALKS[walk], device=device) for device in ("cuda", "cpu"))

    # Where rounding decides which centre is nearer, k-means goes another way on a real device.
    percent = 3.0 if walk == "clustering, patches" and not is_simulated() else 0.05
    assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=percent, nan_ok=True)
    assert on_cpu


@pytest.mark.parametrize("task", ["segmentation", "tokencut", "knn"])
def test_bfloat16_gives_scores_too(data, task):
    walk = WALKS["segmentation, fast" if task == "segmentation" else task]
    found = scores(data, *walk, "dtype=bfloat16", device="cuda")

    assert all(math.isfinite(value) for (*_, m), value in found.items() if "top5" not in m)


def test_a_conv_mixer_is_probed(data, place):
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    save_encoder(place / "encoder.safetensors", build_encoder(config, seed=0), {})

    assert scores(data, *WALKS["segmentation, fast"], device="cuda")


def test_the_doctor_finds_the_device(capsys):
    main(["doctor"])

    assert torch.cuda.get_device_name() in "".join(capsys.readouterr())
