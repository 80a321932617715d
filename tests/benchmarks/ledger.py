"""What benchmarks of many runs share: a run of one thread, and a file of what runs reached."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def ssl_bench(words: Sequence[str], said: Path) -> None:
    """Run a command with one thread; what it says is added to a file.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with said.open("a") as stream:
        subprocess.run(
            [sys.executable, "-m", "ssl_bench", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=stream,
            stderr=stream,
        )


def said_by(run: Path) -> Path:
    """The file beside a run folder that keeps what its processes said."""
    return run.parent / f"{run.name}.txt"


class Ledger:
    """What finished runs reached, by name, in a JSON file that outlives their folders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def reached(self, name: str, run_it: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What stands in the file, or what the run reaches now and the file holds from then on."""
        if name not in self.runs:
            self.runs[name] = run_it()
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self.runs, indent=1) + "\n")
            unfinished.rename(self.path)
        return self.runs[name]
