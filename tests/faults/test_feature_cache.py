"""Test that damaged or outdated cached features are computed again."""

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    expect_error,
    fork,
    make_probe_args,
    picture,
    records,
    voc,
    wait_until,
)

VALUES = torch.randn(3, 100, 4, 4, 16, generator=torch.Generator().manual_seed(0)).half()
SMALL = {"tier": "disk", "epochs": 1, "train_images": 16}


def probe_from_disk(workdir: Path, out: str, cache: str = "cache") -> list[str]:
    more = ["probe.tier=disk", f"probe.cache={workdir / cache}", "--layer", "0,1"]
    return [
        *make_probe_args("segmentation", "voc2012", workdir, *more),
        "--overwrite",
        "--out",
        out,
    ]


def feature_file(folder: Path, name: str = "some") -> FeatureFile:
    return FeatureFile(folder, {"name": name}, tuple(VALUES.shape))


def write_values(store_batch: Callable[..., None], scale: float = 1.0) -> None:
    for layer in range(3):
        store_batch(layer, range(100), VALUES[layer], torch.full((100,), scale))


def assert_complete(file: FeatureFile) -> None:
    stored = file.load(print)
    assert stored is not None
    assert torch.equal(stored[0], VALUES)


def stored_file(cache: Path, ending: str = "npy") -> Path:
    (path,) = (cache / "features").glob(f"*.{ending}")
    return path


def flip_a_bit(content: bytes, share: float) -> bytes:
    changed = bytearray(content)
    changed[int(share * (len(content) - 1))] ^= 4
    return bytes(changed)


