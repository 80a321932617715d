"""`ssl-bench doctor`: what this machine has, what is missing and what to do about it."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from ssl_bench import __version__
from ssl_bench.composition import choices, config_folder
from ssl_bench.results import source_commit

PACKAGES = (
    ("torch", "torch"),
    ("torchvision", "torchvision"),
    ("timm", "timm"),
    ("faiss", "faiss"),
    ("cv2", "opencv-python-headless"),
    ("pycocotools", "pycocotools"),
    ("sklearn", "scikit-learn"),
    ("hydra", "hydra-core"),
)


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print one line per finding; exit code 5 when a needed package does not import."""
    del options, overrides
    print(f"ssl-bench    {__version__} ({source_commit() or 'installed wheel'})")
    print(f"python       {platform.python_version()} on {platform.platform()}")
    broken = [line for line in map(_package, PACKAGES) if line is not None]
    _devices()
    _disk()
    print(f"configs      {config_folder()}")
    print(f"probes       {', '.join(choices('probe'))}")
    print(f"datasets     {', '.join(choices('dataset'))}")
    for line in broken:
        print(f"BROKEN       {line}")
    return 5 if broken else 0


def _package(names: tuple[str, str]) -> str | None:
    module, distribution = names
    try:
        found = importlib.import_module(module)
    except Exception as error:
        return f"{module} does not import ({error}); install {distribution} again"
    version = getattr(found, "__version__", None) or importlib.metadata.version(distribution)
    print(f"{module:<12} {version}")
    return None


def _devices() -> None:
    print(f"cpu          {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        print("gpu          none; everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"gpu {index}        {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _disk() -> None:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    print(f"disk         {free:.0f} GiB free in {Path.cwd()}")
