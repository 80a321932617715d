"""Who holds a run's folder: one process at a time, whatever file system it lies on.

A holder makes a file `.holder.N`, where N is one more than that of the last. Creating a file that
must not exist is atomic everywhere, over NFS too, where locks often are missing or known to one
machine alone. A holder that was killed leaves its file, and the next one makes N + 1: of many that
find the same dead holder, one is the first.

A process of this machine is alive if there is one of its number that started at its time. Data
workers that outlive it do not count. Of a process elsewhere, in another container for example,
nothing is known but that it touches its file every few seconds. Whether it does is watched here,
since clocks of two machines may disagree.
"""

import json
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ssl_bench.errors import ConfigurationError, MachineError

_PREFIX = ".holder."
BEAT_SECONDS = 15.0
WATCH_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_SHOWN = 200


class Hold:
    """A folder that belongs to this process for a while."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Find out before writing whether the folder is still ours.

        Raises:
            MachineError: this process was stopped for so long that another took it for dead.
        """
        if not self._path.exists():
            raise MachineError(
                f"{self._path.parent} was taken over by another run while this one stood still; "
                "nothing more is written"
            )

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # Gone, or out of reach for a moment.
            with suppress(OSError):
                os.utime(self._path)


@contextmanager
def held(out: Path) -> Generator[Hold]:
    """Keep a folder, made if there is none, for this process alone; an empty one goes again.

    Raises:
        ConfigurationError: another process holds it.
        MachineError: it cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        hold = Hold(_take(out))
    except OSError as error:
        raise MachineError(
            f"cannot write {out}: {error.strerror or error}; free space or choose another folder"
        ) from error
    try:
        yield hold
    finally:
        hold.release()
        with suppress(OSError):
            out.rmdir()


def _take(out: Path) -> Path:
    """The file that says that we hold the folder."""
    while True:
        dead = _holders(out)
        for path in dead:
            _require_dead(path)
        ours = out / f"{_PREFIX}{max(map(_number, dead), default=0) + 1}"
        try:
            descriptor = os.open(ours, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(_this_process(), file)
        except OSError:
            ours.unlink(missing_ok=True)
            raise
        # Whoever came behind a holder whose whole life passed between two lines of ours has begun
        # to count anew. Each of us looks after it made its file, so at least one of us goes back.
        if set(_holders(out)) == {*dead, ours}:
            for path in dead:
                path.unlink(missing_ok=True)
            return ours
        ours.unlink(missing_ok=True)


def _holders(out: Path) -> list[Path]:
    return [path for path in out.glob(f"{_PREFIX}*") if _number(path)]


def _number(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if re.fullmatch("[0-9]{1,18}", digits) else 0


def _require_dead(path: Path) -> None:
    """Return once the holder behind a file is known to be dead.

    Raises:
        ConfigurationError: it is alive.
    """
    end, before = time.monotonic() + WATCH_SECONDS, None
    while (seen := _seen(path)) is not None:
        holder, who = _read(seen[1])
        is_here = holder.get("place") == _place() != ""
        if is_here:
            is_alive = _start_of(holder["pid"]) == holder["started"]
        else:
            is_alive = before is not None and seen != before
        if is_alive:
            raise ConfigurationError(
                f"{path.parent} is held by {who}; wait for it, end it, or choose another folder",
                hint=("--out", "{folder}"),
            )
        if is_here or time.monotonic() > end:
            return
        if before is None:
            line = f"looking for a sign of life of {who}, which held {path.parent}"
            print(line, file=sys.stderr, flush=True)
        before = seen
        time.sleep(_LOOK_SECONDS)


def _this_process() -> dict[str, Any]:
    command = shlex.join(["ssl-bench", *sys.argv[1:]]).replace("\n", " ")
    return {
        "host": socket.gethostname(),
        # Boot of a machine, and processes that see each other there; empty where unknown.
        "place": _place(),
        "pid": os.getpid(),
        # In ticks since the boot.
        "started": _start_of(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "command": command if len(command) <= _SHOWN else f"{command[:_SHOWN]}...",
    }


def _read(content: str) -> tuple[dict[str, Any], str]:
    """A holder's file, and the words for it; nothing of half a file, or of another version's."""
    try:
        holder = json.loads(content)
        if holder.keys() != {"host", "place", "pid", "started", "since", "command"}:
            return {}, "another process"
        return holder, "`{command}` (process {pid} on {host} since {since} UTC)".format(**holder)
    except (ValueError, TypeError, AttributeError):
        return {}, "another process"


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers of one machine do not see each other's processes.
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process of this machine started; None if there is none, or a dead one."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def _seen(path: Path) -> tuple[int, str] | None:
    """When a file was touched, and what is in it; None if it is gone."""
    try:
        # Opened each time: only then does NFS ask its server.
        with path.open(errors="replace") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None
