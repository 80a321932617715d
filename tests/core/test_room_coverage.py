"""Coverage is summed by room."""

from tests.support.room_coverage import table


def _file(ran: int, lines: int) -> dict[str, dict[str, int]]:
    return {"summary": {"covered_lines": ran, "num_statements": lines}}


def test_files_of_a_room_are_counted_together_and_empty_ones_are_whole():
    files = {
        "probes/knn.py": _file(9, 10),
        "probes/heads/linear.py": _file(1, 2),
        "probes/heads/deep/losses.py": _file(2, 4),
        "probes/pca/__init__.py": _file(0, 0),
    }

    rows = [line.split() for line in table({"files": files}).splitlines()]

    assert [(row[0], row[1], row[3], row[5]) for row in rows] == [
        ("probes/", "90.0", "1", "10"),
        ("probes/heads/", "50.0", "3", "6"),
        ("probes/pca/", "0.0", "0", "0"),
        ("all", "75.0", "4", "16"),
    ]
