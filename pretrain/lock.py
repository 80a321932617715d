"""Lock a run folder, so that only one process at a time writes to it.

The lock is a POSIX record lock (`fcntl.lockf`) on a file in the folder. The operating system
releases the lock when the process ends, even if the process is killed. A forked child does not
inherit the lock, so data workers that outlive a killed run do not keep the folder locked. Child
processes would inherit a lock by `fcntl.flock`, which the package filelock uses.

No other code may open the lock file. A process loses its lock (a POSIX record lock) as soon as any
of its code closes the file, even through another descriptor.
"""

import os
import shlex
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.system.output import print_message_once

try:
    import fcntl
except ImportError:
    # Windows does not support these locks.
    fcntl = None

_LOCK_FILE = ".lock"
_MAX_COMMAND, _MAX_BYTES = 200, 4096


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Lock a folder for this process inside a `with` block, and create the folder if necessary.

    At the end of the `with` block, the lock file is deleted. If the locked folder is then empty,
    the folder is deleted, too.

    Raises:
        ConfigurationError: Another process, which the message describes, has locked the folder.
        MachineError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire_lock(folder / _LOCK_FILE)
    except OSError as error:
        raise MachineError(
            f"cannot write {folder}: {error.strerror or error}. Free space on the disk or choose "
            "another folder",
            hint=("--out", "{folder}"),
        ) from error
    try:
        yield
    finally:
        # The file is deleted before it is unlocked. Otherwise the next process could already have
        # locked it, and would lose its lock file.
        with suppress(OSError):
            (folder / _LOCK_FILE).unlink()
        os.close(descriptor)
        with suppress(OSError):
            folder.rmdir()


def _acquire_lock(path: Path) -> int:
    """Lock a file, write a description of this process into it, and return its file descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
        try:
            _lock_file(descriptor, path)
            # The previous process may have deleted the file after it was opened here. A lock on a
            # deleted file has no effect, so try again with the file that has this name now.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _describe_this_process().encode(errors="replace"))
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock_file(descriptor: int, path: Path) -> None:
    try:
        if fcntl is None:
            raise OSError("this system has no file locks")
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        text = os.read(descriptor, _MAX_BYTES).decode(errors="replace")
        raise ConfigurationError(
            f"{path.parent} is in use by {text or 'another process'}. Wait until it has ended, "
            "stop it, or choose another folder",
            hint=("--out", "{folder}"),
        ) from error
    except OSError as error:
        print_message_once(
            f"{path.parent} cannot be locked ({error.strerror or error}). Make sure that no other "
            "run writes to this folder"
        )


def _describe_this_process() -> str:
    command = shlex.join(["ssl-bench", *sys.argv[1:]])
    if len(command) > _MAX_COMMAND:
        command = f"{command[:_MAX_COMMAND]}..."
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return f"`{command}` (process {os.getpid()} on {socket.gethostname()} since {since} UTC)"
