"""Define fixtures for the tests of faulty inputs and interrupted runs."""

import shutil
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from tests.support.faults import make_pretrain_args, photo_folder


@pytest.fixture(scope="session")
def run_of_one_step(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    photos = photo_folder(folder / "photos")
    assert main(make_pretrain_args(photos, str(folder / "run"), "train.max_minutes=0.0")) == 0
    return folder / "run"


@pytest.fixture
def begun(workdir: Path, run_of_one_step: Path) -> list[str]:
    """Return the command that continues an interrupted pretraining run."""
    shutil.copytree(run_of_one_step, workdir / "run")
    return make_pretrain_args(workdir / "photos", "run", "train.max_minutes=0.0")
