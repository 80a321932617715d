"""The folder of a report: written beside its place, then put there whole."""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.system.paths import real
from ssl_bench.system.written import REPORT


def require_replaceable(folder: Path) -> None:
    """Nothing but a report may be replaced.

    Raises:
        ConfigurationError: something else lies there.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigurationError(f"--into {folder} is no folder; name another one")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / REPORT).is_file():
        raise ConfigurationError(
            f"--into {folder} holds files and is no report of ssl-bench; name a new or empty folder"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends without an error.

    Raises:
        ConfigurationError: `folder` is something else than a report.
        MachineError: the disk is full or the folder cannot be written; an older report stays.
    """
    require_replaceable(folder)
    # So that "." has a name.
    folder = real(folder)
    mark = uuid.uuid4().hex
    new, old = (folder.with_name(f".{mark}.{word}") for word in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        (new / REPORT).write_text(json.dumps({"report": 1}) + "\n")
        # Again, because somebody may have put files there in the meantime.
        require_replaceable(folder)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        raise MachineError(
            f"cannot write {folder}: {error.strerror or error}; free space or choose another folder"
        ) from error
    finally:
        # Whatever came between the two names, an interrupt too: the older report goes back.
        if old.exists() and not folder.exists():
            with suppress(OSError):
                old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
