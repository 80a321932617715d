"""A report takes the place of an older report, whole, and of nothing else."""

from pathlib import Path

import pytest

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.report.writing import replacing
from ssl_bench.results import ResultStore
from tests.support.faults import fails
from tests.support.report_cells import cell


@pytest.mark.parametrize(
    ("into", "complaint"), [("thesis", "is no report"), ("thesis/chapter.txt", "is no folder")]
)
def test_what_is_no_report_is_not_touched(tmp_path, capsys, into, complaint):
    ResultStore(tmp_path / "results").save(cell())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")

    report = ["report", "--out", str(tmp_path / "results"), "--into", str(tmp_path / into)]
    said = fails(capsys, report, 2)

    assert complaint in said
    assert [path.read_text() for path in (tmp_path / "thesis").iterdir()] == ["years of work"]


def test_a_report_takes_the_place_of_an_older_one_only_when_it_is_whole(tmp_path):
    def write(text):
        with replacing(tmp_path / "report") as new:
            (new / "index.html").write_text(text)
            if text == "half":
                raise KeyboardInterrupt
            if text == "full":
                raise OSError(28, "no space")

    write("first")
    with pytest.raises(KeyboardInterrupt):
        write("half")
    with pytest.raises(MachineError, match="no space; free space"):
        write("full")
    assert (tmp_path / "report" / "index.html").read_text() == "first"

    write("second")
    assert (tmp_path / "report" / "index.html").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_what_came_while_a_report_was_written_is_not_replaced(tmp_path):
    thesis = tmp_path / "report" / "thesis.txt"

    def write() -> None:
        with replacing(tmp_path / "report"):
            thesis.parent.mkdir()
            thesis.write_text("years of work")

    with pytest.raises(ConfigurationError, match="is no report"):
        write()
    assert thesis.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_an_interrupt_between_two_names_leaves_the_older_report(tmp_path, monkeypatch, name):
    with replacing(tmp_path / "report") as new:
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
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "report") as new:
        (new / "index.html").write_text("second")

    assert (tmp_path / "report" / "index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
