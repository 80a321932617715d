"""Row 61 of the catalogue of faults: what servers send in place of a file, and what ends it."""

import io
import os
import signal
import ssl
import subprocess
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files import unpacking
from ssl_bench.data.sources import SOURCES, Download
from ssl_bench.errors import MachineError
from ssl_bench.network import answers
from ssl_bench.network.downloads import Published, download
from tests.support.faults import exit_code, fork, small_files
from tests.support.web import WebServer

TAG, OTHER_TAG = '"one"', '"two"'


def packed(marker: int = 0) -> bytes:
    """A zip of three files of noise, which are others for another marker."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for number in range(3):
            noise = bytes((marker + number + 7 * k * k) % 251 for k in range(100_000))
            archive.writestr(f"masks/{number}.png", noise)
    return content.getvalue()


CONTENT, CHANGED = packed(), packed(9)
CUT = 120_000


@pytest.fixture
def unproven(server, monkeypatch):
    """Let COCO-Stuff be one archive of which nobody publishes digest or length."""
    server.publish(CONTENT)
    server.headers = {"ETag": TAG}
    one = Download("masks.zip", Published(server.url, None), len(CONTENT))
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
    assert "does not say how long it is" in refuses(capsys)
    unproven.chunked, unproven.headers["Content-Length"] = False, None
    assert "does not say how long it is" in refuses(capsys)


def test_fault_61_a_cut_transfer_in_chunks_is_no_file_and_goes_on(server, place):
    published = server.publish(CONTENT)
    server.chunked, server.cut_after = True, CUT
    with pytest.raises(MachineError, match=f"broke off after {CUT} of {len(CONTENT)} bytes; type"):
        download(published, Path("file"))
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges == ["", f"bytes={CUT}-"]


@pytest.mark.parametrize("minds_versions", [True, False])
def test_fault_61_a_file_that_changed_between_two_parts_is_never_a_mixture(
    place, capsys, unproven, minds_versions
):
    unproven.cut_after, unproven.minds_versions = CUT, minds_versions
    assert "to go on from there" in refuses(capsys)
    unproven.content, unproven.headers["ETag"] = CHANGED, OTHER_TAG
    if not minds_versions:
        assert "has changed since the first part of it came; nothing was kept" in refuses(capsys)
    fetch(0)
    require(CHANGED)


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": f"W/{TAG}"},
        {},
        {
            "Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT",
            "Date": "Sun, 22 Nov 2026 10:00:20 GMT",
        },
        {"Last-Modified": "yesterday", "Date": "today"},
    ],
)
def test_fault_61_what_proves_no_version_is_not_gone_on_with(place, capsys, unproven, headers):
    unproven.cut_after, unproven.headers = CUT, headers
    assert "to begin anew, as nothing proves it unchanged" in refuses(capsys)
    unproven.content = CHANGED
    fetch(0)
    require(CHANGED)
    assert unproven.ranges == ["", ""]


def test_fault_61_an_old_date_proves_a_version(place, capsys, unproven):
    date = "Sun, 22 Nov 2020 10:00:00 GMT"
    unproven.headers = {"Last-Modified": date, "Date": "Sun, 22 Nov 2026 10:00:00 GMT"}
    unproven.cut_after = CUT
    refuses(capsys)
    fetch(0)
    require(CONTENT)
    assert unproven.ranges == ["", f"bytes={CUT}-"]


@pytest.mark.parametrize(
    ("start", "end", "total"),
    [(CUT - 1, 0, 0), (0, 0, 0), (CUT, -1, 0), (CUT, 0, 1), (CUT, 1, 1)],
)
def test_fault_61_another_range_than_the_one_asked_for_is_refused(
    place, capsys, unproven, start, end, total
):
    unproven.cut_after = CUT
    refuses(capsys)
    size = len(CONTENT)
    unproven.headers["Content-Range"] = f"bytes {start}-{size - 1 + end}/{size + total}"
    assert "nothing was kept" in refuses(capsys)
    del unproven.headers["Content-Range"]
    fetch(0)
    require(CONTENT)


def test_fault_61_a_web_page_in_place_of_the_file_leaves_the_part_as_it_was(
    place, capsys, unproven
):
    unproven.cut_after = CUT
    refuses(capsys)
    unproven.content, unproven.knows_ranges = b"<html>log in</html>", False
    unproven.headers |= {"Content-Type": "text/html; charset=utf-8"}
    said = refuses(capsys)
    assert "answers with a web page (text/html)" in said
    assert "the part that came is kept" in said
    unproven.content, unproven.knows_ranges = CONTENT, True
    del unproven.headers["Content-Type"]
    fetch(0)
    require(CONTENT)
    assert unproven.ranges[-1] == f"bytes={CUT}-"


@pytest.mark.parametrize("content", [b"<html>log in</html>", CONTENT[:-30], CONTENT[:CUT], b""])
def test_fault_61_what_is_no_whole_archive_never_gets_its_name(place, capsys, unproven, content):
    unproven.content = content
    assert "is not what its name says: " in refuses(capsys)
    unproven.content = CONTENT
    fetch(0)
    require(CONTENT)


def test_fault_61_a_file_packed_for_the_way_is_refused(place, capsys, unproven):
    unproven.headers["Content-Encoding"] = "gzip"
    assert "answers with gzip around the file" in refuses(capsys)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("endless", [True, False])
def test_fault_61_more_than_was_published_is_not_read(server, place, chunked, endless):
    published = server.publish(CONTENT)
    server.content += b"more"
    server.chunked, server.endless = chunked, endless
    start = time.monotonic()
    with pytest.raises(
        MachineError, match=f"sends more than its|bytes, published were {len(CONTENT)}"
    ):
        download(published, Path("file"))
    assert time.monotonic() - start < 2
    assert Path("file.part").stat().st_size == 0


def test_fault_61_a_transfer_that_all_but_stands_still_is_ended_and_goes_on(
    server, place, monkeypatch
):
    published = server.publish(CONTENT)
    server.pause = 0.1
    monkeypatch.setattr(answers, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(answers, "_SLOWEST", 100_000)
    with pytest.raises(MachineError, match=r"broke off after \d000 of"):
        download(published, Path("file"))
    server.pause = 0.0
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges[1] != ""


def test_fault_61_a_full_disk_keeps_the_part(place, capsys, unproven):
    with small_files(CUT):
        said = refuses(capsys)
    assert "cannot write data/masks.zip: File too large; free space" in said
    assert Path("data/masks.zip.part").read_bytes() == CONTENT[:CUT]
    fetch(0)
    require(CONTENT)
    assert unproven.ranges == ["", f"bytes={CUT}-"]


def test_fault_61_a_part_of_another_address_is_begun_anew(server, place):
    server.cut_after = CUT
    published = server.publish(CONTENT)
    with pytest.raises(MachineError):
        download(published, Path("file"))
    moved = replace(published, url=f"{server.url}?again")
    assert download(moved, Path("file")).read_bytes() == CONTENT
    assert server.ranges == ["", ""]


@pytest.mark.parametrize("note", [b"", b"{}", b"[]", b'{"url": 1, "size": "x", "version": {}}'])
def test_fault_61_a_damaged_note_of_where_the_part_is_from_proves_nothing(
    place, capsys, unproven, note
):
    unproven.cut_after = CUT
    refuses(capsys)
    Path("data/masks.zip.part.json").write_bytes(note)
    fetch(0)
    require(CONTENT)
    assert unproven.ranges == ["", ""]


def encrypted_server(folder: Path, monkeypatch) -> WebServer:
    """One that this process trusts."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *files, *names], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate.pem"))
    server = WebServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def test_fault_61_encryption_is_not_given_up_on_the_way(server, place, monkeypatch):
    published = server.publish(CONTENT)
    with encrypted_server(place, monkeypatch) as encrypted:
        encrypted.content, encrypted.headers = CONTENT, {}
        address = encrypted.url.replace("http:", "https:")
        server.leads_to = address
        # From here to there it may lead.
        assert download(published, Path("safer")).read_bytes() == CONTENT
        server.leads_to, encrypted.leads_to = None, server.url
        with pytest.raises(MachineError, match=r"leads from https to http://.*, which is refused"):
            download(replace(published, url=address), Path("file"))
        encrypted.shutdown()
    assert server.ranges == [""]
    server.leads_to = "ftp://127.0.0.1/file"
    with pytest.raises(MachineError, match="leads from http to ftp://"):
        download(published, Path("file"))


