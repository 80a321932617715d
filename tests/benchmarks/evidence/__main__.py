"""What two CPU cores can show of the papers' tables: paired arms at reduced size, run by run.

    python -m tests.benchmarks.evidence.data ARCHIVES DATA
    python -m tests.benchmarks.evidence DATA --out runs/evidence --json FILE --rows skipless
    python -m tests.benchmarks.evidence DATA --out runs/smoke --smoke 4
    python -m tests.benchmarks.evidence.page

Where a row chooses its rates, each arm is trained for one epoch at each rate of one grid, without
the last images of every class of train/; the rate that is best on those trains the arm on all of
train/ with every seed, and only that is measured on test/. Each run has one thread and goes on
where it was stopped; what is finished stands in FILE and is not run again, also where its folder
is gone. The queue is in the order of `--rows`; a run that was stopped keeps its place, and `--arms`
begins with some of a row. `--smoke N` runs every arm for N steps on few images, to see that it
starts: into a file of its own, under names that no page takes.
"""

import argparse
from pathlib import Path

from ssl_bench.errors import SslBenchError
from ssl_bench.results.provenance import source_commit
from tests.benchmarks.evidence.rows import ROWS
from tests.benchmarks.evidence.running import Place, run_row
from tests.benchmarks.ledger import Ledger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="what tests.benchmarks.evidence.data made")
    parser.add_argument("--out", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--json", type=Path, help="what finished runs reached")
    where.add_argument("--smoke", type=int, metavar="STEPS", help="cut every run, to see it start")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--arms", nargs="+", help="some of the arms of one row; else all")
    options = parser.parse_args()
    if options.arms and len(options.rows) > 1:
        parser.error("--arms NAME ... takes one of --rows")
    if unknown := set(options.arms or ()) - set(ROWS[options.rows[0]].arms):
        known = ", ".join(ROWS[options.rows[0]].arms)
        parser.error(f"--arms must be among {known}, got {', '.join(sorted(unknown))}")
    # Kept from here on: the commit that runs, before the ledger in its tree changes.
    source_commit()
    options.out.mkdir(parents=True, exist_ok=True)
    place = Place(options.data.absolute(), options.out.absolute(), options.smoke)
    ledger = Ledger(options.json or options.out / "smoke.json")
    try:
        for name in options.rows:
            run_row(ledger, place, name, options.arms or ROWS[name].arms)
    except SslBenchError as error:
        raise SystemExit(f"{error}") from error


if __name__ == "__main__":
    main()
