"""Demonstration encoders, and `demo:NAME`, which loads them."""

import json
from pathlib import Path

import pytest
import torch

from ssl_bench.errors import CheckpointError
from ssl_bench.models import ViTConfig, build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.models.loading import addresses as loading
from ssl_bench.models.loading.addresses import NAMES
from tests.benchmarks.evidence.rows import demo_of
from tests.benchmarks.generated import LEDGER, ROOT


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """Where demonstration encoders are looked for in this test."""
    monkeypatch.setattr(loading, "PACKAGE", tmp_path / "package")
    return tmp_path / "results" / "demo"


@pytest.mark.parametrize("ask", [load_encoder, identify_encoder])
@pytest.mark.parametrize("name", ["skip", "skipless"])
def test_an_encoder_that_is_not_there_is_refused_in_one_line(place, ask, name):
    with pytest.raises(CheckpointError, match=f"^demo:{name} does not come with") as raised:
        ask(f"demo:{name}")
    assert "\n" not in str(raised.value)


def test_other_names_are_refused_with_those_there_are(place):
    with pytest.raises(CheckpointError, match=r"expected demo:skip or demo:skipless, got 'demo:x'"):
        load_encoder("demo:x")


def test_what_lies_there_in_bfloat16_loads_as_an_encoder_of_its_name(place):
    model = build_vit(ViTConfig(image_size=16, patch_size=8, dim=64, depth=2, num_heads=1), seed=0)
    weights = {key: value.bfloat16().float() for key, value in model.state_dict().items()}
    place.mkdir(parents=True)
    metadata = {"mean": "[0.5, 0.5, 0.5]", "std": "[0.2, 0.2, 0.2]"}
    save_encoder(place / loading.file_name("skip"), model.to(torch.bfloat16), metadata)
    encoder = load_encoder("demo:skip")
    for key, value in encoder.module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[key]), key
    assert encoder.name == "demo_skip"
    assert encoder.mean == (0.5, 0.5, 0.5)
    assert identify_encoder("demo:skip").identity() == encoder.identity()
    assert load_encoder("random:demo:skip").sha256 != encoder.sha256


def test_an_installed_package_looks_inside_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "PACKAGE", tmp_path / "package")
    assert loading.demo_folder() == tmp_path / "results" / "demo"
    (tmp_path / "package" / "demo").mkdir(parents=True)
    assert loading.demo_folder() == tmp_path / "package" / "demo"


def test_those_that_come_with_this_suite_are_those_of_the_ledger():
    """What lies in results/demo is what the queue wrote last."""
    runs = json.loads((ROOT / LEDGER).read_text())
    known = {name: runs[demo_of(name)] for name in NAMES}
    files = {path.name for path in loading.demo_folder().glob("*.safetensors")}
    assert files == {loading.file_name(name) for name in known}
    for name, run in known.items():
        assert identify_encoder(f"demo:{name}").sha256 == run["sha256"]
