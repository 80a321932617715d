"""The GPU kernel of the pixel loss. Triton's interpreter runs it on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from probes.heads.losses import corner_weights

triton = pytest.importorskip("triton", reason="Triton is installed on Linux only")

# Triton decides at import whether to interpret, so the interpreter needs its own process.
COMPARE = """
import torch
from probes.heads.losses import _sum_piece, corner_weights
from probes.heads.pixel_kernel import sum_with_kernel

generator = torch.Generator().manual_seed(0)
for side in (1, 3, 4, 14):
    padded = 3 * torch.randn(3, 5, 2, 4, 6, generator=generator)
    padded[1] *= 20
    counted = torch.rand(side**2, 2, 3, 5, generator=generator).round()
    weights = corner_weights(side)
    found = sum_with_kernel(padded, counted, weights)
    expected = _sum_piece(padded.double(), counted.double(), weights)
    for name, one, other in zip(("sum", "gradient"), found, expected):
        worst = ((one - other).abs().max() / other.abs().max()).item()
        print(f"{side} x {side} pixels, {name}: {worst:.1e}")
        assert worst < 5e-6
"""


def test_the_kernel_equals_the_plain_loss():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 8


@pytest.mark.parametrize(("cells", "pixels"), [(64, 16), (4, 256)])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_without_spilling_registers(capability, cells, pixels):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from probes.heads import pixel_kernel

    pointers = dict.fromkeys(("padded", "counted", "weights", "sums", "by_corner"), "*fp32")
    numbers = dict.fromkeys(("pixels", "classes", "images", "tall", "wide"), "i32")
    constants = {"cells_of_program": cells, "pixels_in_registers": pixels}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(pixel_kernel._kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert ".local" not in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("side", [4, 14])
def test_a_gpu_gives_the_loss_of_the_cpu(side):
    from probes.heads.losses import summed_logsumexp

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 21, 3, 9, 8, generator=generator)
    logits -= logits.amax(1, keepdim=True)
    counted = torch.rand(side**2, 3, 10, 9, generator=generator).round()
    assert len(counted) == len(corner_weights(side))
    found = summed_logsumexp(logits.cuda(), counted.cuda())
    for one, other in zip(found, summed_logsumexp(logits, counted), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
