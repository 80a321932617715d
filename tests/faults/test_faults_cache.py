"""Rows 56 and 57 of the catalogue of faults: features on disk."""

import json
import os
import signal
import stat
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
from probes.features.tiers import FeatureFile
from probes.segmentation import SegmentationRun
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.fingerprints import DigestCache
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


def write_values(put: Callable[..., None], scale: float = 1.0) -> None:
    for layer in range(3):
        put(layer, range(100), VALUES[layer], torch.full((100,), scale))


def assert_whole(file: FeatureFile) -> None:
    stored = file.load(print)
    assert stored is not None
    assert torch.equal(stored[0], VALUES)


def stored_file(cache: Path, ending: str = "npy") -> Path:
    (path,) = (cache / "features").glob(f"*.{ending}")
    return path


def flipped(content: bytes, place: float) -> bytes:
    """One bit is another, at a share of the file's length."""
    altered = bytearray(content)
    altered[int(place * (len(content) - 1))] ^= 4
    return bytes(altered)


# The bytes of one image in one layer of the array, which follows a header of 128 bytes.
ROW = 4 * 4 * 24 * 2
DAMAGES = {
    "a bit of the array's header": ("npy", lambda whole: flipped(whole, 0.0)),
    "a bit of the first layer": ("npy", lambda whole: flipped(whole, 0.1)),
    "a bit at the end": ("npy", lambda whole: flipped(whole, 1.0)),
    "zeros": ("npy", lambda whole: bytes(len(whole))),
    "zeros for features": ("npy", lambda whole: whole[:128] + bytes(len(whole) - 128)),
    "two images for each other": (
        "npy",
        lambda whole: (
            whole[:128] + whole[128 + ROW :][:ROW] + whole[128:][:ROW] + whole[128 + 2 * ROW :]
        ),
    ),
    "cut": ("npy", lambda whole: whole[:-5]),
    "longer": ("npy", lambda whole: whole + b"\0"),
    "empty": ("npy", lambda _: b""),
    "another header": ("json", lambda whole: whole.replace(b'"transform"', b'"dransform"')),
    "another scale": ("json", lambda whole: whole.replace(b"[1.0, ", b"[2.0, ", 1)),
    "another checksum": ("json", lambda whole: whole.replace(b'"checksum": ', b'"checksum": 1')),
    "fewer scales": ("json", lambda whole: whole.replace(b"1.0, ", b"", 1)),
    "no scales": ("json", lambda whole: whole.replace(b'"scales"', b'"stales"')),
    "no JSON": ("json", lambda whole: whole[:-5]),
    "other JSON": ("json", lambda _: b"[]"),
    "an empty JSON file": ("json", lambda _: b""),
}


def test_fault_56_any_damage_to_stored_features_is_found_before_training(tmp_path):
    probe, said = quick_probe(**SMALL, cache=str(tmp_path)), []
    context = replace(probe_context(tmp_path), say=said.append)
    before = score_values(probe.run(context))
    contents = {ending: stored_file(tmp_path, ending).read_bytes() for ending in ("npy", "json")}
    for name, (ending, damage) in DAMAGES.items():
        said.clear()
        path = stored_file(tmp_path, ending)
        path.write_bytes(damage(contents[ending]))
        assert path.read_bytes() != contents[ending], name

        features = SegmentationRun(probe, context).features()

        assert features.passes == 1, name
        assert len([line for line in said if path.stem in line]) == 1, name
        for each, content in contents.items():
            assert stored_file(tmp_path, each).read_bytes() == content, name
        said.clear()
        assert score_values(probe.run(context)) == before, name
        assert not [line for line in said if path.stem in line], name


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def to_writable_by_all(path: Path) -> None:
    path.chmod(0o666)


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


