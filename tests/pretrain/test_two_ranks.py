"""Test that training in two processes gives the same result as training in one process.

If one process fails, the training run must still save a checkpoint.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoints import has_state, load_state
from ssl_bench.cli.__main__ import main
from tests.support.faults import class_folders, photo_folder, unchecked_types
from tests.support.runs import log_rows
from tests.support.two_ranks import FAULT_STEP, run_arguments

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
# The exit codes of both processes, a part of the message, and the saved step.
EXPECTED = {
    "image:0": ([3, 3], "photos/3.png", FAULT_STEP),
    # The lost steps changed nothing, so no state is saved.
    "loss:1": ([2, 2], "not finite", None),
    "SIGTERM:0": ([75, 75], "4 of 8 steps", FAULT_STEP + 1),
    # The process without Ctrl-C is requested to stop.
    "SIGINT:0": ([130, 75], "interrupted", FAULT_STEP + 1),
    "SIGINT:1": ([75, 130], "4 of 8 steps", FAULT_STEP + 1),
    "worker:1": ([5, 5], "data worker", FAULT_STEP),
    "images:1": ([3, 3], "no images", None),
    # Only the first process writes the log and checks the folder.
    "disk:0": ([5, 5], "No space left", FAULT_STEP + 1),
    "monitor:0": ([5, 5], "process 0 failed: AssertionError", FAULT_STEP - 1),
    "taken:0": ([2, 2], "already contains a run", None),
    "states:0": ([5, 5], "No space left", FAULT_STEP - 1),
}
OTHERS = ("slow disk:0", "slow monitor:0", "slower monitor:0", "skipped:1", "none:0")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(workdir) -> dict[str, Any]:
    photos = photo_folder(workdir / "photos")
    class_folders(workdir / "classes", 2)
    words = [sys.executable, "-m", "tests.support.two_ranks", str(photos), str(workdir)]
    run = subprocess.run(
        [*words, *OTHERS, *EXPECTED], cwd=REPOSITORY, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def load_saved_state(root: Path, fault: str) -> dict[str, Any] | None:
    folder = root / fault.replace(":", "-")
    return load_state(folder, torch.device("cpu"))[0] if has_state(folder) else None


@pytest.mark.parametrize("fault", EXPECTED)
def test_both_processes_save_and_end_with_one_message(workdir, results, fault):
    codes, part, step = EXPECTED[fault]
    lines = [line for text in results[fault]["stderr"] for line in text.splitlines()]
    (line,) = [line for line in lines if "ssl-bench: " in line]
    state = load_saved_state(workdir, fault)
    assert results[fault]["codes"] == codes
    assert part in line
    assert (state and state["step"]) == step


def test_the_first_process_reports_unreadable_images_of_another(workdir, results):
    assert results["skipped:1"]["codes"] == [0, 0]
    assert "3.jpg. So far, 1 of 4 images" in results["skipped:1"]["stderr"][0]
    assert results["skipped:1"]["stderr"][1] == ""
    state = load_saved_state(workdir, "skipped:1")
    assert state is not None
    assert state["left_out"] == [3]


def test_processes_wait_for_slow_disks_and_limited_time_for_monitors(workdir, results):
    assert results["slow disk:0"]["codes"] == results["slow monitor:0"]["codes"] == [0, 0]
    assert 0 not in results["slower monitor:0"]["codes"]


@unchecked_types()
def test_two_processes_train_like_one(workdir, results):
    assert results["none:0"]["codes"] == [0, 0]
    assert main(run_arguments(workdir / "photos", workdir / "alone")) == 0
    one, two = (load_saved_state(workdir, name) for name in ("alone", "none:0"))
    assert one is not None
    assert two is not None
    for name, value in one["learner"].items():
        torch.testing.assert_close(two["learner"][name], value, atol=1e-4, rtol=1e-3, msg=name)
    losses = [[row["loss"] for row in log_rows(workdir / name)] for name in ("alone", "none-0")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
