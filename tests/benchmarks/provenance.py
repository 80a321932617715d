"""Describe when, where and with which command a benchmark ran; printed above its tables."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from ssl_bench.system.process import source_commit


def provenance() -> str:
    """Return the date, hardware, threads, version of torch, commit and command."""
    command = shlex.join(["python", "-m", _module(Path(sys.argv[0])), *sys.argv[1:]])
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, "
        f"commit {source_commit() or 'unknown'}, `{command}`"
    )


def _module(file: Path) -> str:
    """Return the module name with which `python -m` runs a file of this folder."""
    parts = file.with_suffix("").parts
    below = parts[parts.index("benchmarks") + 1 :] if "benchmarks" in parts else parts[-1:]
    return ".".join(["tests.benchmarks", *below]).removesuffix(".__main__")


def hardware() -> str:
    """Return a text such as "NVIDIA H200, 16 cores" or "AMD EPYC, 1 of 2 cores"."""
    cores = os.cpu_count()
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {cores} cores"
    return f"{_processor()}, {torch.get_num_threads()} of {cores} cores"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
