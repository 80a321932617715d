"""Generated pages and pictures hold what the committed records say."""

import subprocess

import pytest

from ssl_bench.errors import DataError
from tests.benchmarks import generated
from tests.benchmarks.generated import (
    NOT_MADE,
    ROOT,
    TABLES,
    WHOLE,
    evidence_figures,
    stale,
    with_tables,
)


@pytest.mark.slow
def test_no_generated_file_is_out_of_date():
    again = "run: python -m tests.benchmarks.generated --write"
    assert list(stale(ROOT)) == [], again


@pytest.mark.parametrize("name", ["evidence", "evidence_runs"])
def test_the_pages_of_evidence_are_of_their_ledger(name):
    page = f"results/tables/{name}.md"
    assert (ROOT / page).read_text() == WHOLE[page](ROOT), "run tests.benchmarks.evidence.page"


def test_every_table_and_figure_is_made_again_or_says_why_not():
    listed = subprocess.run(
        ["git", "ls-files", "results/tables", "results/figures"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    known = [*WHOLE, *TABLES, *NOT_MADE, *evidence_figures(ROOT)]
    assert len(known) == len(set(known))
    assert set(listed) <= set(known)
    assert all((ROOT / name).is_file() for name in known)


def always(text):
    return lambda _: text


def test_what_differs_is_named(tmp_path, monkeypatch):
    whole = {"same.md": always("a\n"), "other.md": always("b\n"), "gone.md": always("c")}
    monkeypatch.setattr(generated, "WHOLE", whole)
    monkeypatch.setattr(generated, "TABLES", {"page.md": always("| x |\n|---|\n| 2 |\n")})
    monkeypatch.setattr(generated, "evidence_figures", always({}))
    (tmp_path / "same.md").write_text("a\n")
    (tmp_path / "other.md").write_text("B\n")
    (tmp_path / "page.md").write_text("Words.\n\n| x |\n|---|\n| 1 |\n\nMore.\n")
    assert list(stale(tmp_path)) == ["other.md", "gone.md", "page.md"]


PAGE = "One.\n\n| x |\n|---|\n| 1 |\n\nTwo.\n\n| x |\n|---|\n| 2 |\n\nEnd.\n"


def test_printed_tables_take_the_places_of_equal_heads_in_their_order():
    printed = "machine\n| x |\n|---|\n| 7 |\n\n| x |\n|---|\n| 8 |"
    assert with_tables(PAGE, printed) == PAGE.replace("| 1 |", "| 7 |").replace("| 2 |", "| 8 |")


@pytest.mark.parametrize(
    ("printed", "message"),
    [("| y |\n|---|\n| 7 |", "found none"), ("| x |\n|---|\n| 7 |\n| 8 |", "expected 4 lines")],
)
def test_a_table_without_a_place_is_refused(printed, message):
    with pytest.raises(DataError, match=message):
        with_tables(PAGE, printed)
