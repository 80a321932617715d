"""Products in bfloat16, and what stands for them where a processor has none."""

import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_bench.models import ViTConfig, build_vit
from ssl_bench.system.device import RoundedProducts, autocast, computed_in

CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(params=["has bfloat16", "has none"])
def processor(request, monkeypatch):
    """Torch's name of a processor; the products are this machine's in both cases."""
    name = {"has bfloat16": "AVX512", "has none": "AVX2"}[request.param]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)
    return name


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_factors_and_result_are_rounded_by_hand(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    # bfloat16 has 8 binary digits: 1 + 2^-9 becomes 1, 1 + 2^-7 stays.
    left = torch.tensor([[1 + 2**-9, 1 + 2**-7]])
    right = torch.tensor([[1.0], [1 + 2**-7]])
    with autocast(CPU, BFLOAT16):
        product = left @ right
    # 1 + (1 + 2^-7)^2 = 2 + 2^-6 + 2^-14, of which the last does not fit.
    assert product.dtype == BFLOAT16
    assert product.item() == 2 + 2**-6


def attention(tokens):
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


class Multiplied(TorchDispatchMode):
    """Collects in what precision matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(part in func.name() for part in ("mm", "conv", "attention", "linear")):
            self.found.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


PRODUCTS = {
    "linear": lambda: F.linear(numbers(5, 64), numbers(3, 64), numbers(3)),
    "conv2d": lambda: F.conv2d(numbers(2, 3, 8, 8), numbers(4, 3, 2, 2), numbers(4)),
    "matmul": lambda: numbers(4, 64) @ numbers(64, 5),
    "mm": lambda: torch.mm(numbers(4, 64), numbers(64, 5)),
    "bmm": lambda: torch.bmm(numbers(2, 4, 64), numbers(2, 64, 5)),
    "addmm": lambda: torch.addmm(numbers(5), numbers(4, 64), numbers(64, 5)),
    "baddbmm": lambda: torch.baddbmm(numbers(5), numbers(2, 4, 64), numbers(2, 64, 5)),
    "einsum": lambda: torch.einsum("ij,kj->ik", numbers(4, 64), numbers(5, 64)),
    "attention": lambda: attention(numbers(2, 2, 9, 32)),
    "float64": lambda: numbers(4, 64).double() @ numbers(64, 5).double(),
    "whole numbers": lambda: torch.arange(4)[None] @ torch.arange(4)[:, None],
    "sum": lambda: numbers(4, 64) + numbers(4, 64),
}
OTHERS = ("float64", "whole numbers", "sum")
"""That autocast leaves as they are."""


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_is_that_of_torch_but_for_the_order_of_sums(product):
    with torch.autocast("cpu", BFLOAT16):
        plain = PRODUCTS[product]()
        with RoundedProducts():
            ours = PRODUCTS[product]()
    assert ours.dtype == plain.dtype
    # Half a step of bfloat16 at the largest entry, where a sum falls between two numbers.
    assert (ours - plain).abs().max() <= 2**-7 * plain.abs().max()


@pytest.mark.parametrize("product", [name for name in PRODUCTS if name not in OTHERS])
def test_no_processor_multiplies_what_it_has_no_instructions_for(product, processor):
    with autocast(CPU, BFLOAT16), Multiplied() as multiplied:
        PRODUCTS[product]()
    assert multiplied.found == {computed_in(CPU, BFLOAT16)}


def gradients(*contexts):
    """Of a small encoder whose forward pass has these contexts, one after the other."""
    config = ViTConfig(image_size=16, patch_size=8, dim=64, depth=3, num_heads=2)
    module, images = build_vit(config, seed=0), numbers(4, 3, 16, 16)
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        output = module(images)
    output.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_gradients_of_an_encoder_are_those_of_torch():
    plain = gradients(torch.autocast("cpu", BFLOAT16))
    ours = gradients(torch.autocast("cpu", BFLOAT16), RoundedProducts())
    assert ours.isfinite().all()
    # Nearer than what is not rounded: the order of sums alone is left.
    assert (ours - plain).norm() < 0.5 * (gradients() - plain).norm()
    assert (ours - plain).norm() < 0.02 * plain.norm()


def test_float32_switches_off_what_is_around_it(processor):
    with torch.autocast("cpu", BFLOAT16), autocast(CPU, torch.float32):
        assert (numbers(4, 64) @ numbers(64, 5)).dtype == torch.float32


def test_nothing_is_rounded_where_autocast_is_switched_off(processor):
    with autocast(CPU, BFLOAT16), torch.autocast("cpu", enabled=False):
        product = numbers(4, 64) @ numbers(64, 5)
    assert torch.equal(product, numbers(4, 64) @ numbers(64, 5))


def test_what_is_computed_in(processor):
    without = processor == "AVX2"
    assert computed_in(CPU, BFLOAT16) == (torch.float32 if without else BFLOAT16)
    assert computed_in(CPU, torch.float16) == torch.float16
    assert computed_in(torch.device("cuda"), BFLOAT16) == BFLOAT16


def test_torch_still_names_processors_as_is_expected():
    # Each name is read once, at its first use: one interpreter, which forks before that.
    code = (
        "import os, torch\n"
        "for asked in ('default', 'avx2'):\n"
        "    if not os.fork():\n"
        "        os.environ['ATEN_CPU_CAPABILITY'] = asked\n"
        "        print(torch.backends.cpu.get_cpu_capability(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert len(found) == 2
    assert set(found) <= set(system._WITHOUT)
