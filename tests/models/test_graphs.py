"""Test that `torch.compile` compiles every encoder into a single graph."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
# A separate process, because checks of tensor shapes must not be compiled.
_PROGRAM = """
from dataclasses import replace

import torch

from ssl_bench.models import ConvMixerConfig, ViTConfig, build_encoder, build_vit
from ssl_bench.models.orthogonal import cholesky_basis, newton_schulz_basis, phi_without_sync
from ssl_bench.models.graying import gray_by_cholesky

VIT = ViTConfig(image_size=16, patch_size=8, dim=8, depth=1, num_heads=2)
MIXER = ConvMixerConfig(image_size=16, patch_size=8, dim=8, depth=1, kernel_size=3)
SKIPLESS = dict(skip_attention=False, skip_mlp=False)
VITS = {
    "softmax": {},
    "linear, graying svd, registers": dict(attention="linear", graying="svd", num_registers=2),
    "osa_qr, no norm": dict(attention="osa_qr", norm="none", qkv_bias=False, **SKIPLESS),
    "graying dct, drop path": dict(graying="dct", drop_path=0.5, depth=2),
}
ENCODERS = {
    **{name: build_vit(replace(VIT, **changes), seed=0) for name, changes in VITS.items()},
    "conv mixer": build_encoder(MIXER, seed=0),
    "conv mixer, skipless": build_encoder(replace(MIXER, skip=False), seed=0),
}
for name, encoder in ENCODERS.items():
    torch._dynamo.reset()
    # At 24 pixels the position embeddings are resized, in the same way for all encoders.
    for size in (16, 24) if name == "softmax" else (24,):
        report = torch._dynamo.explain(encoder)(torch.randn(2, 3, size, size))
        print(f"{name}, {size} pixels: {report.graph_count} {report.graph_break_count}")

# Parts of orthogonal attention, and functions that replace decompositions on a GPU.
X = torch.randn(2, 9, 6, requires_grad=True)
FUNCTIONS = {
    "gray_by_cholesky": lambda: gray_by_cholesky(X, 0.7),
    "cholesky_basis": lambda: cholesky_basis(X),
    "newton_schulz_basis": lambda: newton_schulz_basis(X),
    "phi": lambda: phi_without_sync((X.mT @ X).tril(-1) - (X.mT @ X).triu(1)),
}
for name, function in FUNCTIONS.items():
    torch._dynamo.reset()
    report = torch._dynamo.explain(function)()
    print(f"{name}: {report.graph_count} {report.graph_break_count}")
"""


@pytest.mark.slow
def test_no_encoder_has_a_graph_break():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 11
    assert [line for line in lines if not line.endswith(": 1 0")] == []
