"""Test the mutation testing program tests/mutants.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import mutants

MUTANTS = mutants.load_mutants(mutants.ROOT / "tests/mutants.yaml")


def test_mutants_match_the_code():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.old in (mutants.ROOT / mutant.file).read_text(), mutant.name
        assert mutant.old != mutant.new, mutant.name
        assert mutant.tests, mutant.name
        assert all((mutants.ROOT / name).exists() for name in mutant.tests), mutant.name


@pytest.mark.slow
def test_only_caught_mutants_are_called_caught(tmp_path):
    cases = {
        "caught": ("2 * x", "3 * x", "double"),
        "survives": ("2 * x", "x * x", "double"),
        "is_absent": ("3 * x", "2 * x", "double"),
        "breaks_the_import": ("def", "dfe", "double"),
        "has_a_broken_test": ("2 * x", "3 * x", "broken"),
        "has_a_broken_import": ("2 * x", "3 * x", "import"),
    }
    specs = [
        {"name": name, "file": "doubling.py", "old": old, "new": new}
        | {"tests": [f"tests/test_{test}.py"]}
        for name, (old, new, test) in cases.items()
    ]
    code = "def double(x):\n    return 2 * x\n"
    files = {
        "doubling.py": code,
        "tests/test_double.py": (
            "from doubling import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
        ),
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
        "tests/test_import.py": "import nothing_of_this_name\n",
        "tests/mutants.yaml": yaml.safe_dump(specs),
        "tests/mutants.py": Path(mutants.__file__).read_text(),
    }
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def run(*words: str) -> tuple[int, dict[str, str]]:
        # These tests need none of the large packages.
        program = "from tests import mutants; mutants.HEAVY = (); mutants.main()"
        ended = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True
        )
        lines = ended.stdout.splitlines()
        return ended.returncode, dict(line.rsplit(" (", 1)[0].split(": ", 1) for line in lines)

    assert run("--jobs", "2") == (
        1,
        {
            "caught": "caught by tests/test_double.py::test_double",
            "survives": "SURVIVED",
            "is_absent": "OLD TEXT NOT FOUND",
            "breaks_the_import": "caught by tests/test_double.py",
            "has_a_broken_test": "tests/test_broken.py::test_broken FAILS WITHOUT THE MUTANT",
            "has_a_broken_import": "tests/test_import.py FAILS WITHOUT THE MUTANT",
        },
    )
    assert run("caught")[0] == 0
    assert (tmp_path / "doubling.py").read_text() == code
