"""From counts to seconds: each operation takes what binds it, one after the other."""

import math

from ssl_bench.cost.counting import Count, Operation
from ssl_bench.cost.devices import Device


def seconds_of(one: Operation, device: Device) -> float:
    """The longest of: its arithmetic, what it moves, its launch."""
    return max(
        _computing(one, device),
        one.num_bytes / device.bandwidth,
        one.link_bytes / device.link,
        device.launch,
    )


def _computing(one: Operation, device: Device) -> float:
    if one.kind == "product":
        return one.flops / (device.attainable * device.peak(one.dtype))
    if one.kind == "factorisation":
        return one.flops / (device.attainable_factorising * device.peak(one.dtype))
    rates = {"function": device.functions, "search": device.searches, "sort": device.sorts}
    return one.values / rates.get(one.kind, math.inf)


def seconds(count: Count, device: Device, waits: int | float = 0) -> float:
    """All of them in a row, and the host's waits."""
    total = sum(times * seconds_of(one, device) for one, times in count.operations.items())
    return total + waits * device.wait
