"""A complete report replaces an older report, and no other folder."""

from pathlib import Path

import pytest

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.report.writing import replace_report
from ssl_bench.results import ResultStore
from tests.support.faults import expect_error
from tests.support.report_cells import cell


def write(folder: Path, text: str) -> None:
    with replace_report(folder) as new:
        (new / "index.html").write_text(text)
        if text == "half":
            raise KeyboardInterrupt
        if text == "full":
            raise OSError(28, "no space")


@pytest.mark.parametrize("into", ["thesis", "thesis/chapter.txt"])
def test_other_files_are_not_replaced(tmp_path, capsys, into):
    ResultStore(tmp_path / "results").save(cell())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("years of work")

    report = ["report", "--out", str(tmp_path / "results"), "--into", str(tmp_path / into)]
    assert "--into" in expect_error(capsys, report, 2)

    assert [path.read_text() for path in (tmp_path / "thesis").iterdir()] == ["years of work"]


def test_only_a_complete_report_replaces_an_older_one(tmp_path):
    report = tmp_path / "report"
    write(report, "first")
    with pytest.raises(KeyboardInterrupt):
        write(report, "half")
    with pytest.raises(MachineError, match="no space") as caught:
        write(report, "full")
    assert caught.value.hint == ("--into", "{folder}")
    assert (report / "index.html").read_text() == "first"

    write(report, "second")
    assert (report / "index.html").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_files_written_in_the_meantime_are_not_replaced(tmp_path):
    thesis = tmp_path / "report/thesis.txt"

    def write_meanwhile() -> None:
        with replace_report(tmp_path / "report"):
            thesis.parent.mkdir()
            thesis.write_text("years of work")

    with pytest.raises(ConfigurationError) as caught:
        write_meanwhile()
    assert caught.value.hint == ("--into", "{folder}")
    assert thesis.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_an_interrupt_while_renaming_leaves_the_older_report(tmp_path, monkeypatch, name):
    write(tmp_path / "report", "first")
    rename = Path.rename

    def interrupted(path, target):
        if path.suffix == ".new" or name == "old":
            monkeypatch.undo()
            if name == "old":
                rename(path, target)
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "report", "second")

    assert (tmp_path / "report/index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
