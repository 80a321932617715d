"""Generated pages and pictures hold what the committed records say."""

import subprocess

import pytest

from tests.benchmarks import generated
from tests.benchmarks.generated import (
    NOT_MADE,
    ROOT,
    WHOLE,
    evidence_figures,
    stale,
)
from tests.support.faults import unchecked_types


@pytest.mark.slow
def test_no_generated_file_is_out_of_date():
    again = "run: python -m tests.benchmarks.generated --write"
    with unchecked_types():
        assert list(stale(ROOT)) == [], again


@pytest.mark.slow
def test_the_pages_of_evidence_match_their_ledger():
    for name in ("evidence", "evidence_runs"):
        page = f"results/tables/{name}.md"
        assert (ROOT / page).read_text() == WHOLE[page](ROOT), "run tests.benchmarks.generated"


def test_every_table_and_figure_is_made_again_or_says_why_not():
    listed = subprocess.run(
        ["git", "ls-files", "results/tables", "results/figures"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    known = [*WHOLE, *NOT_MADE, *evidence_figures(ROOT)]
    assert len(known) == len(set(known))
    assert set(listed) <= set(known)
    assert all((ROOT / name).is_file() for name in known)


def always(text):
    return lambda _: text


def test_what_differs_is_named(tmp_path, monkeypatch):
    whole = {"same.md": always("a\n"), "other.md": always("b\n"), "gone.md": always("c")}
    monkeypatch.setattr(generated, "WHOLE", whole)
    monkeypatch.setattr(generated, "evidence_figures", always({}))
    (tmp_path / "same.md").write_text("a\n")
    (tmp_path / "other.md").write_text("B\n")
    assert list(stale(tmp_path)) == ["other.md", "gone.md"]
