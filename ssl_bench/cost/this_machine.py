"""The rates of the machine at hand, by short runs of a product, a copy and a small operation."""

import time
from collections.abc import Callable

import torch

from ssl_bench.cost.devices import Device

_ROUNDS = 7
# Beyond caches on a GPU; on a CPU as wide as what small models multiply, and beyond its caches too.
_SIDES = {"cuda": (8_192,), "cpu": (96, 192, 384)}
_ROWS = {"cuda": 8_192, "cpu": 1_024}
_COPIED = {"cuda": 2**28, "cpu": 2**25}
_SMALL_TIMES, _FACTORISED = 200, 256


def measured_device(device: torch.device, memory: float) -> Device:
    """A row of the table for the device at hand.

    Of a CPU the products are those of three widths, for narrow ones are slower there.

    Args:
        device: Of a CPU one thread counts, whatever else the machine does.
        memory: Bytes.
    """
    kind, is_cuda = device.type, device.type == "cuda"
    product, low, double = (
        _product_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    )
    source = torch.randn(_COPIED[kind] // 4, device=device)
    target, small = torch.empty_like(source), torch.zeros(8, device=device)
    square, table = source[: _FACTORISED**2].view(_FACTORISED, -1), source[: 2**19].view(-1, 64)
    long = source[: 2**19].view(32, -1)
    factorising = _rate(8 / 3 * _FACTORISED**3, lambda: torch.linalg.qr(square), device)
    many = _rate(_SMALL_TIMES, lambda: [small.add(1.0) for _ in range(_SMALL_TIMES)], device)
    bandwidth = _rate(2 * source.nbytes, lambda: target.copy_(source), device)
    rates = {"bfloat16": low if is_cuda else product, "tf32": product, "float32": product}
    if not is_cuda:
        rates["functions"] = _rate(table.numel(), lambda: table.softmax(1), device)
        rates["searches"] = _rate(table.numel(), lambda: table.argmax(1), device)
        rates["sorts"] = _rate(long.numel(), lambda: long.topk(100), device)
    return Device(
        name=torch.cuda.get_device_name(device) if is_cuda else "this processor",
        float64=double,
        bandwidth=bandwidth,
        memory=memory,
        link=bandwidth,
        source="measured here",
        launch=1 / many,
        wait=1 / many,
        attainable=1.0,
        attainable_factorising=factorising / product,
        **rates,
    )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    rows, sides = _ROWS[device.type], _SIDES[device.type]
    left = [torch.randn(rows, side, device=device).to(dtype) for side in sides]
    right = [torch.randn(side, side, device=device).to(dtype) for side in sides]

    def work() -> None:
        for one, other in zip(left, right, strict=True):
            torch.mm(one, other)

    return _rate(sum(2 * rows * side**2 for side in sides), work, device)


def _rate(amount: int | float, work: Callable[[], object], device: torch.device) -> float:
    return amount / best_seconds(work, device)


def best_seconds(work: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Of several rounds after a first one, which is not counted.

    On a GPU between two events; else what this thread worked, whoever else wants the processor.
    """
    work()
    once = _cuda_seconds if device.type == "cuda" else _thread_seconds
    return min(once(work) for _ in range(rounds))


def _thread_seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _cuda_seconds(work: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
