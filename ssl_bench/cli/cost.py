"""`ssl-bench cost`: what pretraining and probes take on a GPU, predicted, and measured on one."""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from ssl_bench.cost.asked import asked_devices, asked_work, device_here
from ssl_bench.cost.predicting import Predictor, WorkCost
from ssl_bench.cost.printing import tables
from ssl_bench.results.provenance import source_commit
from ssl_bench.system.escaping import json_text
from ssl_bench.system.files import write_text_atomically
from ssl_bench.system.naming import file_name
from ssl_bench.system.progress import say


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print predictions; where there is a GPU, measure each unit once and print both."""
    works, predictor = asked_work(options.work, overrides), Predictor()
    costs: dict[str, dict[str, WorkCost]] = {}
    measures = options.device is None and torch.cuda.is_available()
    for name, work in works.items():
        say(f"counting {name}")
        if measures:
            here = torch.device("cuda", torch.cuda.current_device())
            device = device_here(here)
            costs[name] = {device.name: predictor.measured(name, work, device, here)}
        else:
            devices = asked_devices(options.device or "all")
            costs[name] = {d.name: predictor.predicted(name, work, d) for d in devices.values()}
    record = {name: {d: one.as_json() for d, one in of.items()} for name, of in costs.items()}
    print(json_text(record) if options.json else tables(costs))
    if measures:
        _keep(record, Path(options.out))
    return 0


def _keep(record: object, folder: Path) -> None:
    """Beside what made it, in a file that can be sent."""
    name = torch.cuda.get_device_name()
    path = folder / f"{file_name(name)}.json"
    content = {
        "device": name,
        "torch": torch.__version__,
        "commit": source_commit() or "unknown",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "works": record,
    }
    write_text_atomically(path, json_text(content) + "\n")
    say(f"measured on {name}: {path}; how to hand it in stands in results/devices/README.md")
