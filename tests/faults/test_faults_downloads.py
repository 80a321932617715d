"""Row 61 of the catalogue of faults: what servers send in place of a file, and what ends it."""

import io
import os
import signal
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.data.sources import SOURCES, Download
from ssl_bench.errors import DataError, MachineError
from ssl_bench.network import PublishedFile, download
from tests.support.faults import exit_code, fork, small_files


def packed() -> bytes:
    """A zip of three files of noise."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for number in range(3):
            noise = bytes((number + 7 * k * k) % 251 for k in range(100_000))
            archive.writestr(f"masks/{number}.png", noise)
    return content.getvalue()


CONTENT = packed()
CUT = 120_000


@pytest.fixture
def unproven(server, monkeypatch):
    """Let COCO-Stuff be one archive of which nobody publishes digest or length."""
    server.publish(CONTENT)
    one = Download("masks.zip", PublishedFile(server.url, None), len(CONTENT))
    source = replace(SOURCES["coco_stuff"], downloads=(one,))
    monkeypatch.setattr(data_command, "SOURCES", {"coco_stuff": source})
    return server


def fetch(code: int) -> None:
    assert main(["data", "download", "coco_stuff", "--data-root", "data"]) == code


def refuses(capsys, code: int = 5) -> str:
    """Fetch, which must fail in one line and leave neither archive nor files; that line."""
    capsys.readouterr()
    fetch(code)
    out, err = capsys.readouterr()
    assert out == ""
    assert not Path("data/masks.zip").exists()
    assert not list(Path("data").rglob("*.png"))
    last = err.splitlines()[-1]
    assert last.startswith("ssl-bench: ")
    return last


def require(content: bytes) -> None:
    assert Path("data/masks.zip").read_bytes() == content
    assert len(list(Path("data").rglob("*.png"))) == 3
    assert not list(Path("data").rglob("*.part*"))


@pytest.mark.parametrize("cut", [None, CUT])
def test_fault_61_a_length_that_nobody_says_is_no_length(place, capsys, unproven, cut):
    unproven.chunked, unproven.cut_after = True, cut
    assert "size" in refuses(capsys)
    unproven.chunked, unproven.headers["Content-Length"] = False, None
    assert "size" in refuses(capsys)


@pytest.mark.parametrize("content", [b"<html>log in</html>", CONTENT[:-30], CONTENT[:CUT], b""])
def test_fault_61_what_is_no_whole_archive_never_gets_its_name(place, capsys, unproven, content):
    unproven.content = content
    assert "masks.zip" in refuses(capsys)
    unproven.content = CONTENT
    fetch(0)
    require(CONTENT)


def test_fault_61_a_file_put_there_by_hand_is_compared_too(server, place):
    published = server.publish(CONTENT)
    Path("file").write_bytes(CONTENT[::-1])
    with pytest.raises(DataError, match=published.digest):
        download(published, Path("file"))
    Path("file").write_bytes(CONTENT)
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges == []


def test_fault_61_a_web_page_in_place_of_the_file_leaves_the_part_as_it_was(place, server):
    published = server.publish(CONTENT)
    server.cut_after = CUT
    with pytest.raises(MachineError, match=f"{CUT} of"):
        download(published, Path("file"))
    server.content, server.knows_ranges = b"<html>log in</html>", False
    server.headers = {"Content-Type": "text/html; charset=utf-8"}

    with pytest.raises(MachineError, match="web page"):
        download(published, Path("file"))

    server.content, server.knows_ranges, server.headers = CONTENT, True, {}
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges[-1] == f"bytes={CUT}-"


def test_fault_61_a_full_disk_keeps_the_part(place, server):
    published = server.publish(CONTENT)
    with (
        small_files(CUT),
        pytest.raises(MachineError, match="File too large"),
    ):
        download(published, Path("file"))
    assert Path("file.part").read_bytes() == CONTENT[:CUT]

    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges == ["", f"bytes={CUT}-"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_fault_61_a_command_that_is_ended_leaves_a_part(place, unproven, number):
    unproven.pause = 0.01
    words = ["data", "download", "coco_stuff", "--data-root", "data"]
    child = fork(lambda: main(words), stderr=Path("said"))
    part = Path("data/masks.zip.part")
    while not part.is_file() or not part.stat().st_size:
        time.sleep(0.01)
    os.kill(child, number)
    assert exit_code(child) == (130 if number == signal.SIGINT else -9)
    assert 0 < part.stat().st_size < len(CONTENT)
    unproven.pause = 0.0
    fetch(0)
    require(CONTENT)
    # Nothing would tell whether a part of it is of the same version.
    assert unproven.ranges == ["", ""]


def test_fault_61_commands_that_run_together_fetch_once(place, unproven):
    unproven.delay = 0.1
    words = ["data", "download", "coco_stuff", "--data-root", "data"]
    children = [fork(lambda: main(words), stderr=Path(f"said{n}")) for n in range(3)]
    assert [exit_code(child) for child in children] == [0, 0, 0]
    require(CONTENT)
    assert len(unproven.ranges) == 1


def test_fault_61_an_archive_put_there_by_hand_is_opened_before(place, capsys, unproven):
    Path("data").mkdir()
    Path("data/masks.zip").write_bytes(b"<html>log in</html>")
    fetch(3)
    assert "masks.zip" in capsys.readouterr().err
    assert not list(Path("data").rglob("*.png"))
