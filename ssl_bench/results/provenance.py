"""Where a number is from: code, machine and time."""

import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ssl_bench import __version__
from ssl_bench.system.paths import PACKAGE


def provenance(device: torch.device, seconds: float) -> dict[str, Any]:
    """The fields of a `Record` that say where it was made; `seconds` is how long it took."""
    return {
        "version": __version__,
        "git_commit": source_commit(),
        "torch": torch.__version__,
        "device": device_name(device),
        "seconds": round(seconds, 3),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """The hardware and how it computes: "cuda: NVIDIA H200, TF32 off", "cpu: x86_64, 2 threads"."""
    if device.type == "cuda":
        tf32 = "on" if torch.backends.cudnn.allow_tf32 else "off"
        return f"cuda: {torch.cuda.get_device_name(device)}, TF32 {tf32}"
    return f"{device.type}: {platform.machine()}, {torch.get_num_threads()} threads"


@cache
def source_commit() -> str | None:
    """Commit of the checkout that runs, with "-dirty" for uncommitted changes; None for a wheel."""
    source = PACKAGE.parent
    if not (source / ".git").exists():
        return None
    try:
        commit = _git(source, "rev-parse", "HEAD")
        changed = _git(source, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=10
    ).stdout.strip()
