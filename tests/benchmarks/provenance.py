"""Describe how a benchmark was run, and print tables."""

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from ssl_bench.system.process import source_commit


def provenance() -> str:
    """Return a text with the date, hardware, torch version, commit and command of a benchmark."""
    parts = Path(sys.argv[0]).with_suffix("").parts
    below = parts[parts.index("benchmarks") + 1 :] if "benchmarks" in parts else parts[-1:]
    module = ".".join(["tests.benchmarks", *below]).removesuffix(".__main__")
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, "
        f"commit {source_commit() or 'unknown'}, `{command}`"
    )


def hardware() -> str:
    """Return a description of the hardware, such as "NVIDIA H200, 16 cores"."""
    cores = os.cpu_count()
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {cores} cores"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{processor}, {torch.get_num_threads()} of {cores} cores"


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    print("\n".join([f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]))
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
