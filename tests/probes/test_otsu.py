"""Test TokenCut with thresholds from Otsu's method."""

import json

import pytest
import torch
import torch.nn.functional as F
from skimage.filters import threshold_otsu

from probes.tokencut.cuts import (
    Cut,
    PatchGrid,
    discover,
    discover_with_lost,
    discover_with_maskcut,
    otsu_threshold,
)
from ssl_bench.cli.__main__ import main
from ssl_bench.models import build_vit, save_encoder
from tests.support.faults import TINY, records

GRID = PatchGrid(96, 128, 8)
OBJECT = (slice(4, 8), slice(5, 11))
ADAPTIVE = Cut(tau="otsu")


def similar_patches() -> torch.Tensor:
    """Return patch features that differ only slightly between object and background."""
    generator = torch.Generator().manual_seed(0)
    features = 0.05 * torch.randn(12, 16, 32, generator=generator)
    features[..., 0] += 1
    features[..., 1] += 0.4
    features[(*OBJECT, 1)] -= 0.8
    return features


def test_thresholds_equal_those_of_skimage():
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, 0.5, 3.0):
        for tokens in torch.randn(3, 60, 8, generator=generator).abs().pow(2) + shift:
            found = otsu_threshold(tokens)

            unit = F.normalize(tokens, dim=1)
            pairs = (unit @ unit.T)[~torch.eye(60, dtype=torch.bool)].double().numpy()
            assert float(found) == pytest.approx(threshold_otsu(pairs, nbins=256), abs=1e-7)
    assert otsu_threshold(torch.ones(1, 4)) == 0.0
    assert otsu_threshold(torch.ones(5, 4)).isfinite()


@pytest.mark.parametrize(
    "find", [discover, discover_with_lost, lambda *arguments: discover_with_maskcut(*arguments)[0]]
)
def test_an_object_is_found_although_all_patches_are_similar(find):
    features = similar_patches()
    unit = F.normalize(features.flatten(0, 1), dim=1)
    assert (unit @ unit.T).min() > 0.2
    expected = torch.zeros(12, 16, dtype=torch.bool)
    expected[OBJECT] = True

    assert find(features, GRID, Cut()).degenerate
    found = find(features, GRID, ADAPTIVE)

    assert not found.degenerate
    assert (found.mask == expected.numpy()).all()


@pytest.fixture
def similar_encoder(workdir):
    """Save an encoder that gives all patches similar features."""
    model = build_vit(TINY, seed=0)
    model.get_parameter("pos_embed").data.zero_()
    bias = model.get_parameter("patch_embed.proj.bias").data
    bias.copy_(torch.linspace(50, 90, len(bias)))
    save_encoder(workdir / "similar.safetensors", model, {})
    return ["--checkpoint", "similar.safetensors", "--layer", "0"]


TOY = ["--dataset", "toy", "dataset.num_train=2", "dataset.num_val=3"]
FOLDER = ["--dataset", "folder", "--data-root", "photos"]
ADVICE = "`probe.protocol=adaptive`"


@pytest.mark.parametrize(
    ("method", "data"), [("tokencut", TOY), ("lost", TOY), ("maskcut", TOY), ("tokencut", FOLDER)]
)
def test_degenerate_blocks_recommend_the_adaptive_protocol(similar_encoder, capsys, method, data):
    words = ["probe", "--task", "tokencut", *similar_encoder, *data]
    words += ["probe.facet=token", f"probe.method={method}", "probe.panels=0"]
    assert main(words) == 0

    (line,) = [x for x in capsys.readouterr().err.splitlines() if "degenerate for" in x]
    assert "token of block 0" in line
    assert ADVICE in line
    assert main([*words, "probe.protocol=adaptive"]) == 0
    by_protocol = {record.protocol: record for record in records()}
    assert by_protocol["reference"].settings["tau"] == 0.2
    assert by_protocol["adaptive"].settings["tau"] == "otsu"
    if data is TOY:
        assert by_protocol["adaptive"].details["degenerate_percent"] < 50
    assert ADVICE not in capsys.readouterr().err


def test_a_slow_graph_is_announced_with_a_smaller_size(similar_encoder, capsys, monkeypatch):
    monkeypatch.setattr("probes.tokencut.probe.TOKENS_PER_BATCH", 9)

    assert main(["probe", "--task", "tokencut", *similar_encoder, *FOLDER]) == 0

    assert capsys.readouterr().err.count("`probe.max_side=640`") == 1


@pytest.mark.parametrize(
    ("option", "protocols"),
    [
        ("probe.method=lost", ["reference", "adaptive"]),
        ("probe.protocol=adaptive", ["adaptive"]),
        ("probe.tau=0.3", ["reference"]),
    ],
)
def test_all_tasks_use_both_protocols_unless_one_is_chosen(
    similar_encoder, capsys, option, protocols
):
    assert (
        main(["sweep", "--task", "all", *similar_encoder, *TOY, option, "--dry-run", "--json"]) == 0
    )

    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["protocol"] for job in jobs if job["task"] == "tokencut"] == protocols
