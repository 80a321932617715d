"""Test the command `ssl-bench models`."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.models import TIMM_PATTERNS
from ssl_bench.models import ViTConfig, build_vit, save_encoder
from ssl_bench.models.loading.hub import HUB_WEIGHTS
from ssl_bench.models.loading.load import list_addresses
from ssl_bench.system.files import file_sha256

CONFIG = ViTConfig(image_size=32, patch_size=8, dim=128, depth=2, num_heads=2, num_registers=3)
MODULE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Conv2d(4, 4, 1)

    def forward(self, maps):
        return maps + self.linear(maps)

def encoder():
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Sequential(Block(), Block()))
"""


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_encoder(tmp_path / "run/last.safetensors", build_vit(CONFIG, seed=0), {})
    return tmp_path / "run"


def run_models(capsys, *words: str, code: int = 0) -> str:
    assert main(["models", *words]) == code
    return capsys.readouterr().out


def test_the_list_names_every_address_layout_and_published_name(capsys):
    said = run_models(capsys)

    assert all(one.form in said and one.example in said for one in list_addresses())
    for layout in ("DINO, timm", "DINOv2", "MAE", "iBOT", "MoCo-v3", "transformers"):
        assert f"\n  {layout} " in said
    for names in HUB_WEIGHTS.values():
        assert all(name in said for name in names)
    listed = json.loads(run_models(capsys, "--json"))
    assert [one["form"] for one in listed["addresses"]] == [one.form for one in list_addresses()]
    assert listed["torchhub"].keys() == HUB_WEIGHTS.keys()
    assert all(timm.list_models(pattern) for pattern in TIMM_PATTERNS)


def test_a_checkpoint_of_ours_is_described(ours, capsys):
    said = run_models(capsys, str(ours))

    size = (ours / "last.safetensors").stat().st_size / 1e6
    for part in (
        f"safetensors, {size:.1f} MB", "ssl-bench", "2 blocks, width 128, 2 heads",
        "patches of 8 pixels, 1 [CLS], 3 registers", "32 x 32", "31 of 31 used",
        file_sha256(ours / "last.safetensors"),
    ):  # fmt: skip
        assert part in said
    # A block has 12 D^2 + 13 D parameters. The rest are patches, positions, tokens and the norm.
    per_block = 12 * 128**2 + 13 * 128
    rest = 3 * 8 * 8 * 128 + 128 + 17 * 128 + 128 + 3 * 128 + 2 * 128
    assert f"{2 * per_block + rest:,}" in said


def test_a_file_in_the_layout_of_dinov2_is_described(ours, tmp_path, capsys):
    weights = dict(build_vit(CONFIG, seed=0).state_dict())
    weights["register_tokens"] = weights.pop("reg_token")
    dinov2 = tmp_path / "dinov2.pth"
    torch.save({**weights, "mask_token": torch.zeros(1, 128)}, dinov2)

    first, second = json.loads(run_models(capsys, "--json", str(ours), str(dinov2)))

    expected = {"layout": "ssl-bench", "depth": 2, "width": 128, "registers": 3}
    assert {name: first[name] for name in expected} == expected
    assert (second["layout"], second["format"]) == ("DINOv2", "PyTorch zip")
    assert (second["used"], second["total"]) == (31, 32)
    assert second["ignored"].keys() == {"mask_token"}
    assert second["parameters"] == first["parameters"]
    assert second["sha256"] == file_sha256(dinov2)
    said = run_models(capsys, str(dinov2))
    assert "mask_token: token of masked patches" in said
    assert "https://github.com/facebookresearch/dinov2" in said


def test_each_bad_file_has_an_error_and_others_are_described(ours, tmp_path, capsys):
    (tmp_path / "empty.pth").touch()
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    bad = [str(tmp_path / name) for name in ("empty.pth", "x.safetensors", "absent.pth")]

    assert main(["models", *bad, str(ours)]) == 4

    out, err = capsys.readouterr()
    assert "2 blocks" in out
    assert all(name in line for name, line in zip(bad, err.splitlines(), strict=True))
    listed = json.loads(run_models(capsys, "--json", *bad, str(ours), code=4))
    assert ["error" in one for one in listed] == [True, True, True, False]
    # The exit code is that of the first error.
    assert main(["models", "a" * 999, bad[0]]) == 2


def test_unknown_properties_of_modules_and_random_weights_are_stated(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MODULE)

    said = run_models(capsys, f"{tmp_path / 'mine.py'}:encoder")

    assert "2 blocks, width 4, heads not known" in said
    assert "Python" in said
    assert "as the module initialised them" in said
    assert "queries, keys and values are unknown" in said
    assert "random" not in said
    said = run_models(capsys, "random:timm:test_convnext")
    assert "patches of 4 to 32 pixels, 0 [CLS], 0 registers" in said
    said = run_models(capsys, "timm:vit_tiny_patch16_224")
    assert re.search(r"file +none", said)
    assert "random" in said
