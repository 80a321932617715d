"""The table of docs/reliability.md, from the list of faults in docs/_faults.yaml.

python docs/_faults.py
"""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reliability.md"
CATALOGUE = ROOT / "docs/_faults.yaml"
BEGIN, END = "<!-- faults -->\n\n", "\n<!-- end of faults -->"


def table() -> str:
    """Return the table as Markdown, with one row for each fault."""
    faults = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8")).values()
    rows = [f"| {fault['fault']} | {fault['outcome']} |" for fault in faults]
    return "\n".join(["| fault | what happens |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
