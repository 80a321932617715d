"""Test the commands with random arguments and damaged files."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import command_fuzzing, fuzzing
from tests.support.faults import exit_code, fork, unchecked_types
from tests.support.fuzzing import KINDS


def run_program(file: Path, program: Callable[[], int]) -> str:
    def work() -> int:
        # An installed ssl-bench does not check types.
        with unchecked_types():
            return program()

    # The program limits the memory of its own process.
    code = exit_code(fork(work, stderr=file))
    text = file.read_text(errors="replace")
    assert code == 0, text[-8000:]
    return text


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 3), pytest.param(1, 50, marks=pytest.mark.slow)], ids=str
)
def test_random_commands_end_as_documented(tmp_path, seed, count):
    text = run_program(tmp_path / "output", partial(command_fuzzing.main, seed, count))

    # The last line counts how often commands ended in each way.
    assert sum(map(int, re.findall(r"': (\d+)", text.splitlines()[-1]))) == count


@pytest.mark.parametrize("count", [5, pytest.param(80, marks=pytest.mark.slow)])
def test_damaged_inputs_of_every_kind_are_read_or_refused(tmp_path, count):
    text = run_program(tmp_path / "output", partial(fuzzing.main, [*KINDS], count))

    lines = re.findall(r"^(\w+) (\{.*\})", text, re.MULTILINE)
    found = {kind: sum(map(int, re.findall(r": (\d+)", counts))) for kind, counts in lines}
    assert found == dict.fromkeys(KINDS, count)
