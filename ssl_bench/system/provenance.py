"""The commit of the code that runs. The build reads this file alone, so it imports nothing else."""

import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]

COMMIT_FILE = "COMMIT"
"""File of the package in which a wheel or a source archive keeps the commit it was built from."""


@cache
def source_commit() -> str | None:
    """Return the commit of the checkout that runs, or the one from which it was built.

    "-dirty" follows it if files were changed since. None if neither is known.
    """
    checkout = _PACKAGE.parent
    if (checkout / ".git").exists():
        return read_git_commit(checkout)
    try:
        return (_PACKAGE / COMMIT_FILE).read_text().strip() or None
    except OSError:
        return None


def read_git_commit(checkout: Path) -> str | None:
    """Ask git for the commit of a checkout; None if git is missing or refuses."""

    def git(*arguments: str) -> str:
        words = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(
            words, capture_output=True, check=True, text=True, timeout=10
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changed else "")


def provenance_fields(hardware: str, seconds: float) -> dict[str, Any]:
    """Return the fields of a `Record` that say where and when it was computed.

    Args:
        hardware: As `ssl_bench.system.device.describe_device` returns it.
        seconds: How long the computation took.
    """
    # Not at the top, because the build runs this file where neither of the two is installed.
    import torch

    from ssl_bench import __version__

    return {
        "version": __version__,
        "git_commit": source_commit(),
        "torch": torch.__version__,
        "device": hardware,
        "seconds": round(seconds, 3),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
