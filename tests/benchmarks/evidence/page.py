"""The page of what this suite has shown and that of its runs, from the ledger alone.

    python -m tests.benchmarks.evidence.page

writes results/tables/evidence.md, a line a claim and nothing else, and beside it evidence_runs.md
and results/figures/evidence_ROW.svg, of rows that have a run.
"""

from collections.abc import Sequence
from pathlib import Path

from ssl_bench.intervals import Interval
from tests.benchmarks.evidence.claims import CLAIMS, Claim
from tests.benchmarks.evidence.runs_page import draw, figure_name, figures, runs_page
from tests.benchmarks.evidence.verdicts import (
    Found,
    Runs,
    Verdict,
    diverged_of,
    seeds_done,
    verdict,
)
from tests.benchmarks.ledger import Ledger

ROOT = Path(__file__).parents[3]
LEDGER = ROOT / "results/benchmarks/evidence-cpu.json"
PAGE = "results/tables/evidence.md"
RUNS_PAGE = "results/tables/evidence_runs.md"

_BEGINNING = """\
# What this suite has shown

Made by `python -m tests.benchmarks.evidence.page` from `results/benchmarks/evidence-cpu.json`
alone; `docs/evidence.md` says how the queue runs, and [its runs](evidence_runs.md) have curves,
rates, commits and commands. Two CPU cores can show order and paired differences at reduced size,
never a published level. What each row may claim and what would refute it was written in
`tests/benchmarks/evidence/claims.py` before its runs; a row without a finished run says so, and one
that is refuted or shows nothing stands like any other. Ours are means over seeds of every arm;
intervals are 95 %, over seeds (Student's t of differences paired by seed) and over images
(bootstrap of differences, the same images in all arms). Hours are those of one core beside other
work, for all runs of the arms that a line names with those that chose the rates.

| | claim, refuted by | published | ours | same direction | difference [interval] | hours | seeds |
|---|---|---|---|---|---|---:|---:|
"""
_DIRECTION = {"supported": "yes", "refuted": "no"}


def page(runs: Runs) -> str:
    """Markdown of a ledger's content."""
    lines = [_line(claim, verdict(claim, runs), runs) for claim in CLAIMS]
    return _BEGINNING + "\n".join(lines) + "\n"


def _line(claim: Claim, found: Verdict, runs: Runs) -> str:
    says = f"{claim.asks}: **{claim.says}**; refuted by {claim.refuted}"
    says += f" ({claim.limits})" if claim.limits else ""
    ours = [f"{arm} {value:.2f}" for arm, value in found.ours.items()]
    ours += [f"{name} diverged" for name in diverged_of(claim, runs)]
    done, asked = seeds_done(claim, runs)
    cells = [
        claim.name,
        says,
        claim.published_text(),
        " / ".join(ours) or "-",
        _DIRECTION.get(found.word, found.word),
        "<br>".join(_difference(one) for one in found.found if one.value is not None) or "-",
        f"{found.hours:.1f}",
        f"{done} of {asked}",
    ]
    return f"| {' | '.join(cells)} |"


def _difference(found: Found) -> str:
    seeds = _interval(found.over_seeds, "seeds")
    images = _interval(found.over_images, "images")
    return f"{found.text}: {found.value:.2f}{seeds}{images}"


def _interval(interval: Interval | None, over: str) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}] {over}"


def written(root: Path, runs: Runs) -> Sequence[Path]:
    """Write both pages and the pictures below a folder; gives back what was written."""
    texts = {root / PAGE: page(runs), root / RUNS_PAGE: runs_page(runs)}
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    pictures = {row: root / "results/figures" / figure_name(row) for row in figures(runs)}
    for row, file in pictures.items():
        draw(row, runs, file)
    return [*texts, *pictures.values()]


def main() -> None:
    for path in written(ROOT, Ledger(LEDGER).runs):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
