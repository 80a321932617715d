"""Test that generated pages and figures match the committed measurements."""

import subprocess

import pytest

from tests.benchmarks import generated
from tests.benchmarks.generated import NOT_GENERATED, ROOT, generators, outdated
from tests.support.faults import unchecked_types


@pytest.mark.slow
def test_no_generated_file_is_out_of_date():
    with unchecked_types():
        names = list(outdated(ROOT))
    assert names == [], "run: python -m tests.benchmarks.generated --write"


def test_every_table_and_figure_is_checked_or_has_a_reason():
    listed = subprocess.run(
        ["git", "ls-files", "results/tables", "results/figures"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    known = [*generators(ROOT), *NOT_GENERATED]
    assert len(known) == len(set(known))
    assert set(listed) <= set(known)
    assert all((ROOT / name).is_file() for name in known)


def test_files_that_differ_are_named(tmp_path, monkeypatch):
    texts = {"same.md": "a\n", "other.md": "b\n", "missing.md": "c"}
    files = {name: lambda _, text=text: text for name, text in texts.items()}
    monkeypatch.setattr(generated, "generators", lambda _: files)
    (tmp_path / "same.md").write_text("a\n")
    (tmp_path / "other.md").write_text("B\n")
    assert list(outdated(tmp_path)) == ["other.md", "missing.md"]
