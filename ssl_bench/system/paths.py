"""The one door for paths that users write: `~` is expanded, and what can be no path is refused."""

import os
from pathlib import Path

from ssl_bench.errors import ConfigurationError, MachineError

LEGAL = "a path"
_LEGAL_NAMES = "a path of names up to 255 bytes, of which ~ or ~USER may be the first"
_LONGEST_NAME = 255
_LONGEST = 4095

PACKAGE = Path(__file__).parents[1]
"""Where `ssl_bench` is installed; beside it lies the rest of a checkout."""


def expanded(text: str | Path) -> Path:
    """A path with the home folder in place of `~`.

    Raises:
        ConfigurationError: no such user, or nothing that the system takes for a path.
    """
    if not is_path(text):
        raise ConfigurationError(f"expected {_LEGAL_NAMES}, got {str(text)[:100]!r}")
    return Path(text).expanduser()


def is_path(text: str | Path) -> bool:
    """Whether the system can be asked for it; an empty text is often an unset variable."""
    try:
        path = os.fsencode(Path(text).expanduser())
    # No home folder; or a text that no name of a file can be.
    except (RuntimeError, ValueError):
        return False
    names = path.split(b"/")
    is_short = len(path) <= _LONGEST and all(len(name) <= _LONGEST_NAME for name in names)
    return bool(str(text)) and b"\0" not in path and is_short


def real(path: Path) -> Path:
    """A path without links; unlike `Path.resolve`, also of a link that leads to itself."""
    return Path(os.path.realpath(path))


def cache_folder(configured: str | Path | None) -> Path:
    """The configured folder, else this program's own below the user's cache (XDG).

    Raises:
        MachineError: neither the environment nor the system names one.
    """
    if configured is not None:
        return expanded(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "ssl-bench"
    except RuntimeError as error:
        raise MachineError(f"no folder for a cache ({error}); set XDG_CACHE_HOME=DIR") from error
