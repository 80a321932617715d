"""Thousands of damaged inputs give a result or our own error, in limited time and memory."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import command_fuzzing, fuzzing
from tests.support.faults import exit_code, fork, unchecked_types
from tests.support.fuzzing import KINDS

REPOSITORY = Path(__file__).parents[2]
COUNT = 120


def said(program: str, *words: object) -> str:
    """Return the output of a fuzzing program, which must end with exit code 0.

    It runs in its own process, whose memory it limits. This process also lacks the type checks of
    the tests, which refuse arguments that an installed ssl-bench accepts.
    """
    command = [sys.executable, "-m", f"tests.support.{program}", *map(str, words)]
    run = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", timeout=900
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}{run.stderr[-2000:]}"
    return run.stdout


def said_at_once(file: Path, program: Callable[[], int]) -> str:
    """Return the output of a fuzzing program, run in a fork to save imports."""

    def work() -> int:
        with unchecked_types():
            return program()

    code = exit_code(fork(work, stderr=file))
    text = file.read_text(errors="replace")
    assert code == 0, text[-8000:]
    return text


def inputs_by_kind(text: str) -> dict[str, int]:
    ends = re.findall(r"^(\w+) (\{.*\})", text, re.MULTILINE)
    return {name: sum(map(int, re.findall(r": (\d+)", counts))) for name, counts in ends}


def commands_ended(text: str) -> int:
    """Return how many commands were drawn and run."""
    return sum(map(int, re.findall(r"': (\d+)", text.splitlines()[-1])))


def test_a_few_commands_drawn_at_random_end_as_documented(tmp_path):
    text = said_at_once(tmp_path / "said", partial(command_fuzzing.main, seed=0, count=3))
    assert commands_ended(text) == 3


def test_a_few_damaged_inputs_of_every_kind_end_well(tmp_path):
    text = said_at_once(tmp_path / "said", partial(fuzzing.main, [*KINDS], count=5))
    assert inputs_by_kind(text) == dict.fromkeys(KINDS, 5)


@pytest.mark.slow
def test_a_hundred_commands_drawn_at_random_end_as_documented():
    assert commands_ended(said("command_fuzzing", 1, 100)) == 100


@pytest.mark.slow
def test_hundreds_of_damaged_inputs_end_in_an_answer_or_an_error_of_our_own():
    assert inputs_by_kind(said("fuzzing", ",".join(KINDS), COUNT)) == dict.fromkeys(KINDS, COUNT)
