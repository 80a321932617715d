"""The log of a run is taken up whatever came into its file."""

import json
from pathlib import Path

import pytest

from pretrain.logging import Journal
from ssl_bench.cli.__main__ import main
from tests.support.faults import pretraining
from tests.support.runs import log_rows

ROW = '{"step": %d, "loss": 0.5}'
STRANGE = {
    "a list": b"[1]",
    "a number": b"1",
    "a text": b'"step"',
    "null": b"null",
    "other keys": b'{"epoch": 1}',
    "a step that is none": b'{"step": "1"}',
    "a step that is true": b'{"step": true}',
    "a step that is half": b'{"step": 0.5}',
    "half a row": b'{"step": 1, "lo',
    "no text": b'{"step": 1, "\xff": 1}',
    "zeros": bytes(40),
    "brackets": b"[" * 100_000,
    "a long number": b'{"step": ' + b"9" * 5000 + b"}",
    "nothing": b"",
}


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_a_line_that_is_no_row_is_dropped_and_the_rows_around_it_stay(tmp_path, line):
    path = tmp_path / "log.jsonl"
    first, second, lost = (ROW % step for step in (1, 2, 3))
    path.write_bytes(b"\n".join((first.encode(), line, second.encode(), lost.encode(), line)))

    journal = Journal(path, last_step=2)
    journal.write({"step": 3, "loss": 0.25})
    journal.close()

    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert rows == [json.loads(first), json.loads(second), {"step": 3, "loss": 0.25}]


def test_a_run_goes_on_whose_log_holds_other_things_than_rows(place):
    run = pretraining(place / "photos", "run")
    assert main([*run, "train.max_minutes=0.0"]) == 0
    with Path("run/log.jsonl").open("ab") as log:
        log.write(b"\n".join(STRANGE.values()))

    assert main([*run, "--resume"]) == 0

    assert [row["step"] for row in log_rows("run")] == [1, 2, 3, 4, 5, 6]
