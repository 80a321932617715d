"""Commands in a process of their own, which must not import torch."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def said_without_torch(
    folder: Path, commands: Sequence[Sequence[str]], *, nor: Sequence[str] = ()
) -> str:
    """What commands, carried out in a folder one after the other, print on stdout.

    Args:
        folder: Where they start.
        commands: The words after `ssl-bench` of each.
        nor: Other packages that must not be imported either.
    """
    code = (
        "import sys; from ssl_bench.cli.__main__ import main\n"
        f"assert not any([main(command) for command in {[list(one) for one in commands]}])\n"
        f"found = {{'torch', *{list(nor)}}} & sys.modules.keys(); assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