# Size in bytes of the features of an image in one layer. They follow a header of 128 bytes.
ROW = 4 * 4 * 24 * 2
DAMAGES = {
    "a bit of the array's header": ("npy", lambda whole: flip_a_bit(whole, 0.0)),
    "a bit of the first layer": ("npy", lambda whole: flip_a_bit(whole, 0.1)),
    "a bit at the end": ("npy", lambda whole: flip_a_bit(whole, 1.0)),
    "zeros": ("npy", lambda whole: bytes(len(whole))),
    "zeros for features": ("npy", lambda whole: whole[:128] + bytes(len(whole) - 128)),
    "two exchanged images": (
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
}


def test_any_damage_to_stored_features_is_found_before_training(tmp_path):
    probe, messages = quick_probe(**SMALL, cache=str(tmp_path)), []
    context = replace(probe_context(tmp_path), say=messages.append)
    before = score_values(probe.run(context))
    contents = {ending: stored_file(tmp_path, ending).read_bytes() for ending in ("npy", "json")}
    for name, (ending, damage) in DAMAGES.items():
        messages.clear()
        path = stored_file(tmp_path, ending)
        path.write_bytes(damage(contents[ending]))
        assert path.read_bytes() != contents[ending], name

        features = SegmentationRun(probe, context).features()

        assert features.passes == 1, name
        assert len([line for line in messages if path.stem in line]) == 1, name
        for other, content in contents.items():
            assert stored_file(tmp_path, other).read_bytes() == content, name
    messages.clear()
    assert score_values(probe.run(context)) == before
    stem = stored_file(tmp_path).stem
    assert not [line for line in messages if stem in line]


@pytest.fixture
def make_foreign(monkeypatch) -> Callable[[str, Path], None]:
    def replace_by_pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def replace_by_link(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    def change_owner(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
            return
        theirs, fstat = path.stat().st_ino, os.fstat

        def changed(descriptor: int) -> os.stat_result:
            status = list(fstat(descriptor))
            status[4] += (status[1] == theirs) * 7
            return os.stat_result(status)

        monkeypatch.setattr(os, "fstat", changed)

    changes = {"pipe": replace_by_pipe, "link": replace_by_link, "other owner": change_owner}
    changes["writable by all"] = lambda path: path.chmod(0o666)
    return lambda kind, path: changes[kind](path)


@pytest.mark.parametrize("kind", ["pipe", "link", "other owner", "writable by all"])
def test_feature_files_that_others_could_have_written_are_unused(tmp_path, make_foreign, kind):
    probe, messages = quick_probe(**SMALL, cache=str(tmp_path)), []
    context = replace(probe_context(tmp_path), say=messages.append)
    SegmentationRun(probe, context).features()
    for ending in ("npy", "json"):
        path = stored_file(tmp_path, ending)
        # The content of the file is correct.
        whole = path.read_bytes()
        make_foreign(kind, path)
        messages.clear()

        assert SegmentationRun(probe, context).features().passes == 1

        assert len([line for line in messages if path.stem in line]) == 1
        assert path.is_file()
        assert not path.is_symlink()
        assert not path.stat().st_mode & stat.S_IWOTH
        assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["pipe", "link", "other owner"])
def test_logs_and_digests_that_others_could_have_written_are_unused(
    tmp_path, monkeypatch, make_foreign, kind
):
    messages: list[str] = []

    def journal() -> Journal:
        return Journal(tmp_path, "heads", {}, say=messages.append, is_cache=True)

    first = journal()
    first.replace({"step": 3})
    make_foreign(kind, first.path)
    assert journal().entries == []
    (line,) = messages
    assert str(first.path) in line

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ssl_bench.data.files.fingerprints.RACY_NS", -(10**18))
    file = tmp_path / "image"
    file.write_bytes(b"pixels")

    def cached(digest: bytes) -> bytes:
        cache = DigestCache(tmp_path)
        found = cache.get_or_compute("image", [file], lambda: digest)
        cache.save()
        return found

    assert cached(bytes(32)) == cached(b"1" * 32) == bytes(32)
    (path,) = (tmp_path / "cache/ssl-bench/digests").iterdir()
    make_foreign(kind, path)
    assert cached(b"1" * 32) == b"1" * 32


@pytest.mark.parametrize("is_stored", [False, True])
def test_features_in_use_stay_the_same_if_their_file_changes(tmp_path, is_stored):
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


@pytest.mark.slow
def test_features_of_other_weights_or_images_are_computed_again(workdir):
    base = voc(workdir)

    def scores(out: str, cache: str = "cache") -> set[tuple[str, float]]:
        assert main(probe_from_disk(workdir, out, cache)) == 0
        return {(record.metric, record.value) for record in records(out)}

    before = scores("before")
    encoder_file(workdir / "encoder.safetensors", seed=1)
    other = scores("weights")
    assert other == scores("fresh weights", "empty") != before
    picture(99).save(base / "JPEGImages/t1.jpg", quality=90)
    assert scores("images") == scores("fresh images", "emptier") != other


@pytest.fixture
def small_disk(workdir) -> Iterator[Path]:
    folder = workdir / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_up(folder: Path) -> None:
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        for _ in range(1000):
            file.write(bytes(4096))


def test_a_full_disk_is_named_before_anything_is_computed(workdir, capsys, monkeypatch, small_disk):
    voc(workdir)
    fill_up(small_disk)
    monkeypatch.setattr("probes.features.tiers.extract_float16", None)

    message = expect_error(capsys, probe_from_disk(workdir, "out", "disk"), 5)

    assert "No space left on device" in message
    assert "probe.cache=FOLDER" in message
    assert list((small_disk / "features").iterdir()) == []


def test_a_disk_that_others_fill_meanwhile_does_no_harm(small_disk):
    def fill(store_batch: Callable[..., None]) -> None:
        fill_up(small_disk)
        write_values(store_batch, scale=2.0**-126)

    def write() -> None:
        feature_file(small_disk).write(fill)

    assert exit_code(fork(write)) == 0
    assert_complete(feature_file(small_disk))


@pytest.mark.slow
def test_processes_with_the_same_id_may_write_the_same_features(tmp_path, monkeypatch):
    # Processes in two containers or on two hosts may have the same id.
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def write(number: int) -> None:
        def fill(store_batch: Callable[..., None]) -> None:
            time.sleep(0.003 * (number % 3))
            write_values(store_batch)

        for _ in range(6):
            blocks, _ = feature_file(tmp_path).write(fill)
            assert torch.equal(blocks, VALUES)
            assert_complete(feature_file(tmp_path))

    children = [fork(lambda n=n: write(n)) for n in range(4)]

    assert [exit_code(child) for child in children] == [0] * 4
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}
    (path,) = tmp_path.glob("*.npy")
    assert (np.load(path) == VALUES.numpy()).all()
    assert json.loads(path.with_suffix(".json").read_text())["header"]["name"] == "some"


def test_only_old_files_of_killed_writers_are_removed(tmp_path):
    def die(_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        feature_file(tmp_path).write(die)

    assert exit_code(fork(write)) == -signal.SIGKILL
    orphans = [*tmp_path.iterdir()]
    assert len(orphans) == 2

    def write_another(store_batch: Callable[..., None]) -> None:
        living = [path for path in tmp_path.iterdir() if path not in orphans]
        for path in (*orphans, *living):
            os.utime(path, (0, 0))
        feature_file(tmp_path).write(write_values)
        assert not any(path.exists() for path in orphans)
        assert all(path.exists() for path in living)
        write_values(store_batch)

    feature_file(tmp_path, "another").write(write_another)
    assert_complete(feature_file(tmp_path, "another"))


def read_state(path: Path) -> dict[str, Any]:
    # Another process may be writing the journal.
    try:
        entries = Journal(path.parent, "heads", {}, say=print).read(path)
    except OSError:
        return {}
    return entries[-1] if entries else {}


@pytest.mark.slow
def test_a_killed_training_of_heads_continues_from_its_journal(workdir):
    voc(workdir)
    streamed = ["probe.tier=stream", f"probe.cache={workdir / 'cache'}"]

    def words(out: str, minutes: float) -> list[str]:
        more = [*streamed, "probe.training.epochs=40", f"probe.keep_minutes={minutes}"]
        return make_probe_args("segmentation", "voc2012", workdir, *more, "--out", out)

    assert main(words("through", 10.0)) == 0
    folder = workdir / "cache" / "heads"
    child = fork(lambda: main(words("killed", 0.0)), stderr=workdir / "stderr")
    wait_until(
        lambda: any(read_state(path).get("step", 0) > 5 for path in folder.glob("heads_*.jsonl"))
    )
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert not list(Path("killed/records").rglob("*.json"))
    # The process may have been killed while it wrote a temporary file.
    (folder / f".ssl-bench-{7:032x}.tmp").touch()
    for path in folder.glob(".*.tmp"):
        os.utime(path, (0, 0))

    assert main(words("killed", 10.0)) == 0

    assert not list(folder.iterdir())
    values = [{(r.metric, r.value) for r in records(out)} for out in ("through", "killed")]
    assert values[0] == values[1]
