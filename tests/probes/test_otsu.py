"""The protocol in which every image has a threshold of its own."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from skimage.filters import threshold_otsu

from probes.tokencut.cuts import Cut, PatchGrid, discover, lost, maskcut, otsu_threshold
from ssl_bench.cli.__main__ import main
from tests.support.faults import encoder_file, photo_folder, records

GRID = PatchGrid(96, 128, 8)
OBJECT = (slice(4, 8), slice(5, 11))
ADAPTIVE = Cut(tau="otsu")


def alike(seed: int = 0) -> torch.Tensor:
    """Patches all of which resemble each other, those of an object and of the rest still more."""
    generator = torch.Generator().manual_seed(seed)
    features = 0.05 * torch.randn(12, 16, 32, generator=generator)
    features[..., 0] += 1
    features[..., 1] += 0.4
    features[(*OBJECT, 1)] -= 0.8
    return features


def cosines(features: torch.Tensor) -> np.ndarray:
    unit = F.normalize(features.flatten(0, 1), dim=1)
    return (unit @ unit.T).numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_thresholds_are_those_of_skimage(seed, shift):
    generator = torch.Generator().manual_seed(seed)
    for tokens in torch.randn(3, 60, 8, generator=generator).abs().pow(2) + shift:
        found = otsu_threshold(tokens)

        unit = F.normalize(tokens, dim=1)
        pairs = (unit @ unit.T)[~torch.eye(60, dtype=torch.bool)].double().numpy()
        assert float(found) == pytest.approx(threshold_otsu(pairs, nbins=256), abs=1e-7)


def test_one_token_and_equal_tokens_have_a_threshold():
    assert otsu_threshold(torch.ones(1, 4)) == 0.0
    assert otsu_threshold(torch.ones(5, 4)).isfinite()


@pytest.mark.parametrize("find", [discover, lost, lambda *one: maskcut(*one)[0]])
def test_an_object_is_found_where_every_patch_is_linked(find):
    features = alike()
    assert cosines(features).min() > 0.2
    expected = torch.zeros(12, 16, dtype=torch.bool)
    expected[OBJECT] = True

    assert find(features, GRID, Cut()).degenerate
    found = find(features, GRID, ADAPTIVE)

    assert not found.degenerate
    assert (found.mask == expected.numpy()).all()


@pytest.fixture
def linked(tmp_path, monkeypatch):
    """An encoder all of whose patches resemble each other."""
    monkeypatch.chdir(tmp_path)
    path = encoder_file(tmp_path / "a.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights["pos_embed"] = torch.zeros_like(weights["pos_embed"])
    weights["patch_embed.proj.bias"] = torch.linspace(50, 90, len(weights["cls_token"].flatten()))
    safetensors.torch.save_file(weights, path, metadata)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
    return path


TOY = ["--dataset", "toy", "--layer", "0", "dataset.num_train=2", "dataset.num_val=3"]


@pytest.mark.parametrize("method", ["tokencut", "lost", "maskcut"])
def test_degenerate_blocks_are_explained_with_what_helps(linked, capsys, method):
    words = ["probe", "--task", "tokencut", "--checkpoint", str(linked), *TOY]
    words += ["probe.facet=token", f"probe.method={method}", "probe.panels=0"]
    assert main(words) == 0

    (line,) = [x for x in capsys.readouterr().err.splitlines() if "degenerate" in x]
    assert "token of block 0" in line
    assert "`probe.protocol=adaptive`" in line
    assert main([*words, "probe.protocol=adaptive"]) == 0
    by_protocol = {record.protocol: record for record in records()}
    assert by_protocol["reference"].settings["tau"] == 0.2
    assert by_protocol["adaptive"].settings["tau"] == "otsu"
    assert by_protocol["adaptive"].details["degenerate_percent"] < 50
    assert "probe.protocol" not in capsys.readouterr().err


def test_photographs_without_boxes_are_explained_too(linked, capsys, monkeypatch):
    monkeypatch.setattr("probes.tokencut.probe.TOKENS_PER_BATCH", 9)
    words = ["probe", "--task", "tokencut", "--checkpoint", str(linked), "--layer", "0"]
    words += ["--dataset", "folder", "--data-root", str(photo_folder(Path("photos")))]
    assert main([*words, "probe.facet=token"]) == 0

    said = capsys.readouterr().err
    assert "degenerate for token of block 0. " in said
    assert "`probe.max_side=640`" in said


def test_all_tasks_cut_in_both_protocols(linked, capsys):
    def protocols(*more: str) -> list[str]:
        words = ["--task", "all", "--checkpoint", str(linked), *TOY, *more]
        assert main(["sweep", *words, "--dry-run", "--json"]) == 0
        jobs = json.loads(capsys.readouterr().out)["jobs"]
        return [job["protocol"] for job in jobs if job["task"] == "tokencut"]

    assert protocols() == ["reference", "adaptive"]
    assert protocols("probe.method=lost") == ["reference", "adaptive"]
    assert protocols("probe.protocol=adaptive") == ["adaptive"]
    assert protocols("probe.tau=0.3") == ["reference"]
