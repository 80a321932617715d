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
