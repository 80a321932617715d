"""`torch.compile` makes one graph of every encoder of the suite."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
# In a process of its own: checks of shapes are no part of the program that is compiled.
_PROGRAM = """
import sys
from dataclasses import replace

import torch

from ssl_bench.models import ConvMixerConfig, ViTConfig, build_encoder, build_vit
from ssl_bench.models.orthogonal import phi_without_sync
from ssl_bench.models.orthogonal import cholesky_basis
from ssl_bench.models.graying import gray_by_cholesky

VIT = ViTConfig(image_size=16, patch_size=8, dim=8, depth=1, num_heads=2)
MIXER = ConvMixerConfig(image_size=16, patch_size=8, dim=8, depth=1, kernel_size=3)
SKIPLESS = dict(skip_attention=False, skip_mlp=False)
ENCODERS = {
    "softmax": lambda: build_vit(VIT, seed=0),
    **{
        name: lambda changes=changes: build_vit(replace(VIT, **changes), seed=0)
        for name, changes in {
            "linear": dict(attention="linear"),
            "osa_qr": dict(attention="osa_qr", qkv_bias=False),
            "osa_newton_schulz": dict(attention="osa_newton_schulz", qkv_bias=False),
            "graying svd": dict(graying="svd"),
            "graying dct, skipless": dict(graying="dct", **SKIPLESS),
            "skipless without norm": dict(norm="none", **SKIPLESS),
            "drop path, registers": dict(drop_path=0.5, depth=2, num_registers=2),
        }.items()
    },
    "conv mixer": lambda: build_encoder(MIXER, seed=0),
    "conv mixer, skipless": lambda: build_encoder(replace(MIXER, skip=False), seed=0),
}
for name, make in ENCODERS.items():
    torch._dynamo.reset()
    # Of another size than the positions, which are resized then: the same for all.
    for size in (16, 24) if name in ("softmax", "graying svd", "conv mixer") else (24,):
        found = torch._dynamo.explain(make())(torch.randn(2, 3, size, size))
        print(f"{name}, {size} pixels: {found.graph_count} {found.graph_break_count}")

# What runs on a GPU in the place of decompositions.
X = torch.randn(2, 9, 6, requires_grad=True)
FUNCTIONS = {
    "gray_by_cholesky": lambda: gray_by_cholesky(X, 0.7),
    "basis": lambda: cholesky_basis(X),
    "phi": lambda: phi_without_sync((X.mT @ X).tril(-1) - (X.mT @ X).triu(1)),
}
for name, function in FUNCTIONS.items():
    torch._dynamo.reset()
    found = torch._dynamo.explain(function)()
    print(f"{name}: {found.graph_count} {found.graph_break_count}")
"""


@pytest.mark.slow
def test_no_encoder_breaks_its_graph():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 16
    assert [line for line in lines if not line.endswith(": 1 0")] == []
