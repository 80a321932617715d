"""Commands of long benchmarks: one thread each, and what they say in a file."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.errors import SslBenchError


def said_in(command: Sequence[str], file: Path) -> None:
    """Run a command with one thread; all it prints goes to the end of a file.

    Raises:
        SslBenchError: it failed; its last line is the message.
    """
    with file.open("a") as said:
        code = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
        ).returncode
    if code:
        lines = file.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing was said")
        raise SslBenchError(f"a command ended with {code}, see {file}: {last}")
