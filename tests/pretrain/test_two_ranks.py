"""Whatever one of two processes meets, both end with it, saved, and one line says it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoints import has_state, load_state
from tests.support.faults import class_folders, photo_folder
from tests.support.two_ranks import AT

REPOSITORY = Path(__file__).parents[2]
# Exit code, what the line says, and the step that is saved at the end.
EXPECTED = {
    "image": (3, "photos/3.png is cut short", AT),
    # The two steps that were lost changed nothing, and are not worth a checkpoint.
    "loss": (2, "loss or gradient was not finite for 2 steps", None),
    "SIGTERM": (75, "stopped by a signal: 4 of 8 steps", AT + 1),
    "SIGHUP": (75, "stopped by a signal: 4 of 8 steps", AT + 1),
    "SIGUSR1": (75, "stopped by a signal: 4 of 8 steps", AT + 1),
    "SIGINT": (75, "stopped by a signal: 4 of 8 steps", AT + 1),
    "worker": (5, "a data worker died", AT),
    "images": (3, "holds no images", None),
    "disk": (5, "No space left on device", AT + 1),
    "taken": (2, "already contains a run", None),
    "states": (5, "No space left on device", AT - 1),
}
FIRST = ("disk", "taken", "states")
# Signals of one meaning: one for each process.
ONCE = ("SIGHUP:1", "SIGUSR1:0")
BOTH = [n for n in EXPECTED if n not in FIRST and not any(one.startswith(n) for one in ONCE)]
# Only the first process writes the log and looks at the folder.
CASES = [*(f"{name}:{rank}" for name in BOTH for rank in range(2)), *(f"{n}:0" for n in FIRST)]
CASES += ONCE
SLOW = ("slow disk:0", "slow monitor:0", "slower monitor:0")
SKIPPED = ("skipped:0", "skipped:1")


def ends(place: Path, cases: list[str]) -> dict[str, Any]:
    """How both processes ended, for each fault; all in a process of their own."""
    photos = photo_folder(place / "photos")
    class_folders(place / "classes", 2)
    command = [sys.executable, "-m", "tests.support.two_ranks", str(photos), str(place), *cases]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def lines_of(end: dict[str, Any]) -> list[str]:
    return [line for text in end["said"] for line in text.splitlines() if "ssl-bench: " in line]


def saved_step(place: Path, fault: str) -> int | None:
    folder = place / fault.replace(":", "-")
    return load_state(folder, torch.device("cpu"))[0]["step"] if has_state(folder) else None


def codes_of(fault: str, code: int) -> list[int]:
    """Whoever got the Ctrl-C says so; to the other it is a wish to stop."""
    name, rank = fault.split(":")
    return [130 if name == "SIGINT" and number == int(rank) else code for number in range(2)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(place) -> dict[str, Any]:
    """How each fault ended; what takes long begins together."""
    return ends(place, [*SLOW, *SKIPPED, *CASES])


@pytest.mark.slow
def test_both_processes_end_together_saved_and_with_one_line(place, found):
    for fault in CASES:
        code, said, step = EXPECTED[fault.split(":")[0]]
        lines = lines_of(found[fault])
        assert found[fault]["codes"] == codes_of(fault, code), (fault, found[fault])
        assert len(lines) == 1, (fault, lines)
        assert (said if fault != "SIGINT:0" else "interrupted") in lines[0], fault
        assert saved_step(place, fault) == step, fault


@pytest.mark.slow
def test_fault_89_what_one_process_cannot_read_the_first_says_and_keeps(place, found):
    for fault in SKIPPED:
        assert found[fault]["codes"] == [0, 0], found
        assert "left out as unreadable: 3.jpg; 1 of 4 images" in found[fault]["said"][0]
        assert found[fault]["said"][1] == ""
        folder = place / fault.replace(":", "-")
        assert load_state(folder, torch.device("cpu"))[0]["left_out"] == [3]


@pytest.mark.slow
def test_nobody_waits_for_a_disk_and_for_a_monitor_as_long_as_the_option_says(place, found):
    assert found["slow disk:0"]["codes"] == [0, 0], found
    assert found["slow monitor:0"]["codes"] == [0, 0], found
    assert 0 not in found["slower monitor:0"]["codes"], found
    assert saved_step(place, "slow disk:0") == 8
