"""Which share of the lines of each room the tests ran, from coverage's JSON.

    python -m tests.support.room_coverage build/coverage.json

Lines that ran in other processes than the tests' own, such as workers and ranks, do not count.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any


def rooms(report: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Lines that ran and lines in all, of every room: a folder of a package, or its files."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for path, file in report["files"].items():
        folders, summary = PurePath(path).parts[:-1], file["summary"]
        room = "/".join(folders[:2]) + "/"
        ran, lines = found[room]
        found[room] = (ran + summary["covered_lines"], lines + summary["num_statements"])
    return dict(sorted(found.items()))


def table(report: Mapping[str, Any]) -> str:
    found = rooms(report)
    found["all"] = (
        sum(ran for ran, _ in found.values()),
        sum(lines for _, lines in found.values()),
    )
    width = max(map(len, found))
    rows = [
        f"{room:<{width}} {100 * ran / max(lines, 1):6.1f} % {lines - ran:6} of {lines:6} not run"
        for room, (ran, lines) in found.items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
