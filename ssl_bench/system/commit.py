"""The commit of the code that runs. The build reads this file alone, so it imports nothing else."""

import subprocess
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

BUILT_FROM = "COMMIT"
"""File of the package in which a wheel or a source archive keeps the commit it was built from."""


@cache
def source_commit() -> str | None:
    """Return the commit of the checkout that runs, or the one from which it was built.

    "-dirty" follows it if files were changed since. None if neither is known.
    """
    checkout = _PACKAGE.parent
    if (checkout / ".git").exists():
        return checked_out_commit(checkout)
    try:
        return (_PACKAGE / BUILT_FROM).read_text().strip() or None
    except OSError:
        return None


def checked_out_commit(checkout: Path) -> str | None:
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
