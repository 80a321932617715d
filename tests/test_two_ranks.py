"""Whatever one of two processes meets, both end with it, saved, and one line says it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import has_state, load_state
from tests.faults import photo_folder
from tests.two_ranks import AT

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[1]
# Exit code, what the line says, and the step that is saved at the end.
EXPECTED = {
    "image": (3, "photos/3.png is cut short", AT),
    # The two steps that were lost changed nothing, and are not worth a checkpoint.
    "loss": (2, "loss or gradient was not finite for 2 steps", None),
    "SIGTERM": (75, "asked to stop after step 4 of 8", AT + 1),
    "SIGUSR1": (75, "asked to stop after step 4 of 8", AT + 1),
    "SIGINT": (75, "asked to stop after step 4 of 8", AT + 1),
    "worker": (5, "a data worker died", AT),
    "images": (3, "holds no images", None),
}
CASES = [
    *(f"{name}:{rank}" for name in EXPECTED for rank in range(2)),
    "disk:0", "taken:0",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ends(place) -> dict[str, Any]:
    """How both processes ended, for each fault; all in a process of their own."""
    photos = photo_folder(place / "photos")
    command = [sys.executable, "-m", "tests.two_ranks", str(photos), str(place), *CASES]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def lines_of(end: dict[str, Any]) -> list[str]:
    return [line for text in end["said"] for line in text.splitlines() if "ssl-bench: " in line]


def saved_step(place: Path, fault: str) -> int | None:
    folder = place / fault.replace(":", "-")
    return load_state(folder, torch.device("cpu"))[0]["step"] if has_state(folder) else None


@pytest.mark.parametrize("fault", [case for case in CASES if case.split(":")[0] in EXPECTED])
def test_both_processes_end_together_saved_and_with_one_line(ends, place, fault):
    code, said, step = EXPECTED[fault.split(":")[0]]
    end = ends[fault]

    codes = [code, code]
    if fault.startswith("SIGINT"):
        codes[int(fault[-1])] = 130
    assert end["codes"] == codes, end["said"]
    lines = lines_of(end)
    if fault == "SIGINT:0":
        assert "interrupted after step 4 of 8" in end["said"][0]
    else:
        assert len(lines) == 1, end["said"]
        assert said in lines[0]
    assert saved_step(place, fault) == step


def test_a_log_that_cannot_be_written_ends_both(ends):
    assert ends["disk:0"]["codes"] == [5, 5]
    (line,) = lines_of(ends["disk:0"])
    assert "No space left on device" in line


def test_a_folder_that_is_taken_is_refused_by_both(ends, place):
    assert ends["taken:0"]["codes"] == [2, 2]
    (line,) = lines_of(ends["taken:0"])
    assert "already holds a run" in line
    assert saved_step(place, "taken:0") is None
