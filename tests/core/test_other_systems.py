"""What the suite does on systems that lack what Linux has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_bench.system import files
from ssl_bench.system.files import remove_orphans, unfinished

REPOSITORY = Path(__file__).parents[2]
# Modules, signals and flags of Unix alone; the libraries below know for themselves where they run.
HIDDEN = """
import importlib, os, pkgutil, signal, sys
import hydra, matplotlib.pyplot, sklearn.linear_model, timm, torch.distributed, torch.utils.data
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGCHLD", "SIGKILL"):
    delattr(signal, name)
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "sched_getaffinity", "sync"):
    delattr(os, name)
for package in ("ssl_bench", "pretrain", "probes"):
    found = importlib.import_module(package)
    names = [one.name for one in pkgutil.walk_packages(found.__path__, f"{package}.")]
    for name in names:
        importlib.import_module(name)
    print(package, len(names))
"""


@pytest.mark.slow
def test_every_module_can_be_imported_where_only_unix_has_what_is_hidden():
    run = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stderr
    counts = dict(line.split() for line in run.stdout.splitlines())
    assert int(counts["ssl_bench"]) > 100
    assert counts.keys() == {"ssl_bench", "pretrain", "probes"}


def test_without_locks_files_are_written_and_fresh_ones_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with unfinished(tmp_path / "written.txt") as file:
        file.write(b"whole")
        remove_orphans(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["written.txt"]
    assert (tmp_path / "written.txt").read_bytes() == b"whole"
