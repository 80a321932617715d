"""Test the GPU kernel of the segmentation loss.

Without a GPU, Triton's interpreter runs the kernel on the CPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is installed on Linux only")

# Triton decides at import whether it interprets kernels, so the interpreter needs its own process.
COMPARE = """
import torch
from probes.heads import losses
from probes.heads.pixel_kernel import sum_with_kernel

generator = torch.Generator().manual_seed(0)
plain = losses._sum_piece
# Each piece has one head.
losses.PIECE_BYTES["cpu"] = 1
for side, images in ((1, 2), (3, 1), (4, 2), (14, 1)):
    logits = 3 * torch.randn(2, 5, images, 4, 6, generator=generator)
    logits[1] *= 20
    logits -= logits.amax(1, keepdim=True)
    pixel_weights = torch.rand(side**2, images, 5, 7, generator=generator).round()
    losses._sum_piece = plain
    expected = losses.summed_logsumexp(logits.double(), pixel_weights.double())
    losses._sum_piece = sum_with_kernel
    found = losses.summed_logsumexp(logits, pixel_weights)
    for name, one, other in zip(("sum", "gradient"), found, expected):
        for head in range(2):
            worst = ((one[head] - other[head]).abs().max() / other[head].abs().max()).item()
            print(f"{side} x {side} pixels, {name} of head {head}: {worst:.1e}")
            assert worst < 5e-6
"""


@pytest.mark.slow
def test_the_kernel_equals_the_plain_loss():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command, root = [sys.executable, "-c", COMPARE], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "cells", "pixels"), [(80, 1024, 1), (80, 4, 256), (90, 64, 16), (90, 1, 1024)]
)
def test_the_kernel_compiles_without_spilling_registers(capability, cells, pixels):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from probes.heads import pixel_kernel

    pointers = dict.fromkeys(("padded", "pixel_weights", "weights", "sums", "by_corner"), "*fp32")
    numbers = dict.fromkeys(("pixels", "classes", "images", "tall", "wide"), "i32")
    constants = {"cells_of_program": cells, "pixels_in_registers": pixels}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(pixel_kernel._kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "EXIT" in compiled.asm["sass"]
    # These instructions store and load registers that do not fit.
    assert not {"STL", "LDL"} & {*re.findall(r"[A-Z]+", compiled.asm["sass"])}


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_without_a_compiler_a_message_announces_the_plain_loss(monkeypatch, capsys, error):
    from probes.heads import losses, pixel_kernel

    def fail(*_: object) -> None:
        raise error("Failed to find C compiler.\nSpecify it by CC.")

    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
    monkeypatch.setattr(pixel_kernel, "sum_with_kernel", fail)
    assert losses._find_kernel.__wrapped__(torch.device("cuda")) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "(Failed to find C compiler.)" in line
    assert losses._find_kernel.__wrapped__(torch.device("cpu")) is None
    assert not capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("side", [4, 14])
def test_a_gpu_gives_the_loss_of_the_cpu(side):
    from probes.heads.losses import summed_logsumexp

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 21, 3, 9, 8, generator=generator)
    logits -= logits.amax(1, keepdim=True)
    pixel_weights = torch.rand(side**2, 3, 10, 9, generator=generator).round()
    found = summed_logsumexp(logits.cuda(), pixel_weights.cuda())
    for one, other in zip(found, summed_logsumexp(logits, pixel_weights), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