def test_fault_61_a_file_put_there_by_hand_is_compared_too(server, place):
    published = server.publish(CONTENT)
    Path("file").write_bytes(CHANGED)
    with pytest.raises(
        ValueError, match=r"file has sha256 .*, published was .*; delete it"
    ) as error:
        download(published, Path("file"))
    assert error.value.exit_code == 3  # pyright: ignore[reportAttributeAccessIssue]
    Path("file").write_bytes(CONTENT)
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges == []


def test_fault_61_an_archive_put_there_by_hand_is_opened_before(place, capsys, unproven):
    Path("data").mkdir()
    Path("data/masks.zip").write_bytes(b"<html>log in</html>")
    fetch(3)
    assert "masks.zip is not what its name says" in capsys.readouterr().err
    assert not list(Path("data").rglob("*.png"))


def test_fault_61_commands_that_run_together_fetch_and_unpack_once(place, unproven, monkeypatch):
    unproven.delay = 0.1
    write, names = unpacking._write, Path("written")

    def noted(open_member, name, path):
        with names.open("a") as file:
            file.write(f"{name}\n")
        time.sleep(0.05)
        write(open_member, name, path)

    monkeypatch.setattr(unpacking, "_write", noted)
    words = ["data", "download", "coco_stuff", "--data-root", "data"]
    children = [fork(lambda: main(words), stderr=Path(f"said{n}")) for n in range(3)]
    assert [exit_code(child) for child in children] == [0, 0, 0]
    require(CONTENT)
    assert len(names.read_text().split()) == 3
    assert len(unproven.ranges) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_fault_61_a_command_that_is_ended_leaves_a_part_that_goes_on(place, unproven, number):
    unproven.pause = 0.01
    words = ["data", "download", "coco_stuff", "--data-root", "data"]
    child = fork(lambda: main(words), stderr=Path("said"))
    part = Path("data/masks.zip.part")
    while not part.is_file() or not part.stat().st_size:
        time.sleep(0.01)
    os.kill(child, number)
    assert exit_code(child) == (130 if number == signal.SIGINT else -9)
    came = part.stat().st_size
    assert 0 < came < len(CONTENT)
    unproven.pause = 0.0
    fetch(0)
    require(CONTENT)
    assert unproven.ranges == ["", f"bytes={came}-"]
