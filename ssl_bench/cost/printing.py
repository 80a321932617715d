"""Costs as Markdown and as text."""

from collections.abc import Iterable, Mapping, Sequence

from ssl_bench.cost.devices import DEVICES, Device
from ssl_bench.cost.predicting import WorkCost

Costs = Mapping[str, Mapping[str, WorkCost]]
"""By work, then by device."""

_EPOCHS = (100, 300)
_PRETRAINING = "pretrain_"


def tables(costs: Costs) -> str:
    """Hours of all works, speed of pretraining, and what each unit asks for; all predicted."""
    parts = [_hours(costs)]
    if any(name.startswith(_PRETRAINING) for name in costs):
        parts.append(_pretraining(costs))
    return "\n".join([*parts, _units(costs)])


def device_table(devices: Iterable[Device]) -> str:
    """What the predictions are made from."""
    head = (
        "device", "bfloat16 TFLOP/s", "TF32", "float32", "float64", "GB/s", "GB", "host GB/s",
        "launch us", "wait us", "source",
    )  # fmt: skip
    rows = [
        (
            d.name, *(f"{rate / 1e12:.4g}" for rate in (d.bfloat16, d.tf32, d.float32, d.float64)),
            *(f"{rate / 1e9:.4g}" for rate in (d.bandwidth, d.memory, d.link)),
            f"{1e6 * d.launch:.2g}", f"{1e6 * d.wait:.2g}", d.source,
        )
        for d in devices
    ]  # fmt: skip
    return _table(head, rows)


def _hours(costs: Costs) -> str:
    devices = _devices(costs)
    rows = []
    for name, by_device in costs.items():
        rows.append((name, *(_duration(by_device[d]) for d in devices)))
    return _table(("work, predicted", *devices), rows)


def _duration(cost: WorkCost) -> str:
    shown = f"{_time(cost.seconds)}, {cost.peak_bytes / 1e9:.1f} GB"
    return shown if cost.measured is None else f"{shown} (measured {_time(cost.measured)})"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"


def _pretraining(costs: Costs) -> str:
    devices = _devices(costs)
    rows = []
    for name, by_device in costs.items():
        if name.startswith(_PRETRAINING):
            speeds = [by_device[d].images / by_device[d].seconds for d in devices]
            rows.append((f"{name}, images/s", *(f"{speed:.0f}" for speed in speeds)))
            for epochs in _EPOCHS:
                hours = [epochs * by_device[d].seconds / 3600 for d in devices]
                rows.append((f"{name}, hours of {epochs} epochs", *(f"{h:.0f}" for h in hours)))
    return _table(("pretraining, predicted", *devices), rows)


def _units(costs: Costs) -> str:
    devices = _devices(costs)
    rows = []
    for name, by_device in costs.items():
        for device in devices:
            for unit in by_device[device].units:
                measured = "-" if unit.measured is None else f"{1e3 * unit.measured:.3g}"
                rows.append((
                    name, unit.name, device, f"{unit.times:.0f}", f"{unit.flops / 1e9:.4g}",
                    f"{unit.num_bytes / 1e9:.3g}", f"{unit.launches:.0f}", f"{unit.waits:.2g}",
                    f"{1e3 * unit.seconds:.3g}", measured, f"{unit.peak_bytes / 1e9:.3g}",
                ))  # fmt: skip
    head = (
        "work", "unit", "device", "times", "GFLOP", "GB moved", "launches", "waits",
        "predicted ms", "measured ms", "predicted peak GB",
    )  # fmt: skip
    return _table(head, rows)


def _devices(costs: Costs) -> list[str]:
    return list(dict.fromkeys(device for by_device in costs.values() for device in by_device))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sheet() -> str:
    """The table of all known devices."""
    return device_table(DEVICES.values())
