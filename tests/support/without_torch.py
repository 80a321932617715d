"""Run `ssl-bench` commands in a separate process that must not import torch."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def stdout_without_torch(folder: Path, commands: Sequence[Sequence[str]]) -> str:
    """Run `ssl-bench` commands and check that torch is not imported."""
    code = (
        "import sys; from ssl_bench.cli.__main__ import main\n"
        f"assert not any([main(command) for command in {[list(one) for one in commands]}])\n"
        "assert 'torch' not in sys.modules"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
