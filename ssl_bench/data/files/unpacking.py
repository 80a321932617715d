"""Fetched archives onto the disk."""

import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path

from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.progress import show_progress

UNPACKED = (".tar", ".zip")
"""Ends of the names of files that are unpacked; any other is left as it is."""


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of a tar or zip archive below a folder; files that are there are replaced.

    Raises:
        DataError: it is damaged, or holds what leads out of the folder.
        MachineError: the disk is too small or cannot be written.
    """
    title = f"unpacking {archive.name}"
    try:
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                names = zipped.namelist()
                require_space(sum(one.file_size for one in zipped.infolist()), folder)
                zipped.extractall(folder, show_progress(names, title, len(names)))
        else:
            with tarfile.open(archive) as tarred:
                members = tarred.getmembers()
                require_space(sum(one.size for one in members), folder)
                shown = show_progress(members, title, len(members))
                tarred.extractall(folder, shown, filter="data")
    except (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive} is damaged ({error}); delete it and type the command again"
        ) from error
    except MachineError:
        raise
    except OSError as error:
        raise MachineError(
            f"cannot unpack {archive}: {error.strerror or error}; free space or choose another "
            "--data-root"
        ) from error


def require_space(size: int, folder: Path) -> None:
    """Find out before hours of work whether so many bytes fit below a folder.

    Raises:
        MachineError: they do not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise MachineError(
            f"{folder} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; free space or "
            "choose another --data-root"
        )
