"""What many tests of faults begin with, made once: a run of one step, and what its step needs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.resources import Needs
from pretrain.train import Pretraining
from ssl_bench.cli.__main__ import main
from tests.support.faults import photo_folder, pretraining

_known: dict[str, Needs] = {}


@pytest.fixture(scope="module", autouse=True)
def needs_are_counted_once() -> Iterator[None]:
    """Counting what a step needs is most of the time of a run of a few steps."""
    usual = Pretraining.needs

    def needs(plan, learner):
        shapes = {name: tensor.shape for name, tensor in learner.state_dict().items()}
        key = repr((plan.encoder, plan.objective, plan.optimizer, plan.data.colours, shapes))
        if key not in _known:
            _known[key] = usual(plan, learner)
        return _known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pretraining, "needs", needs)
        yield


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
