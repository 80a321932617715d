"""A module run in a process of its own: its seconds, those of its processors, its most memory.

    python -m tests.benchmarks.apart FILE MODULE ARGUMENT ...

runs `python -m MODULE ARGUMENT ...` and writes the figures into FILE.
"""

import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Usage:
    """What a process took, from its start to its end.

    Attributes:
        cpu_seconds: Of all its threads, and of processes that it waited for.
        peak_mebibytes: Most resident memory of the process, and of its largest child if that had
            more.
    """

    seconds: float
    cpu_seconds: float
    peak_mebibytes: float


def usage_of(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> tuple[Usage, str]:
    """Run a module apart and wait for it.

    Returns:
        What it took, and what it printed.

    Raises:
        RuntimeError: it ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "usage.json"
        start = time.perf_counter()
        answer = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.apart", str(file), module, *arguments],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            check=False,
            text=True,
        )
        seconds = time.perf_counter() - start
        if answer.returncode:
            raise RuntimeError(f"{module} {' '.join(arguments)}: {answer.stderr[-2000:]}")
        return Usage(seconds, **json.loads(file.read_text())), answer.stdout


def rounded(usage: Usage) -> dict[str, float]:
    """For a file of figures."""
    return {name: round(value, 3) for name, value in asdict(usage).items()}


def _own_usage() -> dict[str, float]:
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in of),
        "peak_mebibytes": max(_own_peak(), of[1].ru_maxrss * 1024 / _MEBIBYTE),
    }


def _own_peak() -> float:
    # Not ru_maxrss, which begins with what the process that started this one had.
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024 / _MEBIBYTE


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    Path(file).write_text(json.dumps(_own_usage()))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
