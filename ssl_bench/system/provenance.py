"""Provenance of a result: the git commit, the versions, the hardware and the time.

`hatch_build.py` runs this file when a wheel is built. At that time no package is installed, so the
top level of this file only imports the standard library.
"""

import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]

COMMIT_FILE = "COMMIT"
"""Name of a file in the package. It contains the commit of a wheel or source archive."""


def provenance_fields(hardware: str, seconds: float) -> dict[str, Any]:
    """Return the fields of a `Record` that describe the code, the hardware and the time."""
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


@cache
def source_commit() -> str | None:
    """Return the commit of the running code from git or `COMMIT_FILE`, or None if it is unknown."""
    checkout = _PACKAGE.parent
    if (checkout / ".git").exists():
        return read_git_commit(checkout)
    try:
        return (_PACKAGE / COMMIT_FILE).read_text().strip() or None
    except OSError:
        return None


def read_git_commit(checkout: Path) -> str | None:
    """Return the commit of a git checkout, or None if git is missing or fails.

    "-dirty" is appended if a tracked file has uncommitted changes.
    """

    def git(*arguments: str) -> str:
        words = ["git", "-C", str(checkout), *arguments]
        run = subprocess.run(words, capture_output=True, check=True, text=True, timeout=10)
        return run.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changes else "")
