"""Rows 56 and 57 of the catalogue of faults: features on disk."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.features.journal import Journal
from probes.features.tiers import FeatureFile, OpenFeatures
from probes.segmentation import SegmentationRun
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import DigestCache
from ssl_bench.errors import MachineError
from tests.support.colours import probe_context, quick_probe, score_values
from tests.support.faults import (
    encoder_file,
    exit_code,
    fails,
    fork,
    probing,
    records,
    voc,
)

VALUES = torch.randn(3, 100, 4, 4, 16, generator=torch.Generator().manual_seed(0)).half()
SMALL = {"tier": "disk", "epochs": 1, "train_images": 16}


def from_disk(place: Path, out: str, cache: str = "cache") -> list[str]:
    more = ["probe.tier=disk", f"probe.cache={place / cache}", "--layer", "0,1"]
    return [*probing("segmentation", "voc2012", place, *more), "--overwrite", "--out", out]


def file_of(folder: Path, name: str = "some") -> FeatureFile:
    return FeatureFile(folder, {"name": name}, tuple(VALUES.shape))


def assert_whole(file: FeatureFile) -> None:
    reader = file.open()
    assert reader is not None
    found = np.empty(VALUES.shape, np.float16)
    for layer, entry in np.ndindex(3, 100):
        reader.read(layer, entry, found[layer, entry])
    assert (found == VALUES.numpy()).all()


def kept(cache: Path) -> Path:
    (path,) = (cache / "features").iterdir()
    return path


def flipped(content: bytes, place: float) -> bytes:
    """One bit is another, at a share of the file's length."""
    altered = bytearray(content)
    altered[int(place * (len(content) - 1))] ^= 4
    return bytes(altered)


DAMAGES = {
    "a bit of the first layer": lambda whole: flipped(whole, 0.001),
    "a bit of the last layer": lambda whole: flipped(whole, 0.8),
    "a bit of the header": lambda whole: whole.replace(b'"transform"', b'"dransform"'),
    "a bit of the checksums": lambda whole: flipped(whole, whole.index(b"{") / len(whole) - 0.001),
    "a bit at the end": lambda whole: flipped(whole, 1.0),
    "zeros": lambda whole: bytes(len(whole)),
    "zeros for features": lambda whole: bytes(2 * 4 * 16 * 12 * 2) + whole[2 * 4 * 16 * 12 * 2 :],
    "two images for each other": lambda whole: whole[384:768] + whole[:384] + whole[768:],
    "cut": lambda whole: whole[:-5],
    "longer": lambda whole: whole + b"\0",
    "empty": lambda _: b"",
}  # fmt: skip


