"""The table of docs/reliability.md, from the catalogue of faults and the tests of each row.

python docs/_faults.py
"""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reliability.md"
CATALOGUE = ROOT / "docs/_faults.yaml"
BEGIN, END = "<!-- faults -->\n\n", "\n<!-- end of faults -->"
_TEST = re.compile(r"^def (test_fault_(\d+)_\w+)\(", re.MULTILINE)


def table() -> str:
    """Markdown, a row a fault, with the number of tests whose names begin with its number.

    Raises:
        ValueError: a row has no test, or a test no row.
    """
    rows = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    tests = tests_by_row()
    if lone := sorted(rows.keys() ^ tests.keys()):
        raise ValueError(
            f"expected rows of docs/_faults.yaml and tests named test_fault_NN_ for the same "
            f"numbers, got only one of both for {', '.join(map(str, lone))}"
        )
    lines = ["| # | fault | what happens | tests |", "|---|---|---|---|"]
    lines += [
        f"| {number} | {row['fault']} | {row['outcome']} | {len(tests[number])} |"
        for number, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


def tests_by_row() -> dict[int, list[str]]:
    """Names of the tests of each row, as they stand in their files."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, number in _TEST.findall(path.read_text(encoding="utf-8")):
            found.setdefault(int(number), []).append(name)
    return found


def page() -> str:
    """The page with the table that holds now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
