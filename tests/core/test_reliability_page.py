"""The table of docs/reliability.md is the catalogue of faults and the tests that there are."""

import re
import runpy
from typing import Any

import pytest
import yaml

from ssl_bench import errors
from tests.support.page_commands import ROOT

PAGE = ROOT / "docs/reliability.md"
CODES = {0, errors.INTERRUPTED} | {
    kind.exit_code
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SslBenchError) and kind.exit_code > 1
}


@pytest.fixture
def faults() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/_faults.py"))


def catalogue() -> dict[int, dict[str, str]]:
    return yaml.safe_load((ROOT / "docs/_faults.yaml").read_text())


def test_a_row_is_its_text_and_the_number_of_its_tests(faults, tmp_path):
    (tmp_path / "tests/faults").mkdir(parents=True)
    (tmp_path / "tests/faults/test_some.py").write_text(
        "def test_fault_01_a(place):\n    ...\n\n\ndef test_fault_01_b():\n    ...\n"
    )
    (tmp_path / "rows.yaml").write_text("1:\n  fault: 'a file'\n  outcome: '3, its name'\n")
    place = faults["table"].__globals__
    place |= {"ROOT": tmp_path, "CATALOGUE": tmp_path / "rows.yaml"}

    assert faults["table"]().splitlines()[2:] == ["| 1 | a file | 3, its name | 2 |"]

    (tmp_path / "rows.yaml").write_text("2:\n  fault: a\n  outcome: b\n")
    with pytest.raises(ValueError, match="only one of both for 1, 2"):
        faults["table"]()


def test_the_page_has_the_table_that_holds(faults):
    assert PAGE.read_text() == faults["page"](), "run: python docs/_faults.py"


def test_the_rows_are_numbered_in_order():
    assert list(catalogue()) == list(range(1, len(catalogue()) + 1))
    assert len(catalogue()) >= 76


def test_the_codes_of_the_page_are_those_of_the_errors():
    listed = re.search(r"Exit codes: (.*?)\. `--debug`", PAGE.read_text(), re.DOTALL)
    assert listed
    assert {int(code) for code in re.findall(r"\b\d+\b", listed[1])} == CODES
    first = [re.match(r"(\d+)( |$)", row["outcome"]) for row in catalogue().values()]
    assert {int(found[1]) for found in first if found} <= CODES