@pytest.mark.parametrize("ending", ["npy", "json"])
@pytest.mark.parametrize("kind", ["a pipe", "a link", "another user's", "writable by all"])
def test_feature_files_that_others_could_have_written_are_not_used(
    tmp_path, other_owner, kind, ending
):
    probe, said = quick_probe(**SMALL, cache=str(tmp_path)), []
    context = replace(probe_context(tmp_path), say=said.append)
    before = score_values(probe.run(context))
    path = stored_file(tmp_path, ending)
    # The content of the file is correct.
    whole = path.read_bytes()
    change = {
        "a pipe": to_pipe,
        "a link": to_link,
        "another user's": other_owner,
        "writable by all": to_writable_by_all,
    }[kind]
    change(path)
    said.clear()

    assert score_values(probe.run(context)) == before

    assert len([line for line in said if path.stem in line]) == 1
    assert path.is_file()
    assert not path.is_symlink()
    assert not path.stat().st_mode & stat.S_IWOTH
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
    monkeypatch.setattr("ssl_bench.data.files.fingerprints.RACY_NS", -(10**18))
    file = tmp_path / "image"
    file.write_bytes(b"pixels")

    def recalled(digest: bytes) -> bytes:
        cache = DigestCache(tmp_path)
        found = cache.get_or_compute("image", [file], lambda: digest)
        cache.save()
        return found

    assert recalled(bytes(32)) == recalled(b"1" * 32) == bytes(32)
    (path,) = (tmp_path / "cache/ssl-bench/digests").iterdir()
    {"a pipe": to_pipe, "a link": to_link, "another user's": other_owner}[kind](path)

    assert recalled(b"1" * 32) == b"1" * 32


@pytest.mark.parametrize("is_stored", [False, True])
def test_fault_56_features_that_are_deleted_or_replaced_while_they_are_used_stay_the_same(
    tmp_path, is_stored
):
    probe, context = quick_probe(**SMALL, cache=str(tmp_path)), probe_context(tmp_path)
    if is_stored:
        SegmentationRun(probe, context).features()
    features = SegmentationRun(probe, context).features()
    assert features.passes == int(not is_stored)
    read = features.reader([3, 1], torch.device("cpu"))
    chosen = torch.arange(16).flip(0).split(5)
    before = [batch.features for batch in read(chosen)]
    path = stored_file(tmp_path)
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))

    after = [batch.features for batch in read(chosen)]

    assert before[0].any()
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
    # The next run finds the replacement.
    assert SegmentationRun(probe, context).features().passes == 1


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
    monkeypatch.setattr("probes.features.tiers.extract_float16", None)

    said = fails(capsys, from_disk(place, "out", "disk"), 5)

    assert "No space left on device" in said
    assert "probe.cache=FOLDER" in said
    assert list((small_disk / "features").iterdir()) == []


def test_fault_57_a_disk_that_others_fill_meanwhile_kills_nobody(small_disk):
    def fill(put: Callable[..., None]) -> None:
        with pytest.raises(OSError, match="No space left"):
            use_up(small_disk)
        write_values(put, scale=2.0**-126)

    def write() -> None:
        file_of(small_disk).write(fill)

    assert exit_code(fork(write)) == 0
    assert_whole(file_of(small_disk))


def test_fault_57_processes_of_one_number_that_keep_the_same_features_all_end_right(
    tmp_path, monkeypatch
):
    # As in two containers, or on two hosts.
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def write(number: int) -> None:
        def fill(put: Callable[..., None]) -> None:
            time.sleep(0.003 * (number % 3))
            write_values(put)

        for _ in range(10):
            blocks, _ = file_of(tmp_path).write(fill)
            assert torch.equal(blocks, VALUES)
            assert_whole(file_of(tmp_path))

    children = [fork(lambda n=n: write(n)) for n in range(6)]

    assert [exit_code(child) for child in children] == [0] * 6
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}
    assert_whole(file_of(tmp_path))


def test_fault_57_what_a_killed_writer_left_goes_after_an_hour_and_of_a_living_one_never(tmp_path):
    def die(_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        file_of(tmp_path).write(die)

    assert exit_code(fork(write)) == -signal.SIGKILL
    orphans = [*tmp_path.iterdir()]
    assert len(orphans) == 2

    def write_another(put: Callable[..., None]) -> None:
        living = [path for path in tmp_path.iterdir() if path not in orphans]
        for path in (*orphans, *living):
            os.utime(path, (0, 0))
        file_of(tmp_path).write(write_values)
        assert not any(path.exists() for path in orphans)
        assert all(path.exists() for path in living)
        write_values(put)

    file_of(tmp_path, "another").write(write_another)
    assert_whole(file_of(tmp_path, "another"))


def test_stored_features_are_a_numpy_array_that_anybody_can_load(tmp_path):
    file_of(tmp_path).write(write_values)
    (path,) = tmp_path.glob("*.npy")
    assert (np.load(path) == VALUES.numpy()).all()
    assert json.loads(path.with_suffix(".json").read_text())["header"]["name"] == "some"


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
