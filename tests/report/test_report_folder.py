"""A report replaces an older report when it is complete, and nothing else."""

from pathlib import Path

import pytest

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.report.writing import replace_report
from ssl_bench.results import ResultStore
from tests.support.faults import fails
from tests.support.report_cells import cell


@pytest.mark.parametrize(
    "into", ["thesis", "thesis/chapter.txt"], ids=["folder with other files", "file"]
)
def test_other_files_are_not_replaced(tmp_path, capsys, into):
    ResultStore(tmp_path / "results").save(cell())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")

    report = ["report", "--out", str(tmp_path / "results"), "--into", str(tmp_path / into)]
    message = fails(capsys, report, 2)

    assert str(tmp_path / into) in message
    assert "--into" in message
    assert [path.read_text() for path in (tmp_path / "thesis").iterdir()] == ["years of work"]


def test_only_a_complete_report_replaces_an_older_one(tmp_path):
    def write(text):
        with replace_report(tmp_path / "report") as new:
            (new / "index.html").write_text(text)
            if text == "half":
                raise KeyboardInterrupt
            if text == "full":
                raise OSError(28, "no space")

    write("first")
    with pytest.raises(KeyboardInterrupt):
        write("half")
    with pytest.raises(MachineError, match="no space") as caught:
        write("full")
    assert caught.value.hint == ("--into", "{folder}")
    assert (tmp_path / "report" / "index.html").read_text() == "first"

    write("second")
    assert (tmp_path / "report" / "index.html").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_files_written_meanwhile_are_not_replaced(tmp_path):
    thesis = tmp_path / "report" / "thesis.txt"

    def write() -> None:
        with replace_report(tmp_path / "report"):
            thesis.parent.mkdir()
            thesis.write_text("years of work")

    with pytest.raises(ConfigurationError) as caught:
        write()
    assert caught.value.hint == ("--into", "{folder}")
    assert thesis.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_an_interrupt_while_renaming_leaves_the_older_report(tmp_path, monkeypatch, name):
    with replace_report(tmp_path / "report") as new:
        (new / "index.html").write_text("first")
    rename = Path.rename

    def interrupted(path, target):
        if path.suffix == ".new" or name == "old":
            monkeypatch.undo()
            if name == "old":
                rename(path, target)
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), replace_report(tmp_path / "report") as new:
        (new / "index.html").write_text("second")

    assert (tmp_path / "report" / "index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
