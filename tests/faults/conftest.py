"""What many tests of faults begin with, made once: a run of one step."""

import shutil
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from tests.support.faults import photo_folder, pretraining


@pytest.fixture(scope="session")
def run_of_one_step(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    photos = photo_folder(folder / "photos")
    assert main(pretraining(photos, str(folder / "run"), "train.max_minutes=0.0")) == 0
    return folder / "run"


@pytest.fixture
def begun(place: Path, run_of_one_step: Path) -> list[str]:
    """Arguments of a run of which the folder `run` holds the first step; they ask for one more."""
    shutil.copytree(run_of_one_step, place / "run")
    return pretraining(place / "photos", "run", "train.max_minutes=0.0")