def test_fault_56_any_damage_to_kept_features_is_said_and_they_are_computed_again(tmp_path):
    probe, said = quick_probe(**SMALL, cache=str(tmp_path)), []
    context = replace(probe_context(tmp_path), say=said.append)
    before = score_values(probe.run(context))
    path = kept(tmp_path)
    whole = path.read_bytes()
    for name, damage in DAMAGES.items():
        said.clear()
        path.write_bytes(damage(whole))
        assert path.read_bytes() != whole

        assert score_values(probe.run(context)) == before, name

        (line,) = [line for line in said if str(path) in line]
        assert line.endswith("again"), name
        assert path.read_bytes() == whole, name


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.fixture
def other_owner(monkeypatch) -> Callable[[Path], None]:
    """Gives a file to another user, or makes it look like that where only root may."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
            return
        theirs, fstat = path.stat().st_ino, os.fstat

        def changed(descriptor: int) -> os.stat_result:
            status = list(fstat(descriptor))
            status[4] += (status[1] == theirs) * 7
            return os.stat_result(status)

        monkeypatch.setattr(os, "fstat", changed)

    return give


@pytest.mark.parametrize("kind", ["a pipe", "a link", "another user's"])
def test_a_cache_file_that_others_put_there_is_computed_again(tmp_path, other_owner, kind):
    probe, said = quick_probe(**SMALL, cache=str(tmp_path)), []
    context = replace(probe_context(tmp_path), say=said.append)
    before = score_values(probe.run(context))
    path = kept(tmp_path)
    # Their features are well-formed, and others.
    whole = path.read_bytes()
    {"a pipe": to_pipe, "a link": to_link, "another user's": other_owner}[kind](path)
    said.clear()

    assert score_values(probe.run(context)) == before

    (line,) = [line for line in said if str(path) in line]
    assert line.endswith("again")
    assert path.is_file()
    assert not path.is_symlink()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["a pipe", "a link", "another user's"])
def test_unfinished_work_that_others_put_there_is_not_continued(tmp_path, other_owner, kind):
    said: list[str] = []

    def journal() -> Journal:
        return Journal(tmp_path, "heads", {}, say=said.append, is_cache=True)

    first = journal()
    first.replace({"step": 3})
    {"a pipe": to_pipe, "a link": to_link, "another user's": other_owner}[kind](first.path)

    assert journal().entries == []

    (line,) = said
    assert str(first.path) in line


@pytest.mark.parametrize("kind", ["a pipe", "a link", "another user's"])
def test_kept_digests_that_others_put_there_are_ignored(tmp_path, monkeypatch, other_owner, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ssl_bench.data.files.fingerprints._RACY_NS", -(10**18))
    file = tmp_path / "image"
    file.write_bytes(b"pixels")

    def recalled(digest: bytes) -> bytes:
        cache = DigestCache(tmp_path)
        found = cache.recall("image", [file], lambda: digest)
        cache.save()
        return found

    assert recalled(bytes(32)) == recalled(b"1" * 32) == bytes(32)
    (path,) = (tmp_path / "cache/ssl-bench/digests").iterdir()
    {"a pipe": to_pipe, "a link": to_link, "another user's": other_owner}[kind](path)

    assert recalled(b"1" * 32) == b"1" * 32


def test_fault_56_features_that_change_between_two_readings_are_never_used(tmp_path):
    # Entries larger than a buffer of the operating system's reader.
    probe, said = quick_probe(**SMALL, image_size=128, cache=str(tmp_path)), []
    context = probe_context(tmp_path)
    features = SegmentationRun(probe, replace(context, say=said.append)).features()
    read = features.reader([3, 1], torch.device("cpu"))
    chosen = torch.arange(16).flip(0).split(5)

    before = [batch.features for batch in read(chosen)]
    path = kept(tmp_path)
    content = np.fromfile(path, np.uint8)
    # In place, as a disk does it: whoever has the file open sees it.
    (content ^ 255).tofile(path)
    said.clear()

    after = [batch.features for batch in read(chosen)]
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
    assert len(said) == 1
    assert features.passes == 2


def test_fault_56_a_disk_that_gives_back_other_bytes_right_away_is_an_error(tmp_path, monkeypatch):
    put = OpenFeatures.put

    def put_and_lie(writer: OpenFeatures, *values: object) -> None:
        put(writer, *values)
        writer.entries["checksum"].fill(1)

    monkeypatch.setattr(OpenFeatures, "put", put_and_lie)

    with pytest.raises(MachineError, match=r"right after they were written; choose another"):
        list(quick_probe(**SMALL, cache=str(tmp_path)).run(probe_context(tmp_path)))


@pytest.fixture
def small_disk(place) -> Iterator[Path]:
    """A file system of its own, of 256 KiB."""
    folder = place / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def use_up(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_fault_57_a_disk_that_is_full_says_so_before_anything_is_computed(
    place, capsys, monkeypatch, small_disk
):
    voc(place)
    with pytest.raises(OSError, match="No space left"):
        use_up(small_disk)
    monkeypatch.setattr("probes.features.tiers.extract", None)

    said = fails(capsys, from_disk(place, "out", "disk"), 5)

    assert "No space left on device" in said
    assert "probe.cache=FOLDER" in said
    assert list((small_disk / "features").iterdir()) == []


def test_fault_57_a_disk_that_others_fill_meanwhile_kills_nobody(small_disk):
    def write() -> None:
        with file_of(small_disk).writing() as writer:
            with pytest.raises(OSError, match="No space left"):
                use_up(small_disk)
            for layer in range(3):
                writer.put(layer, range(100), VALUES[layer], torch.ones(100))

    assert exit_code(fork(write)) == 0
    assert_whole(file_of(small_disk))


def test_fault_57_processes_of_one_number_that_keep_the_same_features_all_end_right(
    tmp_path, monkeypatch
):
    # As in two containers, or on two hosts.
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def write(number: int) -> None:
        for _ in range(10):
            with file_of(tmp_path).writing() as writer:
                for layer in range(3):
                    time.sleep(0.001 * (number % 3))
                    writer.put(layer, range(100), VALUES[layer], torch.ones(100))
            assert_whole(file_of(tmp_path))

    children = [fork(lambda n=n: write(n)) for n in range(6)]

    assert [exit_code(child) for child in children] == [0] * 6
    assert [path.suffix for path in tmp_path.iterdir()] == [".features"]
    assert_whole(file_of(tmp_path))


def test_fault_57_what_a_killed_writer_left_goes_after_an_hour_and_of_a_living_one_never(tmp_path):
    def die() -> None:
        with file_of(tmp_path).writing():
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(fork(die)) == -signal.SIGKILL
    (orphan,) = tmp_path.iterdir()
    with file_of(tmp_path, "another").writing():
        living = next(path for path in tmp_path.iterdir() if path != orphan)
        for path in (orphan, living):
            os.utime(path, (0, 0))

        with file_of(tmp_path).writing():
            assert not orphan.exists()
            assert living.exists()


def state_of(path: Path) -> dict[str, Any]:
    """What is written there at this moment, if anything still is."""
    try:
        entries = Journal(path.parent, "heads", {}, say=print).read(path)
    except OSError:
        return {}
    return entries[-1] if entries else {}


@pytest.mark.slow
def test_fault_57_a_killed_stream_loses_what_it_had_not_written_and_no_more(place):
    voc(place)
    encoder_file(place / "encoder.safetensors")
    streamed = ["probe.tier=stream", f"probe.cache={place / 'cache'}", "probe.training.epochs=60"]

    def words(out: str, minutes: float) -> list[str]:
        more = [*streamed, f"probe.keep_minutes={minutes}", "--out", out]
        return probing("segmentation", "voc2012", place, *more)

    assert main(words("through", 10.0)) == 0
    folder, latest = place / "cache" / "heads", time.monotonic() + 120
    # Not forked: the threads of this process's torch would be missing there.
    with subprocess.Popen([sys.executable, "-m", "ssl_bench", *words("killed", 0.0)]) as child:
        while not any(state_of(path).get("step", 0) > 5 for path in folder.glob("heads_*.jsonl")):
            assert time.monotonic() < latest
            time.sleep(0.002)
        child.kill()
    assert not list(Path("killed/records").rglob("*.json"))
    # It may be killed while it writes; what nobody touches for a while is nobody's.
    (folder / f".ssl-bench-{7:032x}.tmp").touch()
    for path in folder.glob(".*.tmp"):
        os.utime(path, (0, 0))

    assert main(words("killed", 10.0)) == 0

    assert not list(folder.iterdir())
    values = [{(r.metric, r.value) for r in records(out)} for out in ("through", "killed")]
    assert values[0] == values[1]
