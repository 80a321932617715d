"""From names to work and devices."""

from collections.abc import Sequence

import torch

from ssl_bench.composition.choices import asked_names, choices
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.cost.devices import DEVICES, Device
from ssl_bench.cost.this_machine import measured_device
from ssl_bench.cost.work import Work


def asked_work(names: str, overrides: Sequence[str]) -> dict[str, Work]:
    """Work by the names of files of `configs/cost`, several with commas, or all.

    Raises:
        ConfigurationError: there is no such file or key, or a value is wrong.
    """
    asked = asked_names("work", names, choices("cost"))
    return {name: build(compose_config("costing", [f"cost={name}", *overrides]).cost)
            for name in asked}  # fmt: skip


def asked_devices(names: str) -> dict[str, Device]:
    """Rows of the table of devices.

    Raises:
        ConfigurationError: there is no such row.
    """
    return {name: DEVICES[name] for name in asked_names("device", names, list(DEVICES))}


def device_here(here: torch.device) -> Device:
    """The row of a GPU that is here by its name; where there is none, its rates are measured."""
    name = torch.cuda.get_device_name(here)
    words = name.lower().replace(" ", "")
    for key, device in DEVICES.items():
        if key in words:
            return device
    memory = torch.cuda.get_device_properties(here).total_memory
    return measured_device(here, float(memory))
